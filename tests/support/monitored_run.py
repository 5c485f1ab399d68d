"""A real training run of a small model, monitored, that a test can hurt while it runs."""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    set_moe_metrics_tracker,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.train.build import build_model
from megatron_nemotron3.train.monitor.settings import monitoring
from tests.support.world import world_of_one

#: Tag -> points (iteration, value).
History = dict[str, list[tuple[int, float]]]


class MonitoredRun:
    """Training of one model on the bytes of Python's own sources, at Megatron's loop's order of calls.

    The rate rises linearly over the first tenth of `steps`, rests, and falls over the last fifth, as in the
    published schedules.
    """

    def __init__(
        self,
        model: str | Nemotron3Config,
        *,
        seed: int,
        steps: int,
        lr: float = 4e-3,
        interval: int = 10,
        tokens: int = 64,
        batch: int = 2,
        **settings: Any,
    ) -> None:
        set_moe_metrics_tracker(MoEMetricsTracker())  # not that of an earlier run
        with monitoring(interval):
            self.model = build_model(model, precision="fp32", backend="torch", seed=seed, **settings)
        #: Kept here, because tests begin with a tracker of their own.
        self.tracker: Any = get_moe_metrics_tracker()
        config = self.model.config
        self.ddp: Any = DistributedDataParallel(config, DistributedDataParallelConfig(), self.model)
        self.ddp.train()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=lr, clip_grad=1.0, weight_decay=0.1, adam_beta2=0.95), [self.ddp]
        )
        self.steps, self.lr, self.tokens, self.batch = steps, lr, tokens, batch
        self.iteration = 0
        #: The main loss of each step.
        self.losses: list[float] = []
        self.history: History = {}
        #: What the run printed.
        self.warnings: list[Any] = []
        self._text = _bytes_of_sources()
        self._chance = torch.Generator().manual_seed(seed)

    def state(self) -> Any:
        """A copy of everything that the run depends on and that it has found out."""
        return copy.deepcopy(self._parts())

    def restore(self, state: Any) -> None:
        """Go back to `state`, on the same model."""
        weights, moments, chance, notes, watchdog = copy.deepcopy(state)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
        self._chance.set_state(chance)
        self.iteration, self.losses, self.history, self.warnings = notes
        monitor = self.tracker.monitor
        monitor.watchdog = watchdog
        for layer in monitor.layers:
            layer.clear()
        monitor.switch.step_done(self.iteration)

    def _parts(self) -> Any:
        notes = (self.iteration, self.losses, self.history, self.warnings)
        weights = self.model.state_dict()
        return (
            weights,
            self.optimizer.state_dict(),
            self._chance.get_state(),
            notes,
            self.tracker.monitor.watchdog,
        )

    def train(self, steps: int, hurt: Callable[[int], None] | None = None) -> None:
        """Train on; `hurt(n)` is called before the n-th of these steps, from 0."""
        for n in range(steps):
            if hurt is not None:
                hurt(n)
            self._step()

    def _step(self) -> None:
        self.iteration += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self._share_of_rate()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        start = torch.randint(len(self._text) - self.tokens - 1, (self.batch,), generator=self._chance)
        rows = torch.stack([self._text[s : s + self.tokens + 1] for s in start.tolist()]).long()
        positions = torch.arange(self.tokens).expand(self.batch, -1)
        loss = self.ddp(rows[:, :-1].contiguous(), positions, None, labels=rows[:, 1:].contiguous()).mean()
        loss.backward()
        finalize_model_grads([self.ddp])
        self.optimizer.step()
        tracker = self.tracker
        before = len(tracker.monitor.watchdog.findings)
        tracker.report(1.0, self.iteration, writer=self, track_names=[], num_layers=1)
        self.warnings += tracker.monitor.watchdog.findings[before:]
        if "loss_values" in MTPLossLoggingHelper.tracker and tracker.monitor.measured == self.iteration:
            for depth, value in enumerate(MTPLossLoggingHelper.tracker["loss_values"].tolist(), 1):
                self.add_scalar(f"mtp_{depth} loss", value, self.iteration)
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        self.losses.append(float(loss.detach()))

    def _share_of_rate(self) -> float:
        warmup, decay = max(1, self.steps // 10), max(1, self.steps // 5)
        return min(1.0, self.iteration / warmup, max(0.01, (self.steps - self.iteration) / decay))

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        """As TensorBoard's writer."""
        self.history.setdefault(tag, []).append((iteration, float(value)))


@contextmanager
def alone(seed: int = 1234) -> Iterator[None]:
    """A world of one process, in which Megatron's trackers know of no other model."""
    with world_of_one(seed):
        set_moe_metrics_tracker(MoEMetricsTracker())
        MTPLossLoggingHelper.tracker = {}
        try:
            yield
        finally:
            set_moe_metrics_tracker(MoEMetricsTracker())
            MTPLossLoggingHelper.tracker = {}


def _bytes_of_sources() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(file.read_bytes() for file in sorted(folder.glob("[a-m]*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
