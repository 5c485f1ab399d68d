"""Nano Omni as Megatron's MIMO model: this rank's part of it, in any layout of its modules.

    model, groups = build(get_omni("nano-omni-tiny"), {"language": Layout.of(tp=2), "vision": …, "sound": …})

Modules, parameter names and checkpoints are those of `MimoModel`; encoders stand below
`modality_submodules.vision.encoders.radio` and `modality_submodules.sound.encoders.parakeet`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_nemotron3.boundary.feed import RowFeed
from megatron_nemotron3.boundary.grids import grid, groups
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.launch import Launch, ParallelLayout
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


def language_spec(launch: Launch, at: ProcessGroupCollection | None) -> ModuleSpec:
    """The language model's module; `at` is this rank's groups, None on a rank without it."""
    config = model_config(launch, whole_world=False)
    config.transformer.calculate_per_token_loss = True
    config.vocab_size, config.seq_length = launch.config.vocab_size, launch.config.seq_length
    return hybrid_spec(config, at)


def hybrid_spec(config: Any, at: ProcessGroupCollection | None) -> ModuleSpec:
    """The module of a `HybridModelConfig`; `at` as for `language_spec`."""
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
        model = BoundaryMimoModel(
            MimoModelConfig(
                language_model_spec=language_spec(launch, mine.get(LANGUAGE)),
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
    for name, submodule in model.modality_submodules.items():
        if name in parts:
            submodule.encoders.requires_grad_(False)
        if f"{name}-projector" in parts:
            submodule.input_projections.requires_grad_(False)
