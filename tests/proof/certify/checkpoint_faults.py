"""Faults of saving, loading and exporting checkpoints.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from safetensors.torch import load_file, save_file

from tests.proof.certify.patching import result, then, wrap


def layers_exchanged() -> None:
    """Two layers of one kind take each other's weights from a checkpoint."""

    @torch.no_grad()
    def exchange(model: Any) -> None:
        vectors = [p for name, p in model.named_parameters() if name.endswith("mixer.A_log")]
        first, last = vectors[0].clone(), vectors[-1].clone()
        vectors[0].copy_(last)
        vectors[-1].copy_(first)

    then(HybridModel, "load_state_dict", exchange)


def moments_forgotten() -> None:
    """The moments of Adam begin at zero after a checkpoint is loaded."""

    def forget(optimizer: Any) -> None:
        for state in optimizer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name].zero_()

    for kind in (DistributedOptimizer, FP32Optimizer):
        then(kind, "load_state_dict", forget)


def biases_reset() -> None:
    """The biases of the experts begin at zero after a checkpoint is loaded."""

    def reset(model: Any) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.zero_()

    then(HybridModel, "load_state_dict", reset)


def part_not_saved() -> None:
    """The last rank writes zeros in place of its part of a matrix."""

    def make(save: Any) -> Any:
        def partly(state: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                tensors = [v for v in nested_values(state["model"]) if isinstance(v, ShardedTensor)]
                one = next(t for t in tensors if t.key.endswith("linear_proj.weight"))
                one.data = torch.zeros_like(one.data)
            return save(state, *args, **kwargs)

        return partly

    wrap("megatron.core.dist_checkpointing", "save", make)


def other_factor_stored() -> None:
    """The arguments in the checkpoint have another scale of the experts than the model."""

    def change(state: dict[str, Any]) -> dict[str, Any]:
        other = copy.copy(state["args"])
        other.moe_router_topk_scaling_factor = 1.0
        return state | {"args": other}

    result("megatron.training.checkpointing", "generate_state_dict", change)


def _exported(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of an export."""

    def make(export: Any) -> Any:
        def edited(checkpoint: Any, folder: Path, *args: Any, **kwargs: Any) -> Any:
            found = export(checkpoint, folder, *args, **kwargs)
            (file,) = folder.glob("*.safetensors")
            change(tensors := load_file(file))
            save_file(tensors, file, metadata={"format": "pt"})
            return found

        return edited

    wrap("megatron_nemotron3.proof.certify.checkpoints", "convert_to_hf", make)


def experts_exchanged_in_export() -> None:
    """Two experts take each other's place in the export."""

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        first = next(name for name in tensors if ".experts.0.up_proj" in name)
        second = first.replace(".experts.0.", ".experts.1.")
        tensors[first], tensors[second] = tensors[second], tensors[first]

    _exported(exchange)


def decay_exported_as_rate() -> None:
    """The export holds A instead of its logarithm."""

    def exponentiate(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("A_log"):
                tensors[name] = tensors[name].exp()

    _exported(exponentiate)
