"""Attach the monitors to a stack while it is built; `specs.py` names it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)

from megatron_nemotron3.common.hooks import agree_on_interval, find_ddp, find_model
from megatron_nemotron3.common.switches import MONITOR
from megatron_nemotron3.models.series import decoder_layers, decoder_row, mtp_row
from megatron_nemotron3.train.monitor import settings
from megatron_nemotron3.train.monitor.tracker import Monitor, MonitorTracker
from megatron_nemotron3.train.monitor.watched import WatchedLayer


def watch_stack(stack: Any) -> None:
    """Monitor the layers of a decoder stack, if monitors are on."""
    if not torch.distributed.is_initialized():
        return
    interval = settings.interval()
    agree_on_interval(MONITOR, interval)
    if interval == 0 or _reason_against(stack.config):
        return
    monitor = _install_monitor(interval, stack.pg_collection)
    for layer in decoder_layers(stack):
        row = decoder_row(layer.layer_number)
        monitor.add(WatchedLayer(row, (row,), layer, monitor.switch))
    find_ddp(stack, monitor.wrapped_by)
    find_model(stack, monitor.loss.watch)


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
    elif type(get_moe_metrics_tracker()) not in (MoEMetricsTracker, MonitorTracker):
        reason = f"a {type(get_moe_metrics_tracker()).__name__} was set as metric tracker before"
    else:
        return None
    if settings.requested() and torch.distributed.get_rank() == 0:
        print(f"megatron_nemotron3: {MONITOR} has no effect: {reason}", flush=True)
    return reason


def _install_monitor(interval: int, groups: Any) -> Monitor:
    tracker = get_moe_metrics_tracker()
    if not isinstance(tracker, MonitorTracker) or not tracker.monitor.layers:
        tracker = MonitorTracker(Monitor(interval, groups), before=tracker)
        set_moe_metrics_tracker(tracker)
    return tracker.monitor
