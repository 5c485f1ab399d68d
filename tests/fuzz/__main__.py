"""Fuzz every reader of checkpoints, and of texts, tokenizers and media of others.

    python -m tests.fuzz --minutes 10 [--seed N] [--targets hf index …]

Findings are written to tests/fuzz/findings/, which `make test` reads. Exit status 1: there are some.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz.fuzz import fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    return 1 if fuzz(args.targets, 60 * args.minutes, seed, say=lambda line: print(line, flush=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
