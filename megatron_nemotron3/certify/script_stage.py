"""The launch's own script: against one process, killed and resumed, loaded in other layouts, exported."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.args.flag import to_argv
from megatron_nemotron3.certify import noise, observer, resume, stored
from megatron_nemotron3.certify.compare import farthest
from megatron_nemotron3.certify.finding import Finding, State, failed, passed, untested
from megatron_nemotron3.certify.layouts import Sizes
from megatron_nemotron3.certify.proof import Bench, last_line
from megatron_nemotron3.certify.ranks import run_distributed
from megatron_nemotron3.certify.script_run import ScriptRun, script_of
from megatron_nemotron3.certify.tensors import Tensors
from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.train.data.indexed import write_dataset
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo
from megatron_nemotron3.train.log import Curve

#: Options of the launch that say how checkpoints are written. The twin's other words do without.
_CHECKPOINTS = re.compile(
    r"--(ckpt-.*|async-.*|no-async-save|use-persistent-ckpt-worker|dist-ckpt-.*|use-dist-ckpt.*)"
)
_RESHARDABLE, _DISTRIBUTED = "--dist-ckpt-optim-fully-reshardable", "--use-distributed-optimizer"
#: Gradient norms are printed with three decimals.
_NORM = 1e-3
#: What a run that fails raises.
_FAILURES = (AssertionError, RuntimeError, TimeoutError)


def folder(bench: Bench) -> Path:
    """The folder of this stage."""
    return bench.folder / "script"


def events(bench: Bench, run: str) -> Path:
    """The TensorBoard folder of a run that the monitors watched: "one-0" in one process, "layout" in the
    first of the twin's layouts."""
    return folder(bench) / run / "tensorboard"


@dataclass(frozen=True)
class Ran:
    """A run that came to its end, or was killed as planned."""

    seen: observer.Seen
    curve: Curve

    def weights(self, step: int) -> Tensors:
        """Weights after a step."""
        return {k: t for k, t in self.seen[step, observer.WEIGHTS].items() if not _is_bias(k)}

    def biases(self, step: int) -> Tensors:
        """Expert biases after a step."""
        return {k: t for k, t in self.seen[step, observer.WEIGHTS].items() if _is_bias(k)}

    def gradients(self, step: int) -> Tensors:
        """What the optimizer got, clipped."""
        return self.seen[step, observer.GRADIENTS]

    def state(self, step: int) -> dict[str, Tensors]:
        """What the optimizer keeps of each parameter after a step."""
        known = (observer.GRADIENTS, observer.WEIGHTS)
        kinds = {kind for s, kind in self.seen if s == step and not kind.startswith(observer.BEFORE)}
        return {kind: self.seen[step, kind] for kind in kinds.difference(known)}

    @property
    def loaded(self) -> dict[str, Tensors]:
        """Weights and optimizer state before the first step."""
        before = observer.BEFORE
        return {k.removeprefix(before): t for (_, k), t in self.seen.items() if k.startswith(before)}


def _is_bias(key: str) -> bool:
    return key.endswith("expert_bias")


class Scripts:
    """The runs of a launch's script, each of two steps or of the second of two."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.folder, self.script = bench, folder(bench), script_of(bench.checkout)
        self.given = {flag.name: flag for flag in bench.flags}
        self.saved, self.first = self.folder / "checkpoints", self.folder / "first"
        own = [flag for name, flag in self.given.items() if _CHECKPOINTS.fullmatch(name)]
        #: Words to save after each step, as the launch saves.
        self.saving = ("--save", str(self.saved), "--save-interval", "1", *to_argv(own))
        tokens = bench.twin.config.vocab_size
        self.tokenizer = TokenizerInfo("NullTokenizer", None, vocab_size=tokens, eod=tokens - 1)
        self._words = (
            *("--data-path", "1.0", str(self.folder / "text"), "--split", "100,0,0"),
            *("--data-cache-path", str(self.folder / "cache")),
            *self.tokenizer.flags,
            *("--eval-iters", "0", "--eval-interval", "100", "--log-interval", "1"),
        )

    def write_text(self) -> None:
        """Write random documents, most of them shorter than a sequence."""
        self.folder.mkdir()
        random, longest = Random(0), self.bench.twin.batch.seq_length
        documents = (
            "".join(chr(random.randrange(self.tokenizer.eod)) for _ in range(random.randint(1, longest)))
            for _ in range(200)
        )
        write_dataset(documents, self.tokenizer, self.folder / "text")

    def write_starts(self) -> None:
        """Write initial checkpoints: one, and the same with nudged weights."""
        one = self.bench.case(None, fault=None)
        start = noise.weights(one)
        starts = [start, *(noise.nudged(start, seed) for seed in range(noise.NUDGES))]
        place = self.folder / "start"
        run_distributed(resume.write_initial, 1, one, starts, place, apart=True, children=True)

    def fresh(self, number: int = 0) -> tuple[str, ...]:
        """Words that start from an initial checkpoint."""
        return ("--load", str(self.folder / "start" / str(number)), "--finetune")

    def run(self, name: str, sizes: Sizes | None, *words: str, watched: bool = False, **changes: Any) -> Ran:
        """Run the script in a layout or in one process (None).

        Args:
            watched: by the monitors.

        Raises:
            AssertionError: ranks hold different values of the same weight or gradient.
            RuntimeError: it failed; the message is one line.
            TimeoutError: it hung.
        """
        place = self.folder / name
        log = ("--tensorboard-dir", str(place / "tensorboard")) if watched else ()
        run = ScriptRun(
            script=self.script,
            case=self.bench.case(sizes),
            words=(*self._words, *log, *words),
            folder=place,
            timeout=self.bench.timeout,
            monitor=int(watched),
            **changes,
        )
        run.start()
        return Ran(observer.read(run.folder, run.ranks), run.curve())

    def keep_first(self) -> None:
        """Keep the first checkpoint from a run that is going to write to the same folder."""
        kept = self.first / "iter_0000001"
        kept.mkdir(parents=True)
        for file in (self.saved / kept.name).iterdir():
            os.link(file, kept / file.name)
        (self.first / "latest_checkpointed_iteration.txt").write_text("1")


def script(bench: Bench) -> Iterator[Finding]:
    """Yield what the launch's own script shows."""
    scripts = Scripts(bench)
    yield passed("script", detail=str(scripts.script))
    scripts.write_text()
    scripts.write_starts()
    try:
        bases = [
            scripts.run(f"one-{n}", None, *scripts.fresh(n), watched=True) for n in range(1 + noise.NUDGES)
        ]
    except _FAILURES as problem:
        yield failed("training", "one process", last_line(problem))
        return
    first = bench.twin.sizes[0]
    where = str(first)
    try:
        words = (*scripts.fresh(), *scripts.saving)
        killed = scripts.run("layout", first, *words, watched=True, killed_in=scripts.saved)
    except _FAILURES as problem:
        yield failed("training", where, last_line(problem))
        return
    spread = partial(_compared, bases, bench.twin.batch.sequences * bench.twin.batch.seq_length)
    yield from against(spread, bases[0], killed, where)
    scripts.keep_first()
    yield from resumed(scripts, first, killed)
    for other in _others(bench.twin.sizes):
        yield from elsewhere(scripts, spread, other, bases[0], killed)


def against(compared: Callable[..., Finding], base: Ran, found: Ran, where: str) -> Iterator[Finding]:
    """Hold a run of two steps against one process."""
    yield compared("losses (script)", found, where, partial(_logged, "lm loss"))
    if any(name.startswith("mtp_") for name in base.curve.steps[1].values):
        yield compared("losses of MTP (script)", found, where, partial(_logged, r"mtp_\d+ loss"))
    yield compared("gradient norms (script)", found, where, partial(_logged, "grad norm"), _NORM)
    for step in (1, 2):
        yield compared(f"gradients of step {step} (script)", found, where, partial(Ran.gradients, step=step))
    yield compared("weights after two steps (script)", found, where, partial(Ran.weights, step=2))
    yield stored.equal("expert biases (script)", base.biases(2), found.biases(2), where)


def _compared(
    bases: Sequence[Ran],
    terms: int,
    what: str,
    found: Ran,
    where: str,
    of: Callable[[Ran], Tensors],
    least: float = 0.0,
) -> Finding:
    """Compare tensors of a run with those of one process, by the noise of the nudged ones."""
    expected, *moved = map(of, bases)
    if odd := sorted(expected.keys() ^ of(found).keys()):
        return failed(what, where, f"{odd[0]} is {'missing' if odd[0] in expected else 'new'}")
    distance = farthest(what, expected, of(found), noise.spread(expected, moved, terms, least))
    state = State.PASS if distance.share <= 1 else State.FAIL
    return Finding(what, state, where, distance.share, 1.0, distance.key)


def resumed(scripts: Scripts, sizes: Sizes, killed: Ran) -> Iterator[Finding]:
    """Resume what was killed: the second step and its checkpoint are those of the run that was killed."""
    where, what = str(sizes), "resuming after a kill"
    try:
        again = scripts.run("resumed", sizes, "--load", str(scripts.saved), *scripts.saving)
    except _FAILURES as problem:
        yield failed(what, where, last_line(problem))
        return
    if trained := [step for step in sorted(again.curve.steps) if step != 2]:
        yield failed(what, where, f"it trained step {trained[0]}, not step 2")
        return
    yield from loaded(again, killed, where)
    yield stored.equal("gradients after resuming", killed.gradients(2), again.gradients(1), where)
    before, after = killed.seen[2, observer.WEIGHTS], again.seen[1, observer.WEIGHTS]
    yield stored.equal("weights after resuming", before, after, where)
    yield _same_state("optimizer state after resuming", killed.state(2), again.state(1), where)
    try:
        written = stored.read(scripts.saved / "iter_0000002")
    except CheckpointError as problem:
        yield failed("checkpoint", where, str(problem))
        return
    yield from _written(written, again, where)
    rows = written["embedding.word_embeddings.weight"].shape[0]
    yield from stored.round_trip(scripts.saved, rows, scripts.folder / "export")


def loaded(found: Ran, saved: Ran, where: str, optimizer: bool = True) -> Iterator[Finding]:
    """What a process had before its first step, against what the one that saved had after its first."""
    state = found.loaded
    yield stored.equal("weights loaded", saved.weights(1), state.pop(observer.WEIGHTS), where)
    if optimizer:
        yield _same_state("optimizer state loaded", saved.state(1), state, where)


def _same_state(what: str, expected: dict[str, Tensors], found: dict[str, Tensors], where: str) -> Finding:
    return stored.equal(what, _flat(expected), _flat(found), where)


def _flat(state: dict[str, Tensors]) -> Tensors:
    return {f"{kind} of {key}": t for kind, part in state.items() for key, t in part.items()}


def _written(written: Tensors, run: Ran, where: str) -> Iterator[Finding]:
    """What a checkpoint holds, against what the process had that wrote it."""
    weights = run.seen[1, observer.WEIGHTS]
    found = {key: t for key, t in written.items() if key in weights}
    yield stored.equal("weights in the checkpoint", weights, found, where)
    state = {
        f"optimizer.state.{kind}.{key}": t
        for kind, part in (*run.state(1).items(), ("param", run.weights(1)))
        for key, t in part.items()
        if kind != "step"
    }
    found = {key: t for key, t in written.items() if key in state}
    if found:  # kept by parameter; otherwise by positions in the buffers of one layout
        state = {key: t for key, t in state.items() if key in found or ".param." not in key}
        yield stored.equal("optimizer state in the checkpoint", state, found, where)


def _others(sizes: Sequence[Sizes]) -> list[Sizes | None]:
    """Layouts to load the first one's checkpoints in: another with the same optimizers, and one process."""
    first, *others = sizes
    fitting = [one for one in others if _expert_optimizer(one) == _expert_optimizer(first)]
    if _expert_optimizer(first) and not fitting and first.layout.world_size > 2:
        fitting = [Sizes(layout=ParallelLayout(dp=2, ep=2))]
    return [*fitting[:1], None]


def _expert_optimizer(sizes: Sizes | None) -> bool:
    """Whether Megatron keeps a second optimizer for the experts. One layout's two do not load as one."""
    return sizes is not None and (sizes.layout.ep > 1 or sizes.layout.etp != sizes.layout.tp)


def elsewhere(
    scripts: Scripts, compared: Callable[..., Finding], other: Sizes | None, base: Ran, saved: Ran
) -> Iterator[Finding]:
    """Load the first checkpoint in another layout and make the second step."""
    where = f"{scripts.bench.twin.sizes[0]} to {other or 'one process'}"
    optimizer = True
    if _DISTRIBUTED in scripts.given and _RESHARDABLE not in scripts.given:
        optimizer = False
        yield untested(
            "optimizer state loaded", f"it loads in its own layout only without {_RESHARDABLE}", where
        )
    elif _expert_optimizer(other) != _expert_optimizer(scripts.bench.twin.sizes[0]):
        optimizer = False
        yield untested("optimizer state loaded", "Megatron does not load two optimizers as one", where)
    words = ("--load", str(scripts.first), *(() if optimizer else ("--no-load-optim", "--no-load-rng")))
    name = "elsewhere" if other else "elsewhere-one"
    try:
        found = scripts.run(name, other, *words)
    except _FAILURES as problem:
        yield failed("loading in another layout", where, last_line(problem))
        return
    yield from loaded(found, saved, where, optimizer)

    def second(of: Callable[[Ran, int], Tensors], ran: Ran) -> Tensors:
        return of(ran, 1 if ran is found else 2)

    yield compared("gradients after loading", found, where, partial(second, Ran.gradients))
    if optimizer:
        yield compared("weights after loading", found, where, partial(second, Ran.weights))
    yield stored.equal("expert biases after loading", base.biases(2), found.biases(1), where)


def _logged(pattern: str, ran: Ran) -> Tensors:
    import torch

    return {
        f"{name}, step {number}": torch.tensor(value, dtype=torch.float64)
        for number, step in sorted(ran.curve.steps.items())
        for name, value in step.values.items()
        if re.fullmatch(pattern, name)
    }
