"""Backends: the implementation of each part of the stack, TransformerEngine (TE) or plain torch.

A missing optional package must not make this import fail: Megatron-Core 0.19 silently builds its stock model
if a `--spec` module raises ImportError.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules

from megatron_nemotron3 import cpu
from megatron_nemotron3.layers.attention import TorchCoreAttention
from megatron_nemotron3.layers.conv import library_kernel
from megatron_nemotron3.layers.experts import (
    ColumnParallelGroupedLinear,
    GroupedExperts,
    RowParallelGroupedLinear,
)
from megatron_nemotron3.layers.latent_moe import CountingRouter, LatentMoELayer
from megatron_nemotron3.layers.linear import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)
from megatron_nemotron3.layers.mamba import Mamba2Mixer
from megatron_nemotron3.layers.norm import NormBuilder
from megatron_nemotron3.layers.ssd import mamba_ssm
from megatron_nemotron3.precision.settings import library_kernels_enabled


@dataclass(frozen=True)
class Backend:
    """Builders of one implementation, with the signatures of Megatron's own."""

    name: str
    norm: Any
    column_parallel_linear: Any
    #: Input norm fused; weights stored as `layer_norm_weight`, `layer_norm_bias`.
    norm_column_parallel_linear: Any
    row_parallel_linear: Any
    core_attention: Any
    mixer: Any
    moe_layer: Any
    experts: Any
    router: Any
    #: part -> implementation, for the log line.
    parts: dict[str, str]

    def describe(self) -> str:
        """One line: `backend torch: linear Megatron local; norm …`."""
        return f"backend {self.name}: " + "; ".join(f"{part} {how}" for part, how in self.parts.items())


def _torch_parts() -> dict[str, str]:
    """Part of the torch backend -> its implementation on this machine."""
    parts = {
        "linear": "Megatron local",
        "norm": "torch",
        "attention": "torch SDPA",
        "scan": "torch chunked SSD",
        "experts": "torch grouped",
        "latent": "torch",
    }
    on_gpu = torch.cuda.is_available() and not cpu.is_active()
    if on_gpu and library_kernels_enabled():
        parts["experts"] = "torch grouped_mm (BF16)"
        if mamba_ssm() is not None:
            parts["scan"] = "mamba-ssm Triton SSD (BF16)"
        if library_kernel() is not None:
            parts["convolution"] = "causal-conv1d (BF16)"
    return parts


TORCH = Backend(
    name="torch",
    norm=NormBuilder,
    column_parallel_linear=ColumnParallelLinear,
    norm_column_parallel_linear=LayerNormColumnParallelLinear,
    row_parallel_linear=RowParallelLinear,
    core_attention=TorchCoreAttention,
    mixer=Mamba2Mixer,
    moe_layer=LatentMoELayer,
    router=CountingRouter,
    experts=partial(
        GroupedExperts,
        submodules=GroupedMLPSubmodules(
            linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear
        ),
    ),
    parts=_torch_parts(),
)


def te_problem() -> str | None:
    """Why TransformerEngine (TE) cannot be used here, with the cure; None if it can be used."""
    if importlib.util.find_spec("transformer_engine") is None:
        return (
            "package transformer-engine is not installed: "
            "pip install 'transformer-engine[pytorch]', or use the torch backend"
        )
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        return (
            "package transformer-engine is installed but megatron-core cannot import it "
            "(try: python -c 'import transformer_engine.pytorch'), or use the torch backend"
        )
    return None


def default_backend() -> str:
    """ "te" if TE can be used and there is a CUDA device, else "torch"."""
    on_gpu = torch.cuda.is_available() and not cpu.is_active()
    return "te" if on_gpu and te_problem() is None else "torch"
