"""Every rule has an inverse and uses each element once; the split over ranks gives Megatron's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.convert import inventory, plan, transforms
from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.checkpoints.convert.plan import (
    apply,
    band,
    bands,
    extent,
    whole,
)
from megatron_nemotron3.checkpoints.structure import tiling_problem
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models import names as catalog_names
from megatron_nemotron3.models.tensors import PARAMETER, ROWS, Row, symbol_sizes
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support import transform_arrays as arrays
from tests.support.convert_models import DISTINCT, GOLDEN, assemble, chunks, random_config, stored_parameters
from tests.support.model_mapping import megatron_model
from tests.support.transform_arrays import check_plan, shard_parameter, unshard_parameter

small = st.integers(1, 5)


def numbered(*shape: int, kind: Any = np.int32) -> Any:
    """Return an array whose elements are all different (up to the range of a byte)."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if isinstance(kind, torch.dtype):
        return torch.from_numpy(array % 251).to(torch.uint8).view(torch.uint8).to(kind)
    return array.astype(kind)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = (a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return a.dtype == b.dtype and np.array_equal(a, b)


def test_a_part_is_cut_on_its_own() -> None:
    # z = 0 1 2 3, x = 4 5 6 7, dt = 8 9 over two ranks.
    first, second = arrays.shard(np.arange(10), 2, parts=[4, 4, 2])
    assert first.tolist() == [0, 1, 4, 5, 8]
    assert second.tolist() == [2, 3, 6, 7, 9]


def test_qkv_is_interleaved_by_groups() -> None:
    # Two groups of two query heads, one row a head: [q0 q1 k0 v0 q2 q3 k1 v1]
    q, k, v = arrays.split_qkv(np.arange(8), 4, 2)
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])


@pytest.mark.parametrize("dialect", ["torch_dist", "parameter", "singleton experts", "separate norm"])
@pytest.mark.parametrize("seed", range(3))
def test_every_plan_of_a_model_tiles_both_sides(seed: int, dialect: str) -> None:
    config = random_config(seed)
    for mapping in inventory.mappings(config, dialect=dialect, padded_vocab_size=config.vocab_size + seed):
        plan = mapping.to_hf()
        padded = {}
        if mapping.spelling.rule == "vocabulary" and seed:
            (table,) = mapping.megatron
            padded = {table.name: band(table.shape, config.vocab_size, config.vocab_size + seed)}
        for one in (plan, plan.inverse()):
            arrays.check_plan(one, padded)
        megatron = {t.name: numbered(*t.shape) for t in mapping.megatron}
        made = apply(plan, megatron)
        assert {t.name: t.shape for t in mapping.hf} == {name: a.shape for name, a in made.items()}
        if not padded:
            back = apply(plan.inverse(), made)
            assert all(same(back[name], array) for name, array in megatron.items())


@pytest.mark.parametrize("name", catalog_names())
def test_plans_of_the_published_sizes_tile(name: str) -> None:
    config, seen = get(name), set()
    for mapping in inventory.mappings(config):
        if (mapping.row.part, mapping.row.hf) not in seen:  # every layer of a kind has the same plans
            seen.add((mapping.row.part, mapping.row.hf))
            arrays.check_plan(mapping.to_hf())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: transforms.vocabulary({"a": (3, 2)}, {"b": (4, 2)}), "cannot hold the 4 rows"),
        (lambda: transforms.concat({"a": (3, 2), "b": (1, 2)}, {"c": (5, 2)}), "4 rows, c has 5"),
        (lambda: transforms.stack({"a": (3, 2, 2)}, {"b": (2, 2)}), "holds 3 experts, 1 are expected"),
        (lambda: transforms.qkv({"a": (8, 2)}, {"q": (4, 2), "k": (2, 2), "v": (1, 2)}, 1), "check num_att"),
        (lambda: transforms.split((6, 2), 4), "6 elements of axis 0 .* not divisible by TP=4"),
        (lambda: transforms.split((8, 2), 2, parts=[4, 3]), "add up to 7, but axis 0 has 8"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@settings(max_examples=30)
@given(limit=st.integers(1, 50), shape=st.tuples(small, small, small))
def test_bands_are_small_and_of_whole_rows(limit: int, shape: tuple[int, int, int]) -> None:
    found = list(bands(whole(shape), limit))
    axis = next((i for i, n in enumerate(shape) if n != 1), 2)
    for one in found:
        assert np.prod(extent(one)) <= limit or extent(one)[axis] == 1
        assert one[axis + 1 :] == whole(shape)[axis + 1 :]
    assert tiling_problem(shape, [(tuple(a for a, _ in s), extent(s)) for s in found]) is None


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


@pytest.mark.parametrize("tp", [1, 8])
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


@pytest.mark.full
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
