"""CPU seconds to plan a refit of many ranks: `python benchmarks/refit_plan.py`."""

from __future__ import annotations

import argparse
import time

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
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, source, target in CASES:
        config = get(name)
        training, serving = Training.of(config, source), EngineLayout.of(config, target)
        begin = time.process_time()
        plan = make_plan(training, serving)
        made = time.process_time()
        load = plan.load()
        print(
            f"{name}: {training.layout.world_size:,} to {serving.size:,} ranks, {len(plan.transfers):,} "
            f"transfers in {plan.steps:,} steps: planned in {made - begin:.1f} s; "
            f"busiest sender {load.sent:,} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
