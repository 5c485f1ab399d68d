"""The model of a training job: its checkpoints, and its modules in Megatron's DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.utils import unwrap_model
from megatron.training.models.dist_utils import prepare_existing_model_chunks_for_distributed_training

from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.boundary.training import finalize_model_grads
from megatron_nemotron3.train.omni.modules import LANGUAGE


class AbsentLanguageModel(HybridModel):
    """Stands for the language model on a rank that has none of its layers. It cannot be called."""

    def __init__(self) -> None:
        MegatronModule.__init__(self, None)


def without_wrappers(state: dict[str, Any], model: BoundaryMimoModel) -> dict[str, Any]:
    """Give tensors of a sharded state the names that they have in checkpoints, whatever wraps modules.

    The copies of an encoder on tensor ranks are told apart, so that one of them is stored.
    """
    for name, submodule in model.modality_submodules.items():
        at = unwrap_model(submodule).pg_collection
        for key, tensor in state.items():
            if key.startswith(f"modality_submodules.{name}."):
                tensor.replica_id = (0, at.tp.rank(), at.dp_cp.rank())
    for name in ("language_model", *(f"modality_submodules.{name}" for name in model.modality_submodules)):
        apply_prefix_mapping(state, {f"{name}.{'module.' * n}": f"{name}." for n in (2, 1)})
    return state


class OmniModel(BoundaryMimoModel):
    """`BoundaryMimoModel` whose checkpoints Megatron's loop can load; wrappers do not change their names."""

    @property
    def module(self) -> HybridModel:
        """The language model.

        Megatron (`_maybe_setup_gpt_to_hybrid_load`) looks for a HybridModel along `module`, on every rank,
        and refuses a checkpoint with a layer pattern if there is none.
        """
        return AbsentLanguageModel() if self.language_model is None else self.language_model

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Describe this rank's tensors; arguments as upstream.

        Upstream writes "module." into their names for each wrapper, so that a checkpoint could only be loaded
        in the precision in which it was saved; and it takes the copies of an encoder on tensor ranks for one.
        """
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        return without_wrappers(state, self)


class _HalfEncoder(Float16Module):
    """Keeps an encoder's rows in its precision, as the exchange with the language model expects."""

    def forward(self, *inputs: Any, fp32_output: bool = False, **kwargs: Any) -> Any:
        return super().forward(*inputs, fp32_output=fp32_output, **kwargs)


def frozen_encoders(names: Collection[str], parts: Collection[str]) -> list[str]:
    """Return the encoders without any trained parameter, to which no gradient is sent."""
    return [name for name in names if {name, f"{name}-projector"} <= set(parts)]


def prepare(
    model: BoundaryMimoModel,
    groups: Mapping[str, ProcessGroupCollection],
    ddp_config: DistributedDataParallelConfig,
    *,
    data_parallel_random_init: bool = False,
) -> None:
    """Wrap each module of this rank for training, and set how gradients are finalized.

    Args:
        groups: this rank's groups by module, as `build` returns them.
        ddp_config: of the language model. Encoders do not overlap: a rank without media runs no backward.
    """
    wrapped = partial(
        prepare_existing_model_chunks_for_distributed_training,
        data_parallel_random_init=data_parallel_random_init,
    )
    if model.language_model is not None:
        (model.language_model,) = wrapped(
            [model.language_model],
            model.config,
            groups[LANGUAGE],
            ddp_config=ddp_config,
            mixed_precision_wrapper=Float16Module,
        )
    settings = replace(ddp_config, overlap_grad_reduce=False, overlap_param_gather=False)
    for name, submodule in model.modality_submodules.items():
        # What Megatron asks every module for, and transformers' modules lack.
        submodule.config = copy.copy(model.config)
        submodule.config.sequence_parallel = False
        (model.modality_submodules[name],) = wrapped(
            [submodule],
            submodule.config,
            groups[name],
            ddp_config=settings,
            mixed_precision_wrapper=_HalfEncoder,
        )
    model.config.finalize_model_grads_func = partial(finalize_model_grads, groups=groups)
