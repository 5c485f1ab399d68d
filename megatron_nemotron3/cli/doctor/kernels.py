"""Compares each fast kernel with its reference on random input, on this machine's device.

In FP32 both compute in FP32. In BF16 the reference gets the same BF16 numbers and computes in FP32. The error
is the largest difference divided by the largest magnitude of the reference, over the output and all
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.cli.doctor.finding import Finding, Level
from megatron_nemotron3.layers import conv, functional, grouped, scan_kernels, ssd

#: Largest relative difference allowed: FP32 sums in another order; BF16 factors rounded a few times.
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Comparison:
    """A kernel and its reference, called with the same inputs; outputs and gradients of all inputs count."""

    name: str
    fast: Kernel
    reference: Kernel
    inputs: dict[str, Any]

    def error(self) -> float:
        """The largest relative difference of outputs and gradients."""
        ours, theirs = (
            self._values(self.fast, lambda t: t),
            self._values(self.reference, lambda t: t.float() if t.is_floating_point() else t),
        )
        worst = 0.0
        for a, b in zip(ours, theirs, strict=True):
            scale = b.abs().max().clamp_min(1e-30)
            difference = ((a.float() - b.float()).abs().max() / scale).item()
            worst = max(worst, difference if difference == difference else float("inf"))
        return worst

    def _values(self, form: Kernel, cast: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = {
            name: _with_tensors_mapped(
                value, lambda t: cast(t.detach()).requires_grad_(t.is_floating_point())
            )
            for name, value in self.inputs.items()
        }
        result = form(**inputs)
        outputs = [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]
        generator = torch.Generator().manual_seed(1)
        weighted = [o.float() * torch.randn(o.shape, generator=generator).to(o.device) for o in outputs]
        total = torch.stack([w.sum() for w in weighted]).sum()
        wanted = [t for value in inputs.values() for t in _tensors_of(value) if t.requires_grad]
        gradients = torch.autograd.grad(total, wanted)
        return [t.detach() for t in (*outputs, *gradients)]


def _tensors_of(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]


def _with_tensors_mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [change(t) for t in value]
    return change(value) if isinstance(value, Tensor) else value


def comparisons(device: str, dtype: torch.dtype) -> Iterator[Comparison]:
    """The kernels that can run on the device in this dtype."""
    torch.manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * scale).to(device, dtype)

    heads, width, groups, state, tokens = 8, 64, 2, 128, 300
    scan_inputs = {
        "x": random(1, tokens, heads, width),
        "dt": torch.rand(1, tokens, heads).to(device) * 0.1,
        "A": -torch.rand(heads).to(device) * 15 - 1,
        "B": random(1, tokens, groups, state, scale=0.3),
        "C": random(1, tokens, groups, state, scale=0.3),
        "D": torch.ones(heads, device=device),
    }
    scans = scan_kernels.cuda_scans() if device == "cuda" else (scan_kernels.TORCH,)
    for form in scans:
        if dtype in form.dtypes:
            yield Comparison(f"scan: {form.name}", form, ssd.ssd_reference, scan_inputs)
    yield Comparison(
        "convolution",
        conv.causal_conv1d,
        conv.causal_conv1d_reference,
        {"x": random(1, tokens, 96), "weight": random(96, 4), "bias": random(96)},
    )
    yield Comparison(
        "RMSNorm",
        functional.rms_norm,
        functional.rms_norm_reference,
        {"x": random(tokens, 256), "weight": random(256)},
    )
    yield Comparison(
        "squared ReLU, weighted",
        functional.weighted_squared_relu,
        functional.weighted_squared_relu_reference,
        {"x": random(tokens, 256), "w": torch.rand(tokens).to(device, dtype)},
    )
    counts = [100, 0, 130, 70]
    grouped_inputs = {
        "x": random(tokens, 128),
        "weights": [random(64, 128) for _ in counts],
        "counts": counts,
    }
    reference = grouped.grouped_linear_reference
    yield Comparison("grouped product", grouped.grouped_linear, reference, grouped_inputs)
    if device == "cuda":
        from megatron_nemotron3.layers import grouped_gpu

        if dtype == torch.bfloat16:
            yield Comparison("torch grouped_mm", grouped_gpu.grouped_linear_cuda, reference, grouped_inputs)


def findings() -> list[Finding]:
    """Findings of all comparisons, on the GPU if there is one, else on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for dtype, allowed in ALLOWED.items():
        for comparison in comparisons(device, dtype):
            name = f"{comparison.name} ({str(dtype).removeprefix('torch.')}, {device})"
            try:
                error = comparison.error()
            except Exception as problem:  # a kernel may fail in any way
                found.append(
                    Finding(name, "error", f"{type(problem).__name__}: {str(problem).splitlines()[0]}")
                )
                continue
            level: Level = "ok" if error <= allowed else "error"
            found.append(
                Finding(name, level, f"differs by {error:.1e} from the reference (allowed {allowed:.0e})")
            )
    return found
