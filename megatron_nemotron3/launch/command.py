"""`nemotron3 flags` and `nemotron3 explain`, and options that describe a launch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.common.options import add_option, add_options, json_flag, option
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.launch.explain import (
    explain,
    explain_command,
    explain_nearest,
    with_megatron_defaults,
)
from megatron_nemotron3.launch.explain_text import render as render_explanation
from megatron_nemotron3.launch.flag import Flag, exports, parse, render, repeated, to_argv
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.launch import BACKENDS, PRECISIONS, Launch
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.performance import GPUS, published
from megatron_nemotron3.launch.phases import BF16_END, PHASES, Phase, phase, require_known, switch_step
from megatron_nemotron3.launch.precision_file import check as check_precision_file
from megatron_nemotron3.launch.rules import check
from megatron_nemotron3.launch.schedule import TrainingSchedule, adjusted, missing_schedule
from megatron_nemotron3.launch.script import LaunchSource
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import ModelOptions, chosen_model, chosen_omni, names_model
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.models.stack_specs import MODULE, has_spec
from megatron_nemotron3.precision.formats import EMULATED, NVFP4
from megatron_nemotron3.precision.settings import OPTION, Emulation, emulation_in_environment

#: Longest script that is read, in bytes.
_LIMIT = 16 << 20


def add_set(command: argparse._ActionsContainer, script: str) -> None:
    """Add --set and --trust-script, for a command that reads a script; `source_of` reads them."""
    command.add_argument(
        "--set",
        metavar="VARIABLE=VALUE",
        action="append",
        default=[],
        help=f"value of a variable of the script ({script}); 1: its first argument; may be repeated",
    )
    command.add_argument(
        "--trust-script",
        action="store_true",
        help="read the script even if this system cannot confine its shell code (no libseccomp)",
    )


def given_options(
    options: argparse.Namespace, parser: argparse.ArgumentParser, ignore: Collection[str]
) -> list[str]:
    """Return the options that were given, but for those named in `ignore`."""
    defaults = {key: value for key, value in vars(parser.parse_args([])).items() if key not in ignore}
    given = [key for key, value in defaults.items() if getattr(options, key) != value]
    return [f"--{key.replace('_', '-')}" for key in given]


def source_of(options: argparse.Namespace, file: str, label: str) -> LaunchSource:
    """Return the text of a launch with --set and --trust-script; messages name it `label`."""
    found: dict[str, str] = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() and not name.isdecimal():
            raise ValueError(f"--set {word}: give VARIABLE=VALUE")
        if found.setdefault(name, value) != value:
            raise ValueError(f"--set {name} has two values, {found[name]} and {value}: give one")
    try:
        text = sys.stdin.read() if file == "-" else read_outside(file, limit=_LIMIT).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{label} is not a text file: give a script or a command") from None
    path = {} if file == "-" else {"path": file}
    return LaunchSource(text, found, trusted=options.trust_script, **path)


LAYOUT = {
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "vpp": "virtual pipeline stages per rank",
    "ep": "expert parallel size",
    "etp": "expert tensor parallel size",
    "cp": "context parallel size",
    "dp": "data parallel size",
}

SCHEDULE: dict[str, tuple[type, str]] = {
    "steps": (int, "training iterations; warm-up and decay are scaled to them"),
    "seq_length": (int, "tokens per sequence"),
    "micro_batch_size": (int, "sequences per rank and microbatch"),
    "global_batch_size": (int, "sequences per step"),
    "lr": (float, "peak learning rate"),
}

#: Options of `explain` that go with --argv.
_OPTIONS_WITH_ARGV = (
    *("argv", "set", "trust_script", "all", "full", "json", "tiny", "schedule", "name", "model"),
    *("command", "run", "extra"),
)


def register(commands: Any) -> None:
    """Add `nemotron3 flags` and `nemotron3 explain`."""
    emit = commands.add_parser("flags")
    why = commands.add_parser("explain")
    for command in (emit, why):
        add_options(command, ModelOptions)
        add_launch(command, precision="bf16")
        add_published(command)
        add_option(command, "json", json_flag(), bool)
    form = emit.add_argument_group("output format")
    form.add_argument("--shell", action="store_true", help="quote the options for eval in a shell")
    form.add_argument(
        "--environment", action="store_true", help="print the variables of --gpu, for eval in a shell"
    )
    form.add_argument("--megatron-core", metavar="VERSION", help="0.19, 0.20 or main (default: as installed)")
    emit.set_defaults(run=flags_command)
    what = why.add_argument_group("input and detail")
    what.add_argument("--argv", metavar="FILE", help="script, command or YAML file to explain; - reads stdin")
    add_set(what, "--argv")
    what.add_argument("--full", action="store_true", help="print all options, not only those that differ")
    what.add_argument("--all", action="store_true", help="as --full, with defaults of Megatron's parser")
    why.set_defaults(run=lambda options: explain_launch(options, why))


def add_launch(command: argparse.ArgumentParser, *, precision: str | None) -> None:
    """Add the options of a launch, and Megatron's own after a lone `--`."""
    layout = command.add_argument_group("layout")
    for name, text in LAYOUT.items():
        layout.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default 1)")
    schedule = command.add_argument_group("schedule")
    for name, (kind, text) in SCHEDULE.items():
        schedule.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", help=text)
    numerics = command.add_argument_group("precision")
    default = precision or "fp32 on a CPU, else bf16"
    numerics.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=precision,
        help=f"number format of the linear layers (default {default})",
    )
    numerics.add_argument(
        "--te-precision-config-file",
        metavar="FILE",
        help="Megatron precision file with the format of each module (required by nvfp4)",
    )
    numerics.add_argument("--emulate", action="store_true", help="emulate nvfp4 or mxfp8, on any device")
    numerics.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="implementation of the layers: TransformerEngine or plain torch (default auto: as available)",
    )
    command.epilog = "Megatron arguments may follow a separate --; each replaces the option of the same name."
    command.set_defaults(extra=())


def add_published(command: argparse.ArgumentParser) -> None:
    """Add --schedule, --gpu and --without: what was published for a phase and a GPU."""
    phases = ["none", *PHASES, BF16_END]
    tuned = command.add_argument_group("published options")
    tuned.add_argument(
        "--schedule", choices=phases, default="none", help="add the published schedule of a phase"
    )
    tuned.add_argument("--gpu", choices=GPUS, help="GPU type; adds the options published for it")
    tuned.add_argument(
        "--without",
        metavar="OPTION",
        action="append",
        default=[],
        help="option of --gpu to leave out, without dashes; may be repeated",
    )


def layout_option(name: str, *, group: str = "layout", **details: Any) -> Any:
    """Return the field of a command's options for a size of `LAYOUT`."""
    return option(f"{LAYOUT[name]} (default 1)", "N", group=group, **details)


def chosen_layout(options: object) -> ParallelLayout:
    """Return the layout that the options describe."""
    return ParallelLayout(**_sizes(options))


def _sizes(options: object) -> dict[str, Any]:
    return {name: getattr(options, name) for name in LAYOUT if getattr(options, name) is not None}


def _layout_on(options: argparse.Namespace, config: Nemotron3Config, gpu: str | None) -> ParallelLayout:
    """Return the layout of the options, or the published one where --gpu is given and no size but --dp."""
    run = None if gpu is None else published(config, gpu, options.precision)
    if run is None or set(_sizes(options)) - {"dp"}:
        return chosen_layout(options)
    return replace(run.layout, **_sizes(options))


def chosen_schedule(options: argparse.Namespace) -> dict[str, Any]:
    """Return the schedule's options, None where one was not given: the arguments of `adjusted`."""
    given = {name: getattr(options, name) for name in SCHEDULE}
    for name, value in given.items():
        if value is not None and not 0 <= value < 1 << 31:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number from 0 to 2^31 - 1")
    return given


def chosen_emulation(options: argparse.Namespace) -> Emulation | None:
    """Return what --emulate requests: the value of NEMOTRON3_EMULATE, or else the recipe of --precision."""
    given = emulation_in_environment()
    if given is not None and not options.emulate:
        raise ValueError(
            f"{EMULATE}={os.environ[EMULATE]} is set: pass --precision {given.format} --emulate or unset it"
        )
    if not options.emulate:
        return None
    return given or Emulation(format=options.precision if options.precision in EMULATED else NVFP4)


def chosen_launch(options: argparse.Namespace) -> Launch:
    """Return the launch that the options describe."""
    omni, name, gpu = chosen_omni(options), options.schedule, options.gpu
    config = chosen_model(options) if omni is None else omni.language
    chosen = Phase(schedule=TrainingSchedule()) if name == "none" else phase(config, name)
    schedule = adjusted(chosen.schedule, **chosen_schedule(options))
    if chosen.precision not in (None, options.precision):
        raise ValueError(f"--schedule {name} is in {chosen.precision}: drop --precision {options.precision}")
    if name == BF16_END:
        switch_step(schedule)
    elif name not in ("none", "published"):
        require_known(config, name, schedule, tuple(options.extra))
    return Launch(
        config=config,
        layout=_layout_on(options, config, gpu),
        precision=options.precision,
        backend="te" if gpu is not None and options.backend == "auto" else options.backend,
        gpu=gpu,
        without=options.without,
        schedule=schedule,
        extra=(*chosen.options, *_encoder_options(omni), *options.extra),
        te_precision_config_file=options.te_precision_config_file,
        emulate=chosen_emulation(options),
        megatron_core=getattr(options, "megatron_core", None),
    )


def _encoder_options(omni: OmniConfig | None) -> tuple[str, ...]:
    if omni is None:
        return ()
    if omni.language.has_mtp:
        raise ValueError(
            f"{omni.name}: Megatron's MIMO model trains no MTP: train what --only language takes out"
        )
    return ("--omni-encoders", omni.encoders_json(), "--vocab-size", str(omni.language.vocab_size))


def flags_command(options: argparse.Namespace) -> int:
    """Print the flags, or the variables of --gpu; warnings go to stderr. Exit status 0."""
    forms = [f"--{name}" for name in ("json", "shell", "environment") if getattr(options, name)]
    if len(forms) > 1:
        raise ValueError(f"{forms[0]} does not go with {forms[1]}: drop one")
    launch = chosen_launch(options)
    emitted = flags(launch)
    if options.environment:
        if launch.tuned is None:
            raise ValueError("--environment prints the variables that --gpu needs: give --gpu")
        print(exports(launch.tuned.environment))
        return 0
    remarks = _remarks(launch)
    if launch.emulate:  # `nemotron3 run` takes it off the command line; Megatron's parser refuses it
        emitted.append(Flag(OPTION, (launch.emulate.text(),), origin="emulate"))
    environment = {} if launch.tuned is None else launch.tuned.environment
    if options.json:
        print_json({"flags": [vars(flag) for flag in emitted], "environment": environment})
    else:
        print(render(emitted, shell=options.shell))
    if environment and not (options.shell or options.json):
        print("# environment")
        print("\n".join(f"{name}={value}" for name, value in environment.items()))
    known = ("schedule-unknown",) if options.schedule == "none" else ()
    print_warnings(launch, options.extra, known)
    if options.schedule == BF16_END and launch.schedule is not None:
        step = switch_step(launch.schedule)
        remarks.append(
            f"{BF16_END} goes on from step {step}: train up to it with the same schedule, the quantized "
            f"precision and -- --exit-interval {step}, then pass these options in the same folder, "
            "to nemotron3 run with --change precision"
        )
    if options.schedule == "none" and (missing := missing_schedule(to_argv(emitted))):
        remarks.append(
            f"the options have no {' and no '.join(missing)}, which a training needs: add them, or "
            "--schedule published"
        )
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 0


def explain_launch(options: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    """Print where every option comes from. Exit status 0."""
    name = "published" if options.schedule in ("none", BF16_END) else options.schedule
    launch, remarks = None, []
    if options.argv is None:
        if options.set or options.trust_script:
            what = f"--set {options.set[0]}" if options.set else "--trust-script"
            raise ValueError(f"{what} is about the script of --argv, which is missing")
        launch = chosen_launch(options)
        found = explain(launch, name)
        remarks = _remarks(launch)
    else:
        if words := [*given_options(options, command, _OPTIONS_WITH_ARGV), *options.extra]:
            raise ValueError(
                f"--argv explains an existing launch, which options cannot change: drop {' '.join(words)}"
            )
        # Read the model first: of two mistakes the one in the command line is named.
        config = chosen_model(options) if names_model(options) or options.tiny else None
        source = source_of(options, options.argv, f"--argv {options.argv}")
        found = explain_nearest(source, name) if config is None else explain_command(config, source, name)
    if options.all:
        found = with_megatron_defaults(found)
    if options.json:
        print_json(found.describe())
    else:
        print(render_explanation(found, options.full or options.all))
    if launch is not None:
        print_warnings(launch, options.extra, [violation.rule for violation in found.violations])
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 0


def print_warnings(launch: Launch, words: Sequence[str], known: Collection[str] = ()) -> None:
    """Print to stderr the rules that a launch violates, and the options that `words` give more than once."""
    for violation in check(launch):
        if violation.severity != "error" and violation.rule not in known:
            print(violation, file=sys.stderr)
    for repetition in repeated(parse(words)):
        print(f"warning: {repetition}", file=sys.stderr)


def _remarks(launch: Launch) -> list[str]:
    found = check_precision_file(launch)
    if launch.tuned is not None:
        run = launch.tuned.run
        found += [
            *launch.tuned.notes,
            f"--gpu {launch.gpu}: published with {run.layout} on {run.gpus} GPUs, --micro-batch-size "
            f"{run.micro_batch_size} --global-batch-size {run.global_batch_size} --seq-length "
            f"{run.seq_length}; this layout: {launch.layout}",
        ]
    if not has_spec(launch.config) and "--spec" not in launch.options:
        found.append(
            f"nemotron3 run and train make the stack in --spec, whose E layers differ, from its name; for a "
            f'script that they do not start write a module my_stack.py of two lines, "from {MODULE} import '
            f'stack_spec" and "spec = stack_spec({launch.backend!r}, config)" with your Nemotron3Config, and '
            "pass --spec my_stack spec"
        )
    if launch.emulate:
        text = launch.emulate.text()
        found.append(
            f"nemotron3 run reads {OPTION} {text}; for a script that it does not start, drop the option and "
            f"set {EMULATE}={text} in the training processes"
        )
    return found
