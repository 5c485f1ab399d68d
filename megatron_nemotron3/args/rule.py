"""What a rule is, and what it looks at. The rules themselves: `rules_*.py`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron_nemotron3.args.layout import ParallelLayout
from megatron_nemotron3.args.precision import bf16_tail
from megatron_nemotron3.args.schedule import TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.versions import DEFAULT

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything a run is made of, as a rule sees it."""

    config: Nemotron3Config
    layout: ParallelLayout
    precision: str
    backend: str
    #: None: batch and length are the caller's business, and rules about them are silent.
    schedule: TrainingSchedule | None = None
    #: Options of `extra`, name to values.
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    te_precision_config_file: str | None = None
    allow_plain_nvfp4: bool = False
    emulate: bool = False
    #: Of the GPU that will train; None: not known where the flags are made.
    compute_capability: tuple[int, int] | None = None
    #: Minor version the flags are for.
    megatron_core: str = DEFAULT

    @property
    def kinds(self) -> frozenset[str]:
        """Layer kinds of decoder and MTP."""
        return frozenset(self.config.pattern + (self.config.mtp_pattern or ""))

    @property
    def seq_length(self) -> int:
        """Tokens per sequence."""
        return (self.schedule.seq_length if self.schedule else None) or self.config.seq_length

    @property
    def quantized(self) -> bool:
        """Whether GEMMs run below BF16."""
        return self.precision in ("mxfp8", "nvfp4")

    @property
    def bf16_at_end(self) -> int:
        """Layers kept BF16 at the end, `extra` included."""
        given = self.options.get("--num-layers-at-end-in-bf16")
        return int(given[0]) if given else bf16_tail(self.config)

    @property
    def bf16_at_start(self) -> int:
        """Layers kept BF16 at the start, `extra` included."""
        given = self.options.get("--num-layers-at-start-in-bf16")
        return int(given[0]) if given else 0

    def first_of(self, *names: str) -> str | None:
        """The first of these options that `extra` holds."""
        return next((name for name in names if name in self.options), None)


@dataclass(frozen=True)
class Rule:
    """A condition under which a run does not work, or not as one thinks."""

    name: str
    violated: Callable[[Context], object]
    #: The numbers and the cure. Called only when violated.
    message: Callable[[Context], str]
    #: Where the restriction lives: a file of megatron-core 0.19, an issue, a report.
    source: str
    severity: Severity = "error"


@dataclass(frozen=True)
class Violation:
    """A rule that was violated, with its message."""

    rule: str
    severity: Severity
    message: str
    source: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} [{self.rule}; {self.source}]"


def divides(part: int, whole: int | None) -> bool:
    """Whether `whole` splits into `part` equal shares; what does not exist always does."""
    return whole is None or whole % part == 0


def divisors(whole: int, limit: int | None = None) -> str:
    """The divisors of `whole` for a message: "1, 2, 4"."""
    return ", ".join(str(n) for n in range(1, min(whole, limit or whole) + 1) if whole % n == 0)
