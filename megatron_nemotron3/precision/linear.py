"""Linear layers that compute as NVFP4 or MXFP8 hardware would: what `products` of our torch linears can be.

A linear has `products = None` and multiplies as ever, or an `Emulated` that multiplies for it. Parameters,
checkpoints and communication stay the same: the input is gathered (sequence parallelism) before it is
quantized, so that its largest magnitude is that of all ranks, as TransformerEngine (TE) reduces it; a weight
split over ranks is scaled by each rank's own part, as in TE.

Saved for backward: the input and the weight, as by the plain linear, and Q(W) if dgrad shares it (FP32 on a
CPU, BF16 on a GPU). Q(X) is not: wgrad's rotated copy is made in backward from the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.monitor.hooks import first_forward
from megatron_nemotron3.precision import experts
from megatron_nemotron3.precision.products import Operand, dequantized, gather_rows, operand, padded, product
from megatron_nemotron3.precision.recipe import Recipe, Spec
from megatron_nemotron3.precision.statistics import Record


@dataclass
class Emulated:
    """What one linear quantizes; its attribute `products`.

    training, evaluation: recipes of the two modes, None for a plain product in that mode.
    formats: their names, for reports.
    stream: Megatron's random stream for stochastic rounding. Tensors that are equal on several ranks must be
        rounded alike there.
    reuse: Megatron's schedule tells this module about first microbatches, so Q(W) may outlive one.
    record: where statistics of the operands go in measured steps; None: they are never measured.
    """

    training: Recipe | None
    evaluation: Recipe | None
    formats: tuple[str, str]
    stream: str
    reuse: bool = False
    record: Record | None = field(default=None, repr=False)
    _kept: tuple[Any, Operand] | None = field(default=None, repr=False)

    def recipe(self, module: Any) -> Recipe | None:
        """The recipe of the mode `module` is in; None: the plain product."""
        return self.training if module.training else self.evaluation

    def linear(
        self,
        module: Any,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        gtp_remat_size: int = 1,
        **unused: Any,
    ) -> Tensor:
        """x [s, b, in] -> [s, b, out]; arguments as Megatron's own function takes them.

        Raises:
            ValueError: the weight is split over ranks in a way of which there is no emulation.
        """
        if gtp_remat_size > 1:
            raise ValueError("weights sharded for rematerialization (GTP) are not emulated: leave it out")
        recipe = self.recipe(module)
        assert recipe is not None
        record = self._record(module)
        job = _Job(recipe, self.stream, record, tp_group, sequence_parallel, allreduce_dgrad)
        kept = self._weight(module, recipe, (weight,))
        y: Tensor = _Linear.apply(x, weight, kept, job)
        return y if bias is None else y + bias

    def grouped(self, module: Any, x: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
        """x [t, in], rows sorted by expert -> [t, out]."""
        recipe = self.recipe(module)
        assert recipe is not None
        kept = self._weight(module, recipe, tuple(weights))
        record = self._record(module)
        y: Tensor = experts.GroupedLinear.apply(x, counts, recipe, self.draws, record, kept, *weights)
        return y

    def _record(self, module: Any) -> Record | None:
        """The record, if this step is measured."""
        return self.record if self.record is not None and self.record.watching(module) else None

    def draws(self) -> Any:
        """Context: torch's generator continues the stream of this linear."""
        return draws(self.stream)

    @torch.no_grad()
    def _weight(self, module: Any, recipe: Recipe, weights: tuple[Tensor, ...]) -> Operand | None:
        """Q(W) of fprop, of this microbatch or of one before it."""
        if recipe.fprop is None:
            return None
        # Megatron's optimizers write to buffers, which no version counter shows: the schedule says when.
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


@contextmanager
def draws(stream: str) -> Iterator[None]:
    """Within, torch's generator continues Megatron's random stream of that name, if there is one."""
    tracker = get_cuda_rng_tracker()
    if stream not in tracker.get_states():  # a module on its own
        yield
        return
    with tracker.fork(stream):
        yield


class _Job(NamedTuple):
    """What `_Linear` needs beside tensors."""

    recipe: Recipe
    stream: str
    record: Record | None
    group: Any
    sequence_parallel: bool
    allreduce: bool


class _Linear(torch.autograd.Function):
    """x [s, b, in], weight [out, in], Q(W) of fprop, job -> [s, b, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: Operand | None, job: _Job) -> Tensor:
        recipe = job.recipe
        total = gather_rows(x, job.group) if job.sequence_parallel else x
        rows = total.flatten(0, -2)
        if recipe.fprop is None or kept is None:
            y = rows @ weight.t()
        else:
            a = operand(rows, recipe.fprop[0])
            if job.record is not None and first_forward():
                _observe(job.record, "fprop.x", rows, recipe.fprop[0], a)
                _observe(job.record, "fprop.weight", weight, recipe.fprop[1], kept)
            y = product(a, kept.t(), x.dtype)
        shared = kept if kept is not None and recipe.shares_weight else (None, None)
        ctx.save_for_backward(x, weight, *shared)
        ctx.job = job
        return y.view(*total.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        job: _Job = ctx.job
        x, weight, values, amax = ctx.saved_tensors
        dy = grad.flatten(0, -2).contiguous()
        dx = dw = total = None
        waiting = []
        with draws(job.stream):
            if ctx.needs_input_grad[0]:
                shared = None if values is None else Operand(values, amax)
                dx = _input_gradient(dy, weight, shared, job, x.dtype)
                dx = dx.view(*grad.shape[:-1], x.shape[-1])
                if job.sequence_parallel:
                    dx, handle = _reduce_scatter(dx, x, job.group)
                    waiting.append(handle)
                elif job.allreduce:
                    waiting.append(torch.distributed.all_reduce(dx, group=job.group, async_op=True))
            if ctx.needs_input_grad[1]:
                total = gather_rows(x, job.group) if job.sequence_parallel else x
                dw = _weight_gradient(dy, total.flatten(0, -2), job, weight.dtype)
        for handle in waiting:
            handle.wait()
        return dx, dw, None, None


def _input_gradient(
    dy: Tensor, weight: Tensor, shared: Operand | None, job: _Job, dtype: torch.dtype
) -> Tensor:
    """dy [t, out] -> [t, in]."""
    if job.recipe.dgrad is None:
        return dy @ weight
    how_dy, how_weight = job.recipe.dgrad
    a, b = operand(dy, how_dy), shared or operand(weight, how_weight)
    _observe(job.record, "dgrad.dy", dy, how_dy, a)
    if shared is None:
        _observe(job.record, "dgrad.weight", weight, how_weight, b)
    return product(a, b, dtype)


def _weight_gradient(dy: Tensor, x: Tensor, job: _Job, dtype: torch.dtype) -> Tensor:
    """dy [t, out], x [t, in] -> [out, in]. Blocks lie along tokens; zeros fill up the last."""
    recipe = job.recipe
    if recipe.wgrad is None:
        return dy.t() @ x
    filled = [padded(z, recipe.token_block) for z in (dy, x)]
    a, b = (operand(z, how) for z, how in zip(filled, recipe.wgrad, strict=True))
    for name, z, how, made in zip(("wgrad.dy", "wgrad.x"), filled, recipe.wgrad, (a, b), strict=True):
        _observe(job.record, name, z, how, made, len(z) - len(x))
    return product(a.t(), b, dtype)


def _observe(record: Record | None, name: str, x: Tensor, how: Spec, made: Operand, filler: int = 0) -> None:
    """Measure an operand in a measured step; a weight once in it. filler: rows at the end that are none."""
    if record is None or (name.endswith("weight") and record.has(name)):
        return
    rows = torch.tensor([filler], device=x.device) if filler else None
    record.add(name, x, how, dequantized(made), filler=rows)


def _reduce_scatter(dx: Tensor, like: Tensor, group: Any) -> tuple[Tensor, Any]:
    """[s, ...] of all ranks -> (this rank's sum, of the shape of `like`; handle to wait for)."""
    part = torch.empty_like(like, memory_format=torch.contiguous_format)
    return part, torch.distributed.reduce_scatter_tensor(part, dx.contiguous(), group=group, async_op=True)
