"""The faults of an engine of `outside_faults_3` in experts, the stream, the head and MTP."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.proof.bisect.outside_faults import OutsideFault
from tests.proof.bisect.outside_faults_3 import edited
from tests.proof.bisect.systems import MODEL, Engine, Weights

# --- Experts ---------------------------------------------------------------------------------------------


def _scaled_twice(engine: Engine) -> None:
    """Square the scaling factor."""
    for mixer in engine.of_kind("E"):
        mixer.gate.routed_scaling_factor **= 2


def _biased_weights(gate: Any, _: Any, out: Any) -> Any:
    """Take the weights of the chosen experts from scores with the bias."""
    logits, _, chosen = out
    weights = (logits.sigmoid() + gate.e_score_correction_bias).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen


def _with_biased_weights(engine: Engine) -> None:
    """Hook `_biased_weights` to every router."""
    for mixer in engine.of_kind("E"):
        mixer.gate.register_forward_hook(_biased_weights)


def _small_shared_expert(engine: Engine) -> None:
    """Divide the shared expert by the scaling factor."""
    for mixer in engine.of_kind("E"):
        factor = mixer.gate.routed_scaling_factor
        mixer.shared_experts.register_forward_hook(lambda _, args, out, f=factor: out / f)


def _round_robin_experts(weights: Weights) -> Weights:
    """Expert e of the router runs what a linear placement on two ranks put where round robin has e."""
    found, half = dict(weights), (MODEL.num_moe_experts or 0) // 2
    for name in weights:
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name):
            slot, rank = divmod(int(match[2]), 2)
            found[name] = weights[f"{match[1]}{rank * half + slot}{match[3]}"]
    return found


def _beyond_capacity(experts: Any, args: Any) -> Any:
    """Drop the assignments of an expert after its first 64 of a forward."""
    hidden, chosen, weights = args
    taken = F.one_hot(chosen, experts.num_experts).sum(1).cumsum(0).gather(1, chosen)
    return hidden, chosen, weights.masked_fill(taken > 64, 0.0)


def _with_capacity(engine: Engine) -> None:
    """Hook `_beyond_capacity` to all experts."""
    for mixer in engine.of_kind("E"):
        mixer.experts.register_forward_pre_hook(_beyond_capacity)


def _first_rank_only(engine: Engine) -> None:
    """Send what the experts of the first of two ranks sum to the projection out of the latent space."""

    def change(_: Any, args: Any) -> Any:
        hidden, chosen, weights = args
        return hidden, chosen, weights.masked_fill(chosen >= (MODEL.num_moe_experts or 0) // 2, 0.0)

    for mixer in engine.of_kind("E"):
        mixer.experts.register_forward_pre_hook(change)


def _scale_of_first_expert(weights: Weights) -> Weights:
    """Dequantize every expert of layer 7 by the scale (largest weight) of expert 0."""
    found = dict(weights)
    for name, t in weights.items():
        if match := re.fullmatch(r"(backbone\.layers\.7\..*\.experts\.)\d+(\..*)", name):
            first = weights[f"{match[1]}0{match[2]}"]
            found[name] = (t.float() * (first.abs().max() / t.abs().max()).float()).to(t.dtype)
    return found


# --- Stream and head -------------------------------------------------------------------------------------


def _norm_in_place(engine: Engine) -> None:
    """Overwrite the embeddings by their norm, as the first norm does that computes in place."""
    block = engine.layers[0]
    block.register_forward_hook(lambda _, args, out: out - args[0] + block.norm(args[0]))


def _final_norm_of_residual(engine: Engine) -> None:
    """Give the final norm the input of the last layer."""
    kept: list[Tensor] = [torch.empty(0)]
    engine.layers[-1].register_forward_pre_hook(lambda _, args: kept.__setitem__(0, args[0]))
    engine.model.model.norm_f.register_forward_pre_hook(lambda *_: (kept[0],))


def _padded_shards(t: Tensor) -> Tensor:
    """Rows as gathered from four shards that are padded one by one, cut behind the vocabulary."""
    return torch.cat([F.pad(shard, (0, 0, 0, 3)) for shard in t.split(125)])[: len(t)]


# --- MTP -------------------------------------------------------------------------------------------------


def _swapped_halves(t: Tensor) -> Tensor:
    """Swap the columns of embedding and hidden state."""
    return t.roll(t.shape[1] // 2, 1)


def _state_before_norm(engine: Engine) -> None:
    """Give the MTP block the hidden states before the final norm of the model."""
    kept: list[Tensor] = []
    engine.model.model.norm_f.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))

    def change(_: Any, args: Any) -> Any:
        states = torch.cat(kept)
        kept.clear()
        return args[0], states

    engine.mtp.register_forward_pre_hook(change)


def _chunked_qkv(weights: Weights) -> Weights:
    """Cut the rows of q, k and v of MTP as one matrix for two ranks, each of which reads its q, k and v."""
    names = [f"mtp.layers.0.mixer.{part}_proj.weight" for part in "qkv"]
    halves = torch.cat([weights[name] for name in names]).chunk(2)
    parts = zip(*(half.split([64, 32, 32]) for half in halves), strict=True)
    return weights | {name: torch.cat(pair) for name, pair in zip(names, parts, strict=True)}


def _repeated_at_chunk(engine: Engine) -> None:
    """At the end of each chunk of 64 tokens embed the last token of the chunk once more, not the next."""

    def change(_: Any, args: Any) -> Any:
        row = torch.arange(len(args[0]))
        return args[0][torch.where((row > 0) & (row % 64 == 0), row - 1, row)], args[1]

    engine.mtp.register_forward_pre_hook(change)


OUTSIDE_3B: dict[str, OutsideFault] = {
    "routed_scaling_twice": OutsideFault(
        ("Every MoE layer multiplies the weights of the chosen experts by the routed scaling factor twice."),
        "E",
        1,
        "vllm-project/vllm#45037",
        engine=_scaled_twice,
    ),
    "bias_in_expert_weights": OutsideFault(
        (
            "Every MoE layer weights the chosen experts by scores that include the correction bias, which "
            "is for the choice only."
        ),
        "E",
        1,
        "ml-explore/mlx-lm#1354",
        engine=_with_biased_weights,
    ),
    "shared_expert_divided": OutsideFault(
        "Every MoE layer divides the output of the shared expert by the routed scaling factor.",
        "E",
        1,
        "sgl-project/sglang#28237",
        engine=_small_shared_expert,
    ),
    "experts_placed_linearly": OutsideFault(
        (
            "The routed experts of every MoE layer are permuted: loaded in linear placement on two ranks "
            "and called in round robin."
        ),
        "E",
        1,
        "vllm-project/vllm#23745",
        weights=_round_robin_experts,
    ),
    "expert_capacity_drops": OutsideFault(
        "Every MoE layer drops the tokens of an expert after its first 64, which get nothing from it.",
        "E",
        1,
        "seeded",
        engine=_with_capacity,
    ),
    "latent_sum_of_one_rank": OutsideFault(
        (
            "The projection out of the latent space of every MoE layer gets the sum of experts 0 to 7 only, "
            "as the reduction over expert-parallel ranks is missing."
        ),
        "E",
        1,
        "seeded",
        engine=_first_rank_only,
    ),
    "scale_of_expert_zero": OutsideFault(
        (
            "The up and down projections of every routed expert of layer 7 are dequantized by the scale of "
            "expert 0 instead of their own."
        ),
        "E",
        7,
        "NVIDIA/TensorRT-LLM#10778",
        weights=_scale_of_first_expert,
    ),
    "first_norm_in_place": OutsideFault(
        (
            "The first norm overwrites the embeddings, so that the residual stream starts at their norm "
            "times its weight instead of at the embeddings."
        ),
        "M",
        0,
        "GeeeekExplorer/nano-vllm#170",
        engine=_norm_in_place,
    ),
    "final_norm_of_residual": OutsideFault(
        "The final norm gets the stream before the last layer, without the output of the last mixer.",
        "model",
        None,
        "seeded",
        engine=_final_norm_of_residual,
    ),
    "head_shards_padded": OutsideFault(
        (
            "The rows of the head are those of four shards that were padded one by one, so that ids from "
            "125 on get the logits of other tokens."
        ),
        "model",
        None,
        "seeded",
        weights=edited(r"^lm_head", _padded_shards),
    ),
    "mtp_concat_order": OutsideFault(
        "MTP's projection gets the hidden state before the embedding instead of after it.",
        "mtp",
        None,
        "ml-explore/mlx-lm#1469",
        weights=edited(r"eh_proj", _swapped_halves),
    ),
    "mtp_state_before_norm": OutsideFault(
        "MTP gets the hidden states before the final norm of the model instead of after it.",
        "mtp",
        None,
        "vllm-project/vllm#47448",
        engine=_state_before_norm,
    ),
    "mtp_qkv_chunked": OutsideFault(
        "The attention of MTP has q, k and v mixed up: their rows were cut as one matrix for two ranks.",
        "mtp",
        None,
        "vllm-project/vllm#42231",
        weights=_chunked_qkv,
    ),
    "mtp_next_token_at_chunk": OutsideFault(
        (
            "At the end of every chunk of 64 tokens MTP embeds the last token of the chunk instead of the "
            "one after it."
        ),
        "mtp",
        None,
        "ModelTC/LightLLM#1079",
        engine=_repeated_at_chunk,
    ),
}
