"""Train a model, step by step: data, flags, training processes, report."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints import folders, resume
from megatron_nemotron3.checkpoints.convert.origin import keep_origin
from megatron_nemotron3.checkpoints.state import StoredState
from megatron_nemotron3.common import lock, switches
from megatron_nemotron3.common.config_file import FILE as CONFIG_FILE
from megatron_nemotron3.common.files import write_text
from megatron_nemotron3.common.parser import first_missing
from megatron_nemotron3.launch import (
    Launch,
    ParallelLayout,
    TrainingData,
    TrainingSchedule,
    adjusted,
    boosting,
    flags,
    manifest,
    precision_file,
    published,
    to_argv,
)
from megatron_nemotron3.models import Nemotron3Config, count
from megatron_nemotron3.models.lora import in_environment
from megatron_nemotron3.precision import report as precision_report
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.train import log, processes
from megatron_nemotron3.train.inputs import (
    ALL_TRAIN,
    CONVERSATION_OPTIONS,
    TrainOptions,
    conversation_rows,
    has_validation,
    named_data,
    require_data,
    variables_of,
)
from megatron_nemotron3.train.isolation import ISOLATION_OPTIONS
from megatron_nemotron3.train.monitor import events
from megatron_nemotron3.train.progress import TrainProgress
from megatron_nemotron3.train.run_schedule import last_step, loadable_state, with_schedule
from megatron_nemotron3.train.teacher import settings as distillation
from megatron_nemotron3.train.teacher.check import check as check_teacher
from megatron_nemotron3.train.teacher.check import record_of


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What to train, and where to write."""

    #: Its schedule is `schedule_of`; `train` fills in its data and its precision file.
    launch: Launch
    #: "cpu" or "cuda".
    device: str
    output: Path
    #: The data, the checkpoints to start from, the monitors and the log.
    options: TrainOptions = field(default_factory=TrainOptions)
    #: Of `options.data_path`; None: the default one.
    split: str | None = None
    #: Iterations between precision measurements; 0: the default interval; None: off.
    log_precision: int | None = None
    #: Parts of the run that may differ from the folder's earlier steps; of `manifest.CHANGES`.
    changes: tuple[str, ...] = ()
    #: What the model is distilled from; (): it is not.
    distill: distillation.Distillations = ()
    #: The command line, for run.json.
    command: str = ""
    #: Content of the file that repeats the run; "": none is written.
    config_text: str = ""

    @property
    def events(self) -> Path:
        """Folder of TensorBoard's files."""
        return Path(self.options.tracking.tensorboard or self.output / log.EVENTS)

    @property
    def precision_file(self) -> str | None:
        """Value of `--te-precision-config-file`; the default for nvfp4 is written to `output`."""
        packed = self.launch.emulate is not None and self.launch.emulate.packed
        own = str(self.output / "precision.yaml") if self.launch.precision == "nvfp4" and not packed else None
        return self.launch.te_precision_config_file or own

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def title(self) -> str:
        return f"{self.launch.config.title} [{self.launch.config.name}]"


def schedule_of(
    config: Nemotron3Config, layout: ParallelLayout, *, conversations: bool = False, **given: Any
) -> TrainingSchedule:
    """A schedule that trains a tiny model on a CPU in minutes; for other models the published one."""
    given = {name: value for name, value in given.items() if value is not None}
    if conversations:
        given = {"micro_batch_size": 1, "global_batch_size": 4 * layout.dp * layout.pp, **given}
        if not config.name.endswith("-tiny"):
            if missing := [f"--{name}" for name in ("steps", "lr") if name not in given]:
                raise ValueError(f"fine-tuning has no default schedule: give {' and '.join(missing)}")
            return adjusted(TrainingSchedule(lr_decay_style="constant"), **given)
    if not config.name.endswith("-tiny"):
        schedule = adjusted(published(config), **given)
        if schedule.unknown:
            options = {"train": "--steps", "lr": "--lr", "min_lr": "--lr"}
            missing = sorted({options[name] for name in schedule.unknown})
            raise ValueError(f"{config.title} has no published schedule: give {' and '.join(missing)}")
        return schedule
    # Data-parallel ranks share the four sequences of a step.
    steps, micro = given.get("steps", 300), given.get("micro_batch_size", max(1, 4 // layout.dp))
    batch = micro * layout.dp * (2 * layout.pp if layout.pp > 1 else 1)
    short = TrainingSchedule(
        eval_interval=max(1, steps // 4),
        eval_iters=8,
        save_interval=max(1, steps // 2),
        log_interval=max(1, steps // 100),
    )
    defaults = {"steps": steps, "micro_batch_size": micro, "global_batch_size": batch, "lr": 4e-3}
    return adjusted(short, **(defaults | given))


def train_interruptibly(request: TrainRequest) -> int:
    """`train`; an interrupt before or after the training processes run ends it with status 130."""
    with processes.interruptible():
        try:
            return train(request)
        except KeyboardInterrupt:
            saved = folders.latest_iteration(request.checkpoints)
            print(f"\ninterrupted: {TrainProgress().on_disk(saved, complete=True)}")
            return 130


def train(request: TrainRequest) -> int:
    """Train, and follow the log; return the exit status. A second call resumes from the last checkpoint."""
    started = time.monotonic()
    given = request.launch
    size = count(given.config)
    measured = _measurement(request) is not None  # raises if it is not possible
    folders.check_room(request.output, folders.bytes_needed(size.trainable, given.precision))
    launch = replace(
        given,
        te_precision_config_file=request.precision_file,
        data=TrainingData(),
        own_script=True,
        # After a signal: finish the step, save, leave.
        extra=("--exit-signal-handler", *_own_options(request), *given.extra),
    )
    words = to_argv(flags(launch))  # rules first: nothing is written for a layout that cannot run
    named = named_data(request.options, request.output, request.split)
    require_data(replace(launch, data=named))
    check_teacher(request.distill, words, given.layout.world_size)
    precision_file.require_usable_here(given, measured=measured)
    processes.machines(given.layout.world_size, request.device)
    precision = f"{launch.precision}{' emulated' if launch.emulate else ''}"
    print(f"{request.title}: {size.trainable:,} parameters, {launch.layout}, {precision}")
    with lock.held(request.checkpoints) as key:
        return _train_alone(request, launch, key, started)


def _train_alone(request: TrainRequest, launch: Launch, key: str, started: float) -> int:
    """Do the work of `train`, while no other process writes to the checkpoints."""
    given = request.launch
    for line in resume.before_start(["--load", str(request.checkpoints), *given.extra], rank=0, key=key):
        print(line)
    resume.require_trusted_start(["--load", str(request.checkpoints), *_own_options(request), *given.extra])
    for leftover in resume.remove_incomplete(request.checkpoints):
        print(f"removed {leftover}: its save was interrupted")
    begun = folders.latest_iteration(request.checkpoints)
    stored = None if begun is None else loadable_state(request.checkpoints, begun, launch)
    to_write = {}
    if request.precision_file and not given.te_precision_config_file:
        to_write[request.precision_file] = yaml_file.render(launch.config).encode()
    teachers = record_of(request.distill)
    identity = _RunIdentity(request, begun, stored, to_write, teachers)
    identity.require(launch, "model", "mtp", "precision", "teacher")
    data, baseline, rows = _prepared_data(request)
    if not has_validation(request.launch, rows):
        print(f"no validation: too few rows ({sum(rows.values())}) to keep some back")
        data = replace(data, split=ALL_TRAIN)
        launch = replace(launch, schedule=launch.schedule and replace(launch.schedule, eval_iters=0))
    if not request.options.data_path:  # named data sets have been checked
        require_data(replace(launch, data=data), rows)
    data = replace(data, save=str(request.checkpoints), load=str(request.checkpoints))
    identity.require(replace(launch, data=data), "tokenizer", "data")
    for path in to_write:
        yaml_file.write_precision_file(launch.config, path)

    log_file = request.output / log.FILE
    if begun is None:
        log_file.unlink(missing_ok=True)  # of a run that never saved
        (request.output / precision_report.FILE).unlink(missing_ok=True)
        lora = in_environment()
        base = request.options.pretrained
        if base is None and lora is not None and lora.base:
            base = Path(lora.base)
        if base is not None:
            keep_origin(base, request.output)
    elif (last := last_step(launch)) and begun >= last:
        beyond = "" if begun == last else f", beyond the {last} steps asked for"
        print(
            f"already trained to step {begun}{beyond}; to train on, give more --steps; to start over, "
            f"delete {request.output}"
        )
        _print_report(request, _curve(request), baseline, started)
        return 0
    else:
        print(f"resuming from step {begun}")
        launch = with_schedule(launch, given.options, begun, stored)

    launch = replace(launch, data=data)
    # The tokenizer is known now.
    check_teacher(request.distill, to_argv(flags(launch)), given.layout.world_size)
    identity.record(launch, request.command)
    if request.config_text:
        write_text(request.output / CONFIG_FILE, request.config_text)
    argv, ranks = to_argv(flags(launch)), launch.layout.world_size
    if (number := processes.machines(ranks, request.device)) > 1:
        print(processes.on_each_machine(argv, ranks, number, request.device, _variables(request, launch)))
        return 1
    print(f"training log: {log_file}", flush=True)
    words = processes.command(argv, ranks, request.device)
    env = processes.environment(ranks, request.device, given.config.hidden_size) | _variables(request, launch)
    env[switches.LOCK] = key
    env[switches.TRUST_CHECKPOINT] = "1"  # what is loaded has been looked at, or is trusted
    status, progress = _run(request, launch, words, env, log_file, begun or 0)
    saved = folders.latest_iteration(request.checkpoints)
    state = progress.on_disk(saved, status == 0)
    if status != 0 and not progress.stopped_at_once:
        need = folders.bytes_needed(count(given.config).trainable, given.precision)
        cause = progress.cause(request.checkpoints, status, need)
        raise ValueError(f"{cause}; {state} (see {log_file})")

    _print_report(request, _curve(request), baseline, started)
    if progress.was_interrupted:
        print(f"interrupted: {state}")
        return 130
    return 0


def _variables(request: TrainRequest, launch: Launch) -> dict[str, str]:
    """What the environment tells the training processes, of this package."""
    found = variables_of(request.options)
    if request.options.monitor is not None:
        found[switches.MONITOR] = str(request.options.monitor)
    if request.distill:
        found[switches.DISTILL] = distillation.text_of(request.distill)
    if launch.emulate:
        found[switches.EMULATE] = launch.emulate.text()
    if (measuring := _measurement(request)) is not None:
        found[switches.LOG_PRECISION] = measuring.text()
    return found


def _run(
    request: TrainRequest, launch: Launch, words: list[str], env: dict[str, str], log_file: Path, begun: int
) -> tuple[int, TrainProgress]:
    planned = launch.schedule.train_iters if launch.schedule is not None else None
    averaged = launch.config.num_moe_experts is None
    progress = TrainProgress(request.options.verbose, begun, planned, launch.seq_length, averaged=averaged)
    try:
        return processes.follow(words, env, log_file, progress), progress
    finally:
        progress.close()
        resume.remove_incomplete(request.checkpoints)
        # A save that was complete when the processes were ended may not have reached the tracker.
        with contextlib.suppress(ValueError):
            resume.before_start(["--load", str(request.checkpoints)], rank=0, key=env[switches.LOCK])


def _curve(request: TrainRequest) -> log.Curve:
    """Read the run's log, and the values of its event files if there are any."""
    curve = log.read(str(request.output / log.FILE))
    with contextlib.suppress(ValueError, ImportError):
        curve.correct(events.read(events.find(request.events)))
    return curve


def _measurement(request: TrainRequest) -> emulation.Logging | None:
    """Return where and when to measure precision. Short runs measure their last step."""
    if request.log_precision is None:
        return None
    launch = request.launch
    if launch.backend != "torch":
        raise ValueError(
            f"--log-precision measures only linears of the torch backend, not of {launch.backend}: use "
            "--backend torch"
        )
    steps = (launch.schedule and launch.schedule.train_iters) or emulation.LOG_DEFAULT
    interval = request.log_precision or min(emulation.LOG_DEFAULT, steps)
    return emulation.Logging(interval, str(request.output.resolve()))


def _prepared_data(request: TrainRequest) -> tuple[TrainingData, float | None, dict[str, int]]:
    """Return the data, the loss that needs no learning, and the rows of each file of conversations."""
    from megatron_nemotron3.train.data import prepare, unigram_baseline
    from megatron_nemotron3.train.data.prepare import MAX_BYTES

    options = request.options
    if options.conversations or options.data_path:
        rows = conversation_rows(options, options.tokenizer, request.launch, request.output / "data")
        return named_data(options, request.output, request.split), None, rows
    prepared = prepare(
        options.text,
        request.output / "data",
        vocab_size=min(request.launch.config.vocab_size, 65_000),
        max_bytes=options.max_bytes or MAX_BYTES,
    )
    source, tokenizer = options.text or "Python's own standard library", prepared.tokenizer
    counts = f"{len(prepared.texts.documents):,} documents, {prepared.dataset.tokens:,} tokens"
    print(f"text: {source}, {counts}")
    baseline = unigram_baseline(prepared.prefix, prepared.split, tokenizer.vocab_size)
    data = TrainingData(
        data_path=(prepared.prefix,),
        split=prepared.split,
        data_cache_path=prepared.data_cache_path,
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_model=tokenizer.tokenizer_model,
    )
    return data, baseline, {}


def _own_options(request: TrainRequest) -> tuple[str, ...]:
    options: tuple[str, ...] = ()
    # Event files, if TensorBoard is installed.
    if "--tensorboard-dir" not in request.launch.options and not first_missing(*log.EVENT_MODULES):
        options += ("--tensorboard-dir", str(request.events))
    if request.options.tracking.wandb is not None:
        options += ("--wandb-project", request.options.tracking.wandb)
        options += ("--wandb-save-dir", str(request.output))
        if "--wandb-exp-name" not in request.launch.options:
            options += ("--wandb-exp-name", request.output.resolve().name)
    if request.options.conversations:
        options += CONVERSATION_OPTIONS
    if request.options.isolate_documents:
        options += ISOLATION_OPTIONS
    if request.options.pretrained is not None:
        options += ("--pretrained-checkpoint", str(request.options.pretrained))
    return options


def _print_report(request: TrainRequest, curve: log.Curve, baseline: float | None, started: float) -> None:
    of = "next token" if boosting.in_environment() is None else "MTP heads"
    for line in log.verdict(curve, baseline, of):
        print(line)
    picture = request.output / "loss.png"
    if curve.steps:
        log.plot(curve, picture, request.title, baseline, of)
        print(f"loss plot        {picture}")
    if request.log_precision is not None:
        try:
            for line in precision_report.summary(precision_report.read(request.output)):
                print(line)
        except precision_report.ReportError as problem:  # nothing was measured yet, or in this run
            print(f"no precision report: {problem}")
    if (saved := folders.latest_iteration(request.checkpoints)) is not None:
        print(f"checkpoint       {folders.checkpoint_path(request.checkpoints, saved)}")
    print(f"took             {time.monotonic() - started:.0f} s")


class _RunIdentity:
    """Compare a launch with the run of its folder, and record what changes."""

    def __init__(
        self,
        request: TrainRequest,
        step: int | None,
        stored: StoredState | None,
        contents: Mapping[str, bytes],
        teacher: manifest.Part | None,
    ) -> None:
        self.manifest, self.step, self.allowed = manifest.RunManifest(request.output), step, request.changes
        self._given, self._options = (contents, teacher), request.options
        self.before = manifest.parts_of_checkpoint(stored.args) if stored else {}

    def _parts(self, launch: Launch) -> manifest.Parts:
        environment = {name: value for name, value in os.environ.items() if name != switches.EMULATE}
        environment |= variables_of(self._options)
        if launch.emulate:
            environment[switches.EMULATE] = launch.emulate.text()
        return manifest.parts_of(to_argv(flags(launch)), environment, launch.config.name, *self._given)

    def require(self, launch: Launch, *names: str) -> None:
        if self.step is not None:
            self.manifest.require_same(self._parts(launch), self.step, self.allowed, names, self.before)

    def record(self, launch: Launch, command: str) -> None:
        for line in self.manifest.write(self._parts(launch), self.step, command):
            print(line)
