"""The header of a safetensors file: read with suspicion, written to the byte.

    8 bytes: length of the JSON, little-endian ‖ JSON, padded with spaces ‖ elements of all tensors

The safetensors package maps a file to read it and wants a whole file's tensors in memory to write it; here
files are read and written in bands, so the header is ours. Tests compare with the package both ways.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError

_LENGTH = struct.Struct("<Q")
#: Longest JSON that is read: 51,023 tensors, all of Ultra, need 6 MB. The package's own limit is 100 MB.
LIMIT = 32 << 20

#: safetensors' name -> torch's.
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a file: torch's dtype name, shape, byte of the file where its elements begin."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file by name, in file order, and its `__metadata__`.

    Raises:
        CheckpointError: the file cannot be read, or its header is not exactly as the format wants it:
            tensors must fill the file without gap, overlap or remainder.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH.size)
            if len(start) < _LENGTH.size:
                raise CheckpointError(f"{path}: {size} bytes are no safetensors file")
            (length,) = _LENGTH.unpack(start)
            if length > min(LIMIT, size - _LENGTH.size):
                raise CheckpointError(
                    f"{path}: a header of {length:,} bytes in a file of {size:,}: at most {LIMIT:,} are read"
                )
            text = file.read(length)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror}") from None
    try:
        return _parse(text, _LENGTH.size + length, size)
    except ValueError as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def _parse(text: bytes, begin: int, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    if not text.startswith(b"{"):
        raise ValueError(f"its header begins with {text[:8]!r}, not with a JSON object")
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_no_twice)
    except UnicodeDecodeError:
        raise ValueError("its header is not UTF-8") from None
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    metadata = data.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is no object of strings")
    spans: list[tuple[int, int, str]] = []
    entries: dict[str, Entry] = {}
    for name, entry in data.items():
        dtype, shape, first, last = _entry(name, entry)
        spans.append((first, last, name))
        entries[name] = Entry(dtype, shape, begin + first)
    reached = 0
    for first, last, name in sorted(spans):
        if first != reached:
            what = "overlaps the tensor before it" if first < reached else "leaves a gap before it"
            raise ValueError(f"{name!r} at byte {first:,} of the data {what}, which ends at {reached:,}")
        reached = last
    if begin + reached != size:
        raise ValueError(f"its tensors end at byte {begin + reached:,}, the file at {size:,}")
    return dict(sorted(entries.items(), key=lambda item: item[1].offset)), metadata


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r:.100} is there twice")
    return result


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.100} is {entry!r:.80}: expected dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name!r:.100} has the type {kind!r:.40}: known are {', '.join(DTYPES)}")
    if not _naturals(shape):
        raise ValueError(f"{name!r:.100} has the shape {shape!r:.80}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r:.100} has the data_offsets {offsets!r:.80}")
    need = prod(shape) * ITEM_SIZE[DTYPES[kind]]
    if offsets[1] - offsets[0] != need:
        raise ValueError(
            f"{name!r:.100}, {kind} {shape}, needs {need:,} bytes and is given {offsets[1] - offsets[0]:,}"
        )
    return DTYPES[kind], tuple(shape), offsets[0], offsets[1]


def _naturals(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) < 64
        and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
    )


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the elements of a file with these (name, dtype, shape), one behind another."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    reached = 0
    for name, dtype, shape in tensors:
        stop = reached + prod(shape) * ITEM_SIZE[dtype]
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [reached, stop]}
        reached = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # elements begin at a multiple of 8
    return _LENGTH.pack(len(text)) + text
