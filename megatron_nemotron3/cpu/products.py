"""Dense FP32 matrix products by oneDNN, on CPUs where it is faster than the library that torch takes.

On x86 torch computes FP32 products by MKL, which uses AVX-512 on Intel's CPUs only. torch also contains
oneDNN, which uses it on every CPU that has it: 2.2 times as fast on an AMD Zen 5 (docs/measurements.md).
torch's settings select oneDNN for lower precisions alone, so this module calls the operation that
torch.compile calls.

`cpu_mode` turns it on by `table`, for CPUs that `prefers_onednn` names. Which product goes to which library
depends on shapes and dtypes only, never on a timing, so equal runs on one machine give equal bits. oneDNN
sums in another order than MKL: results differ by rounding. `torch.backends.mkldnn.enabled = False` turns it
off.
"""

from __future__ import annotations

import importlib
import platform
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Smallest product (rows * inner width * columns) and smallest of the three that oneDNN takes. Its calls cost
#: 10 us more than MKL's, and the first one of a shape 0.7 ms. Products of single rows are bound by memory.
LEAST_SIZE, LEAST_WIDTH = 2**22, 32
#: Elements of a transposed copy for a weight gradient. A longer one is cut, so that it stays in cache.
COPIED_ELEMENTS = 2**20
#: Whether products go to oneDNN; set by `cpu_mode`.
active = False


def prefers_onednn(vendor: str, capability: str) -> bool:
    """Whether oneDNN computes FP32 products faster than MKL.

    With AVX2 both are equally fast, and on Intel's CPUs MKL uses AVX-512, too.

    Args:
        vendor: `vendor_id` of the CPU, as "AuthenticAMD".
        capability: of `torch.backends.cpu.get_cpu_capability()`, as "AVX512".
    """
    return vendor == "AuthenticAMD" and capability.startswith("AVX512")


def cpu_vendor() -> str:
    """`vendor_id` of this machine's CPU; empty where it is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"vendor_id: {platform.processor().rpartition(', ')[2]}"]  # Windows writes it last
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


@cache
def is_available() -> bool:
    """Whether this torch has the operation, with the arguments and the result that are expected here."""
    try:
        a, b = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(4, 2)
        return torch.equal(_by_onednn(a, b), a @ b)
    except (AttributeError, RuntimeError, TypeError):
        return False


def table() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement): the switch, and Megatron's linear layers; empty without a gain."""
    if not prefers_onednn(cpu_vendor(), torch.backends.cpu.get_cpu_capability()) or not is_available():
        return []
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    trained, frozen = layers.LinearWithGradAccumulationAndAsyncCommunication, layers.LinearWithFrozenWeight

    def apply_trained(x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Any:
        # rest: three switches of fused accumulation and communication, a buffer and its limit, the group, and
        # in later versions the number of parts of the weight. With any of them it is not a plain product.
        *switches, buffer, _, _ = rest[:6]
        plain = bias is None and buffer is None and not any(switches) and rest[6:] in ((), (1,))
        return linear(x, weight) if plain and takes(x, weight) else trained.apply(x, weight, bias, *rest)

    def apply_frozen(x: Tensor, weight: Tensor, bias: Any, allreduce: bool, *rest: Any) -> Any:
        plain = bias is None and not allreduce and takes(x, weight)
        return linear(x, weight) if plain else frozen.apply(x, weight, bias, allreduce, *rest)

    return [
        (sys.modules[__name__], "active", True),
        (layers, trained.__name__, SimpleNamespace(apply=apply_trained)),
        (layers, frozen.__name__, SimpleNamespace(apply=apply_frozen)),
    ]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether x [..., in] times weight [out, in] goes to oneDNN."""
    if not active or not x.dtype == weight.dtype == torch.float32 or weight.dim() != 2:
        return False
    rows, (columns, width) = x.numel() // max(1, x.shape[-1]), weight.shape
    return (
        min(rows, columns, width) >= LEAST_WIDTH
        and rows * columns * width >= LEAST_SIZE
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.device.type == weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


#: No DTensor and no tensor of a tracer.
_PLAIN = (Tensor, torch.nn.Parameter)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] -> [..., out], as `F.linear`; differentiable once by oneDNN."""
    if not takes(x, weight):
        return F.linear(x, weight)
    result: Tensor = _Linear.apply(x, weight)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        y = _by_onednn(x.reshape(-1, x.shape[-1]), weight.t())
        # Not an ordinary view, as which autograd would refuse that Megatron's loss writes into the logits.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], len(weight)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None if weight is None else _by_onednn(rows, weight).view(*dy.shape[:-1], -1)
        return dx, None if x is None else _weight_gradient(rows, x.reshape(-1, x.shape[-1]))


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x: [t, out] and [t, in] -> [out, in]."""
    step = max(1, COPIED_ELEMENTS // dy.shape[1])
    result = _by_onednn(dy[:step].t(), x[:step])
    for first in range(step, len(x), step):
        rows = slice(first, first + step)
        result += _by_onednn(dy[rows].t(), x[rows])
    return result


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n]. a is copied if it is transposed, and b if it is part of a wider matrix."""
    weight = b.t()
    if not (weight.is_contiguous() or b.is_contiguous()):
        weight = weight.contiguous()  # oneDNN would use its reference code, which takes 2,000 times as long
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(a.contiguous(), weight, None, "none", [], "")
    return result
