"""The proof of a launch: its proxy in small layouts against one process, property by property.

A stage of the proof is a function from a `Bench` to findings. It reports what it finds as findings, also
where Megatron itself refuses or ranks disagree; an exception is a defect of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from megatron_nemotron3.launch import pasted, versions
from megatron_nemotron3.launch.flag import is_known
from megatron_nemotron3.launch.parser import misused, unknown
from megatron_nemotron3.launch.plan.hardware import GIB, GPUS, RESERVE
from megatron_nemotron3.launch.precision_file import formats_of
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.formats import counted
from megatron_nemotron3.precision.model_formats import CensusError
from megatron_nemotron3.precision.table import Structure
from megatron_nemotron3.proof.certify import built
from megatron_nemotron3.proof.certify.bench import (
    Bench,
    Finding,
    PropertyState,
    failed,
    last_line,
    passed,
    untested,
    with_other_data,
)

#: Rules on `--seq-length`, which in reinforcement learning is no length of a training batch.
_OF_LENGTH = ("token-alignment", "sequence-sp", "sequence-cp")
_ROLLOUTS = ("--perform-rl-step", "--rl-", "--grpo-")
ACCEPTED, RULES, FORMATS, MEMORY = "accepted by Megatron", "rules", "number formats", "memory of a GPU"


def version_of(checkout: Path | None) -> str:
    """Return the minor version of megatron-core in a checkout, or of the installed one."""
    found = versions.version_in(checkout / "megatron/core", 2) if checkout is not None else ""
    return found or versions.chosen()


def parser(bench: Bench) -> Iterator[Finding]:
    """Yield whether Megatron's parser takes every option and value of the launch."""
    for version in dict.fromkeys((versions.chosen(), version_of(bench.checkout), version_of(bench.against))):
        if version not in versions.KNOWN:
            yield untested(ACCEPTED, f"the options of megatron-core {version} are not known")
            continue
        flags = [flag for flag in bench.flags if is_known(flag.values) and flag.name != "--emulate"]
        wrong = [f"no option {text}" for text in unknown((flag.name for flag in flags), version)]
        wrong += misused(flags, version)
        where = f"megatron-core {version}"
        if wrong:
            yield from (failed(ACCEPTED, where, text) for text in wrong)
        else:
            yield passed(ACCEPTED, where, f"{len(flags)} options")
    if unresolved := [flag.name for flag in bench.flags if not is_known(flag.values)]:
        yield untested(ACCEPTED, f"values are unresolved shell variables (--set): {', '.join(unresolved)}")


def rules(bench: Bench) -> Iterator[Finding]:
    """Yield the rules that the launch violates; a warning passes and says so."""
    launch = bench.launch
    if launch is None:
        yield untested(RULES, "the layout's sizes are unresolved shell variables")
        return
    # The schedule is the launch's own, complete or not.
    found = [one for one in pasted.violated(launch) if one.rule != "schedule-unknown"]
    errors = [one for one in found if one.severity == "error"]
    rollouts = any(flag.name.startswith(_ROLLOUTS) for flag in bench.flags)
    for one in found:
        if rollouts and one.rule in _OF_LENGTH:
            yield untested(RULES, f"{one.message}; what is trained on has the lengths of rollouts", one.rule)
            continue
        state = PropertyState.FAIL if one.severity == "error" else PropertyState.PASS
        yield Finding(RULES, state, one.rule, detail=f"{one.severity}: {one.message} [{one.source}]")
    if not errors:
        yield passed(RULES, detail="no rule of severity error is violated")


def formats(bench: Bench) -> Iterator[Finding]:
    """Yield the format of each kind of linear of the real model, as options and precision file decide it."""
    launch = bench.launch
    if launch is None:
        yield untested(FORMATS, "the layout's sizes are unresolved shell variables")
        return
    path, file = launch.precision_file, yaml_file.NO_FILE
    if path is not None:
        if not Path(path).exists():
            yield untested(FORMATS, f"{yaml_file.FLAG} {path} is not on this machine")
            return
        try:
            file = yaml_file.read(path, Structure.of(launch.config))
        except yaml_file.PrecisionFileError as problem:
            yield failed(FORMATS, path, " ".join(str(problem).split()))
            return
    listed = formats_of(launch, file)
    if launch.quantized:
        try:
            listed.require_some()
        except CensusError as problem:
            yield failed(FORMATS, detail=str(problem))
            return
    wrong = listed.deviations()
    for one in wrong:
        # What a matcher asks for is meant; what no matcher names took the format of its layer in silence.
        state = PropertyState.PASS if one.source else PropertyState.FAIL
        yield Finding(FORMATS, state, detail=f"not the published recipe: {one}")
    if all(one.source for one in wrong):
        yield passed(FORMATS, detail=f"linears of the whole model: {counted(listed.count())}")


def memory(bench: Bench) -> Iterator[Finding]:
    """Yield the bytes that the fullest GPU of the real launch holds, and its capacity."""
    from megatron_nemotron3.launch.plan.search import worst_memory

    launch = bench.launch
    if launch is None:
        yield untested(MEMORY, "the layout's sizes are unresolved shell variables")
        return
    try:
        total = worst_memory(launch).total
    except ValueError as problem:
        yield untested(MEMORY, str(problem))
        return
    if bench.gpu is None:
        yield untested(MEMORY, f"{total / GIB:.1f} GiB by estimate; the type of GPU is unknown (--gpu)")
        return
    capacity = GPUS[bench.gpu].memory
    detail = (
        f"{total / GIB:.1f} GiB by estimate; {bench.gpu} has {capacity / GIB:.0f}, of which "
        f"{RESERVE / GIB:.0f} are assumed to go to CUDA and fragments"
    )
    state = PropertyState.FAIL if total > capacity else PropertyState.PASS
    if capacity - RESERVE < total <= capacity:
        detail += ": it fits only inside that margin"
    yield Finding(MEMORY, state, bench.gpu, total / GIB, capacity / GIB, detail)


def beyond(bench: Bench) -> Iterator[Finding]:
    """Yield what of the launch nothing here can try."""
    for remark in bench.proxy.remarks:
        if remark.untested:
            names = f" ({', '.join(remark.options)})" if remark.options else ""
            yield untested(remark.what, f"{remark.instead}{names}")


@dataclass(frozen=True)
class Stage:
    """A part of the proof."""

    #: What it does, as a progress line says it.
    title: str
    findings: Callable[[Bench], Iterator[Finding]]
    #: About how many seconds it takes on two cores, for the progress bar.
    seconds: Callable[[Bench], float] = lambda bench: 10


def layouts(bench: Bench) -> Iterator[Finding]:
    """Yield how each small layout compares with one process, from the same weights.

    A failure counts if rounding decides nothing on its tokens; otherwise others are tried.
    """
    from megatron_nemotron3.proof.certify import compare

    own = bench.proxy.case.seed
    yield from with_other_data(
        lambda number: _layouts(bench, own + number),
        lambda number: compare.depends_on_rounding(bench.case(None, seed=own + number)),
        1 + compare.OTHER_TOKENS,
    )


def _layouts(bench: Bench, seed: int) -> Iterator[Finding]:
    from megatron_nemotron3.proof.certify import compare, world
    from megatron_nemotron3.proof.certify.tensors import RanksDiffer

    one = bench.case(None, seed=seed)
    try:
        base, start = compare.reference(one), compare.weights(one)
    except (RuntimeError, TimeoutError) as problem:
        yield failed("training", "one process", last_line(problem))
        return
    for sizes in bench.proxy.sizes:
        where = str(sizes)
        try:
            found = world.train(bench.case(sizes, seed=seed), start, bench.timeout)
            distances = list(compare.compared(one, base, found))
        except RanksDiffer as problem:
            yield failed("copies on several ranks", where, str(problem))
            continue
        except (RuntimeError, TimeoutError) as problem:
            yield failed("training", where, last_line(problem))
            continue
        yield from (compare.verdict(distance, where) for distance in distances)


def imported(module: str, name: str) -> Callable[[Bench], Iterator[Finding]]:
    """Return a stage that needs torch, and is imported when it begins."""

    def findings(bench: Bench) -> Iterator[Finding]:
        yield from getattr(import_module(f"megatron_nemotron3.proof.certify.{module}"), name)(bench)

    return findings


_PARSER = Stage("Megatron's parser", parser, lambda bench: 4)
STAGES: tuple[Stage, ...] = (
    _PARSER,
    Stage("rules", rules, lambda bench: 0.1),
    Stage("number formats of the model", formats, lambda bench: 0.5),
    Stage("memory of a GPU", memory, lambda bench: 0.5),
    Stage("one process against its definition", imported("definition", "definition"), lambda bench: 8),
    Stage("number formats of the built model", built.census, lambda bench: 10),
    Stage("layouts against one process", layouts, lambda bench: 10 + bench.ranks),
    Stage(
        "the script itself",
        imported("script_stage", "script"),
        lambda bench: 25 + 2.5 * bench.proxy.sizes[0].layout.world_size,
    ),
    Stage(
        "the script in its own precision",
        imported("own_precision", "own_precision"),
        lambda bench: 10 + 1.5 * bench.proxy.sizes[0].layout.world_size,
    ),
    Stage("monitors", imported("script_stage", "monitors"), lambda bench: 0.5),
    Stage("what needs a GPU", beyond, lambda bench: 0.1),
)

#: Of `--against`.
UPGRADE = (
    _PARSER,
    Stage("two versions of Megatron", imported("upgrade", "upgrade"), lambda bench: 50 + 6 * bench.ranks),
    Stage("what needs a GPU", beyond, lambda bench: 0.1),
)


def prove(bench: Bench, stages: Sequence[Stage] | None = None) -> Iterator[Finding]:
    """Yield the findings of these stages; None: of all."""
    for stage in STAGES if stages is None else stages:
        yield from stage.findings(bench)
