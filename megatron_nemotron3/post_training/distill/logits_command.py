"""`nemotron3 distill logits`: store a teacher's most probable tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import free_bytes
from megatron_nemotron3.checkpoints.trust import trust_option, trusting
from megatron_nemotron3.common import lock, record
from megatron_nemotron3.common.files import temporary_prefix
from megatron_nemotron3.common.options import NEEDED, add_command, argument, device_option, option
from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.common.parser import resolve_device
from megatron_nemotron3.common.switches import CONVERSATIONS, LOGITS_FOLDER, LOGITS_TEACHER, TRUST_CHECKPOINT
from megatron_nemotron3.launch import Launch, TrainingData, TrainingSchedule, data_check, flags, to_argv
from megatron_nemotron3.launch.command import chosen_layout, layout_option
from megatron_nemotron3.launch.data_sets import blend_of
from megatron_nemotron3.post_training.steps import ProcessWatch
from megatron_nemotron3.train.inputs import (
    ALL_TRAIN,
    CONVERSATION_OPTIONS,
    conversation_rows,
    format_option,
    given_data,
    has_validation,
    reading,
    require_conversation_files,
    require_no_reading,
    require_tokenizer,
    variables_option,
)
from megatron_nemotron3.train.teacher.check import TeacherCheckpoint, find
from megatron_nemotron3.train.teacher.settings import (
    LogitsManifest,
    is_stored,
    part_path,
    read_manifest,
    rows_of_run,
)
from megatron_nemotron3.train.teacher.vocabulary import of_tokenizer

#: Bytes of a part, about; a run that is interrupted repeats at most one.
_PART = 64 << 20
#: Rows of a part, at most.
_ROWS = 64
#: Folder of the encoded conversations.
_CACHE = "cache"
#: What the ranks run.
SCRIPT = Path(__file__).parent / "logits_script.py"
#: What the script prints after each part.
_STORED = re.compile(r"(\d+) of (\d+) parts$")


_DATA = partial(option, group="data, as in the training that reads it")


@dataclass(frozen=True, kw_only=True)
class LogitsOptions:
    """Options of `nemotron3 distill logits`."""

    teacher: str = argument("run, or Megatron or Hugging Face checkpoint folder", "FOLDER")
    output: Path = option("output folder; an incomplete one is continued", "DIR", default=NEEDED)
    samples: int = option("number of samples (rows of the training set)", "N", default=NEEDED, least=1)
    topk: int = option("most probable tokens per position (default 32)", "K", default=32, least=1)
    drawn: int = option("tokens per position drawn from the others (default 32)", "M", default=32, least=0)
    logit_temperature: float = option("temperature, the divisor of the logits (default 1)", "T", default=1.0)
    data_path: list[str] | None = _DATA("Megatron data sets (default: the run's)", "PREFIX", nargs="+")
    split: str | None = _DATA("split of the data sets (default: as in nemotron3 train)", "99,1,0")
    conversations: list[str] | None = _DATA("conversation files, packed", "FILE", nargs="+")
    format: str | None = format_option(group="data, as in the training that reads it")
    chat_template_kwargs: str | None = variables_option(group="data, as in the training that reads it")
    tokenizer: str | None = _DATA("Hugging Face tokenizer folder (default: the run's)", "DIR")
    seq_length: int | None = _DATA("tokens per sequence (default: the model's)", "N")
    data_seed: int = _DATA(
        "seed of the document order (default 1234)", "N", default=1234, least=0, most=2**32 - 1
    )
    tp: int | None = layout_option("tp")
    pp: int | None = layout_option("pp")
    vpp: int | None = None
    ep: int | None = layout_option("ep")
    etp: int | None = layout_option("etp")
    cp: int | None = layout_option("cp")
    dp: int | None = layout_option("dp")
    micro_batch_size: int = option(
        "sequences per rank and microbatch (default 1)", "N", default=1, group="layout", least=1
    )
    device: str = device_option()
    trust_checkpoint: bool = trust_option()


def register(commands: Any) -> None:
    """Add `nemotron3 distill logits`."""
    add_command(commands.add_parser("distill logits"), LogitsOptions, logits_command)


def logits_command(options: LogitsOptions) -> int:
    """Store the logits, or what is missing of them. Exit status 0; 130 after an interrupt."""
    if not 0 < options.logit_temperature < float("inf"):
        raise ValueError(f"--logit-temperature {options.logit_temperature:g}: give a positive number")
    with trusting(options.trust_checkpoint):
        teacher = find(options.teacher)
    data = _data(options, teacher)
    length = options.seq_length or teacher.config.seq_length
    manifest = _manifest(options, teacher, data, length)
    launch = _launch(options, teacher, data, length)
    data_check.require(to_argv(flags(launch)))
    with lock.held(options.output):
        before = _stored(options.output)
        if options.conversations:
            data = replace(data, split=_split(options, launch, before))
            manifest, launch = _manifest(options, teacher, data, length), replace(launch, data=data)
        argv = to_argv(flags(launch))
        _require_folder(options.output, manifest, before)
        print(
            f"{manifest.k} + {manifest.drawn} tokens of {manifest.samples:,} rows of {manifest.length:,}: "
            f"{manifest.size / 1e6:,.1f} MB in {len(manifest.parts())} parts",
            flush=True,
        )
        return _run(options, launch, argv, manifest)


def _stored(folder: Path) -> LogitsManifest | None:
    """The manifest of a folder, None of a new one. ValueError if it holds something else."""
    if is_stored(folder):
        return read_manifest(folder)
    # A checkpoint's folder with a manifest would count as stored logits, wherever a teacher is named.
    if any(path.name not in (lock.NAME, _CACHE) for path in folder.iterdir()):
        raise ValueError(f"{folder} exists and holds no stored logits: give a new --output")
    return None


def _split(options: LogitsOptions, launch: Launch, before: LogitsManifest | None) -> str | None:
    """How the conversations are divided: as before, or as `nemotron3 train` divides as many rows."""
    data = launch.data
    assert data is not None and data.tokenizer_model is not None
    if before is not None:
        return options.split or before.source.get("split", data.split)
    rows = conversation_rows(options, data.tokenizer_model, launch, options.output / _CACHE)
    return data.split if options.split or has_validation(launch, rows) else ALL_TRAIN


def _require_folder(folder: Path, manifest: LogitsManifest, before: LogitsManifest | None) -> None:
    """Check that these logits may be written to the folder, and write the manifest to a new one."""
    if before is not None:
        if before != manifest:
            changed = record.differences(vars(before), vars(manifest))
            different = ", ".join(f"{name} {old}, not {new}" for name, (old, new) in changed.items())
            raise ValueError(
                f"{folder} holds other logits ({different}): go on with the same options, or give another "
                "--output"
            )
        for leftover in folder.glob(temporary_prefix("part-*.npy") + "*"):
            leftover.unlink()  # of processes that were ended while they wrote
        return
    if (free := free_bytes(folder)) < manifest.size:
        raise ValueError(
            f"{folder}: {manifest.size / 1e6:,.0f} MB are needed, and {free / 1e6:,.0f} MB are free: "
            "give a smaller --topk or --drawn, or fewer --samples"
        )
    manifest.write(folder)


def _data(options: LogitsOptions, teacher: TeacherCheckpoint) -> TrainingData:
    if options.data_path and options.conversations:
        raise ValueError("--data-path and --conversations both say which rows to take: give one")
    run = rows_of_run(teacher.run)
    tokenizer = options.tokenizer or (run.tokenizer if run is not None else teacher.tokenizer)
    tokenizer = None if tokenizer is None else str(tokenizer)
    if tokenizer is None:
        raise ValueError(f"{options.teacher} is no run with a tokenizer: give --tokenizer DIR")
    require_tokenizer(tokenizer)
    known = of_tokenizer(Path(tokenizer))
    if known is not None and (difference := teacher.vocabulary.differs(known)) is not None:
        cure = "give the teacher's"
        if teacher.tokenizer is None:
            cure += f"; or, if it is and {teacher.place} has padding, copy its tokenizer.json there"
        raise ValueError(f"tokenizer {tokenizer} is not the teacher's ({difference}): {cure}")
    paths: Sequence[str] = options.data_path or options.conversations or ()
    split = options.split
    if not paths:
        if run is None:
            raise ValueError(f"{options.teacher} has no data: give --data-path or --conversations")
        paths, split = run.paths, split or run.split
    require_conversation_files(options.conversations or ())
    for prefix in () if options.conversations else blend_of("--data-path", paths).prefixes:
        if not Path(f"{prefix}.idx").is_file():
            raise ValueError(f"--data-path {prefix}: there is no file {prefix}.idx")
    cache = str(options.output / _CACHE)
    return given_data(paths, tokenizer, conversations=bool(options.conversations), split=split, cache=cache)


def _manifest(
    options: LogitsOptions, teacher: TeacherCheckpoint, data: TrainingData, length: int
) -> LogitsManifest:
    source: dict[str, Any] = {
        "data": [
            str(Path(path).absolute()) if Path(path).parent.is_dir() else path for path in data.data_path
        ],
        "split": data.split,
        "seed": options.data_seed,
        "tokenizer": str(Path(str(data.tokenizer_model)).absolute()),
    }
    if options.conversations:
        source["cp"] = options.cp or 1  # what conversations are padded for
        if how := reading(options).text():
            source["reading"] = how
    else:
        require_no_reading(options)
    most = teacher.vocabulary.entries or teacher.config.vocab_size
    if options.topk > most:
        raise ValueError(f"--topk {options.topk}: the vocabulary has {most} tokens")
    row = 4 * length * (2 * (options.topk + options.drawn) + 1)
    return LogitsManifest(
        k=options.topk,
        drawn=options.drawn if options.topk < most else 0,
        temperature=options.logit_temperature,
        length=length,
        rows=max(1, min(_ROWS, _PART // row)),
        samples=options.samples,
        teacher=str(teacher.place.resolve()),
        vocabulary=teacher.vocabulary,
        source=source,
    )


def _launch(options: LogitsOptions, teacher: TeacherCheckpoint, data: TrainingData, length: int) -> Launch:
    on_cpu = resolve_device(options.device, "megatron.core") == "cpu"
    layout, size = chosen_layout(options), options.micro_batch_size
    schedule = TrainingSchedule(
        micro_batch_size=size,
        global_batch_size=size * layout.dp,
        seq_length=length,
        train_samples=options.samples,
        lr=1e-4,  # Megatron's parser asks for one
        lr_decay_style="constant",
        eval_iters=0,
        eval_interval=None,
    )
    return Launch(
        config=teacher.config,
        layout=layout,
        precision="fp32" if on_cpu else "bf16",
        backend="torch" if on_cpu else "auto",
        schedule=schedule,
        data=data,
        own_script=True,
        extra=("--seed", str(options.data_seed), *(CONVERSATION_OPTIONS if options.conversations else ())),
    )


def _run(options: LogitsOptions, launch: Launch, argv: list[str], manifest: LogitsManifest) -> int:
    from megatron_nemotron3.post_training.distill.stored import mass_of
    from megatron_nemotron3.train import processes

    device = resolve_device(options.device, "megatron.core")
    command = processes.command(argv, launch.layout.world_size, device, SCRIPT)
    env = processes.environment(launch.layout.world_size, device, launch.config.hidden_size)
    env |= {
        LOGITS_FOLDER: str(options.output.resolve()),
        LOGITS_TEACHER: manifest.teacher,
        TRUST_CHECKPOINT: "1",
        CONVERSATIONS: reading(options).text(),
    }
    log = options.output / "logits.log"
    with Bar("logits", "parts") as bar:
        watch = ProcessWatch(bar, _STORED)
        status = processes.follow(command, env, log, watch)
    if watch.was_interrupted:
        stored = sum(part_path(options.output, part).is_file() for part in manifest.parts())
        print(f"interrupted: {stored} of {len(manifest.parts())} parts are stored; the same command goes on")
        return 130
    if status:
        raise ValueError(f"the processes ended with {status}; the parts that are written stay (see {log})")
    print(f"stored           {options.output}")
    print(f"mass             {mass_of(options.output):.1%} of the probability is of the {manifest.k} tokens")
    return 0
