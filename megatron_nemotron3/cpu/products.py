"""Dense FP32 matrix products by oneDNN, on CPUs where it is faster than the library that torch takes.

`cpu_mode` turns it on by `table`, for CPUs that `prefers_onednn` names (docs/measurements.md). The library of
a product depends on shapes and dtypes only, so equal runs on one machine give equal bits. Results of the two
differ by rounding. `torch.backends.mkldnn.enabled = False` turns it off.
"""

from __future__ import annotations

import importlib
import inspect
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
    """Whether oneDNN computes FP32 products faster than MKL, which uses AVX-512 on Intel's CPUs only."""
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
    functions = ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
    switch = (sys.modules[__name__], "active", True)
    return [switch, *((layers, name, _plain_by_onednn(getattr(layers, name))) for name in functions)]


#: Arguments of Megatron's linear functions -> values with which they are plain products on one rank.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": (None,),
    "gradient_accumulation_fusion": (False, None),
    "allreduce_dgrad": (False, None),
    "sequence_parallel": (False, None),
    "grad_output_buffer": (None,),
    "gtp_remat_size": (1,),
    "output_dtype": (None, torch.float32),
}
#: Arguments that change nothing in a plain product.
_UNUSED = {"wgrad_deferral_limit", "tp_group"}


def _plain_by_onednn(function: Any) -> SimpleNamespace:
    """Stand-in for an autograd function of Megatron (x, weight, …), whose plain products are `linear`."""
    _, _, _, *names = inspect.signature(function.forward).parameters  # after ctx, x and weight
    checked = [(i, _PLAIN_VALUES[name]) for i, name in enumerate(names) if name in _PLAIN_VALUES]
    known = set(names) <= _PLAIN_VALUES.keys() | _UNUSED

    def apply(x: Tensor, weight: Tensor, *rest: Any) -> Any:
        plain = (
            known
            and len(rest) == len(names)
            and all(any(rest[i] is value for value in values) for i, values in checked)
        )
        return linear(x, weight) if plain and takes(x, weight) else function.apply(x, weight, *rest)

    return SimpleNamespace(apply=apply)


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
    tokens, out, width = len(x), dy.shape[1], x.shape[1]
    # The transposed one is copied: the wide dy, or x and the result.
    if tokens * out > tokens * width + out * width:
        return _product_over_rows(x, dy).t().contiguous()
    return _product_over_rows(dy, x)


def _product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """a^T b: [t, m] and [t, n] -> [m, n]."""
    step = max(1, COPIED_ELEMENTS // a.shape[1])
    result = _by_onednn(a[:step].t(), b[:step])
    for first in range(step, len(a), step):
        rows = slice(first, first + step)
        result += _by_onednn(a[rows].t(), b[rows])
    return result


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n]. a is copied if it is transposed, and b if it is part of a wider matrix."""
    weight = b.t()
    if not (weight.is_contiguous() or b.is_contiguous()):
        weight = weight.contiguous()  # oneDNN would use its reference code, which takes 2,000 times as long
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(a.contiguous(), weight, None, "none", [], "")
    return result
