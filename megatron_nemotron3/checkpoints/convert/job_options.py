"""Options of `nemotron3 convert`, on the command line and of its functions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_nemotron3.checkpoints.hub import push_option
from megatron_nemotron3.common.options import flag, json_flag, option, repeated, workers_option
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import StoredModelOptions, stored_model
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.models.tiny import TINY_SUFFIX
from megatron_nemotron3.precision.serving import RECIPES

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
#: Default of --shard-size: 5GB as Hugging Face counts it.
SHARD_BYTES = 5 * 10**9
DTYPES = ("bfloat16", "float16", "float32")
DEQUANTIZE = "read packed NVFP4 and FP8 weights as BF16"
_MTP, _QUANTIZED = "multi-token prediction", "quantized weights"
_LORA, _ENCODERS = "LoRA adapters", "models with encoders"


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """How a checkpoint is read: the same for both directions and `convert verify`."""

    which: StoredModelOptions = StoredModelOptions()
    lora_alpha: float | None = option("alpha of a Megatron LoRA adapter (default: as stored)", "N")
    allow_unused: list[str] = repeated("names of tensors that may be left out; may be repeated", "GLOB")


@dataclass(frozen=True, kw_only=True)
class MTPOptions:
    """Which MTP a Hugging Face folder is read with."""

    mtp_num_layers: int | None = option(
        "number of MTP depths (default: that of --model, config.json or the catalog, else of stored blocks); "
        "0: without MTP",
        "N",
        group=_MTP,
    )
    mtp_from: Path | None = option(
        "Hugging Face folder or safetensors file with the MTP weights, for a fine-tuned model without them",
        "PATH",
        group=_MTP,
    )


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(StoredOptions):
    """Options of both directions."""

    check_logits: int | None = option(
        "after the conversion, compare the logits of both checkpoints on N tokens, layer by layer",
        "N",
        least=3,
    )
    adapter: Path | None = option("LoRA adapter to add: a folder saved by peft", "DIR", group=_LORA)
    adapter_only: bool = False
    merge_adapter: bool = flag("merge the adapter into the weights: W + alpha / r * B A", group=_LORA)
    only: Literal["language"] | None = option(
        "convert the language model alone, without the encoders", group=_ENCODERS
    )
    into: Path | None = option(
        "with --only language: checkpoint with encoders, in the output format, in which this "
        "language model replaces the present one",
        "DIR",
        group=_ENCODERS,
    )
    dtype: str | None = option("weight dtype (default: as stored)", choices=DTYPES)
    shard_size: str = option("maximum file size (default 5GB)", "SIZE", default="5GB")
    allow_nonfinite: bool = flag("copy NaN and infinite values")
    json: bool = json_flag()
    dry_run: bool = flag("print the plan and its size, then exit")
    workers: int = workers_option()
    #: In place of `which`; default: the model is read from the checkpoint.
    config: Nemotron3Config | OmniConfig | None = None
    #: Write there; the target is then only a name.
    url: str | None = None

    @property
    def shard_bytes(self) -> int:
        """Bytes of `shard_size`."""
        return size(self.shard_size)


@dataclass(frozen=True, kw_only=True)
class _OfMegatron:
    iteration: int | None = option("iteration to convert (default: the one that the tracker names)", "N")
    vocab_size: int | None = option("vocabulary size (default: as stored)", "N")
    reference: Path | None = option(
        "Hugging Face folder whose tokenizer, generation files and other config.json keys are kept "
        "(default: the folder that the model comes from, and the tokenizer of the run)",
        "DIR",
    )
    from_optimizer_master: bool = flag("convert the FP32 master weights of the optimizer")
    quantize: str | None = option(
        f"pack the weights for inference engines: nvfp4, fp8, or one of {', '.join(RECIPES)}; ,4over6=1 or "
        ",4over6=0 after it chooses NVFP4 scales by error or by largest magnitudes",
        "RECIPE",
        group=_QUANTIZED,
    )
    input_scales: Path | None = option(
        "activation scales for --quantize: JSON, safetensors, or a quantized checkpoint folder",
        "PATH",
        group=_QUANTIZED,
    )


@dataclass(frozen=True, kw_only=True)
class ToHfOptions(ConvertOptions, _OfMegatron):
    """Options of `convert_to_hf`."""

    adapter_only: bool = flag("write only the LoRA adapter, as a peft folder", group=_LORA)
    base_model: str | None = option(
        "with --adapter-only: folder or repository id of the base model for peft (default: --reference)",
        "NAME",
        group=_LORA,
    )
    push_to_hub: str | None = push_option()


@dataclass(frozen=True, kw_only=True)
class _OfHuggingFace:
    make_vocab_size_divisible_by: int = option(
        "pad the vocabulary to a multiple of N: Megatron's option times TP (default 128)", "N", default=128
    )
    mtp: MTPOptions = MTPOptions()
    dequantize: bool = flag(DEQUANTIZE)


@dataclass(frozen=True, kw_only=True)
class FromHfOptions(ConvertOptions, _OfHuggingFace):
    """Options of `convert_from_hf`."""


def model_of(options: StoredModelOptions) -> Nemotron3Config | OmniConfig | None:
    """Return the model of --model and --tiny, which may have encoders. Errors as `stored_model`."""
    encoders = get_omni(f"{options.model or ''}{TINY_SUFFIX if options.tiny else ''}")
    return encoders or stored_model(options)


def size(text: str) -> int:
    """Return the bytes of "5GB", "512MiB" or "1000000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (found := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"--shard-size {text}: give a size like 5GB or 512MiB")
    return found
