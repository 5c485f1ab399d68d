"""Puts the monitors on a stack when it is built: called by `layers/stack.py`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)

from megatron_nemotron3.monitor import settings
from megatron_nemotron3.monitor.series import decoder_row, mtp_row, shared_mtp_row
from megatron_nemotron3.monitor.tracker import Monitor, MonitorTracker
from megatron_nemotron3.monitor.watched import WatchedLayer


def watch_stack(stack: Any) -> None:
    """Monitor the layers of a decoder stack, if monitors are on.

    Args:
        stack: HybridStack with `layers`, `config` and `pg_collection`.

    Raises:
        ValueError: NEMOTRON3_MONITOR is not a number.
        RuntimeError: it is not the same on all ranks, which would hang the first report.
    """
    if not torch.distributed.is_initialized():
        return
    interval = _agreed(settings.interval())
    if interval == 0 or _refused(stack.config):
        return
    monitor = _install(interval, stack.pg_collection)
    for layer in stack.layers:
        row = decoder_row(layer.layer_number)
        monitor.add(WatchedLayer(row, (row,), layer, monitor.switch))
    _find_ddp(stack, monitor)


def watch_mtp(mtp_layer: Any) -> None:
    """Monitor the layers inside one MTP block; call it after `watch_stack` of the same model.

    Args:
        mtp_layer: MultiTokenPredictionLayer with `mtp_model_layer.layers`, `layer_number` and `config`.
    """
    tracker = get_moe_metrics_tracker()
    if not isinstance(tracker, MonitorTracker) or settings.interval() == 0 or _refused(mtp_layer.config):
        return
    config = mtp_layer.config
    for number, layer in enumerate(mtp_layer.mtp_model_layer.layers, 1):
        if config.mtp_use_repeated_layer:
            name = shared_mtp_row(number)
            rows = tuple(mtp_row(depth, number) for depth in range(1, config.mtp_num_layers + 1))
        else:
            name = mtp_row(mtp_layer.layer_number, number)
            rows = (name,)
        tracker.monitor.add(WatchedLayer(name, rows, layer, tracker.monitor.switch))


def _refused(config: Any) -> str | None:
    """Why this model cannot be monitored, said once if NEMOTRON3_MONITOR asks for it."""
    if config.num_moe_experts is None:
        reason = "the model has no MoE layer, and Megatron reports metrics through the MoE tracker"
    elif config.cuda_graph_impl not in (None, "none"):
        reason = f"--cuda-graph-impl {config.cuda_graph_impl} replays kernels without Python hooks"
    elif type(get_moe_metrics_tracker()) not in (MoEMetricsTracker, MonitorTracker):
        reason = f"a {type(get_moe_metrics_tracker()).__name__} was set as metric tracker before"
    else:
        return None
    if settings.asked_for() and torch.distributed.get_rank() == 0:
        print(f"megatron_nemotron3: {settings.VARIABLE} has no effect: {reason}", flush=True)
    return reason


def _install(interval: int, groups: Any) -> Monitor:
    """The process's monitor; made, and put in the tracker's place, where there is none."""
    tracker = get_moe_metrics_tracker()
    if not isinstance(tracker, MonitorTracker) or not tracker.monitor.layers:
        tracker = MonitorTracker(Monitor(interval, groups), before=tracker)
        set_moe_metrics_tracker(tracker)
    return tracker.monitor


def _agreed(interval: int) -> int:
    """The interval, if it is the one the first rank to get here had.

    Through the store, not a collective: ranks build their stages in different orders, and Megatron waits for
    other stages in between.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    first = int(store.compare_set("megatron_nemotron3/monitor/interval", "", str(interval)))
    if first != interval:
        raise RuntimeError(
            f"{settings.VARIABLE} is {interval} on rank {torch.distributed.get_rank()} and {first} on "
            "another (0: off): export it on all nodes"
        )
    return interval


def _find_ddp(stack: Any, monitor: Monitor) -> None:
    """Tell the layers their DDP wrapper when it first runs; a module does not know what wraps it."""
    wanted = weakref.ref(stack)

    def look(module: torch.nn.Module, _inputs: Any) -> None:
        if module is wanted() or wanted() is None:
            everywhere.remove()
        elif isinstance(module, DistributedDataParallel):
            inside = set(module.modules())
            for layer in monitor.layers:
                if layer.module in inside:
                    layer.ddp = weakref.ref(module)

    everywhere = torch.nn.modules.module.register_module_forward_pre_hook(look)
