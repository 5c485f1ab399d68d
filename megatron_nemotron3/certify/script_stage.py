"""The launch's own script: in a small layout against one process, killed and resumed, loaded elsewhere, exported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.args.flag import to_argv
from megatron_nemotron3.certify import noise, observer, resume
from megatron_nemotron3.certify.compare import Distance, farthest
from megatron_nemotron3.certify.finding import Finding, State, failed, passed, untested
from megatron_nemotron3.certify.layouts import Sizes
from megatron_nemotron3.certify.ranks import run_distributed
from megatron_nemotron3.certify.script_run import ScriptRun, chosen_script
from megatron_nemotron3.certify.tensors import Tensors
from megatron_nemotron3.train.log import Curve

if TYPE_CHECKING:
    from megatron_nemotron3.certify.proof import Bench

#: Options of the launch that say how checkpoints are written. The twin's other words do without.
_CHECKPOINTS = re.compile(
    r"--(ckpt-.*|async-.*|no-async-save|use-persistent-ckpt-worker|dist-ckpt-.*|use-dist-ckpt.*"
    r"|distrib-optim-fully-reshardable-.*)"
)
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
#: Printed with three decimals.
_NORM = 1e-3


@dataclass(frozen=True)
class Ran:
    """A run that came to its end, or was killed as planned."""

    seen: observer.Seen
    curve: Curve

    def tensors(self, step: int, kind: str) -> Tensors:
        return self.seen[step, kind]

    def weights(self, step: int) -> Tensors:
        return {k: t for k, t in self.seen[step, observer.WEIGHTS].items() if not k.endswith("expert_bias")}

    def biases(self, step: int) -> Tensors:
        return {k: t for k, t in self.seen[step, observer.WEIGHTS].items() if k.endswith("expert_bias")}


class Scripts:
    """The runs of a launch's script."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.script = chosen_script()
        self.folder = bench.folder / "script"

    @cached_property
    def own_words(self) -> list[str]:
        """How the launch writes its checkpoints."""
        return to_argv([flag for flag in self.bench.flags if _CHECKPOINTS.fullmatch(flag.name)])

    def prepare(self) -> None:
        """Write the initial checkpoints, one of them unchanged and the others nudged, and the text."""
        self.folder.mkdir()
        one = self.bench.case(None, fault=None)
        start = noise.weights(one)
        starts = [start, *(noise.nudged(start, seed) for seed in range(noise.NUDGES))]
        run_distributed(_prepare, 1, one, starts, self.folder, apart=True, children=True)

    def run(self, name: str, sizes: Sizes | None, *words: str, steps: int = 2, **changes: Any) -> Ran:
        """Run the script in a layout. Its exceptions are those of `ScriptRun.start` and `observer.read`."""
        case = self.bench.case(sizes, steps=steps, **({} if sizes else {"fault": None}))
        tokens = case.config.vocab_size
        data = ("--data-path", "1.0", str(self.folder / "text"), "--split", "100,0,0")
        run = ScriptRun(
            script=self.script,
            case=case,
            words=(
                *(*data, "--data-cache-path", str(self.folder / "cache")),
                *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(tokens - 1)),
                *("--eval-iters", "0", "--eval-interval", "100", "--log-interval", "1", *words),
            ),
            folder=self.folder / name,
            timeout=self.bench.timeout,
            **changes,
        )
        run.start()
        return Ran(observer.read(run.folder, run.ranks), run.curve())

    def fresh(self, number: int = 0) -> tuple[str, ...]:
        """Words that start from an initial checkpoint."""
        return ("--load", str(self.folder / "start" / str(number)), "--finetune")


def _prepare(case: Any, starts: Sequence[Tensors], folder: Path) -> None:
    resume.write_initial(case, starts, folder / "start")
    resume.write_text(folder / "text", case.config.vocab_size, 200, case.seq_length)


def script(bench: Bench) -> Iterator[Finding]:
    """Yield what the launch's own script shows."""
    scripts = Scripts(bench)
    scripts.prepare()
    yield passed("script", detail=str(scripts.script))
    try:
        bases = [scripts.run(f"one-{n}", None, *scripts.fresh(n)) for n in range(1 + noise.NUDGES)]
    except (AssertionError, RuntimeError, TimeoutError) as problem:
        yield failed("script in one process", detail=_line(problem))
        return
    first = bench.twin.sizes[0]
    where = str(first)
    saved = scripts.folder / "checkpoints"
    words = (*scripts.fresh(), "--save", str(saved), "--save-interval", "1", *scripts.own_words)
    try:
        killed = scripts.run("layout", first, *words, killed_in=saved)
    except (AssertionError, RuntimeError, TimeoutError) as problem:
        yield failed("script", where, _line(problem))
        return
    terms = bench.twin.batch.sequences * bench.twin.batch.seq_length
    yield from _against(bases, killed, where, terms)
    yield from _resumed(scripts, first, killed, saved)


def _against(bases: Sequence[Ran], found: Ran, where: str, terms: int) -> Iterator[Finding]:
    """Hold a run of two steps against those of one process."""
    base, *nudged = bases

    def compared(what: str, of: Any, least: float = 0.0) -> Finding:
        expected = of(base)
        allowed = noise.spread(expected, [of(run) for run in nudged], terms, least)
        return _finding(farthest(what, expected, of(found), allowed), where)

    yield compared("losses", partial(_logged, r"lm loss"))
    if any(name.startswith("mtp_") for name in base.curve.steps[1].values):
        yield compared("losses of MTP", partial(_logged, r"mtp_\d+ loss"))
    yield compared("gradient norms", partial(_logged, r"grad norm"), _NORM)
    for step in (1, 2):
        yield compared("gradients", lambda ran, step=step: ran.tensors(step, observer.GRADIENTS))
    yield compared("weights", lambda ran: ran.weights(2))
    yield _equal("expert biases", base.biases(2), found.biases(2), where)


def _resumed(scripts: Scripts, sizes: Sizes, killed: Ran, saved: Path) -> Iterator[Finding]:
    where = str(sizes)
    try:
        words = ("--load", str(saved), "--save", str(saved), "--save-interval", "1", *scripts.own_words)
        again = scripts.run("resumed", sizes, *words)
    except (AssertionError, RuntimeError, TimeoutError) as problem:
        yield failed("resuming after a kill", where, _line(problem))
        return
    if sorted(again.curve.steps) != [2]:
        yield failed("resuming after a kill", where, f"it trained steps {sorted(again.curve.steps)}, not 2")
        return
    yield from _same_state("after resuming", {k: again.seen[1, k] for s, k in again.seen if s == 1}, killed, where)


def _same_state(when: str, found: dict[str, Tensors], run: Ran, where: str) -> Iterator[Finding]:
    """A process's first step against the second of `run`, from which it was loaded: equal to the bit."""
    for kind, tensors in found.items():
        step, name = (1, kind.removeprefix(observer.BEFORE)) if kind.startswith(observer.BEFORE) else (2, kind)
        expected = run.tensors(step, name)
        if step == 1:
            expected = {key: t for key, t in expected.items() if key in tensors}
        yield _equal(f"{name} {when}" if step == 2 else f"{name} loaded", expected, tensors, where)


def _equal(what: str, expected: Tensors, found: Tensors, where: str) -> Finding:
    """A finding of what must be equal to the bit."""
    if odd := sorted(expected.keys() ^ found.keys()):
        return failed(what, where, f"{odd[0]} is missing or new")
    for key, value in expected.items():
        if not value.equal(found[key]):
            worst = float((value - found[key]).abs().max())
            return Finding(what, State.FAIL, where, worst, 0.0, key)
    return Finding(what, State.PASS, where, 0.0, 0.0, "to the bit")


def _finding(distance: Distance, where: str) -> Finding:
    state = State.PASS if distance.share <= 1 else State.FAIL
    return Finding(distance.what, state, where, distance.share, 1.0, distance.key)


def _logged(pattern: str, ran: Ran) -> Tensors:
    import torch

    return {
        f"{name}, step {number}": torch.tensor(value, dtype=torch.float64)
        for number, step in sorted(ran.curve.steps.items())
        for name, value in step.values.items()
        if re.fullmatch(pattern, name)
    }


def _line(problem: BaseException) -> str:
    return str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
