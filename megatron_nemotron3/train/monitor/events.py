"""Read the scalars of TensorBoard event files, and report which file is corrupt and where.

TensorBoard's own readers silently stop at the first bad record. This one skips only an incomplete last
record, which a run leaves that is still writing or was killed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.train.log import History

#: Longest file that is read, in bytes.
_LIMIT = 4 << 30
PATTERN = "events.out.tfevents.*"


def find(folder: Path) -> list[Path]:
    """Find the event files of one run in `folder` or in one folder below it, oldest first."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the one of --tensorboard-dir")
    files = sorted(folder.rglob(PATTERN))
    if not files:
        raise ValueError(f"{folder} holds no TensorBoard event files: train with --tensorboard-dir {folder}")
    runs = sorted({str(file.parent) for file in files})
    if len(runs) > 1:
        raise ValueError(f"{folder} holds the event files of {len(runs)} runs, name one: {', '.join(runs)}")
    return files


def read(files: list[Path]) -> History:
    """Read all scalars of a run. Where a resumed run repeats iterations, the later file counts."""
    series: dict[str, dict[int, float]] = {}
    for file in files:
        added: dict[str, dict[int, float]] = {}
        for tag, iteration, value in _read_scalars(file):
            added.setdefault(tag, {})[iteration] = value
        for tag, points in added.items():
            begun, before = min(points), series.get(tag, {})
            # Files are ordered by clock: one set back puts those of a resumed run first.
            continues = bool(before) and min(before) > max(points)
            series[tag] = {i: v for i, v in before.items() if i < begun or continues} | points
    return {tag: sorted(points.items()) for tag, points in series.items()}


def _read_scalars(file: Path) -> Iterator[tuple[str, int, float]]:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    for offset, record in _read_records(file):
        try:
            event = Event.FromString(record)
        except DecodeError:
            raise _corrupt_file(file, offset) from None
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, event.step, value.simple_value


def _read_records(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, payload) of each record: length (8 bytes), its CRC (4), payload, its CRC (4)."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import (  # type: ignore[import-untyped]
        masked_crc32c,
    )

    data = read_outside(file, limit=_LIMIT)
    offset = 0
    while offset + 12 <= len(data):
        length, check = struct.unpack_from("<QI", data, offset)
        if masked_crc32c(data[offset : offset + 8]) != check:
            raise _corrupt_file(file, offset)
        end = offset + 12 + length
        if end + 4 > len(data):
            return
        payload = data[offset + 12 : end]
        if masked_crc32c(payload) != struct.unpack_from("<I", data, end)[0]:
            raise _corrupt_file(file, offset)
        yield offset, payload
        offset = end + 4


def _corrupt_file(file: Path, offset: int) -> ValueError:
    return ValueError(
        f"{file} is corrupt at byte {offset}: move it away, the other files can be read without it"
    )
