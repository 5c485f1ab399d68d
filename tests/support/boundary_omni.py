"""A small omni model on grids: the tiny hybrid language model and two encoders inside MIMO's model.

For tests and examples on gloo and the CPU. Every function runs on every rank, inside `cpu_mode`, after
torch.distributed is initialized; nothing reads Megatron's global groups.

    grids = {"vision": grid(dp=2), "audio": grid(dp=2), "language": grid(tp=2, sp=True)}
    model = build(BoundaryMimoModel, grids, sequence_parallel=True)
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_nemotron3.specs import nemotron3_torch_stack_spec
from tests.support.models import SIZES, VOCABULARY

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.models.mimo.config import MimoModelConfig
    from megatron.core.models.mimo.submodules.audio import AudioModalitySubmodules
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules

HIDDEN = SIZES["hidden_size"]
FEATURES = 12
SPECIAL = {"vision": VOCABULARY - 1, "audio": VOCABULARY - 2}
SUBMODULES = {"vision": VisionModalitySubmodules, "audio": AudioModalitySubmodules}


def grid(
    *, tp: int = 1, cp: int = 1, pp: int = 1, dp: int = 1, offset: int = 0, ep: int = 1
) -> HyperCommGrid:
    """A grid with every group that the models and optimizers here ask for. A collective call.

    Experts: without EP expert data parallel over dp and cp, so the expert view is [tp, 1, pp, dp * cp]; with
    EP each expert is whole.
    """
    made = HyperCommGrid([tp, cp, pp, dp], ["tp", "cp", "pp", "dp"], rank_offset=offset)
    made.register_view(
        "expert",
        shape=[1, ep, pp, tp * dp * cp // ep] if ep > 1 else [tp, 1, pp, dp * cp],
        dim_names=["expt_tp", "ep", "pp", "expt_dp"],
        shared_dims=["pp"],
    )
    for dims in (
        ["tp"],
        ["cp"],
        ["pp"],
        ["dp"],
        ["dp", "cp"],
        ["tp", "cp"],
        ["tp", "pp"],
        ["tp", "cp", "dp"],
        ["tp", "cp", "dp", "pp"],
    ):
        made.create_pg(dims)
    for dims in (["ep"], ["expt_tp"], ["expt_dp"], ["expt_tp", "ep"], ["expt_tp", "ep", "pp"]):
        made.create_pg(dims, view="expert")
    return made


def groups(of: HyperCommGrid) -> ProcessGroupCollection:
    """This rank's groups of a grid, as Megatron's modules expect them."""
    return ProcessGroupCollection(
        tp=of.get_pg("tp"),
        cp=of.get_pg("cp"),
        pp=of.get_pg("pp"),
        dp=of.get_pg("dp"),
        dp_cp=of.get_pg(["dp", "cp"]),
        dp_cp_gtp_remat=of.get_pg(["dp", "cp"]),
        tp_cp=of.get_pg(["tp", "cp"]),
        mp=of.get_pg(["tp", "pp"]),
        tp_dp_cp=of.get_pg(["tp", "cp", "dp"]),
        ep=of.get_pg("ep", view="expert"),
        expt_tp=of.get_pg("expt_tp", view="expert"),
        expt_dp=of.get_pg("expt_dp", view="expert"),
        tp_ep=of.get_pg(["expt_tp", "ep"], view="expert"),
        tp_ep_pp=of.get_pg(["expt_tp", "ep", "pp"], view="expert"),
        intra_dist_opt=of.get_pg(["tp", "cp", "dp", "pp"]),
    )


class Encoder(nn.Module):
    """[rows, FEATURES] -> [rows, HIDDEN]: enough to give every row its own values and gradients."""

    def __init__(self, seed: int, recompute: bool = False) -> None:
        super().__init__()
        self.recompute, self.calls = recompute, 0
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Parameter(torch.randn(16, FEATURES, generator=generator) / FEATURES**0.5)
        self.outer = nn.Parameter(torch.randn(HIDDEN, 16, generator=generator) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, FEATURES]. In FP64, so that a row's bits do not depend on how many others there are."""
        if self.recompute and torch.is_grad_enabled():
            rows: Tensor = checkpoint(self._rows, x, use_reentrant=False)
            return rows
        return self._rows(x)

    def _rows(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (torch.tanh(x.double() @ self.inner.double().T) @ self.outer.double().T).float()


def language_spec(of: HyperCommGrid, pattern: str, sequence_parallel: bool, **fields: Any) -> ModuleSpec:
    """The tiny hybrid model of this rank in a grid."""
    pg = groups(of)
    stages = of.shape[of.dim_names.index("pp")]
    config = TransformerConfig(
        **{
            **{
                k: v
                for k, v in SIZES.items()
                if "E" in pattern or not (k.startswith("moe_") or "experts" in k)
            },
            "num_layers": len(pattern.replace("|", "")),
            "activation_func": squared_relu,
            "params_dtype": torch.float32,
            "pipeline_dtype": torch.float32,
            "tensor_model_parallel_size": pg.tp.size(),
            "context_parallel_size": pg.cp.size(),
            "pipeline_model_parallel_size": stages,
            "expert_model_parallel_size": pg.ep.size(),
            "expert_tensor_parallel_size": pg.expt_tp.size(),
            "sequence_parallel": sequence_parallel,
            "calculate_per_token_loss": True,
            "is_hybrid_model": True,
            "moe_token_dispatcher_type": "alltoall",  # the only one for variable_seq_lengths
            **fields,
        }
    )
    return ModuleSpec(
        module=HybridModel,
        params={
            "config": config,
            "hybrid_stack_spec": nemotron3_torch_stack_spec,
            "vocab_size": VOCABULARY,
            "max_sequence_length": 256,
            "hybrid_layer_pattern": pattern,
            "pre_process": pg.pp.rank() == 0,
            "post_process": pg.pp.rank() == stages - 1,
            "scatter_embedding_sequence_parallel": False,  # upstream's MimoModel asks for it
            "pg_collection": pg,
        },
    )


def build(
    kind: type,
    grids: dict[str, HyperCommGrid],
    *,
    pattern: str = "M*",
    sequence_parallel: bool = False,
    on_grids: bool = True,
    seed: int = 1234,
    packed: bool = False,
    recompute: bool = False,
    **fields: Any,
) -> Any:
    """`MimoModel` or a subclass with this rank's part of every module.

    Args:
        grids: of "language" and of the encoders ("vision", "audio").
        on_grids: False: upstream's colocated form without grids (no communicator).
    """
    mine = {name: g for name, g in grids.items() if g.is_current_rank_in_grid()}
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # sequence parallelism gathers into it
        parallel_state._set_global_memory_buffer()
    at = groups(mine.get("language", next(iter(mine.values()))))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=at.tp.rank(), ep_rank=at.ep.rank(), etp_rank=at.expt_tp.rank(), force_reset_rng=True
    )
    encoders = {
        name: ModuleSpec(
            module=SUBMODULES[name],
            params={"pg_collection": groups(grids[name]) if name in mine else None},
            submodules={
                "encoders": {
                    "tiny": ModuleSpec(module=Encoder, params={"seed": number, "recompute": recompute})
                }
            },
        )
        for number, name in enumerate(SPECIAL)
        if name in grids
    }
    language = (
        language_spec(grids["language"], pattern, sequence_parallel, **fields)
        if "language" in mine
        else ModuleSpec(module=HybridModel, params={"config": _bare_config()})
    )
    config = MimoModelConfig(
        language_model_spec=language,
        modality_submodules_spec=encoders,
        special_token_ids={name: SPECIAL[name] for name in encoders},
        module_to_grid_map=grids if on_grids else None,
        kv_format="thd" if packed else "sbhd",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(config, cp_group=at.cp, tp_group=at.tp)


def _bare_config() -> TransformerConfig:
    """Stand-in for the language model on a rank without it."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
    )
