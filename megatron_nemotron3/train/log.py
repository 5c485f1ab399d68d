"""Read what Megatron's training loop prints."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

from megatron_nemotron3.common.files import open_outside

#: Name of the time of a step in a log line.
MILLISECONDS = "elapsed time per iteration (ms)"
_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|")
_ITEM = re.compile(r"\| ([^|:]+?): *([-+0-9.eE]+|nan|inf) ")
# In the training loop the line names no set: it is the validation set.
_VALID = re.compile(r"validation loss at iteration (\d+)(?: on (\w+) set)? \| lm loss value: ([-+0-9.eE]+)")


@dataclass(frozen=True)
class LogStep:
    """One log line of training: losses are nats per token, averaged over the log interval."""

    iteration: int
    total: int
    values: dict[str, float]

    @property
    def loss(self) -> float:
        """Next-token loss, MTP not included."""
        return self.values["lm loss"]

    @property
    def mtp(self) -> list[float]:
        found = sorted(key for key in self.values if re.fullmatch(r"mtp_\d+ loss", key))
        return [self.values[key] for key in found]

    @property
    def seconds(self) -> float:
        return self.values.get(MILLISECONDS, 0.0) / 1e3


@dataclass(frozen=True)
class Validation:
    """One evaluation: `which` is "validation" or "test"."""

    iteration: int
    which: str
    loss: float
    #: It was made after the end of training, on the batches that follow those of the last evaluation.
    again: bool = False


@dataclass
class Curve:
    """All losses of a log, one entry per iteration. If a step was trained twice, the later one counts.

    Megatron evaluates the last step twice: in the training loop and after it. There the first one counts.
    """

    steps: dict[int, LogStep] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    test: dict[int, float] = field(default_factory=dict)

    def add(self, line: str) -> LogStep | Validation | None:
        item = parse(line)
        if isinstance(item, LogStep):
            self.steps[item.iteration] = item
        elif isinstance(item, Validation):
            losses = self.validation if item.which == "validation" else self.test
            if not item.again or item.iteration not in losses:
                losses[item.iteration] = item.loss
        return item


def parse(line: str) -> LogStep | Validation | None:
    """Read a line of Megatron's log; None if it has no losses."""
    if (found := _VALID.search(line)) is not None:
        return Validation(int(found[1]), found[2] or "validation", float(found[3]), found[2] is not None)
    if (found := _STEP.search(line)) is not None and "lm loss" in line:
        values = {key.strip(): float(value) for key, value in _ITEM.findall(line)}
        return LogStep(int(found[1]), int(found[2]), values)
    return None


def read(path: str) -> Curve:
    """Return the curve of a log file; empty if there is no file."""
    curve = Curve()
    try:
        with io.TextIOWrapper(open_outside(path), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                curve.add(line)
    except FileNotFoundError:
        pass
    return curve
