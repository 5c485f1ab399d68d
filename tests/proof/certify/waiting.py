"""`nemotron3 certify` with one stage, whose ranks wait: `python -m tests.proof.certify.waiting WORDS…`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from megatron_nemotron3 import __main__ as program
from megatron_nemotron3.common.ranks import Call, run_ranks
from megatron_nemotron3.proof.certify import command, ranks
from megatron_nemotron3.proof.certify.bench import Bench, Finding
from megatron_nemotron3.proof.certify.proof import Stage


def waiting(bench: Bench) -> Iterator[Finding]:
    """Start two ranks. Nothing is found."""
    run_ranks(Call(_told, (os.environ["FIFO"],)), 2, timeout=60, preload=ranks.PRELOAD)
    yield from ()


def _told(fifo: str) -> None:
    with open(fifo, "w") as file:
        print("noise of a rank", flush=True)
        file.write("ready\n")
    time.sleep(60)


if __name__ == "__main__":
    from tests.proof.certify import waiting as module

    ranks.PRELOAD[:] = ["torch"]
    command.STAGES = (Stage("waiting", module.waiting),)
    sys.exit(program.main())
