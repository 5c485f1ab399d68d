"""The list of seeded faults, and what bisect must say of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.bisect import damage as d
from tests.bisect.systems import MODEL, Engine, Trainer, Weights


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: in a sentence.
        kind: letter of the first layer that is wrong, "model" for what is outside the layers, "mtp".
        layer: number of that layer; None outside the layers.
        cause: what bisect must name, a regular expression of the whole name.
        weights: what the engine or trainer loads instead of the checkpoint.
        engine, trainer: damage to the system; a fault with `trainer` or `options` is one of the trainer.
        options: of Megatron's config.
        decode: the engine decodes after the prompt, with states.
        shift: of the reported log-probabilities.
    """

    what: str
    kind: str
    cause: str
    layer: int | None = None
    weights: Callable[[Weights], Weights] | None = None
    engine: Callable[[Engine], None] | None = None
    trainer: Callable[[Trainer], None] | None = None
    options: dict[str, Any] | None = None
    decode: bool = False
    shift: Callable[[Tensor], Tensor] | None = None

    @property
    def side(self) -> str:
        """Whose fault it is."""
        return "engine" if self.trainer is None and self.options is None else "trainer"


FAULTS: dict[str, Fault] = {
    # Mamba
    "conv state off by one": Fault(
        "After the prompt, decoding finds a convolution state that ends one token too early",
        "M",
        "a convolution state one token late after the prompt",
        0,
        engine=d.between(d.roll_conv),
        decode=True,
    ),
    "conv state empty": Fault(
        "Decoding begins with an empty convolution state",
        "M",
        "a convolution state empty after the prompt",
        0,
        engine=d.between(d.zero_conv),
        decode=True,
    ),
    "SSM state empty": Fault(
        "Decoding begins with an empty SSM state",
        "M",
        "an SSM state that is empty after the prompt",
        0,
        engine=d.between(d.zero_ssm),
        decode=True,
    ),
    "SSM state in BF16": Fault(
        "The SSM state is stored in BF16 between tokens",
        "M",
        "the SSM state in BF16 while decoding",
        0,
        engine=d.always(d.round_ssm),
        decode=True,
    ),
    "chunks without state": Fault(
        "Every chunk of the scan begins with an empty state",
        "M",
        "no SSM state from one chunk to the next",
        0,
        engine=d.function("mamba2_chunk_scan", d.scan_by_chunk),
    ),
    "conv bias zero": Fault(
        "The convolution's bias is zero after a reload",
        "M",
        "no bias of the convolution",
        0,
        weights=d.changed(r"backbone.*conv1d\.bias", torch.zeros_like),
    ),
    "conv1d corrupted": Fault(
        "The convolution's weight [c, 1, k] was written through a view of [k, c] on a reload",
        "M",
        "the convolution's weight read .*",
        0,
        weights=d.changed(
            r"backbone.*conv1d\.weight", lambda w: w.reshape(w.shape[-1], -1).t().reshape(w.shape)
        ),
    ),
    "conv1d corrupted in one layer": Fault(
        "The same in layer 2 only",
        "M",
        "the convolution's weight read .*",
        2,
        weights=d.changed(
            r"s\.2\..*conv1d\.weight", lambda w: w.reshape(w.shape[-1], -1).t().reshape(w.shape)
        ),
    ),
    "taps reversed": Fault(
        "The convolution applies its taps in reverse order",
        "M",
        "the convolution's taps in reverse",
        0,
        weights=d.changed(r"backbone.*conv1d\.weight", lambda w: w.flip(-1)),
    ),
    "no SiLU after conv1d": Fault(
        "The convolution has no activation",
        "M",
        "no SiLU after the convolution",
        0,
        engine=d.function("causal_conv1d_fn", d.without_silu),
    ),
    "z and x swapped": Fault(
        "in_proj's rows are in the order x, z, B, C, dt",
        "M",
        "z and x of in_proj in each other's place",
        0,
        weights=d.changed(r"backbone.*in_proj", d.reordered),
    ),
    "B and C swapped": Fault(
        "in_proj's rows are in the order z, x, C, B, dt",
        "M",
        "B and C of in_proj in each other's place",
        0,
        weights=d.changed(r"backbone.*in_proj", d.b_and_c),
    ),
    "in_proj by rank": Fault(
        "The shards of in_proj of two ranks are joined as they are, in one layer",
        "M",
        "the shards of 2 ranks of in_proj joined .*",
        5,
        weights=d.changed(r"s\.5\..*in_proj", lambda w: d.by_rank(w, d.SPLIT)),
    ),
    "out_proj shards swapped": Fault(
        "The shards of out_proj of two ranks are in each other's place, in one layer",
        "M",
        "the shards of 2 ranks of out_proj reversed",
        2,
        weights=d.changed(r"s\.2\..*out_proj", lambda w: d.swap(w, 1)),
    ),
    "norm over all groups": Fault(
        "The norm after the scan is one over all groups",
        "M",
        "one norm over all groups after the scan",
        0,
        engine=d.each("M", "norm.group_size", MODEL.mamba_inner_size),
    ),
    "norm before gate": Fault(
        "The gate is applied after the norm", "M", "the norm before the gate", 0, engine=d.norm_then_gate
    ),
    "no D": Fault("The skip connection D is missing", "M", "no D", 0, engine=d.scan(D=None)),
    "no dt_bias": Fault(
        "dt_bias is zero", "M", "no dt_bias", 0, weights=d.changed(r"backbone.*dt_bias", torch.zeros_like)
    ),
    "no softplus": Fault(
        "The time steps have no softplus, only the limit at 0",
        "M",
        "a limit at 0 instead of softplus",
        0,
        engine=d.scan(dt_softplus=False),
    ),
    "dt clamped": Fault(
        "Time steps are limited to [0.001, 0.1]",
        "M",
        r"time steps limited to \[0.001, 0.1\]",
        0,
        engine=d.each("M", "time_step_limit", (0.001, 0.1)),
    ),
    "A without exp": Fault(
        "A is the negative A_log, not its exponential",
        "M",
        "A_log instead of its exponential",
        0,
        weights=d.changed(r"backbone.*A_log", lambda w: w.float().abs().clamp_min(1e-6).log()),
    ),
    "groups in turn": Fault(
        "Heads take B and C of the groups in turn",
        "M",
        "heads in other groups of B and C",
        0,
        engine=d.function("mamba2_chunk_scan", d.scan_other_groups),
    ),
    # Attention
    "rope": Fault(
        "Rotary positions where none belong",
        "*",
        r"rotary positions of base 1e\+04",
        3,
        engine=d.attention(d.with_rope),
    ),
    "attention scale": Fault(
        "Scores are divided by the root of hidden size over heads, not of the head dimension",
        "*",
        "scores divided by the root of hidden size over heads",
        3,
        engine=d.each("*", "scaling", (MODEL.hidden_size / MODEL.num_attention_heads) ** -0.5),
    ),
    "key heads in turn": Fault(
        "Query heads take the key heads in turn",
        "*",
        "key heads taken in turn by the query heads",
        3,
        engine=d.attention(d.heads_in_turn),
    ),
    "qkv not grouped": Fault(
        "The rows of a grouped linear_qkv are taken for q, then k, then v",
        "*",
        "a grouped linear_qkv read as q, k, v",
        3,
        weights=d.qkv_by_kind,
    ),
    "attention window": Fault(
        "Attention sees the last 64 tokens only",
        "*",
        "a window of 64 tokens",
        3,
        engine=d.attention(d.window),
    ),
    "mask off by one": Fault(
        "A token does not see itself",
        "*",
        "no token but the first that sees itself",
        3,
        engine=d.attention(d.blind),
    ),
    "o_proj shards swapped": Fault(
        "The shards of the output projection of two ranks are in each other's place, in one layer",
        "*",
        "the shards of 2 ranks of the output projection reversed|the key groups of 2 ranks reversed",
        6,
        weights=d.changed(r"s\.6\..*o_proj", lambda w: d.swap(w, 1)),
    ),
    # Experts
    "expert shards swapped": Fault(
        "The experts of two ranks are in each other's place, in one layer",
        "E",
        "the experts of 2 ranks reversed",
        4,
        weights=d.experts(lambda e: (e + 8) % 16, "4"),
    ),
    "experts dealt out": Fault(
        "Expert e lies on rank e modulo 4, where each rank was meant to hold neighbours",
        "E",
        "experts .* in turn",
        1,
        weights=d.experts(lambda e: e % 4 * 4 + e // 4),
    ),
    "experts of a rank zero": Fault(
        "The experts of the last of 4 ranks were never loaded",
        "E",
        "no experts of rank 3 of 4",
        1,
        weights=d.changed(r"backbone.*experts\.1[2-5]\.down", torch.zeros_like),
    ),
    "scaling factor": Fault(
        "The routed scaling factor is 2.5 instead of 5",
        "E",
        "a routed scaling factor of 2.5",
        1,
        engine=d.each("E", "gate.routed_scaling_factor", 2.5),
    ),
    "no shared expert": Fault("The shared expert is left out", "E", "no shared expert", 1, engine=d.unshared),
    "no expert bias": Fault(
        "The router's correction bias was not loaded",
        "E",
        "no expert bias in the router",
        1,
        weights=d.changed(r"backbone.*correction_bias", torch.zeros_like),
    ),
    "expert bias in weights": Fault(
        "The weights of the experts contain the correction bias",
        "E",
        "the expert bias in the probabilities",
        1,
        engine=d.router(d.biased),
    ),
    "softmax router": Fault(
        "Routers use softmax instead of sigmoid",
        "E",
        "softmax scores in the router",
        1,
        engine=d.router(d.softmaxed),
    ),
    "no top-k normalisation": Fault(
        "The weights of the selected experts are not normalised",
        "E",
        "no normalisation of the selected scores",
        1,
        engine=d.each("E", "gate.norm_topk_prob", False),
    ),
    "one expert fewer": Fault(
        "Each token has 3 experts instead of 4",
        "E",
        "one expert fewer per token",
        1,
        engine=d.each("E", "gate.top_k", 3),
    ),
    "latent of another layer": Fault(
        "Layer 4 has the first latent projection of layer 1",
        "E",
        "the first latent projection of the previous layer of experts",
        4,
        weights=d.renamed(r"(backbone\.layers\.)4(\.mixer\.fc1_latent.*)", lambda m: f"{m[1]}1{m[2]}"),
    ),
    "ReLU": Fault(
        "Experts use ReLU instead of its square",
        "E",
        "ReLU instead of squared ReLU",
        1,
        engine=d.activated(torch.nn.ReLU()),
    ),
    # The whole model
    "residual in BF16": Fault(
        "The residual stream of an FP32 system is kept in BF16",
        "M",
        "the residual stream in BF16",
        0,
        engine=d.bf16_stream,
    ),
    "norm epsilon": Fault(
        "The norms before layers have epsilon 1e-6",
        "M",
        "epsilon 1e-06 in the norms before layers",
        0,
        engine=d.norms(d.eps_1e_6),
    ),
    "no final norm": Fault("The final norm is left out", "model", "no final norm", engine=d.no_final_norm),
    "softcap": Fault(
        "Logits are capped at 30 by tanh",
        "model",
        "logits capped at 30 by tanh",
        engine=d.head(lambda y: 30 * torch.tanh(y / 30)),
    ),
    "temperature": Fault(
        "Log-probabilities are reported at the sampling temperature 0.7",
        "model",
        "log-probabilities at temperature 0.7",
        engine=d.head(lambda y: y / 0.7),
    ),
    "padded vocabulary": Fault(
        "The second shard of the embedding begins at half of the vocabulary, not of the padded one",
        "model",
        "the embedding cut into 2 shards by the vocabulary instead .*",
        weights=d.changed("embeddings", d.shifted_rows),
    ),
    "output shards swapped": Fault(
        "The shards of the output layer of two ranks are in each other's place",
        "model",
        "the two halves of the output layer swapped",
        weights=d.changed("lm_head", lambda w: d.swap(w, 0)),
    ),
    "late by one": Fault(
        "The log-probability of each token is reported for the next one",
        "model",
        "log-probabilities one token late",
        shift=lambda p: torch.cat([p[:1], p[:-1]]),
    ),
    # Weights of an older version
    "stale layer": Fault(
        "Layer 5 was not updated",
        "M",
        "weights of the previous checkpoint",
        5,
        weights=d.stale(r"backbone\.layers\.5\."),
    ),
    "stale experts": Fault(
        "Routed experts were not updated",
        "E",
        "routed experts of the previous checkpoint",
        1,
        weights=d.stale(r"backbone.*mixer\.experts\."),
    ),
    "stale model": Fault(
        "No weight was updated", "M", "every weight of the previous checkpoint", 0, weights=d.stale("")
    ),
    "stale MTP": Fault(
        "MTP was not updated; only its own log-probabilities show it",
        "mtp",
        "MTP of the previous checkpoint",
        weights=d.stale(r"^mtp\."),
    ),
    # The trainer
    "trainer: softmax router": Fault(
        "Megatron's router uses softmax over the selected experts",
        "E",
        "a softmax over .*|softmax scores .*",
        1,
        options={"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},
    ),
    "trainer: scaling factor": Fault(
        "moe_router_topk_scaling_factor is left out",
        "E",
        "a routed scaling factor of 1",
        1,
        options={"moe_router_topk_scaling_factor": 1.0},
    ),
    "trainer: expert bias": Fault(
        "The expert bias of the checkpoint was not loaded",
        "E",
        "no expert bias in the router",
        1,
        trainer=d.parameters(r"decoder.*expert_bias", torch.zeros_like),
    ),
    "trainer: in_proj by rank": Fault(
        "A checkpoint of two ranks was joined rank by rank",
        "M",
        "the shards of 2 ranks of in_proj joined .*",
        0,
        trainer=d.parameters(r"decoder.*in_proj\.weight", lambda w: d.by_rank(w, d.SPLIT)),
    ),
    "trainer: D": Fault(
        "D was initialised to 1 and not loaded",
        "M",
        "D of 1",
        0,
        trainer=d.parameters(r"decoder.*\.D$", torch.ones_like),
    ),
    "trainer: packed": Fault(
        "Sequences are packed, and states and attention run from one into the next",
        "model",
        "the sequence before this one as its beginning",
        trainer=d.leaking,
    ),
}
