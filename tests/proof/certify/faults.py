"""The catalogue of seeded faults: what a proof must find, where, and by which property.

Each fault is a patch of Megatron or of this package, active on the ranks of a test alone.

python -m tests.proof.certify.faults            # run every fault and write the figures of the table
python -m tests.proof.certify.faults NAME …     # run some of them
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_nemotron3.launch import command_line
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.proof.certify import proof, proxy
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, last_line
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.layouts import Sizes
from tests.parallel.case import Scenario
from tests.proof.certify.catalogue import FAULTS, LAUNCHES, Fault

#: What was found when the table was last written.
GOLDEN = Path(__file__).parents[2] / "golden" / "certified_faults.json"


@dataclass(frozen=True, kw_only=True)
class FaultyBench(Bench):
    """A bench whose single process is healthy, unless the fault is one there, too.

    A fault of ranks between them changes nothing in one process, so that all faults of a launch share one.
    """

    everywhere: bool = False
    #: What the training has beside what follows from the launch.
    changes: Mapping[str, Any] = field(default_factory=dict)

    def case(self, sizes: Sizes | None, **changes: Any) -> TrainingCase:
        """Return the training in a layout, with the fault, or in one process."""
        healthy = {"fault": None} if sizes is None and not self.everywhere else {}
        made = super().case(sizes)
        own = {each.name: getattr(made, each.name) for each in fields(made)}
        return Scenario(**(own | healthy | dict(self.changes) | changes))


def _saving(bench: Bench) -> Iterator[Finding]:
    """Save after each step of two, all ranks killed in the second save, and read what was saved first."""
    from megatron_nemotron3.proof.certify import script_stage

    scripts, killed = _killed(bench)
    yield from script_stage.checkpoint_findings(scripts, killed, str(bench.proxy.sizes[0]))


def _resuming(bench: Bench) -> Iterator[Finding]:
    """Resume in the same layout what a healthy run saved."""
    from megatron_nemotron3.proof.certify import script_stage

    healthy, killed = _healthy_save(bench.flags, bench.proxy.sizes[0].layout.world_size)
    scripts = script_stage.ScriptRuns(bench)
    scripts.write_data()
    shutil.copytree(healthy.saved, scripts.saved)
    sizes = bench.proxy.sizes[0]
    yield from script_stage.resume_findings(scripts, sizes, killed, str(sizes))


def _export(bench: Bench) -> Iterator[Finding]:
    """Export what a healthy run saved, and read it back, in this process."""
    from megatron_nemotron3.proof.certify import script_stage

    healthy, killed = _healthy_save(bench.flags, bench.proxy.sizes[0].layout.world_size)
    scripts = script_stage.ScriptRuns(bench)
    shutil.copytree(healthy.saved, scripts.saved)
    if bench.fault is not None:
        bench.fault()
    try:
        yield from script_stage.checkpoint_findings(scripts, killed, str(bench.proxy.sizes[0]))
    finally:
        mock.patch.stopall()


def _killed(bench: Bench) -> tuple[Any, Any]:
    """The scripts of a launch, and their run of two steps that was killed in its second save."""
    from megatron_nemotron3.proof.certify import script_stage

    scripts = script_stage.ScriptRuns(bench)
    scripts.write_data()
    return scripts, scripts.run("layout", bench.proxy.sizes[0], *scripts.saving, killed_in=scripts.saved)


def _one_process(bench: Bench) -> Iterator[Finding]:
    """The script's one process against its definition."""
    from megatron_nemotron3.proof.certify import script_stage

    scripts = script_stage.ScriptRuns(bench)
    scripts.write_data()
    scripts.write_starts()
    yield from script_stage.defined_findings(scripts, scripts.run_bases())


@cache
def _healthy_save(flags: tuple[Flag, ...], ranks: int) -> tuple[Any, Any]:
    """`_killed` without a fault, in a folder that stays until the process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return _killed(Bench(proxy=_proxy(flags, ranks), flags=flags, folder=Path(folder.name)))


#: Stages of the proof, or parts of them, by the names that the catalogue has.
STAGES: dict[str, Callable[[Any], Iterator[Finding]]] = {
    "layouts": proof.layouts,
    "definition": proof.imported("definition", "definition"),
    "own precision": proof.imported("own_precision", "own_precision"),
    "script": proof.imported("script_stage", "script"),
    "one process": _one_process,
    "saving": _saving,
    "resuming": _resuming,
    "export": _export,
    "formats": proof.formats,
    "memory": proof.memory,
    "rules": proof.rules,
}
#: Stages of which the launch is damaged, and no function.
STATIC = ("formats", "memory", "rules")


def run(launch: str, stage: str, fault: Fault | None) -> list[Finding]:
    """Return what a stage of the proof says of a launch."""
    given = LAUNCHES[launch]
    damaged = fault is not None and stage in STATIC
    with tempfile.TemporaryDirectory() as folder:
        text = given.text(Path(folder))
        if damaged:
            text += " " + fault.patch(Path(folder))
        flags = tuple(command_line.read_launch(text).flags)
        bench = FaultyBench(
            proxy=_proxy(flags, given.ranks),
            flags=flags,
            folder=Path(folder),
            gpu=given.gpu,
            fault=None if damaged or fault is None else fault.patch,
            everywhere=fault is not None and fault.everywhere,
            changes={} if given.padded is None else {"documents": given.documents, "padded": given.padded},
        )
        return list(STAGES[stage](bench))


@cache
def _proxy(flags: tuple[Flag, ...], ranks: int) -> proxy.ProxyLaunch:
    return proxy.make(LaunchRequest(flags=flags, world_size=ranks or None), ranks or 8)


@cache
def healthy(launch: str, stage: str) -> list[Finding]:
    """Return what a stage says without a fault."""
    return run(launch, stage, None)


def failures(found: list[Finding]) -> dict[str, Finding]:
    """Return the properties that failed, each where it is farthest."""
    worst: dict[str, Finding] = {}
    for finding in found:
        if finding.state is PropertyState.FAIL:
            old = worst.get(finding.name)
            if old is None or (finding.difference or 0) > (old.difference or 0):
                worst[finding.name] = finding
    return worst


def measured() -> dict[str, dict[str, str]]:
    """Return what was found when the table was last written."""
    rows: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return rows


def _row(fault: Fault, found: dict[str, Finding]) -> dict[str, str]:
    finding = next(found[name] for name in fault.found_by if name in found)
    known = finding.difference is not None and finding.tolerance
    share = f"{finding.difference / finding.tolerance:.2g}" if known else ""
    # A precision file lies in a temporary folder.
    where = Path(finding.where).name if finding.where.startswith("/") else finding.where
    return {"found by": finding.name, "where": where, "share": share}


def main(names: list[str]) -> None:
    """Run faults, print what finds them, and write it to the file of figures.

    Raises:
        SystemExit: there is no such fault, or one of them was not found as the catalogue says.
    """
    if unknown := [name for name in names if name not in FAULTS]:
        raise SystemExit(f"no such fault: {unknown[0]}; there are: {', '.join(FAULTS)}")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints a great deal on every rank
    say = functools.partial(print, file=out, flush=True)
    rows = {name: row for name, row in measured().items() if name in FAULTS}
    missed = []
    for name in names or FAULTS:
        fault, begin = FAULTS[name], time.monotonic()
        try:
            alarms = failures(healthy(fault.launch, fault.stage))
            found = failures(run(fault.launch, fault.stage, fault))
        except Exception as problem:  # a defect of the proof
            say(f"ERROR {name}: {last_line(problem)}")
            missed.append(name)
            continue
        right = not alarms and set(fault.found_by) <= found.keys() and "training" not in found
        say(f"{'ok' if right else 'MISS'} {name} [{fault.launch}] {time.monotonic() - begin:.1f} s")
        for finding in alarms.values():
            say(f"      FALSE ALARM {finding}"[:200])
        for finding in found.values():
            say(f"      {finding.name}: {finding.difference} {finding.detail}"[:200])
        if right:
            rows[name] = _row(fault, found)
            ordered = {name: rows[name] for name in FAULTS if name in rows}
            GOLDEN.write_text(json.dumps(ordered, indent=1) + "\n")
        else:
            missed.append(name)
    if missed:
        raise SystemExit(f"not as the catalogue says: {', '.join(missed)}")


# --- the page --------------------------------------------------------------------------------------------

_HEAD = """\
# Faults that certify finds

Each row is a fault that ends with no error message: a patch of Megatron-Core or of this package that is
active in a test alone (`tests/proof/certify/*_faults.py`), or damage to a launch. The proof of a small launch
with the fault fails by the property named, and the proof of the same launch without it passes. A run that
crashes does not count as found.

- *launch*: the small launch that has the fault (`tests/proof/certify/catalogue.py`). Each is of Super's form:
  latent experts, a shared expert, two MTP depths.
- *over tolerance*: the largest difference over what rounding explains; 1 is the limit. Copies of a weight or
  gradient on several ranks, numbers that all ranks report, and expert biases must be equal to the bit.
- *source*: a public report of the same fault. Others are of the kinds that such reports are about.

`python -m tests.proof.certify.faults` runs all of them and writes the figures; `make test-full` tests them.
This page is generated by `python -m tests.docs.pages`, from the root of a checkout.
"""


def markdown() -> str:
    """The page."""
    return "\n".join((_HEAD, f"## The {len(FAULTS)} faults\n", *_table())) + "\n"


def _table() -> Iterator[str]:
    yield "| fault | launch | found by | over tolerance | source |"
    yield "|-|-|-|-|-|"
    rows = measured()
    for name, fault in FAULTS.items():
        row = rows[name]
        share = "not equal" if row["share"] in ("", "inf") else _plain(float(row["share"]))
        what = fault.what.rstrip(".")
        yield f"| {name}: {what} | {fault.launch} | {row['found by']} | {share} | {fault.source} |"


def _plain(share: float) -> str:
    return f"{share:,.0f}" if share >= 10 else f"{share:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
