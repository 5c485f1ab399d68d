"""The options of every `nemotron3` command: what can be typed, and no more."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_nemotron3.args import BACKENDS, PRECISIONS, explain_command
from megatron_nemotron3.args.phases import PHASES
from megatron_nemotron3.boundary import command as crossing
from megatron_nemotron3.convert import options as conversion
from megatron_nemotron3.generate import command as generation
from megatron_nemotron3.generate import evaluate_command as evaluation
from megatron_nemotron3.models import names
from megatron_nemotron3.plan import command as planning
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
    emit.add_argument("--megatron-core", metavar="VERSION", help="0.17 to 0.20 or main; default: installed")

    why = commands.add_parser("explain", help="where every option comes from, and what was published")
    _add_model(why)
    _add_run(why, precision="bf16")
    explain_command.add_explain(why)
    for command in (emit, why):
        phases = ["none", *PHASES]
        command.add_argument("--schedule", choices=phases, default="none", help="batch and rates of a phase")

    precision = commands.add_parser("precision", help="the format of every linear, and the precision file")
    _add_model(precision, required=False)
    precision.add_argument("--format", choices=FORMATS, default=NVFP4, help=f"default {NVFP4}")
    precision.add_argument("--yaml", type=Path, metavar="FILE", help="write --te-precision-config-file")
    precision.add_argument("--report", type=Path, metavar="DIR", help="summary and plot of a measured run")

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
    train.add_argument(
        "--log-precision",
        nargs="?",
        const="",
        metavar="N",
        help=f"measure quantized operands every N steps (default {emulation.LOG_DEFAULT})",
    )
    train.add_argument("--verbose", action="store_true", help="print Megatron's whole log")

    watch = commands.add_parser("watch", help="plot the monitored series of a run")
    watch.add_argument("folder", type=Path, metavar="DIR", help="of --tensorboard-dir")
    watch.add_argument("--output", type=Path, metavar="PNG", help="default: DIR/monitor.png")

    boundary = commands.add_parser("boundary", help="what crosses between two modules' layouts")
    crossing.add_boundary(boundary)

    plan = commands.add_parser("plan", help="how to lay a model out on some GPUs")
    _add_model(plan)
    planning.add_plan(plan)

    check = commands.add_parser("check", help="is a checkpoint complete and undamaged")
    check.add_argument(
        "folder", type=Path, metavar="DIR", help="one checkpoint, or the folder with the tracker"
    )
    check.add_argument("--full", action="store_true", help="read everything and compare CRC32s")
    check.add_argument("--workers", type=int, default=4, metavar="N", help="threads of --full (default 4)")

    doctor = commands.add_parser("doctor", help="is this environment fit to train")
    doctor.add_argument("--kernels", action="store_true", help="compare fast forms with their references")
    doctor.add_argument("--step", nargs="?", const="super", metavar="NAME", help="a step of its tiny form")
    doctor.add_argument("--json", action="store_true", help="machine-readable")

    convert = commands.add_parser("convert", help="a checkpoint from Megatron to Hugging Face or back")
    conversion.add_convert(convert)
    verify = commands.add_parser("verify", help="are two checkpoints the same, tensor by tensor")
    conversion.add_verify(verify)

    generate = commands.add_parser("generate", help="continue prompts with a checkpoint's model")
    generation.add_generate(generate)
    evaluate = commands.add_parser("evaluate", help="held-out loss by MTP depth, acceptance by drafts")
    evaluation.add_evaluate(evaluate)
    return top


def _add_model(command: argparse.ArgumentParser, required: bool = True) -> None:
    command.add_argument("name", metavar="NAME", nargs=None if required else "?", help=", ".join(names()))
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
