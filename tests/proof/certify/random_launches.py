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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.launch.rules import RuleError
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, failed
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.proof import STAGES, Stage, prove
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch, make
from tests.properties.step import Case
from tests.properties.strategies import cases, draw_many, errors

#: Worlds of the launches; the proxy has at most 8 ranks.
WORLDS = (2, 4, 8, 8, 12, 16, 16, 32, 32, 64, 64)
_PACKED = ("--sft", "--calculate-per-token-loss")
_DOCUMENTS = ("--dataloader-inter-document-masking",)


@dataclass(frozen=True)
class RandomLaunch:
    """A command line and its world."""

    words: tuple[str, ...]
    world_size: int
    vocab_size: int


@st.composite
def launches(draw: Callable[[Any], Any]) -> RandomLaunch:
    """A launch that no rule refuses."""
    case = draw(cases(draw(st.sampled_from(WORLDS))))
    precision, backend = draw(
        st.sampled_from((("fp32", "torch"), ("bf16", "torch"), ("bf16", "te"), ("nvfp4", "te")))
    )
    options = (*case.extra, *_data(draw, case), *_optimizer(draw, case), *_router(draw, case))
    if precision == "nvfp4":
        case = _wide(case)
    case = replace(
        case,
        precision=precision,
        backend=backend,
        gpu=draw(st.sampled_from((None, "gb200", "h100"))) if backend == "te" else None,
        extra=options,
        te_precision_config_file="precision.yaml" if precision == "nvfp4" else None,
    )
    assume(not errors(case))
    try:
        words = case.argv()
    except RuleError:  # a rule about a part that `errors` has at its default
        assume(False)
    return RandomLaunch(tuple(words), case.layout.world_size, case.config.vocab_size)


def _data(draw: Callable[[Any], Any], case: Case) -> tuple[str, ...]:
    """Packing, masks and what the loss is divided by."""
    return draw(  # type: ignore[no-any-return]
        st.sampled_from(((), (), ("--calculate-per-token-loss",), ("--eod-mask-loss",), _PACKED, _DOCUMENTS))
    )


def _optimizer(draw: Callable[[Any], Any], case: Case) -> tuple[str, ...]:
    """Communication that overlaps, several instances, and what a step does."""
    words: tuple[str, ...] = ()
    if draw(st.booleans()):
        words += ("--overlap-grad-reduce",)
        words += ("--overlap-param-gather",) if case.distributed_optimizer and draw(st.booleans()) else ()
    copies = case.layout.dp * case.layout.cp
    if case.distributed_optimizer and copies % 2 == 0 and draw(st.booleans()):
        words += ("--num-distributed-optimizer-instances", "2")
    words += draw(st.sampled_from(((), ("--clip-grad", "0.5"), ("--weight-decay", "0.1"))))
    return words


def _router(draw: Callable[[Any], Any], case: Case) -> tuple[str, ...]:
    """What else the router does."""
    words: tuple[str, ...] = ()
    if not case.config.is_moe:
        return words
    words += draw(st.sampled_from(((), ("--moe-z-loss-coeff", "1e-3"))))
    words += draw(st.sampled_from(((), (), ("--moe-router-dtype", "fp32"))))
    return words


def _wide(case: Case) -> Case:
    """The case with widths and tokens in blocks of 32, as 4-bit products need them."""
    config = case.config
    names = ("hidden_size", "kv_channels", "mamba_head_dim", "dense_ffn_hidden_size", "moe_ffn_hidden_size")
    names += ("moe_shared_expert_intermediate_size", "moe_latent_size")
    wide = {name: 32 * value for name in names if (value := getattr(config, name)) is not None}
    groups = config.mamba_num_groups
    state = {"mamba_state_dim": 32, "mamba_num_heads": 32 * config.mamba_num_heads // groups * groups}
    schedule = replace(case.schedule, seq_length=32 * case.schedule.seq_length)
    return replace(case, config=config.but(**wide, **state), schedule=schedule)


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
