"""Precision logging: choose the steps to measure, measure linears, reduce over ranks and write the report.

A step ends when a torch optimizer has stepped: gradients are then reduced and still in Megatron's buffers.
Sums are added up over all ranks of a pipeline stage; tensors that several ranks replicate count once per
rank, in numerator and denominator alike. Nothing here changes a tensor or draws from a random stream of the
run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_nemotron3.common.hooks import (
    MeasuredSteps,
    find_ddp,
    first_forward,
    gather_stages,
    no_wrapper,
    until_first_forward,
)
from megatron_nemotron3.common.switches import LOG_PRECISION, megatron_options
from megatron_nemotron3.precision import report, statistics
from megatron_nemotron3.precision.experts import ExpertRows
from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.gradients import gradient_places, local_gradient
from megatron_nemotron3.precision.products import gather_rows, padded
from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.recipe import MatmulRecipe, Spec
from megatron_nemotron3.precision.settings import Logging
from megatron_nemotron3.precision.statistics import LinearSums


class PrecisionObserver:
    """Records of all linears of one HybridStack and its MTP blocks, and the count of steps.

    The first step of a run is measured, then every iteration that is a multiple of the interval. `used`:
    whether the run computes with the quantized values.
    """

    def __init__(self, stack: Any, chosen: Logging, used: bool) -> None:
        if stack.config.cuda_graph_impl not in (None, "none"):
            raise ValueError(
                f"{LOG_PRECISION} and --cuda-graph-impl {stack.config.cuda_graph_impl}: a replayed graph "
                "hides the operands, leave one of the two out"
            )
        self.switch, self.groups = MeasuredSteps(chosen.interval), stack.pg_collection
        self.chosen, self.used = chosen, used
        self.records: list[LinearSums] = []
        self._stack = weakref.ref(stack)
        self._ddp: Callable[[], Any] = no_wrapper
        self._ran, self._steps = False, 0
        stack.precision_observer = self  # keeps the observer alive as long as the stack
        stack.register_forward_pre_hook(self._note_forward)
        find_ddp(stack, self._wrapped_by)
        until_first_forward(stack, self._announce)
        _observers[id(self)] = self
        _register_step_hook()

    def add(
        self, linear: torch.nn.Module, layer: str, module: str, fmt: str, how: MatmulRecipe
    ) -> LinearSums:
        self.records.append(LinearSums(self.switch, linear, layer, module, fmt, how))
        return self.records[-1]

    def print(self, line: str) -> None:
        """Print a line on one rank of each pipeline stage."""
        if self.groups.tp_cp.rank() == self.groups.dp.rank() == 0:
            print(f"megatron_nemotron3: {line}", flush=True)

    def _note_forward(self, stack: torch.nn.Module, _inputs: Any) -> None:
        self._ran = self._ran or stack.training

    def _wrapped_by(self, ddp: torch.nn.Module) -> None:
        self._ddp = weakref.ref(ddp)

    def _announce(self, module: torch.nn.Module) -> None:
        if module is not self._stack():
            return
        what = "measuring" if self.used else "measuring what NVFP4 would do, computing without it"
        self.print(
            f"{what}: {len(self.records)} linears of this rank, every {self.chosen.interval} iterations, "
            f"into {Path(self.chosen.folder) / report.FILE}"
        )

    def step_done(self) -> None:
        """Write the report if this step was measured. Collective; called after each optimizer's step.

        Where optimizers are chained, the first one ends the step.
        """
        if not self._ran:
            return
        self._ran = False
        self._steps += 1
        # The number of the step that just ended in Megatron's training loop; any other loop is counted here.
        current = getattr(megatron_options(), "curr_iteration", None)
        iteration = self._steps if current is None else int(current) + 1
        if self.switch.on:
            self._write(iteration)
        self.switch.step_done(iteration)

    @torch.no_grad()
    def _write(self, iteration: int) -> None:
        self._record_gradients()
        rows = list(self._reduced_rows(iteration))
        for record in self.records:
            record.clear()
        rows = [row for stage in gather_stages(rows, self.groups.pp) for row in stage]
        last_rank = torch.distributed.get_world_size() - 1  # writes Megatron's other logs, too
        if torch.distributed.get_rank() == last_rank:
            report.append(self.chosen.folder, rows)

    def _record_gradients(self) -> None:
        """Record weight gradients; over all ranks each element counts once."""
        where = gradient_places(self._ddp())
        if where is None:
            return
        for record in self.records:
            linear: Any = record.linear()
            weights = linear.weights() if hasattr(linear, "num_gemms") else [linear.weight]
            for number, weight in enumerate(weights):
                if (gradient := local_gradient(weight, where, self.groups)) is None:
                    continue
                found, expert = record.of(report.GRADIENT, weight.device), record.first + number
                found.sums[expert, statistics.ELEMENTS] += gradient.numel()
                found.sums[expert, statistics.ZEROS] += gradient.numel() - torch.count_nonzero(gradient)
                largest = found.amax[expert]
                largest.copy_(torch.maximum(largest, gradient.abs().amax().double()))

    def _reduced_rows(self, iteration: int) -> Iterator[report.ReportRow]:
        """Rows of the report, reduced over the ranks of this pipeline stage. Collective."""
        recorded = [(record, tensor) for record in self.records for tensor in record.tensors]
        if not recorded:
            return
        device = next(self._stack().parameters()).device  # type: ignore[union-attr]
        parts = [record.of(tensor, device) for record, tensor in recorded]
        sums, amax = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        for group in (self.groups.tp_cp, self.groups.dp):
            if group.size() > 1:
                torch.distributed.all_reduce(sums, group=group)
                torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        sizes = [record.groups for record, _ in recorded]
        for (record, tensor), s, a in zip(recorded, sums.cpu().split(sizes), amax.cpu().split(sizes)):
            numbers = _report_columns(record, tensor, s, a)
            place = (iteration, record.layer, record.module, record.format, tensor, self.used)
            yield report.ReportRow(*place, *numbers)


def _report_columns(record: LinearSums, tensor: str, sums: Tensor, amax: Tensor) -> tuple[Any, ...]:
    """Columns of a `ReportRow` from `elements` on: over all experts, then the worst expert and its share."""
    whole = statistics.numbers(sums.sum(0).tolist(), float(amax.max()))
    if tensor == report.GRADIENT:  # is not quantized
        whole = whole._replace(flushed=float("nan"))
    expert, share = -1, float("nan")
    if record.groups > 1:
        column = "zeros" if tensor == report.GRADIENT else "flushed"
        shares = [getattr(statistics.numbers(s, 0.0), column) for s in sums.tolist()]
        if known := [i for i, value in enumerate(shares) if value == value]:
            expert = max(known, key=shares.__getitem__)
            share = shares[expert]
    return (*whole, expert, share)


#: Observers of this process by id, in the order of their stacks, which is the same on all ranks.
_observers: weakref.WeakValueDictionary[int, PrecisionObserver] = weakref.WeakValueDictionary()


@functools.cache
def _register_step_hook() -> None:
    """Register once and never remove: torch iterates over its hooks while they run."""

    def after(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for observer in list(_observers.values()):
            observer.step_done()

    register_optimizer_step_post_hook(after)


#: Seed of the generator for stochastic rounding in plain runs.
_SEED = 20251201


@dataclass
class Observed:
    """`products` of a linear that emulates nothing: computes it, and measures what quantization would do.

    The matmul is Megatron's own, so losses stay the same to the bit; stochastic rounding draws from a
    generator of this object. Operands are those of the plain run, without the errors of earlier layers.
    """

    record: LinearSums
    how: MatmulRecipe
    _generator: torch.Generator | None = None

    def recipe(self, module: Any) -> MatmulRecipe | None:
        """The recipe in measured steps, else None; the linear calls this object only with a recipe."""
        return self.how if self.record.watching(module) else None

    def linear(self, module: Any, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """x [s, b, in] -> [s, b, out], as the linear computes it; options of Megatron's function."""
        if isinstance(module, (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)):
            y: Tensor = self._compute(module, module._forward_impl, x, weight, **options)
        else:
            y = self._compute(module, module.forward, x)[0]
        if first_forward():
            with torch.no_grad():
                whole = gather_rows(x, options["tp_group"]) if options.get("sequence_parallel") else x
                self._measure_activation("x", whole.flatten(0, -2))
                self._measure_weight(weight)
        if y.requires_grad:
            y.register_hook(lambda dy: self._measure_activation("dy", dy.flatten(0, -2)))
        return y

    def takes_device_counts(self, module: Any) -> bool:
        """False: statistics are taken expert by expert."""
        return False

    def grouped(self, module: Any, x: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
        """x [t, in], rows sorted by expert -> [t, out], as the linear computes it."""
        y: Tensor = self._compute(module, module.forward, x, counts)[0]
        if first_forward():
            with torch.no_grad():
                self._measure_activation("x", x, counts)
                self._measure_weight(torch.stack([w.detach() for w in weights]))
        if y.requires_grad:
            y.register_hook(lambda dy: self._measure_activation("dy", dy, counts))
        return y

    def _compute(self, module: Any, function: Any, *args: Any, **options: Any) -> Any:
        module.products = None
        try:
            return function(*args, **options)
        finally:
            module.products = self

    @torch.no_grad()
    def _measure_activation(self, which: str, x: Tensor, counts: list[int] | None = None) -> None:
        """Measure X or dY [t, d] in its two matmuls."""
        across = self.how.fprop if which == "x" else self.how.dgrad
        product = "fprop" if which == "x" else "dgrad"
        assert across and self.how.wgrad
        self._measure_rows(f"{product}.{which}", x.contiguous(), across[0], counts, 1)
        along = self.how.wgrad[1 if which == "x" else 0]
        self._measure_rows(f"wgrad.{which}", x.contiguous(), along, counts, self.how.token_block)

    def _measure_rows(self, name: str, x: Tensor, how: Spec, counts: list[int] | None, block: int) -> None:
        """Measure rows [t, d], padded to blocks; `counts`: rows of each expert, None for a dense linear."""
        if counts is None:
            filled = padded(x, block)
            self.record.add(name, filled, how, self._quantized(filled, how), filler=len(filled) - len(x))
            return
        rows = ExpertRows(counts, block, x.device)
        filled = rows.fill(x)
        q = self._quantized(filled, how, rows.amax if how.format == NVFP4 else None)
        self.record.add(name, filled, how, q, rows.owner, rows.filler)

    def _measure_weight(self, weight: Tensor) -> None:
        """Measure a weight [out, in], or the weights of experts [E, out, in], once a step."""
        assert self.how.fprop and self.how.dgrad
        operands = {"fprop.weight": self.how.fprop[1]}
        if not self.how.shares_weight:
            operands["dgrad.weight"] = self.how.dgrad[1]
        for name, how in operands.items():
            if self.record.has(name):
                continue
            amax = None
            if weight.ndim == 3 and how.format == NVFP4:
                amax = weight.abs().amax((1, 2), keepdim=True).float()
            self.record.add(name, weight, how, self._quantized(weight, how, amax))

    def _quantized(self, x: Tensor, how: Spec, amax: Any = None) -> Tensor:
        if self._generator is None:
            self._generator = torch.Generator(x.device).manual_seed(_SEED)
        return fake_quantize(x, how, self._generator, amax, dtype=torch.float32)
