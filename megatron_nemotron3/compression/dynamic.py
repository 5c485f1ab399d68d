"""Our layers in modelopt's registry of prunable modules. Import it after `plugin.load_plugin()` only.

modelopt recognizes Megatron's classes by their `forward`, and TE's classes by type. Each class below derives
from modelopt's counterpart and overrides what differs in our torch layer; ranking, slicing and export are
modelopt's. Nothing of modelopt is patched: everything goes through its registry. TE models are pruned as
without this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.attention import SelfAttention
from modelopt.torch.nas.plugins import megatron as mcore
from modelopt.torch.nas.registry import DMRegistry
from modelopt.torch.opt.dynamic import DynamicModule

from megatron_nemotron3.layers.attention import TorchCoreAttention
from megatron_nemotron3.layers.experts import (
    ColumnParallelGroupedLinear,
    GroupedExperts,
    RowParallelGroupedLinear,
)
from megatron_nemotron3.layers.linear import (
    DuplicatedLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)
from megatron_nemotron3.layers.mamba import Mamba2Mixer
from megatron_nemotron3.layers.norm import GatedGroupRMSNorm, RMSNorm

_KNOWN_QKV = mcore._DynamicTEQKVLayerNormColumnParallelLinear
_KNOWN_PROJ = mcore._DynamicTEProjRowParallelLinear


class NormOutput:
    """A fused norm and linear that also returns the norm's output while importance is measured.

    modelopt's hook expects (output, bias, normed), as TE returns with `return_layernorm_output`. It ranks
    hidden channels by the third and passes (output, bias) on to the layer.
    """

    #: As in TE's layer: the bias is returned separately.
    te_return_bias = True
    measured = False

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """[s, b, d] -> output [s, b, out], no bias, and, if measured, the normed input [s, b, d]."""
        output: tuple[Any, ...] = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        if not self.measured:
            return output
        return (*output, self.normed(input_))  # type: ignore[attr-defined]


@contextmanager
def measuring(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, fused norms also return their normed input, which modelopt's hooks rank by."""
    layers = [module for module in model.modules() if isinstance(module, NormOutput)]
    for layer in layers:
        layer.measured = True
    try:
        yield
    finally:
        for layer in layers:
            layer.measured = False


@DMRegistry.register(
    {LayerNormColumnParallelLinear: "megatron_nemotron3.layers.linear.LayerNormColumnParallelLinear"}
)
class DynamicLayerNormColumnParallelLinear(NormOutput, mcore._DynamicColumnParallelLinear):
    """Column-parallel linear after a fused RMSNorm, whose gain is cut with the input."""

    def _setup(self, **hparams: Any) -> None:
        super()._setup(**hparams)
        cut = mcore._DynamicTELayerNormColumnParallelLinear._get_ln_param
        self._register_dynamic_attribute("layer_norm_weight", cut)


@DMRegistry.register({DuplicatedLinear: "megatron_nemotron3.layers.linear.DuplicatedLinear"})
class DynamicDuplicatedLinear(mcore._DynamicParallelLinear):
    """A latent projection."""

    def _setup(self, **hparams: Any) -> None:
        self.bias = None
        super()._setup(**hparams)


class DynamicQKV(NormOutput, DynamicModule, LayerNormColumnParallelLinear):
    """Projection to query, key and value: rows are cut by head within each query group."""

    _get_output_size_indices = _KNOWN_QKV._get_output_size_indices
    _get_weight = staticmethod(_KNOWN_QKV._get_weight)
    _get_bias = staticmethod(_KNOWN_QKV._get_bias)
    _get_ln_param = staticmethod(_KNOWN_QKV._get_ln_param)

    def _setup(self, **hparams: Any) -> None:
        self.in_features, self.out_features = self.input_size, self.output_size  # TE's names
        _KNOWN_QKV._setup(self, **hparams)


class DynamicProj(DynamicModule, RowParallelLinear):
    """Attention's output projection: columns are cut by head."""

    _get_input_size_indices = _KNOWN_PROJ._get_input_size_indices
    _get_weight = staticmethod(_KNOWN_PROJ._get_weight)
    _get_bias = staticmethod(_KNOWN_PROJ._get_bias)

    def _setup(self, **hparams: Any) -> None:
        self.in_features = self.input_size
        _KNOWN_PROJ._setup(self, **hparams)


class DynamicSelfAttention(mcore._DynamicSelfAttention):
    """Upstream's attention with our core, none of whose state depends on the number of heads."""

    def _has_torch_core(self) -> bool:
        return isinstance(self.core_attention, TorchCoreAttention)

    def _setup(self, *, hidden_size: Any) -> None:
        if not self._has_torch_core():
            super()._setup(hidden_size=hidden_size)
            return
        heads = mcore.NumAttentionHeadsHp(
            self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        )
        self._register_hparam("num_attention_heads", heads)
        self._register_dynamic_attribute(
            "num_attention_heads_per_partition", lambda module, value: module.num_attention_heads
        )
        DynamicQKV.convert(self.linear_qkv, num_attention_heads=heads, hidden_size=hidden_size)
        DynamicProj.convert(self.linear_proj, num_attention_heads=heads, hidden_size=hidden_size)

    def export(self) -> torch.nn.Module:
        """A plain module again, cut to the active sizes."""
        return mcore._DynamicAttention.export(self) if self._has_torch_core() else super().export()


@DMRegistry.register({GatedGroupRMSNorm: "megatron_nemotron3.layers.norm.GatedGroupRMSNorm"})
class DynamicGatedGroupRMSNorm(mcore._DynamicExtendedRMSNorm):
    """The mixer's gated norm: the number of groups stays, each becomes narrower."""

    def _setup(self) -> None:
        self.bias = None
        super()._setup()


@DMRegistry.register(
    {
        ColumnParallelGroupedLinear: "megatron_nemotron3.layers.experts.ColumnParallelGroupedLinear",
        RowParallelGroupedLinear: "megatron_nemotron3.layers.experts.RowParallelGroupedLinear",
    }
)
class DynamicGroupedLinear(mcore._DynamicTEGroupedLinear):
    """One projection of all local experts."""

    def _setup(self, **hparams: Any) -> None:
        self.single_grouped_weight, self.use_bias = False, False
        super()._setup(**hparams)


@DMRegistry.register({GroupedExperts: "megatron_nemotron3.layers.experts.GroupedExperts"})
class DynamicGroupedExperts(mcore._DynamicTEGroupedMLP):
    """Experts whose FC2 is called as a module, so that modelopt's hook sees its input."""

    def forward(
        self, x: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """[t, e], [E] and [t] -> [t, e], as `GroupedExperts.forward` without its fused form."""
        return self.one_by_one(x, probs, tokens_per_expert.tolist()), None


for dynamic_class, layer, key in (
    (mcore._DynamicTENorm, RMSNorm, "megatron_nemotron3.layers.norm.RMSNorm"),
    (mcore._DynamicMambaMixer, Mamba2Mixer, "megatron_nemotron3.layers.mamba.Mamba2Mixer"),
    # modelopt registers this one itself where mamba-ssm is installed.
    (mcore._DynamicMambaLayer, MambaLayer, "megatron.core.ssm.mamba_layer.MambaLayer"),
):
    if layer not in DMRegistry:
        DMRegistry.register({layer: key})(dynamic_class)

# modelopt's entry asserts TE's core attention. Ours derives from it and delegates if TE's is there.
DMRegistry.unregister(SelfAttention)
DMRegistry.register({SelfAttention: "megatron.core.transformer.attention.SelfAttention"})(
    DynamicSelfAttention
)
