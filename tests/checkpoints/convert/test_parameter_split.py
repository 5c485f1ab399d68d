"""The table's tensor-parallel split gives the parameters of Megatron's ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_nemotron3.checkpoints.convert import inventory, plan, transforms
from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.tensors import PARAMETER, ROWS, Row, symbol_sizes
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.convert_models import DISTINCT, GOLDEN, assemble, chunks, stored_parameters
from tests.support.model_mapping import megatron_model
from tests.support.transform_arrays import check_plan, shard_parameter, unshard_parameter

#: All the sizes of DISTINCT, but divisible by 8.
WIDE = DISTINCT.but(
    name="wide",
    hidden_size=80,
    vocab_size=520,
    num_attention_heads=16,
    num_query_groups=8,
    mamba_num_heads=24,
    mamba_num_groups=8,
)


def parameter(row: Row, config: Nemotron3Config) -> np.ndarray[Any, Any]:
    table = symbol_sizes(config)
    shape = tuple(table[symbol] for symbol in row.spelling(PARAMETER).tensors[0].shape)
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.part} {row.spelling(PARAMETER).tensors[0].name}")
def test_unshard_is_the_inverse_of_shard(row: Row, tp: int) -> None:
    weight = parameter(row, WIDE)
    shards = shard_parameter(row, WIDE, weight, tp=tp, etp=tp)
    assert len(shards) == tp
    share = 1 if row.tp == "replicated" else tp
    assert all(one.size * share == weight.size for one in shards)
    assert np.array_equal(unshard_parameter(row, WIDE, shards), weight)
    split = transforms.split_parameter(row, WIDE, tp=tp, etp=tp)
    assert (split is None) == (row.tp == "replicated")
    if split is not None:
        check_plan(split)


def ranks_tensors(config: Nemotron3Config, layout: dict[str, int]) -> Any:
    """Return (parameters, chunks) of this rank of a model in a layout."""
    initialize(**layout, seed=7)
    tp = layout.get("tp", 1)
    model = megatron_model(
        config,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
    )
    return stored_parameters(model), chunks(model)


def test_tp2_and_etp2() -> None:
    ranks_hold_what_the_table_says(DISTINCT.but(vocab_size=510), {"tp": 2, "etp": 2})


def test_tp2_and_ep2() -> None:
    ranks_hold_what_the_table_says(DISTINCT.but(vocab_size=510), {"tp": 2, "ep": 2})


def test_more_ranks_than_kv_groups() -> None:
    config = get("super-tiny").but(pattern="*M", num_query_groups=2, mtp_pattern=None, mtp_num_layers=0)
    ranks_hold_what_the_table_says(config, {"tp": 4})


def ranks_hold_what_the_table_says(config: Nemotron3Config, layout: dict[str, int]) -> None:
    """torch_dist chunks of all ranks -> HF -> full parameters -> our shards, which the ranks hold."""
    tp, ep, etp = (layout.get(key, 1) for key in ("tp", "ep", "etp"))
    ranks = run_distributed(ranks_tensors, max(tp, ep * etp), config, layout)
    tensors = assemble([chunk for _, of_rank in ranks for chunk in of_rank])
    lookup, compared = NameLookup(config), 0
    per_rank: list[dict[str, torch.Tensor]] = [dict(parameters) for parameters, _ in ranks]
    stored, full = inventory.mappings(config), inventory.mappings(config, dialect=PARAMETER)
    for mapping, parameters in zip(stored, full):
        hf = plan.apply(mapping.to_hf(), {t.name: tensors[t.name] for t in mapping.megatron})
        for tensor_name, weight in plan.apply(parameters.to_hf().inverse(), hf).items():
            match = lookup.key(tensor_name)
            shards = shard_parameter(match.row, config, weight, tp=tp, etp=etp)
            for rank, mine in enumerate(per_rank):
                name, owner = tensor_name, rank
                if match.expert is not None:
                    assert config.num_moe_experts is not None
                    # A rank numbers its own experts from 0.
                    ep_rank, local = divmod(match.expert, config.num_moe_experts // ep)
                    if rank // etp % ep != ep_rank:
                        continue
                    name, owner = tensor_name.replace(f"weight{match.expert}", f"weight{local}"), rank % etp
                value = mine.pop(name)
                if match.row.tp != "replicated" or rank == 0:  # replicas start equal, but are not compared
                    assert torch.equal(shards[owner], value), (rank, name)
                    compared += 1
    assert compared and not any(per_rank)


@pytest.mark.parametrize(
    ("name", "tp", "text"),
    [
        ("self_attention.linear_qkv.weight", 3, "num_query_groups=2 and TP=3: one must divide the other"),
        ("mixer.in_proj.weight.z", 8, "mamba_num_groups=2 is not divisible by TP=8"),
        ("mixer.A_log", 4, "mamba_num_groups=2 is not divisible by TP=4"),
        ("mlp.shared_experts.linear_fc1.weight", 3, "64 elements of axis 0 .* not divisible by TP=3"),
    ],
)
def test_what_megatron_cannot_split_is_refused(name: str, tp: int, text: str) -> None:
    config, lookup = GOLDEN["super_like"], NameLookup(GOLDEN["super_like"])
    layer = {"self": 3, "mixe": 0, "mlp.": 1}[name[:4]]
    with pytest.raises(ValueError, match=f"super_like: .*{text}"):
        transforms.split_parameter(lookup.key(f"decoder.layers.{layer}.{name}").row, config, tp=tp)


def test_replicas_that_differ_are_refused() -> None:
    row = NameLookup(DISTINCT).key("decoder.final_norm.weight").row
    with pytest.raises(ValueError, match="decoder.final_norm.weight: ranks 0 and 1 differ"):
        unshard_parameter(row, DISTINCT, [np.zeros(88), np.ones(88)])
