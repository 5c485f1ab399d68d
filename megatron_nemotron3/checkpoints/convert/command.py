"""`nemotron3 convert to-hf`, `from-hf` and `verify`; the work is in `conversion`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_nemotron3.checkpoints.convert.job_options import (
    DEQUANTIZE,
    ConvertOptions,
    FromHfOptions,
    MTPOptions,
    StoredOptions,
    ToHfOptions,
    model_of,
    size,
)
from megatron_nemotron3.checkpoints.remote import local, place, target
from megatron_nemotron3.common.options import add_command, argument, flag, json_flag, option, workers_option
from megatron_nemotron3.common.output import result

_O = TypeVar("_O", bound=ConvertOptions)


@dataclass(frozen=True, kw_only=True)
class ToHf:
    """Arguments of `nemotron3 convert to-hf`."""

    source: Path | str = argument(
        "a run, its checkpoints or one of them; or a URL", "MEGATRON_DIR", parse=place
    )
    target: Path | str = argument("a new folder, or a URL", "HF_DIR", parse=place)
    options: ToHfOptions


@dataclass(frozen=True, kw_only=True)
class FromHf:
    """Arguments of `nemotron3 convert from-hf`."""

    source: Path | str = argument(
        "a Hugging Face folder, a URL, or the id of a repository", "HF_DIR", parse=place
    )
    target: Path | str = argument("a new folder, for --load; or a URL", "MEGATRON_DIR", parse=place)
    options: FromHfOptions


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `nemotron3 convert verify`."""

    a: Path | str = argument("Megatron or Hugging Face checkpoint, or a URL", "A", parse=place)
    b: Path | str | None = argument("default: the manifest of A", "B", default=None, parse=place)
    vocab_size: int | None = option("tokens in the vocabulary (default: as stored)", "N")
    mtp: MTPOptions
    dequantize: bool = flag(DEQUANTIZE)
    stored: StoredOptions
    workers: int = workers_option()
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 convert to-hf`, `from-hf` and `verify`."""
    add_command(commands.add_parser("convert to-hf"), ToHf, convert_to_hf)
    add_command(commands.add_parser("convert from-hf"), FromHf, convert_from_hf)
    add_command(commands.add_parser("convert verify"), VerifyOptions, verify)


def convert_to_hf(arguments: ToHf) -> int:
    """Run `nemotron3 convert to-hf`."""
    with result(arguments.options.json):
        options = _prepared(arguments.options)
        from megatron_nemotron3.checkpoints.convert import conversion

        with (
            local(arguments.source, iteration=options.iteration) as source,
            target(arguments.target) as (path, url),
        ):
            return conversion.convert_to_hf(source, path, replace(options, url=url))


def convert_from_hf(arguments: FromHf) -> int:
    """Run `nemotron3 convert from-hf`."""
    with result(arguments.options.json):
        options = _prepared(arguments.options)
        from megatron_nemotron3.checkpoints.convert import conversion

        with local(arguments.source) as source, target(arguments.target) as (path, url):
            return conversion.convert_from_hf(source, path, replace(options, url=url))


def _prepared(options: _O) -> _O:
    """Check the options before any work: --check-logits needs a transformers that knows the models."""
    if options.check_logits is not None:
        from megatron_nemotron3.checkpoints.convert.logits.hugging_face import transformers_model

        try:
            transformers_model()
        except ImportError as problem:
            raise ValueError(problem) from None
    size(options.shard_size)
    return replace(options, config=model_of(options.which))


def verify(options: VerifyOptions) -> int:
    """Run `nemotron3 convert verify`."""
    from megatron_nemotron3.checkpoints.convert import verify as comparison

    with ExitStack() as stack:
        stack.enter_context(result(options.json))
        read = {
            "model": model_of(options.stored.which),
            "allow_unused": tuple(options.stored.allow_unused),
            "alpha": options.stored.lora_alpha,
            "dequantize": options.dequantize,
            "vocab_size": options.vocab_size,
        }
        a = stack.enter_context(local(options.a))
        if options.b is None:
            if any(value not in (None, (), False) for value in (*read.values(), *vars(options.mtp).values())):
                raise ValueError(
                    "without B the files of A are compared with its manifest: drop all options but --workers "
                    "and --json"
                )
            return comparison.verify_manifest(a, options.workers)
        b = stack.enter_context(local(options.b))
        if a.resolve() == b.resolve():
            raise ValueError(f"A and B are one checkpoint, {b}: leave B out to compare it with its manifest")
        return comparison.verify(a, b, read, asdict(options.mtp), options.workers)
