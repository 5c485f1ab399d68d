"""Write golden/invariants: what tests/test_invariants.py compares.

    python -m tests.golden.make_invariants [NAME ...]        # of `MEASURED` in tests/support/invariants.py

Without names all files. Write them anew only after a change that is meant, and read the difference: it lists
what users see.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

from tests.support.invariants import BUILT, GOLDEN, MEASURED
from tests.support.world import world_of_one


def main(names: list[str]) -> None:
    """Write the files, one a name."""
    GOLDEN.mkdir(exist_ok=True)
    for name in names or MEASURED:
        with world_of_one() if name in BUILT else nullcontext():
            text = json.dumps(MEASURED[name](), indent=1, ensure_ascii=False)
        (GOLDEN / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
