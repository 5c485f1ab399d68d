"""The command that is printed after a conversion: it compares both sides, or checks what was written."""

from __future__ import annotations

import shlex
from pathlib import Path

from megatron_nemotron3.checkpoints.convert.job_options import ConvertOptions, FromHfOptions, ToHfOptions
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.peft import PackedAdapter
from megatron_nemotron3.checkpoints.convert.quantized_views import Quantized
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.remote import shown


def next_command(
    opened: Checkpoint, target: Path, written: TensorSource, options: ConvertOptions, *, cast: bool
) -> str | None:
    """Return `convert verify` if both sides must be equal, else `check`; None for an adapter alone.

    Args:
        cast: tensors were written in another type.
    """
    if isinstance(written, PackedAdapter):
        return None
    masters = isinstance(options, ToHfOptions) and options.from_optimizer_master
    # An adapter of the checkpoint's own is merged by `verify`, too; one that is given is not.
    other = options.only is not None or options.adapter is not None or isinstance(written, Quantized)
    if cast or masters or other:
        return shlex.join(["nemotron3", "check", shown(target)])
    words = [shown(opened.folder), shown(target), *_reading(opened, options)]
    return shlex.join(["nemotron3", "convert", "verify", *words])


def _reading(opened: Checkpoint, options: ConvertOptions) -> list[str]:
    """Return the options with which `verify` reads the source as the conversion did."""
    words = []
    if options.which.model is not None:
        words += ["--model", options.which.model, *["--tiny"] * options.which.tiny]
    if options.lora_alpha is not None:
        words += ["--lora-alpha", str(options.lora_alpha)]
    for pattern in options.allow_unused:
        words += ["--allow-unused", pattern]
    if isinstance(options, ToHfOptions) and (options.vocab_size or options.reference) is not None:
        words += ["--vocab-size", str(opened.config.vocab_size)]
    if isinstance(options, FromHfOptions):
        words += ["--dequantize"] * options.dequantize
        if opened.mtp_from is not None:
            words += ["--mtp-from", shown(opened.mtp_from)]
        if options.mtp.mtp_num_layers is not None:
            words += ["--mtp-num-layers", str(options.mtp.mtp_num_layers)]
    return words
