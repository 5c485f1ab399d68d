"""Read a checkpoint of any kind into a model that Megatron has built: each rank its parts, without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import read_config
from megatron_nemotron3.checkpoints.convert.opened import EMBEDDING, Checkpoint
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.checkpoints.folders import is_hugging_face, locate_one
from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.checkpoints.structure import CONFIG as METADATA
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.common.switches import LORA


def sharded(model: Any, dp_cp: Any = None) -> list[Any]:
    """The ShardedTensors of a model chunk, data as views of its parameters and buffers.

    Args:
        dp_cp: the model's data- and context-parallel group; None: Megatron's.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    group = dp_cp or parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


def load_weights(model: Any, opened: Checkpoint, dp_cp: Any = None, place: Path | str = "") -> None:
    """Read this rank's part of a checkpoint into a model chunk, tensor by tensor.

    Args:
        dp_cp: as of `sharded`.
        place: for messages.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    parts = sharded(model, dp_cp)
    rows = next((t.global_shape[0] for t in parts if t.key in (EMBEDDING, "output_layer.weight")), None)
    mappings = opened.to_megatron(rows or opened.config.vocab_size)
    source: TensorSource = Converted(opened.hf_view(), mappings, to_hf=False)
    for t in parts:
        stored = source.tensors.get(t.key)
        if stored is None or tuple(stored.shape) != tuple(t.global_shape):
            has = "is not in it" if stored is None else f"is {list(stored.shape)} there"
            raise ValueError(
                f"{place or opened.folder}: {t.key} {list(t.global_shape)} {has}: is it another model?"
            )
    with torch.no_grad():
        for t in parts:
            shape = (1,) * t.prepend_axis_num + tuple(t.data.shape)
            slices = tuple((start, start + n) for start, n in zip(t.global_offset, shape))
            t.data.copy_(source.read(t.key, slices).reshape(t.data.shape))


def load_checkpoint(model: Any, folder: Path | str, dp_cp: Any = None) -> None:
    """Load this rank's weights of a run, a Megatron checkpoint or a Hugging Face folder into a model chunk.

    Adapters in the checkpoint are merged. Each rank reads its own part; none waits for another.

    Args:
        model: what `train.build_model` returns.
        dp_cp: as of `sharded`.

    Raises:
        ValueError: the model has adapters, or tensors of the checkpoint are missing or have other shapes.
    """
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint

    _require_no_adapters(model)
    folder = Path(folder)
    packed = is_hugging_face(folder) and QUANTIZATION in read_config(folder, omni=True)
    load_weights(model, open_checkpoint(folder, dequantize=packed), dp_cp, place=folder)


def _require_no_adapters(model: Any) -> None:
    if any(".adapter." in name for name, _ in model.named_parameters()):
        raise ValueError(f"the model has LoRA adapters: load the weights before they are added, or by {LORA}")


def load_base(model: Any, folder: Path, *, option: str = "", dp_cp: Any = None) -> None:
    """Load this rank's weights of a Megatron checkpoint into a model without adapters. All ranks call it.

    Args:
        option: what named the folder, for messages.
        dp_cp: as of `sharded`.

    Raises:
        ValueError: it is no torch_dist checkpoint, it would run code, or its tensors do not fit.
    """
    from megatron.core import dist_checkpointing, parallel_state

    found = locate_one(folder)
    if not (found.folder / METADATA).exists():
        cure = ": nemotron3 convert from-hf makes one of it" * (found.kind == "hugging face")
        raise ValueError(f"{option}{folder}: it is not a torch_dist checkpoint of Megatron{cure}")
    require_trusted(found.folder)
    place = str(found.folder)
    metadata = dist_checkpointing.load_content_metadata(place) or {}
    metadata["dp_cp_group"] = dp_cp or parallel_state.get_data_parallel_group(with_context_parallel=True)
    _require_no_adapters(model)
    if name := next((name for name in read_metadata(found.folder).tensors if ".adapter." in name), None):
        raise ValueError(
            f"{option}{folder}: it has LoRA adapters ({name}), which would be left out: give what nemotron3 "
            "convert to-hf --merge-adapter and from-hf make of it (in Python: load_checkpoint merges them)"
        )
    state = model.sharded_state_dict(metadata=metadata)
    wanted = set(state)  # Megatron also returns arguments and counters
    loaded = dist_checkpointing.load(state, place, validate_access_integrity=False)
    differ = model.load_state_dict({k: v for k, v in loaded.items() if k in wanted}, strict=False)
    unfit = (*differ.missing_keys, *differ.unexpected_keys)
    if keys := [key for key in unfit if not key.endswith("_extra_state")]:
        raise ValueError(f"{option}{folder}: {len(keys)} tensors do not fit, first {keys[0]}")
