"""Faults of others: which of them certify finds, that was not built with them.

python -m tests.proof.certify.outside              # run the last set and write what was found
python -m tests.proof.certify.outside 1 [NAME …]   # run those of a set, or some of them

Each set was written without knowledge of certify. The stages run in turn until one fails that does not fail
without the fault.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_nemotron3.proof.certify.bench import last_line
from tests.proof.certify import faults, outside_faults, outside_faults_2, outside_faults_3
from tests.proof.certify.catalogue import LAUNCHES, Fault

PAGE = Path(__file__).parents[3] / "docs" / "certify.md"
_GOLDEN = Path(__file__).parents[2] / "golden"

#: Names of the stages of `faults`, in turn.
STAGES = ("layouts", "definition", "own precision", "script")


@dataclass(frozen=True)
class FaultSet:
    """Faults of one author."""

    faults: Mapping[str, outside_faults.OutsideFault]
    #: What was found when it was last written.
    golden: Path
    #: Faults that were found only after they had been seen.
    seen: tuple[str, ...] = ()
    #: Faults of the conversion, which this process makes.
    converting: tuple[str, ...] = ()

    def measured(self) -> dict[str, dict[str, Any]]:
        """What was found when it was last written."""
        rows: dict[str, dict[str, Any]] = json.loads(self.golden.read_text()) if self.golden.exists() else {}
        return rows


SETS = {
    "1": FaultSet(
        outside_faults.OUTSIDE,
        _GOLDEN / "certify_outside.json",
        seen=("balance_logged_twice", "norms_in_bf16", "loss_logged_per_microbatch"),
    ),
    "2": FaultSet(
        outside_faults_2.OUTSIDE,
        _GOLDEN / "certify_outside_2.json",
        seen=("expert_bias_not_saved", "attention_exported_by_kind"),
        converting=("attention_exported_by_kind",),
    ),
    "3": FaultSet(
        outside_faults_3.OUTSIDE,
        _GOLDEN / "certify_outside_3.json",
        converting=("depths_as_blocks_in_export", "exported_bias_rounded"),
    ),
}


def found(number: str, name: str) -> dict[str, Any]:
    """What certify finds of a fault of a set, by the first stage that fails because of it."""
    outside = SETS[number].faults[name]
    fault = Fault(outside.patch, outside.launch, (), outside.source, everywhere=outside.in_one_process)
    row: dict[str, Any] = {
        "what": fault.what,
        "launch": fault.launch,
        "source": fault.source,
        "found by": [],
        "crash": "",
    }
    for stage in STAGES:
        if stage == "definition" and LAUNCHES[outside.launch].padded is not None:
            continue  # its rows have no padding between documents
        if name in SETS[number].converting:
            outside.patch()
        try:
            failures = faults.failures(faults.run(fault.launch, stage, fault))
        finally:
            mock.patch.stopall()
        # A run that crashes is no fault that ends in silence.
        row["crash"] = failures.pop("training").detail if "training" in failures else row["crash"]
        if failures:
            alarms = faults.failures(faults.healthy(fault.launch, stage))
            row |= {"alarms": sorted(alarms)} if alarms else {}
            failures = {what: one for what, one in failures.items() if what not in alarms}
        if failures:
            return row | {"stage": stage, "found by": sorted(failures)}
    return row


#: Public reports that no launch on a CPU reaches -> why.
_BEYOND = {
    "NVIDIA/Megatron-LM#7400": "gradients of Megatron-FSDP with HybridEP: HybridEP needs a GPU",
    "NVIDIA/Megatron-LM#6237": "the first logged loss averages two steps: both are in every layout",
    "NVIDIA-NeMo/Megatron-Bridge#5634": "adapters of Bridge are not built here",
    "PrimeIntellect-ai/prime-rl#2714": "an engine leaves a tensor unwritten: what `nemotron3 refit` checks",
}


def counted() -> str:
    """The sentence of the page."""
    found = {n: [one for one, row in s.measured().items() if row["found by"]] for n, s in SETS.items()}
    first = [sum(one not in SETS[n].seen for one in found[n]) for n in SETS]
    sizes = [len(chosen.measured()) for chosen in SETS.values()]
    given, right = (" and ".join((", ".join(map(str, n[:-1])), str(n[-1]))) for n in (sizes, first))
    return (
        f"Of {given} such faults it found {right}, and it finds {sum(map(len, found.values()))} of the "
        f"{sum(sizes)} since they are known"
    )


def markdown() -> str:
    """The section of the page of faults."""
    lines = [
        "## Faults of others",
        "",
        "Three sets of three authors, each written without knowledge of certify, most faults after public "
        f"reports. `python -m tests.proof.certify.outside` runs the last. {counted()}.",
    ]
    for number, chosen in SETS.items():
        lines += ["", f"### Set {number}", "", "| fault | launch | found by | source |", "|-|-|-|-|"]
        for name, row in chosen.measured().items():
            by = ", ".join(row["found by"]) + " (since it is known)" * (name in chosen.seen)
            what = row["what"].rstrip(".")
            lines.append(f"| {name}: {what} | {row['launch']} | {by or '**not found**'} | {row['source']} |")
    lines += ["", "Reports that certify does not reach:", ""]
    lines += [f"- {source}: {reason}" for source, reason in _BEYOND.items()]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    """Run faults, print what is found, and write it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints a great deal on every rank
    number = words.pop(0) if words and words[0] in SETS else max(SETS)
    chosen = SETS[number]
    rows = chosen.measured()
    for name in words or chosen.faults:
        begin = time.monotonic()
        try:
            rows[name] = found(number, name)
        except Exception as problem:  # a defect of the proof
            rows[name] = {"what": name, "error": last_line(problem), "found by": []}
        print(f"{name} {time.monotonic() - begin:.0f} s {rows[name]}", file=out, flush=True)
        ordered = {one: rows[one] for one in chosen.faults if one in rows}
        chosen.golden.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
