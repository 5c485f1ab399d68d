"""MTP put back onto a fine-tune that lost it (--mtp-from), or left out (--mtp-num-layers 0).

transformers never builds MTP, so what it saves has none, and its config.json may still promise it. The heads
are those of another checkpoint: a Hugging Face folder, a folder of MTP's files alone, or one such file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.config_keys import MTP_BLOCKS, MTP_KEYS, MTP_LAYERS, QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import (
    CONFIG,
    INDEX,
    SINGLE,
    open_file,
    open_files,
    open_hf,
    other_files,
    read_config,
)
from megatron_nemotron3.checkpoints.convert.omni_config import text_part
from megatron_nemotron3.checkpoints.convert.omni_inventory import language_of
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import Joined, Selected
from megatron_nemotron3.checkpoints.metadata import CheckpointError

#: Names of MTP's tensors begin with it.
PREFIX = "mtp."
#: A tensor that only this kind of layer has.
_KINDS = {"in_proj": "M", "q_proj": "*", "gate": "E", "up_proj": "-"}
_MIXER = re.compile(rf"mtp\.layers\.(\d{{1,4}})\.mixer\.({'|'.join(_KINDS)})\.weight")
_FIRST = re.compile(r"mtp\.layers\.\d+\.eh_proj\.weight")


def without_mtp(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without what it says of MTP."""
    return {key: value for key, value in data.items() if key not in MTP_KEYS}


def with_mtp_from(
    folder: Path, source: TensorSource, data: Mapping[str, Any], original: Path
) -> tuple[TensorSource, dict[str, Any]]:
    """Return the tensors and the config.json of `folder` with the MTP of `original`.

    Raises:
        ValueError: `folder` has MTP, `original` has none, or they are not of one model.
    """
    if own := sum(name.startswith(PREFIX) for name in source.tensors):
        raise ValueError(f"--mtp-from {original}: {folder} has {own:,} tensors of MTP itself: leave it out")
    heads, stated = _opened(original)
    names = {name: name for name in heads.tensors if name.startswith(PREFIX)}
    if not names:
        raise ValueError(f"--mtp-from {original}: no tensor in it is of MTP (named {PREFIX}…)")
    rest = without_mtp(data)
    if stated is None:
        return Joined(source, Selected(heads, names)), rest | _layers(original, names)
    # MTP is not quantized; if it is, its types say so.
    stated = {key: value for key, value in stated.items() if key != QUANTIZATION}
    result = rest | {key: value for key, value in stated.items() if key in MTP_KEYS}
    tuned = config_json.read(result, name=os.fspath(folder))
    released = config_json.read(stated, name=f"--mtp-from {original}")
    # Tokens may have been added: the heads share the model's embedding and output layer.
    config_json.check_same_model(released.but(vocab_size=tuned.vocab_size), tuned)
    return Joined(source, Selected(heads, names)), result


def _opened(original: Path) -> tuple[TensorSource, Mapping[str, Any] | None]:
    """Open what has the heads; its config.json, if there is one."""
    if original.is_file():
        return open_file(original), None
    if not original.is_dir():
        raise ValueError(f"--mtp-from {original}: it does not exist")
    stated = text_part(read_config(original, omni=True)) if (original / CONFIG).is_file() else None
    apart = other_files(original, ())
    if not apart:
        raise ValueError(
            f"--mtp-from {original}: it has no safetensors files: give a Hugging Face folder, or MTP's file"
        )
    if any(os.path.lexists(original / name) for name in (INDEX, SINGLE)):
        source = language_of(open_hf(original))
        if any(name.startswith(PREFIX) for name in source.tensors):
            return source, stated
    return open_files(original, [name for name, mtp in apart.items() if mtp]), stated


def _layers(original: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of config.json that the names of MTP's tensors show."""
    kinds: dict[int, str] = {}
    for match in filter(None, map(_MIXER.fullmatch, names)):
        kinds[int(match[1])] = _KINDS[match[2]]
    blocks = sum(_FIRST.fullmatch(name) is not None for name in names)
    pattern = "".join(kinds[layer] for layer in sorted(kinds))
    block = pattern[: len(pattern) // blocks] if blocks else ""
    if not block or block * blocks != pattern or sorted(kinds) != list(range(len(kinds))):
        raise CheckpointError(
            f"--mtp-from {original}: its layers {pattern!r} are no blocks that each begin with eh_proj "
            f"({blocks} of them): give the folder of the original model"
        )
    return {MTP_BLOCKS: blocks, MTP_LAYERS[0]: block}
