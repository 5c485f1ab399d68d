"""Nemotron 3 written out in FP64: the definition that a training is held against.

It shares no code with the layers of this package, with Megatron or with `generate`: Mamba-2 is its recurrence
(arXiv 2405.21060, section 2), attention a masked softmax, the mixture of experts a sum over all experts
(arXiv 2401.06066, 2601.18089), and every document is computed separately. Slow, for models of a few layers.

Shapes: b rows, s tokens, d hidden, e experts, v the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.plan import apply
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON
from megatron_nemotron3.models.prefixes import Prefix, prefixes
from megatron_nemotron3.proof.certify.tensors import Tensors

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass
class RouterCall:
    """One call of a router."""

    #: Megatron's name of its layer: "decoder.layers.1.".
    layer: str
    #: [b, s, e].
    logits: Tensor
    #: Of the choice: score plus expert bias, [b, s, e].
    ranked: Tensor
    #: Whether an expert is chosen, [b, s, e].
    chosen: Tensor
    topk: int


@dataclass
class ForwardResult:
    """What a pass over b rows gives."""

    #: [b, s, v], of the decoder and then of each MTP depth.
    logits: list[Tensor] = field(default_factory=list)
    routings: list[RouterCall] = field(default_factory=list)


class PlainModel:
    """A model with given weights.

    Args:
        weights: FP64 tensors of the whole model by checkpoint key; gradients flow to them.
        documents: lengths of the documents of a row.
        choices: the experts that the routers chose elsewhere, by layer, call by call, [b, s, e] each. Where
            given they are taken: between two nearly equal experts rounding decides. The caller compares them
            with `RouterCall.ranked`.
    """

    def __init__(
        self,
        config: Nemotron3Config,
        weights: Tensors,
        documents: Sequence[int],
        choices: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self.config, self.documents = config, [length for length in documents if length]
        self.embedding, self.output = weights[EMBEDDING], weights[OUTPUT]
        self.choices = {layer: iter(calls) for layer, calls in (choices or {}).items()}
        rows = self.embedding.shape[0]
        self.hf: Tensors = {}
        for mapping in inventory.mappings_of(config, weights, padded_vocab_size=rows):
            named = {t.name: weights[t.name] for t in mapping.megatron}
            self.hf |= apply(mapping.to_hf(), named)
        self.layers: list[Prefix] = []
        self.blocks: list[tuple[Prefix, list[Prefix], Prefix]] = []
        _, *found = prefixes(config)
        for prefix in found:
            if prefix.part == "mtp_in":
                block: tuple[Prefix, list[Prefix]] = (prefix, [])
            elif prefix.part == "mtp_out":
                self.blocks.append((*block, prefix))
            elif prefix.hf.startswith("mtp."):
                block[1].append(prefix)
            else:
                self.layers.append(prefix)

    def __call__(self, tokens: Tensor) -> ForwardResult:
        result = ForwardResult()
        root = self.layers[0].hf.partition(".")[0]
        x = self._stack(self.layers, self.embedding[tokens], result)
        h = self._norm(x, f"{root}.norm_f.weight")
        result.logits.append(h @ self.output.T)
        for depth in range(1, self.config.mtp_num_layers + 1):
            first, layers, last = self.blocks[0 if len(self.blocks) == 1 else depth - 1]
            ahead = shifted_documents(tokens, self.documents, depth)
            both = torch.cat(
                (
                    self._norm(self.embedding[ahead], first.hf + "enorm.weight"),
                    self._norm(h, first.hf + "hnorm.weight"),
                ),
                -1,
            )
            x = self._stack(layers, both @ self.hf[first.hf + "eh_proj.weight"].T, result)
            h = self._norm(x, last.hf + "final_layernorm.weight")
            result.logits.append(h @ self.output.T)
        return result

    def _stack(self, layers: Sequence[Prefix], x: Tensor, result: ForwardResult) -> Tensor:
        for layer in layers:
            u = self._norm(x, layer.hf + "norm.weight")
            if layer.part == "E":
                x = x + self._experts(layer, u, result)
            elif layer.part == "-":
                x = x + self._mlp(layer.hf + "mixer.", u)
            else:
                mix = self._mamba if layer.part == "M" else self._attention
                x = x + torch.cat([mix(layer, part) for part in u.split(self.documents, 1)], 1)
        return x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self.config.layernorm_epsilon) * self.hf[name]

    def _mlp(self, prefix: str, u: Tensor) -> Tensor:
        hidden = (u @ self.hf[prefix + "up_proj.weight"].T).relu() ** 2
        return hidden @ self.hf[prefix + "down_proj.weight"].T

    def _attention(self, layer: Prefix, u: Tensor) -> Tensor:
        c, (b, n, _) = layer.config, u.shape
        q, k, v = (
            (u @ self.hf[f"{layer.hf}mixer.{name}_proj.weight"].T).view(b, n, -1, c.kv_channels)
            for name in "qkv"
        )
        of_head = torch.arange(c.num_attention_heads) * c.num_query_groups // c.num_attention_heads
        scores = torch.einsum("bihc,bjhc->bhij", q, k[:, :, of_head]) / c.kv_channels**0.5
        later = torch.ones(n, n).triu(1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        y = torch.einsum("bhij,bjhc->bihc", weights, v[:, :, of_head]).reshape(b, n, -1)
        return y @ self.hf[layer.hf + "mixer.o_proj.weight"].T

    def _mamba(self, layer: Prefix, u: Tensor) -> Tensor:
        c, (b, n, _), below = layer.config, u.shape, layer.hf + "mixer."
        inner, bc = c.mamba_inner_size, c.mamba_num_groups * c.mamba_state_dim
        parts = (inner, inner + 2 * bc, c.mamba_num_heads)
        z, xbc, dt = (u @ self.hf[below + "in_proj.weight"].T).split(parts, -1)
        taps = self.hf[below + "conv1d.weight"].squeeze(1)  # [channels, kernel]
        padded = torch.cat((xbc.new_zeros(b, taps.shape[1] - 1, xbc.shape[-1]), xbc), 1)
        convolved = sum(padded[:, i : i + n] * taps[:, i] for i in range(taps.shape[1]))
        x, B, C = (torch.nn.functional.silu(convolved + self.hf[below + "conv1d.bias"])).split(
            (inner, bc, bc), -1
        )
        heads, groups = c.mamba_num_heads, c.mamba_num_groups
        of_head = torch.arange(heads) * groups // heads
        x = x.view(b, n, heads, -1)
        B, C = (t.view(b, n, groups, -1)[:, :, of_head] for t in (B, C))
        dt = torch.nn.functional.softplus(dt + self.hf[below + "dt_bias"])
        decay = (-dt * self.hf[below + "A_log"].exp()).exp()
        state = x.new_zeros(b, heads, c.mamba_head_dim, c.mamba_state_dim)
        outputs = []
        for t in range(n):
            new = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            state = decay[:, t, :, None, None] * state + new
            outputs.append((state * C[:, t, :, None]).sum(-1))
        y = torch.stack(outputs, 1) + self.hf[below + "D"][:, None] * x
        gated = y.reshape(b, n, groups, -1) * torch.nn.functional.silu(z).view(b, n, groups, -1)
        y = _rms(gated, GATED_NORM_EPSILON).reshape(b, n, -1) * self.hf[below + "norm.weight"]
        return y @ self.hf[below + "out_proj.weight"].T

    def _experts(self, layer: Prefix, u: Tensor, result: ForwardResult) -> Tensor:
        c, below = layer.config, layer.hf + "mixer."
        assert c.num_moe_experts and c.moe_router_topk
        logits = u @ self.hf[below + "gate.weight"].T
        scores = logits.sigmoid()
        bias = self.hf.get(below + "gate.e_score_correction_bias")
        ranked = (scores if bias is None else scores + bias).detach()
        chosen = next(self.choices.get(layer.megatron, iter(())), None)
        if chosen is None:
            best = ranked.topk(c.moe_router_topk).indices
            chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best, True)
        result.routings.append(RouterCall(layer.megatron, logits, ranked, chosen, c.moe_router_topk))
        weights = scores * chosen
        if c.moe_router_topk > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * (c.moe_router_topk_scaling_factor or 1.0)
        z = u @ self.hf[below + "fc1_latent_proj.weight"].T if c.moe_latent_size else u
        y = sum(
            weights[..., e, None] * self._mlp(f"{below}experts.{e}.", z) for e in range(c.num_moe_experts)
        )
        assert isinstance(y, Tensor)
        if c.moe_latent_size:
            y = y @ self.hf[below + "fc2_latent_proj.weight"].T
        return y + self._mlp(below + "shared_experts.", u) if c.moe_shared_expert_intermediate_size else y


def shifted_documents(t: Tensor, documents: Sequence[int], by: int) -> Tensor:
    """Move each document of [b, s] to the left; zeros follow its last."""
    return torch.cat([_shifted(part, by) for part in t.split([n for n in documents if n], 1)], 1)


def _shifted(document: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(document[:, by:], (0, min(by, document.shape[1])))


def _rms(x: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def leaves(weights: Tensors) -> Tensors:
    """Return FP64 copies that gather gradients; expert biases do not."""
    return {key: t.double().requires_grad_(not key.endswith("expert_bias")) for key, t in weights.items()}


def near_ties(routings: Sequence[RouterCall]) -> Iterator[tuple[RouterCall, float]]:
    """Yield by how much the best expert that was left out outranks the worst that was chosen, at most."""
    for routing in routings:
        worst = routing.ranked.masked_fill(~routing.chosen, torch.inf).amin(-1)
        best = routing.ranked.masked_fill(routing.chosen, -torch.inf).amax(-1)
        yield routing, float((best - worst).max())
