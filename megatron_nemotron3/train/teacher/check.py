"""The teacher of a command line, checked before anything is imported or started."""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import read_config
from megatron_nemotron3.checkpoints.convert.megatron_args import config_of
from megatron_nemotron3.checkpoints.folders import locate_one
from megatron_nemotron3.checkpoints.state import stored_state
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.common.files import open_outside, read_outside
from megatron_nemotron3.common.parser import option_value, option_values
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch import check as violations
from megatron_nemotron3.launch.command_line import layout_of as of_options
from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.train.teacher.settings import (
    Distillation,
    Distillations,
    LogitsManifest,
    OptionValues,
    in_environment,
    is_stored,
    part_path,
    read,
    read_manifest,
    require_parts,
)
from megatron_nemotron3.train.teacher.vocabulary import Vocabulary, of_tokenizer

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.opened import Checkpoint

#: Options whose batches, parameters or forward pass the hooks of distillation do not see, and why.
_REFUSED = {
    "--use-megatron-fsdp": "it shards the model that the teacher is attached to",
    "--use-torch-fsdp2": "it shards the model that the teacher is attached to",
    "--overlap-moe-expert-parallel-comm": "its schedule does not call the model as a whole",
    "--hybrid-context-parallel": "every micro-batch has context-parallel groups of its own",
    "--export-kd-teacher-load": "it names another teacher",
    "--logits-load-dir": "it names another teacher",
}
#: Files with numbers, and how many bytes of the end of each a digest takes.
_NUMBERS, _END = (".distcp", ".safetensors", ".npy"), 4096


@dataclass(frozen=True)
class TeacherCheckpoint:
    """A model of the family in a checkpoint, without its MTP, and what its ids mean."""

    place: Path
    config: Nemotron3Config
    vocabulary: Vocabulary
    #: The output folder of `nemotron3 train` that it lies in.
    run: Path | None = None
    #: Folder of its tokenizer.json.
    tokenizer: Path | None = None


def find(folder: str) -> TeacherCheckpoint:
    """Read which model the checkpoint of a folder holds."""
    found = locate_one(Path(folder))
    if found.kind == "hugging face":
        config = open_hf_teacher(found.folder).config.but(mtp_pattern=None, mtp_num_layers=0)
        known = of_tokenizer(found.folder)
        vocabulary = known or Vocabulary(config.vocab_size)
        return TeacherCheckpoint(found.folder, config, vocabulary, tokenizer=found.folder if known else None)
    require_trusted(found.folder)
    state = stored_state(found.folder)
    if state is None or not state.args:
        raise ValueError(
            f"teacher {found.folder} has no Megatron arguments that can be read, which say its model: give a "
            "checkpoint in torch_dist format"
        )
    values: dict[str, Any] = dict(state.args)
    padded = values.get("padded_vocab_size")
    entries = values.get("vocab_size")
    config = config_of(Namespace(**values), name=Path(folder).name, vocab_size=entries or padded)
    multiple = values.get("make_vocab_size_divisible_by") or 1
    multiple *= values.get("tensor_model_parallel_size") or 1
    vocabulary, tokenizer = Vocabulary(entries, padded, multiple), None
    for place in _tokenizers(found.folder, found.run, values.get("tokenizer_model")):
        if (known := of_tokenizer(place)) is not None:
            vocabulary, tokenizer = replace(known, padded=padded, multiple=multiple), place
            break
    config = config.but(mtp_pattern=None, mtp_num_layers=0)
    return TeacherCheckpoint(found.folder, config, vocabulary, found.run, tokenizer)


def open_hf_teacher(folder: Path) -> Checkpoint:
    """Open a Hugging Face folder: packed weights as BF16, of a model with encoders its language part."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face

    packed = QUANTIZATION in read_config(folder, omni=True)
    opened = open_hugging_face(folder, dequantize=packed, omni=True)
    return opened if opened.omni is None else opened.language_part()


def _tokenizers(checkpoint: Path, run: Path | None, stored: Any) -> list[Path]:
    places = [Path(stored)] if isinstance(stored, str) and stored else []
    places += [checkpoint, checkpoint / "tokenizer"]
    return places + (sorted((run / "data").glob("*/tokenizer")) if run is not None else [])


def record_of(distillations: Distillations) -> dict[str, str] | None:
    """Entries of run.json for a distillation; from the second teacher on they end in its number."""
    if not distillations:
        return None
    record = {"name": " and ".join(str(Path(one.teacher)) for one in distillations)}
    for number, one in enumerate(distillations, 1):
        more = f" {number}" if number > 1 else ""
        record |= {f"{name}{more}": value for name, value in _record_of(one).items()}
    return record


def _record_of(how: Distillation) -> dict[str, str]:
    place = Path(how.teacher)
    record = {}
    if is_stored(place):
        record["logits"] = _digest(place)
    else:
        found = locate_one(place).folder
        record["weights"] = f"{found.name} {_digest(found)}"
    record |= {"kind": how.kind, "temperature": repr(how.temperature), "weight": repr(how.weight)}
    if how.projection:
        record["projection"] = hashlib.sha256(read_outside(how.projection, limit=1 << 32)).hexdigest()[:16]
    return record


def _digest(folder: Path) -> str:
    """Of the names, sizes and ends of the files with numbers, so that a teacher may be moved."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.suffix in _NUMBERS):
        with open_outside(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _END))
            digest.update(f"{file.name} {size}\n".encode() + opened.read())
    return digest.hexdigest()[:16]


def _student_vocabulary(argv: Sequence[str]) -> Vocabulary:
    model, size = option_value(argv, "--tokenizer-model"), option_value(argv, "--vocab-size")
    if model is not None and (known := of_tokenizer(Path(model))) is not None:
        return known
    return Vocabulary(int(size) if size and size.isdigit() else None)


def chosen(given: OptionValues, argv: Sequence[str], world_size: int) -> Distillations:
    """The teachers of a script's model, checked; () for none."""
    found = read(*given) if any(given) else in_environment()
    check(found, argv, world_size)
    return found


def check(distillations: Distillations, argv: Sequence[str], world_size: int) -> None:
    """Raise ValueError if teachers do not fit a script with these arguments."""
    for how in distillations:
        require_options(argv)
        _check(how, argv, world_size)


def _check(how: Distillation, argv: Sequence[str], world_size: int) -> None:
    if is_stored(Path(how.teacher)):
        _check_stored(how, read_manifest(Path(how.teacher)), argv)
        return
    teacher = find(how.teacher)
    if how.projection:
        _check_projection(how, teacher, argv)
    else:
        require_same_vocabulary(teacher.vocabulary, how.teacher, argv)
    layout = student_layout(argv, world_size)
    if len(teacher.config.pattern) < layout.stages:
        raise ValueError(
            f"teacher {how.teacher} has {len(teacher.config.pattern)} layers for {layout.stages} pipeline "
            "stages of the student: use fewer, or store its logits first (nemotron3 distill logits)"
        )
    launch = Launch(config=teacher.config, layout=layout, precision="fp32", backend="torch")
    if wrong := [rule.message for rule in violations(launch) if rule.severity == "error"]:
        raise ValueError(f"teacher {how.teacher} at {layout}: {'; '.join(wrong)}")


def _check_projection(how: Distillation, teacher: TeacherCheckpoint, argv: Sequence[str]) -> None:
    from megatron_nemotron3.train.teacher.projection import Projection, read_for
    from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary as Tokens

    if teacher.tokenizer is None:
        raise ValueError(
            f"teacher {how.teacher} has no tokenizer.json: put its tokenizer into {teacher.place}"
        )
    if not Path(how.projection).is_file():
        raise ValueError(
            f"projection={how.projection} is no file: nemotron3 distill projection STUDENT_TOKENIZER "
            f"{teacher.tokenizer} --output FILE writes one"
        )
    model = option_value(argv, "--tokenizer-model")
    if model is None:  # `nemotron3 train` checks again when the data is prepared
        Projection.load(Path(how.projection))
    else:
        read_for(Path(how.projection), Tokens(Path(model)), Tokens(teacher.tokenizer))


def _check_stored(how: Distillation, found: LogitsManifest, argv: Sequence[str]) -> None:
    if how.projection:
        raise ValueError(
            f"{how.teacher} has stored logits, which projection= does not go with: give a checkpoint"
        )
    require_same_vocabulary(found.vocabulary, how.teacher, argv)
    folder = Path(how.teacher)
    require_parts(folder, found, [part for part in found.parts() if not part_path(folder, part).is_file()])
    if how.temperature != found.temperature:
        raise ValueError(
            f"temperature={how.temperature:g}: {how.teacher} was stored at {found.temperature:g}, from "
            "which no other can be computed: give that one, or store the logits again"
        )
    needed = _rows_read(argv)
    # Conversations come again as they are; text that is read again is cut into other rows.
    if needed > found.samples and "cp" not in found.source:
        raise ValueError(
            f"the training reads {needed:,} rows, and {how.teacher} has {found.samples:,}: train on fewer "
            f"samples, or store them in a new folder (nemotron3 distill logits --samples {needed})"
        )
    length = option_value(argv, "--seq-length")
    if length is not None and length != str(found.length):
        raise ValueError(
            f"--seq-length {length}: {how.teacher} has rows of {found.length} tokens: use that length, or "
            "store the logits again"
        )


def _rows_read(argv: Sequence[str]) -> int:
    steps, batch, samples = (
        int(value) if (value := option_value(argv, f"--{name}")) and value.isdigit() else 0
        for name in ("train-iters", "global-batch-size", "train-samples")
    )
    return samples or steps * batch


def require_options(argv: Sequence[str]) -> None:
    """Raise ValueError at options that do not go with distillation."""
    for option, why in _REFUSED.items():
        if option_values(argv, option) is not None:
            raise ValueError(f"{option} does not go with distillation: {why}; leave one of them out")
    if option_value(argv, "--cuda-graph-impl") == "full_iteration":
        raise ValueError("--cuda-graph-impl full_iteration replays no teacher: use local, or leave it out")


def require_same_vocabulary(teacher: Vocabulary, name: str, argv: Sequence[str]) -> None:
    """Raise ValueError if the teacher's ids mean other tokens than the student's."""
    if (difference := teacher.differs(_student_vocabulary(argv))) is not None:
        raise ValueError(
            f"teacher {name} and the student have different vocabularies ({difference}): distil from a "
            "teacher with the student's tokenizer (--tokenizer-model, --tokenizer of nemotron3 train), or "
            "write a projection (nemotron3 distill projection) and give --distill projection=FILE"
        )


def student_layout(argv: Sequence[str], world_size: int) -> ParallelLayout:
    """The student's layout by the arguments of its script."""
    # Groups of experts are as wide as TP unless something else is given, whether there are experts or not.
    options = {"--num-experts": ("1",)} | {flag.name: flag.values for flag in parse(argv)}
    found = of_options(options) or ParallelLayout()
    pattern = "".join(options.get("--hybrid-layer-pattern", ()))
    vpp = max(1, (pattern.count("|") + 1) // found.pp)
    return replace(found, vpp=vpp, dp=max(1, world_size // (found.tp * found.cp * found.pp)))
