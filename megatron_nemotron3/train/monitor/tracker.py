"""Megatron's MoE metric tracker with the monitors' numbers in its report.

The training loop calls `report` on every rank after every step, passes it the TensorBoard and wandb writers
(on the last rank), and prints the returned text in the log line.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_nemotron3.common.hooks import MeasuredSteps
from megatron_nemotron3.models.series import aggregates, log_line, scalars
from megatron_nemotron3.train.monitor.alarms import Watchdog
from megatron_nemotron3.train.monitor.reduce import measure
from megatron_nemotron3.train.monitor.watched import WatchedLayer, WatchedLoss


class Monitor:
    """The watched layers of this process, and when to measure them."""

    def __init__(self, interval: int, groups: Any) -> None:
        self.groups = groups
        self.switch = MeasuredSteps(interval)
        self.watchdog = Watchdog()
        #: The last measured iteration.
        self.measured = 0
        self.loss = WatchedLoss(self.switch)
        self._layers: weakref.WeakSet[WatchedLayer] = weakref.WeakSet()

    def add(self, layer: WatchedLayer) -> None:
        """Add a layer. Only its module, through its hooks, keeps it alive."""
        self._layers.add(layer)

    def wrapped_by(self, ddp: torch.nn.Module) -> None:
        """Note the DDP wrapper of the layers that are inside it; its buffers hold their gradients."""
        inside = set(ddp.modules())
        for layer in self.layers:
            if layer.module in inside:
                layer.ddp = weakref.ref(ddp)

    @property
    def layers(self) -> list[WatchedLayer]:
        return sorted(self._layers, key=lambda layer: layer.name)

    def report(self, loss_scale: float, iteration: int, writer: Any, wandb_writer: Any) -> str:
        """Text for the log line of the step that just ended; "" if it was not measured. Collective."""
        line = ""
        if self.switch.on:
            line = self._report(loss_scale, iteration, writer, wandb_writer)
        self.switch.step_done(iteration)
        return line

    def _report(self, loss_scale: float, iteration: int, writer: Any, wandb_writer: Any) -> str:
        trained = [layer for layer in self.layers if layer.has_data]
        with torch.no_grad():
            values, totals = measure(trained, self.loss.totals(), self.groups)
            mtp = _mtp_losses(loss_scale)
        self.loss.found.clear()
        for layer in trained:
            layer.clear()
        if not values:
            return ""
        self.measured = iteration
        numbers = aggregates(values) | totals
        tags = scalars(values, numbers)
        if writer is not None:
            for tag, value in tags.items():
                writer.add_scalar(tag, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log(tags, iteration)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            for finding in self.watchdog.add(iteration, tags | mtp):
                print(f"megatron_nemotron3: WARNING: {finding}", flush=True)
        return log_line(values, numbers)


class MonitorTracker(MoEMetricsTracker):
    """Upstream's tracker; `report` adds the monitors' numbers to what upstream reports."""

    def __init__(self, monitor: Monitor, before: MoEMetricsTracker) -> None:
        super().__init__()
        self._metrics = before._metrics
        self.monitor = monitor

    def report(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any = None,
        wandb_writer: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> str:
        line: str = super().report(loss_scale, iteration, writer, wandb_writer, *args, **kwargs)
        return line + self.monitor.report(loss_scale, iteration, writer, wandb_writer)


def _mtp_losses(loss_scale: float) -> dict[str, float]:
    """Loss of each MTP depth under Megatron's tag; empty without MTP. Collective."""
    tracker = MTPLossLoggingHelper.tracker
    found = tracker.get("loss_values")
    if found is None:
        return {}
    losses = found.clone()
    for name in ("reduce_group", "avg_group"):
        if (group := tracker.get(name)) is not None:
            torch.distributed.all_reduce(losses, group=group)
            if name == "avg_group":  # not every backend can average
                losses /= group.size()
    return {f"mtp_{i} loss": loss * loss_scale for i, loss in enumerate(losses.tolist(), 1)}
