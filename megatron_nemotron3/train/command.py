"""`nemotron3 train`: its options; the work is in `training`. Imports neither torch nor megatron."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.trust import require_trusted, trusting
from megatron_nemotron3.common.config_file import config_text
from megatron_nemotron3.common.options import add_option, add_options, device_option, from_arguments
from megatron_nemotron3.common.processes import exit_at_interrupt
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.launch import Launch, boosting, check, flags, manifest, to_argv
from megatron_nemotron3.launch.command import (
    add_launch,
    chosen_emulation,
    chosen_layout,
    chosen_schedule,
    print_warnings,
)
from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.launch.plan.state import require_divisible
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import ModelOptions, chosen_model
from megatron_nemotron3.models.lora import in_environment
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.train.inputs import START, TrainOptions, require_inputs, require_tracking
from megatron_nemotron3.train.isolation import ISOLATE
from megatron_nemotron3.train.monitor import settings as monitor
from megatron_nemotron3.train.teacher import settings as distillation
from megatron_nemotron3.train.teacher.settings import rows_of_teacher

#: Option of Megatron -> the option of this command that sets it.
_OWN = {
    "--save": "--output",
    "--train-iters": "--steps",
    "--train-samples": "--steps",
    "--data-path": "--data-path before --",
    "--tokenizer-model": "--tokenizer",
    "--sft": "--conversations before --",
    "--pretrained-checkpoint": "--pretrained before --",
}


def register(commands: Any) -> None:
    """Add `nemotron3 train`."""
    train = commands.add_parser("train")
    add_options(train, ModelOptions)
    add_launch(train, precision=None)
    add_option(train, "device", device_option())
    add_options(train, TrainOptions)
    (start,) = [group for group in train._action_groups if group.title == START]
    manifest.add_change(start)
    train.set_defaults(run=train_command)


def train_command(options: argparse.Namespace) -> int:
    """Train; returns the exit status of `training.train`."""
    with trusting(options.trust_checkpoint):
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    with exit_at_interrupt("nemotron3 train"):
        from megatron_nemotron3.common.parser import resolve_device
        from megatron_nemotron3.train.processes import shortages
        from megatron_nemotron3.train.training import TrainRequest, train_interruptibly

    config = chosen_model(options)
    if (lora := in_environment()) is not None and lora.base is not None:
        require_trusted(folders.locate_one(Path(lora.base)).folder)
    require_own_options(options.extra)
    teachers = _distillation(options)
    split = _teachers_data(options, teachers)
    require_inputs(options)
    own = from_arguments(TrainOptions, options)
    require_tracking(own.tracking, options.extra)
    chosen_emulation(options)  # before torch is imported
    log_precision = _log_interval(options)
    if options.backend == "te":
        from megatron_nemotron3.layers.backend import te_problem

        if problem := te_problem():
            raise ValueError(f"--backend te: {problem}")
    with exit_at_interrupt("nemotron3 train"):  # imports torch
        device = resolve_device(options.device, "megatron.core")
    if device == "cpu":
        quiet_on_cpu()
    launch = chosen_launch(
        options,
        config,
        device,
        torch_only=log_precision is not None,
        conversations=bool(options.conversations),
    )
    if lora is not None:
        require_divisible(launch, lora)
    if options.isolate_documents and launch.schedule is not None:
        launch = replace(launch, schedule=replace(launch.schedule, micro_batch_size=1))
    if log_precision is not None and (file := launch.te_precision_config_file) and not launch.emulate:
        # How a plain run is measured, not computed.
        extra = ("--te-precision-config-file", file, *launch.extra)
        launch = replace(launch, extra=extra, te_precision_config_file=None)
    if boosting.in_environment() is not None:
        boosting.requested(to_argv(flags(launch)), distilled=bool(teachers))
    if device == "cpu" and "--optimizer-cpu-offload" in launch.options:
        raise ValueError(
            "--optimizer-cpu-offload: the optimizer is on a CPU already, where its copies of the parameters "
            "would be no leaves, which torch's Adam refuses: drop it"
        )
    print_warnings(launch, options.extra, ("schedule-unknown",))
    if device == "cpu" and not any(rule.severity == "error" for rule in check(launch)):
        for shortage in shortages(launch):
            print(f"warning: {shortage}", file=sys.stderr)
    if options.monitor is not None:
        monitor.parse_interval(str(options.monitor))  # raises if it is none
    output = own.output or Path("runs") / config.name
    request = TrainRequest(
        launch=launch,
        device=device,
        output=output,
        options=own,
        log_precision=log_precision,
        changes=tuple(options.change),
        distill=teachers,
        split=split,
        command=options.command_line,
        config_text=config_text(output, options.given, options.extra, "train"),
    )
    return train_interruptibly(request)


def chosen_launch(
    options: argparse.Namespace,
    config: Nemotron3Config,
    device: str,
    *,
    torch_only: bool = False,
    conversations: bool = False,
) -> Launch:
    """Return the launch for the options of `launch.command.add_launch`."""
    from megatron_nemotron3.train.training import schedule_of

    layout, emulated, on_cpu = chosen_layout(options), chosen_emulation(options), device == "cpu"
    # On a CPU there is only the torch backend, and it alone emulates and measures. Naming it makes flags fit.
    torch_only = options.backend == "auto" and bool(torch_only or on_cpu or options.emulate)
    return Launch(
        config=config,
        layout=layout,
        precision=options.precision or (emulated.format if emulated else "fp32" if on_cpu else "bf16"),
        backend="torch" if torch_only else options.backend,
        schedule=schedule_of(config, layout, conversations=conversations, **chosen_schedule(options)),
        extra=tuple(options.extra),
        te_precision_config_file=options.te_precision_config_file,
        emulate=emulated,
    )


def _distillation(options: argparse.Namespace) -> distillation.Distillations:
    if options.isolate_documents and (options.teacher or options.distill or distillation.in_environment()):
        raise ValueError(f"{ISOLATE} and --teacher do not go together: drop one")
    if not options.teacher and not options.distill:
        return distillation.in_environment()
    folders = [str(Path(folder).absolute()) for folder in options.teacher]
    return distillation.read(folders, options.distill, ("--teacher", "--distill"))


def _teachers_data(options: argparse.Namespace, teachers: distillation.Distillations) -> str | None:
    """Take the data and tokenizer of a teacher with the student's where no data are given."""
    given = (
        *(options.text, options.max_bytes, options.data_path, options.conversations, options.tokenizer),
        *(options.format, options.chat_template_kwargs),
    )
    same = [one.teacher for one in teachers if not one.projection]
    rows = rows_of_teacher(same[0]) if same and not any(given) else None
    if rows is None:
        return None
    options.tokenizer = rows.tokenizer
    if rows.conversations:
        options.conversations = list(rows.paths)
        options.format, options.chat_template_kwargs = json.loads(rows.reading or '["", ""]')
    else:
        options.data_path = list(rows.paths)
    return rows.split


def require_own_options(words: Sequence[str]) -> None:
    """Raise ValueError at options after `--` that would replace what this command sets itself."""
    given = {flag.name for flag in parse(words)}
    if wrong := [f"{name} (give {own})" for name, own in _OWN.items() if name in given]:
        raise ValueError(f"after -- these would replace what train itself sets: {', '.join(wrong)}")


def _log_interval(options: argparse.Namespace) -> int | None:
    """Interval of --log-precision (0: the default one), else of NEMOTRON3_LOG_PRECISION; None: off."""
    given = options.log_precision
    if given is None:
        chosen = emulation.logging_in_environment()
        return None if chosen is None else chosen.interval
    if given and not (given.isascii() and given.isdigit() and int(given)):
        raise ValueError(f"--log-precision {given}: give at least 1 iteration, or the option without a value")
    return int(given or 0)
