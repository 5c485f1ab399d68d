"""The page docs/reference/models.md: the catalog, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_nemotron3.models.catalog import get, names
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.parameters import count, stored_tensors
from megatron_nemotron3.models.pattern import count as kinds


def _experts(config: Nemotron3Config, column: int) -> str:
    """FFN width (column 0) or experts per token (1): one number, or the decoder's range and MTP's."""
    own = (config.moe_ffn_hidden_size, config.moe_router_topk)[column]
    if config.moe_layers is None:
        return str(own)
    values = [row[column] for row in config.moe_layers]
    return f"{min(values)} to {max(values)}" + (f" (MTP {own})" if config.has_mtp else "")


_ROWS: list[tuple[str, Callable[[Nemotron3Config], object]]] = [
    ("layers M / E / * / -", lambda c: " / ".join(str(kinds(c.pattern).get(k, 0)) for k in "ME*-")),
    ("hidden size", lambda c: c.hidden_size),
    (
        "query / KV heads, head dimension",
        lambda c: f"{c.num_attention_heads} / {c.num_query_groups}, {c.kv_channels}",
    ),
    (
        "Mamba heads, head dimension, state, groups",
        lambda c: f"{c.mamba_num_heads}, {c.mamba_head_dim}, {c.mamba_state_dim}, {c.mamba_num_groups}",
    ),
    ("dense FFN", lambda c: c.dense_ffn_hidden_size),
    ("routed experts, top-k", lambda c: f"{c.num_moe_experts}, {_experts(c, 1)}" if c.is_moe else None),
    (
        "expert FFN / shared FFN",
        lambda c: f"{_experts(c, 0)} / {c.moe_shared_expert_intermediate_size}" if c.is_moe else None,
    ),
    ("latent size", lambda c: c.moe_latent_size),
    ("routed scaling factor", lambda c: c.moe_router_topk_scaling_factor),
    (
        "MTP: depths, block, stored blocks, loss scale",
        lambda c: (
            f"{c.mtp_num_layers}, `{c.mtp_pattern}`, {c.mtp_num_blocks}, {c.mtp_loss_scaling_factor}"
            if c.has_mtp
            else None
        ),
    ),
    ("initialization std", lambda c: c.init_method_std),
    ("elements stored, MTP included", lambda c: count(c).stored),
    ("elements stored, without MTP", lambda c: count(c, mtp=False).stored),
    ("tensors in a Hugging Face checkpoint", stored_tensors),
]


#: Heading of a table -> which models are its columns. A page of 1366 pixels has room for five.
GROUPS: dict[str, Callable[[Nemotron3Config], bool]] = {
    "Mixtures of experts": lambda c: c.is_moe,
    "Dense: Nemotron Nano": lambda c: not c.is_moe and not c.name.startswith("nemotron-h"),
    "Dense: Nemotron-H": lambda c: not c.is_moe and c.name.startswith("nemotron-h"),
}


def tables(
    rows: Sequence[tuple[str, Callable[[Nemotron3Config], object]]], heading: str = "##"
) -> Iterator[str]:
    """Lines of a table per group of models: a column per model, a row per value that any of them has."""
    for title, member in GROUPS.items():
        configs = [config for config in map(get, names()) if member(config)]
        yield from (f"{heading} {title}", "")
        yield "| | " + " | ".join(f"`{c.name}`" for c in configs) + " |"
        yield "|-|" + "-:|" * len(configs)
        for label, value in rows:
            cells = [value(config) for config in configs]
            if any(cell is not None for cell in cells):
                yield f"| {label} | " + " | ".join(map(_table_cell, cells)) + " |"
        yield ""


def _table_cell(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown() -> str:
    """The page."""
    configs = [get(name) for name in names()]
    lines = [
        "# Models",
        "",
        "Generated from the catalog: `python -m tests.docs.pages`.",
        "`nemotron3 show NAME` prints one model in full, with sources.",
        "",
        *tables(_ROWS),
        "## Layer patterns",
        "",
        "One character is one layer: `M` Mamba-2, `*` attention, `E` mixture of experts, `-` dense MLP.",
        "`/` begins an MTP depth.",
        "",
    ]
    lines += [f"- `{c.name}` ({c.title}): `{c.full_pattern}`" for c in configs]
    lines += [
        "",
        "## Experts that differ by layer",
        "",
        "FFN width / experts per token of each E layer, in order.",
        "",
    ]
    for c in configs:
        if c.moe_layers is not None:
            rows = ", ".join(f"{width}/{topk}" for width, topk in c.moe_layers)
            lines.append(f"- `{c.name}` ({c.title}): {rows}")
    return "\n".join(lines) + "\n"
