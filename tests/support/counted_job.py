"""A job of counted numbers; imports no torch, since tests start it often, to kill it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy

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

    def read(self, name: str, slices: Slices) -> numpy.ndarray:
        time.sleep(self.delay)
        (a, b), _ = slices
        return (numpy.arange(a * 8, b * 8) * int(name[1:]) % 251).astype("u1").reshape(extent(slices))


def counted(target: Path, delay: float = 0.0, rows: int = 40) -> Job:
    """Three files with two tensors each."""
    source = Numbers(target.parent, rows, delay)
    files = []
    for i in range(0, 6, 2):
        parts = [Part(head=b"head%d" % i)]
        for name in (f"t{i}", f"t{i + 1}"):
            tail = (lambda crc: crc.to_bytes(4, "big"), 4)
            parts.append(Part(b"<", name, whole((rows, 8)), "uint8", *tail))
        files.append(FilePlan(f"sub/file{i}", parts))
    return Job(target, source, files, {"index": b"{}", "sub/last": b"done"}, {"model": "counted"})


def main(target: str, workers: int, delay: float) -> None:
    """In the process that is killed."""
    streams.BAND = 16
    run(counted(Path(target), delay), workers=workers)


def digest(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
