"""Linear layers whose matmuls emulate NVFP4 or MXFP8.

An `Emulated` is the `products` of a torch linear; parameters, checkpoints and communication stay the same. As
in TransformerEngine, the input is gathered over sequence-parallel ranks before it is quantized, and a weight
is scaled by the amax of each rank's shard. Backward needs the input and the weight, as in the plain linear,
and Q(W) if dgrad uses it; Q(X) is not saved, because wgrad quantizes a rotated copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.common.hooks import first_forward
from megatron_nemotron3.precision import experts
from megatron_nemotron3.precision.products import draws, gather_rows, operand, padded, product
from megatron_nemotron3.precision.quantizer import Operand
from megatron_nemotron3.precision.recipe import MatmulRecipe
from megatron_nemotron3.precision.settings import gpu_kernels_enabled
from megatron_nemotron3.precision.statistics import LinearSums


@dataclass
class Emulated:
    """Computes the matmuls of one linear with quantized operands.

    Args:
        training, evaluation: recipes of the two modes; None for plain matmuls in that mode.
        formats: of the two recipes.
        stream: Megatron's random stream for stochastic rounding, the same on ranks with equal tensors.
        reuse: Megatron's schedule tells this module which microbatch is the first of a step, so Q(W) can be
            kept for the others.
        record: receives statistics of the operands in measured steps; None if they are never measured.
    """

    training: MatmulRecipe | None
    evaluation: MatmulRecipe | None
    formats: tuple[str, str]
    stream: str
    reuse: bool = False
    record: LinearSums | None = field(default=None, repr=False)
    _kept: tuple[Any, Operand] | None = field(default=None, repr=False)

    def recipe(self, module: Any) -> MatmulRecipe | None:
        """The recipe for the mode `module` is in; None for plain matmuls."""
        return self.training if module.training else self.evaluation

    def linear(
        self,
        module: Any,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **options: Any,
    ) -> Tensor:
        """x [s, b, in] -> [s, b, out]; arguments are those of Megatron's own function."""
        if (shards := options.get("gtp_remat_size", 1)) > 1:
            raise ValueError(
                f"gtp_remat_size={shards}: weights sharded for rematerialization (GTP) are not "
                "emulated, turn GTP off"
            )
        recipe = self.recipe(module)
        assert recipe is not None
        record, allreduce = self._active_record(module), options.get("allreduce_dgrad", False)
        job = _LinearJob(recipe, self.stream, record, tp_group, sequence_parallel, allreduce)
        kept = self._quantized_weight(module, recipe, (weight,))
        y: Tensor = _EmulatedLinear.apply(x, weight, kept, job)
        return y if bias is None else y + bias

    def takes_device_counts(self, module: Any) -> bool:
        """Whether `grouped` takes counts on the device: with kernels, in steps that are not measured."""
        return gpu_kernels_enabled() and self._active_record(module) is None

    def grouped(self, module: Any, x: Tensor, weights: list[Tensor], counts: list[int] | Tensor) -> Tensor:
        """x [t, in], rows sorted by expert -> [t, out]."""
        recipe = self.recipe(module)
        assert recipe is not None
        kept = self._quantized_weight(module, recipe, tuple(weights))
        record = self._active_record(module)
        job = experts.GroupedJob(counts, recipe, self.stream, record)
        y: Tensor = experts.EmulatedGroupedProduct.apply(x, job, kept, *weights)
        return y

    def _active_record(self, module: Any) -> LinearSums | None:
        return self.record if self.record is not None and self.record.watching(module) else None

    @torch.no_grad()
    def _quantized_weight(
        self, module: Any, recipe: MatmulRecipe, weights: tuple[Tensor, ...]
    ) -> Operand | None:
        """Q(W) of fprop, made in this microbatch or kept from an earlier one."""
        if recipe.fprop is None:
            return None
        # Megatron's optimizers update weights through buffers, which changes no version counter. So Q(W) is
        # made anew in each first microbatch.
        same = (recipe, *((w.data_ptr(), w._version) for w in weights))
        reuse = self.reuse and not module.is_first_microbatch
        if reuse and self._kept is not None and self._kept[0] == same:
            return self._kept[1]
        made = (
            experts.stacked_operand(weights, recipe.fprop[1])
            if hasattr(module, "num_gemms")
            else operand(weights[0], recipe.fprop[1])
        )
        if self.reuse:
            self._kept = same, made
            module.is_first_microbatch = False
        return made


class _LinearJob(NamedTuple):
    """Arguments of `_EmulatedLinear` that are no tensors."""

    recipe: MatmulRecipe
    stream: str
    record: LinearSums | None
    group: Any
    sequence_parallel: bool
    allreduce: bool


class _EmulatedLinear(torch.autograd.Function):
    """(x [s, b, in], weight [out, in], Q(W) of fprop or None, job) -> [s, b, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: Operand | None, job: _LinearJob) -> Tensor:
        recipe = job.recipe
        total = gather_rows(x, job.group) if job.sequence_parallel else x
        rows = total.flatten(0, -2)
        if recipe.fprop is None or kept is None:
            y = rows @ weight.t()
        else:
            a = operand(rows, recipe.fprop[0])
            if job.record is not None and first_forward():
                job.record.add("fprop.x", rows, recipe.fprop[0], a)
                job.record.add("fprop.weight", weight, recipe.fprop[1], kept)
            y = product(a, kept.t(), x.dtype)
        shared = kept if kept is not None and recipe.shares_weight else (None, None)
        ctx.save_for_backward(x, weight, *shared)
        ctx.job = job
        return y.view(*total.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        job: _LinearJob = ctx.job
        x, weight, values, amax = ctx.saved_tensors
        dy = grad.flatten(0, -2).contiguous()
        dx = dw = None
        handles = []
        with draws(job.stream):
            if ctx.needs_input_grad[0]:
                shared = None if values is None else Operand(values, amax)
                dx = _quantized_dgrad(dy, weight, shared, job, x.dtype)
                dx = dx.view(*grad.shape[:-1], x.shape[-1])
                if job.sequence_parallel:
                    total, dx = dx.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
                    scatter = torch.distributed.reduce_scatter_tensor
                    handles.append(scatter(dx, total, group=job.group, async_op=True))
                elif job.allreduce:
                    handles.append(torch.distributed.all_reduce(dx, group=job.group, async_op=True))
            if ctx.needs_input_grad[1]:
                total = gather_rows(x, job.group) if job.sequence_parallel else x
                dw = _quantized_wgrad(dy, total.flatten(0, -2), job, weight.dtype)
        for handle in handles:
            handle.wait()
        return dx, dw, None, None


def _quantized_dgrad(
    dy: Tensor, weight: Tensor, shared: Operand | None, job: _LinearJob, dtype: torch.dtype
) -> Tensor:
    """dgrad: dy [t, out] -> [t, in]. `shared`: Q(W) of fprop, if dgrad uses it."""
    if job.recipe.dgrad is None:
        return dy @ weight
    how_dy, how_weight = job.recipe.dgrad
    a, b = operand(dy, how_dy), shared or operand(weight, how_weight)
    if job.record is not None:
        job.record.add("dgrad.dy", dy, how_dy, a)
        if shared is None:
            job.record.add("dgrad.weight", weight, how_weight, b)
    return product(a, b, dtype)


def _quantized_wgrad(dy: Tensor, x: Tensor, job: _LinearJob, dtype: torch.dtype) -> Tensor:
    """wgrad: dy [t, out], x [t, in] -> [out, in]. Blocks lie along tokens; zero rows pad the last block."""
    recipe = job.recipe
    if recipe.wgrad is None:
        return dy.t() @ x
    filled = [padded(z, recipe.token_block) for z in (dy, x)]
    a, b = (operand(z, how) for z, how in zip(filled, recipe.wgrad, strict=True))
    if job.record is not None:
        for name, z, how, made in zip(("wgrad.dy", "wgrad.x"), filled, recipe.wgrad, (a, b), strict=True):
            job.record.add(name, z, how, made, filler=len(z) - len(x))
    return product(a.t(), b, dtype)
