"""The `nemotron3` command: parsing and printing only.

    nemotron3 show NAME [--json]          the numbers of a model
    nemotron3 flags NAME [--tp …]         Megatron's options for it
    nemotron3 precision NAME [--yaml F]   the format of every linear, and Megatron's precision file
    nemotron3 run SCRIPT ARGS…            a stock Megatron script, on CPU if there is no GPU
    nemotron3 train NAME [--tiny]         prepare text, train, report
    nemotron3 watch DIR                   plot the monitored series of a run
    nemotron3 check DIR [--full]          is a checkpoint complete and undamaged
    nemotron3 convert to-hf|from-hf A B   Megatron <-> Hugging Face
    nemotron3 verify A [B]                are two checkpoints the same, tensor by tensor

Exit code 2 and one line on stderr for input that cannot work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_nemotron3.args import BACKENDS, PRECISIONS, ParallelLayout
from megatron_nemotron3.convert import options as conversion
from megatron_nemotron3.models import Nemotron3Config, get, names
from megatron_nemotron3.models import tiny as make_tiny
from megatron_nemotron3.monitor import settings
from megatron_nemotron3.optional import quiet_on_cpu, te_problem
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.precision.table import FORMATS, NVFP4

LAYOUT = {
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "vpp": "virtual pipeline stages per rank",
    "ep": "expert parallel size",
    "etp": "tensor parallel size inside an expert",
    "cp": "context parallel size",
    "dp": "data parallel size",
}


SCHEDULE: dict[str, tuple[type, str]] = {
    "steps": (int, "iterations; warm-up and decay follow"),
    "seq_length": (int, "tokens per sequence"),
    "micro_batch_size": (int, "sequences per rank and microbatch"),
    "global_batch_size": (int, "sequences per step"),
    "lr": (float, "peak learning rate"),
}


class _Parser(argparse.ArgumentParser):
    """One line instead of the usage text: the line says what is wrong and what to give."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line; a test freezes it."""
    top = _Parser(prog="nemotron3", description="NVIDIA Nemotron 3 on stock Megatron-LM.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    show = commands.add_parser("show", help="the numbers of a model", description="The numbers of a model.")
    _add_model(show)
    show.add_argument("--json", action="store_true", help="machine-readable")

    emit = commands.add_parser("flags", help="Megatron's options for a model")
    _add_model(emit)
    _add_run(emit, precision="bf16")
    emit.add_argument("--shell", action="store_true", help="quoted for eval in a shell script")
    emit.add_argument(
        "--schedule", choices=["published", "none"], default="none", help="emit batch and rates"
    )

    precision = commands.add_parser("precision", help="the format of every linear, and the precision file")
    _add_model(precision)
    precision.add_argument("--format", choices=FORMATS, default=NVFP4, help=f"default {NVFP4}")
    precision.add_argument("--yaml", type=Path, metavar="FILE", help="write --te-precision-config-file")

    commands.add_parser("run", help="run a stock Megatron script, on CPU if there is no GPU", add_help=False)

    train = commands.add_parser("train", help="prepare text, train with Megatron's loop, report")
    _add_model(train)
    _add_run(train, precision=None)
    train.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    train.add_argument("--output", type=Path, metavar="DIR", help="default: runs/NAME")
    train.add_argument("--text", metavar="PATH", help="file, .jsonl or folder; default: Python's sources")
    train.add_argument("--max-bytes", type=int, metavar="N", help="of text, at most")
    train.add_argument(
        "--data-path", nargs="+", default=[], metavar="PREFIX", help="Megatron data sets instead"
    )
    train.add_argument("--tokenizer", metavar="FOLDER", help="Hugging Face tokenizer for --data-path")
    train.add_argument("--monitor", type=int, metavar="N", help="iterations between measurements, 0: off")
    train.add_argument("--verbose", action="store_true", help="print Megatron's whole log")

    watch = commands.add_parser("watch", help="plot the monitored series of a run")
    watch.add_argument("folder", type=Path, metavar="DIR", help="of --tensorboard-dir")
    watch.add_argument("--output", type=Path, metavar="PNG", help="default: DIR/monitor.png")

    check = commands.add_parser("check", help="is a checkpoint complete and undamaged")
    check.add_argument(
        "folder", type=Path, metavar="DIR", help="one checkpoint, or the folder with the tracker"
    )
    check.add_argument("--full", action="store_true", help="read everything and compare CRC32s")
    check.add_argument("--workers", type=int, default=4, metavar="N", help="threads of --full (default 4)")

    convert = commands.add_parser("convert", help="a checkpoint from Megatron to Hugging Face or back")
    conversion.add_convert(convert)
    verify = commands.add_parser("verify", help="are two checkpoints the same, tensor by tensor")
    conversion.add_verify(verify)
    return top


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help=", ".join(names()))
    command.add_argument("--tiny", action="store_true", help="the small form of the same model")


def _add_run(command: argparse.ArgumentParser, precision: str | None) -> None:
    for name, text in LAYOUT.items():
        command.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    for option, (kind, text) in SCHEDULE.items():
        command.add_argument("--" + option.replace("_", "-"), type=kind, metavar="N", help=text)
    command.add_argument("--precision", choices=PRECISIONS, default=precision)
    command.add_argument("--te-precision-config-file", metavar="FILE", help="per-module formats (nvfp4)")
    command.add_argument("--emulate", action="store_true", help="compute nvfp4 without FP4 hardware")
    command.add_argument("--backend", choices=BACKENDS, default="auto")
    command.epilog = "After a lone -- more Megatron options may follow; one given there replaces ours."


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


def _flags(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.args import TrainingSchedule, adjusted, flags, published, render

    config, emulated = _config(options), _emulate(options)
    start = published(config) if options.schedule == "published" else TrainingSchedule()
    emitted = flags(
        config,
        _layout(options),
        precision=options.precision,
        backend=options.backend,
        schedule=adjusted(start, **_given_schedule(options)),
        extra=extra,
        te_precision_config_file=options.te_precision_config_file,
        emulate=options.emulate,
    )
    print(render(emitted, shell=options.shell))
    if options.precision == NVFP4 and options.te_precision_config_file:
        from megatron_nemotron3.precision.command import check as check_file

        if remark := check_file(config, options.te_precision_config_file):
            print(remark, file=sys.stderr)
    if options.emulate:
        print(f"set {emulation.VARIABLE}={emulated} in the training processes", file=sys.stderr)
    return 0


def _train(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.run import resolve_device
    from megatron_nemotron3.train.command import Request, run

    config = _config(options)
    if options.monitor is not None:  # the training processes read it there
        os.environ[settings.VARIABLE] = str(settings.parse_interval(str(options.monitor)))
    emulated = _emulate(options)
    if options.backend == "te" and (problem := te_problem()):
        raise ValueError(f"--backend te: {problem}")
    device = resolve_device(options.device)
    if device == "cpu":
        quiet_on_cpu()
    # On a CPU the torch backend is the only one, and it alone emulates; naming it makes the flags fit.
    torch_only = device == "cpu" or options.emulate
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
        verbose=options.verbose,
        extra=tuple(extra),
    )
    return run(request)


def _check(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.checkpoint.command import check

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: give 1 or more")
    return check(options.folder, full=options.full, workers=options.workers)


def _watch(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.monitor.watch import watch

    return watch(options.folder, options.output)


def _precision(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_nemotron3.precision import command

    print(command.run(_config(options), options.format, options.yaml))
    return 0


def _convert(options: argparse.Namespace, extra: Sequence[str]) -> int:
    if options.check_logits is None:
        return conversion.convert(options, _prove)
    from megatron_nemotron3.logits.hugging_face import transformers_model

    try:
        transformers_model()  # before any work: is it there, and new enough?
    except ImportError as problem:
        raise ValueError(problem) from None
    return conversion.convert(options, _prove)


def _prove(megatron: Any, hf: Any, config: Nemotron3Config, tokens: int) -> int:
    from megatron_nemotron3.logits.compare import check_logits

    return check_logits(megatron, hf, config, tokens).exit_status


def _verify(options: argparse.Namespace, extra: Sequence[str]) -> int:
    return conversion.verify(options)


COMMANDS: dict[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {
    "show": _show,
    "flags": _flags,
    "train": _train,
    "watch": _watch,
    "check": _check,
    "precision": _precision,
    "convert": _convert,
    "verify": _verify,
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
