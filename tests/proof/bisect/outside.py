"""Faults of others: what bisect says of those that it was not built with.

python -m tests.proof.bisect.outside            # run the third set and write what was found
python -m tests.proof.bisect.outside NAME …     # run some, of the other sets, too

All sets were written without knowledge of bisect's hypotheses. The first one was seen while `changes` was
written, the second one while `structure` was, the third one by nobody who wrote bisect: what bisect said of a
set before it was seen stands in the file of results as "held out". Whether a cause that is named is the right
one was judged by hand, once, and stands there, too; a cause that changes is judged anew.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.proof.bisect.diagnose import Investigation, Side, cause_table
from tests.proof.bisect import faults
from tests.proof.bisect import outside_faults as first
from tests.proof.bisect import outside_faults_2 as second
from tests.proof.bisect import outside_faults_3 as third
from tests.proof.bisect import outside_faults_3b as third_b
from tests.proof.bisect.systems import MODEL, Engine, checkpoint, tokens

THIRD = third.OUTSIDE_3 | third_b.OUTSIDE_3B
OUTSIDE = first.OUTSIDE | second.OUTSIDE_2 | THIRD
PAGE = Path(__file__).parents[3] / "docs" / "bisect.md"
#: What was found when it was last written.
GOLDEN = Path(__file__).parents[2] / "golden" / "bisect_outside.json"


@cache
def _investigation() -> Investigation:
    return Investigation(faults.investigation().model)


def side_of(name: str, hidden: bool = True) -> Side:
    """What bisect says of the engine with a fault, in FP32; inside `world_of_one`."""
    fault = OUTSIDE[name]
    weights = checkpoint() if fault.weights is None else fault.weights(checkpoint())
    engine = Engine(weights, torch.float32, fault.decode)
    if fault.engine is not None:
        fault.engine(engine)
    scored = tuple(engine.score(*one) for one in tokens())
    return _investigation().side("engine", faults.recording(scored, "hf", torch.float32, hidden))


def row_of(name: str, side: Side) -> dict[str, Any]:
    """What is right in it, but for the cause."""
    fault, listed = OUTSIDE[name], {cause.name for cause in cause_table(MODEL)}
    return {
        "what": fault.what,
        "source": fault.source,
        "side": side.deviates,
        "layer": faults.kind_of(side) == fault.kind and fault.layer in (None, side.layer),
        "named": [one.cause for one in side.explanations[:3]],
        "of the list": bool(side.explanations) and side.explanations[0].cause in listed,
        "rest": bool(side.rest),
        "known": side.known,
    }


def measured() -> dict[str, dict[str, Any]]:
    """What was found when it was last written."""
    rows: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return rows


def counted() -> str:
    """The sentence of the page."""
    rows = measured()
    unseen = [rows[name]["held out"] for name in THIRD]
    old = [rows[name] for name in second.OUTSIDE_2]
    named, before, after = (_right(of) for of in (unseen, [row["held out"] for row in old], old))
    return (
        f"Of {len(unseen)} such faults it named the side of all, and the cause of {named}; of {len(old)} "
        f"earlier ones the cause of {before}, and of {after} after they were seen"
    )


def _right(rows: list[dict[str, Any]]) -> int:
    return sum(row["right"] is True for row in rows)


def main(names: list[str]) -> None:
    """Run faults, print what is found, and write it."""
    from tests.support.world import world_of_one

    torch.set_num_threads(1)  # other processes share the processors
    rows = measured()
    with world_of_one():
        for name in names or THIRD:
            begin = time.monotonic()
            row = row_of(name, side_of(name))
            old = rows.get(name, {})
            row["held out"] = old.get("held out", {"named": row["named"], "right": None})
            row["right"] = old.get("right") if old.get("named") == row["named"] else None
            rows[name] = row
            print(f"{name} {time.monotonic() - begin:.0f} s {row}", flush=True)
            ordered = {one: rows[one] for one in second.OUTSIDE_2 | THIRD if one in rows}
            GOLDEN.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
