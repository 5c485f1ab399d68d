"""The catalog as a Markdown page, docs/reference/models.md. A test compares the two.

python -m megatron_nemotron3.models.table > docs/reference/models.md
"""

from __future__ import annotations

from collections.abc import Callable

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
        "Generated from the catalog: `python -m megatron_nemotron3.models.table > docs/reference/models.md`.",
        "`nemotron3 show NAME` prints one model in full, with sources.",
        "",
        "| | " + " | ".join(f"`{c.name}`" for c in configs) + " |",
        "|-|" + "-|" * len(configs),
    ]
    lines += [
        f"| {title} | " + " | ".join(_table_cell(value(c)) for c in configs) + " |" for title, value in _ROWS
    ]
    lines += ["", "Patterns (one character a layer; `/` opens an MTP depth):", ""]
    lines += [f"- `{c.name}` ({c.title}): `{c.full_pattern}`" for c in configs]
    lines += [
        "",
        "Experts that differ by layer (FFN width / experts per token of each E layer, in order):",
        "",
    ]
    for c in configs:
        if c.moe_layers is not None:
            rows = ", ".join(f"{width}/{topk}" for width, topk in c.moe_layers)
            lines.append(f"- `{c.name}` ({c.title}): {rows}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
