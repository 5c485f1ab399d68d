"""Attach the monitors to a stack while it is built (`specs.py`), and report them with Megatron's MoE metrics.

The training loop calls the tracker's `report` on every rank after every step, passes it the TensorBoard and
wandb writers (on the last rank), and prints the returned text in the log line.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_nemotron3.common.hooks import MeasuredSteps, agree_on_interval, find_ddp, find_model
from megatron_nemotron3.common.switches import MONITOR
from megatron_nemotron3.models.series import (
    aggregates,
    decoder_layers,
    decoder_row,
    log_line,
    mtp_row,
    scalars,
)
from megatron_nemotron3.train.monitor import settings
from megatron_nemotron3.train.monitor.alarms import Watchdog
from megatron_nemotron3.train.monitor.losses import LossTracker, mtp_losses
from megatron_nemotron3.train.monitor.updates import WatchedUpdates
from megatron_nemotron3.train.monitor.watched import WatchedLayer, WatchedLoss, measure


def watch_stack(stack: Any) -> None:
    """Monitor the layers of a decoder stack, if monitors are on."""
    if not torch.distributed.is_initialized():
        return
    interval = settings.interval()
    agree_on_interval(MONITOR, interval)
    if interval == 0 or _reason_against(stack.config):
        return
    tracker = get_moe_metrics_tracker()
    if not isinstance(tracker, MonitorTracker) or not tracker.monitor.layers:
        tracker = MonitorTracker(Monitor(interval, stack.pg_collection), before=tracker)
        set_moe_metrics_tracker(tracker)
    monitor = tracker.monitor
    for layer in decoder_layers(stack):
        row = decoder_row(layer.layer_number)
        monitor.add(WatchedLayer(row, (row,), layer, monitor.switch))
    find_ddp(stack, monitor.wrapped_by)
    find_model(stack, monitor.watch_model)


def watch_mtp(mtp_layer: Any) -> None:
    """Monitor the layers inside one MTP block; call it after `watch_stack` of the same model."""
    tracker, config = get_moe_metrics_tracker(), mtp_layer.config
    if not isinstance(tracker, MonitorTracker) or settings.interval() == 0 or _reason_against(config):
        return
    own, depths = mtp_layer.layer_number, [mtp_layer.layer_number]
    if config.mtp_use_repeated_layer:
        own, depths = None, list(range(1, config.mtp_num_layers + 1))
    for number, layer in enumerate(mtp_layer.mtp_model_layer.layers, 1):
        rows = tuple(mtp_row(depth, number) for depth in depths)
        tracker.monitor.add(WatchedLayer(mtp_row(own, number), rows, layer, tracker.monitor.switch))


def _reason_against(config: Any) -> str | None:
    """Why this model cannot be monitored, or None. Printed on rank 0 if the user requested monitors."""
    if config.num_moe_experts is None:
        reason = "the model has no MoE layer, and Megatron reports metrics through the MoE tracker"
    elif config.cuda_graph_impl not in (None, "none"):
        reason = f"--cuda-graph-impl {config.cuda_graph_impl} replays kernels without Python hooks"
    elif type(get_moe_metrics_tracker()) not in (MoEMetricsTracker, LossTracker, MonitorTracker):
        reason = f"a {type(get_moe_metrics_tracker()).__name__} was set as metric tracker before"
    else:
        return None
    if settings.requested() and torch.distributed.get_rank() == 0:
        print(f"megatron_nemotron3: {MONITOR} has no effect: {reason}", flush=True)
    return reason


class Monitor:
    """The watched layers of this process, and when to measure them."""

    def __init__(self, interval: int, groups: Any) -> None:
        self.groups = groups
        self.switch = MeasuredSteps(interval)
        self.watchdog = Watchdog()
        #: The last measured iteration.
        self.measured = 0
        self.loss = WatchedLoss(self.switch)
        self.updates = WatchedUpdates(self.switch)
        handle = register_optimizer_step_pre_hook(self.updates.before_step)
        weakref.finalize(self, handle.remove)
        self._layers: weakref.WeakSet[WatchedLayer] = weakref.WeakSet()

    def add(self, layer: WatchedLayer) -> None:
        """Add a layer. Only its module, through its hooks, keeps it alive."""
        self._layers.add(layer)
        self.updates.watch(layer.name, layer.module)

    def watch_model(self, model: torch.nn.Module) -> None:
        """Watch what is around the layers."""
        self.loss.watch(model)
        for name in ("embedding", "output_layer"):
            if (module := getattr(model, name, None)) is not None:
                self.updates.watch(name, module)

    def wrapped_by(self, ddp: torch.nn.Module) -> None:
        """Note the DDP wrapper of the layers that are inside it; its buffers hold their gradients."""
        self.updates.in_ddp = True
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
            unchanged, rate = self.updates.take()
            values, totals = measure(trained, self.loss.totals(), unchanged, self.groups)
            mtp = mtp_losses(loss_scale)
        self.loss.clear()
        for layer in trained:
            layer.clear()
        if not values:
            return ""
        self.measured = iteration
        numbers = aggregates(values) | totals | ({} if rate is None else {"learning_rate": rate})
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


class MonitorTracker(LossTracker):
    """A tracker whose `report` adds the monitors' numbers to what upstream reports."""

    def __init__(self, monitor: Monitor, before: MoEMetricsTracker) -> None:
        super().__init__(before)
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
