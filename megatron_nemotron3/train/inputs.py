"""The options of `nemotron3 train`, and whether what they name exists, before anything is written."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.folders import CHECKPOINTS, TRACKER, require_tokenizer
from megatron_nemotron3.checkpoints.trust import trust_option
from megatron_nemotron3.common.files import not_writable
from megatron_nemotron3.common.options import LOG, TrackingOptions, config_option, flag, option, repeated
from megatron_nemotron3.common.parser import PACKAGES, first_missing
from megatron_nemotron3.common.switches import CONVERSATIONS, SFT_MEAN
from megatron_nemotron3.launch import Launch, TrainingData, data_check, flags, to_argv
from megatron_nemotron3.launch.data_sets import blend_of, cut
from megatron_nemotron3.launch.flag import values_by_name
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.train.data.forms import FORMS
from megatron_nemotron3.train.isolation import ISOLATE, micro_batch_problem, require_ends
from megatron_nemotron3.train.log import EVENT_MODULES

if TYPE_CHECKING:
    from megatron_nemotron3.train.data.conversations import Reading

#: What the loss of fine-tuning may be a mean over, the default first.
MEANS = ("tokens", "conversations")

#: Share of the rows of conversations that is trained on, and the split of too few rows to divide.
_TRAINED, ALL_TRAIN = 0.9, "100,0,0"

#: Megatron's options for a training on conversations.
CONVERSATION_OPTIONS = ("--sft", "--calculate-per-token-loss", "--sft-tokenizer-prompt-format", "default")


def format_option(**details: Any) -> Any:
    """--format, the form of the rows of conversations."""
    return option("conversation format (default: detected per row)", choices=FORMS, **details)


def variables_option(**details: Any) -> Any:
    """--chat-template-kwargs."""
    return option("chat template variables, a JSON object; those of a row take precedence", "JSON", **details)


_DATA, START = "data", "initial weights"
_DISTILLATION = "distillation"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `nemotron3 train` alone; their values are in the namespace, next to those of the launch."""

    output: Path | None = option("output folder (default: runs/NAME)", "DIR")
    config: str | None = config_option()
    text: str | None = option("text file, .jsonl or folder (default: Python's sources)", "PATH", group=_DATA)
    max_bytes: int | None = option("maximum number of bytes of text", "N", group=_DATA)
    data_path: list[str] = repeated("Megatron data sets, in place of text", "PREFIX", nargs="+", group=_DATA)
    conversations: list[str] = repeated("conversation files to fine-tune on", "FILE", nargs="+", group=_DATA)
    tokenizer: str | None = option(
        "Hugging Face tokenizer folder (for --data-path or --conversations)", "DIR", group=_DATA
    )
    format: str | None = format_option(group=_DATA)
    chat_template_kwargs: str | None = variables_option(group=_DATA)
    isolate_documents: bool = flag("separate the documents of a sequence in all layers", group=_DATA)
    mean: str | None = option(
        f"what the loss on --conversations is averaged over (default {MEANS[0]})", choices=MEANS, group=_DATA
    )
    pretrained: Path | None = option(
        "run or checkpoint with the initial weights, if the output folder has none", "DIR", group=START
    )
    trust_checkpoint: bool = trust_option(group=START)
    monitor: int | None = option("interval of the stability monitors, in iterations; 0: off", "N", group=LOG)
    log_precision: str | None = option(
        f"measure quantization errors every N steps (default {emulation.LOG_DEFAULT})",
        "N",
        nargs="?",
        const="",
        group=LOG,
    )
    tracking: TrackingOptions = TrackingOptions()
    teacher: list[str] = repeated(
        "teacher checkpoint, or logits of `nemotron3 distill logits`; may be repeated",
        "DIR",
        group=_DISTILLATION,
    )
    distill: list[str] = repeated(
        "distillation settings, such as kind=kl,temperature=2,weight=0.9; one per --teacher, or one for all",
        "SETTINGS",
        group=_DISTILLATION,
    )
    verbose: bool = flag("print Megatron's full log", group=LOG)


def require_inputs(options: argparse.Namespace) -> None:
    """Raise ValueError at data and folders that do not exist, or that would not be used."""
    if options.conversations:
        _require_source(options, "--conversations", ("text", "max_bytes", "data_path"))
        require_conversation_files(options.conversations)
        reading(options)
        mean(options)
        if options.micro_batch_size not in (None, 1):
            raise ValueError(
                f"--micro-batch-size {options.micro_batch_size}: conversations are packed into rows; give 1, "
                "and a larger --seq-length"
            )
        if options.isolate_documents:
            raise ValueError(f"{ISOLATE} with --conversations: none sees another anyway: drop it")
    else:
        require_no_reading(options)
        if options.mean is not None:
            raise ValueError("--mean goes with --conversations: drop it")
    if options.pretrained is not None and (options.pretrained / CHECKPOINTS / TRACKER).is_file():
        options.pretrained /= CHECKPOINTS  # of a run
    if options.pretrained is not None and not (options.pretrained / TRACKER).is_file():
        raise ValueError(
            f"--pretrained {options.pretrained} has no {TRACKER}: give a run, or a folder that `nemotron3 "
            "convert from-hf` or --save wrote"
        )
    if options.data_path:
        _require_source(options, "--data-path", ("text", "max_bytes"))
        for prefix in blend_of("--data-path", options.data_path).prefixes:
            if missing := [s for s in (".bin", ".idx") if not Path(prefix + s).is_file()]:
                raise ValueError(f"--data-path {prefix}: there is no file {prefix}{missing[0]}")
        if options.isolate_documents:
            require_ends(["--data-path", *options.data_path])
    elif options.tokenizer is not None and not options.conversations:
        raise ValueError(
            "--tokenizer goes with --data-path or --conversations; from text a tokenizer is trained: drop it"
        )
    if options.isolate_documents and options.micro_batch_size not in (None, 1):
        raise ValueError(micro_batch_problem(options.micro_batch_size))
    if options.text is not None and not ((text := Path(options.text)).is_file() or text.is_dir()):
        what = "is neither a file nor a folder" if text.exists() else "does not exist"
        raise ValueError(f"--text {options.text} {what}")
    if options.max_bytes is not None and options.max_bytes < 1:
        raise ValueError(f"--max-bytes {options.max_bytes}: give 1 or more")
    output = options.output
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file: give a folder")


def reading(options: Any) -> Reading:
    """The value of --format and --chat-template-kwargs, else of NEMOTRON3_CONVERSATIONS, checked."""
    from megatron_nemotron3.train.data.conversations import READING, Reading

    given, variable = Reading.of(options.format, options.chat_template_kwargs), READING.read()
    if options.format is None and options.chat_template_kwargs is None:
        return variable
    if given != variable != Reading():
        words = shlex.join(given.options()) or "neither --format nor --chat-template-kwargs"
        raise ValueError(
            f"{CONVERSATIONS}={variable.text()} is set, and given is {words}: unset it or give the same"
        )
    return given


def mean(options: Any) -> str:
    """The value of --mean, else of NEMOTRON3_SFT_MEAN, checked."""
    variable = (given := os.environ.get(SFT_MEAN, "")) and parse_mean(given)
    if options.mean and variable and options.mean != variable:
        raise ValueError(
            f"{SFT_MEAN}={variable} is set, and given is --mean {options.mean}: unset it or give the same"
        )
    return options.mean or variable or MEANS[0]


def parse_mean(text: str) -> str:
    """Parse a value of NEMOTRON3_SFT_MEAN; raise ValueError if it is unknown."""
    if text and text not in MEANS:
        raise ValueError(f"{SFT_MEAN}={text!r}: use {' or '.join(MEANS)}")
    return text or MEANS[0]


def variables_of(options: TrainOptions) -> dict[str, str]:
    """What the environment tells the training processes about conversations."""
    if not options.conversations:
        return {}
    return {SFT_MEAN: mean(options), CONVERSATIONS: reading(options).text()}


def require_no_reading(options: Any) -> None:
    """Raise ValueError at options of conversations where there are none."""
    for name in ("format", "chat_template_kwargs"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --conversations: drop it")


def require_tracking(tracking: TrackingOptions, extra: Sequence[str]) -> None:
    """Raise ValueError if the run cannot be logged where it was asked for; `extra`: Megatron's arguments."""
    given = values_by_name(extra)
    for name, value, own, modules in (
        ("wandb", tracking.wandb, "--wandb-project", ("wandb",)),
        ("tensorboard", tracking.tensorboard, "--tensorboard-dir", EVENT_MODULES),
    ):
        if value is not None and (missing := first_missing(*modules)):
            package = PACKAGES.get(missing.partition(".")[0], missing)
            raise ValueError(f"--{name}: package {package} is not installed: pip install {package}")
        if value is not None and own in given:
            raise ValueError(f"--{name} and {own} both say where the run is logged: give one")
    if tracking.tensorboard and Path(tracking.tensorboard).is_file():
        raise ValueError(f"--tensorboard {tracking.tensorboard} is a file: give a folder")
    if tracking.tensorboard and (place := not_writable(Path(tracking.tensorboard))) is not None:
        raise ValueError(
            f"--tensorboard {tracking.tensorboard}: {place} is not a writable folder: give another"
        )
    if tracking.wandb == "":
        raise ValueError("--wandb: the name of the project is empty: give one")
    if tracking.wandb is not None and os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared"):
        import wandb

        if not wandb.api.api_key:
            raise ValueError("--wandb: nobody is logged in here: wandb login, or set WANDB_MODE=offline")


def require_conversation_files(files: Sequence[str]) -> None:
    """Raise ValueError at a file of --conversations that does not exist."""
    for file in blend_of("--conversations", files).prefixes if files else ():
        if not Path(file).is_file():
            raise ValueError(f"--conversations {file}: there is no such file")


def given_data(
    paths: Sequence[str],
    tokenizer: str | None,
    *,
    conversations: bool,
    split: str | None = None,
    cache: str | None = None,
) -> TrainingData:
    """Megatron's data options for data sets, or for conversations, and the folder of a tokenizer."""
    return TrainingData(
        data_path=tuple(paths),
        split=split or ("90,10,0" if conversations else "99,1,0"),
        data_cache_path=cache,
        tokenizer_type="SFTTokenizer" if conversations else "HuggingFaceTokenizer",
        tokenizer_model=tokenizer,
    )


def named_data(options: TrainOptions, output: Path, split: str | None) -> TrainingData:
    """The data sets or conversations that the options name; of text nothing is known yet."""
    if options.conversations:
        cache = str(output / "data")
        return given_data(options.conversations, options.tokenizer, conversations=True, cache=cache)
    if options.data_path:
        # Megatron writes the index of samples next to the data set.
        kept = any(
            not_writable(Path(prefix)) for prefix in options.data_path if Path(prefix + ".idx").is_file()
        )
        own = str(output / "data" / "cache") if kept else None
        return given_data(options.data_path, options.tokenizer, conversations=False, split=split, cache=own)
    return TrainingData()


def conversation_rows(options: Any, tokenizer: str | None, launch: Launch, cache: Path) -> dict[str, int]:
    """Encode the conversations, so that a wrong file ends here; return the number of rows of each file.

    The processes map the result in `cache`.

    Args:
        options: with --conversations, --format and --chat-template-kwargs.
    """
    from megatron_nemotron3.train.data.conversations import READING
    from megatron_nemotron3.train.data.packing import PackedConversations, conversation_multiple

    multiple, rows = conversation_multiple(launch.layout.cp), {}
    for file in blend_of("--conversations", options.conversations).prefixes if options.conversations else ():
        assert tokenizer is not None
        with READING.using(reading(options)):
            packed = PackedConversations(file, tokenizer, launch.seq_length, multiple, str(cache))
        print(packed.describe(), packed.samples(tokenizer), sep="\n")
        rows[file] = len(packed)
    return rows


def has_validation(launch: Launch, rows: Mapping[str, int]) -> bool:
    """Whether any file of conversations has a row for validation, where nothing says how to divide them."""
    if not rows or "--split" in launch.options or "--eval-iters" in launch.options:
        return True
    return any(cut((_TRAINED, 1.0), count) for count in rows.values())


def require_data(launch: Launch, rows: Mapping[str, int] | None = None) -> None:
    """Raise ValueError at data that Megatron would loop or fail on; print what is doubtful."""
    for warning in data_check.require(to_argv(flags(launch)), rows):
        print(f"warning: {warning}", file=sys.stderr)


def _require_source(options: argparse.Namespace, source: str, others: Sequence[str]) -> None:
    """Raise ValueError if the source of the data has no tokenizer, or there is another source."""
    for name in others:
        if getattr(options, name) not in (None, []):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} and {source} both say what to train on: give one")
    if options.tokenizer is None:
        raise ValueError(f"{source} needs --tokenizer DIR (a Hugging Face tokenizer)")
    require_tokenizer(options.tokenizer)
