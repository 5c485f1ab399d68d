"""Training steps of a small model in a world of one, with everything the monitors could be compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_nemotron3.proof.certify.ranks import initialize
from megatron_nemotron3.specs import nemotron3_torch_stack_spec
from megatron_nemotron3.train.monitor.settings import monitoring
from tests.support.models import build_hybrid

PATTERN = "MEM*EE/*E/*E"
MICRO_BATCHES = 3


class Writer:
    """Stands in for TensorBoard's and wandb's writers: iteration -> tag -> value."""

    def __init__(self) -> None:
        self.scalars: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, value: Any, iteration: int) -> None:
        self.scalars.setdefault(iteration, {})[tag] = float(value)

    def log(self, values: dict[str, Any], iteration: int) -> None:
        for tag, value in values.items():
            self.add_scalar(tag, value, iteration)


@dataclass
class Run:
    """What some steps left behind."""

    lines: list[str] = field(default_factory=list)
    tensorboard: Writer = field(default_factory=Writer)
    wandb: Writer = field(default_factory=Writer)
    losses: list[torch.Tensor] = field(default_factory=list)
    #: Reduced gradients after the last step, by parameter name.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Per step, per hooked module's name: its first-forward outputs in order of visits.
    seen: list[dict[str, list[torch.Tensor]]] = field(default_factory=list)
    #: Expert bias by router name, after the last step.
    bias: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Losses of the MTP depths as Megatron keeps them, and as the warnings got them, per step.
    mtp: list[list[float]] = field(default_factory=list)
    mtp_watched: list[list[float]] = field(default_factory=list)


def run(
    monitor: str | None,
    steps: int = 2,
    tokens: int = 16,
    evaluate: bool = False,
    distributed_optimizer: bool = False,
    capture: bool = False,
    **overrides: Any,
) -> Run:
    """Train `steps` steps monitored at the interval `monitor`; `overrides` are TransformerConfig fields."""
    with monitoring(None if monitor is None else int(monitor)):
        initialize()
        model = build_hybrid(
            PATTERN,
            nemotron3_torch_stack_spec,
            moe_latent_size=32,
            mtp_use_repeated_layer=True,
            **overrides,
        )
    config = model.config
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    model = DistributedDataParallel(config, ddp, model)
    options = OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer=distributed_optimizer)
    optimizer = get_megatron_optimizer(options, [model])
    result = Run()
    if capture:
        _capture(model.module, result.seen)
    generator = torch.Generator().manual_seed(3)
    MTPLossLoggingHelper.tracker = {}
    try:
        for iteration in range(1, steps + 1):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            result.seen.append({})
            for _ in range(MICRO_BATCHES):
                result.losses.append(_forward(model, tokens, generator).detach())
                result.losses[-1].requires_grad_(False)
            finalize_model_grads([model])
            optimizer.step()
            tracker = get_moe_metrics_tracker()
            result.lines.append(
                tracker.report(
                    1 / MICRO_BATCHES,
                    iteration,
                    writer=result.tensorboard,
                    wandb_writer=result.wandb,
                    track_names=[],
                    num_layers=6,
                )
            )
            result.mtp.append((MTPLossLoggingHelper.tracker["loss_values"] / MICRO_BATCHES).tolist())
            if result.lines[-1]:
                series = tracker.monitor.watchdog.series
                result.mtp_watched.append([series[f"mtp_{d} loss"][-1][1] for d in (1, 2)])
            MTPLossLoggingHelper.clean_metrics_in_tracker()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    _forward(model, 2 * tokens, torch.Generator().manual_seed(iteration), backward=False)
                model.train()
                MTPLossLoggingHelper.clean_metrics_in_tracker()
    finally:
        MTPLossLoggingHelper.tracker = {}
    for name, parameter in model.module.named_parameters():
        result.gradients[name] = parameter.main_grad.clone()
    result.bias = {n: b.clone() for n, b in model.module.named_buffers() if n.endswith("expert_bias")}
    return result


def _forward(model: Any, tokens: int, generator: torch.Generator, backward: bool = True) -> torch.Tensor:
    data = torch.randint(0, 256, (2, tokens), generator=generator)
    positions = torch.arange(tokens).expand(2, -1)
    loss = model(data, positions, None, labels=data.roll(-1, 1)).float().mean()
    if backward:
        loss.backward()
    return loss


def _capture(model: Any, seen: list[dict[str, list[torch.Tensor]]]) -> None:
    """Keep what layers, routers and latent projections return."""

    def watch(name: str, module: Any, pick: int | None) -> None:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            if module.training and seen:
                output = output[pick or 0] if isinstance(output, tuple) else output
                seen[-1].setdefault(name, []).append(output.detach().clone())

        module.register_forward_hook(keep)

    stacks = [("decoder", model.decoder), ("mtp", model.mtp.layers[0].mtp_model_layer)]
    for where, stack in stacks:
        for number, layer in enumerate(stack.layers, 1):
            watch(f"{where} {number}", layer, None)
            for module in layer.modules():
                if isinstance(module, BaseMoELayer):
                    watch(f"{where} {number} router", module.router, 1)
                    watch(f"{where} {number} latent", module.fc1_latent_proj, None)
