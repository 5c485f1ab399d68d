"""Every layer kind on Megatron's tensors in plain torch: what a Megatron checkpoint computes.

Names and shapes are those of a torch_dist folder (global, whatever layout wrote it); other spellings of
megatron-core are tried after them. Nothing here uses the converter's tables, because they are what is being
tested. Activations are [rows, s, d] in FP32: the rows are the same tokens in different streams, which share
each read of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.keys import non_weight_kind, plain_name
from megatron_nemotron3.checkpoints.convert.logits.reader import TensorReader
from megatron_nemotron3.checkpoints.convert.logits.routing import Selection
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.functional import gated_group_rms_norm, rms_norm, squared_relu
from megatron_nemotron3.layers.ssd import ssd_chunked
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON
from megatron_nemotron3.models.prefixes import Prefix

#: Names of the norm before a mixer, by layer kind: fused into the first linear layer, or separate.
NORMS = {
    "M": ("mixer.in_proj.layer_norm_weight", "norm.weight"),
    "*": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "-": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "E": ("pre_mlp_layernorm.weight",),
}
#: Experts to use [s, topk] instead of those that a router selected.
SelectExperts = Callable[[Selection], Tensor]
#: Queries whose attention scores are in memory at a time.
_QUERIES = 512
FINAL_NORMS = ("decoder.final_norm.weight", "decoder.final_layernorm.weight")


class ReferenceModel:
    """A Megatron checkpoint, run one layer at a time.

    Each public method below `layer` is one step, which `bisect` replaces to test a hypothesis.
    """

    def __init__(self, source: TensorSource, config: Nemotron3Config) -> None:
        names = {plain_name(key): key for key in source.tensors if non_weight_kind(key) is None}
        self.weights, self.config = TensorReader("Megatron", source, names), config
        self.hidden = config.hidden_size

    def embed(self, ids: Tensor) -> Tensor:
        """[s] token ids -> [s, d]. Reads only their rows, and never the padding rows of the table."""
        name = "embedding.word_embeddings.weight"
        return self.weights.rows(name, self.table(name), ids.tolist())

    def layer(
        self, layer: Prefix, x: Tensor, select: SelectExperts | None = None
    ) -> tuple[Tensor, list[Selection]]:
        """Return the update of a layer to the residual stream."""
        kind, prefix = layer.part, layer.megatron
        normed = self.norm(x, *(prefix + name for name in NORMS[kind]))
        if kind == "E":
            return self.moe(prefix + "mlp.", layer.config, normed, select)
        return {"M": self.mamba, "*": self.attention, "-": self.mlp}[kind](prefix, normed), []

    def norm(self, x: Tensor, *names: str) -> Tensor:
        """Apply RMSNorm with the weight of the first name that exists."""
        weight = self.weights.tensor(self.weights.find(*names), (x.shape[-1],))
        return rms_norm(x, weight, self.config.layernorm_epsilon)

    def final_norm(self, x: Tensor) -> Tensor:
        """Apply the norm after the decoder's last layer."""
        return self.norm(x, *FINAL_NORMS)

    def logits(self, x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first token id, one past the last, logits [rows, s, n]) of normed x, band by band."""
        name = "output_layer.weight"
        for start, stop, band in self.weights.bands(name, self.table(name), stop=self.config.vocab_size):
            yield start, stop, x @ band.t()

    def mtp_input(self, prefix: str, embedded: Tensor, x: Tensor) -> Tensor:
        """Input of an MTP block's layers."""
        first = self.norm(embedded, prefix + "enorm.weight").expand_as(x)
        both = torch.cat([first, self.norm(x, prefix + "hnorm.weight")], dim=-1)
        return self.weights.linear(both, prefix + "eh_proj.weight", (self.hidden, 2 * self.hidden))

    def table(self, name: str) -> tuple[int, int]:
        """Shape of an embedding or output table, which may have padding rows at its end."""
        found = self.weights.find(name)
        rows: int = tuple(self.weights.source.tensors[self.weights.names[found]].shape)[0]
        return max(rows, self.config.vocab_size), self.hidden

    def linear(self, x: Tensor, name: str, rows: int) -> Tensor:
        """x [..., columns] times the transpose of the weight [rows, columns] of that name."""
        return self.weights.linear(x, name, (rows, x.shape[-1]))

    def mamba(self, prefix: str, x: Tensor) -> Tensor:
        """Mamba-2 mixer of a layer with that prefix: x [rows, s, d] after the norm -> [rows, s, d]."""
        c, name = self.config, prefix + "mixer."
        heads, groups, inner = c.mamba_num_heads, c.mamba_num_groups, c.mamba_inner_size
        bc = groups * c.mamba_state_dim
        conv = {"x": inner, "B": bc, "C": bc}
        parts = {"z": inner, **conv, "dt": heads}
        zxbcdt = self.in_proj(name + "in_proj.weight", x, parts)
        z, xbc, dt = zxbcdt.split([inner, inner + 2 * bc, heads], -1)
        taps = self._parts((name + "conv1d.weight", name + "conv1d_weight"), conv, (1, c.mamba_conv_kernel))
        bias = self._parts((name + "conv1d.bias", name + "conv1d_bias"), conv, ())
        xs, B, C = self.conv(xbc, taps, bias).split([inner, bc, bc], -1)
        A_log, D, dt_bias = (self.weights.tensor(name + n, (heads,)) for n in ("A_log", "D", "dt_bias"))
        y = self.scan(
            xs.unflatten(-1, (heads, c.mamba_head_dim)),
            self.time_steps(dt, dt_bias),
            -A_log.exp(),
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            D,
        ).flatten(-2)
        y = self.gated_norm(y, z, self.weights.tensor(name + "norm.weight", (inner,)), inner // groups)
        return self.linear(y, name + "out_proj.weight", self.hidden)

    def conv(self, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        """Causal convolution and SiLU: x [rows, s, c], taps [c, 1, k], bias [c] -> [rows, s, c]."""
        return causal_conv1d(x, taps, bias)

    def time_steps(self, dt: Tensor, bias: Tensor) -> Tensor:
        """dt [rows, s, h] and its bias [h] -> time steps [rows, s, h]."""
        return F.softplus(dt + bias)

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        """The recurrence of Mamba-2; shapes as in `layers.ssd`."""
        y: Tensor = ssd_chunked(x, dt, A, B, C, D=D)
        return y

    def gated_norm(self, y: Tensor, z: Tensor, gain: Tensor, group: int) -> Tensor:
        """Gate z and RMSNorm over groups of channels: y, z [rows, s, inner], gain [inner]."""
        return gated_group_rms_norm(y, z, gain, group_size=group, eps=GATED_NORM_EPSILON)

    def in_proj(self, name: str, x: Tensor, parts: dict[str, int]) -> Tensor:
        """[z, x, B, C, dt] of x: [rows, s, d] -> [rows, s, sum of the parts]."""
        if name in self.weights.names:  # one tensor [z, x, B, C, dt], like the parameter
            return self.linear(x, name, sum(parts.values()))
        return torch.cat([self.linear(x, f"{name}.{part}", rows) for part, rows in parts.items()], -1)

    def _parts(self, names: tuple[str, ...], parts: dict[str, int], rest: tuple[int, ...]) -> Tensor:
        for name in names:
            if name in self.weights.names:
                return self.weights.tensor(name, (sum(parts.values()), *rest))
        return torch.cat([self.weights.tensor(f"{names[0]}.{p}", (n, *rest)) for p, n in parts.items()])

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        """Attention of a layer with that prefix: x [rows, s, d] after the norm -> [rows, s, d]."""
        c, name = self.config, prefix + "self_attention."
        groups, queries = c.num_query_groups, c.num_attention_heads // c.num_query_groups
        qkv = self.linear(x, name + "linear_qkv.weight", groups * (queries + 2) * c.kv_channels)
        # Each group has its queries, then its key, then its value.
        heads = qkv.unflatten(-1, (groups, queries + 2, c.kv_channels)).permute(0, 2, 3, 1, 4)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]  # [rows, groups, heads, s, c]
        y = self.attend(*self.positions(q, k), v).permute(0, 3, 1, 2, 4).flatten(2)
        return self.linear(y, name + "linear_proj.weight", self.hidden)

    def positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What positions do to q [rows, groups, heads, s, c] and k [rows, groups, 1, s, c]: nothing."""
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, `_QUERIES` tokens at a time: [rows, groups, heads, s, c]."""
        y, tokens = torch.empty_like(q), q.shape[-2]
        for start in range(0, tokens, _QUERIES):
            stop = min(start + _QUERIES, tokens)
            scores = (q[..., start:stop, :] @ k[..., :stop, :].transpose(-1, -2)) * q.shape[-1] ** -0.5
            hidden = torch.ones(stop - start, stop, dtype=torch.bool).triu_(1 + start)
            y[..., start:stop, :] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[..., :stop, :]
        return y

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        """Dense MLP of a layer with that prefix: x [rows, s, d] after the norm -> [rows, s, d]."""
        return self._two_layers(prefix + "mlp.", x, self.config.dense_ffn_hidden_size)

    def _two_layers(self, prefix: str, x: Tensor, width: int | None) -> Tensor:
        assert width is not None
        middle = self.activation(self.linear(x, prefix + "linear_fc1.weight", width))
        return self.linear(middle, prefix + "linear_fc2.weight", self.hidden)

    def activation(self, x: Tensor) -> Tensor:
        """Squared ReLU."""
        return squared_relu(x)

    def moe(
        self, prefix: str, c: Nemotron3Config, x: Tensor, select: SelectExperts | None
    ) -> tuple[Tensor, list[Selection]]:
        """Return the output [rows, s, d] and the selection of each row; arguments as for `layer`."""
        experts, ffn = c.num_moe_experts, c.moe_ffn_hidden_size
        assert experts is not None and ffn is not None and c.moe_router_topk is not None
        scores = self.scores(self.linear(x, prefix + "router.weight", experts))
        ranked = self.ranking(scores, self.weights.tensor(prefix + "router.expert_bias", (experts,)))
        selections = [Selection(row, row.topk(c.moe_router_topk, dim=-1).indices) for row in ranked]
        if select is not None:
            selections = [replace(selection, experts=select(selection)) for selection in selections]
        topk = torch.cat([selection.experts for selection in selections])  # [rows * s, topk]
        probabilities = self.probabilities(scores.flatten(0, 1).gather(1, topk), c)

        latent = c.moe_latent_size
        z = self.linear(x, prefix + "fc1_latent_proj.weight", latent) if latent else x
        y = self.routed(prefix, z.flatten(0, 1), ffn, topk, probabilities).view(z.shape)
        routed = self.linear(y, prefix + "fc2_latent_proj.weight", self.hidden) if latent else y
        return routed + self.shared(prefix, x, c), selections

    def scores(self, logits: Tensor) -> Tensor:
        """Scores of the router's logits [rows, s, experts]."""
        return logits.sigmoid()

    def ranking(self, scores: Tensor, bias: Tensor) -> Tensor:
        """By what experts are selected: scores [rows, s, experts] and the experts' bias."""
        return scores + bias

    def probabilities(self, scores: Tensor, c: Nemotron3Config) -> Tensor:
        """Weights of the selected experts, of their scores without the bias [tokens, topk]."""
        assert c.moe_router_topk_scaling_factor is not None
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * c.moe_router_topk_scaling_factor

    def shared(self, prefix: str, x: Tensor, c: Nemotron3Config) -> Tensor:
        """Output of the shared expert."""
        return self._two_layers(prefix + "shared_experts.", x, c.moe_shared_expert_intermediate_size)

    def routed(self, prefix: str, x: Tensor, ffn: int, topk: Tensor, probabilities: Tensor) -> Tensor:
        """Sum of the selected experts: x [tokens, width], topk and probabilities [tokens, topk].

        Reads only experts that some token selected, one at a time.
        """
        y = torch.zeros_like(x)
        for e in topk.unique().tolist():
            token, place = torch.where(topk == e)
            up = self._expert(prefix, "linear_fc1", e, x[token], ffn)
            middle = self.activation(up) * probabilities[token, place].unsqueeze(1)
            y[token] += self._expert(prefix, "linear_fc2", e, middle, x.shape[-1])  # each token occurs once
        return y

    def _expert(self, prefix: str, linear: str, e: int, x: Tensor, rows: int) -> Tensor:
        stacked = f"{prefix}experts.experts.{linear}.weight"
        if stacked in self.weights.names:
            shape = (self.config.num_moe_experts or 0, rows, x.shape[-1])
            return self.weights.linear(x, stacked, shape, within=(e,))
        return self.linear(
            x,
            self.weights.find(
                f"{prefix}experts.experts.{e}.{linear}.weight",
                f"{prefix}experts.{linear}.weight{e}",
                f"{prefix}experts.local_experts.{e}.{linear}.weight",
            ),
            rows,
        )
