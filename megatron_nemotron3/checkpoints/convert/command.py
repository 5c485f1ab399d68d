"""`nemotron3 convert` and `nemotron3 verify`: their options; the work is in `conversion`."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_nemotron3.checkpoints.remote import local, place, target
from megatron_nemotron3.common.options import (
    add_command,
    argument,
    flag,
    json_flag,
    option,
    repeated,
    workers_option,
)
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import StoredModelOptions, stored_model
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.models.tiny import TINY_SUFFIX
from megatron_nemotron3.precision.serving import RECIPES

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
DTYPES = ("bfloat16", "float16", "float32")
_DEQUANTIZE = "read packed NVFP4 and FP8 weights as BF16"


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """How a checkpoint is read: the same for both directions and `verify`."""

    which: StoredModelOptions
    lora_alpha: float | None = option("alpha of a Megatron LoRA adapter (default: as stored)", "N")
    allow_unused: list[str] = repeated("tensors that may be left out", "GLOB")


_MTP = "multi-token prediction"


@dataclass(frozen=True, kw_only=True)
class MTPOptions:
    """Which MTP a Hugging Face folder is read with."""

    mtp_num_layers: int | None = option(
        "depths of MTP (default: as --model, config.json or the catalog says, else the stored blocks); "
        "0: without MTP",
        "N",
        group=_MTP,
    )
    mtp_from: Path | None = option(
        "take MTP, which a fine-tune has lost, from this Hugging Face folder or safetensors file",
        "PATH",
        group=_MTP,
    )


_LORA, _ENCODERS = "LoRA adapters", "models with encoders"


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Options of both directions of `nemotron3 convert`."""

    stored: StoredOptions
    check_logits: int | None = option(
        "afterwards, compare the logits of both sides on N tokens, layer by layer", "N"
    )
    adapter: Path | None = option("a LoRA adapter to put in: a folder that peft saved", "DIR", group=_LORA)
    adapter_only: bool = False
    merge_adapter: bool = flag("add the adapter, W + alpha / r * B A, to the weights", group=_LORA)
    only: Literal["language"] | None = option(
        "convert the language model alone, without the encoders", group=_ENCODERS
    )
    into: Path | None = option(
        "with --only language: write DIR, a checkpoint with encoders of the kind that is written, "
        "with this language model in the place of its own",
        "DIR",
        group=_ENCODERS,
    )
    dtype: str | None = option("type of the numbers (of the weights; default: as stored)", choices=DTYPES)
    shard_size: str = option("largest size of a file (default 5GB)", "SIZE", default="5GB")
    allow_nonfinite: bool = flag("copy NaN and infinities")
    json: bool = json_flag()
    dry_run: bool = flag("print the plan and its size, and stop")
    workers: int = workers_option()

    def common(self) -> dict[str, Any]:
        """Return the fields of `conversion.Options`."""
        return {
            "model": _model(self.stored.which),
            "dtype": self.dtype,
            "allow_unused": tuple(self.stored.allow_unused),
            "workers": self.workers,
            "dry_run": self.dry_run,
            "shard_bytes": size(self.shard_size),
            "allow_nonfinite": self.allow_nonfinite,
            "adapter": self.adapter,
            "merge_adapter": self.merge_adapter,
            "lora_alpha": self.stored.lora_alpha,
            "only": self.only,
            "into": self.into,
            "compare_logits": None
            if self.check_logits is None
            else partial(_compare_logits, self.check_logits),
        }


@dataclass(frozen=True, kw_only=True)
class _SharedWithAdapter(SharedOptions):
    adapter_only: bool = flag("write the LoRA adapter alone, as a folder of peft", group=_LORA)


_QUANTIZED = "quantized weights"


@dataclass(frozen=True, kw_only=True)
class ToHf:
    """Options of `nemotron3 convert to-hf`."""

    source: Path | str = argument(
        "a run, its checkpoints or one of them; or a URL", "MEGATRON_DIR", parse=place
    )
    target: Path | str = argument("a new folder, or a URL", "HF_DIR", parse=place)
    iteration: int | None = option("default: the iteration that the tracker names", "N")
    vocab_size: int | None = option("tokens in the vocabulary (default: as stored)", "N")
    reference: Path | None = option(
        "HF folder whose tokenizer, generation files and other keys of config.json are kept (default: "
        "those of the folder that the model comes from, and the tokenizer of the run)",
        "DIR",
    )
    from_optimizer_master: bool = flag("convert the FP32 masters of the optimizer, not the weights")
    quantize: str | None = option(
        f"pack the weights for inference engines: nvfp4, fp8, or one of {', '.join(RECIPES)}",
        "RECIPE",
        group=_QUANTIZED,
    )
    input_scales: Path | None = option(
        "scales of activations for --quantize: JSON, safetensors, or a quantized folder",
        "PATH",
        group=_QUANTIZED,
    )
    shared: _SharedWithAdapter


@dataclass(frozen=True, kw_only=True)
class FromHf:
    """Options of `nemotron3 convert from-hf`."""

    source: Path | str = argument(
        "a Hugging Face folder, a URL, or the id of a repository", "HF_DIR", parse=place
    )
    target: Path | str = argument("a new folder, for --load; or a URL", "MEGATRON_DIR", parse=place)
    make_vocab_size_divisible_by: int = option(
        "pad the vocabulary to a multiple of N: Megatron's option times TP (default 128)", "N", default=128
    )
    mtp: MTPOptions
    dequantize: bool = flag(_DEQUANTIZE)
    shared: SharedOptions


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `nemotron3 verify`."""

    a: Path | str = argument("Megatron or Hugging Face checkpoint, or a URL", "A", parse=place)
    b: Path | str | None = argument("default: the manifest of A", "B", default=None, parse=place)
    vocab_size: int | None = option("tokens in the vocabulary (default: as stored)", "N")
    mtp: MTPOptions
    dequantize: bool = flag(_DEQUANTIZE)
    stored: StoredOptions
    workers: int = workers_option()
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 convert` and `nemotron3 verify`."""
    command = commands.add_parser("convert")
    ways = command.add_subparsers(
        dest="direction", required=True, metavar="to-hf|from-hf", parser_class=type(command)
    )
    to_hf = "convert a Megatron checkpoint to a Hugging Face folder"
    from_hf = "convert a Hugging Face folder to a Megatron checkpoint"
    for name, what in (("to-hf", to_hf), ("from-hf", from_hf)):
        ways.add_parser(name, help=what, description=what.replace("c", "C", 1) + ".")
    add_command(ways.choices["to-hf"], ToHf, convert_to_hf)
    add_command(ways.choices["from-hf"], FromHf, convert_from_hf)
    add_command(commands.add_parser("verify"), VerifyOptions, verify)


def convert_to_hf(options: ToHf) -> int:
    """Run `nemotron3 convert to-hf`."""
    shared = options.shared
    with result(shared.json):
        _require_transformers(shared)
        from megatron_nemotron3.checkpoints.convert import conversion

        to_hf = conversion.ToHfOptions(
            **shared.common(),
            iteration=options.iteration,
            vocab_size=options.vocab_size,
            from_masters=options.from_optimizer_master,
            reference=options.reference,
            quantize=options.quantize,
            input_scales=options.input_scales,
            adapter_only=shared.adapter_only,
        )
        with (
            local(options.source, iteration=options.iteration) as source,
            target(options.target) as (path, url),
        ):
            return conversion.convert_to_hf(source, path, replace(to_hf, url=url))


def convert_from_hf(options: FromHf) -> int:
    """Run `nemotron3 convert from-hf`."""
    with result(options.shared.json):
        _require_transformers(options.shared)
        from megatron_nemotron3.checkpoints.convert import conversion

        from_hf = conversion.FromHfOptions(
            **options.shared.common(),
            make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
            dequantize=options.dequantize,
            mtp_num_layers=options.mtp.mtp_num_layers,
            mtp_from=options.mtp.mtp_from,
        )
        with local(options.source) as source, target(options.target) as (path, url):
            return conversion.convert_from_hf(source, path, replace(from_hf, url=url))


def _require_transformers(options: SharedOptions) -> None:
    """Raise ValueError, before any work, if --check-logits lacks a transformers that knows the models."""
    if options.check_logits is not None:
        from megatron_nemotron3.checkpoints.convert.logits.hugging_face import transformers_model

        try:
            transformers_model()
        except ImportError as problem:
            raise ValueError(problem) from None


def _compare_logits(tokens: int, megatron: Any, hf: Any, config: Nemotron3Config) -> int:
    """Compare the logits of both checkpoints; returns the exit status."""
    from megatron_nemotron3.checkpoints.convert.logits.compare import LogitsCheckOptions, check_logits

    report = check_logits(megatron, hf, config, LogitsCheckOptions(tokens))
    heads = [{**asdict(one), "tolerance": one.tolerance} for one in report.logits]
    say(logits={"equal": report.passed, "problems": report.problems, "heads": heads})
    return 0 if report.passed else 1


def verify(options: VerifyOptions) -> int:
    """Run `nemotron3 verify`."""
    from megatron_nemotron3.checkpoints.convert import conversion
    from megatron_nemotron3.checkpoints.convert import verify as comparison

    common = conversion.ConvertOptions(
        model=_model(options.stored.which),
        allow_unused=tuple(options.stored.allow_unused),
        workers=options.workers,
        lora_alpha=options.stored.lora_alpha,
    )
    with ExitStack() as stack:
        stack.enter_context(result(options.json))
        a = stack.enter_context(local(options.a))
        b = None if options.b is None else stack.enter_context(local(options.b))
        read = {"dequantize": options.dequantize, "vocab_size": options.vocab_size}
        return comparison.verify(a, b, common, read, asdict(options.mtp))


def size(text: str) -> int:
    """Return the bytes of "5GB", "512MiB" or "1000000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (found := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"--shard-size {text}: give a size like 5GB or 512MiB")
    return found


def _model(options: StoredModelOptions) -> Nemotron3Config | OmniConfig | None:
    """Return the model of --model and --tiny, which may have encoders. Errors as `stored_model`."""
    encoders = get_omni(f"{options.model or ''}{TINY_SUFFIX if options.tiny else ''}")
    return encoders or stored_model(options)
