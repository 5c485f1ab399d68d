"""The rules that convert Megatron's tensors to Hugging Face's, and the tensor-parallel split of parameters.

`RULES[name](megatron, hf, head_dim)` takes names and shapes and returns the `CopyPlan` that makes the HF
tensors from Megatron's; its `inverse()` goes back.

torch_dist folders hold global shapes, so the split is needed only for Megatron-FSDP's folders and for refit.
`linear_qkv` is cut into equal bands of rows, even if TP exceeds the number of KV groups: Megatron gathers the
projections of a group's ranks at run time, and no KV head is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_nemotron3.checkpoints.convert.plan import CopyPiece, CopyPlan, Shape, band, whole
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import PARAMETER, Row, symbol_sizes

Shapes = Mapping[str, Shape]


def copy(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> CopyPlan:
    """Copy tensors that are the same on both sides, pair by pair."""
    pairs = _paired_tensors(megatron, hf)
    return CopyPlan(megatron, hf, tuple(CopyPiece(a, whole(s), b, whole(hf[b])) for a, b, s in pairs))


def vocabulary(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> CopyPlan:
    """Take the first rows: Megatron's table is [padded vocabulary, d], HF's is [vocabulary, d]."""
    pieces = []
    for a, b, shape in _paired_tensors(megatron, hf):
        rows = hf[b][0]
        if shape[0] < rows or shape[1:] != hf[b][1:]:
            raise ValueError(
                f"{a} {list(shape)} cannot hold the {rows} rows of {b} {list(hf[b])}: a vocabulary is padded "
                "at its end, never cut"
            )
        pieces.append(CopyPiece(a, band(shape, 0, rows), b, whole(hf[b])))
    return CopyPlan(megatron, hf, tuple(pieces))


def concat(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> CopyPlan:
    """Concatenate several tensors along axis 0 into one HF tensor."""
    ((whole_name, shape),) = hf.items()
    pieces, start = [], 0
    for name, part in megatron.items():
        if part[1:] != shape[1:]:
            raise ValueError(f"{name} {list(part)} is not a part of {whole_name} {list(shape)}")
        pieces.append(CopyPiece(name, whole(part), whole_name, band(shape, start, start + part[0])))
        start += part[0]
    if start != shape[0]:
        raise ValueError(f"{', '.join(megatron)} have {start} rows, {whole_name} has {shape[0]}")
    return CopyPlan(megatron, hf, tuple(pieces))


def shared(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> CopyPlan:
    """Copy one tensor into each HF tensor (A of a LoRA adapter of q, k, v); back, take the first of them."""
    ((name, shape),) = megatron.items()
    if any(part != shape for part in hf.values()):
        raise ValueError(f"{name} {list(shape)} is not the same as each of {', '.join(hf)}")
    return CopyPlan(megatron, hf, tuple(CopyPiece(name, whole(shape), one, whole(shape)) for one in hf))


def stack(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> CopyPlan:
    """Unstack a tensor [experts, rows, columns] into an HF tensor [rows, columns] per expert."""
    ((name, shape),) = megatron.items()
    if shape[0] != len(hf):
        raise ValueError(f"{name} {list(shape)} holds {shape[0]} experts, {len(hf)} are expected")
    pieces = []
    for expert, (one, part) in enumerate(hf.items()):
        if part != shape[1:]:
            raise ValueError(f"{one} {list(part)} is not a part of {name} {list(shape)}")
        pieces.append(CopyPiece(name, band(shape, expert, expert + 1), one, whole(part)))
    return CopyPlan(megatron, hf, tuple(pieces))


def qkv(megatron: Shapes, hf: Shapes, head_dim: int = 0) -> CopyPlan:
    """Split the rows [q … q, k, v] of each KV group into q, k, v of all groups, `head_dim` rows a head."""
    ((name, shape),) = megatron.items()
    (q, q_shape), (k, k_shape), (v, v_shape) = hf.items()
    groups, odd = divmod(k_shape[0], head_dim) if head_dim > 0 else (0, 1)
    rows, rest = divmod(q_shape[0], k_shape[0]) if k_shape[0] else (0, 1)
    rows *= head_dim  # query rows of one group
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
            pieces.append(CopyPiece(name, band(shape, begin, begin + number), part, to))
    return CopyPlan(megatron, hf, tuple(pieces))


_RULES: tuple[Callable[[Shapes, Shapes, int], CopyPlan], ...] = (copy, vocabulary, concat, shared, stack, qkv)
RULES = {rule.__name__: rule for rule in _RULES}


def _paired_tensors(megatron: Shapes, hf: Shapes) -> list[tuple[str, str, Shape]]:
    if len(megatron) != len(hf):
        raise ValueError(
            f"{len(megatron)} tensors ({', '.join(megatron)}) cannot be {len(hf)} ({', '.join(hf)})"
        )
    return [(a, b, shape) for (a, shape), b in zip(megatron.items(), hf)]


def split(shape: Shape, size: int, *, axis: int = 0, parts: Sequence[int] = ()) -> CopyPlan:
    """Return the tensor-parallel split of a tensor "full" into the tensors "0" … "size - 1" of the ranks."""
    parts = tuple(parts) or (shape[axis],)
    if sum(parts) != shape[axis]:
        raise ValueError(
            f"parts {list(parts)} add up to {sum(parts)}, but axis {axis} has {shape[axis]} elements"
        )
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
            pieces.append(CopyPiece("full", source, str(rank), target))
            start, to = start + part, to + n
    return CopyPlan({"full": shape}, {str(rank): local for rank in range(size)}, tuple(pieces))


def split_parameter(
    row: Row, config: Nemotron3Config, *, tp: int, etp: int = 1, padded_vocab_size: int | None = None
) -> CopyPlan | None:
    """Return the plan that splits the parameter of a row ("full") over its ranks ("0" …).

    None if the parameter is replicated. Routed experts are split over their `etp` ranks, all other
    parameters over `tp`.
    """
    table = symbol_sizes(config, padded_vocab_size)
    size = etp if row.routed else tp
    if row.tp == "replicated":
        return None
    _check_row_splits(row, config, size)
    tensor = row.spelling(PARAMETER).tensors[0]
    shape = tuple(table[symbol] for symbol in tensor.shape)
    parts = [table[part.shape[0]] for part in row.spellings[0].tensors] if row.tp == "parts" else ()
    try:
        return split(shape, size, axis=1 if row.tp == "row" else 0, parts=parts)
    except ValueError as problem:
        raise ValueError(f"{config.name}: {tensor.name}: {problem}") from None


def _check_row_splits(row: Row, config: Nemotron3Config, size: int) -> None:
    groups = config.num_query_groups
    if row.part == "*" and groups % size and size % groups:
        raise ValueError(f"{config.name}: num_query_groups={groups} and TP={size}: one must divide the other")
    for field in ("mamba_num_groups", "mamba_num_heads") if row.part == "M" else ():
        if getattr(config, field) % size:
            raise ValueError(f"{config.name}: {field}={getattr(config, field)} is not divisible by TP={size}")
