"""Every rule has an inverse, and every plan uses each element exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.convert import inventory, transforms
from megatron_nemotron3.checkpoints.convert.plan import (
    CopyPiece,
    CopyPlan,
    apply,
    band,
    bands,
    extent,
    whole,
)
from megatron_nemotron3.checkpoints.structure import tiling_problem
from megatron_nemotron3.models import get
from megatron_nemotron3.models import names as catalog_names
from tests.support import transform_arrays as arrays
from tests.support.convert_models import random_config

TP = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn)
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


kinds = st.sampled_from([np.int32, np.float16, *DTYPES])


@given(tp=st.sampled_from(TP), parts=st.lists(small, min_size=1, max_size=5), width=small, kind=kinds)
def test_shard_and_back_by_parts(tp: int, parts: list[int], width: int, kind: Any) -> None:
    sizes = [tp * n for n in parts]
    weight = numbered(sum(sizes), 1, width, kind=kind)
    shards = arrays.shard(weight, tp, parts=sizes)
    assert all(s.shape == (sum(parts), 1, width) for s in shards)
    assert same(arrays.unshard(shards, parts=sizes), weight)


@given(tp=st.sampled_from(TP), rows=small, columns=small, kind=kinds)
def test_shard_and_back_by_columns_of_the_matrix(tp: int, rows: int, columns: int, kind: Any) -> None:
    weight = numbered(rows, tp * columns, kind=kind)
    shards = arrays.shard(weight, tp, axis=1)
    assert same(shards[-1], weight[:, -columns:])
    assert same(arrays.unshard(shards, axis=1), weight)


def test_a_part_is_cut_on_its_own() -> None:
    # z = 0 1 2 3, x = 4 5 6 7, dt = 8 9 over two ranks.
    first, second = arrays.shard(np.arange(10), 2, parts=[4, 4, 2])
    assert first.tolist() == [0, 1, 4, 5, 8]
    assert second.tolist() == [2, 3, 6, 7, 9]


@given(groups=small, queries=small, head_dim=small, width=small, kind=kinds)
def test_qkv_and_back(groups: int, queries: int, head_dim: int, width: int, kind: Any) -> None:
    weight = numbered(groups * (queries + 2) * head_dim, width, kind=kind)
    q, k, v = arrays.split_qkv(weight, groups * queries, groups)
    assert [len(x) for x in (q, k, v)] == [n * head_dim for n in (groups * queries, groups, groups)]
    assert same(arrays.merge_qkv(q, k, v, groups), weight)


def test_qkv_is_interleaved_by_groups() -> None:
    # Two groups of two query heads, one row a head: [q0 q1 k0 v0 q2 q3 k1 v1]
    q, k, v = arrays.split_qkv(np.arange(8), 4, 2)
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])


@given(parts=st.lists(small, min_size=1, max_size=5), width=small, kind=kinds)
def test_rows_and_back(parts: list[int], width: int, kind: Any) -> None:
    weight = numbered(sum(parts), width, kind=kind)
    pieces = arrays.split_rows(weight, parts)
    assert [len(p) for p in pieces] == parts
    assert same(arrays.merge_rows(pieces), weight)


@given(experts=small, rows=small, columns=small, kind=kinds, data=st.data())
def test_experts_and_back(experts: int, rows: int, columns: int, kind: Any, data: st.DataObject) -> None:
    weight = numbered(experts, rows, columns, kind=kind)
    singles = arrays.unstack_experts(weight)
    assert [tuple(one.shape) for one in singles] == [(rows, columns)] * experts
    assert same(arrays.stack_experts(singles), weight)
    start = data.draw(st.integers(0, experts - 1))
    stop = data.draw(st.integers(start + 1, experts))
    for one, other in zip(arrays.unstack_experts(weight, start, stop), singles[start:stop]):
        assert same(one, other)


@given(rows=small, extra=st.integers(0, 4), width=small, kind=kinds)
def test_vocabulary_and_back(rows: int, extra: int, width: int, kind: Any) -> None:
    table = numbered(rows, width, kind=kind)
    padded = arrays.pad_vocabulary(table, rows + extra)
    assert padded.shape == (rows + extra, width)
    assert not padded[rows:].any() if isinstance(padded, np.ndarray) else not padded[rows:].float().any()
    assert same(arrays.trim_vocabulary(padded, rows), table)


@pytest.mark.parametrize("dialect", ["torch_dist", "parameter", "singleton experts", "separate norm"])
@pytest.mark.parametrize("seed", range(8))
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


def piece(a: int, b: int, c: int, d: int) -> CopyPiece:
    return CopyPiece("a", ((a, b),), "b", ((c, d),))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ((piece(0, 4, 0, 4),), "source a: .* 4 of 6 elements"),
        ((piece(0, 4, 0, 4), piece(3, 5, 4, 6)), "source a: .* overlap"),
        ((piece(0, 4, 0, 4), piece(4, 6, 3, 5)), "destination b: .* overlap"),
        ((piece(0, 4, 0, 3), piece(4, 6, 4, 6)), "shapes of the two sides differ"),
        ((piece(0, 7, 0, 7),), r"reaches beyond \[6\]"),
        ((piece(0, 6, 0, 6), CopyPiece("c", ((0, 1),), "b", ((0, 1),))), "'c' is not a tensor of the plan"),
    ],
)
def test_check_sees_what_is_wrong(pieces: tuple[CopyPiece, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        arrays.check_plan(CopyPlan({"a": (6,)}, {"b": (6,)}, pieces))


def test_check_sees_an_overlap_with_padding() -> None:
    plan = transforms.vocabulary({"a": (6, 2)}, {"b": (4, 2)})
    arrays.check_plan(plan, {"a": ((4, 6), (0, 2))})
    with pytest.raises(ValueError, match="overlap"):
        arrays.check_plan(plan, {"a": ((3, 6), (0, 2))})
    with pytest.raises(ValueError, match="8 of 12 elements"):
        arrays.check_plan(plan)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: transforms.vocabulary({"a": (3, 2)}, {"b": (4, 2)}), "cannot hold the 4 rows"),
        (lambda: transforms.vocabulary({"a": (6, 2)}, {"b": (4, 3)}), "cannot hold"),
        (lambda: transforms.concat({"a": (3, 2), "b": (1, 2)}, {"c": (5, 2)}), "4 rows, c has 5"),
        (lambda: transforms.concat({"a": (3, 2)}, {"c": (3, 1)}), "not a part of"),
        (lambda: transforms.stack({"a": (3, 2, 2)}, {"b": (2, 2)}), "holds 3 experts, 1 are expected"),
        (lambda: transforms.stack({"a": (1, 2, 2)}, {"b": (2, 3)}), "not a part of"),
        (lambda: transforms.qkv({"a": (8, 2)}, {"q": (4, 2), "k": (2, 2), "v": (1, 2)}, 1), "check num_att"),
        (lambda: transforms.qkv({"a": (9, 2)}, {"q": (4, 2), "k": (2, 2), "v": (2, 2)}, 1), "check num_att"),
        (lambda: transforms.qkv({"a": (8, 2)}, {"q": (4, 2), "k": (2, 2), "v": (2, 2)}, 4), "check num_att"),
        (lambda: transforms.split((6, 2), 4), "6 elements of axis 0 .* not divisible by TP=4"),
        (lambda: transforms.split((8, 2), 2, parts=[4, 3]), "add up to 7, but axis 0 has 8"),
        (lambda: arrays.split_qkv(np.zeros((7, 2)), 4, 2), "7 rows are not divisible"),
        (lambda: transforms.copy({"a": (1,)}, {}), "cannot be 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_apply_refuses_wrong_sources() -> None:
    plan = transforms.concat({"a": (1, 2), "b": (2, 2)}, {"c": (3, 2)})
    with pytest.raises(ValueError, match="no tensor 'b'"):
        apply(plan, {"a": np.zeros((1, 2))})
    with pytest.raises(ValueError, match=r"b has shape \(1, 2\), expected \(2, 2\)"):
        apply(plan, {"a": np.zeros((1, 2)), "b": np.zeros((1, 2))})
    with pytest.raises(ValueError, match="c is made of float64 and of float32"):
        apply(plan, {"a": np.zeros((1, 2)), "b": np.zeros((2, 2), np.float32)})


@settings(max_examples=30)
@given(limit=st.integers(1, 50), shape=st.tuples(small, small, small))
def test_bands_are_small_and_of_whole_rows(limit: int, shape: tuple[int, int, int]) -> None:
    found = list(bands(whole(shape), limit))
    axis = next((i for i, n in enumerate(shape) if n != 1), 2)
    for one in found:
        assert np.prod(extent(one)) <= limit or extent(one)[axis] == 1
        assert one[axis + 1 :] == whole(shape)[axis + 1 :]
    assert tiling_problem(shape, [(tuple(a for a, _ in s), extent(s)) for s in found]) is None
