"""What a Megatron checkpoint keeps of the Hugging Face folder that it comes from, and where a run finds it.

DIR/release/hugging_face/ has its config.json, tokenizer, code and generation settings; RUN/hugging_face/ has
the same when `nemotron3 train` starts from DIR. Megatron itself keeps only the name of the folder that it
loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.convert.config_json import check_same_model, read, with_mtp
from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import CONFIG, read_config
from megatron_nemotron3.checkpoints.convert.omni_config import omni_config, require_same, text_part
from megatron_nemotron3.checkpoints.folders import (
    HUGGING_FACE,
    RELEASE,
    TOKENIZER,
    TOKENIZER_FILES,
    locate_one,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_file, read_json, regular_file_size
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.checkpoints.state import read_arguments
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.opened import Checkpoint

#: Files of a tokenizer, which belong together, and others that are copied.
_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.json"),
)
_COPIED = (
    *("generation_config.json", "processor_config.json", "preprocessor_config.json"),
    "video_preprocessor_config.json",
)
_TOKENIZER_ENDINGS, _COPIED_ENDINGS = (".jinja", ".tiktoken"), (".py",)
#: What the files begin with that a licence wants to be passed on.
_COPIED_BEGINNINGS = ("LICENSE", "NOTICE")
#: Files of which a tokenizer has one.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
#: Files besides config.json that may name code of the folder (auto_map).
_NAMING_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
#: Longest file that is copied, in bytes; the tokenizer has 17 MB.
_COPIED_LIMIT = 256 << 20
#: Prepared data of a run of `nemotron3 train`.
DATA, CORPUS = "data", "corpus"


def copied_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer, generation, code and licence files of a folder, by name."""
    result = {}
    for path in sorted(folder.iterdir()):
        licence = path.name.startswith(_COPIED_BEGINNINGS) and path.is_file()
        of_model = path.name in _COPIED or path.name.endswith(_COPIED_ENDINGS)
        if licence or of_model or _of_tokenizer(path.name):
            regular_file_size(path, folder)
            result[path.name] = read_file(path, _COPIED_LIMIT)
    return result


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer, by name."""
    return {name: data for name, data in copied_files(folder).items() if _of_tokenizer(name)}


def _of_tokenizer(name: str) -> bool:
    return name in _TOKENIZER or name.endswith(_TOKENIZER_ENDINGS)


def _has_tokenizer(files: Iterable[str]) -> bool:
    return any(name in _VOCABULARIES or name.endswith(".tiktoken") for name in files)


def to_keep(opened: Checkpoint, base: Checkpoint | None) -> tuple[dict[str, bytes], list[str]]:
    """Return what a release checkpoint keeps of `opened`, a Hugging Face folder, and what cannot be kept.

    If it is put into `base`, that is what `base` has kept.
    """
    folder, stated = opened.folder, opened.stated
    if base is not None:
        if base.origin is None:
            return {}, []
        folder, stated = base.origin, read_json(base.origin / CONFIG)
    files, lines = {}, []
    try:
        files = copied_files(folder)
        if not _has_tokenizer(files):
            lines.append(f"tokenizer    none found in {shown(folder)}: later commands need --tokenizer DIR")
    except CheckpointError as problem:
        lines.append(shown(f"not kept     {problem}"))
    return release_files(files, HUGGING_FACE, stated), lines


def release_files(
    files: Mapping[str, bytes], place: str, stated: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return files for a folder `place` in a release checkpoint, and a config.json with the keys `stated`."""
    if stated is not None:
        files = {**files, CONFIG: (json.dumps(dict(stated), indent=2) + "\n").encode()}
    return {f"{RELEASE}/{place}/{name}": data for name, data in files.items()}


def to_copy(reference: Path | None, opened: Checkpoint) -> tuple[dict[str, bytes], str]:
    """Return the files that a Hugging Face folder gets besides the model, and whose tokenizer it is.

    They are those of the reference, of the checkpoint's tokenizer, and of its origin. The first that has a
    file wins; a tokenizer is that of one folder.
    """
    places = filter(None, (reference, *opened.tokenizers, opened.origin))
    has_one = (place for place in places if any(os.path.isfile(place / name) for name in _VOCABULARIES))
    whose = next(has_one, None)
    files: dict[str, bytes] = {}
    folders = dict.fromkeys(filter(None, (reference, whose, opened.origin)))
    for copied in reversed([_of_reference(f) if f == reference else copied_files(f) for f in folders]):
        if any(name in copied for name in _VOCABULARIES):
            files = {name: data for name, data in files.items() if not _of_tokenizer(name)}
        files |= copied
    if not _has_tokenizer(files):
        return files, "tokenizer    none found: --reference DIR copies that of DIR"
    return files, "" if whose in (None, reference) else f"tokenizer    as in {shown(whose or '')}"


def check_reference(folder: Path | None) -> None:
    """Refuse a --reference that is neither a Hugging Face folder nor that of a tokenizer."""
    if folder is None:
        return
    if not folder.is_dir():
        raise ValueError(f"{folder}: --reference must be a folder")
    if not any(os.path.lexists(folder / name) for name in (CONFIG, *TOKENIZER_FILES)):
        raise ValueError(
            f"--reference {folder}: it has no {CONFIG} and no tokenizer: give a Hugging Face folder"
        )


def _of_reference(folder: Path) -> dict[str, bytes]:
    """Return what is copied of a reference: code only if a config.json, or what belongs to it, names some."""
    files = copied_files(folder)
    if any(name.endswith(".py") for name in files):
        named = (name for name in (CONFIG, *_NAMING_CODE) if os.path.lexists(folder / name))
        if not (os.path.lexists(folder / CONFIG) and any("auto_map" in read_json(folder / n) for n in named)):
            return {name: data for name, data in files.items() if not name.endswith(".py")}
    return files


def find_origin(checkpoint: Path, run: Path | None, arguments: Mapping[str, Any]) -> Path | None:
    """Return the folder with what is kept of the Hugging Face folder that a checkpoint comes from.

    It lies in the checkpoint, next to it, in its run, or in what the run was started from, in turn.
    """
    seen: set[Path] = set()
    todo = [(checkpoint, run, arguments)]
    while todo:
        checkpoint, run, arguments = todo.pop(0)
        places = [checkpoint / HUGGING_FACE, checkpoint.parent / RELEASE / HUGGING_FACE]
        for place in (*places, *([run / HUGGING_FACE] if run else ())):
            if os.path.isfile(place / CONFIG):
                return place
        seen.add(checkpoint.resolve())
        for name in ("pretrained_checkpoint", "load"):
            text = arguments.get(name)
            if isinstance(text, str) and text:
                with contextlib.suppress(ValueError, OSError):
                    found = locate_one(Path(text))
                    if found.kind == "checkpoint" and found.folder.resolve() not in seen:
                        todo.append((found.folder, found.run, read_arguments(found.folder)))
    return None


def keep_origin(source: Path, run: Path) -> None:
    """Copy what is kept of the Hugging Face folder that `source`, a checkpoint, comes from into a run."""
    shutil.rmtree(run / HUGGING_FACE, ignore_errors=True)
    try:
        found = locate_one(source)
        origin = find_origin(found.folder, found.run, read_arguments(found.folder))
        if origin is not None:
            partial = run / f".{HUGGING_FACE}.part"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            files = copied_files(origin) | {CONFIG: read_file(origin / CONFIG, _COPIED_LIMIT)}
            for name, data in files.items():
                (partial / name).write_bytes(data)
            partial.rename(run / HUGGING_FACE)
    except (ValueError, OSError) as problem:
        print(f"not kept     config.json and tokenizer of the model that {source} comes from: {problem}")


def prepared_data(run: Path | None, arguments: Mapping[str, Any]) -> Path | None:
    """Return the prepared data that a run was trained on, also if the run was moved."""
    if run is None:
        return None
    stored = arguments.get("data_path")
    name = Path(str(stored[0])).parent.name if isinstance(stored, list) and len(stored) == 1 else ""
    found = sorted(path.parent for path in (run / DATA).glob(f"*/{CORPUS}.idx"))
    named = [path for path in found if path.name == name]
    return (named or found)[0] if len(named or found) == 1 else None


def tokenizer_folders(checkpoint: Path, run: Path | None, arguments: Mapping[str, Any]) -> list[Path]:
    """Return where a checkpoint's own tokenizer may be: in it, in its run, where its arguments say."""
    prepared, stored = prepared_data(run, arguments), arguments.get("tokenizer_model")
    places = [checkpoint / TOKENIZER, *([] if prepared is None else [prepared / "tokenizer"])]
    return [*places, Path(stored)] if isinstance(stored, str) and stored else places


def with_context(config: Nemotron3Config, origin: Path | None) -> Nemotron3Config:
    """Return a model with the longest position that its origin states: Megatron's is that of the launch."""
    if origin is None:
        return config
    stated = None
    with contextlib.suppress(ValueError, OSError):
        stated = stated_number(origin, "max_position_embeddings")
    return config.but(max_position_embeddings=stated) if stated is not None and stated > 0 else config


def stated_keys(folder: Path) -> Mapping[str, Any]:
    """Return what the config.json of a folder has of the language model."""
    return text_part(read_config(folder, omni=True))


def stated_number(folder: Path, key: str) -> int | None:
    """Return a number that the config.json of a folder has of the language model."""
    found = stated_keys(folder).get(key)
    return found if type(found) is int else None


def base_config(
    config: Nemotron3Config | OmniConfig, reference: Path | None, origin: Path | None
) -> tuple[dict[str, Any] | None, str]:
    """Return the config.json whose other keys are kept, and a line that says where it is from.

    That of the reference must be of the model; that of the origin is not used if it is not.
    """
    omni = isinstance(config, OmniConfig)
    if reference is not None and (reference / CONFIG).exists():
        data = read_config(reference, omni=omni)
        data.pop(QUANTIZATION, None)  # of its weights, not of these
        return data, ""
    if origin is None:
        return None, (
            "config.json  the model's source is not known: without auto_map and the like, which --reference "
            "DIR gives"
        )
    try:
        return _of_origin(config, origin), f"config.json  as in {shown(origin)}, where the model comes from"
    except ValueError as problem:
        return None, shown(f"config.json  {origin / CONFIG} is not used: {problem}")


def _of_origin(config: Nemotron3Config | OmniConfig, origin: Path) -> dict[str, Any]:
    data = read_config(origin, omni=True)
    data.pop(QUANTIZATION, None)
    if isinstance(config, OmniConfig):
        require_same(config, omni_config(data, name=str(origin)))
        return data
    # MTP may have been added, and rows of the vocabulary.
    text = dict(text_part(data))
    result = with_mtp(text, config) | {"vocab_size": config.vocab_size}
    check_same_model(read(result, name=str(origin)), config)
    return result
