"""Options of a conversion, as functions take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoints.convert import to_hf
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of both directions; names and meaning are those of the command line."""

    #: Default: the model is read from the checkpoint.
    model: Nemotron3Config | OmniConfig | None = None
    #: Default: types are kept.
    dtype: str | None = None
    allow_unused: Sequence[str] = ()
    workers: int = 1
    dry_run: bool = False
    shard_bytes: int = to_hf.SHARD_BYTES
    allow_nonfinite: bool = False
    #: A folder that peft saved.
    adapter: Path | None = None
    #: Add the adapter to the weights: that of `adapter`, or the source's own.
    merge_adapter: bool = False
    #: Default: as the Megatron checkpoint says.
    lora_alpha: float | None = None
    #: "language": convert the language model of a model with encoders alone.
    only: str | None = None
    #: A checkpoint with encoders, of the kind that is written: put the language model into it.
    into: Path | None = None
    #: Write there; the target is then only a name.
    url: str | None = None
    #: Called with Megatron's weights, Hugging Face's and the model after the conversion; returns the exit
    #: status (--check-logits).
    compare_logits: Callable[[TensorSource, TensorSource, Nemotron3Config], int] | None = None


@dataclass(frozen=True, kw_only=True)
class ToHfOptions(ConvertOptions):
    """Options of `convert_to_hf`."""

    #: Default: the iteration that the tracker names.
    iteration: int | None = None
    vocab_size: int | None = None
    from_masters: bool = False
    reference: Path | None = None
    #: Recipe of `quantized`.
    quantize: str | None = None
    input_scales: Path | None = None
    #: Write the adapter alone, as a folder of peft.
    adapter_only: bool = False


@dataclass(frozen=True, kw_only=True)
class FromHfOptions(ConvertOptions):
    """Options of `convert_from_hf`."""

    make_vocab_size_divisible_by: int = 128
    dequantize: bool = False
    #: Default: as config.json says; 0: without MTP.
    mtp_num_layers: int | None = None
    #: A Hugging Face folder, or a file, with the MTP that the source has lost.
    mtp_from: Path | None = None
