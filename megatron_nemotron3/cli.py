"""The `nemotron3` command. Every package that has a command registers it; this file collects them.

    nemotron3 show NAME [--json]          the sizes of a model
    nemotron3 flags NAME [--tp …]         Megatron's options for it
    nemotron3 explain NAME [--tp …]       where every option comes from, and what was published
    nemotron3 precision NAME [--output F] the format of every linear, and Megatron's precision file
    nemotron3 precision --report DIR      what --log-precision measured in a run
    nemotron3 run SCRIPT ARGS…            a stock Megatron script, on CPU if there is no GPU
    nemotron3 train NAME [--tiny]         prepare text, train, report
    nemotron3 watch DIR                   plot the monitored series of a run
    nemotron3 boundary --from L --to L    what crosses between two modules' layouts
    nemotron3 plan NAME --gpus N --gpu G  how to lay it out: memory, time, traffic
    nemotron3 recipe [MODEL RECIPE]       launch scripts: list, print, copy
    nemotron3 check DIR [--full]          check that a checkpoint is complete and undamaged
    nemotron3 doctor [--kernels]          is this environment fit to train
    nemotron3 convert to-hf|from-hf A B   Megatron <-> Hugging Face
    nemotron3 verify A [B]                compare two checkpoints tensor by tensor
    nemotron3 generate --checkpoint DIR   continue prompts, with MTP as the drafter or without
    nemotron3 evaluate --checkpoint DIR   held-out loss by MTP depth, acceptance by number of drafts

Invalid input ends with exit code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_nemotron3 import run
from megatron_nemotron3.args import command as args
from megatron_nemotron3.boundary import command as boundary
from megatron_nemotron3.checkpoint.metadata import printable
from megatron_nemotron3.convert import check
from megatron_nemotron3.convert import command as convert
from megatron_nemotron3.doctor import command as doctor
from megatron_nemotron3.generate import command as generate
from megatron_nemotron3.generate import evaluate_command as evaluate
from megatron_nemotron3.models import command as models
from megatron_nemotron3.monitor import watch
from megatron_nemotron3.plan import command as plan
from megatron_nemotron3.precision import command as precision
from megatron_nemotron3.recipes import command as recipes
from megatron_nemotron3.train import command as train

#: Modules with `register(commands)`, in the order of `nemotron3 --help`.
REGISTERED = (
    models,
    args,
    precision,
    run,
    train,
    watch,
    boundary,
    plan,
    recipes,
    check,
    doctor,
    convert,
    generate,
    evaluate,
)


class Parser(argparse.ArgumentParser):
    """A parser that answers bad input with one line, which says what is wrong and what to give."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")
        raise AssertionError  # `exit` does not return


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; a test freezes its options."""
    top = Parser(prog="nemotron3", description="NVIDIA Nemotron 3 on stock Megatron-LM.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in REGISTERED:
        module.register(commands)
    return top


def _drop_output() -> None:
    """Send what is buffered for stdout, which cannot be written, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:  # every word after it belongs to the launcher and the script
        run.main(words[1:])
        return 0
    cut = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:cut])
    extra = words[cut + 1 :]
    try:
        if extra and not hasattr(options, "extra"):
            raise ValueError(f"no arguments are allowed after --: drop {' '.join(extra)}")
        options.extra = extra
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `nemotron3 flags … | head`
        _drop_output()
        return 0
    except (ValueError, OSError) as problem:
        try:
            sys.stdout.flush()
        except OSError:  # a full disk; Python would flush again when it ends, and print a traceback
            _drop_output()
        text = printable(str(problem), but="\n")
        print(f"nemotron3 {options.command}: {text}", file=sys.stderr)
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
