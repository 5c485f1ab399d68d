"""A job of counted numbers, which tests kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_nemotron3.checkpoints.convert import streams
from megatron_nemotron3.checkpoints.convert.job import Job, run
from megatron_nemotron3.checkpoints.convert.plan import Slices, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, Part


class Numbers(TensorSource):
    """Tensors of counted numbers; `delay` seconds for each read."""

    def __init__(self, folder: Path, rows: int = 40, delay: float = 0.0) -> None:
        self.folder, self.files, self.delay = folder, {}, delay
        self.tensors = {f"t{i}": SourceTensor("uint8", (rows, 8)) for i in range(6)}

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        time.sleep(self.delay)
        slices = whole(self.tensors[name].shape) if slices is None else slices
        (a, b), _ = slices
        numbers = torch.arange(a * 8, b * 8) * int(name[1:]) % 251
        return numbers.to(torch.uint8).reshape(extent(slices))


def counted(target: Path, delay: float = 0.0, rows: int = 40) -> Job:
    """Three files with two tensors each, in the last one as archives, and an index of these."""
    source = Numbers(target.parent, rows, delay)
    files = []
    for i in range(0, 6, 2):
        parts = [Part(b"head%d" % i)]
        for name in (f"t{i}", f"t{i + 1}"):
            parts += [Part(b"<"), Part(tensor=name, slices=whole((rows, 8)), dtype="uint8")]
        files.append(FilePlan(f"sub/file{i}", parts, archives=i == 4))
    return Job(
        target,
        source,
        files,
        {"sub/last": b"done"},
        lambda places: {"index": json.dumps(places["sub/file4"]).encode()},
        {"model": "counted"},
    )


def forked(work: Callable[[], object]) -> int:
    """Begin `work` in a process of its own, which imports nothing anew. Returns its number."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def slow(target: Path, workers: int, delay: float) -> None:
    """The job with a small band at a time, in the process that is killed."""
    streams.BAND, streams._WRITE = 16, 16
    run(counted(target, delay), workers=workers)


def digest(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
