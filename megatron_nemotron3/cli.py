"""The `nemotron3` command: parsing (`options`) and printing only.

    nemotron3 show NAME [--json]          the numbers of a model
    nemotron3 flags NAME [--tp …]         Megatron's options for it
    nemotron3 precision NAME [--yaml F]   the format of every linear, and Megatron's precision file
    nemotron3 precision --report DIR      what --log-precision measured in a run
    nemotron3 run SCRIPT ARGS…            a stock Megatron script, on CPU if there is no GPU
    nemotron3 train NAME [--tiny]         prepare text, train, report
    nemotron3 watch DIR                   plot the monitored series of a run
    nemotron3 boundary --from L --to L    what crosses between two modules' layouts
    nemotron3 plan NAME --gpus N --gpu G  how to lay it out: memory, time, traffic
    nemotron3 check DIR [--full]          is a checkpoint complete and undamaged
    nemotron3 doctor [--kernels]          is this environment fit to train
    nemotron3 convert to-hf|from-hf A B   Megatron <-> Hugging Face
    nemotron3 verify A [B]                are two checkpoints the same, tensor by tensor
    nemotron3 generate --checkpoint DIR   continue prompts, with MTP as the drafter or without
    nemotron3 evaluate --checkpoint DIR   held-out loss by MTP depth, acceptance by number of drafts

Exit code 2 and one line on stderr for input that cannot work.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_nemotron3.args import ParallelLayout, explain_command
from megatron_nemotron3.boundary import command as crossing
from megatron_nemotron3.convert import options as conversion
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models import tiny as make_tiny
from megatron_nemotron3.monitor import settings
from megatron_nemotron3.options import LAYOUT, SCHEDULE, parser
from megatron_nemotron3.plan import command as planning
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.precision.table import NVFP4


def _config(options: argparse.Namespace) -> Nemotron3Config:
    config = get(options.name)
    return make_tiny(config) if options.tiny else config


def _layout(options: argparse.Namespace) -> ParallelLayout:
    return ParallelLayout(**{name: getattr(options, name) for name in LAYOUT})


def _given_schedule(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SCHEDULE}


def _show(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.models.show import describe, render

    config = _config(options)
    print(json.dumps(describe(config), indent=2) if options.json else render(config))
    return 0


def _emulate(options: argparse.Namespace) -> str:
    """The value of NEMOTRON3_EMULATE that --emulate means for the training processes; "" without it."""
    given = emulation.emulation()
    if given is not None and not options.emulate:
        raise ValueError(
            f"{emulation.VARIABLE}={os.environ[emulation.VARIABLE]} is set: pass --precision nvfp4 --emulate "
            "or unset it"
        )
    return (given or emulation.Emulation()).text() if options.emulate else ""


def _launch(options: argparse.Namespace, extra: Sequence[str]) -> dict[str, Any]:
    """The arguments of `flags`, and of `explain`, which takes the same."""
    from megatron_nemotron3.args import TrainingSchedule, adjusted
    from megatron_nemotron3.args.phases import Phase, phase, require_known

    config, name = _config(options), options.schedule
    chosen = Phase(schedule=TrainingSchedule()) if name == "none" else phase(config, name)
    schedule = adjusted(chosen.schedule, **_given_schedule(options))
    if name not in ("none", "published"):
        require_known(config, name, schedule, tuple(extra))
    same = ("precision", "backend", "te_precision_config_file", "emulate")
    given = {"config": config, "layout": _layout(options), "schedule": schedule}
    return {**given, "extra": [*chosen.options, *extra], **{key: getattr(options, key) for key in same}}


def _flags(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.args import check, flags, render

    emulated = _emulate(options)
    launch = {**_launch(options, extra), "megatron_core": options.megatron_core}
    print(render(flags(**launch), shell=options.shell))
    for warning in check(**launch):  # errors ended it before
        if warning.rule != "schedule-unknown" or options.schedule != "none":
            print(warning, file=sys.stderr)
    _remark(options, emulated)
    return 0


def _explain(options: argparse.Namespace, extra: Sequence[str]) -> int:
    emulated, plain = _emulate(options), vars(parser().parse_args(["explain", options.name]))
    launch = functools.partial(_launch, options, extra)
    print(explain_command.run(options, extra, _config(options), plain, launch))
    _remark(options, emulated)
    return 0


def _remark(options: argparse.Namespace, emulated: str) -> None:
    """On stderr, what goes with the flags and is none."""
    if options.precision == NVFP4 and options.te_precision_config_file:
        from megatron_nemotron3.precision.command import check as check_file

        if remark := check_file(_config(options), options.te_precision_config_file):
            print(remark, file=sys.stderr)
    if options.emulate:
        print(f"set {emulation.VARIABLE}={emulated} in the training processes", file=sys.stderr)


def _log_precision(options: argparse.Namespace) -> int | None:
    """Interval of --log-precision, 0 for the default; else of NEMOTRON3_LOG_PRECISION; None: off."""
    given = options.log_precision
    if given is None:
        chosen = emulation.logging()
        return None if chosen is None else chosen.interval
    if given and not (given.isascii() and given.isdigit() and int(given)):
        raise ValueError(
            f"--log-precision {given}: give an interval in iterations from 1 on, or leave it out"
        )
    return int(given or 0)


def _train(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.run import resolve_device
    from megatron_nemotron3.train.command import Request, run

    config = _config(options)
    if options.monitor is not None:  # the training processes read it there
        os.environ[settings.VARIABLE] = str(settings.parse_interval(str(options.monitor)))
    emulated, log_precision = _emulate(options), _log_precision(options)
    if options.backend == "te":
        from megatron_nemotron3.layers.backend import te_problem

        if problem := te_problem():
            raise ValueError(f"--backend te: {problem}")
    device = resolve_device(options.device)
    if device == "cpu":
        quiet_on_cpu()
    # On a CPU there is only the torch backend, and it alone emulates and measures. Naming it makes flags fit.
    torch_only = device == "cpu" or options.emulate or log_precision is not None
    backend = "torch" if torch_only and options.backend == "auto" else options.backend
    request = Request(
        config=config,
        layout=_layout(options),
        precision=options.precision or ("fp32" if device == "cpu" else "bf16"),
        backend=backend,
        device=device,
        output=options.output or Path("runs") / config.name,
        text=options.text,
        max_bytes=options.max_bytes,
        data_path=tuple(options.data_path),
        tokenizer=options.tokenizer,
        **_given_schedule(options),
        te_precision_config_file=options.te_precision_config_file,
        emulate=emulated,
        log_precision=log_precision,
        verbose=options.verbose,
        extra=tuple(extra),
    )
    return run(request)


def _doctor(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.doctor.command import doctor

    return doctor(kernels=options.kernels, step=options.step, as_json=options.json)


def _check(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.checkpoint.command import check

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: give 1 or more")
    return check(options.folder, full=options.full, workers=options.workers)


def _watch(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.monitor.watch import watch

    return watch(options.folder, options.output)


def _boundary(options: argparse.Namespace, extra: Sequence[str]) -> int:
    return crossing.boundary(options)


def _plan(options: argparse.Namespace, extra: Sequence[str]) -> int:
    return planning.plan(_config(options), options)


def _precision(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.precision import command

    if options.report is not None and options.name is None and options.yaml is None:
        print(command.report(options.report))
        return 0
    if options.report is not None or options.name is None:
        raise ValueError("give the NAME of a model, or --report DIR alone")
    print(command.run(_config(options), options.format, options.yaml))
    return 0


def _convert(options: argparse.Namespace, extra: Sequence[str]) -> int:
    if options.check_logits is None:
        return conversion.convert(options, _prove)
    from megatron_nemotron3.convert.logits.hugging_face import transformers_model

    try:
        transformers_model()  # before any work: is it there, and new enough?
    except ImportError as problem:
        raise ValueError(problem) from None
    return conversion.convert(options, _prove)


def _prove(megatron: Any, hf: Any, config: Nemotron3Config, tokens: int) -> int:
    from megatron_nemotron3.convert.logits.compare import check_logits

    return check_logits(megatron, hf, config, tokens).exit_status


def _verify(options: argparse.Namespace, extra: Sequence[str]) -> int:
    return conversion.verify(options)


def _generate(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.generate.command import generate_command
    from megatron_nemotron3.run import resolve_device

    options.device = resolve_device(options.device)
    return generate_command(options)


def _evaluate(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.generate.evaluate_command import evaluate_command
    from megatron_nemotron3.run import resolve_device

    options.device = resolve_device(options.device)
    if options.device == "cpu":
        quiet_on_cpu()
    return evaluate_command(options)


COMMANDS: dict[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {
    "show": _show,
    "flags": _flags,
    "explain": _explain,
    "train": _train,
    "watch": _watch,
    "boundary": _boundary,
    "plan": _plan,
    "doctor": _doctor,
    "check": _check,
    "precision": _precision,
    "convert": _convert,
    "verify": _verify,
    "generate": _generate,
    "evaluate": _evaluate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:  # everything behind it belongs to the launcher and the script
        from megatron_nemotron3.run import main as run_main

        run_main(words[1:])
        return 0
    extra: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, extra = words[:cut], words[cut + 1 :]
    options = parser().parse_args(words)
    try:
        status = COMMANDS[options.command](options, extra)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `nemotron3 flags … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as problem:
        print(f"nemotron3 {options.command}: {problem}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        part = "convert" if options.command in ("convert", "verify") else "train"
        cure = f"pip install 'megatron-nemotron3[{part}]'"
        print(
            f"nemotron3 {options.command}: package {missing.name} is not installed: {cure}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
