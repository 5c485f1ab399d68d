"""Flags that depend on which implementation computes: Transformer Engine or torch. Standard library only.

auto   for a GPU with or without Transformer Engine: nothing that needs it, nothing that hinders it. The spec
       picks per module. Slower than te: no fused permutation, no fused gradient accumulation.
te     for a GPU with Transformer Engine: every fused path. Fails loudly where it is missing.
torch  no Transformer Engine, no Apex, any device. Gloo, CPU initialization and worker processes are the
       launcher's business, not decided here.

What Megatron 0.19's parser does (run on a machine without GPU and Transformer Engine):
`--moe-latent-size` is accepted with `--transformer-impl local`. `--moe-grouped-gemm` asks CUDA for its
compute capability, hence raises without a GPU. `--moe-permute-fusion`, `--fp8-format` with MoE, and
`--fp4-format` raise without Transformer Engine.
"""

from __future__ import annotations

from megatron_nemotron3.models import Nemotron3Config

BACKENDS = ("auto", "te", "torch")

# Gradient accumulation fusion needs Apex for the output layer, which no spec can replace.
_EVERYWHERE = ("--no-create-attention-mask-in-dataloader",)
_FLAGS: dict[str, tuple[str, ...]] = {
    "auto": ("--no-gradient-accumulation-fusion",),
    "te": (
        "--transformer-impl transformer_engine",
        # NVIDIA's files disagree (flash, fused); auto takes what is installed, flash first.
        "--attention-backend auto",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl native",
    ),
    "torch": (
        "--transformer-impl local",
        "--attention-backend unfused",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-persist-layer-norm",
        "--no-bias-dropout-fusion",
    ),
}
_MOE_FLAGS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "te": ("--moe-grouped-gemm", "--moe-permute-fusion", "--use-fused-weighted-squared-relu"),
    "torch": (),
}


def backend_flags(config: Nemotron3Config, backend: str) -> list[tuple[str, tuple[object, ...]]]:
    """(option, values) a backend needs.

    Raises:
        ValueError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    lines = _FLAGS[backend] + (_MOE_FLAGS[backend] if config.is_moe else ()) + _EVERYWHERE
    return [(name, tuple(values)) for name, *values in (line.split() for line in lines)]
