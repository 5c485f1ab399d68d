"""The proof of a launch: its proxy in small layouts against one process, property by property.

A stage of the proof is a function from a `Bench` to findings. It reports what it finds as findings, also
where Megatron itself refuses or ranks disagree; an exception is a defect of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from megatron_nemotron3.proof.certify import built, static
from megatron_nemotron3.proof.certify.bench import Bench, last_line
from megatron_nemotron3.proof.certify.finding import Finding, failed


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
    from megatron_nemotron3.proof.certify import compare, noise, world
    from megatron_nemotron3.proof.certify.tensors import RanksDiffer

    one = bench.case(None)
    try:
        base, start = noise.reference(one), noise.weights(one)
    except (RuntimeError, TimeoutError) as problem:
        yield failed("training", "one process", last_line(problem))
        return
    for sizes in bench.proxy.sizes:
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
        yield from (compare.verdict(distance, where) for distance in distances)


def _imported(module: str, name: str) -> Callable[[Bench], Iterator[Finding]]:
    """A stage that needs torch, and is imported when it begins."""

    def findings(bench: Bench) -> Iterator[Finding]:
        yield from getattr(import_module(f"megatron_nemotron3.proof.certify.{module}"), name)(bench)

    return findings


STAGES: tuple[Stage, ...] = (
    Stage("Megatron's parser", static.parser, lambda bench: 4),
    Stage("rules", static.rules, lambda bench: 0.1),
    Stage("number formats of the model", static.formats, lambda bench: 0.5),
    Stage("memory of a GPU", static.memory, lambda bench: 0.5),
    Stage("one process against its definition", _imported("definition", "definition"), lambda bench: 8),
    Stage("number formats of the built model", built.census, lambda bench: 10),
    Stage("layouts against one process", layouts, lambda bench: 10 + bench.ranks),
    Stage(
        "the script itself",
        _imported("script_stage", "script"),
        lambda bench: 25 + 2.5 * bench.proxy.sizes[0].layout.world_size,
    ),
    Stage("monitors", _imported("monitored", "monitors"), lambda bench: 0.5),
    Stage("what needs a GPU", static.beyond, lambda bench: 0.1),
)


def prove(bench: Bench, stages: Sequence[Stage] | None = None) -> Iterator[Finding]:
    """Yield the findings of these stages; None: of all."""
    for stage in STAGES if stages is None else stages:
        yield from stage.findings(bench)
