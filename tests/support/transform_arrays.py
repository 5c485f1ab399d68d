"""The rules of `checkpoints.convert.transforms`, applied to torch tensors and numpy arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_nemotron3.checkpoints.convert.plan import CopyPlan, Slices, apply, extent
from megatron_nemotron3.checkpoints.convert.transforms import (
    concat,
    qkv,
    split,
    split_parameter,
)
from megatron_nemotron3.checkpoints.structure import tiling_problem
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import PARAMETER, Row


def split_qkv(weight: Any, heads: int, groups: int) -> tuple[Any, Any, Any]:
    """Split Megatron's `linear_qkv` [(heads + 2 groups) c, …] into q [heads c, …], k and v [groups c, …]."""
    c, odd = divmod(weight.shape[0], heads + 2 * groups)
    if odd:
        raise ValueError(f"{weight.shape[0]} rows are not divisible by {heads} heads + 2 * {groups} groups")
    rest = tuple(weight.shape[1:])
    shapes = {"q": (heads * c, *rest), "k": (groups * c, *rest), "v": (groups * c, *rest)}
    parts = apply(qkv({"qkv": tuple(weight.shape)}, shapes, c), {"qkv": weight})
    return parts["q"], parts["k"], parts["v"]


def merge_qkv(q: Any, k: Any, v: Any, groups: int) -> Any:
    """Inverse of `split_qkv`."""
    arrays = {"q": q, "k": k, "v": v}
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    rows = sum(shape[0] for shape in shapes.values())
    plan = qkv({"qkv": (rows, *shapes["q"][1:])}, shapes, shapes["k"][0] // groups)
    return apply(plan.inverse(), arrays)["qkv"]


def split_rows(weight: Any, parts: Sequence[int]) -> tuple[Any, ...]:
    """Split a tensor into tensors of `parts` rows (in_proj: z, x, B, C, dt; conv1d: x, B, C)."""
    rest = tuple(weight.shape[1:])
    plan = concat({str(i): (n, *rest) for i, n in enumerate(parts)}, {"all": tuple(weight.shape)})
    return tuple(apply(plan.inverse(), {"all": weight}).values())


def shard(weight: Any, size: int, *, axis: int = 0, parts: Sequence[int] = ()) -> tuple[Any, ...]:
    """Split a full tensor into the shards of the tensor-parallel ranks; see `split`."""
    plan = split(tuple(weight.shape), size, axis=axis, parts=parts)
    return tuple(apply(plan, {"full": weight}).values())


def shard_parameter(
    row: Row, config: Nemotron3Config, weight: Any, *, tp: int, etp: int = 1
) -> tuple[Any, ...]:
    """Split a full parameter [shape of the table] into the shards of its ranks."""
    size = etp if row.routed else tp
    plan = split_parameter(row, config, tp=tp, etp=etp, padded_vocab_size=_vocabulary_rows(row, weight))
    return (weight,) * size if plan is None else tuple(apply(plan, {"full": weight}).values())


def unshard_parameter(row: Row, config: Nemotron3Config, shards: Any) -> Any:
    """Inverse of `shard_parameter`.

    Raises:
        ValueError: a replicated parameter differs between ranks, or as `split_parameter`.
    """
    size = len(shards)
    if row.tp == "replicated":
        for rank, other in enumerate(shards):
            if not bool((other == shards[0]).all()):
                raise ValueError(f"{row.spelling(PARAMETER).tensors[0].name}: ranks 0 and {rank} differ")
        return shards[0]
    rows = _vocabulary_rows(row, shards[0])
    plan = split_parameter(row, config, tp=size, etp=size, padded_vocab_size=rows and rows * size)
    assert plan is not None
    return apply(plan.inverse(), {str(rank): part for rank, part in enumerate(shards)})["full"]


def _vocabulary_rows(row: Row, weight: Any) -> int | None:
    return int(weight.shape[0]) if row.spellings[0].rule == "vocabulary" else None


def check_plan(plan: CopyPlan, padding: Mapping[str, Slices] | None = None) -> None:
    """Check that a plan uses every element of both sides exactly once, but for `padding`, which it does not.

    Raises:
        ValueError: an element is used twice or not at all, or the two sides of a piece differ in shape.
    """
    for piece in plan.pieces:
        sides = (extent(piece.source_slices), extent(piece.destination_slices))
        if [n for n in sides[0] if n != 1] != [n for n in sides[1] if n != 1]:
            raise ValueError(f"{piece}: the shapes of the two sides differ")
    read = [(p.source, p.source_slices) for p in plan.pieces]
    written = [(p.destination, p.destination_slices) for p in plan.pieces]
    for name, slices in (padding or {}).items():
        (read if name in plan.sources else written).append((name, slices))
    for side, shapes, regions in (
        ("source", plan.sources, read),
        ("destination", plan.destinations, written),
    ):
        if unknown := {name for name, _ in regions} - set(shapes):
            raise ValueError(f"{side} {min(unknown)!r} is not a tensor of the plan")
        for name, shape in shapes.items():
            boxes = [(tuple(a for a, _ in s), extent(s)) for other, s in regions if other == name]
            if problem := tiling_problem(shape, boxes):
                raise ValueError(f"{side} {name}: {problem}")
