"""The seeded faults, and what bisect says of each.

python -m tests.proof.bisect.faults            # run every fault and write the figures of the table
python -m tests.proof.bisect.faults NAME …     # run some of them
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.proof.bisect.diagnose import Diagnosis, Investigation, Side
from megatron_nemotron3.proof.bisect.recompute import Recomputation
from megatron_nemotron3.proof.bisect.recording import Recording, Sequence
from tests.proof.bisect.damage import earlier
from tests.proof.bisect.fault_list import FAULTS
from tests.proof.bisect.systems import (
    MODEL,
    Engine,
    Scored,
    Trainer,
    Weights,
    checkpoint,
    healthy_engine,
    tokens,
)
from tests.support.hf_folders import write_hf

#: What was found when the table was last written.
GOLDEN = Path(__file__).parents[2] / "golden" / "bisect_faults.json"


#: How the systems run, and what is recorded: type and whether hidden states and router choices are.
MODES = {
    "FP32, hidden states": (torch.float32, True),
    "FP32, log-probabilities": (torch.float32, False),
    "BF16, hidden states": (torch.bfloat16, True),
    "BF16, log-probabilities": (torch.bfloat16, False),
}


def recording(scored: tuple[Scored, ...], system: str, dtype: torch.dtype, hidden: bool) -> Recording:
    """What a system computed as a recording."""
    sequences = [
        Sequence(
            one.ids,
            one.prompt,
            one.logprobs[one.prompt - 1 :],
            one.routing if hidden else {},
            one.hidden if hidden else {},
            {1: one.mtp[one.prompt - 2 :]} if len(one.mtp) else {},
        )
        for one in scored
    ]
    return Recording(system, str(dtype).removeprefix("torch."), sequences, MODEL.name)


def opened(folder: Path, weights: Weights) -> Recomputation:
    """The model with weights, written to a folder of Hugging Face's format and opened from there."""
    write_hf(folder, MODEL, values=weights)
    model = Recomputation.open(folder, MODEL)
    source: Any = model.definition.weights.source
    source.read = cache(source.read)  # the files are small, and every cause reads them again
    return model


@cache
def investigation() -> Investigation:
    """The checkpoint and the one before it."""
    folder = Path(tempfile.mkdtemp())
    return Investigation(opened(folder / "now", checkpoint()), opened(folder / "before", earlier()))


@cache
def healthy_trainer(dtype: torch.dtype) -> tuple[Scored, ...]:
    """Megatron in FP32; in BF16 transformers, which Megatron's CPU kernels do not compute."""
    if dtype != torch.float32:
        return healthy_engine(dtype)
    trainer = Trainer(checkpoint())
    return tuple(trainer.score(*one) for one in tokens())


@cache
def faulty(name: str, dtype: torch.dtype) -> tuple[Scored, ...]:
    """What the damaged system computes."""
    fault = FAULTS[name]
    weights: Weights = fault.weights(checkpoint()) if fault.weights is not None else checkpoint()
    system: Any
    if fault.side == "trainer":
        system = Trainer(weights, dtype, **(fault.options or {}))
        if fault.trainer is not None:
            fault.trainer(system)
    else:
        system = Engine(weights, dtype, fault.decode)
        if fault.engine is not None:
            fault.engine(system)
    scored = tuple(system.score(*one) for one in tokens())
    for one in scored if fault.shift is not None else ():
        one.logprobs = fault.shift(one.logprobs)
    return scored


def diagnose(name: str, mode: str) -> Diagnosis:
    """What bisect says of a fault; inside `world_of_one`."""
    fault, (dtype, hidden) = FAULTS[name], MODES[mode]
    damaged = faulty(name, dtype)
    if fault.side == "trainer":
        pair = (
            recording(damaged, "megatron", dtype, hidden),
            recording(healthy_engine(dtype), "hf", dtype, hidden),
        )
    else:
        other = healthy_trainer(dtype)
        pair = recording(other, "megatron", dtype, hidden), recording(damaged, "hf", dtype, hidden)
    return investigation().compare(*pair)


def kind_of(side: Side) -> str | None:
    """Letter of the kind that bisect names."""
    if side.mtp_only:
        return "mtp"
    if side.layer is not None and side.layer < len(MODEL.pattern):
        return MODEL.pattern[side.layer]
    return "model" if side.explanations or side.layer is not None else None


def verdict(name: str, found: Diagnosis) -> dict[str, Any]:
    """What is right in a diagnosis."""
    fault = FAULTS[name]
    side = getattr(found, fault.side)
    names = [one.cause for one in side.explanations]
    right = [bool(re.fullmatch(fault.cause, one)) for one in names]
    return {
        "side": found.deviating == [fault.side],
        "wrong side": (set(found.deviating) - {fault.side}) != set(),
        "kind": kind_of(side) == fault.kind,
        "layer": fault.layer is None or side.layer == fault.layer,
        "cause": bool(right and right[0]),
        "among": any(right),
        "named": names,
        "noise": round(max(side.noise, side.mtp_noise), 1),
        "position": side.position,
        "at": side.layer,
    }


def measured() -> dict[str, dict[str, Any]]:
    """What was found when the table was last written."""
    rows: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
    return rows


def main(names: list[str]) -> None:
    """Run faults, print what is found, and write the figures."""
    if unknown := [name for name in names if name not in FAULTS]:
        raise SystemExit(f"no such fault: {unknown[0]}; there are: {', '.join(FAULTS)}")
    from tests.support.world import world_of_one

    rows = {name: row for name, row in measured().items() if name in FAULTS}
    with world_of_one():
        for name in names or FAULTS:
            rows[name] = {}
            for mode in MODES:
                if FAULTS[name].side == "trainer" and mode != "FP32, log-probabilities":
                    continue
                begin = time.monotonic()
                row = verdict(name, diagnose(name, mode))
                rows[name][mode] = row
                word = "ok" if row["cause"] and row["kind"] and row["layer"] and row["side"] else "MISS"
                word = "BLAME" if row["wrong side"] else word
                print(f"{word} {name} [{mode}] {time.monotonic() - begin:.1f} s {row}", flush=True)
            ordered = {name: rows[name] for name in FAULTS if name in rows}
            GOLDEN.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
