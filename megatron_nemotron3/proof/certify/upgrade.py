"""`nemotron3 certify --against DIR`: a launch's proxy under the Megatron that is installed and under another
one, from the same weights and data. What differs is named: options, numbers of the log, gradients, weights,
series of the monitors, checkpoints.

The other Megatron runs in a process of its own (this module as a script), which imports it in front of the
installed one.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_metadata
from megatron_nemotron3.checkpoints.state import read_state
from megatron_nemotron3.launch import versions
from megatron_nemotron3.proof.certify import compare, script_stage
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
from megatron_nemotron3.proof.certify.layouts import Sizes
from megatron_nemotron3.proof.certify.script_result import ScriptResult, logged
from megatron_nemotron3.proof.certify.script_run import run_script
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.train.log import MILLISECONDS

_ROOT = Path(__file__).parents[3]
#: Stored arguments that name this run's own files, or say how its processes were started.
_OF_A_RUN = re.compile(
    r"(save|load|tensorboard_dir|.*cache_path|.*_dir|.*start_time.*|rank|local_rank|master_.*)"
)
#: Numbers of a log line that are times, or follow from them.
_TIMES = re.compile(rf"{re.escape(MILLISECONDS)}|throughput.*|.*\(ms\)|.*time.*|.*memory.*")
#: Numbers are logged with three decimals or seven digits.
_DECIMALS = {"grad norm": 1e-3}
ARGUMENTS, KEYS = "arguments", "tensors of the checkpoint"


@dataclass(frozen=True)
class OtherRun:
    """A run of the script under the other Megatron: the arguments of `run_script`."""

    name: str
    sizes: Sizes | None
    words: Sequence[str]


def upgrade(bench: Bench) -> Iterator[Finding]:
    """Yield what differs between the installed Megatron and the one of `bench.against`.

    Where gradients differ because rounding decides about a token's expert, other data are tried once.
    """
    runs: list[UpgradeRuns] = []
    found: list[Finding] = []

    def findings(seed: int) -> Iterator[Finding]:
        runs.append(UpgradeRuns(bench, seed))
        found[:] = runs[-1].findings()
        yield from found

    def tied(_seed: int) -> bool:
        moved = any(one.name.startswith("gradients") and one.state is PropertyState.FAIL for one in found)
        return moved and runs[-1].own.depend_on_rounding()

    yield from with_other_data(findings, tied, 2)


def _environment(checkout: Path) -> dict[str, str]:
    """Variables with which a process imports the Megatron of a checkout."""
    path = [checkout, _ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}


def require_importable(checkout: Path) -> None:
    """Import the Megatron of a checkout in a process of its own.

    Raises:
        ValueError: it does not import.
    """
    words = [sys.executable, "-W", "ignore", "-c", "import megatron.core.models.hybrid.hybrid_model"]
    ran = subprocess.run(
        words,
        env=_environment(checkout),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {ran.returncode}"]
        raise ValueError(f"--against {checkout} does not import here: {lines[-1]}; install what it needs")


class UpgradeRuns:
    """The runs of a launch's script under two versions of Megatron."""

    def __init__(self, bench: Bench, seed: int) -> None:
        assert bench.against is not None
        folder = bench.folder / f"versions-{seed}"
        self.bench, self._seed, self._against = bench, seed, bench.against
        stock = bench.checkout is not None
        other = replace(bench, folder=folder / "other", checkout=bench.against if stock else None)
        for place in (folder, other.folder):
            place.mkdir()
        self.own = script_stage.ScriptRuns(replace(bench, folder=folder, fault=None))
        self.other = script_stage.ScriptRuns(other)

    def findings(self) -> Iterator[Finding]:
        """Yield what differs."""
        own, other, (first, *more) = self.own, self.other, self.bench.proxy.sizes
        if reason := script_stage.reason_against(own):
            yield untested("script", reason)
            return
        own.write_data(self._seed)
        own.write_starts()
        other.folder.mkdir()
        other.options = own.options
        try:
            starts = {f"one-{n}": own.fresh(n) for n in range(1 + compare.NUDGES)}
            own.bases = own.run_each(starts, watched=True)
            saved = own.run("layout", first, *own.fresh(), *own.saving, watched=True, killed_in=own.saved)
            layouts = [own.run(f"layout-{n}", sizes, *own.fresh()) for n, sizes in enumerate(more)]
        except script_stage.FAILURES as problem:
            yield failed("training", versions.chosen(), last_line(problem))
            return
        fresh, save = own.fresh(), other.saving
        jobs = [
            OtherRun("one", None, other.words("one", None, *fresh, watched=True)),
            OtherRun("layout", first, other.words("layout", first, *fresh, *save, watched=True)),
            OtherRun("resumed", first, other.words("resumed", first, *own.loading)),
            *(OtherRun(f"layout-{n}", s, other.words(f"layout-{n}", s, *fresh)) for n, s in enumerate(more)),
        ]
        problems = self._run(jobs)
        for job, reason in zip(jobs, problems, strict=True):
            if reason:
                yield failed("training", f"{job.name}, {job.sizes or 'one process'}, {self._against}", reason)
        if any(problems):
            return
        yield from self._checkpoints()
        pairs = [("one-0", "one", None, own.bases[0]), ("layout", "layout", first, saved)]
        pairs += [(f"layout-{n}",) * 2 + (s, layouts[n]) for n, s in enumerate(more)]
        for here, there, sizes, before in pairs:
            where = str(sizes or "one process")
            yield from self._differences(before, other.result(there, sizes), where)
            if sizes in (None, first):
                yield self._monitors(here, there, where)
        yield from self._resumed(saved, other.result("resumed", first), f"{first}, resumed")

    def _run(self, jobs: Sequence[OtherRun]) -> list[str]:
        """Run all under the other Megatron; return the last line of each failure, or ""."""
        bench = self.other.bench
        calls = [
            (job.words, bench.case(job.sizes), self.other.folder / job.name, bench.timeout) for job in jobs
        ]
        task, result = self.other.folder / "jobs", self.other.folder / "results"
        task.write_bytes(pickle.dumps((calls, result, self._against)))
        with (self.other.folder / "jobs.log").open("w") as log:
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", __name__, str(task)],
                env=_environment(self._against),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
        if not result.exists():
            lines = (self.other.folder / "jobs.log").read_text(errors="replace").strip().splitlines()
            return [lines[-1] if lines else "its process ended without a word"] * len(jobs)
        found: list[str] = pickle.loads(result.read_bytes())
        return found

    def _compared(
        self,
        what: str,
        before: ScriptResult,
        after: ScriptResult,
        where: str,
        of: Callable[[ScriptResult], Tensors],
    ) -> Finding:
        """Compare by the noise of the one process. `of` takes a result of either version."""
        base, *moved = map(of, self.own.bases)
        allowed = compare.spread(base, moved, self.own.terms, _DECIMALS.get(what, 0.0))
        return apart(what, of(before), of(after), allowed, where)

    def _differences(self, before: ScriptResult, after: ScriptResult, where: str) -> Iterator[Finding]:
        yield from self._numbers(before, after, where)
        yield _only_in_one(before, after, where)
        for step in (1, 2):
            of = partial(ScriptResult.gradients, step=step)
            yield self._compared(f"gradients of step {step}", before, after, where, of)
        weights = partial(ScriptResult.weights, step=2)
        yield self._compared("weights after two steps", before, after, where, weights)
        yield compare.equal("expert biases", before.biases(2), after.biases(2), where)

    def _numbers(self, before: ScriptResult, after: ScriptResult, where: str) -> Iterator[Finding]:
        """Each number of the log that differs, and how many do not."""
        names = {name for step in before.curve.steps.values() for name in step.values}
        same = 0
        for name in sorted(name for name in names if not _TIMES.fullmatch(name)):
            of = partial(logged, re.escape(name))
            found = self._compared(name, before, after, where, of)
            if found.state is PropertyState.PASS:
                same += 1
                continue
            values = zip(of(before).items(), of(after).values(), strict=False)
            changed = (f"{key.rpartition(', ')[2]} {a:.6g} became {b:.6g}" for (key, a), b in values)
            yield replace(found, detail="; ".join(changed))
        yield passed("numbers of the log", where, f"{same} numbers of each step are equal")

    def _resumed(self, saved: ScriptResult, after: ScriptResult, where: str) -> Iterator[Finding]:
        """The other Megatron goes on from a checkpoint of the installed one."""
        yield from script_stage.loading_findings(after, saved, where)

        def second(kind: str, ran: ScriptResult) -> Tensors:
            tensors: Tensors = getattr(ran, kind)(1 if ran is after else 2)
            return tensors

        for kind in ("gradients", "weights"):
            yield self._compared(f"{kind} after resuming", saved, after, where, partial(second, kind))

    def _monitors(self, here: str, there: str, where: str) -> Finding:
        bases = [script_stage.first_of(self.own.bench, f"one-{n}") for n in range(1 + compare.NUDGES)]
        before = script_stage.first_of(self.own.bench, here)
        after = script_stage.first_of(self.other.bench, there)
        allowed = compare.spread(bases[0], bases[1:], self.own.terms)
        return apart(script_stage.MONITORS, before, after, allowed, where)

    def _checkpoints(self) -> Iterator[Finding]:
        """What the two versions write: arguments, and names, shapes and dtypes of tensors."""
        try:
            before, after = (read_metadata(runs.saved / "iter_0000001") for runs in (self.own, self.other))
            arguments = [vars_of(read_state(index)) for index in (before, after)]
        except CheckpointError as problem:
            yield untested(KEYS, str(problem))
            return
        yield arguments_of(*arguments)
        shapes = [
            {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in index.tensors.items()}
            for index in (before, after)
        ]
        changed = list(_changed(*shapes))
        if changed:
            yield failed(KEYS, detail="; ".join(changed))
        else:
            yield passed(KEYS, detail=f"{len(shapes[0])} names, shapes and dtypes")


def vars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a checkpoint stores."""
    args = state.get("args")
    found = getattr(args, "state", None)
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> str:
    """A stored argument as text; an enumeration's member by its name or number."""
    state = getattr(value, "args", None)
    return " ".join(map(str, state)) if isinstance(state, tuple) else str(value)


def arguments_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Finding:
    """Return whether arguments of the same command line have other values in the other Megatron.

    Such an argument is a default that changed, which may be of no consequence: a warning.
    """
    shared = [name for name in before if name in after and not _OF_A_RUN.fullmatch(name)]
    pairs = [(name, _plain(before[name]), _plain(after[name])) for name in shared]
    changed = [f"{name} {one} became {other}" for name, one, other in pairs if one != other]
    only = [
        f"{len(one.keys() - two.keys())} {which}"
        for one, two, which in ((after, before, "new"), (before, after, "gone"))
    ]
    detail = f"{len(shared)} compared, {', '.join(only)}"
    return passed(ARGUMENTS, detail=f"warning: {'; '.join(changed)} ({detail})" if changed else detail)


def apart(what: str, before: Tensors, after: Tensors, allowed: Tensors, where: str) -> Finding:
    """Return a finding that names every tensor that differs by more than rounding explains."""
    lost, new = before.keys() - after.keys(), after.keys() - before.keys()
    both = {k: t for k, t in before.items() if k in after}
    same = {k: t for k, t in both.items() if t.shape == after[k].shape}
    shapes = [
        f"{k} ({list(t.shape)} became {list(after[k].shape)})" for k, t in both.items() if k not in same
    ]
    found = compare.shares(same, after, allowed)
    worst = max((share for _, share in found.values()), key=lambda s: (s != s, s), default=0.0)
    differing = [key for key, (_, share) in found.items() if not share <= 1]
    every = [f"all {len(found)} tensors"] if len(differing) == len(found) > 1 else differing
    parts = [
        f"{text}: {', '.join(by_layer(keys))}"
        for keys, text in (
            (every, "differ"),
            (shapes, "shape"),
            (sorted(lost), "gone"),
            (sorted(new), "new"),
        )
        if keys
    ]
    if parts:
        relative = [found[key][0] / max(float(before[key].abs().max()), 1e-300) for key in differing]
        parts += [f"by up to {max(relative):.2g} of the largest element"] if relative else []
        return Finding(what, PropertyState.FAIL, where, worst if differing else None, 1.0, "; ".join(parts))
    return Finding(what, PropertyState.PASS, where, worst, 1.0, f"{len(found)} compared")


def by_layer(keys: Sequence[str]) -> list[str]:
    """Return names with the numbers of their layers together: "decoder.layers.[1 3].mlp.router.weight"."""
    numbers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in keys:
        head, layers, rest = key.partition("layers.")
        number, dot, tail = rest.partition(".")
        numbers[(head + layers, dot + tail) if number.isdigit() else (key, "")].append(number)
    return [
        head if not tail else f"{head}{found[0] if len(found) == 1 else '[' + ' '.join(found) + ']'}{tail}"
        for (head, tail), found in numbers.items()
    ]


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for keys, text in ((before.keys() - after.keys(), "gone"), (after.keys() - before.keys(), "new")):
        if keys:
            yield f"{text}: {', '.join(by_layer(sorted(keys)))}"
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"{name}: {before[name]} became {after[name]}"


def _only_in_one(before: ScriptResult, after: ScriptResult, where: str) -> Finding:
    what = "names of logged numbers"
    names = [{n for step in ran.curve.steps.values() for n in step.values} for ran in (before, after)]
    lost, new = (sorted(one - two) for one, two in (names, reversed(names)))
    parts = [f"{text}: {', '.join(found)}" for found, text in ((lost, "gone"), (new, "new")) if found]
    if lost:
        return failed(what, where, "; ".join(parts))
    return passed(what, where, f"warning: {parts[0]}" if parts else f"{len(names[0])} names")


def _on_the_other(task: Path) -> None:
    """Run the jobs of a file; what `megatron` is here is the other one."""
    from megatron_nemotron3.common.ranks import start_server
    from megatron_nemotron3.proof.certify.ranks import PRELOAD

    calls, result, checkout = pickle.loads(task.read_bytes())
    imported = versions.importable()
    if imported is None or not imported.resolve().is_relative_to(checkout):
        sys.exit(f"megatron.core is imported from {imported}, not from {checkout}")
    with (task.parent / "ranks.log").open("w") as log:
        start_server(log, PRELOAD)
    problems = []
    for words, case, place, timeout in calls:
        try:
            run_script(words, case, place, timeout)
        except script_stage.FAILURES as problem:
            problems.append(last_line(problem))
        else:
            problems.append("")
    result.write_bytes(pickle.dumps(problems))


if __name__ == "__main__":
    _on_the_other(Path(sys.argv[1]))
