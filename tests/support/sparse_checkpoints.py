"""Checkpoints of any size in sparse files: real headers and lengths, and zero elements that are not written.

python -m tests.support.sparse_checkpoints convert from-hf A B    # the command line with a sparse writer
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.convert import (
    checksums,
    from_hf,
    inventory,
    job,
    omni_inventory,
    streams,
    to_hf,
)
from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor
from megatron_nemotron3.checkpoints.convert.streams import FilePlan
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig


def write_hf(folder: Path, config: Nemotron3Config, limit: int = to_hf.SHARD_BYTES) -> None:
    """The Hugging Face folder of a model."""
    tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in inventory.hf_tensors(config)}
    files = to_hf.files(tensors, limit)
    _write(folder, files, to_hf.small_files(config, files))


def write_omni(folder: Path, config: OmniConfig) -> None:
    """The Hugging Face folder of a model with encoders, as released."""
    tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in omni_inventory.hf_tensors(config)}
    files = to_hf.files(tensors)
    _write(folder, files, to_hf.small_files(config, files))


def write_megatron(folder: Path, hf: Path, divisible_by: int = 128) -> None:
    """The torch_dist folder that `convert from-hf` makes of a folder of zeros, its checksums included."""
    opened = open_hugging_face(hf)
    rows = from_hf.pad_vocab_size(opened.config.vocab_size, divisible_by)
    view = Converted(opened.weights, inventory.mappings(opened.config, padded_vocab_size=rows), to_hf=False)
    _write(folder, *from_hf.plan(view, opened.config, padded_vocab_size=rows, dtype="bfloat16"))


def _write(folder: Path, files: Iterable[FilePlan], small: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for plan in files:
        path = folder / plan.name
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            for part in plan.parts:
                file.write(part.head)
                file.seek(part.data_length, os.SEEK_CUR)
                if part.tail is not None:
                    file.write(part.tail(crc_of_zeros(part.data_length)))
            file.truncate()
    for name, data in small.items():
        (folder / name).write_bytes(data)


def crc_of_zeros(length: int) -> int:
    """zlib.crc32(bytes(length)): the register begins with all ones, and they are flipped at the end."""
    ones = 0xFFFFFFFF
    return checksums.combine_crc32(ones, ones, length) if length else 0


def _write_holes(descriptor: int, data: bytes | memoryview) -> None:
    import numpy

    block = numpy.frombuffer(data, "u1")
    if len(block) > 1 << 16 and not block[: len(block) // 8 * 8].view("u8").any() and not block[-8:].any():
        os.ftruncate(descriptor, os.lseek(descriptor, len(block), os.SEEK_CUR))
        return
    write_all(descriptor, data)


write_all = streams._write_all


def main(words: list[str]) -> int:
    """`nemotron3` with disks without end."""
    from megatron_nemotron3 import cli

    streams._write_all = _write_holes
    job.free_bytes = folders.free_bytes = lambda folder: 1 << 60
    command = sys.modules.get("megatron_nemotron3.checkpoints.convert.conversion")
    assert command is None, "it has its own name for free_bytes by now"
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
