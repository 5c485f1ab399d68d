"""How each parameter of Megatron's model is split over tensor-parallel ranks, row by row of the name table.

torch_dist folders hold global shapes, so this is for legacy mp_rank folders and for checks. What the rows
say ("column", "row", "parts") becomes an axis and the sizes of the parts; what cannot be split is refused
in Megatron's terms.

`linear_qkv` is cut into equal runs of rows, also where TP exceeds the number of KV groups: Megatron then
gathers the projections of a group's ranks when it runs, and stores no KV head twice.
"""

from __future__ import annotations

from typing import Any

from megatron_nemotron3.convert import transforms
from megatron_nemotron3.convert.plan import Plan
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import PARAMETER, Row, symbol_sizes


def split(
    row: Row, config: Nemotron3Config, *, tp: int, etp: int = 1, padded_vocab_size: int | None = None
) -> Plan | None:
    """The plan that splits one parameter of a row ("full") over its ranks ("0" …); None: all have it whole.

    Routed experts are split over the `etp` ranks of their own group, everything else over `tp`.

    Raises:
        ValueError: the model cannot be split so; the message names the field.
    """
    table = symbol_sizes(config, padded_vocab_size)
    size = etp if row.routed else tp
    if row.tp == "replicated":
        return None
    _check(row, config, size)
    tensor = row.spelling(PARAMETER).tensors[0]
    shape = tuple(table[symbol] for symbol in tensor.shape)
    parts = [table[part.shape[0]] for part in row.spellings[0].tensors] if row.tp == "parts" else ()
    try:
        return transforms.split(shape, size, axis=1 if row.tp == "row" else 0, parts=parts)
    except ValueError as problem:
        raise ValueError(f"{config.name}: {tensor.name}: {problem}") from None


def _check(row: Row, config: Nemotron3Config, size: int) -> None:
    groups = config.num_query_groups
    if row.part == "*" and groups % size and size % groups:
        raise ValueError(f"{config.name}: num_query_groups={groups} and TP={size}: one must divide the other")
    for field in ("mamba_num_groups", "mamba_num_heads") if row.part == "M" else ():
        if getattr(config, field) % size:
            raise ValueError(f"{config.name}: {field}={getattr(config, field)} is not divisible by TP={size}")


def shard(row: Row, config: Nemotron3Config, weight: Any, *, tp: int, etp: int = 1) -> tuple[Any, ...]:
    """A full parameter [as in the table] -> what each of its ranks holds."""
    size = etp if row.routed else tp
    plan = split(row, config, tp=tp, etp=etp, padded_vocab_size=_rows(row, weight))
    return (weight,) * size if plan is None else tuple(transforms.apply(plan, {"full": weight}).values())


def unshard(row: Row, config: Nemotron3Config, shards: Any) -> Any:
    """The inverse of `shard`.

    Raises:
        ValueError: ranks differ in a parameter that all of them hold whole, besides what `split` raises.
    """
    size = len(shards)
    if row.tp == "replicated":
        for rank, other in enumerate(shards):
            if not bool((other == shards[0]).all()):
                raise ValueError(f"{row.spelling(PARAMETER).tensors[0].name}: ranks 0 and {rank} differ")
        return shards[0]
    rows = _rows(row, shards[0])
    plan = split(row, config, tp=size, etp=size, padded_vocab_size=rows and rows * size)
    assert plan is not None
    return transforms.apply(plan.inverse(), {str(rank): part for rank, part in enumerate(shards)})["full"]


def _rows(row: Row, weight: Any) -> int | None:
    return int(weight.shape[0]) if row.spellings[0].rule == "vocabulary" else None
