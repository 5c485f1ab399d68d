"""Published training runs of Nemotron 3, with which plans are compared: the table is `published.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule
from megatron_nemotron3.launch.plan.flops import step_flops
from megatron_nemotron3.models import get

SEQUENCE = 8192


@dataclass(frozen=True)
class PublishedRun:
    """One run: model, GPU, number of GPUs, precision, batch, layout, and what was measured.

    tokens: a second and GPU. memory: GiB that torch had allocated at most, or None. natural: real data and
    routing as the model learns it; the others have mock data and forced balanced routing. functional: a run
    that verifies that training works and sets options that slow it down. later: published after the constants
    of the plan were fitted.
    """

    model: str
    gpu: str
    gpus: int
    precision: str
    global_batch_size: int
    micro_batch_size: int
    tp: int
    ep: int
    tokens: float
    source: str
    options: str
    pp: int = 1
    cp: int = 1
    seq_length: int = SEQUENCE
    memory: float | None = None
    natural: bool = False
    functional: bool = False
    later: bool = False

    @property
    def layout(self) -> ParallelLayout:
        ranks = self.gpus // (self.tp * self.pp * self.cp)
        return ParallelLayout(tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep, dp=ranks)

    def launch(self) -> Launch:
        return Launch(
            config=get(self.model),
            layout=self.layout,
            precision=self.precision,
            backend="te",
            schedule=TrainingSchedule(
                seq_length=self.seq_length,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
            ),
            extra=tuple(self.options.split()),
            megatron_core="0.19",
        )


_FILE: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def _expanded(text: str | list[str]) -> str:
    """Put the options of a set in place of its name, @full."""
    words = (text if isinstance(text, str) else " ".join(text)).split()
    sets = _FILE["option sets"]
    return " ".join(_expanded(sets[word[1:]]) if word.startswith("@") else word for word in words)


def _run(row: Mapping[str, Any]) -> PublishedRun:
    fields = {n: value for n, value in row.items() if n not in ("about", "milliseconds", "teraflops")}
    fields["options"] = _expanded(row["options"])
    if "teraflops" in row:
        fields["tokens"] = row["teraflops"] * 1e12 / step_flops(get(row["model"]), 1, SEQUENCE)
    if "milliseconds" in row:
        tokens = row["global_batch_size"] * row.get("seq_length", SEQUENCE)
        fields["tokens"] = tokens / row["gpus"] / row["milliseconds"] * 1e3
    return PublishedRun(**fields)


#: The throughput table.
RUNS: tuple[PublishedRun, ...] = tuple(map(_run, _FILE["throughput table"]))
#: Pre-training runs of the verification cards that RUNS does not have, with peak memory where it is given.
CARDS: tuple[PublishedRun, ...] = tuple(map(_run, _FILE["cards"]))
