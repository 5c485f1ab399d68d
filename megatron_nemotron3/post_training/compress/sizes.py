"""The sizes that pruning changes, and the model that remains.

    candidate_config(get("super"), {"mamba_num_heads": 64, "moe_latent_size": 768})

Names of sizes are those of `Nemotron3Config`. Sizes of the experts may differ by layer: a tuple has one value
for each E layer that stays. An MTP block has the sizes of the model, so it is cut with the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tiny import TINY_SUFFIX

#: One size, or one for each E layer.
Size = int | tuple[int, ...]
Sizes = Mapping[str, Size]

#: Size -> kinds of layers that have it. A model without such a layer cannot be pruned along it.
DIMENSIONS = {
    "hidden_size": "M*E-",
    "num_layers": "M*E-",
    "mamba_num_heads": "M",
    "mamba_head_dim": "M",
    "num_attention_heads": "*",
    "num_query_groups": "*",
    "dense_ffn_hidden_size": "-",
    "num_moe_experts": "E",
    "moe_router_topk": "E",
    "moe_ffn_hidden_size": "E",
    "moe_shared_expert_intermediate_size": "E",
    "moe_latent_size": "E",
}
#: Sizes that a tuple may give layer by layer: the columns of `Nemotron3Config.moe_layers`.
BY_LAYER = ("moe_ffn_hidden_size", "moe_router_topk")


def candidate_config(
    config: Nemotron3Config, sizes: Sizes, layers: Sequence[int] | None = None
) -> Nemotron3Config:
    """Return the model that a pruning to these sizes leaves.

    Fewer KV groups take their query heads with them: without `num_attention_heads` each group that stays
    keeps its own.

    Args:
        sizes: name of `DIMENSIONS` -> new size.
        layers: numbers (from 0) of the decoder layers that stay, in order; `Scores.layers` has those that
            change the residual stream most. None: all of them.

    Raises:
        ValueError: an unknown size, one that the model does not have, one that is larger than the model's or
            splits a group, or `num_layers` and `layers` that differ.
    """
    for name, new in sizes.items():
        _check(config, name, new)
    kept = _kept_layers(config, sizes, layers)
    changes: dict[str, Any] = {n: size for n, size in sizes.items() if n not in ("num_layers", *BY_LAYER)}
    groups = changes.get("num_query_groups", config.num_query_groups)
    per_group = config.num_attention_heads // config.num_query_groups
    heads = changes.setdefault("num_attention_heads", groups * per_group)
    if heads > groups * per_group:
        raise ValueError(
            f"num_attention_heads={heads}: {groups} groups of {config.name} have {groups * per_group} query "
            f"heads, give at most {groups * per_group}"
        )
    for name, number, what in (
        ("mamba_num_heads", config.mamba_num_groups, "mamba_num_groups"),
        ("num_attention_heads", groups, "num_query_groups"),
    ):
        if changes.get(name, 0) % number:
            raise ValueError(
                f"{name}={changes[name]}: heads are pruned within groups, {what}={number}: give a "
                f"multiple of {number}"
            )
    changes["pattern"] = "".join(config.pattern[layer] for layer in kept)
    if config.is_moe:
        changes |= _experts(config, sizes, kept)
    # The name of an unknown model is that of its folder, and of an ambiguous one "a or b or …".
    name = re.sub(r"[^\w.-]+", "-", config.name.rpartition("/")[2].partition(" or ")[0])
    base = name.removesuffix(TINY_SUFFIX)  # stays last, because `train` looks for it
    changes |= {"name": f"{base}-pruned{name[len(base) :]}", "title": f"{config.title}, pruned"}
    return config.but(**changes, published_total=None, published_active=None)


def parse_sizes(words: Sequence[str]) -> dict[str, Size]:
    """Read the words of --sizes, "NAME=N" or, by layer, "NAME=N,N,…"."""
    found = parse_numbers(words, "--sizes", "NAME=N, such as hidden_size=2048")
    return {name: numbers[0] if len(numbers) == 1 else numbers for name, numbers in found.items()}


#: Values of a size to choose from: a search compares all in each layer, for each choice of the others.
MOST_VALUES = 64


def parse_numbers(words: Sequence[str], option: str, wanted: str) -> dict[str, tuple[int, ...]]:
    """Read the words of an option, "NAME=N,N,…", with names of `DIMENSIONS`."""
    found: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        numbers = text.split(",")
        if not equals or not all(one.isascii() and one.isdigit() and int(one) for one in numbers):
            raise ValueError(f"{option} {word}: give {wanted}")
        require_known(name)
        if len(numbers) > MOST_VALUES:
            raise ValueError(f"{option} {name}: {len(numbers):,} values: give at most {MOST_VALUES}")
        if name in found:
            raise ValueError(f"{option} {word}: {name} is given twice: drop one")
        found[name] = tuple(map(int, numbers))
    return found


def require_known(name: str) -> None:
    """Raise ValueError for a name that is none of `DIMENSIONS`."""
    if name not in DIMENSIONS:
        raise ValueError(
            f"{name} cannot be pruned: choose from {', '.join(DIMENSIONS)}{hint(name, list(DIMENSIONS))}"
        )


def _kept_layers(config: Nemotron3Config, sizes: Sizes, layers: Sequence[int] | None) -> Sequence[int]:
    number = sizes.get("num_layers", config.num_layers if layers is None else len(layers))
    if layers is None:
        if number != config.num_layers:
            raise ValueError(f"num_layers={number}: say which layers stay (Scores.layers)")
        return range(config.num_layers)
    if len(layers) != number or list(layers) != sorted(set(layers) & set(range(config.num_layers))):
        raise ValueError(
            f"layers {list(layers)}: give {number} different numbers below {config.num_layers}, in order"
        )
    return layers


def _check(config: Nemotron3Config, name: str, new: Size) -> None:
    """Raise ValueError unless a size exists in the model and is not larger there."""
    require_known(name)
    kinds = DIMENSIONS[name]
    old = getattr(config, name)
    if old is None or not set(kinds) & set(config.pattern + (config.mtp_pattern or "")):
        without = f"no {' or '.join(kinds)} layer" if name != "moe_latent_size" else "no latent width"
        raise ValueError(f"{name}: {config.name} has {without}")
    if isinstance(new, tuple) and name not in BY_LAYER:
        raise ValueError(f"{name}={new}: give one number; only {' and '.join(BY_LAYER)} differ by layer")
    if isinstance(new, int) and not 0 < new <= old:
        raise ValueError(f"{name}={new}: {config.name} has {old}, give 1 to {old}")


def _experts(config: Nemotron3Config, sizes: Sizes, kept: Sequence[int]) -> dict[str, Any]:
    """Return the changed fields of the experts. One number is for MTP, too; a tuple is for the decoder."""
    layers = [layer for layer in kept if config.pattern[layer] == "E"]
    rows = [[one.moe_ffn_hidden_size, one.moe_router_topk] for one in map(config.at, layers)]
    own = [config.moe_ffn_hidden_size, config.moe_router_topk]
    experts = sizes.get("num_moe_experts", config.num_moe_experts)
    for column, name in enumerate(BY_LAYER):
        if (new := sizes.get(name)) is None:
            continue
        values = new if isinstance(new, tuple) else (new,) * len(rows)
        if len(values) != len(rows):
            raise ValueError(f"{name} has {len(values)} values for {len(rows)} E layers: give one for each")
        for layer, row, value in zip(layers, rows, values, strict=True):
            if not 0 < value <= (row[column] or 0):
                raise ValueError(
                    f"{name}={value}: layer {layer} of {config.name} has {row[column]}, give 1 to that"
                )
            row[column] = value
        if isinstance(new, int):
            own[column] = new
    if "E" not in (config.mtp_pattern or "") and rows and all(row == rows[0] for row in rows):
        own = rows[0]
    if (most := max(row[1] or 0 for row in [own, *rows])) > experts:  # type: ignore[operator]
        raise ValueError(
            f"num_moe_experts={experts} is less than moe_router_topk={most}: give at least {most}, or a "
            "smaller moe_router_topk, too"
        )
    differ = any(row != own for row in rows)
    return {
        "moe_ffn_hidden_size": own[0],
        "moe_router_topk": own[1],
        "moe_layers": tuple((row[0], row[1]) for row in rows) if differ else None,
    }
