"""Nano Omni as Megatron's MIMO model: this rank's part of it in any layout, wrapped, saved, loaded.

    model, groups = build(get_omni("nano-omni-tiny"), {"language": Layout.of(tp=2), "vision": …, "sound": …})

Modules, parameter names and checkpoints are those of `MimoModel`; encoders stand below
`modality_submodules.vision.encoders.radio` and `modality_submodules.sound.encoders.parakeet`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import unwrap_model
from megatron.training.models.dist_utils import prepare_existing_model_chunks_for_distributed_training

from megatron_nemotron3.boundary.feed import RowFeed
from megatron_nemotron3.boundary.groups import grid, groups
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.boundary.training import finalize_model_grads
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of, common_state
from megatron_nemotron3.checkpoints.folders import RELEASE, write_tracker
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.layers.frozen import freeze_biases
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.build import model_config
from megatron_nemotron3.train.omni.encoders import Projector, SoundEncoder, VisionEncoder, projector_sizes
from megatron_nemotron3.train.omni.layouts import LANGUAGE, SOUND, VISION

with warnings.catch_warnings():  # MIMO calls itself experimental, at import
    warnings.simplefilter("ignore")
    from megatron.core.models.mimo.config import MimoModelConfig
    from megatron.core.models.mimo.submodules.audio import AudioModalitySubmodules
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules

#: Seed of the initial weights that `build` draws.
SEED = 1
#: What can be frozen. "vision" and "sound" are the encoders without their projectors.
PARTS = (LANGUAGE, VISION, "vision-projector", SOUND, "sound-projector")


def hybrid_spec(config: Any, at: ProcessGroupCollection | None) -> ModuleSpec:
    """The module of a `HybridModelConfig`; `at`: this rank's groups, None on a rank without it."""
    if "/" in config.hybrid_layer_pattern:
        raise ValueError(f"{config.hybrid_layer_pattern}: Megatron's MIMO model trains no MTP: leave it out")
    if at is None:
        return ModuleSpec(module=HybridModel, params={"config": config.transformer})
    return ModuleSpec(
        module=HybridModel,
        params={
            "config": config.transformer,
            "hybrid_stack_spec": config.hybrid_stack_spec,
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.seq_length,
            "hybrid_layer_pattern": config.hybrid_layer_pattern,
            "position_embedding_type": config.position_embedding_type,
            "pre_process": at.pp.rank() == 0,
            "post_process": at.pp.rank() == at.pp.size() - 1,
            "scatter_embedding_sequence_parallel": False,  # MimoModel's condition
            "pg_collection": at,
        },
    )


def encoder_specs(
    config: OmniConfig, at: Mapping[str, ProcessGroupCollection], seed: int | None = None
) -> dict[str, ModuleSpec]:
    """The encoders' modules with their projectors."""
    kinds = {
        VISION: (VisionModalitySubmodules, "radio", VisionEncoder, config.vision),
        SOUND: (AudioModalitySubmodules, "parakeet", SoundEncoder, config.sound),
    }
    return {
        name: ModuleSpec(
            module=submodules,
            params={"pg_collection": at.get(name)},
            submodules={
                "encoders": {encoder: ModuleSpec(module=kind, params={"sizes": sizes, "seed": seed})},
                "input_projections": [
                    ModuleSpec(module=Projector, params=projector_sizes(config, name) | {"seed": seed})
                ],
            },
        )
        for name, (submodules, encoder, kind, sizes) in kinds.items()
        if sizes is not None
    }


def build(
    config: OmniConfig,
    layouts: Mapping[str, Layout],
    *,
    precision: str = "fp32",
    ep: int = 1,
    frozen: Collection[str] = (),
    feed: RowFeed | None = None,
    seed: int = SEED,
) -> tuple[BoundaryMimoModel, dict[str, ProcessGroupCollection]]:
    """Return this rank's part of the model on the torch backend, and its groups by module.

    Initial weights of encoders and projectors do not depend on the layout.

    Args:
        layouts: of `LANGUAGE`, `VISION` and `SOUND`; of `SOUND` only if the model has it. With TP the
            language model is sequence parallel, whether its layout says so or not.
        precision: of all parts, as of `Launch`.
        ep: expert parallelism of the language model.
        frozen: parts (of `PARTS`) whose parameters do not train.
        seed: of the initial weights.

    Raises:
        ValueError: a module has no layout, a layout is of no module, layouts do not fit each other or the
            model, or a part to freeze is unknown.
    """
    encoders = (VISION, SOUND) if config.sound else (VISION,)
    if set(layouts) != {LANGUAGE, *encoders}:
        raise ValueError(
            f"{config.name}: layouts of {', '.join(sorted(layouts)) or 'nothing'}: give those of "
            f"{', '.join((LANGUAGE, *encoders))}"
        )
    check_parts(frozen)
    grids = {name: grid(layout, ep if name == LANGUAGE else 1) for name, layout in layouts.items()}
    mine = {name: groups(g) for name, g in grids.items() if g.is_current_rank_in_grid()}
    if not mine:
        raise ValueError(
            f"rank {torch.distributed.get_rank()} has no module: layouts "
            f"{', '.join(f'{name}: {layout}' for name, layout in layouts.items())}: start fewer ranks"
        )
    language = layouts[LANGUAGE]
    at = mine.get(LANGUAGE) or next(iter(mine.values()))
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # sequence parallelism gathers into it
        parallel_state._set_global_memory_buffer()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=at.tp.rank(), ep_rank=at.ep.rank(), etp_rank=at.expt_tp.rank(), force_reset_rng=True
    )
    launch = Launch.of(
        config.language,
        ParallelLayout(tp=language.tp, pp=language.pp, cp=language.cp, ep=ep, dp=language.dp),
        precision=precision,
        backend="torch",
    )
    with warnings.catch_warnings():  # as at import
        warnings.simplefilter("ignore")
        built = model_config(launch, whole_world=False)
        built.transformer.calculate_per_token_loss = True
        built.vocab_size, built.seq_length = launch.config.vocab_size, launch.config.seq_length
        model = BoundaryMimoModel(
            MimoModelConfig(
                language_model_spec=hybrid_spec(built, mine.get(LANGUAGE)),
                modality_submodules_spec=encoder_specs(config, mine, seed),
                special_token_ids=config.special_ids(),
                module_to_grid_map=grids,
            ),
            cp_group=at.cp,
            tp_group=at.tp,
            share={name: layouts[name].share for name in encoders},
            feed=feed,
        )
    model.model_type = ModelType.encoder_or_decoder
    model.modality_submodules.to(dtype=model.config.params_dtype)
    freeze(model, frozen)
    return model, mine


def check_parts(parts: Collection[str]) -> None:
    """Check names of parts."""
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"frozen: {', '.join(unknown)}: no part of the model; use {', '.join(PARTS)}")


def freeze(model: BoundaryMimoModel, parts: Collection[str]) -> None:
    """Make the parameters of parts constant; call it before DistributedDataParallel wraps modules."""
    check_parts(parts)
    if LANGUAGE in parts and model.language_model is not None:
        model.language_model.requires_grad_(False)
        freeze_biases(model.language_model)
    for name, submodule in model.modality_submodules.items():
        if name in parts:
            submodule.encoders.requires_grad_(False)
        if f"{name}-projector" in parts:
            submodule.input_projections.requires_grad_(False)


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
