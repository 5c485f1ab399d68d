"""`nemotron3 convert` and `nemotron3 verify`: their options; the work is in `conversion`."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.output import add_json, result, say
from megatron_nemotron3.checkpoint.remote import local, place, target
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import add_stored_model, stored_model
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.models.tiny import TINY_SUFFIX
from megatron_nemotron3.precision.serving import RECIPES
from megatron_nemotron3.words import add_workers

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
DTYPES = ("bfloat16", "float16", "float32")


def register(commands: Any) -> None:
    """Add `nemotron3 convert` and `nemotron3 verify`."""
    _add_convert(commands.add_parser("convert"))
    _add_verify(commands.add_parser("verify"))


def _add_convert(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=convert)
    ways = command.add_subparsers(
        dest="direction", required=True, metavar="to-hf|from-hf", parser_class=type(command)
    )
    to_hf = "convert a Megatron checkpoint to a Hugging Face folder"
    export = ways.add_parser("to-hf", help=to_hf, description=to_hf.replace("c", "C", 1) + ".")
    export.add_argument(
        "source", type=place, metavar="MEGATRON_DIR", help="a run, its checkpoints or one of them; or a URL"
    )
    export.add_argument("target", type=place, metavar="HF_DIR", help="a new folder, or a URL")
    export.add_argument(
        "--iteration", type=int, metavar="N", help="default: the iteration that the tracker names"
    )
    export.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens in the vocabulary (default: as stored)"
    )
    export.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="HF folder whose tokenizer and generation files are copied (default: the tokenizer in the "
        "checkpoint, which Megatron's main saves)",
    )
    export.add_argument(
        "--from-optimizer-master",
        action="store_true",
        help="convert the FP32 masters of the optimizer, not the weights",
    )
    packed = export.add_argument_group("quantized weights")
    packed.add_argument(
        "--quantize",
        metavar="RECIPE",
        help=f"pack the weights for inference engines: nvfp4, fp8, or one of {', '.join(RECIPES)}",
    )
    packed.add_argument(
        "--input-scales",
        type=Path,
        metavar="PATH",
        help="scales of activations for --quantize: JSON, safetensors, or a quantized folder",
    )
    from_hf = "convert a Hugging Face folder to a Megatron checkpoint"
    load = ways.add_parser("from-hf", help=from_hf, description=from_hf.replace("c", "C", 1) + ".")
    load.add_argument(
        "source", type=place, metavar="HF_DIR", help="a Hugging Face folder, a URL, or the id of a repository"
    )
    load.add_argument("target", type=place, metavar="MEGATRON_DIR", help="a new folder, for --load; or a URL")
    load.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="pad the vocabulary to a multiple of N: Megatron's option times TP (default 128)",
    )
    load.add_argument(
        "--mtp-num-layers",
        type=int,
        metavar="N",
        help="depths of MTP (default: as --model, config.json or the catalog says, else the stored blocks)",
    )
    _add_dequantize(load)
    for way in (export, load):
        _add_stored(way)
        way.add_argument(
            "--check-logits",
            type=int,
            metavar="N",
            help="afterwards, compare the logits of both sides on N tokens, layer by layer",
        )
        lora = way.add_argument_group("LoRA adapters")
        lora.add_argument(
            "--adapter", type=Path, metavar="DIR", help="a LoRA adapter to put in: a folder that peft saved"
        )
        if way is export:
            lora.add_argument(
                "--adapter-only",
                action="store_true",
                help="write the LoRA adapter alone, as a folder of peft",
            )
        lora.add_argument(
            "--merge-adapter",
            action="store_true",
            help="add the adapter, W + alpha / r * B A, to the weights",
        )
        encoders = way.add_argument_group("models with encoders")
        encoders.add_argument(
            "--only", choices=("language",), help="convert the language model alone, without the encoders"
        )
        encoders.add_argument(
            "--into",
            type=Path,
            metavar="DIR",
            help="with --only language: write DIR, a checkpoint with encoders of the kind that is written, "
            "with this language model in the place of its own",
        )
        way.add_argument(
            "--dtype", choices=DTYPES, help="type of the numbers (of the weights; default: as stored)"
        )
        way.add_argument(
            "--shard-size", default="5GB", metavar="SIZE", help="largest size of a file (default 5GB)"
        )
        way.add_argument("--allow-nonfinite", action="store_true", help="copy NaN and infinities")
        add_json(way)
        way.add_argument("--dry-run", action="store_true", help="print the plan and its size, and stop")
        add_workers(way)


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=verify)
    command.add_argument("a", type=place, metavar="A", help="Megatron or Hugging Face checkpoint, or a URL")
    command.add_argument("b", type=place, nargs="?", metavar="B", help="default: the manifest of A")
    command.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens in the vocabulary (default: as stored)"
    )
    _add_dequantize(command)
    _add_stored(command)
    add_workers(command)
    add_json(command)


def _add_dequantize(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dequantize", action="store_true", help="read packed NVFP4 and FP8 weights as BF16"
    )


def _add_stored(command: argparse.ArgumentParser) -> None:
    add_stored_model(command)
    command.add_argument(
        "--lora-alpha", type=float, metavar="N", help="alpha of a Megatron LoRA adapter (default: as stored)"
    )
    command.add_argument(
        "--allow-unused", action="append", default=[], metavar="GLOB", help="tensors that may be left out"
    )


def convert(options: argparse.Namespace) -> int:
    """Run `nemotron3 convert`.

    Raises:
        ValueError, OSError: as `conversion.convert_to_hf`; --check-logits without a transformers that knows
            the models.
    """
    with result(options.json):
        return _convert(options)


def _convert(options: argparse.Namespace) -> int:
    if options.check_logits is not None:
        from megatron_nemotron3.convert.logits.hugging_face import transformers_model

        try:
            transformers_model()  # before any work: is it installed, and new enough?
        except ImportError as problem:
            raise ValueError(problem) from None
    from megatron_nemotron3.convert import conversion

    common: dict[str, Any] = {
        "model": _model(options),
        "dtype": options.dtype,
        "allow_unused": tuple(options.allow_unused),
        "workers": _workers(options),
        "dry_run": options.dry_run,
        "shard_bytes": size(options.shard_size),
        "allow_nonfinite": options.allow_nonfinite,
        "adapter": options.adapter,
        "merge_adapter": options.merge_adapter,
        "lora_alpha": options.lora_alpha,
        "only": options.only,
        "into": options.into,
    }
    if options.check_logits is not None:
        common["compare_logits"] = partial(_compare_logits, options.check_logits)
    if options.direction == "to-hf":
        to_hf = conversion.ToHfOptions(
            **common,
            iteration=options.iteration,
            vocab_size=options.vocab_size,
            from_masters=options.from_optimizer_master,
            reference=options.reference,
            quantize=options.quantize,
            input_scales=options.input_scales,
            adapter_only=options.adapter_only,
        )
        with (
            local(options.source, iteration=options.iteration) as source,
            target(options.target) as (path, url),
        ):
            return conversion.convert_to_hf(source, path, replace(to_hf, url=url))
    from_hf = conversion.FromHfOptions(
        **common,
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        dequantize=options.dequantize,
        mtp_num_layers=options.mtp_num_layers,
    )
    with local(options.source) as source, target(options.target) as (path, url):
        return conversion.convert_from_hf(source, path, replace(from_hf, url=url))


def _compare_logits(tokens: int, megatron: Any, hf: Any, config: Nemotron3Config) -> int:
    """Compare the logits of both checkpoints; returns the exit status."""
    from megatron_nemotron3.convert.logits.compare import CheckOptions, check_logits

    report = check_logits(megatron, hf, config, CheckOptions(tokens))
    heads = [{**asdict(one), "tolerance": one.tolerance} for one in report.logits]
    say(logits={"equal": report.passed, "problems": report.problems, "heads": heads})
    return report.exit_status


def verify(options: argparse.Namespace) -> int:
    """Run `nemotron3 verify`.

    Raises:
        ValueError: as `verify.verify`.
    """
    from megatron_nemotron3.convert import conversion
    from megatron_nemotron3.convert import verify as comparison

    common = conversion.Options(
        model=_model(options),
        allow_unused=tuple(options.allow_unused),
        workers=_workers(options),
        lora_alpha=options.lora_alpha,
    )
    with ExitStack() as stack:
        stack.enter_context(result(options.json))
        a, b = (one and stack.enter_context(local(one)) for one in (options.a, options.b))
        return comparison.verify(a, b, common, dequantize=options.dequantize, vocab_size=options.vocab_size)


def size(text: str) -> int:
    """Return the bytes of "5GB", "512MiB" or "1000000".

    Raises:
        ValueError: the text is not such a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (found := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"--shard-size {text}: give a size like 5GB or 512MiB")
    return found


def _model(options: argparse.Namespace) -> Nemotron3Config | OmniConfig | None:
    """Return the model of --model and --tiny, which may have encoders. Errors as `stored_model`."""
    encoders = get_omni(f"{options.model or ''}{TINY_SUFFIX if options.tiny else ''}")
    return encoders or stored_model(options)


def _workers(options: argparse.Namespace) -> int:
    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: give 1 or more")
    return int(options.workers)
