"""The list of seeded faults, and what bisect must say of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.proof.bisect import damage as d
from tests.proof.bisect.systems import MODEL, Engine, Trainer, Weights


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


def mamba(what: str, cause: str, layer: int = 0, **how: Any) -> Fault:
    """A fault of Mamba layers, by default of all."""
    return Fault(what, "M", cause, layer, **how)


def attention(what: str, cause: str, layer: int = 3, **how: Any) -> Fault:
    """A fault of attention layers."""
    return Fault(what, "*", cause, layer, **how)


def experts(what: str, cause: str, layer: int = 1, **how: Any) -> Fault:
    """A fault of layers of experts."""
    return Fault(what, "E", cause, layer, **how)


FAULTS: dict[str, Fault] = {
    # Mamba
    "conv state off by one": mamba(
        "After the prompt, decoding finds a convolution state that ends one token too early",
        "the convolution's window after the prompt one token late",
        engine=d.between(d.roll_conv),
        decode=True,
    ),
    "conv state empty": mamba(
        "Decoding begins with an empty convolution state",
        "no convolution's window after the prompt",
        engine=d.between(d.zero_conv),
        decode=True,
    ),
    "SSM state empty": mamba(
        "Decoding begins with an empty SSM state",
        "no SSM state after the prompt",
        engine=d.between(d.zero_ssm),
        decode=True,
    ),
    "SSM state in BF16": mamba(
        "The SSM state is stored in BF16 between tokens",
        "the SSM state in BF16 while decoding",
        engine=d.always(d.round_ssm),
        decode=True,
    ),
    "chunks without state": mamba(
        "Every chunk of the scan begins with an empty state",
        "no SSM state at every chunk",
        engine=d.function("mamba2_chunk_scan", d.scan_by_chunk),
    ),
    "conv bias zero": mamba(
        "The convolution's bias is zero after a reload",
        "no bias in the convolution",
        weights=d.changed(r"backbone.*conv1d\.bias", torch.zeros_like),
    ),
    "conv1d corrupted": mamba(
        "The convolution's weight [c, 1, k] was written through a view of [k, c] on a reload",
        "the convolution's weight read .*",
        weights=d.changed(r"backbone.*conv1d\.weight", d.tap_by_tap),
    ),
    "conv1d corrupted in one layer": mamba(
        "The same in layer 2 only",
        "the convolution's weight read .*",
        layer=2,
        weights=d.changed(r"s\.2\..*conv1d\.weight", d.tap_by_tap),
    ),
    "taps reversed": mamba(
        "The convolution applies its taps in reverse order",
        "the convolution's weight in reverse",
        weights=d.changed(r"backbone.*conv1d\.weight", lambda w: w.flip(-1)),
    ),
    "no SiLU after conv1d": mamba(
        "The convolution has no activation",
        "no SiLU in the convolution",
        engine=d.function("causal_conv1d_fn", d.without_silu),
    ),
    "z and x swapped": mamba(
        "in_proj's rows are in the order x, z, B, C, dt",
        "z and x of in_proj's output in each other's place",
        weights=d.changed(r"backbone.*in_proj", d.reordered),
    ),
    "B and C swapped": mamba(
        "in_proj's rows are in the order z, x, C, B, dt",
        "B and C of in_proj's output in each other's place",
        weights=d.changed(r"backbone.*in_proj", d.b_and_c),
    ),
    "in_proj by rank": mamba(
        "The shards of in_proj of two ranks are joined as they are, in one layer",
        "the shards of 2 ranks of in_proj's output joined .*",
        layer=5,
        weights=d.changed(r"s\.5\..*in_proj", lambda w: d.by_rank(w, d.SPLIT)),
    ),
    "out_proj shards swapped": mamba(
        "The shards of out_proj of two ranks are in each other's place, in one layer",
        "the shards of 2 ranks of the output projection's input reversed",
        layer=2,
        weights=d.changed(r"s\.2\..*out_proj", lambda w: d.swap(w, 1)),
    ),
    "norm over all groups": mamba(
        "The norm after the scan is one over all groups",
        "one group in the norm after the scan",
        engine=d.each("M", "norm.group_size", MODEL.mamba_inner_size),
    ),
    "norm before gate": mamba(
        "The gate is applied after the norm",
        "the norm after the scan as norm, (gate, gain|gain, gate)",
        engine=d.norm_then_gate,
    ),
    "no D": mamba("The skip connection D is missing", "no D", engine=d.scan(D=None)),
    "no dt_bias": mamba(
        "dt_bias is zero",
        "no bias in the time steps",
        weights=d.changed(r"backbone.*dt_bias", torch.zeros_like),
    ),
    "no softplus": mamba(
        "The time steps have no softplus, only the limit at 0",
        "ReLU instead of softplus in the time steps",
        engine=d.scan(dt_softplus=False),
    ),
    "dt clamped": mamba(
        "Time steps are limited to [0.001, 0.1]",
        r"the time steps limited to \[0.001, 0.1\]",
        engine=d.each("M", "time_step_limit", (0.001, 0.1)),
    ),
    "A without exp": mamba(
        "A is the negative A_log, not its exponential",
        "A_log instead of its exponential",
        weights=d.changed(r"backbone.*A_log", lambda w: w.float().abs().clamp_min(1e-6).log()),
    ),
    "groups in turn": mamba(
        "Heads take B and C of the groups in turn",
        "B and C of each head dealt out by head to . ranks in turn",
        engine=d.function("mamba2_chunk_scan", d.scan_other_groups),
    ),
    # Attention
    "rope": attention(
        "Rotary positions where none belong",
        r"rotary positions of base 1e\+04",
        engine=d.attention(d.with_rope),
    ),
    "attention scale": attention(
        "Scores are divided by the root of hidden size over heads, not of the head dimension",
        "1.414 times (the queries|the keys|the scaled scores)",
        engine=d.each("*", "scaling", (MODEL.hidden_size / MODEL.num_attention_heads) ** -0.5),
    ),
    "key heads in turn": attention(
        "Query heads take the key heads in turn",
        "the keys and values dealt out by head to . ranks in turn",
        engine=d.attention(d.heads_in_turn),
    ),
    "qkv not grouped": attention(
        "The rows of a grouped linear_qkv are taken for q, then k, then v",
        "the shards of 2 ranks of the queries, keys and values of all heads joined .*",
        weights=d.qkv_by_kind,
    ),
    "attention window": attention(
        "Attention sees the last 64 tokens only",
        "no keys outside a window of 64 tokens",
        engine=d.attention(d.window),
    ),
    "mask off by one": attention(
        "A token does not see itself",
        "no own key",
        engine=d.attention(d.blind),
    ),
    "o_proj shards swapped": attention(
        "The shards of the output projection of two ranks are in each other's place, in one layer",
        "the shards of 2 ranks of attention's output .* reversed",
        layer=6,
        weights=d.changed(r"s\.6\..*o_proj", lambda w: d.swap(w, 1)),
    ),
    # Experts
    "expert shards swapped": experts(
        "The experts of two ranks are in each other's place, in one layer",
        "the shards of 2 ranks of the experts reversed",
        layer=4,
        weights=d.experts(lambda e: (e + 8) % 16, "4"),
    ),
    "experts dealt out": experts(
        "Expert e lies on rank e modulo 4, where each rank was meant to hold neighbours",
        "the experts dealt out .* in turn",
        weights=d.experts(lambda e: e % 4 * 4 + e // 4),
    ),
    "experts of a rank zero": experts(
        "The experts of the last of 4 ranks were never loaded",
        "no experts of rank 3 of 4",
        weights=d.changed(r"backbone.*experts\.1[2-5]\.down", torch.zeros_like),
    ),
    "scaling factor": experts(
        "The routed scaling factor is 2.5 instead of 5",
        "a routed scaling factor of 2.5",
        engine=d.each("E", "gate.routed_scaling_factor", 2.5),
    ),
    "no shared expert": experts("The shared expert is left out", "no shared expert", engine=d.unshared),
    "no expert bias": experts(
        "The router's correction bias was not loaded",
        "no expert bias in the router",
        weights=d.changed(r"backbone.*correction_bias", torch.zeros_like),
    ),
    "expert bias in weights": experts(
        "The weights of the experts contain the correction bias",
        "the expert bias in the probabilities",
        engine=d.router(d.biased),
    ),
    "softmax router": experts(
        "Routers use softmax instead of sigmoid",
        "softmax scores in the router",
        engine=d.router(d.softmaxed),
    ),
    "no top-k normalisation": experts(
        "The weights of the selected experts are not normalised",
        "no normalisation of the selected scores",
        engine=d.each("E", "gate.norm_topk_prob", False),
    ),
    "one expert fewer": experts(
        "Each token has 3 experts instead of 4",
        "one expert fewer per token",
        engine=d.each("E", "gate.top_k", 3),
    ),
    "latent of another layer": experts(
        "Layer 4 has the first latent projection of layer 1",
        "fc1_latent of the previous layer of its kind",
        layer=4,
        weights=d.renamed(r"(backbone\.layers\.)4(\.mixer\.fc1_latent.*)", lambda m: f"{m[1]}1{m[2]}"),
    ),
    "ReLU": experts(
        "Experts use ReLU instead of its square",
        "no square in the experts",
        engine=d.activated(torch.nn.ReLU()),
    ),
    # The whole model
    "residual in BF16": mamba(
        "The residual stream of an FP32 system is kept in BF16",
        "the residual stream rounded to BF16",
        engine=d.bf16_stream,
    ),
    "norm epsilon": mamba(
        "The norms before layers have epsilon 1e-6",
        "epsilon 1e-06 in the norm before the layer",
        engine=d.eps_1e_6,
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
        "the rows of the embedding cut into 2 shards by the vocabulary instead .*",
        weights=d.changed("embeddings", d.shifted_rows),
    ),
    "output shards swapped": Fault(
        "The shards of the output layer of two ranks are in each other's place",
        "model",
        "the shards of 2 ranks of the rows of the output layer reversed",
        weights=d.changed("lm_head", lambda w: d.swap(w, 0)),
    ),
    "late by one": Fault(
        "The log-probability of each token is reported for the next one",
        "model",
        "log-probabilities one token late",
        shift=lambda p: torch.cat([p[:1], p[:-1]]),
    ),
    # Weights of an older version
    "stale layer": mamba(
        "Layer 5 was not updated",
        "weights of the previous checkpoint",
        layer=5,
        weights=d.stale(r"backbone\.layers\.5\."),
    ),
    "stale experts": experts(
        "Routed experts were not updated",
        "routed experts of the previous checkpoint",
        weights=d.stale(r"backbone.*mixer\.experts\."),
    ),
    "stale model": mamba(
        "No weight was updated", "every weight of the previous checkpoint", weights=d.stale("")
    ),
    "stale MTP": Fault(
        "MTP was not updated; only its own log-probabilities show it",
        "mtp",
        "MTP of the previous checkpoint",
        weights=d.stale(r"^mtp\."),
    ),
    # The trainer
    "trainer: softmax router": experts(
        "Megatron's router uses softmax over the selected experts",
        "a softmax over .*|softmax scores .*|experts weighted by softmax",
        options={"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},
    ),
    "trainer: scaling factor": experts(
        "moe_router_topk_scaling_factor is left out",
        "a routed scaling factor of 1",
        options={"moe_router_topk_scaling_factor": 1.0},
    ),
    "trainer: expert bias": experts(
        "The expert bias of the checkpoint was not loaded",
        "no expert bias in the router",
        trainer=d.parameters(r"decoder.*expert_bias", torch.zeros_like),
    ),
    "trainer: in_proj by rank": mamba(
        "A checkpoint of two ranks was joined rank by rank",
        "the shards of 2 ranks of in_proj's output joined .*",
        trainer=d.parameters(r"decoder.*in_proj\.weight", lambda w: d.by_rank(w, d.SPLIT)),
    ),
    "trainer: D": mamba(
        "D was initialised to 1 and not loaded",
        "D of 1",
        trainer=d.parameters(r"decoder.*\.D$", torch.ones_like),
    ),
    "trainer: packed": Fault(
        "Sequences are packed, and states and attention run from one into the next",
        "model",
        "the sequence before this one as its beginning",
        trainer=d.leaking,
    ),
}
