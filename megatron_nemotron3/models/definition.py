"""The definition of the family: every model of it in plain torch, step by step.

    model = Definition(config, weights.__getitem__)     # weights by their Hugging Face names
    run = model(ids)                                    # ids [b, s]
    run.logits                                          # [b, s, v] of the decoder, then of each MTP depth

Weights come one at a time from a function, a dictionary's or one that reads a checkpoint, so that a model of
any size runs a layer at a time. Each method from `layer` on is one step, which a subclass or `Definition.but`
can replace. Mamba-2 is its recurrence (arXiv 2405.21060, section 2), attention a masked softmax, the mixture
of experts a sum over the chosen experts (arXiv 2401.06066; in a latent space: 2601.18089).

Shapes: b rows, s tokens, d hidden, h heads, g groups, p head dimension, n state, e experts, k experts of a
token, v vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models.config import GATED_NORM_EPSILON, Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.tensors import hf_root

Model = TypeVar("Model", bound="Definition")


@dataclass
class Routing:
    """A router call: logits and ranks (score plus bias) of the experts [b, s, e], the chosen [b, s, k]."""

    #: Megatron's prefix of the layer: "decoder.layers.1.".
    layer: str
    logits: Tensor
    ranked: Tensor
    chosen: Tensor


#: Given a router's own choice, the experts to take instead [b, s, k].
Choose = Callable[[Routing], Tensor]


@dataclass
class Forward:
    """One forward pass: what it is given, and what it finds.

    Attributes:
        documents: their lengths in a row; attention and Mamba-2 start anew in each.
        state: keys, values and Mamba-2 states by layer, which the pass continues and replaces, or None.
        choose: which experts to take; None: the router's own.
        logits: [b, s, v] of the decoder, then of each MTP depth.
        routings: every call of a router, in the order of the computation.
    """

    documents: Sequence[int]
    state: dict[str, Any] | None = None
    choose: Choose | None = None
    logits: list[Tensor] = field(default_factory=list)
    routings: list[Routing] = field(default_factory=list)


class Definition:
    """A model with given weights.

    Args:
        read: Hugging Face name -> tensor.
        dtype: of the computation; weights are converted to it.
    """

    def __init__(
        self, config: Nemotron3Config, read: Callable[[str], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.read, self.dtype, self.root = config, read, dtype, hf_root(config)
        stack = self.layers = list[Prefix]()
        #: Of each MTP block: the prefix of its input, its layers, and the prefix of its final norm.
        self.blocks: list[tuple[str, list[Prefix], str]] = []
        for prefix in prefixes(config):
            if prefix.part == "mtp_in":
                first, stack = prefix.hf, []
            elif prefix.part == "mtp_out":
                self.blocks.append((first, stack, prefix.hf))
            elif prefix.part != "model":
                stack.append(prefix)

    def but(self: Model, **steps: Callable[..., Any]) -> Model:
        """A copy in which `step(original, *arguments)` computes the named steps, wherever they are called."""
        kind, made = type(self), dict[str, Any]()
        for name, step in steps.items():
            if not callable(original := getattr(kind, name, None)):
                raise ValueError(f"{kind.__name__} has no step {name!r}")
            made[name] = partialmethod(
                lambda m, f, old, *given: f(MethodType(old, m), *given), step, original
            )
        other = copy.copy(self)
        other.__class__ = type(kind.__name__, (kind,), made)
        return other

    def weight(self, name: str) -> Tensor:
        """A weight in the dtype of the computation."""
        return self.read(name).to(self.dtype)

    def __call__(
        self,
        ids: Tensor,
        documents: Sequence[int] = (),
        *,
        choose: Choose | None = None,
        state: dict[str, Any] | None = None,
        mtp: bool = True,
    ) -> Forward:
        """Run the model on ids [b, s].

        Args:
            documents: lengths of the documents of a row, the same in all rows; default: one.
            choose: which experts to take, where not the router's own.
            state: {} at first; the same dictionary continues a sequence. MTP does not run with one.
        """
        run = Forward([n for n in documents if n] or [ids.shape[1]], state, choose)
        h = self.decoder(self.embed(ids), run)
        run.logits.append(self.logits(h))
        for depth in range(1, (self.config.mtp_num_layers or 0) + 1) if mtp and state is None else ():
            h = self.mtp(depth, self.embed(shifted(ids, run.documents, depth)), h, run)
            run.logits.append(self.logits(h))
        return run

    def decoder(self, x: Tensor, run: Forward) -> Tensor:
        """Hidden states of embeddings after the final norm, both [b, s, d]."""
        return self.norm(self.stack(self.layers, x, run), f"{self.root}.norm_f.weight")

    def mtp(self, depth: int, embedded: Tensor, h: Tensor, run: Forward) -> Tensor:
        """Hidden states of an MTP depth: of embeddings of tokens further on and the hidden states so far."""
        first, layers, last = self.blocks[min(depth, len(self.blocks)) - 1]
        x = self.stack(layers, self.mtp_input(first, embedded, h), run)
        return self.norm(x, last + "final_layernorm.weight")

    def stack(self, layers: Sequence[Prefix], x: Tensor, run: Forward) -> Tensor:
        """The residual stream [b, s, d] after layers."""
        for prefix in layers:
            x = x + self.layer(prefix, x, run)
        return x

    def layer(self, prefix: Prefix, x: Tensor, run: Forward) -> Tensor:
        """The update of one layer to the residual stream x [b, s, d]."""
        u, name = self.norm(x, prefix.hf + "norm.weight"), prefix.hf + "mixer."
        if prefix.part in "E-":
            return self.moe(name, prefix, u, run) if prefix.part == "E" else self.mlp(name, u)
        mix = self.mamba if prefix.part == "M" else self.attention
        if len(run.documents) == 1:
            return mix(name, prefix.config, u, run)
        return torch.cat([mix(name, prefix.config, part, run) for part in u.split(run.documents, 1)], 1)

    def embed(self, ids: Tensor) -> Tensor:
        """[b, s] -> [b, s, d]."""
        return F.embedding(ids, self.weight(f"{self.root}.embeddings.weight"))

    def logits(self, h: Tensor) -> Tensor:
        """The output layer: [b, s, d] after a final norm -> [b, s, v]."""
        return self.linear(h, "lm_head.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x [..., columns] times the transpose of a weight [rows, columns]."""
        return x @ self.weight(name).T

    def rms(self, x: Tensor, epsilon: float) -> Tensor:
        """x over its root mean square along the last axis."""
        return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with the gain of that name."""
        return self.rms(x, self.config.layernorm_epsilon) * self.weight(name)

    def activation(self, x: Tensor) -> Tensor:
        """Squared ReLU."""
        return x.relu().square()

    def mlp(self, name: str, u: Tensor) -> Tensor:
        """A dense MLP, a shared expert or a routed one."""
        return self.linear(
            self.activation(self.linear(u, name + "up_proj.weight")), name + "down_proj.weight"
        )

    def attention(self, name: str, c: Nemotron3Config, u: Tensor, run: Forward) -> Tensor:
        """Grouped-query attention without positions: [b, s, d] -> [b, s, d]."""
        qkv = (self.linear(u, f"{name}{part}_proj.weight") for part in "qkv")
        q, k, v = (part.unflatten(-1, (-1, c.kv_channels)).transpose(1, 2) for part in qkv)
        if run.state is not None:
            if name in run.state:
                k, v = (torch.cat(pair, 2) for pair in zip(run.state[name], (k, v), strict=True))
            run.state[name] = k, v
        y = self.attend(q, *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)))
        return self.linear(y.transpose(1, 2).flatten(2), name + "o_proj.weight")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; the last query is at the position of the last key."""
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return scores.masked_fill(later.triu(1 + k.shape[2] - q.shape[2]), -torch.inf).softmax(-1) @ v

    def mamba(self, name: str, c: Nemotron3Config, u: Tensor, run: Forward) -> Tensor:
        """Mamba-2 mixer: [b, s, d] -> [b, s, d]."""
        inner, groups = c.mamba_inner_size, c.mamba_num_groups
        parts = [inner, inner + 2 * groups * c.mamba_state_dim, c.mamba_num_heads]
        z, xbc, dt = self.linear(u, name + "in_proj.weight").split_with_sizes(parts, -1)
        y = self.recurrence(name, c, xbc, dt, run)
        y = self.gated_norm(y, z, self.weight(name + "norm.weight"), groups)
        return self.linear(y, name + "out_proj.weight")

    def recurrence(self, name: str, c: Nemotron3Config, xbc: Tensor, dt: Tensor, run: Forward) -> Tensor:
        """Convolution and scan over their state: xbc [b, s, channels], dt [b, s, h] -> [b, s, inner]."""
        heads, groups, bc = c.mamba_num_heads, c.mamba_num_groups, c.mamba_num_groups * c.mamba_state_dim
        taps = self.weight(name + "conv1d.weight")  # [channels, 1, kernel]
        if run.state is not None and name in run.state:
            window, ssm = run.state[name]
        else:
            window = xbc.new_zeros(len(xbc), taps.shape[-1] - 1, xbc.shape[-1])
            ssm = xbc.new_zeros(len(xbc), heads, c.mamba_head_dim, c.mamba_state_dim)
        xbc = torch.cat((window, xbc), 1)
        window = xbc[:, xbc.shape[1] - window.shape[1] :]
        u = self.conv(xbc, taps, self.weight(name + "conv1d.bias")).split([c.mamba_inner_size, bc, bc], -1)
        x, B, C = (part.unflatten(-1, (n, -1)) for part, n in zip(u, (heads, groups, groups), strict=True))
        dt = self.time_steps(dt, self.weight(name + "dt_bias"))
        y, ssm = self.scan(x, dt, -self.weight(name + "A_log").exp(), B, C, ssm)
        if run.state is not None:
            run.state[name] = window, ssm
        return (y + self.weight(name + "D")[:, None] * x).flatten(2)

    def conv(self, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        """Convolution and SiLU: x [b, kernel - 1 + s, channels] -> [b, s, channels]."""
        return F.silu(F.conv1d(x.transpose(1, 2), taps, bias, groups=len(taps)).transpose(1, 2))

    def time_steps(self, dt: Tensor, bias: Tensor) -> Tensor:
        """dt [b, s, h] and its bias [h] -> time steps [b, s, h]."""
        return F.softplus(dt + bias)

    def scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ssm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The recurrence: x [b, s, h, p], dt [b, s, h], A [h], B and C [b, s, g, n], the state before them
        [b, h, p, n] -> [b, s, h, p], and the state after."""
        B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
        outputs = []
        for t in range(x.shape[1]):
            added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            ssm = (dt[:, t] * A).exp()[..., None, None] * ssm + added
            outputs.append((ssm * C[:, t, :, None]).sum(-1))
        return torch.stack(outputs, 1), ssm

    def gated_norm(self, y: Tensor, z: Tensor, gain: Tensor, groups: int) -> Tensor:
        """Gate z and RMSNorm over each group of channels: y and z [b, s, inner]."""
        return self.rms((y * F.silu(z)).unflatten(-1, (groups, -1)), GATED_NORM_EPSILON).flatten(-2) * gain

    def moe(self, name: str, prefix: Prefix, u: Tensor, run: Forward) -> Tensor:
        """Router, routed experts (in the latent space, if there is one) and shared expert, of u [b, s, d]."""
        c = prefix.config
        assert c.moe_router_topk is not None
        logits = self.router(u, name + "gate.weight")
        scores = self.scores(logits)
        ranked = self.ranking(scores, self.weight(name + "gate.e_score_correction_bias"))
        routing = Routing(prefix.megatron, logits, ranked, ranked.topk(c.moe_router_topk, -1).indices)
        routing.chosen = routing.chosen if run.choose is None else run.choose(routing)
        run.routings.append(routing)
        weights = self.probabilities(scores.gather(-1, routing.chosen), c)
        z, shared = self.beside(name, c, u)
        y = self.routed(name, z, routing.chosen, weights)
        y = self.norm(y, name + "fc2_norm.weight") if c.moe_use_norm_before_up_proj else y
        y = self.linear(y, name + "fc2_latent_proj.weight") if c.moe_latent_size else y
        return y if shared is None else y + shared

    def beside(self, name: str, c: Nemotron3Config, u: Tensor) -> tuple[Tensor, Tensor | None]:
        """What u [b, s, d] is to the routed experts, and the shared expert's output."""
        z = self.linear(u, name + "fc1_latent_proj.weight") if c.moe_latent_size else u
        return z, self.shared(name, u) if c.moe_shared_expert_intermediate_size else None

    def router(self, u: Tensor, name: str) -> Tensor:
        """The router's logits [b, s, e]."""
        return self.linear(u, name)

    def scores(self, logits: Tensor) -> Tensor:
        """Scores of the router's logits [b, s, e]."""
        return logits.sigmoid()

    def ranking(self, scores: Tensor, bias: Tensor) -> Tensor:
        """By what experts are chosen [b, s, e]; no gradient flows through it."""
        return scores.detach() + bias

    def probabilities(self, scores: Tensor, c: Nemotron3Config) -> Tensor:
        """Weights of the chosen experts, from their scores without the bias [b, s, k]."""
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20) if scores.shape[-1] > 1 else scores
        return scores * (c.moe_router_topk_scaling_factor or 1.0)

    def routed(self, name: str, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs; experts that no token chose are not read."""
        y = torch.zeros_like(z)
        for e in chosen.unique().tolist():
            of_expert = (weights * (chosen == e)).sum(-1, keepdim=True)
            rows = (chosen == e).any(-1).nonzero(as_tuple=True)
            y = y.index_put(rows, self.mlp(f"{name}experts.{e}.", z[rows]) * of_expert[rows], accumulate=True)
        return y

    def shared(self, name: str, u: Tensor) -> Tensor:
        """The shared expert: [b, s, d] -> [b, s, d]."""
        return self.mlp(name + "shared_experts.", u)

    def mtp_input(self, name: str, embedded: Tensor, h: Tensor) -> Tensor:
        """Embeddings of tokens further on and the hidden states so far, both [b, s, d] -> [b, s, d]."""
        pair = self.norm(embedded, name + "enorm.weight"), self.norm(h, name + "hnorm.weight")
        return self.linear(torch.cat(pair, -1), name + "eh_proj.weight")


def shifted(t: Tensor, documents: Sequence[int], by: int) -> Tensor:
    """Move each document of [b, s] to the left; zeros follow its last token."""
    parts = t.split([n for n in documents if n], 1)
    return torch.cat([F.pad(part[:, by:], (0, min(by, part.shape[1]))) for part in parts], 1)
