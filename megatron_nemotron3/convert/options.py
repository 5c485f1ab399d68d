"""The options of `nemotron3 convert` and `nemotron3 verify`, and what they call."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.convert.quantized_recipes import RECIPES
from megatron_nemotron3.models import Nemotron3Config, get, names, tiny

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
DTYPES = ("bfloat16", "float16", "float32")


def add_convert(command: argparse.ArgumentParser) -> None:
    """The two directions, each with its options."""
    ways = command.add_subparsers(
        dest="direction", required=True, metavar="to-hf|from-hf", parser_class=type(command)
    )
    export = ways.add_parser("to-hf", help="a Megatron checkpoint becomes a Hugging Face folder")
    export.add_argument(
        "source", type=Path, metavar="MEGATRON_DIR", help="of --save, or one iteration's folder"
    )
    export.add_argument("target", type=Path, metavar="HF_DIR", help="a new folder")
    export.add_argument("--iteration", type=int, metavar="N", help="default: the one the tracker names")
    export.add_argument("--vocab-size", type=int, metavar="N", help="tokens; default: as stored")
    export.add_argument(
        "--reference", type=Path, metavar="DIR", help="tokenizer and generation files are copied"
    )
    export.add_argument(
        "--from-optimizer-master", action="store_true", help="FP32 masters instead of the weights"
    )
    export.add_argument(
        "--quantize", metavar="RECIPE", help=f"nvfp4, fp8, or one of {', '.join(RECIPES)}: packed for engines"
    )
    export.add_argument(
        "--input-scales", type=Path, metavar="PATH", help="scales of activations, for --quantize"
    )
    load = ways.add_parser("from-hf", help="a Hugging Face folder becomes a Megatron checkpoint")
    load.add_argument("source", type=Path, metavar="HF_DIR")
    load.add_argument("target", type=Path, metavar="MEGATRON_DIR", help="a new folder, for --load")
    load.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help="times TP (default 128)"
    )
    _add_dequantize(load)
    for way in (export, load):
        _add_model(way)
        way.add_argument(
            "--check-logits",
            type=int,
            metavar="N",
            help="compare both sides' logits of N tokens, layer by layer",
        )
        way.add_argument("--dtype", choices=DTYPES, help="default: as stored")
        way.add_argument(
            "--shard-size", default="5GB", metavar="SIZE", help="of a file, at most (default 5GB)"
        )
        way.add_argument("--allow-nonfinite", action="store_true", help="copy NaN and infinities")
        way.add_argument("--dry-run", action="store_true", help="print the plan and what it needs")
        _add_workers(way)


def add_verify(command: argparse.ArgumentParser) -> None:
    """Two checkpoints, or one and its manifest."""
    command.add_argument("a", type=Path, metavar="A", help="Megatron or Hugging Face")
    command.add_argument("b", type=Path, nargs="?", metavar="B", help="default: the manifest of A")
    command.add_argument("--vocab-size", type=int, metavar="N", help="tokens; default: as stored")
    _add_dequantize(command)
    _add_model(command)
    _add_workers(command)


def _add_dequantize(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dequantize", action="store_true", help="read packed NVFP4 and FP8 weights as BF16"
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", metavar="NAME", help=f"{', '.join(names())}; default: as the checkpoint says"
    )
    command.add_argument("--tiny", action="store_true", help="the small form of --model")
    command.add_argument(
        "--allow-unused", action="append", default=[], metavar="GLOB", help="tensors that may be left out"
    )


def _add_workers(command: argparse.ArgumentParser) -> None:
    count = min(8, os.cpu_count() or 1)
    command.add_argument(
        "--workers", type=int, default=count, metavar="N", help=f"processes (default {count})"
    )


#: (Megatron's side, Hugging Face's side, model, number of tokens) -> exit status.
Prove = Callable[[Any, Any, Nemotron3Config, int], int]


def convert(options: argparse.Namespace, prove: Prove) -> int:
    """Carry out `nemotron3 convert`.

    Args:
        prove: what `--check-logits` calls.

    Raises:
        ValueError, OSError: as `command.convert_to_hf`.
    """
    from megatron_nemotron3.convert import command

    common = command.Options(
        model=_model(options),
        dtype=options.dtype,
        allow_unused=tuple(options.allow_unused),
        workers=_workers(options),
        dry_run=options.dry_run,
        shard_bytes=size(options.shard_size),
        allow_nonfinite=options.allow_nonfinite,
        prove=partial(_prove, prove, options.check_logits) if options.check_logits is not None else None,
    )
    if options.direction == "to-hf":
        return command.convert_to_hf(
            options.source,
            options.target,
            common,
            iteration=options.iteration,
            vocab_size=options.vocab_size,
            from_masters=options.from_optimizer_master,
            reference=options.reference,
            quantize=options.quantize,
            input_scales=options.input_scales,
        )
    return command.convert_from_hf(
        options.source,
        options.target,
        common,
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        dequantize=options.dequantize,
    )


def _prove(prove: Prove, tokens: int, megatron: Any, hf: Any, config: Nemotron3Config) -> int:
    return prove(megatron, hf, config, tokens)


def verify(options: argparse.Namespace) -> int:
    """Carry out `nemotron3 verify`.

    Raises:
        ValueError: as `command.verify`.
    """
    from megatron_nemotron3.convert import command

    common = command.Options(
        model=_model(options), allow_unused=tuple(options.allow_unused), workers=_workers(options)
    )
    return command.verify(
        options.a, options.b, common, dequantize=options.dequantize, vocab_size=options.vocab_size
    )


def size(text: str) -> int:
    """Bytes of "5GB", "512MiB" or "1000000".

    Raises:
        ValueError: something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (found := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"--shard-size {text}: give a size like 5GB or 512MiB")
    return found


def _model(options: argparse.Namespace) -> Nemotron3Config | None:
    if options.model is None:
        if options.tiny:
            raise ValueError("--tiny: it needs --model NAME")
        return None
    return tiny(get(options.model)) if options.tiny else get(options.model)


def _workers(options: argparse.Namespace) -> int:
    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: give 1 or more")
    return int(options.workers)
