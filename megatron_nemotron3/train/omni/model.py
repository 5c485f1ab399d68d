"""The model of a training job: its checkpoints, and its modules in Megatron's DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.utils import unwrap_model
from megatron.training.models.dist_utils import prepare_existing_model_chunks_for_distributed_training

from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.boundary.training import finalize_model_grads
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of, common_state
from megatron_nemotron3.checkpoints.folders import RELEASE, write_tracker
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.omni.modules import LANGUAGE


class AbsentLanguageModel(HybridModel):
    """Stands for the language model on a rank that has none of its layers. It cannot be called."""

    def __init__(self) -> None:
        MegatronModule.__init__(self, None)


def without_wrappers(state: dict[str, Any], model: BoundaryMimoModel) -> dict[str, Any]:
    """Give tensors of a sharded state the names that they have in checkpoints, whatever wraps modules.

    The copies of an encoder on tensor ranks get ids of their own, so that one of them is stored.
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
        """The language model: Megatron's `_maybe_setup_gpt_to_hybrid_load` requires one on every rank."""
        return AbsentLanguageModel() if self.language_model is None else self.language_model

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As upstream, which writes "module." into names for each wrapper of the precision."""
        return without_wrappers(super().sharded_state_dict(*args, **kwargs), self)


class _HalfEncoder(Float16Module):
    """Keeps an encoder's rows in its precision, as the exchange with the language model expects."""

    def forward(self, *inputs: Any, fp32_output: bool = False, **kwargs: Any) -> Any:
        return super().forward(*inputs, fp32_output=fp32_output, **kwargs)


def frozen_encoders(names: Collection[str], parts: Collection[str]) -> list[str]:
    """The encoders without any trained parameter, to which no gradient is sent."""
    return [name for name in names if {name, f"{name}-projector"} <= set(parts)]


def prepare(
    model: BoundaryMimoModel,
    groups: Mapping[str, ProcessGroupCollection],
    ddp_config: DistributedDataParallelConfig,
    *,
    data_parallel_random_init: bool = False,
) -> None:
    """Wrap each module of this rank for training, and set how gradients are finalized.

    groups: as of `build`. ddp_config: of the language model; encoders do not overlap communication,
    because a rank without media runs no backward.
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
        # Megatron reads it from every module, and transformers' modules have none.
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


def save(
    model: BoundaryMimoModel, config: OmniConfig, folder: Path, groups: dict[str, ProcessGroupCollection]
) -> None:
    """Write FOLDER/release (torch_dist): weights, and the arguments from which the model is known again.

    Megatron's `--load` reads it in any layout; `nemotron3 convert to-hf` and `generate` take it as it is.
    """
    target = folder / RELEASE
    target.mkdir(parents=True)
    args = args_of(config.language, padded_vocab_size=config.language.vocab_size, dtype="float32")
    args.omni_encoders = config.encoders_json()
    state = common_state(args)
    metadata = state.pop("content_metadata")
    described = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": groups[LANGUAGE].dp_cp})
    state["model"] = without_wrappers(described, model)
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    write_tracker(folder, RELEASE)


def load(model: BoundaryMimoModel, folder: Path) -> None:
    """Load the weights of a checkpoint of `save` into a model of any layout."""
    state = {"model": without_wrappers(model.sharded_state_dict(), model)}
    require_trusted(folder / RELEASE)
    # Integrity is of saving: the replicas of an encoder with tensor parallelism call themselves the main one.
    loaded = dist_checkpointing.load(state, str(folder / RELEASE), validate_access_integrity=False)
    model.load_state_dict(loaded["model"], strict=False)
