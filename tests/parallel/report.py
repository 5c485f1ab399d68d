"""The table of docs/measurements.md: `OMP_NUM_THREADS=1 python -m tests.parallel.report [LAYOUT…]`.

Runs every layout for every model, as `make test-full` does, and prints how far from one process it came.
"""

from __future__ import annotations

import logging
import sys
import warnings

from megatron_nemotron3.proof.certify.compare import Distance
from tests.parallel.compare import check
from tests.parallel.layouts import CASES, LAYOUTS, cases


def cell(gradients: Distance, after: Distance) -> str:
    """Largest relative differences of gradients and weights, and the largest share of a tolerance."""
    share = max(gradients.share, after.share)
    return f"{gradients.relative:.0e} / {after.relative:.0e} ({share:.0%})"


def main(names: list[str]) -> None:
    """Print the rows of `names`, or all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| layout | world | " + " | ".join(CASES) + " |")
    print("|-|-|" + "-|" * len(CASES))
    for name in names or LAYOUTS:
        row = LAYOUTS[name]
        cells = [cell(*check(*cases(model, row))) if model in row.models else "" for model in CASES]
        print(f"| {name} | {row.sizes.world_size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
