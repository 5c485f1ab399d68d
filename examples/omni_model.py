"""A tiny Nemotron 3 Nano with a vision and an audio encoder in MIMO's model, each on ranks of its own; for
omni_cpu.py. The encoders are transformers' own classes with small numbers: a ViT and Parakeet's Conformer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from omni_data import FRAMES, LENGTH, MELS, PATCH, SPECIAL, VOCABULARY
from torch import Tensor, nn

from megatron_nemotron3.args import Launch, ParallelLayout
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.build import model_config
from megatron_nemotron3.models import get, tiny

with warnings.catch_warnings():  # MIMO calls itself experimental, at import
    warnings.simplefilter("ignore")
    from megatron.core.models.mimo.config import MimoModelConfig
    from megatron.core.models.mimo.submodules.audio import AudioModalitySubmodules
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules

LANGUAGE = "language"
WIDTH = 32
#: Standard deviation of the encoders' weights. The usual 0.02 is for widths of 1000.
SPREAD = 0.15
#: Half the layers of the tiny Nano, with every layer kind.
BACKBONE = tiny(get("nano")).but(pattern="MEM*ME", vocab_size=VOCABULARY, seq_length=LENGTH)


def _by_shape(items: list[Tensor], run: Callable[[Tensor], Tensor]) -> Tensor:
    """Run items of the same shape as one batch; return the rows [rows, width] of all items in order."""
    shapes: dict[torch.Size, list[int]] = {}
    for number, item in enumerate(items):
        shapes.setdefault(item.shape, []).append(number)
    rows: list[Tensor] = [torch.zeros(0, WIDTH)] * len(items)
    for numbers in shapes.values():
        for number, made in zip(numbers, run(torch.stack([items[n] for n in numbers])), strict=True):
            rows[number] = made
    return torch.cat([torch.zeros(0, WIDTH), *rows])


class Vision(nn.Module):
    """ViT over pictures of any size: one row per patch."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTModel

        super().__init__()
        config = ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            image_size=3 * PATCH,
            patch_size=PATCH,
            initializer_range=SPREAD,
        )
        self.vit = ViTModel(config, add_pooling_layer=False)

    def forward(self, pictures: list[Tensor]) -> Tensor:
        """pictures: [3, height, width] each -> [patches of all, WIDTH]."""

        def run(batch: Tensor) -> Tensor:
            return self.vit(batch, interpolate_pos_encoding=True).last_hidden_state[:, 1:]  # without [CLS]

        return _by_shape(pictures, run)


class Audio(nn.Module):
    """Conformer over spectrograms of any length: one row per FRAMES frames."""

    def __init__(self) -> None:
        from transformers import ParakeetEncoder, ParakeetEncoderConfig

        super().__init__()
        config = ParakeetEncoderConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            conv_kernel_size=5,
            subsampling_factor=FRAMES,
            subsampling_conv_channels=8,
            num_mel_bins=MELS,
            max_position_embeddings=64,
            dropout=0.0,
            layerdrop=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
            initializer_range=SPREAD,
        )
        self.conformer = ParakeetEncoder(config)

    def train(self, mode: bool = True) -> Audio:
        """Keep batch norms in evaluation mode; batch statistics would depend on which clips share a rank."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    def forward(self, sounds: list[Tensor]) -> Tensor:
        """sounds: [frames, MELS] each -> [frames of all / FRAMES, WIDTH]."""
        return _by_shape(sounds, lambda batch: self.conformer(batch).last_hidden_state)


ENCODERS: dict[str, tuple[type, str, type]] = {
    "vision": (VisionModalitySubmodules, "vit", Vision),
    "audio": (AudioModalitySubmodules, "conformer", Audio),
}


def grid(layout: Layout) -> HyperCommGrid:
    """Upstream's grid with the groups that models and optimizers need. Every rank must call it.

    Experts are spread over the tensor ranks (EP = TP), each in one piece.
    """
    tp, cp, pp, dp = layout.tp, layout.cp, layout.pp, layout.dp
    made = HyperCommGrid([tp, cp, pp, dp], ["tp", "cp", "pp", "dp"], rank_offset=layout.offset)
    made.register_view(
        "expert", shape=[1, tp, pp, dp * cp], dim_names=["expt_tp", "ep", "pp", "expt_dp"], shared_dims=["pp"]
    )
    for words in ("tp", "cp", "pp", "dp", "dp cp", "tp cp", "tp pp", "tp cp dp", "tp cp dp pp"):
        made.create_pg(words.split())
    for words in ("ep", "expt_tp", "expt_dp", "expt_tp ep", "expt_tp ep pp"):
        made.create_pg(words.split(), view="expert")
    return made


def groups(of: HyperCommGrid) -> ProcessGroupCollection:
    """This rank's groups of a grid, as Megatron's modules expect them."""
    dense = {"tp_cp": "tp cp", "dp_cp": "dp cp", "mp": "tp pp", "tp_dp_cp": "tp cp dp"}
    dense |= {"intra_dp_cp": "dp cp", "dp_cp_gtp_remat": "dp cp", "intra_dist_opt": "tp cp dp pp"}
    expert = {"tp_ep": "expt_tp ep", "tp_ep_pp": "expt_tp ep pp", "intra_expt_dp": "expt_dp"}
    found = {name: of.get_pg(words.split()) for name, words in dense.items()}
    found |= {name: of.get_pg(name) for name in ("tp", "cp", "pp", "dp")}
    found |= {name: of.get_pg(words.split(), view="expert") for name, words in expert.items()}
    found |= {name: of.get_pg(name, view="expert") for name in ("ep", "expt_tp", "expt_dp")}
    return ProcessGroupCollection(**found, embd=None, pos_embd=None)


def _language(layout: Layout, at: ProcessGroupCollection | None) -> ModuleSpec:
    """The language model; `at` is this rank's groups, or None on a rank that reads only its config."""
    world = torch.distributed.get_world_size()
    config = model_config(
        Launch.of(
            BACKBONE,
            layout=ParallelLayout(
                tp=layout.tp, pp=layout.pp, ep=layout.tp, dp=world // (layout.tp * layout.pp)
            ),
            precision="fp32",
            backend="torch",
        )
    )
    config.transformer.calculate_per_token_loss = True
    if at is None:
        return ModuleSpec(module=HybridModel, params={"config": config.transformer})
    return ModuleSpec(
        module=HybridModel,
        params={
            "config": config.transformer,
            "hybrid_stack_spec": config.hybrid_stack_spec,
            "vocab_size": VOCABULARY,
            "max_sequence_length": LENGTH,
            "hybrid_layer_pattern": config.hybrid_layer_pattern,
            "position_embedding_type": config.position_embedding_type,
            "pre_process": at.pp.rank() == 0,
            "post_process": at.pp.rank() == at.pp.size() - 1,
            "scatter_embedding_sequence_parallel": False,  # MimoModel's condition
            "pg_collection": at,
        },
    )


def build(
    kind: Callable[..., Any], layouts: Mapping[str, Layout], grids: Mapping[str, HyperCommGrid], seed: int = 1
) -> tuple[Any, dict[str, ProcessGroupCollection]]:
    """(this rank's part of a MimoModel, each module in Megatron's DistributedDataParallel; groups by module).

    Args:
        kind: `MimoModel`, or what makes a subclass.
        layouts, grids: of LANGUAGE and of each encoder.
    """
    mine = {name: groups(g) for name, g in grids.items() if g.is_current_rank_in_grid()}
    language = mine.get(LANGUAGE)
    at = language or next(iter(mine.values()))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=at.tp.rank(), ep_rank=at.ep.rank(), etp_rank=at.expt_tp.rank(), force_reset_rng=True
    )
    encoders = {
        name: ModuleSpec(
            module=submodules,
            params={"pg_collection": mine.get(name)},
            submodules={
                "encoders": {word: ModuleSpec(module=encoder)},
                "input_projections": [
                    ModuleSpec(
                        module=nn.Linear, params={"in_features": WIDTH, "out_features": BACKBONE.hidden_size}
                    )
                ],
            },
        )
        for name, (submodules, word, encoder) in ENCODERS.items()
    }
    config = MimoModelConfig(
        language_model_spec=_language(layouts[LANGUAGE], language),
        modality_submodules_spec=encoders,
        special_token_ids=dict(SPECIAL),
        module_to_grid_map=dict(grids),
    )
    model = kind(config, cp_group=at.cp, tp_group=at.tp)
    model.model_type = ModelType.encoder_or_decoder
    if model.language_model is not None:
        model.language_model = _ddp(model.config, model.language_model, mine[LANGUAGE])
    for name, encoder in model.modality_submodules.items():
        model.modality_submodules[name] = _ddp(_encoder_config(), encoder, mine[name])
    return model, mine


def _encoder_config() -> TransformerConfig:
    """Attributes that Megatron's gradient sync needs on a module of another library."""
    return TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=True
    )


def _ddp(config: Any, module: Any, at: ProcessGroupCollection) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(config, settings, module, pg_collection=at)


def _chunks(model: Any) -> dict[tuple[str, tuple[int, ...]], ShardedTensor]:
    """This rank's pieces by (name in a checkpoint, offset in the whole tensor)."""
    state = model.sharded_state_dict()
    apply_factories(state)
    return {
        (value.key, value.global_offset): value
        for value in nested_values(state)
        if isinstance(value, ShardedTensor) and value.data is not None
    }


def _place(chunk: ShardedTensor) -> tuple[slice, ...]:
    """Where a chunk lies in the whole tensor; axes that only number chunks have length 1."""
    sizes = (1,) * chunk.prepend_axis_num + tuple(chunk.local_shape)
    return tuple(slice(at, at + size) for at, size in zip(chunk.global_offset, sizes, strict=True))


def weights(model: Any) -> dict[str, Tensor]:
    """Whole tensors by their name in a checkpoint, of a model on one rank."""
    whole: dict[str, Tensor] = {}
    for (name, _), chunk in _chunks(model).items():
        if name not in whole:
            whole[name] = torch.empty(chunk.global_shape, dtype=chunk.dtype)
        whole[name][_place(chunk)] = chunk.data.detach().view(
            (1,) * chunk.prepend_axis_num + tuple(chunk.local_shape)
        )
    return whole


def load(model: Any, whole: Mapping[str, Tensor]) -> None:
    """Load `weights` into a model of any layout.

    Raises:
        ValueError: some did not arrive.
    """
    with torch.no_grad():
        for (name, _), chunk in _chunks(model).items():
            chunk.data.copy_(whole[name][_place(chunk)].view_as(chunk.data))
    for (name, offset), chunk in _chunks(model).items():
        if not torch.equal(chunk.data, whole[name][_place(chunk)].view_as(chunk.data)):
            raise ValueError(f"weights of {name} at {offset} were not set: its pieces are copies, not views")
