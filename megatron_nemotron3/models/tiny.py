"""Small forms of the models that train on two CPU cores and keep every feature of the original.

They are for tests, examples and smoke runs. They keep what is easy to get wrong: every layer kind, the ratio
of the latent space, a shared expert twice as wide as a routed one, MTP with its depths, head dimensions that
are not hidden_size / heads, eight Mamba groups, two KV groups, and a sequence longer than one SSD chunk.
"""

from __future__ import annotations

import itertools

from megatron_nemotron3.models.config import Nemotron3Config

TINY_SUFFIX = "-tiny"

# F stands for the feed-forward kinds of the original, alternately. As in the originals, an attention layer
# is between a Mamba and a feed-forward layer, and the last layer is a feed-forward layer.
_TEMPLATE = "MFM*FMFM*FMF"

_HIDDEN_SIZE = 128
_EXPERT_FFN_SIZE = 96  # 0.75 d, between Nano's 0.69 and Super's 0.66 rounded up to a multiple of 32


def tiny(config: Nemotron3Config) -> Nemotron3Config:
    """Return `config` shrunk to 2 to 5 million parameters, named "<name>-tiny".

    It can be split over TP 2 and 4 (attention: 2, with KV heads replicated beyond), EP up to 16 and PP up to
    4. There are 32 routed experts with top-6 in a latent space, and 16 with top-4 without one; LatentMoE
    gives both at equal cost. The scan chunk stays 128, because Megatron has no flag for it; the sequence is
    two chunks long.

    `init_method_std` is sqrt(0.8 / hidden_size), which the published values follow, too. It keeps the size of
    the logits and of each layer's output at initialization independent of the width. Megatron's default of
    0.02 would start this narrow model with almost no signal.
    """
    feed_forward = [kind for kind in "E-" if kind in config.pattern]
    experts, topk = (None, None) if not config.is_moe else (32, 6) if config.moe_latent_size else (16, 4)
    pattern = _tiny_pattern(set(config.pattern), feed_forward)
    latent = config.moe_latent_size and _HIDDEN_SIZE * config.moe_latent_size // config.hidden_size
    return config.but(
        name=config.name + TINY_SUFFIX,
        title=f"{config.title}, tiny",
        pattern=pattern,
        hidden_size=_HIDDEN_SIZE,
        vocab_size=2048,
        seq_length=256,
        max_position_embeddings=256,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=32,
        mamba_num_heads=16,
        mamba_head_dim=16,
        mamba_state_dim=16,
        mamba_num_groups=8,
        dense_ffn_hidden_size=4 * _HIDDEN_SIZE if config.dense_ffn_hidden_size else None,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=_EXPERT_FFN_SIZE if config.is_moe else None,
        moe_shared_expert_intermediate_size=2 * _EXPERT_FFN_SIZE if config.is_moe else None,
        moe_layers=_tiny_moe_layers(config, pattern.count("E"), experts, topk),
        moe_latent_size=latent,
        init_method_std=round((0.8 / _HIDDEN_SIZE) ** 0.5, 4),
        published_total=None,
        published_active=None,
        source=f"{config.name}, shrunk by megatron_nemotron3.models.tiny",
    )


def _tiny_pattern(kinds: set[str], feed_forward: list[str]) -> str:
    alternating = itertools.cycle(feed_forward)
    layers = (next(alternating, "") if kind == "F" else kind for kind in _TEMPLATE)
    return "".join(kind for kind in layers if kind in kinds)


def _tiny_moe_layers(
    config: Nemotron3Config, layers: int, experts: int | None, topk: int | None
) -> tuple[tuple[int, int], ...] | None:
    """Rows of `config.moe_layers` at equal distances, from its first to its last, in the tiny scale."""
    rows = config.moe_layers
    if rows is None or experts is None or topk is None:
        return None
    width, per_token = config.moe_ffn_hidden_size or 1, config.moe_router_topk or 1
    chosen = [rows[round(i * (len(rows) - 1) / max(1, layers - 1))] for i in range(layers)]
    return tuple(
        (
            max(1, round(one * _EXPERT_FFN_SIZE / width / 32)) * 32,
            min(max(2, round(each * topk / per_token)), experts),
        )
        for one, each in chosen
    )
