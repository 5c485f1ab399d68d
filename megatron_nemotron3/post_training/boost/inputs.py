"""What boosting starts from: checked before any work, and the same when a command goes on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoints.convert.from_hf import pad_vocab_size
from megatron_nemotron3.checkpoints.folders import checkpoint_path, read_tracker, require_tokenizer
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.inference.generate.checkpoint_folder import CheckpointFolder, find_checkpoint
from megatron_nemotron3.inference.generate.command import MAX_DRAFT
from megatron_nemotron3.inference.generate.evaluate_command import chosen_seq_length, data_tokens
from megatron_nemotron3.launch import boosting as settings
from megatron_nemotron3.launch.boosting import Boost
from megatron_nemotron3.launch.rules import enforce
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import stored_model
from megatron_nemotron3.models.show import describe
from megatron_nemotron3.post_training.steps import require_positive, require_schedule, with_own_name
from megatron_nemotron3.train.command import chosen_launch
from megatron_nemotron3.train.data import TokenizerInfo, default_split, read_texts, write_dataset

#: Written first: what the folder is the work of.
RECORD = "boost.json"
#: Megatron pads the vocabulary to a multiple of this.
_MULTIPLE = 128


@dataclass(frozen=True)
class BoostInputs:
    """What was read and found right."""

    found: CheckpointFolder
    #: The model to train, with MTP at the chosen depths.
    config: Nemotron3Config
    hugging_face: bool
    tokenizer: Path
    info: TokenizerInfo
    #: A data set, or texts to make one of.
    data_path: str | None
    documents: tuple[str, ...]
    split: str
    steps: int
    lr: float
    #: Rows of the embedding, with padding.
    rows: int
    #: Two starts in one folder must agree in it.
    record: dict[str, object]

    def pretrained(self, output: Path) -> Path:
        return output / "base" if self.hugging_face else self.found.checkpoint.parent

    def prefix(self, output: Path) -> str:
        """The data set. The checkpoint names it and the tokenizer, so both are absolute."""
        return str(Path(self.data_path or output / "data" / "corpus").absolute())

    def held_out(self, output: Path, tokens: int) -> list[int]:
        return data_tokens(self.prefix(output), self.split, tokens)


def check(options: argparse.Namespace, boost: Boost, steps: int, lr: float) -> BoostInputs:
    """Read all inputs, and write nothing; `steps` and `lr` are defaults, for a tiny model."""
    require_positive(options, "steps", "lr")
    if not 1 <= options.depths <= MAX_DRAFT:
        raise ValueError(f"--depths {options.depths}: give 1 to {MAX_DRAFT}")
    found = find_checkpoint(options.checkpoint)
    opened = found.open(stored_model(options))
    if opened.omni is not None:
        raise ValueError(f"{options.checkpoint}: it has encoders: boost the language model alone")
    hugging_face = opened.kind == "hugging face"
    if not hugging_face:
        _require_tracked(found, opened.kind)
        require_trusted(found.checkpoint)
    config = with_own_name(_with_heads(opened.config, options, found))
    pattern = ["--hybrid-layer-pattern", config.full_pattern]
    settings.require_trainable([*pattern, "--context-parallel-size", str(options.cp or 1), *options.extra])
    require_schedule(options, config)
    length = chosen_seq_length(options.seq_length, config)
    if length <= options.depths:
        raise ValueError(f"--seq-length {length}: depth {options.depths} has no label: give more")
    # What training would refuse after the drafts have been measured.
    enforce(chosen_launch(options, config, options.device))
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    tokenizer = found.tokenizer(options.tokenizer)
    rows = opened.padded_vocab_size or pad_vocab_size(config.vocab_size, _MULTIPLE)
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{tokenizer.folder}: {tokenizer.vocab_size:,} tokens are more than the model's {rows:,}: give "
            "the model's own tokenizer by --tokenizer DIR"
        )
    if rows % (tp := options.tp or 1):
        raise ValueError(f"--tp {tp}: the {rows:,} rows of the embedding are no multiple of it")
    if not tokenizer.stop:
        raise ValueError(f"{tokenizer.folder}: it has no end token, which ends a document: add eos_token")
    data_path, split, documents = _data(options, found)
    folder = tokenizer.folder.absolute()
    return BoostInputs(
        found=found,
        config=config,
        hugging_face=hugging_face,
        tokenizer=folder,
        info=TokenizerInfo("HuggingFaceTokenizer", str(folder), tokenizer.vocab_size, tokenizer.stop[0]),
        data_path=data_path,
        documents=documents,
        split=split,
        steps=options.steps or steps,
        lr=options.lr or lr,
        rows=rows,
        record={
            "checkpoint": str(found.checkpoint.resolve()),
            "model": describe(config)["config"],
            "boost": boost.text(),
            "data": str(Path(options.text or data_path or "").absolute()),
            "tokenizer": str(folder),
            "lr": options.lr or lr,
            "seq_length": length,
        },
    )


def _require_tracked(found: CheckpointFolder, kind: str) -> None:
    if kind != "torch_dist":
        raise ValueError(
            f"{found.checkpoint}: its kind, {kind}, is not boosted: nemotron3 convert to-hf makes a folder "
            "that is"
        )
    folder = found.checkpoint.parent
    try:
        which = read_tracker(folder)
    except ValueError as problem:
        raise ValueError(f"{folder}: the tracker {problem}") from None
    if which is None or checkpoint_path(folder, which) != found.checkpoint:
        raise ValueError(
            f"{found.checkpoint}: the tracker of {folder} names {which}, which Megatron would load: copy the "
            "checkpoint into a folder of its own, with a tracker"
        )


def _with_heads(
    config: Nemotron3Config, options: argparse.Namespace, found: CheckpointFolder
) -> Nemotron3Config:
    """The model with MTP at the depths that the options ask for."""
    grow, depths = options.grow, options.depths
    if grow is None and not config.has_mtp:
        raise ValueError(
            f"{found.checkpoint}: {config.title} has no MTP block to train: --grow '*E' adds one of an "
            "attention and an expert layer (use layers that the model has)"
        )
    if grow is not None and config.has_mtp:
        raise ValueError(
            f"--grow {grow}: {found.checkpoint} has an MTP block ({config.mtp_pattern}), which is trained: "
            "leave --grow out"
        )
    if grow is not None:
        return config.but(mtp_pattern=grow, mtp_num_layers=depths, mtp_use_repeated_layer=True)
    if not config.mtp_use_repeated_layer and depths != config.mtp_num_layers:
        raise ValueError(
            f"--depths {depths}: {found.checkpoint} has {config.mtp_num_layers} MTP blocks, one per depth: "
            f"give --depths {config.mtp_num_layers}"
        )
    return config.but(mtp_num_layers=depths)


def _data(options: argparse.Namespace, found: CheckpointFolder) -> tuple[str | None, str, tuple[str, ...]]:
    if options.text is not None:
        documents = tuple(read_texts(options.text).documents)
        return None, default_split([len(document) for document in documents]), documents
    if options.data_path is not None:
        prefix, split = options.data_path, "99,1,0"
    else:
        prefix, split = found.data()
    data_tokens(prefix, split, 1)
    return prefix, split, ()


def prepare(given: BoostInputs, output: Path) -> None:
    """Write the record, the model and the data set. A second call with the same inputs changes nothing."""

    def write(folder: Path) -> None:
        if given.documents:
            (folder / "data").mkdir()
            write_dataset(given.documents, given.info, given.prefix(folder))
        write_json(folder / "model.json", describe(given.config))

    record.begin(output, RECORD, given.record, "boost", write)
