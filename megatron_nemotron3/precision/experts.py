"""Emulated grouped linears: all tokens are quantized at once, with a scale and a matmul per expert.

TransformerEngine splits the tokens by expert and quantizes each part, padded with zero rows. The result is
the same: each expert has its own amax, and no block holds tokens of two experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.common.hooks import first_forward
from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.products import draws, matmul, operand
from megatron_nemotron3.precision.quantizer import Operand
from megatron_nemotron3.precision.recipe import MatmulRecipe, Spec
from megatron_nemotron3.precision.scales import product_scale
from megatron_nemotron3.precision.statistics import LinearSums


def stacked_operand(weights: Sequence[Tensor], how: Spec) -> Operand:
    """Quantize E matrices [out, in], each with its own scale: values [E, out, in], amax [E, 1, 1] or None."""

    def of_matrices(block_amax: Tensor) -> Tensor:
        """Block amax [E, m, k] -> amax of each matrix [E, 1, 1]."""
        return block_amax.flatten(1).amax(1).view(-1, 1, 1)

    amax = of_matrices if how.format == NVFP4 else None
    return operand(torch.stack([w.detach() for w in weights]), how, amax)


class ExpertRows:
    """Which rows belong to which expert. Each expert's rows are padded to a multiple of `block`."""

    def __init__(self, counts: Sequence[int], block: int, device: torch.device) -> None:
        self.block = block
        self.filled = [-(-n // block) * block for n in counts]
        #: (expert, first row, last row + 1) of the experts that have rows.
        self.ranges: list[tuple[int, int, int]] = []
        start = 0
        for expert, n in enumerate(self.filled):
            if n:
                self.ranges.append((expert, start, start + n))
            start += n
        self.experts, self.total = len(counts), start
        # Copied without synchronizing.
        real, filled = torch.tensor([counts, self.filled], device="cpu").to(device, non_blocking=True)
        numbers = torch.arange(len(counts), device=device)
        #: Expert of each block of rows.
        self.block_owner = numbers.repeat_interleave(filled // block, output_size=start // block)
        #: Padding rows of each expert.
        self.filler = filled - real
        if block > 1:  # positions of the rows in the padded tensor
            shift = (filled.cumsum(0) - filled) - (real.cumsum(0) - real)
            owner = numbers.repeat_interleave(real, output_size=sum(counts))
            self.place = torch.arange(len(owner), device=device) + shift[owner]

    @property
    def owner(self) -> Tensor:
        return self.block_owner.repeat_interleave(self.block, output_size=self.total)

    def fill(self, x: Tensor) -> Tensor:
        """Pad: [t, d] -> [sum of padded counts, d]."""
        if self.total == len(x):
            return x
        return x.new_zeros(self.total, x.shape[1]).index_copy_(0, self.place, x)

    def amax(self, block_amax: Tensor) -> Tensor:
        """Block amax [n, m], n rows or blocks of rows -> [n, 1], the amax of each row's expert."""
        largest = block_amax.amax(1)
        of_expert = largest.new_zeros(self.experts + 1).scatter_reduce_(0, self.block_owner, largest, "amax")
        return of_expert[self.block_owner].unsqueeze(1)

    def operand(self, x: Tensor, how: Spec) -> Operand:
        """Quantize rows. The operand's amax is [n, 1] for n rows or blocks of rows, or None."""
        return operand(x, how, self.amax if how.format == NVFP4 else None)


class DeviceRows(ExpertRows):
    """Rows whose counts [E] are on the device: room for as much padding as there can be.

    What lies behind the last expert's padding is zero and belongs to no expert: its owner is number E.
    """

    def __init__(self, counts: Tensor, block: int, total: int) -> None:
        self.block, self.experts = block, len(counts)
        device, real = counts.device, counts.to(torch.int64)
        filled = (real + (block - 1)) // block * block
        self.total = (total + self.experts * (block - 1)) // block * block
        ends = filled.cumsum(0)
        self.starts, self.ends = ((ends - filled).to(torch.int32), ends.to(torch.int32))
        blocks = torch.arange(self.total // block, device=device)
        self.block_owner = torch.searchsorted(ends // block, blocks, right=True)
        self.filler = filled - real
        if block > 1:
            shift = (ends - filled) - (real.cumsum(0) - real)
            row = torch.arange(total, device=device)
            self.place = row + shift[torch.searchsorted(real.cumsum(0), row, right=True)]


def rows_of(counts: Sequence[int] | Tensor, block: int, x: Tensor) -> ExpertRows:
    """The rows of x [t, d], on the host or, if that is where the counts are, on the device."""
    if isinstance(counts, Tensor):
        return DeviceRows(counts, block, len(x))
    return ExpertRows(counts, block, x.device)


class GroupedJob(NamedTuple):
    """Arguments of `EmulatedGroupedProduct` that are no tensors."""

    #: Rows of each expert; a tensor on a GPU with kernels.
    counts: list[int] | Tensor
    recipe: MatmulRecipe
    #: Megatron's random stream of this linear.
    stream: str
    #: None where the step is not measured.
    record: LinearSums | None


class EmulatedGroupedProduct(torch.autograd.Function):
    """(x [t, in], job, Q(W) of fprop or None, E weights [out, in]) -> [t, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, job: GroupedJob, kept: Operand | None, *weights: Tensor) -> Tensor:
        recipe, record = job.recipe, job.record
        rows = rows_of(job.counts, 1, x)
        if recipe.fprop is None or kept is None:
            y = _plain_matmuls(x, weights, rows, transposed=True)
        else:
            a = rows.operand(x, recipe.fprop[0])
            if record is not None and first_forward():
                record.add("fprop.x", x, recipe.fprop[0], a, rows.owner)
                record.add("fprop.weight", weights, recipe.fprop[1], kept)
            y = _quantized_matmuls(a, kept, rows, x.dtype, transposed=True)
        shared = kept if kept is not None and recipe.shares_weight else (None, None)
        ctx.save_for_backward(x, *shared, *weights)
        ctx.job, ctx.rows = job, rows
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, values, amax, *weights = ctx.saved_tensors
        dy, job = grad.contiguous(), ctx.job
        recipe, record = job.recipe, job.record
        dx: Tensor | None = None
        dw: tuple[Tensor | None, ...] = (None,) * len(weights)
        with draws(job.stream):
            if ctx.needs_input_grad[0] and recipe.dgrad is None:
                dx = _plain_matmuls(dy, weights, ctx.rows, transposed=False)
            elif ctx.needs_input_grad[0]:
                how_dy, how_weight = recipe.dgrad
                a = ctx.rows.operand(dy, how_dy)
                w = stacked_operand(weights, how_weight) if values is None else Operand(values, amax)
                if record is not None:
                    record.add("dgrad.dy", dy, how_dy, a, ctx.rows.owner)
                    if values is None:
                        record.add("dgrad.weight", weights, how_weight, w)
                dx = _quantized_matmuls(a, w, ctx.rows, x.dtype, transposed=False)
            if any(ctx.needs_input_grad[3:]):
                dw = _expert_weight_gradients(dy, x, weights[0], job)
        return dx, None, None, *dw


def _plain_matmuls(x: Tensor, weights: Sequence[Tensor], rows: ExpertRows, *, transposed: bool) -> Tensor:
    """x [t, k], E matrices [k, n], or [n, k] if they are to be transposed -> [t, n]."""
    if isinstance(rows, DeviceRows):
        return _on_device(x, torch.stack([w.detach() for w in weights]), rows, None, x.dtype, transposed)
    y = x.new_empty(len(x), weights[0].shape[0 if transposed else 1])
    for e, a, b in rows.ranges:
        torch.mm(x[a:b], weights[e].t() if transposed else weights[e], out=y[a:b])
    return y


def _quantized_matmuls(
    x: Operand, weight: Operand, rows: ExpertRows, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """As `_plain_matmuls` for quantized operands; accumulated and scaled in FP32, rounded once."""
    scale, matrices = None, weight.values.mT if transposed else weight.values
    if x.amax is not None and weight.amax is not None:
        scale = product_scale(x.amax, weight.amax.view(-1)[rows.block_owner].unsqueeze(1))
    if isinstance(rows, DeviceRows):
        return _on_device(x.values, weight.values, rows, scale, dtype, transposed)
    y = x.values.new_empty(len(x.values), matrices.shape[2], dtype=torch.float32)
    for e, a, b in rows.ranges:
        matmul(x.values[a:b], matrices[e], out=y[a:b])
    return (y if scale is None else y.mul_(scale)).to(dtype)


def _on_device(
    x: Tensor, weights: Tensor, rows: DeviceRows, scale: Tensor | None, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """[t, k] times the matrices [E, n, k] if `transposed`, else [E, k, n], in one launch."""
    from megatron_nemotron3.precision import triton_grouped  # a CPU needs no Triton

    weights = weights if transposed else weights.mT
    scale = None if scale is None else scale.view(-1)
    return triton_grouped.rows_product(x.contiguous(), weights, rows.starts, rows.ends, scale, dtype)


def _expert_weight_gradients(dy: Tensor, x: Tensor, like: Tensor, job: GroupedJob) -> tuple[Tensor, ...]:
    """wgrad: E gradients shaped as `like` [out, in], slices of one tensor; 0 for experts without rows."""
    recipe, scale = job.recipe, None
    rows = rows_of(job.counts, recipe.token_block, x)
    if recipe.wgrad is not None:
        p, q = (rows.operand(rows.fill(z), how) for z, how in zip((dy, x), recipe.wgrad, strict=True))
        if job.record is not None:
            names = ("wgrad.dy", "wgrad.x")
            for name, z, how, made in zip(names, (dy, x), recipe.wgrad, (p, q), strict=True):
                job.record.add(name, rows.fill(z), how, made, rows.owner, rows.filler)
        dy, x = p.values, q.values
        if p.amax is not None and q.amax is not None:
            scale = product_scale(p.amax, q.amax)  # [blocks of rows, 1]
    if isinstance(rows, DeviceRows):
        from megatron_nemotron3.precision import triton_grouped

        if scale is not None:
            # The first block of an expert; any if it has no rows.
            scale = scale[(rows.starts // rows.block).clamp(max=len(scale) - 1), 0]
        dy, x = dy.contiguous(), x.contiguous()
        return triton_grouped.weight_gradients(dy, x, rows.starts, rows.ends, scale, like.dtype).unbind(0)
    dw = like.new_empty(rows.experts, *like.shape)
    for e in {*range(rows.experts)} - {e for e, _, _ in rows.ranges}:
        dw[e].zero_()
    for e, a, b in rows.ranges:
        if recipe.wgrad is None:
            torch.mm(dy[a:b].t(), x[a:b], out=dw[e])
        else:
            product = matmul(dy[a:b].t(), x[a:b])
            dw[e] = product if scale is None else product.mul_(scale[a // rows.block])
    return dw.unbind(0)
