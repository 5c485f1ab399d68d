"""CPU seconds to plan a refit of many ranks: `python benchmarks/refit_plan.py`."""

from __future__ import annotations

import time

from common import parser, show

from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.models import get

#: (model, trainer, servers)
CASES = (
    ("super", "tp=2,ep=8,pp=4", "tp=8"),
    ("super", "tp=2,ep=64,dp=1024", "tp=8,replicas=256"),
    ("ultra", "tp=8,ep=64,dp=256", "tp=8,ep=8,replicas=256"),
)


def main() -> None:
    """Print one line for each case."""
    parser(__doc__).parse_args()
    rows = []
    for name, source, target in CASES:
        config = get(name)
        training, serving = Training.of(config, source), EngineLayout.of(config, target)
        began = time.process_time()
        plan = make_plan(training, serving)
        took = time.process_time() - began
        rows.append(
            {
                "model": name,
                "trainer": f"{source}: {training.layout.world_size:,} ranks",
                "servers": f"{target}: {serving.size:,} ranks",
                "transfers": len(plan.transfers),
                "steps": plan.steps,
                "planned, s": f"{took:.1f}",
                "busiest sender, bytes": plan.load().sent,
            }
        )
    show(rows)


if __name__ == "__main__":
    main()
