"""Training steps of a small model with precision logging, and what went through one of its linears."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_nemotron3.precision import report
from megatron_nemotron3.precision.report import ReportRow
from megatron_nemotron3.precision.settings import Logging, logging_precision
from megatron_nemotron3.proof.certify.ranks import initialize
from tests.support.emulation import built
from tests.support.models import VOCABULARY

LENGTH = 64


@dataclass
class Seen:
    """X and dY [s, b, d] of every visit of a linear that has no norm in front; its weight before the step."""

    x: list[Tensor] = field(default_factory=list)
    dy: list[Tensor] = field(default_factory=list)
    weight: Tensor | None = None


@dataclass
class Run:
    """What some steps left behind."""

    rows: list[ReportRow]
    losses: list[Tensor]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    seen: dict[str, Seen]

    def of(self, layer: str, module: str, iteration: int = 1) -> dict[str, ReportRow]:
        """Tensor -> row."""
        return {
            r.tensor: r for r in self.rows if (r.iteration, r.layer, r.module) == (iteration, layer, module)
        }


def train(
    emulate: str | None = None,
    interval: int | None = 1,
    steps: int = 1,
    microbatches: int = 2,
    batch: int = 1,
    watch: tuple[str, ...] = (),
    evaluate: bool = False,
    by_name: bool = False,
    layout: dict[str, int] | None = None,
    **changes: Any,
) -> Run:
    """Megatron's DDP and distributed optimizer around `built(emulate)`.

    Args:
        interval: of precision logging; None: off.
        microbatches: of each rank. Data-parallel ranks take turns: rank r has the r-th.
        watch: names of linears to capture.
        evaluate: a forward in evaluation mode before each step.
        by_name: weights depend on nothing but the name of the parameter and its whole shape.
        layout: of `initialize`.
    """
    if not parallel_state.model_parallel_is_initialized():
        initialize(**(layout or {}))
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    with logging_precision(None if interval is None else Logging(interval, folder[0])):
        model = built(emulate, **changes)
    if by_name:
        _weights_by_name(model)
    seen = {name: _capture(model.get_submodule(name)) for name in watch}
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    options = OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(options, [ddp])
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses = []
    for step in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        if evaluate:
            ddp.eval()
            with torch.no_grad():
                _loss(ddp, 999, batch)
            ddp.train()
        for name, captured in seen.items():
            weight: Any = model.get_submodule(name).weight
            captured.weight = weight.detach().clone()
        for microbatch in range(microbatches):
            losses.append(_loss(ddp, 100 * step + microbatch * ranks + rank, batch))
            losses[-1].backward()
        finalize_model_grads([ddp])
        optimizer.step()
    torch.distributed.barrier()
    rows = report.read(folder[0]) if interval is not None else []
    return Run(
        rows,
        [loss.detach() for loss in losses],
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: p.main_grad.clone() for name, p in model.named_parameters()},
        seen,
    )


def _loss(model: Any, seed: int, batch: int) -> Tensor:
    stream = [
        torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(batch * seed + i))
        for i in range(batch)
    ]
    words = torch.cat(stream)
    positions = torch.arange(LENGTH).expand(batch, -1)
    loss: Tensor = model(words[:, :-1], positions, None, labels=words[:, 1:].contiguous()).mean()
    return loss


def _capture(linear: Any) -> Seen:
    found = Seen()

    def look(_module: Any, inputs: Any, output: Any) -> None:
        if linear.training:
            found.x.append(inputs[0].detach().clone())
            if output[0].requires_grad:
                output[0].register_hook(lambda dy: found.dy.append(dy.detach().clone()))

    linear.register_forward_hook(look)
    return found


def _weights_by_name(model: Any) -> None:
    """The same model on every layout, whoever holds which part of it."""
    tp, tp_rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    local = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = local * parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        head, _, number = name.rpartition("weight")
        expert = ".experts.linear_fc" in name
        whole_name = f"{head}weight{int(number) + first}" if expert else name
        shape = list(parameter.shape)
        split = getattr(parameter, "tensor_model_parallel", False) and not expert and tp > 1
        if split:
            shape[parameter.partition_dim] *= tp
        if "norm" in name or parameter.ndim < 2 or "mixer" in name:
            continue  # by Megatron's seed, and Mamba's parts are cut in a way of their own
        values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(whole_name.encode()))) / 8
        parameter.data.copy_(values.chunk(tp, parameter.partition_dim)[tp_rank] if split else values)
