"""Faults of others: which of them certify finds, that was not built with them.

python -m tests.proof.certify.outside            # run every fault and write what was found
python -m tests.proof.certify.outside NAME …     # run some of them

`outside_faults` was written without knowledge of certify. The stages run in turn until one fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron_nemotron3.proof.certify.bench import last_line
from tests.proof.certify import faults
from tests.proof.certify.catalogue import Fault
from tests.proof.certify.outside_faults import OUTSIDE

PAGE = Path(__file__).parents[3] / "docs" / "certify.md"
#: What was found when it was last written.
GOLDEN = Path(__file__).parents[2] / "golden" / "certify_outside.json"


#: Names of the stages of `faults`, in turn.
STAGES = ("layouts", "definition", "own precision", "script")


def found(name: str) -> dict[str, Any]:
    """What certify finds of a fault, by the first stage that fails."""
    outside = OUTSIDE[name]
    fault = Fault(outside.patch, outside.launch, (), outside.source, everywhere=outside.in_one_process)
    row = {
        "what": fault.what,
        "launch": fault.launch,
        "source": fault.source,
        "found by": [],
        "crash": "",
    }
    for stage in STAGES:
        failures = faults.failures(faults.run(fault.launch, stage, fault))
        # A run that crashes is no fault that ends in silence.
        row["crash"] = failures.pop("training").detail if "training" in failures else row["crash"]
        if failures:
            return row | {"stage": stage, "found by": sorted(failures)}
    return row


def measured() -> dict[str, dict[str, Any]]:
    """What was found when it was last written."""
    rows: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return rows


#: Faults that were found only after they had been seen.
_SEEN = ("balance_logged_twice", "norms_in_bf16", "loss_logged_per_microbatch")
#: Faults that were not found -> why.
_MISSED: dict[str, str] = {}


def counted() -> str:
    """The sentence of the page."""
    rows = measured()
    found = [name for name, row in rows.items() if row["found by"]]
    first = [name for name in found if name not in _SEEN]
    return f"Of {len(rows)} such faults it found {len(first)}, and finds {len(found)} since they are known"


#: Public reports that no launch on a CPU reaches -> why.
_BEYOND = {
    "NVIDIA/Megatron-LM#7400": "gradients of Megatron-FSDP with HybridEP: HybridEP needs a GPU",
    "NVIDIA/Megatron-LM#6237": "the first logged loss averages two steps: both are in every layout",
    "NVIDIA-NeMo/Megatron-Bridge#5634": "adapters of Bridge are not built here",
    "PrimeIntellect-ai/prime-rl#2714": "an engine leaves a tensor unwritten: what `nemotron3 refit` checks",
}


def markdown() -> str:
    """The section of the page of faults."""
    lines = [
        "## Faults of others",
        "",
        "Written without knowledge of certify, most of them after public reports. `python -m "
        f"tests.proof.certify.outside` runs them. {counted()}.",
        "",
        "| fault | launch | found by | source |",
        "|-|-|-|-|",
    ]
    for name, row in measured().items():
        by = (
            ", ".join(row["found by"]) + " (since it is known)" * (name in _SEEN)
            or f"**not found**: {_MISSED[name]}"
        )
        what = row["what"].rstrip(".")
        lines.append(f"| {name}: {what} | {row['launch']} | {by} | {row['source']} |")
    lines += ["", "Reports that certify does not reach:", ""]
    lines += [f"- {source}: {reason}" for source, reason in _BEYOND.items()]
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    """Run faults, print what is found, and write it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints a great deal on every rank
    rows = measured()
    for name in names or OUTSIDE:
        begin = time.monotonic()
        try:
            rows[name] = found(name)
        except Exception as problem:  # a defect of the proof
            rows[name] = {"what": name, "error": last_line(problem), "found by": []}
        print(f"{name} {time.monotonic() - begin:.0f} s {rows[name]}", file=out, flush=True)
        ordered = {one: rows[one] for one in OUTSIDE if one in rows}
        GOLDEN.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
