"""Train a model, step by step: data, flags, training processes, report."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_nemotron3.args import (
    Launch,
    ParallelLayout,
    TrainingData,
    TrainingSchedule,
    adjusted,
    flags,
    published,
    to_argv,
)
from megatron_nemotron3.checkpoint import folders, resume
from megatron_nemotron3.checkpoint.loading import option_values
from megatron_nemotron3.models import Nemotron3Config, count
from megatron_nemotron3.precision import command as precision
from megatron_nemotron3.precision import report as precision_report
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.train import log, processes, report


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to train, on what, where to."""

    config: Nemotron3Config
    layout: ParallelLayout
    precision: str
    backend: str
    #: "cpu" or "cuda", resolved.
    device: str
    output: Path
    #: Text file or folder; None: Python's own sources.
    text: str | None = None
    #: Prefixes of Megatron data sets; given, `text` is not used and `tokenizer` is.
    data_path: tuple[str, ...] = ()
    tokenizer: str | None = None
    max_bytes: int | None = None
    steps: int | None = None
    #: Tokens per sequence; None: the model's.
    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    lr: float | None = None
    #: Per-module formats of nvfp4; None: the published recipe, written to `output`.
    te_precision_config_file: str | None = None
    #: Compute nvfp4 in the torch backend's linears.
    emulate: emulation.Emulation | None = None
    #: Iterations from one precision measurement to the next; 0: as many as is usual; None: off.
    log_precision: int | None = None
    verbose: bool = False
    extra: tuple[str, ...] = ()

    @property
    def precision_file(self) -> str | None:
        """The file of `--te-precision-config-file`, if there is one."""
        own = str(self.output / "precision.yaml") if self.precision == "nvfp4" else None
        return self.te_precision_config_file or own

    @property
    def checkpoints(self) -> Path:
        """Where Megatron saves and resumes."""
        return self.output / "checkpoints"


def schedule_of(request: Request) -> TrainingSchedule:
    """Tiny models: a schedule for minutes on a CPU. Others: the published one. Options override.

    Raises:
        ValueError: the model has no published schedule and options leave a part open.
    """
    given = {
        name: getattr(request, name)
        for name in ("steps", "seq_length", "micro_batch_size", "global_batch_size", "lr")
    }
    if not request.config.name.endswith("-tiny"):
        schedule = adjusted(published(request.config), **given)
        if schedule.unknown:
            options = {"train": "--steps", "lr": "--lr", "min_lr": "--lr"}
            missing = sorted({options[name] for name in schedule.unknown})
            raise ValueError(
                f"{request.config.title} has no published schedule: give {' and '.join(missing)}"
            )
        return schedule
    layout = request.layout
    steps, micro = request.steps or 300, request.micro_batch_size or 4
    batch = micro * layout.dp * (2 * layout.pp if layout.pp > 1 else 1)
    short = TrainingSchedule(
        eval_interval=max(1, steps // 4),
        eval_iters=8,
        save_interval=max(1, steps // 2),
        log_interval=max(1, steps // 100),
    )
    defaults = {"steps": steps, "micro_batch_size": micro, "global_batch_size": batch, "lr": 4e-3}
    return adjusted(short, **(defaults | {k: v for k, v in given.items() if v is not None}))


def train(request: Request) -> int:
    """Train, following the log; returns the exit status. A second call resumes from the last checkpoint.

    Raises:
        ValueError: something that can be known beforehand is wrong; nothing was written but prepared data.
    """
    started = time.monotonic()
    config, schedule = request.config, schedule_of(request)
    measuring = _measurement(request, schedule)
    size = count(config)
    folders.check_room(request.output, folders.bytes_needed(size.trainable, request.precision))

    launch = Launch(
        config=config,
        layout=request.layout,
        precision=request.precision,
        te_precision_config_file=request.precision_file,
        emulate=request.emulate,
        backend=request.backend,
        schedule=schedule,
        data=TrainingData(),
        # After a signal: finish the step, save, leave.
        extra=("--exit-signal-handler", *_event_files(request), *request.extra),
    )
    flags(launch)  # rules first: nothing is written for a layout that cannot run
    what = f"{size.trainable:,} parameters, {request.layout}, {request.precision}"
    what += " emulated" if request.emulate else ""
    print(f"{config.title} [{config.name}]: {what}")
    data, baseline = _prepared_data(request)
    if request.precision_file and not request.te_precision_config_file:
        request.output.mkdir(parents=True, exist_ok=True)
        yaml_file.write(config, request.precision_file)
    for line in resume.before_start(["--load", str(request.checkpoints), *request.extra], rank=0):
        print(line)
    for leftover in resume.remove_incomplete(request.checkpoints):
        print(f"removed {leftover}: its save had been interrupted")

    begun = folders.latest(request.checkpoints)
    log_file = request.output / "train.log"
    if begun is None:
        log_file.unlink(missing_ok=True)  # of a run that never saved
        precision_report.remove(request.output)
    elif schedule.train_iters is not None and begun >= schedule.train_iters:
        print(f"already trained to step {begun}; to start over, delete {request.output}")
        _print_report(request, log.read(str(log_file)), baseline, started)
        return 0
    else:
        print(f"resuming from step {begun}")

    print(f"training log: {log_file}", flush=True)
    argv = to_argv(flags(replace(launch, data=data)))
    words = processes.command(argv, request.layout.world_size, request.device)
    env = processes.environment(request.layout.world_size, request.device)
    if request.emulate:
        env[emulation.VARIABLE] = request.emulate.text()
    if measuring is not None:
        env[emulation.LOG_VARIABLE] = measuring.text()
    progress = _Progress(request.verbose)
    try:
        status = processes.follow(words, env, log_file, progress.line, progress.interrupted)
    finally:
        resume.remove_incomplete(request.checkpoints)
    if status != 0 and not progress.was_interrupted:
        raise ValueError(f"{_cause_of_stop(request, progress, status)} (see {log_file})")

    saved = folders.latest(request.checkpoints)
    curve = log.read(str(log_file))
    _print_report(request, curve, baseline, started)
    if progress.was_interrupted:
        where = (
            f"step {saved} is saved; the same command goes on from there" if saved else "no checkpoint yet"
        )
        print(f"interrupted: {where}")
        return 130
    return 0


def _measurement(request: Request, schedule: TrainingSchedule) -> emulation.Logging | None:
    """What precision is measured, and when; in a run shorter than the usual interval its last step is.

    Raises:
        ValueError: the backend's linears cannot be measured.
    """
    if request.log_precision is None:
        return None
    if request.backend != "torch":
        raise ValueError(
            f"--log-precision measures linears of the torch backend, not of {request.backend}: use --backend "
            "torch"
        )
    steps = schedule.train_iters or emulation.LOG_DEFAULT
    interval = request.log_precision or min(emulation.LOG_DEFAULT, steps)
    return emulation.Logging(interval, str(request.output.resolve()))


def _cause_of_stop(request: Request, progress: _Progress, status: int) -> str:
    """One sentence on why training stopped."""
    if "CheckpointException" in progress.last_error or "No space left" in progress.last_error:
        # Megatron's writer processes keep the reason to themselves; a full disk is the usual one.
        free = shutil.disk_usage(request.output).free / 1e6
        return (
            f"saving a checkpoint below {request.checkpoints} failed; {free:,.0f} MB are free there: "
            "make room or choose another --output, the same command goes on from the last checkpoint"
        )
    return progress.last_error or f"training ended with status {status}"


def _prepared_data(request: Request) -> tuple[TrainingData, float | None]:
    """Data set, tokenizer and folders for the flags; and the unigram baseline of the same text."""
    from megatron_nemotron3.train.data import prepare, unigram_baseline
    from megatron_nemotron3.train.data.prepare import MAX_BYTES

    folder = str(request.checkpoints)
    if request.data_path:
        if request.tokenizer is None:
            raise ValueError("--data-path needs --tokenizer FOLDER (a Hugging Face tokenizer)")
        given = TrainingData(
            data_path=request.data_path,
            split="99,1,0",
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=request.tokenizer,
            save=folder,
            load=folder,
        )
        return given, None
    prepared = prepare(
        request.text,
        request.output / "data",
        vocab_size=min(request.config.vocab_size, 65_000),
        max_bytes=request.max_bytes or MAX_BYTES,
    )
    texts, dataset = prepared.texts, prepared.dataset
    source = request.text or "Python's own standard library"
    print(f"text: {source}, {len(texts.documents):,} documents, {dataset.tokens:,} tokens")
    baseline = unigram_baseline(prepared.prefix, prepared.split, prepared.tokenizer.vocab_size)
    tokenizer = prepared.tokenizer
    data = TrainingData(
        data_path=(prepared.prefix,),
        split=prepared.split,
        data_cache_path=prepared.data_cache_path,
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_model=tokenizer.tokenizer_model,
        save=folder,
        load=folder,
    )
    return data, baseline.cross_entropy


def _print_report(request: Request, curve: log.Curve, baseline: float | None, started: float) -> None:
    for line in report.verdict(curve, baseline):
        print(line)
    picture = request.output / "loss.png"
    if curve.steps:
        report.plot(curve, picture, request.config.title + f" [{request.config.name}]", baseline)
        print(f"loss plot        {picture}")
    if request.log_precision is not None:
        try:
            print(precision.report(request.output, f"{request.config.title} [{request.config.name}]"))
        except precision_report.ReportError as problem:  # nothing was measured yet, or in this run
            print(f"no precision report: {problem}")
    if (saved := folders.latest(request.checkpoints)) is not None:
        print(f"checkpoint       {folders.path_of(request.checkpoints, saved)}")
    print(f"took             {time.monotonic() - started:.0f} s")


class _Progress:
    """Prints one line per logged step, and keeps what an error message needs."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.was_interrupted = False
        self.last_error = ""
        self._live = sys.stdout.isatty() and not verbose
        self._printed = 0

    def line(self, text: str) -> None:
        """Take in one line of the training log."""
        if self.verbose:
            print(text, end="", flush=True)
        item = log.parse(text)
        stripped = text.split("]: ", 1)[-1].strip()
        if stripped.split(":")[0].endswith(("Error", "SystemExit", "Exception")) and ":" in stripped:
            self.last_error = self.last_error or stripped[:300]
        if text.startswith("megatron_nemotron3") and not self.verbose:
            print(text, end="", flush=True)
        if isinstance(item, log.Step) and not self.verbose:
            self._step(item)
        elif isinstance(item, log.Validation) and item.which == "validation" and not self.verbose:
            print(f"step {item.iteration:5d}  validation loss {item.loss:.3f}", flush=True)

    def _step(self, step: log.Step) -> None:
        # On a terminal one line is rewritten; in a file about twenty lines remain.
        mtp = " ".join(f"{loss:.3f}" for loss in step.mtp)
        text = f"step {step.iteration:5d}/{step.total}  loss {step.loss:.3f}" + (
            f"  MTP {mtp}" if mtp else ""
        )
        text += f"  {step.seconds:.2f} s/step"
        last = step.iteration == step.total
        if self._live:
            print(f"\r{text:<100}", end="\n" if last else "", flush=True)
        elif last or step.iteration >= self._printed + step.total / 20 or step.iteration == 1:
            self._printed = step.iteration
            print(text, flush=True)

    def interrupted(self) -> None:
        """Called at every interrupt."""
        first, self.was_interrupted = not self.was_interrupted, True
        print("\ninterrupted: saving a checkpoint first; again to stop at once" if first else "\nstopping")


def _event_files(request: Request) -> tuple[str, ...]:
    """Write TensorBoard's event files below the output, for `nemotron3 watch`, where its package is."""
    if (
        option_values(request.extra, "--tensorboard-dir") is not None
        or importlib.util.find_spec("tensorboard") is None
    ):
        return ()
    return ("--tensorboard-dir", str(request.output / "tensorboard"))
