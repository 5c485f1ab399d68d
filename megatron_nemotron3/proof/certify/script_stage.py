"""The launch's own script: against one process, killed and resumed, loaded in other layouts, exported; and
what the monitors see in its first step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.flag import to_argv
from megatron_nemotron3.models.series import AGGREGATES, KINDS
from megatron_nemotron3.proof.certify import checkpoints, observer
from megatron_nemotron3.proof.certify.bench import (
    Bench,
    Finding,
    failed,
    last_line,
    passed,
    untested,
    with_other_data,
)
from megatron_nemotron3.proof.certify.compare import (
    NUDGES,
    OTHER_TOKENS,
    equal,
    flipped,
    moved_far,
    nudged,
    weights,
)
from megatron_nemotron3.proof.certify.large import CHECKOUT
from megatron_nemotron3.proof.certify.layouts import Sizes
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.script_definition import WHERE as DEFINITION
from megatron_nemotron3.proof.certify.script_definition import defined
from megatron_nemotron3.proof.certify.script_result import NoiseComparison, ScriptResult, run_findings
from megatron_nemotron3.proof.certify.script_run import (
    curve_of,
    run_each_script,
    run_script,
    schedule_of,
    script_of,
    write_conversations,
    write_text,
)
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.train.monitor import events as event_files

#: Options of the launch that say how checkpoints are written. The proxy's other options do without.
_CHECKPOINTS = re.compile(
    r"--(ckpt-(format|fully-parallel-.*|assume-constant-structure|drop-redundant-extra-state)"
    r"|async-(save|strategy|ckpt-.*)|use-persistent-ckpt-worker|dist-ckpt-.*|use-dist-ckpt)"
)
_RESHARDABLE, _DISTRIBUTED = "--dist-ckpt-optim-fully-reshardable", "--use-distributed-optimizer"
_TUNING = "--sft"
_BLENDS = {"--train-data-path", "--per-split-data-args-path", "--data-args-path"}
#: The format of checkpoints of Megatron-FSDP, which the proxy does without.
_OF_FSDP = "fsdp_dtensor"
_FSDP = "--use-megatron-fsdp"
_STOCK_ONLY = {"--hybrid-context-parallel"}
#: One batch after the second step, which follows the checkpoint of the first.
_EVALUATING = ("--eval-iters", "1")
MONITORS = "monitors of the first step"
#: What a run that fails raises.
FAILURES = (RuntimeError, TimeoutError)


def folder(bench: Bench) -> Path:
    """The folder of this stage."""
    return bench.folder / "script"


def events(bench: Bench, run: str) -> Path:
    """The TensorBoard folder of a run that the monitors watched: "one-0" in one process, "layout" in the
    first of the proxy's layouts."""
    return folder(bench) / run / "tensorboard"


class ScriptRuns:
    """The runs of a launch's script, each of two steps or of the second of two."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.folder, self.script = bench, folder(bench), script_of(bench.checkout)
        self.given = {flag.name: flag for flag in bench.flags}
        self.saved = self.folder / "checkpoints"
        own = [flag for name, flag in self.given.items() if _CHECKPOINTS.fullmatch(name)]
        own = [flag for flag in own if flag.values != (_OF_FSDP,)]
        self.format = next((flag.values[0] for flag in own if flag.name == "--ckpt-format"), "torch_dist")
        #: Options to save after each step, as the launch saves, and to load that.
        self.saving = ("--save", str(self.saved), "--save-interval", "1", *to_argv(own))
        ours = [flag for flag in own if "async" not in flag.name and "persistent" not in flag.name]
        self.loading = ("--load", str(self.saved), *to_argv(ours))
        #: Of data and log.
        self.options: tuple[str, ...] = ()
        #: One process, from the initial weights and from nudged ones.
        self.bases: list[ScriptResult] = []
        self.terms = bench.proxy.case.sequences * bench.proxy.case.seq_length

    def write_data(self, seed: int = 0) -> None:
        self.folder.mkdir()
        tokens, longest = self.bench.proxy.config.vocab_size, self.bench.proxy.case.seq_length
        if _TUNING in self.given:
            data = write_conversations(self.folder, tokens, longest, seed)
        else:
            texts = self.given.get("--data-path")
            blended = bool(texts and len(texts.values) > 1) or bool(_BLENDS.intersection(self.given))
            data = write_text(self.folder, tokens, longest, blended, seed)
        self.options = (
            *data,
            *("--eval-iters", "0", "--eval-interval", "2", "--log-interval", "1"),
            *(() if "--overlap-param-gather" in self.given else ("--log-params-norm",)),  # it ends later
            *schedule_of({name: flag.values for name, flag in self.given.items()}),
        )

    def write_starts(self) -> None:
        """Write initial checkpoints: one, and the same with nudged weights."""
        start = weights(self.bench.case(None, fault=None))
        self._write_starts("start", [start, *(nudged(start, seed) for seed in range(NUDGES))])

    def _write_starts(self, name: str, starts: Sequence[Tensors]) -> None:
        one = self.bench.case(None, fault=None)
        run_distributed(checkpoints.write_initial, 1, one, starts, self.folder / name, apart=True)

    def fresh(self, number: int = 0, name: str = "start") -> tuple[str, ...]:
        return ("--load", str(self.folder / name / str(number)), "--finetune")

    def run_bases(self) -> NoiseComparison[ScriptResult]:
        """Run one process, from each of the initial weights."""
        starts = {f"one-{n}": (*self.fresh(n), *_EVALUATING) for n in range(1 + NUDGES)}
        self.bases = self.run_each(starts, watched=True)
        return NoiseComparison(self.bases, self.terms)

    def depend_on_rounding(self) -> bool:
        """As `compare.depends_on_rounding`, of the script in one process."""
        if not self.bases:
            return False
        starts = moved_far(weights(self.bench.case(None, fault=None)), self.terms)
        self._write_starts("moved", starts)
        try:
            far = self.run_each({f"moved-{n}": self.fresh(n, "moved") for n in range(len(starts))})
        except FAILURES:
            return False
        base, *runs = self.bases
        return any(
            flipped(base.gradients(step), run.gradients(step)) for run in (*runs, *far) for step in (1, 2)
        )

    def run(
        self,
        name: str,
        sizes: Sizes | None,
        *options: str,
        watched: bool = False,
        killed_in: Path | None = None,
        own: bool = False,
    ) -> ScriptResult:
        words, place = self.words(name, sizes, *options, watched=watched), self.folder / name
        run_script(words, self.bench.case(sizes), place, self.bench.timeout, killed_in, own)
        return self.result(name, sizes)

    def run_each(self, options: Mapping[str, Sequence[str]], watched: bool = False) -> list[ScriptResult]:
        """Run one process with each of the options at the same time. options: by name of the run."""
        runs = {self.folder / n: self.words(n, None, *more, watched=watched) for n, more in options.items()}
        run_each_script(runs, self.bench.case(None), self.bench.timeout)
        return [self.result(name, None) for name in options]

    def words(self, name: str, sizes: Sizes | None, *options: str, watched: bool = False) -> list[str]:
        """Return the command line of a run."""
        own = ["--data-cache-path", str(self.folder / name / "cache")]  # others may be writing theirs
        own += ["--tensorboard-dir", str(events(self.bench, name))] if watched else []
        launcher = ("--device", "cpu", "--monitor", str(int(watched)))
        return [*launcher, str(self.script), *self.bench.case(sizes).argv(), *self.options, *own, *options]

    def result(self, name: str, sizes: Sizes | None) -> ScriptResult:
        """Return what a run that came to its end has left."""
        place, ranks = self.folder / name, self.bench.case(sizes).layout.world_size
        return ScriptResult(observer.read(place, ranks), curve_of(place, ranks))


def script(bench: Bench) -> Iterator[Finding]:
    """Yield what the launch's own script shows.

    A failure counts if rounding decides nothing on its data; otherwise other data are tried.
    """
    runs: list[ScriptRuns] = []

    def findings(seed: int) -> Iterator[Finding]:
        shutil.rmtree(folder(bench), ignore_errors=True)
        runs.append(ScriptRuns(bench))
        yield from _script(runs[-1], seed)

    yield from with_other_data(findings, lambda _: runs[-1].depend_on_rounding(), 1 + OTHER_TOKENS)


def _script(scripts: ScriptRuns, seed: int) -> Iterator[Finding]:
    bench = scripts.bench
    if reason := reason_against(scripts):
        yield untested("script", reason)
        return
    yield passed("script", detail=str(scripts.script))
    if _OF_FSDP in (word for flag in bench.flags for word in flag.values):
        yield untested("checkpoint format", f"{_OF_FSDP}: the proxy writes torch_dist")
    scripts.write_data(seed)
    scripts.write_starts()
    try:
        compared = scripts.run_bases()
    except FAILURES as problem:
        yield failed("training", "one process", last_line(problem))
        return
    yield from defined_findings(scripts, compared)
    first, where = bench.proxy.sizes[0], str(bench.proxy.sizes[0])
    try:
        options = (*scripts.fresh(), *scripts.saving, *_EVALUATING)
        killed = scripts.run("layout", first, *options, watched=True, killed_in=scripts.saved)
    except FAILURES as problem:
        yield failed("training", where, last_line(problem))
        return
    yield from run_findings(compared, scripts.bases[0], killed, where)
    yield from checkpoint_findings(scripts, killed, where)
    yield from resume_findings(scripts, first, killed, where)
    for other in _others(bench.proxy.sizes, bench.proxy.case.sequences):
        yield from other_layout_findings(scripts, compared, other, scripts.bases[0], killed)


def defined_findings(scripts: ScriptRuns, compared: NoiseComparison[ScriptResult]) -> Iterator[Finding]:
    """Hold the one process against the definition of what it drew."""
    bench, base = scripts.bench, scripts.bases[0]
    if bench.proxy.case.boost is not None or bench.proxy.case.lora is not None:
        return
    begun = weights(bench.case(None, fault=None))
    try:
        by, found = defined(bench.case(None), begun, base, scripts.folder / "one-0")
    except ValueError as problem:  # the names of the weights
        yield failed("tensors of the model", DEFINITION, str(problem))
        return
    yield from found
    if by is not None:
        yield from run_findings(compared, base, by, DEFINITION)


def reason_against(scripts: ScriptRuns) -> str | None:
    """Why the script of a launch cannot run here."""
    bench, given = scripts.bench, scripts.given
    if _FSDP in given:
        return f"{_FSDP}: its checkpoints are not read here; layouts are compared without the script"
    if bench.checkout is not None and _TUNING in given:
        return f"{_TUNING}: the stock script needs Hugging Face's datasets and Transformer Engine"
    if bench.checkout is None and (stock := _STOCK_ONLY.intersection(given)):
        return f"{min(stock)}: only the stock script has it: name a checkout of Megatron-LM, {CHECKOUT}"
    return None


def resume_findings(
    scripts: ScriptRuns, sizes: Sizes, killed: ScriptResult, where: str, *options: str
) -> Iterator[Finding]:
    """Resume what was killed, with options of that run: the second step is the same."""
    what = "resuming after a kill"
    try:
        again = scripts.run("resumed", sizes, *scripts.loading, *options)
    except FAILURES as problem:
        yield failed(what, where, last_line(problem))
        return
    if trained := [step for step in sorted(again.curve.steps) if step != 2]:
        yield failed(what, where, f"it trained step {trained[0]}, not step 2")
        return
    yield from loading_findings(again, killed, where)
    yield equal("gradients after resuming", killed.gradients(2), again.gradients(1), where)
    before, after = killed.seen[2, observer.WEIGHTS], again.seen[1, observer.WEIGHTS]
    yield equal("weights after resuming", before, after, where)
    yield _same_state("optimizer state after resuming", killed.state(2), again.state(1), where)


def loading_findings(
    found: ScriptResult, saved: ScriptResult, where: str, optimizer: bool = True
) -> Iterator[Finding]:
    """What a process had before its first step, against what the one that saved had after its first."""
    state = found.loaded
    yield equal("weights loaded", saved.weights(1), state.pop(observer.WEIGHTS), where)
    if optimizer:
        yield _same_state("optimizer state loaded", saved.state(1), state, where)


def _same_state(what: str, expected: dict[str, Tensors], found: dict[str, Tensors], where: str) -> Finding:
    return equal(what, _flat(expected), _flat(found), where)


def _flat(state: dict[str, Tensors]) -> Tensors:
    return {f"{kind} of {key}": t for kind, part in state.items() for key, t in part.items()}


def checkpoint_findings(scripts: ScriptRuns, run: ScriptResult, where: str) -> Iterator[Finding]:
    """What the first checkpoint holds, against the run that wrote it; and its way to Hugging Face."""
    if scripts.format != "torch_dist":
        yield untested("weights in the checkpoint", f"--ckpt-format {scripts.format} is not read here", where)
        return
    try:
        found = checkpoints.read(scripts.saved / "iter_0000001")
    except CheckpointError as problem:
        yield failed("weights in the checkpoint", where, str(problem))
        return
    trained = run.seen[1, observer.WEIGHTS]
    kept = {key: t for key, t in found.items() if key in trained}
    yield equal("weights in the checkpoint", trained, kept, where)
    state = {
        f"optimizer.state.{kind}.{key}": t
        for kind, part in run.state(1).items()
        for key, t in part.items()
        if kind != "step"
    }
    # Megatron keeps it by parameter, or else by positions in the buffers of one layout.
    if kept := {key: t for key, t in found.items() if key in state}:
        yield equal("optimizer state in the checkpoint", state, kept, where)
    rows = found["embedding.word_embeddings.weight"].shape[0]
    config = scripts.bench.proxy.config
    yield from checkpoints.round_trip(scripts.saved, rows, scripts.folder / "export", config)


def _others(sizes: Sequence[Sizes], sequences: int) -> list[Sizes | None]:
    """Layouts to load the first one's checkpoints in: another with the same optimizers, and one process."""
    first, *others = sizes
    fitting = [one for one in others if _expert_optimizer(one) == _expert_optimizer(first)]
    if _expert_optimizer(first) and not fitting and first.layout.world_size > 2:
        if sequences % 2 == 0:
            fitting = [Sizes(layout=ParallelLayout(dp=2, ep=2))]
        elif first.layout.pp > 1:
            fitting = [Sizes(layout=replace(first.layout, pp=1, vpp=1))]
    return [*fitting[:1], None]


def _expert_optimizer(sizes: Sizes | None) -> bool:
    """Whether Megatron keeps a second optimizer for the experts. One layout's two do not load as one."""
    return sizes is not None and (sizes.layout.ep > 1 or sizes.layout.etp != sizes.layout.tp)


def other_layout_findings(
    scripts: ScriptRuns,
    compared: NoiseComparison,
    other: Sizes | None,
    base: ScriptResult,
    saved: ScriptResult,
) -> Iterator[Finding]:
    """Load the first checkpoint in another layout and make the second step."""
    where = f"{scripts.bench.proxy.sizes[0]} to {other or 'one process'}"
    reason = ""
    if _DISTRIBUTED in scripts.given and _RESHARDABLE not in scripts.given:
        reason = f"it loads in its own layout only without {_RESHARDABLE}"
    elif other is None and _DISTRIBUTED in scripts.given:
        reason = "one process has no distributed optimizer here"
    elif _expert_optimizer(other) != _expert_optimizer(scripts.bench.proxy.sizes[0]):
        reason = "Megatron does not load two optimizers as one"
    if reason:
        yield untested("optimizer state loaded", reason, where)
    options = (*scripts.loading, *(("--no-load-optim", "--no-load-rng") if reason else ()))
    name = "elsewhere" if other else "elsewhere-one"
    try:
        found = scripts.run(name, other, *options)
    except FAILURES as problem:
        yield failed("loading in another layout", where, last_line(problem))
        return
    yield from loading_findings(found, saved, where, not reason)

    def second(of: Callable[[ScriptResult, int], Tensors], ran: ScriptResult) -> Tensors:
        return of(ran, 1 if ran is found else 2)

    yield compared("gradients after loading", found, where, partial(second, ScriptResult.gradients))
    if not reason:
        yield compared("weights after loading", found, where, partial(second, ScriptResult.weights))
    yield equal("expert biases after loading", base.biases(2), found.biases(1), where)


def monitors(bench: Bench) -> Iterator[Finding]:
    """Yield whether routers, residuals and gradients look the same in a layout, by the runs of `script`."""
    names = [f"one-{number}" for number in range(1 + NUDGES)]
    if not all(events(bench, name).is_dir() for name in (*names, "layout")):
        yield untested(MONITORS, "the script's runs did not come to their end")
        return
    series = {name: first_of(bench, name) for name in (*names, "layout")}
    if not (series[names[0]] or series["layout"]):
        yield untested(MONITORS, "the monitors have written nothing")
        return
    compared = NoiseComparison(names, bench.proxy.case.sequences * bench.proxy.case.seq_length)
    detail = f"{len(series[names[0]])} series"
    yield compared(MONITORS, "layout", str(bench.proxy.sizes[0]), series.__getitem__, detail=detail)


def first_of(bench: Bench, run: str) -> Tensors:
    """Return what each series of a run has at its first step."""
    history = event_files.read(event_files.find(events(bench, run)))
    return {
        tag: torch.tensor(points[0][1], dtype=torch.float64)
        for tag, points in history.items()
        if tag.partition("/")[0] in (*KINDS, AGGREGATES) and points and points[0][0] == 1
    }
