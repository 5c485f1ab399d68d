"""The losses of Megatron's log line: of the steps since the line before, and of the line's own step.

Megatron prints a line after the first step of each process, and does not reset its sums after it. So its
second line is a mean over the first step, too (`should_reset` in `megatron.training.training.training_log`).
Where the first step falls on the log interval, the sums are reset here, as after every other line.

The line of an interval of several steps has means, while event files have the values of each step. It gets
these as well: a run that was resumed within the interval has another mean, but the same last step.

The training loop hands its sums to the tracker of MoE metrics. It does not for models without experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_nemotron3.common.hooks import at_first_forward
from megatron_nemotron3.common.switches import megatron_options
from megatron_nemotron3.models.series import OF_STEP

#: Megatron's sums since the last line, by name. The counters are integers, the losses are tensors.
_Sums = dict[str, Any]
_ADVANCED = "advanced iterations"
_COUNTERS = (_ADVANCED, "skipped iterations", "nan iterations")


def correct_losses(stack: Any) -> None:
    """Correct the log lines of a Megatron training script whose model has this stack."""
    tracker = get_moe_metrics_tracker()
    if isinstance(tracker, LossTracker):
        tracker.forget()  # another run of this process
    elif (
        megatron_options() is not None and stack.config.num_moe_experts and type(tracker) is MoEMetricsTracker
    ):
        set_moe_metrics_tracker(LossTracker(tracker))


class LossTracker(MoEMetricsTracker):
    """Upstream's tracker. Megatron calls `report` after each step, before it prints a line."""

    def __init__(self, before: MoEMetricsTracker) -> None:
        super().__init__()
        self._metrics = before._metrics
        self._first = True
        #: The sums of the interval's earlier steps, while its last step runs.
        self._earlier: _Sums = {}
        #: The hook that waits for the next step.
        self._waiting: Any = None

    def forget(self) -> None:
        """Begin as in a new process."""
        if self._waiting is not None:
            self._waiting.remove()
        self._first, self._earlier, self._waiting = True, {}, None

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
        sums, options = kwargs.get("total_loss_dict"), megatron_options()
        # A graph of the whole iteration captures the forward in which sums would change.
        if sums is None or options is None or options.cuda_graph_impl == "full_iteration":
            return line
        if self._waiting is not None:
            self._waiting.remove()  # no forward ran since then
        if self._earlier:
            line += self._of_step(sums, loss_scale)
        self._waiting = self._prepare_next_step(sums, iteration, options.log_interval)
        self._first = False
        return line

    def _prepare_next_step(self, sums: _Sums, iteration: int, interval: int) -> Any:
        """Change the sums when the next step begins: Megatron has not printed this step's line yet."""
        action: Callable[[Any], None]
        if self._first and iteration % interval == 0:
            action = partial(_begin_again, sums, _elapsed())
        elif (iteration + 1) % interval == 0 and interval > 1:
            action = partial(self._set_aside, sums)
        else:
            return None
        return at_first_forward(torch.nn.Module, action)

    def _set_aside(self, sums: _Sums, _model: Any) -> None:
        self._earlier = dict(sums)
        sums |= {name: torch.zeros_like(sums[name]) for name in sums if name not in _COUNTERS}

    def _of_step(self, sums: _Sums, loss_scale: float) -> str:
        """Put the earlier steps' sums back; return the text of the losses of this step. Collective."""
        earlier, self._earlier = self._earlier, {}
        # Megatron adds MTP's losses after this.
        losses = {name: value for name, value in sums.items() if name not in _COUNTERS} | mtp_losses(
            loss_scale
        )
        skipped = sums[_ADVANCED] == earlier[_ADVANCED]
        text = ""
        if not skipped and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            values = {name: float(value) for name, value in losses.items()}
            # Like Megatron, which leaves out NaN.
            text = "".join(f" {name}{OF_STEP}: {value:.6E} |" for name, value in values.items() if value >= 0)
        sums |= {name: value + sums[name] for name, value in earlier.items() if name not in _COUNTERS}
        return text


def _begin_again(sums: _Sums, elapsed: dict[str, float], _model: Any) -> None:
    """Reset what Megatron resets after a line; timers keep what they measured since `elapsed`."""
    for name in sums:
        sums[name] = 0 if name in _COUNTERS else torch.zeros_like(sums[name])
    for name, timer in _timers().items():
        timer.set_elapsed(max(0.0, timer.elapsed() - elapsed.get(name, 0.0)))


def _elapsed() -> dict[str, float]:
    return {name: timer.elapsed(reset=False) for name, timer in _timers().items()}


def _timers() -> dict[str, Any]:
    from megatron.training import get_timers

    timers: dict[str, Any] = get_timers()._timers
    return timers


def mtp_losses(loss_scale: float) -> dict[str, float]:
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
