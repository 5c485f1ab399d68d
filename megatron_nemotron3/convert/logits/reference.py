"""Every layer kind on Megatron's tensors in plain torch: what a Megatron checkpoint computes.

Names and shapes are those of a torch_dist folder (global, whatever layout wrote it); other spellings of
megatron-core are tried after them. Nothing here uses the converter's tables, because they are what is being
tested. Activations are [rows, s, d] in FP32: the rows are the same tokens in different streams, which share
each read of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.convert.keys import Prefix, non_weight_kind, plain_name
from megatron_nemotron3.convert.logits.reader import TensorReader
from megatron_nemotron3.convert.logits.routing import Agreement, Selection, agree
from megatron_nemotron3.convert.sources import TensorSource
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.functional import (
    gated_group_rms_norm,
    rms_norm,
    squared_relu,
    weighted_squared_relu,
)
from megatron_nemotron3.layers.ssd import ssd_chunked
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON

#: Names of the norm before a mixer, by layer kind: fused into the first linear layer, or separate.
NORMS = {
    "M": ("mixer.in_proj.layer_norm_weight", "norm.weight"),
    "*": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "-": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "E": ("pre_mlp_layernorm.weight",),
}
FINAL_NORMS = ("decoder.final_norm.weight", "decoder.final_layernorm.weight")


class Reference:
    """A Megatron checkpoint, run one layer at a time.

    Raises:
        ValueError: from every method that reads, if a tensor is missing, or has another shape or dtype.
    """

    def __init__(self, source: TensorSource, config: Nemotron3Config) -> None:
        names = {plain_name(key): key for key in source.tensors if non_weight_kind(key) is None}
        self.weights, self.config = TensorReader("Megatron", source, names), config
        self.hidden = config.hidden_size

    def embed(self, ids: Tensor) -> Tensor:
        """[s] token ids -> [s, d]. Reads only their rows, and never the padding rows of the table."""
        name = "embedding.word_embeddings.weight"
        return self.weights.rows(name, self._table(name), ids.tolist())

    def layer(
        self, layer: Prefix, x: Tensor, theirs: Selection | None = None
    ) -> tuple[Tensor, list[Agreement]]:
        """Return the update of a layer to the residual stream.

        Args:
            layer: its kind, the prefix of its tensor names, and its sizes.
            x: [rows, s, d].
            theirs: for an E layer, Hugging Face's selection for these tokens.

        Returns:
            [rows, s, d], and for an E layer the agreement of each row's selection with theirs.
        """
        kind, prefix = layer.part, layer.megatron
        normed = self.norm(x, *(prefix + name for name in NORMS[kind]))
        if kind == "E":
            assert theirs is not None
            return self._moe(prefix + "mlp.", layer.config, normed, theirs)
        return {"M": self._mamba, "*": self._attention, "-": self._mlp}[kind](prefix, normed), []

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
        for start, stop, band in self.weights.bands(name, self._table(name), stop=self.config.vocab_size):
            yield start, stop, x @ band.t()

    def mtp_input(self, prefix: str, embedded: Tensor, x: Tensor) -> Tensor:
        """Input of an MTP block's layers.

        Args:
            prefix: of its tensor names, such as "mtp.layers.0.".
            embedded: [s, d], embeddings of the token after each token of x (at depth 1).
            x: [rows, s, d], after the final norm or the previous block.
        """
        first = self.norm(embedded, prefix + "enorm.weight").expand_as(x)
        both = torch.cat([first, self.norm(x, prefix + "hnorm.weight")], dim=-1)
        return self.weights.linear(both, prefix + "eh_proj.weight", (self.hidden, 2 * self.hidden))

    def _table(self, name: str) -> tuple[int, int]:
        """Shape of an embedding or output table, which may have padding rows at its end."""
        found = self.weights.find(name)
        rows: int = tuple(self.weights.source.tensors[self.weights.names[found]].shape)[0]
        return max(rows, self.config.vocab_size), self.hidden

    def _linear(self, x: Tensor, name: str, rows: int) -> Tensor:
        return self.weights.linear(x, name, (rows, x.shape[-1]))

    def _mamba(self, prefix: str, x: Tensor) -> Tensor:
        c, name = self.config, prefix + "mixer."
        heads, groups, inner = c.mamba_num_heads, c.mamba_num_groups, c.mamba_inner_size
        bc = groups * c.mamba_state_dim
        conv = {"x": inner, "B": bc, "C": bc}
        parts = {"z": inner, **conv, "dt": heads}
        zxbcdt = self._in_proj(name + "in_proj.weight", x, parts)
        z, xbc, dt = zxbcdt.split([inner, inner + 2 * bc, heads], -1)
        taps = self._parts((name + "conv1d.weight", name + "conv1d_weight"), conv, (1, c.mamba_conv_kernel))
        bias = self._parts((name + "conv1d.bias", name + "conv1d_bias"), conv, ())
        xs, B, C = causal_conv1d(xbc, taps, bias).split([inner, bc, bc], -1)
        A_log, D, dt_bias = (self.weights.tensor(name + n, (heads,)) for n in ("A_log", "D", "dt_bias"))
        y = ssd_chunked(
            xs.unflatten(-1, (heads, c.mamba_head_dim)),
            F.softplus(dt + dt_bias),
            -A_log.exp(),
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            D=D,
        ).flatten(-2)
        gain = self.weights.tensor(name + "norm.weight", (inner,))
        y = gated_group_rms_norm(y, z, gain, group_size=inner // groups, eps=GATED_NORM_EPSILON)
        return self._linear(y, name + "out_proj.weight", self.hidden)

    def _in_proj(self, name: str, x: Tensor, parts: dict[str, int]) -> Tensor:
        if name in self.weights.names:  # one tensor [z, x, B, C, dt], like the parameter
            return self._linear(x, name, sum(parts.values()))
        return torch.cat([self._linear(x, f"{name}.{part}", rows) for part, rows in parts.items()], -1)

    def _parts(self, names: tuple[str, ...], parts: dict[str, int], rest: tuple[int, ...]) -> Tensor:
        for name in names:
            if name in self.weights.names:
                return self.weights.tensor(name, (sum(parts.values()), *rest))
        return torch.cat([self.weights.tensor(f"{names[0]}.{p}", (n, *rest)) for p, n in parts.items()])

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        c, name = self.config, prefix + "self_attention."
        groups, queries = c.num_query_groups, c.num_attention_heads // c.num_query_groups
        qkv = self._linear(x, name + "linear_qkv.weight", groups * (queries + 2) * c.kv_channels)
        # Each group has its queries, then its key, then its value.
        heads = qkv.unflatten(-1, (groups, queries + 2, c.kv_channels)).permute(0, 2, 3, 1, 4)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]  # [rows, groups, heads, s, c]
        scores = (q @ k.transpose(-1, -2)) * c.kv_channels**-0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu_(1)
        y = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v
        y = y.permute(0, 3, 1, 2, 4).flatten(2)
        return self._linear(y, name + "linear_proj.weight", self.hidden)

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        return self._two_layers(prefix + "mlp.", x, self.config.dense_ffn_hidden_size)

    def _two_layers(self, prefix: str, x: Tensor, width: int | None) -> Tensor:
        assert width is not None
        middle = squared_relu(self._linear(x, prefix + "linear_fc1.weight", width))
        return self._linear(middle, prefix + "linear_fc2.weight", self.hidden)

    def _moe(
        self, prefix: str, c: Nemotron3Config, x: Tensor, theirs: Selection
    ) -> tuple[Tensor, list[Agreement]]:
        experts, ffn = c.num_moe_experts, c.moe_ffn_hidden_size
        assert experts is not None and ffn is not None and c.moe_router_topk is not None
        assert c.moe_router_topk_scaling_factor is not None
        scores = self._linear(x, prefix + "router.weight", experts).sigmoid()
        ranked = scores + self.weights.tensor(prefix + "router.expert_bias", (experts,))
        chosen, agreements = [], []
        for row in ranked:
            taken, agreement = agree(Selection(row, row.topk(c.moe_router_topk, dim=-1).indices), theirs)
            chosen.append(taken)
            agreements.append(agreement)
        topk = torch.cat(chosen)  # [rows * s, topk]
        probabilities = scores.flatten(0, 1).gather(1, topk)  # without the bias
        probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + 1e-20)
        probabilities = probabilities * c.moe_router_topk_scaling_factor

        shared = self._two_layers(prefix + "shared_experts.", x, c.moe_shared_expert_intermediate_size)
        latent = c.moe_latent_size
        z = self._linear(x, prefix + "fc1_latent_proj.weight", latent) if latent else x
        y = self._experts(prefix, z.flatten(0, 1), ffn, topk, probabilities).view(z.shape)
        routed = self._linear(y, prefix + "fc2_latent_proj.weight", self.hidden) if latent else y
        return routed + shared, agreements

    def _experts(self, prefix: str, x: Tensor, ffn: int, topk: Tensor, probabilities: Tensor) -> Tensor:
        """Read only experts that some token selected, one at a time."""
        y = torch.zeros_like(x)
        for e in topk.unique().tolist():
            token, place = torch.where(topk == e)
            up = self._expert(prefix, "linear_fc1", e, x[token], ffn)
            middle = weighted_squared_relu(up, probabilities[token, place])
            y[token] += self._expert(prefix, "linear_fc2", e, middle, x.shape[-1])  # each token occurs once
        return y

    def _expert(self, prefix: str, linear: str, e: int, x: Tensor, rows: int) -> Tensor:
        stacked = f"{prefix}experts.experts.{linear}.weight"
        if stacked in self.weights.names:
            shape = (self.config.num_moe_experts or 0, rows, x.shape[-1])
            return self.weights.linear(x, stacked, shape, within=(e,))
        return self._linear(
            x,
            self.weights.find(
                f"{prefix}experts.experts.{e}.{linear}.weight",
                f"{prefix}experts.{linear}.weight{e}",
                f"{prefix}experts.local_experts.{e}.{linear}.weight",
            ),
            rows,
        )
