"""No false alarm over random legal launches.

    python -m tests.proof.certify.random_launches --number 100 --seed 0

Each launch is proven as `nemotron3 certify` proves it. What came out of each is one line of a file, so a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, failed
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.proof import STAGES, Stage, prove
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch, make
from tests.proof.certify.drawn import RandomLaunch, launches
from tests.properties.strategies import draw_many

#: Ranks of a proxy.
RANKS = 8


def proxy_of(launch: RandomLaunch) -> ProxyLaunch:
    """Return the proxy that the command makes of a launch."""
    flags = parse(launch.words)
    return make(
        LaunchRequest(flags=tuple(flags), world_size=launch.world_size, vocab_size=launch.vocab_size),
        RANKS,
    )


def findings(
    launch: RandomLaunch, timeout: float = 300, stages: Sequence[Stage] | None = None
) -> list[Finding]:
    """Return the findings of a proof. An exception, which none should raise, is one that failed.

    Args:
        stages: its parts; None: all.
    """
    try:
        return _findings(launch, timeout, stages)
    except Exception as error:
        return [failed(type(error).__name__, "", (str(error).strip() or "?").splitlines()[-1])]


def _findings(launch: RandomLaunch, timeout: float, stages: Sequence[Stage] | None) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            proxy=proxy_of(launch), flags=tuple(parse(launch.words)), folder=Path(folder), timeout=timeout
        )
        return list(prove(bench, stages))


def record(number: int, launch: RandomLaunch, timeout: float, stages: Sequence[Stage]) -> dict[str, Any]:
    """Return what the file says of a launch: how many findings of each kind, those that failed in full."""
    start = time.monotonic()
    found = findings(launch, timeout, stages)
    return {
        "number": number,
        "words": launch.words,
        "world_size": launch.world_size,
        "vocab_size": launch.vocab_size,
        "seconds": round(time.monotonic() - start, 1),
        "states": dict(Counter(finding.state.value for finding in found)),
        "largest": max(
            (f.difference / f.tolerance for f in found if f.difference is not None and f.tolerance),
            default=0.0,
        ),
        "failed": [[f.name, f.where, f.difference, f.detail] for f in found if f.state is PropertyState.FAIL],
    }


def main(words: list[str]) -> int:
    """Prove the launches that the file does not have yet. Return 1 if anything failed, also earlier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--file", type=Path, default=Path("random_launches.jsonl"))
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run in one layout")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that time")
    parser.add_argument("--without", nargs="*", default=[], metavar="TITLE", help="stages to leave out")
    args = parser.parse_args(words)
    stages = [stage for stage in STAGES if stage.title not in args.without]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start, wrong = time.monotonic(), 0
    done = {}
    if args.file.exists():
        done = {entry["number"]: entry for entry in map(json.loads, args.file.read_text().splitlines())}
    for number, launch in enumerate(draw_many(launches(), args.number, args.seed)):
        entry = done.get(number)
        if entry is None or tuple(entry["words"]) != launch.words:
            if time.monotonic() - start > args.seconds:
                break
            entry = record(number, launch, args.timeout, stages)
            with args.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(f"{number}: {entry['seconds']} s, {entry['states']}, {entry['failed']}", flush=True)
        wrong += bool(entry["failed"])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
