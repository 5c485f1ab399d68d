"""Checkpoints of any size in sparse files: real headers and lengths, and zero elements that are not written.

python -m tests.support.sparse_checkpoints convert from-hf A B    # the command line with a sparse writer
"""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.convert import (
    from_hf,
    inventory,
    job,
    streams,
    to_hf,
)
from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
from megatron_nemotron3.checkpoints.convert.job_options import SHARD_BYTES
from megatron_nemotron3.checkpoints.convert.plan import extent
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, Part
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE
from megatron_nemotron3.checkpoints.write import write_tensor
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig
from tests.support.hf_folders import omni_tensors


def write_hf(folder: Path, config: Nemotron3Config, limit: int = SHARD_BYTES) -> None:
    """The Hugging Face folder of a model."""
    tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in inventory.hf_tensors(config)}
    files = to_hf.files(tensors, limit)
    _write(folder, files, to_hf.small_files(config, files))


def write_omni(folder: Path, config: OmniConfig) -> None:
    """The Hugging Face folder of a model with encoders, as released."""
    tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in omni_tensors(config)}
    files = to_hf.files(tensors)
    _write(folder, files, to_hf.small_files(config, files))


def write_megatron(folder: Path, hf: Path, divisible_by: int = 128) -> None:
    """The torch_dist folder that `convert from-hf` makes of a folder of zeros, its checksums included."""
    opened = open_hugging_face(hf)
    rows = from_hf.pad_vocab_size(opened.config.vocab_size, divisible_by)
    view = Converted(opened.weights, inventory.mappings(opened.config, padded_vocab_size=rows), to_hf=False)
    plan = from_hf.plan(view, opened.config, padded_vocab_size=rows, dtype="bfloat16")
    places = _write(folder, plan.files, plan.small)
    for name, data in plan.index(places).items():
        (folder / name).write_bytes(data)


def _write(folder: Path, files: Iterable[FilePlan], small: Mapping[str, bytes]) -> dict[str, job.Places]:
    """Write a folder. Returns the places of the parts of each file."""
    folder.mkdir(parents=True)
    places = {}
    for plan in files:
        path = folder / plan.name
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            ends = [0]
            for part in plan.parts:
                for piece in _pieces(part, plan.archives):
                    file.seek(piece, os.SEEK_CUR) if isinstance(piece, int) else file.write(piece)
                ends.append(file.tell())
            file.truncate()
        places[plan.name] = [(a, b - a) for a, b in zip(ends, ends[1:])]
    for name, data in small.items():
        (folder / name).write_bytes(data)
    return places


def _pieces(part: Part, archives: bool) -> Sequence[bytes | int]:
    if not part.tensor:
        return [part.data]
    return _archive(part.dtype, extent(part.slices)) if archives else [part.length]


_ZEROS = memoryview(bytes(1 << 20))


@lru_cache
def _archive(dtype: str, shape: tuple[int, ...]) -> list[bytes | int]:
    """The archive of a tensor of zeros: bytes, and the lengths of holes."""
    length, pieces = prod(shape) * ITEM_SIZE[dtype], _Pieces()
    bands = (_ZEROS[: length - at] for at in range(0, length, len(_ZEROS)))
    write_tensor(pieces, dtype, shape, bands)
    return pieces.found


class _Pieces:
    """Collects what is written; parts of `_ZEROS` are holes."""

    def __init__(self) -> None:
        self.found: list[bytes | int] = []
        self.crc32 = 0

    def write(self, data: Any, /) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.found.append(len(data) if isinstance(data, memoryview) else bytes(data))
        return len(data)


class _Sparse(io.FileIO):
    """A file in which long rows of zeros are holes."""

    def write(self, data: Any, /) -> int:
        if len(data) > 1 << 16 and not torch.frombuffer(data, dtype=torch.uint8).any():
            self.truncate(self.seek(len(data), os.SEEK_CUR))
            return len(data)
        return super().write(data)


def main(words: list[str]) -> int:
    """`nemotron3` with disks without end."""
    from megatron_nemotron3 import cli

    streams.open = lambda path, mode, buffering: _Sparse(path, mode)  # type: ignore[attr-defined]
    job.free_bytes = folders.free_bytes = lambda folder: 1 << 60
    command = sys.modules.get("megatron_nemotron3.checkpoints.convert.conversion")
    assert command is None, "it has its own name for free_bytes by now"
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
