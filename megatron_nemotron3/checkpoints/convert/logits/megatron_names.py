"""Megatron's tensors by their Hugging Face names, put together by hand.

Names and shapes are those of a torch_dist folder (global, whatever layout wrote it); other spellings of
megatron-core are tried after them. Nothing here uses the converter's tables, because they are what is being
tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_nemotron3.checkpoints.convert.logits.reader import StoredRows, TensorReader
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.tensors import hf_root

#: Names of the norm before a mixer, by layer kind: fused into the first linear layer, or separate.
_NORMS = {
    "M": ("mixer.in_proj.layer_norm_weight", "norm.weight"),
    "*": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "-": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "E": ("pre_mlp_layernorm.weight",),
}


class MegatronReader(TensorReader):
    """A Megatron checkpoint of a model."""

    def __init__(self, source: TensorSource, config: Nemotron3Config) -> None:
        super().__init__("Megatron", source)
        self.config, self.prefixes = config, {}
        for prefix in prefixes(config):
            # The parts of an MTP block share the numbers of its layers, but no names.
            parts = {"mtp_in": ("enorm", "hnorm", "eh_proj"), "mtp_out": ("final_layernorm",)}
            for part in parts.get(prefix.part, ("",)):
                self.prefixes[prefix.hf + part] = prefix
        # Wrappers prefix every name, and older versions call MTP's layers otherwise.
        self.names = {
            re.sub(r"^((model|module)\.)+", "", name).replace(
                ".transformer_layer.", ".mtp_model_layer."
            ): name
            for name in source.tensors
        }

    def stored(self, name: str) -> list[StoredRows]:
        d, root = self.config.hidden_size, hf_root(self.config)
        if name == f"{root}.norm_f.weight":
            return self._whole((d,), "decoder.final_norm.weight", "decoder.final_layernorm.weight")
        tables = {f"{root}.embeddings": "embedding.word_embeddings", "lm_head": "output_layer"}
        if (table := tables.get(name.removesuffix(".weight"))) is not None:
            return self._table(f"{table}.weight")
        if name.startswith("mtp.") and (prefix := self.prefixes.get(name.removesuffix(".weight"))):
            part = name.split(".")[-2]
            return self._whole((d, 2 * d) if part == "eh_proj" else (d,), f"{prefix.megatron}{part}.weight")
        head, _, part = name.partition("mixer.") if "mixer." in name else name.rpartition("norm.weight")
        prefix = self.prefixes[head]
        if not part:
            return self._whole((d,), *(prefix.megatron + norm for norm in _NORMS[prefix.part]))
        kinds = {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._experts}
        return kinds[prefix.part](prefix, part)

    def _mamba(self, prefix: Prefix, part: str) -> list[StoredRows]:
        c, name = self.config, f"{prefix.megatron}mixer.{part}"
        d, heads, inner = c.hidden_size, c.mamba_num_heads, c.mamba_inner_size
        bc = c.mamba_num_groups * c.mamba_state_dim
        conv = {"x": inner, "B": bc, "C": bc}
        if part == "in_proj.weight":
            return self._parts({"z": inner, **conv, "dt": heads}, (d,), name)
        if part.startswith("conv1d."):
            rest = (1, c.mamba_conv_kernel) if part == "conv1d.weight" else ()
            return self._parts(conv, rest, name, name.replace("conv1d.", "conv1d_"))
        shapes = {"norm.weight": (inner,), "out_proj.weight": (d, inner)}
        return self._whole(shapes.get(part, (heads,)), name)

    def _attention(self, prefix: Prefix, part: str) -> list[StoredRows]:
        c, below = self.config, prefix.megatron + "self_attention."
        groups, width = c.num_query_groups, c.kv_channels
        queries = c.num_attention_heads // groups
        if part == "o_proj.weight":
            return self._whole((c.hidden_size, groups * queries * width), below + "linear_proj.weight")
        # Each group has its queries, then its key, then its value.
        first, count = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[part[0]]
        size, name = queries + 2, self.find(below + "linear_qkv.weight")
        shape = (groups * size * width, c.hidden_size)
        starts = [(group * size + first) * width for group in range(groups)]
        return [StoredRows(name, shape, start, start + count * width) for start in starts]

    def _mlp(self, prefix: Prefix, part: str) -> list[StoredRows]:
        return self._linear(prefix.megatron + "mlp.", part, self.config.dense_ffn_hidden_size)

    def _experts(self, prefix: Prefix, part: str) -> list[StoredRows]:
        c, below, d = prefix.config, prefix.megatron + "mlp.", self.config.hidden_size
        experts, latent = c.num_moe_experts or 0, c.moe_latent_size or 0
        if part.startswith("shared_experts."):
            width = c.moe_shared_expert_intermediate_size
            return self._linear(below + "shared_experts.", part.partition(".")[2], width)
        if not part.startswith("experts."):
            found = {
                "gate.weight": ((experts, d), "router.weight"),
                "gate.e_score_correction_bias": ((experts,), "router.expert_bias"),
                "fc1_latent_proj.weight": ((latent, d), "fc1_latent_proj.weight"),
                "fc2_norm.weight": ((latent,), "fc2_norm.weight"),
                "fc2_latent_proj.weight": ((d, latent), "fc2_latent_proj.weight"),
            }
            return self._whole(found[part][0], below + found[part][1])
        _, e, projection, _ = part.split(".")
        linear = {"up_proj": "linear_fc1", "down_proj": "linear_fc2"}[projection]
        shape = (c.moe_ffn_hidden_size or 0, latent or d)
        shape = shape if projection == "up_proj" else shape[::-1]
        stacked = self.names.get(f"{below}experts.experts.{linear}.weight")
        if stacked is not None:
            return [StoredRows(stacked, (experts, *shape), 0, shape[0], int(e))]
        return self._whole(
            shape,
            f"{below}experts.experts.{e}.{linear}.weight",
            f"{below}experts.{linear}.weight{e}",
            f"{below}experts.local_experts.{e}.{linear}.weight",
        )

    def _whole(self, shape: tuple[int, ...], *names: str) -> list[StoredRows]:
        return [StoredRows(self.find(*names), shape, 0, shape[0])]

    def _linear(self, below: str, part: str, width: int | None) -> list[StoredRows]:
        d, width = self.config.hidden_size, width or 0
        if part == "up_proj.weight":
            return self._whole((width, d), below + "linear_fc1.weight")
        return self._whole((d, width), below + "linear_fc2.weight")

    def _parts(self, parts: Mapping[str, int], rest: tuple[int, ...], *names: str) -> list[StoredRows]:
        """One tensor like the parameter, or one for each part."""
        if any(name in self.names for name in names):
            return self._whole((sum(parts.values()), *rest), *names)
        return [row for p, n in parts.items() for row in self._whole((n, *rest), f"{names[0]}.{p}")]

    def _table(self, name: str) -> list[StoredRows]:
        """Embedding or output layer, which may have padding rows at its end."""
        found, rows = self.find(name), self.config.vocab_size
        padded = max(rows, tuple(self.source.tensors[found].shape)[0])
        return [StoredRows(found, (padded, self.config.hidden_size), 0, rows)]
