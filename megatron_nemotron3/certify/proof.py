"""The proof of a launch: its twin in small layouts against one process, property by property.

A stage of the proof is a function from a `Bench` to findings. It reports what it finds as findings, also
where Megatron itself refuses or ranks disagree; an exception is a defect of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.args.flag import Flag
from megatron_nemotron3.certify import built, static
from megatron_nemotron3.certify.case import Case
from megatron_nemotron3.certify.finding import Finding, State, failed
from megatron_nemotron3.certify.layouts import Sizes
from megatron_nemotron3.certify.twin import Twin
from megatron_nemotron3.precision.settings import Emulation


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the stages of a proof work with."""

    twin: Twin
    #: Options of the launch, each once.
    flags: tuple[Flag, ...]
    #: An empty folder for checkpoints and logs.
    folder: Path
    #: What the launch emulates.
    emulate: Emulation | None = None
    #: Type of the GPUs of the launch, a name of `plan.hardware.GPUS`; None: unknown.
    gpu: str | None = None
    #: Megatron-LM whose script the launch runs; None: this package's script.
    checkout: Path | None = None
    #: Seconds after which a run counts as hung.
    timeout: float = 300
    #: Importable function called on every rank before anything is built. Tests break something with it.
    fault: Callable[[], None] | None = None

    def case(self, sizes: Sizes | None, **changes: Any) -> Case:
        """Return the training of the twin in a layout, or in one process (None)."""
        batch = self.twin.batch
        values: dict[str, Any] = {
            "config": self.twin.config,
            "layout": sizes.layout if sizes else ParallelLayout(),
            "words": tuple(self.twin.words(sizes)),
            "seq_length": batch.seq_length,
            "micro_batch_size": batch.micro_batch_size,
            "sequences": batch.sequences,
            "documents": batch.documents,
            "cut_whole": batch.cut_whole,
            "mask": "random" if batch.masked else "none",
            "lora": self.twin.lora,
            "steps": 2,
            "fault": self.fault,
        }
        return Case(**(values | changes))

    @property
    def ranks(self) -> int:
        """Processes of all small layouts together."""
        return sum(sizes.layout.world_size for sizes in self.twin.sizes)


@dataclass(frozen=True)
class Stage:
    """A part of the proof."""

    #: What it does, as a progress line says it.
    title: str
    findings: Callable[[Bench], Iterator[Finding]]
    #: About how many seconds it takes on two cores, for the progress bar.
    seconds: Callable[[Bench], float] = lambda bench: 10


def layouts(bench: Bench) -> Iterator[Finding]:
    """Yield how each small layout compares with one process, from the same weights."""
    from megatron_nemotron3.certify import compare, noise, world
    from megatron_nemotron3.certify.tensors import RanksDiffer

    one = bench.case(None)
    try:
        base, start = noise.reference(one), noise.weights(one)
    except (RuntimeError, TimeoutError) as problem:
        yield failed("training", "one process", last_line(problem))
        return
    for sizes in bench.twin.sizes:
        where = str(sizes)
        try:
            found = world.train(bench.case(sizes), start, bench.timeout)
            distances = list(compare.compared(one, base, found))
        except RanksDiffer as problem:
            yield failed("copies on several ranks", where, str(problem))
            continue
        except (RuntimeError, TimeoutError) as problem:
            yield failed("training", where, last_line(problem))
            continue
        for distance in distances:
            state = State.PASS if distance.share <= 1 else State.FAIL
            yield Finding(distance.what, state, where, distance.share, 1.0, distance.key)


def one_process(bench: Bench) -> Iterator[Finding]:
    """Yield how one process compares with the definition of its loss, gradients and optimizer."""
    from megatron_nemotron3.certify.definition import definition

    yield from definition(bench)


def last_line(problem: BaseException) -> str:
    """Return what an exception says; of a traceback the last line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[-1]


def script(bench: Bench) -> Iterator[Finding]:
    """Yield what the launch's own script computes, saves and loads."""
    from megatron_nemotron3.certify import script_stage

    yield from script_stage.script(bench)


def monitors(bench: Bench) -> Iterator[Finding]:
    """Yield whether the monitors saw the same in the script's runs."""
    from megatron_nemotron3.certify import monitored

    yield from monitored.monitors(bench)


STAGES: tuple[Stage, ...] = (
    Stage("Megatron's parser", static.parser, lambda bench: 4),
    Stage("rules", static.rules, lambda bench: 0.1),
    Stage("number formats of the model", static.formats, lambda bench: 0.5),
    Stage("memory of a GPU", static.memory, lambda bench: 0.5),
    Stage("one process against its definition", one_process, lambda bench: 8),
    Stage("number formats of the built model", built.census, lambda bench: 10),
    Stage("layouts against one process", layouts, lambda bench: 10 + bench.ranks),
    Stage("the script itself", script, lambda bench: 25 + 2.5 * bench.twin.sizes[0].layout.world_size),
    Stage("monitors", monitors, lambda bench: 0.5),
    Stage("what needs a GPU", static.beyond, lambda bench: 0.1),
)


def prove(
    bench: Bench, stages: Sequence[Stage] | None = None, begin: Callable[[Stage], None] = lambda stage: None
) -> Iterator[Finding]:
    """Yield the findings of all stages.

    Args:
        begin: called before each stage.
    """
    for stage in STAGES if stages is None else stages:
        begin(stage)
        yield from stage.findings(bench)
