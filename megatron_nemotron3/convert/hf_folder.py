"""A Hugging Face checkpoint folder as a source: config.json, and tensors in one safetensors file or several.

An index names files, and a file may be a link: only files of the folder itself are read, or of the blobs
beside a snapshot in Hugging Face's cache.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.convert.safetensors_header import read_header
from megatron_nemotron3.convert.stored import Block, Layout, Source, SourceTensor, row_major

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Longest JSON file that is read; the index of Ultra has 6 MB.
_LIMIT = 64 << 20


def is_hf(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face checkpoint."""
    return any(os.path.lexists(folder / name) for name in (CONFIG, INDEX, SINGLE))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    return read_json(folder / CONFIG)


def open_hf(folder: Path) -> Source:
    """Every tensor of the folder; reads the headers of its files.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing, damaged or outside the folder, or index
            and files do not hold the same tensors.
    """
    listed: Mapping[str, str] | None = None
    if os.path.lexists(folder / INDEX):
        listed = _weight_map(folder)
        names = sorted(set(listed.values()))
    elif os.path.lexists(folder / SINGLE):
        names = [SINGLE]
    else:
        raise CheckpointError(f"{folder}: it has neither {SINGLE} nor {INDEX}: is it a Megatron checkpoint?")
    tensors: dict[str, SourceTensor] = {}
    sizes = {name: regular(folder / name, folder) for name in names}
    for name in names:
        path = folder / name
        for tensor, entry in read_header(path)[0].items():
            if tensor in tensors:
                raise CheckpointError(f"{path}: {tensor!r:.100} is in another file of the folder as well")
            if listed is not None and listed.get(tensor) != name:
                raise CheckpointError(
                    f"{path}: it holds {tensor!r:.100}, which {INDEX} has in {listed.get(tensor)!r:.100}"
                )
            layout = Layout(path, entry.offset, row_major(entry.shape))
            block = Block((0,) * len(entry.shape), entry.shape, layout)
            tensors[tensor] = SourceTensor(entry.dtype, entry.shape, (block,))
    missing = [tensor for tensor in listed or () if tensor not in tensors]
    if missing:
        raise CheckpointError(
            f"{folder / INDEX}: {len(missing)} tensors are in no file, first {missing[0]!r:.100}"
        )
    return Source(folder, tensors, sizes)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is missing, longer than 64 MiB, or something else.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_LIMIT + 1)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    if len(text) > _LIMIT:
        raise CheckpointError(f"{path}: it is longer than {_LIMIT:,} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: it is no JSON: {problem}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: it holds a {type(data).__name__}, not an object")
    return data


def regular(path: Path, folder: Path) -> int:
    """The size of a file that may be read as part of `folder`.

    Raises:
        CheckpointError: it is missing, no regular file, or a link that leads elsewhere.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
        found = os.stat(real)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: it is not a regular file")
    home = Path(os.path.realpath(folder))
    inside = [home]
    if home.parent.name == "snapshots":  # models--…/snapshots/REVISION links to models--…/blobs
        inside.append(home.parent.parent / "blobs")
    if real.parent not in inside:
        raise CheckpointError(
            f"{path}: it is a link to {real}, outside of {folder}: give the folder with the file, or copy it"
        )
    return found.st_size


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: it has no weight_map")
    for tensor, name in listed.items():
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {tensor!r:.100} is said to be in {name!r:.100}: expected the plain name of a "
                ".safetensors file of the folder"
            )
        if "\0" in name:
            raise CheckpointError(f"{path}: {tensor!r:.100} is in a file whose name has a null byte")
    return listed
