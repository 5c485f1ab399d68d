"""The small model of a proxy (few small layers, related as the launch's are), and what it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.large import FullLaunch
from megatron_nemotron3.proof.certify.layouts import Sizes, microbatches

#: Tokens of a sequence: three chunks of the scan (64) and a rest; CP cuts inside a chunk, NVFP4 takes 16.
SEQUENCE = 224
#: Experts of a proxy, if the launch has as many.
_EXPERTS = 16
#: What the vocabulary is padded to in every layout, and the divisor that makes Megatron do so up to TP 2.
PADDED_VOCABULARY, VOCABULARY_DIVISOR = 128, 64
_HIDDEN = 64
#: Documents of a packed row, two longer than a chunk. The last ends with the row, as Megatron's data sets do.
_DOCUMENTS = (91, 5, 128)
#: The same in multiples of 2 * CP, to which `--sft` pads each document.
_EVEN = (88, 8, 128)


def small_model(
    model: Nemotron3Config, large: ParallelLayout, sizes: Sequence[Sizes], *, stages: Sequence[str], mtp: str
) -> Nemotron3Config:
    """Return the small form of a model."""
    tp = max(s.layout.tp for s in sizes)
    ep = max(s.layout.ep for s in sizes)
    return model.but(
        name="proxy",
        title=f"proxy of {model.title}",
        pattern="".join(stages),
        source=patterns.PIPE.join(stages),
        mtp_pattern=mtp or None,
        hidden_size=_HIDDEN,
        seq_length=SEQUENCE,
        max_position_embeddings=SEQUENCE,
        init_method_std=0.11,
        published_total=None,
        published_active=None,
        **_attention(model, large.tp),
        **_mamba(model, large, tp),
        dense_ffn_hidden_size=128 if model.dense_ffn_hidden_size else None,
        **(_experts(model, large.ep, ep, "".join(stages).count("E")) if model.is_moe else {}),
    )


def _attention(model: Nemotron3Config, tp: int) -> dict[str, int]:
    """Fewer groups than TP ranks, one for each rank, or several for each; one head in a group, or several."""
    groups = 1 if model.num_query_groups < tp else 2 if model.num_query_groups <= max(tp, 2) else 4
    several = model.num_attention_heads > model.num_query_groups
    heads = groups * (1 if not several else 4 if groups == 1 else 2)
    square = model.num_attention_heads * model.kv_channels == model.hidden_size
    width = _HIDDEN // heads
    return {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": width if square else width // 2,
    }


def _mamba(model: Nemotron3Config, large: ParallelLayout, tp: int) -> dict[str, int]:
    """On a TP rank fewer groups than CP ranks, or as many or more."""
    own = model.mamba_num_groups / large.tp
    groups = tp * (1 if own < max(2, large.cp) else 2)
    return {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 16, "mamba_num_groups": groups}


def _experts(model: Nemotron3Config, large_ep: int, ep: int, layers: int) -> dict[str, Any]:
    """One expert on a rank, or several; all chosen, or some."""
    assert model.num_moe_experts and model.moe_router_topk
    # As many as leave most of them out for a token, so that some are crowded.
    # Pairs of them, because a checkpoint is also loaded at EP 2.
    several = 2 * max(1 if ep > 1 else 2, -(-min(_EXPERTS, model.num_moe_experts) // (2 * ep)))
    experts = ep * (1 if ep > 1 and model.num_moe_experts <= large_ep else several)
    most = experts if model.moe_router_topk == model.num_moe_experts else max(1, experts - 1)
    return {
        "num_moe_experts": experts,
        "moe_router_topk": most if most == experts else min(model.moe_router_topk, 3, most),
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size and 64,
        "moe_latent_size": model.moe_latent_size and 32,
        "moe_layers": _moe_layers(model.moe_layers, layers, most) if model.moe_layers else None,
    }


def _moe_layers(rows: tuple[tuple[int, int], ...], layers: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return small widths and numbers of chosen experts of the first of evenly spread layers."""
    spread = [rows[i * len(rows) // layers] for i in range(layers)]
    widths, chosen = (sorted({row[i] for row in spread}) for i in (0, 1))
    return tuple((16 * (1 + widths.index(w) % 3), 1 + chosen.index(k) % most) for w, k in spread)


def router_groups(
    config: Nemotron3Config, given: Mapping[str, tuple[str, ...]], large_ep: int, ep: int
) -> tuple[Nemotron3Config, dict[str, int]]:
    """Return the small model with as many experts per token as its groups allow, and options of the groups.

    As many groups as EP ranks stay so (device-limited routing).
    """
    groups, best = (
        int((given.get(name) or ("0",))[0]) for name in ("--moe-router-num-groups", "--moe-router-group-topk")
    )
    if groups < 1 or not (config.num_moe_experts and config.moe_router_topk):
        return config, {}
    small = 1 if groups == 1 else ep if groups == large_ep and ep > 1 else 2
    options = {"--moe-router-num-groups": small}
    if best:
        kept = small if best == groups else 1
        options["--moe-router-group-topk"] = kept
        most = config.num_moe_experts // small * kept
        config = config.but(moe_router_topk=max(kept, min(config.moe_router_topk, most) // kept * kept))
    return config, options


def training(launch: FullLaunch, config: Nemotron3Config, sizes: Sequence[Sizes]) -> TrainingCase:
    """Return what a proxy trains on: micro-batches against pipeline ranks as in the launch, or few."""
    given = launch.given
    sft, borders = "--sft" in given, "--dataloader-inter-document-masking" in given
    packed = sft or borders
    micro = 1 if packed or (given.get("--micro-batch-size") or ("1",))[0] == "1" else 2
    cp = launch.sizes.layout.cp > 1
    layouts = [one.layout for one in sizes]
    return TrainingCase(
        config=config,
        steps=2,
        seq_length=SEQUENCE,
        micro_batch_size=micro,
        sequences=micro * microbatches(launch.sizes.layout, own_microbatches(launch), layouts)[1],
        mask="random" if sft or "--eod-mask-loss" in given else "none",
        documents=(_EVEN if sft and cp else _DOCUMENTS) if packed else None,
        cut_whole=borders and not sft and cp,
        cut_known="torch" in (given.get("--spec") or ("",))[-1],
    )


def own_microbatches(launch: FullLaunch) -> int | None:
    """Return the micro-batches of a rank of the launch; None if the options do not say."""
    sizes = [(launch.given.get(name) or ("",))[0] for name in ("--global-batch-size", "--micro-batch-size")]
    if not launch.world_known or not all(size.isdecimal() and int(size) for size in sizes):
        return None
    return max(1, int(sizes[0]) // int(sizes[1]) // launch.sizes.layout.dp)
