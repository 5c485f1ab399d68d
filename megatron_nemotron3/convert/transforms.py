"""The rules that join Megatron's tensors and Hugging Face's, as plans and as functions on arrays.

`RULES[name](megatron, hf, head_dim)` takes names and shapes and gives the `Plan` that makes the HF tensors
of the Megatron ones; its `inverse()` goes the other way. The functions on arrays below (`split_qkv`,
`pad_vocabulary`, …) carry out the same plans on torch tensors or numpy arrays, for use in memory; they
copy, and never change a dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_nemotron3.convert.plan import Piece, Plan, Region, Shape, apply, band, whole

Shapes = Mapping[str, Shape]


def copy(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> Plan:
    """Tensors that are the same on both sides, pair by pair."""
    pairs = _pairs(megatron, hf)
    return Plan(megatron, hf, tuple(Piece(a, whole(s), b, whole(hf[b])) for a, b, s in pairs))


def vocabulary(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> Plan:
    """A table [padded vocabulary, d] on Megatron's side and [vocabulary, d] on HF's: the first rows.

    Raises:
        ValueError: Megatron's table is the shorter one.
    """
    pieces, unused = [], []
    for a, b, shape in _pairs(megatron, hf):
        rows = hf[b][0]
        if shape[0] < rows or shape[1:] != hf[b][1:]:
            raise ValueError(
                f"{a} {list(shape)} cannot hold the {rows} rows of {b} {list(hf[b])}: a vocabulary is padded "
                "at its end, never cut"
            )
        pieces.append(Piece(a, band(shape, 0, rows), b, whole(hf[b])))
        if shape[0] > rows:
            unused.append(Region(a, band(shape, rows, shape[0])))
    return Plan(megatron, hf, tuple(pieces), unused=tuple(unused))


def concat(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> Plan:
    """Several tensors, one behind another along axis 0, that are one tensor on HF's side."""
    ((whole_name, shape),) = hf.items()
    pieces, start = [], 0
    for name, part in megatron.items():
        if part[1:] != shape[1:]:
            raise ValueError(f"{name} {list(part)} is no part of {whole_name} {list(shape)}")
        pieces.append(Piece(name, whole(part), whole_name, band(shape, start, start + part[0])))
        start += part[0]
    if start != shape[0]:
        raise ValueError(f"{', '.join(megatron)} have {start} rows, {whole_name} has {shape[0]}")
    return Plan(megatron, hf, tuple(pieces))


def stack(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> Plan:
    """One tensor [experts, rows, columns] that is a tensor [rows, columns] for each expert on HF's side."""
    ((name, shape),) = megatron.items()
    if shape[0] != len(hf):
        raise ValueError(f"{name} {list(shape)} holds {shape[0]} experts, {len(hf)} are expected")
    pieces = []
    for expert, (one, part) in enumerate(hf.items()):
        if part != shape[1:]:
            raise ValueError(f"{one} {list(part)} is no part of {name} {list(shape)}")
        pieces.append(Piece(name, band(shape, expert, expert + 1), one, whole(part)))
    return Plan(megatron, hf, tuple(pieces))


def qkv(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> Plan:
    """The rows [q … q, k, v] of each KV group <-> q, k and v of all groups; a head is `head_dim` rows.

    Raises:
        ValueError: row counts that do not make whole heads and groups.
    """
    ((name, shape),) = megatron.items()
    (q, q_shape), (k, k_shape), (v, v_shape) = hf.items()
    groups, odd = divmod(k_shape[0], head_dim) if head_dim > 0 else (0, 1)
    rows, rest = divmod(q_shape[0], k_shape[0]) if k_shape[0] else (0, 1)
    rows *= head_dim  # of the queries in one group
    if odd or rest or k_shape != v_shape or shape[0] != q_shape[0] + 2 * k_shape[0]:
        raise ValueError(
            f"{name} {list(shape)} with heads of {head_dim} is not q {list(q_shape)}, k {list(k_shape)} and "
            f"v {list(v_shape)}: check num_attention_heads, num_query_groups and kv_channels"
        )
    pieces = []
    for group in range(groups):
        start = group * (rows + 2 * head_dim)
        for part, part_shape, begin, number in (
            (q, q_shape, start, rows),
            (k, k_shape, start + rows, head_dim),
            (v, v_shape, start + rows + head_dim, head_dim),
        ):
            to = band(part_shape, group * number, (group + 1) * number)
            pieces.append(Piece(name, band(shape, begin, begin + number), part, to))
    return Plan(megatron, hf, tuple(pieces))


RULES: dict[str, Callable[[Shapes, Shapes, int], Plan]] = {
    "copy": copy,
    "vocabulary": vocabulary,
    "concat": concat,
    "stack": stack,
    "qkv": qkv,
}


def _pairs(megatron: Shapes, hf: Shapes) -> list[tuple[str, str, Shape]]:
    if len(megatron) != len(hf):
        raise ValueError(
            f"{len(megatron)} tensors ({', '.join(megatron)}) cannot be {len(hf)} ({', '.join(hf)})"
        )
    return [(a, b, shape) for (a, shape), b in zip(megatron.items(), hf)]


def split(shape: Shape, size: int, *, axis: int = 0, parts: Sequence[int] = ()) -> Plan:
    """The tensor-parallel split of a tensor "full" into the tensors "0" … "size - 1" of the ranks.

    Args:
        shape: of the full tensor.
        axis: 0 for column-parallel weights, 1 for row-parallel ones.
        parts: sizes of the parts along `axis` that are split each on its own, and then stand one behind
            another on a rank: [z|x|B|C|dt] of a rank, not a cut through [z|x|B|C|dt]. Default: one part.

    Raises:
        ValueError: a part that `size` does not divide, or parts that are not the whole axis.
    """
    parts = tuple(parts) or (shape[axis],)
    if sum(parts) != shape[axis]:
        raise ValueError(f"parts {list(parts)} are {sum(parts)} of the {shape[axis]} elements of axis {axis}")
    if bad := [part for part in parts if part % size]:
        raise ValueError(f"{bad[0]} elements of axis {axis} of {list(shape)} are not divisible by TP={size}")
    local = (*shape[:axis], shape[axis] // size, *shape[axis + 1 :])
    pieces = []
    for rank in range(size):
        start = to = 0
        for part in parts:
            n = part // size
            begin = start + rank * n
            source, target = band(shape, begin, begin + n, axis), band(local, to, to + n, axis)
            pieces.append(Piece("full", source, str(rank), target))
            start, to = start + part, to + n
    return Plan({"full": shape}, {str(rank): local for rank in range(size)}, tuple(pieces))


# -- the same on arrays ----------------------------------------------------------------------------


def split_qkv(weight: Any, heads: int, groups: int) -> tuple[Any, Any, Any]:
    """Megatron's `linear_qkv` [(heads + 2 groups) c, …] -> q [heads c, …], k and v [groups c, …]."""
    c, odd = divmod(weight.shape[0], heads + 2 * groups)
    if odd:
        raise ValueError(f"{weight.shape[0]} rows are not divisible by {heads} heads + 2 * {groups} groups")
    rest = tuple(weight.shape[1:])
    shapes = {"q": (heads * c, *rest), "k": (groups * c, *rest), "v": (groups * c, *rest)}
    parts = apply(qkv({"qkv": tuple(weight.shape)}, shapes, c), {"qkv": weight})
    return parts["q"], parts["k"], parts["v"]


def merge_qkv(q: Any, k: Any, v: Any, groups: int) -> Any:
    """The inverse of `split_qkv`."""
    arrays = {"q": q, "k": k, "v": v}
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    rows = sum(shape[0] for shape in shapes.values())
    plan = qkv({"qkv": (rows, *shapes["q"][1:])}, shapes, shapes["k"][0] // groups)
    return apply(plan.inverse(), arrays)["qkv"]


def split_rows(weight: Any, parts: Sequence[int]) -> tuple[Any, ...]:
    """One tensor -> tensors of `parts` rows each (in_proj: z, x, B, C, dt; conv1d: x, B, C)."""
    rest = tuple(weight.shape[1:])
    plan = concat({str(i): (n, *rest) for i, n in enumerate(parts)}, {"all": tuple(weight.shape)})
    return tuple(apply(plan.inverse(), {"all": weight}).values())


def merge_rows(parts: Sequence[Any]) -> Any:
    """The inverse of `split_rows`."""
    arrays = {str(i): part for i, part in enumerate(parts)}
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return apply(concat({name: tuple(a.shape) for name, a in arrays.items()}, {"all": shape}), arrays)["all"]


def stack_experts(experts: Sequence[Any]) -> Any:
    """[rows, columns] of each expert -> [experts, rows, columns]."""
    arrays = {str(i): expert for i, expert in enumerate(experts)}
    shape = (len(experts), *experts[0].shape)
    plan = stack({"all": shape}, {name: tuple(a.shape) for name, a in arrays.items()})
    return apply(plan.inverse(), arrays)["all"]


def unstack_experts(weight: Any, start: int = 0, stop: int | None = None) -> tuple[Any, ...]:
    """The inverse of `stack_experts`, for the experts [start, stop)."""
    part = weight[start:stop]
    shape = tuple(part.shape)
    plan = stack({"all": shape}, {str(i): shape[1:] for i in range(shape[0])})
    return tuple(apply(plan, {"all": part}).values())


def pad_vocabulary(weight: Any, rows: int) -> Any:
    """[vocabulary, d] -> [rows, d], zeros behind it."""
    shape = tuple(weight.shape)
    plan = vocabulary({"padded": (rows, *shape[1:])}, {"table": shape})
    return apply(plan.inverse(), {"table": weight})["padded"]


def trim_vocabulary(weight: Any, rows: int) -> Any:
    """[padded vocabulary, d] -> [rows, d]."""
    shape = tuple(weight.shape)
    return apply(vocabulary({"padded": shape}, {"table": (rows, *shape[1:])}), {"padded": weight})["table"]


def shard(weight: Any, size: int, *, axis: int = 0, parts: Sequence[int] = ()) -> tuple[Any, ...]:
    """A full tensor -> what each tensor-parallel rank holds of it; see `split`."""
    plan = split(tuple(weight.shape), size, axis=axis, parts=parts)
    return tuple(apply(plan, {"full": weight}).values())


def unshard(shards: Sequence[Any], *, axis: int = 0, parts: Sequence[int] = ()) -> Any:
    """The inverse of `shard`; `parts` are those of the full tensor."""
    shape = tuple(shards[0].shape)
    full = (*shape[:axis], shape[axis] * len(shards), *shape[axis + 1 :])
    plan = split(full, len(shards), axis=axis, parts=parts).inverse()
    return apply(plan, {str(rank): part for rank, part in enumerate(shards)})["full"]
