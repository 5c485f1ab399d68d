"""Our reader of safetensors headers accepts and refuses the same files as the safetensors package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megatron_nemotron3.checkpoints.convert import hf_folder
from megatron_nemotron3.checkpoints.convert.hf_folder import (
    DTYPES,
    read_safetensors_header,
    safetensors_header,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointError

_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda n: n != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(DTYPES.values())), _SHAPES),
    max_size=6,
)


def _file(path: Path, head: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _value(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if dtype == "bool":
        return tensor.fill_(True)
    tensor.flatten().view(torch.uint8).copy_(torch.arange(tensor.numel() * tensor.element_size()) % 251)
    return tensor


@given(_TENSORS)
def test_what_the_package_reads_is_what_we_wrote(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    values = {name: _value(*kind) for name, kind in tensors.items()}
    head = safetensors_header(((n, d, s) for n, (d, s) in tensors.items()), {"format": "pt"})
    data = b"".join(bytes(v.flatten().view(torch.uint8).tolist()) for v in values.values())
    path.write_bytes(head + data)
    found = load_file(path)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].flatten().view(torch.uint8).equal(value.flatten().view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    entries, metadata = read_safetensors_header(path)
    assert metadata == {"format": "pt"}
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == tensors


@given(_TENSORS)
def test_we_read_what_the_package_wrote(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "package.safetensors"
    values = {name: _value(*kind) for name, kind in tensors.items()}
    save_file(values, path)
    entries, _ = read_safetensors_header(path)
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == tensors
    data = path.read_bytes()
    for name, entry in entries.items():
        expected = bytes(values[name].flatten().view(torch.uint8).tolist())
        assert data[entry.offset : entry.offset + len(expected)] == expected


_GOOD = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
#: (header, data, what the message says): refused by the package, too.
_BAD: dict[str, tuple[Any, bytes, str]] = {
    "beyond the file": (_GOOD, b"x", "end at byte"),
    "more data": (_GOOD, b"xyz", "end at byte"),
    "too many bytes": ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}, b"xy", "needs 3 bytes"),
    "overlap": (
        {**_GOOD, "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}},
        b"xyz",
        "overlaps the tensor before it",
    ),
    "gap": ({**_GOOD, "b": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}, b"xyzw", "leaves a gap"),
    "backwards": ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 0]}}, b"xy", "is given -2"),
    "negative": ({"a": {"dtype": "U8", "shape": [-2], "data_offsets": [0, 2]}}, b"xy", "has the shape"),
    "huge": ({"a": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 2]}}, b"xy", "needs"),
    "fraction": ({"a": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}, b"xy", "has the shape"),
    "no type": ({"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 2]}}, b"xy", "has the type"),
    "no entry": ({"a": 7}, b"", "expected dtype"),
    "a list": ([], b"", "not with a JSON object"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "not an object of strings"),
    "no JSON": (b"{nothing", b"", "Expecting"),
    "no text": (b"{\xff\xff", b"", "UTF-8"),
    "empty": (b"", b"", "begins with"),
}


@pytest.mark.parametrize("case", _BAD)
def test_a_bad_header_is_refused(tmp_path: Path, case: str) -> None:
    head, data, message = _BAD[case]
    path = _file(tmp_path / "bad.safetensors", head, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors_header(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(SafetensorError), safe_open(path, "pt") as file:
        file.keys()


def test_stricter_than_the_package(tmp_path: Path) -> None:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    twice = b"{" + entry + b"," + entry + b"}"
    with pytest.raises(CheckpointError, match="occurs twice"):
        read_safetensors_header(_file(tmp_path / "twice.safetensors", twice, b"x"))
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(CheckpointError):
        read_safetensors_header(_file(tmp_path / "deep.safetensors", deep))


@pytest.mark.parametrize("length", [100_000_000, (1 << 64) - 1])
def test_a_huge_header_is_not_read(tmp_path: Path, length: int) -> None:
    path = _file(tmp_path / "huge.safetensors", b"{}", length=length)
    if length < 1 << 40:  # the file has as many bytes, all of them holes
        with open(path, "r+b") as file:
            file.truncate(8 + length)
    with pytest.raises(CheckpointError, match=f"its header has {length:,} bytes"):
        read_safetensors_header(path)


def test_short_or_missing(tmp_path: Path) -> None:
    (tmp_path / "short.safetensors").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="7 bytes are too few for a safetensors file"):
        read_safetensors_header(tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        read_safetensors_header(tmp_path / "none.safetensors")


def test_elements_are_aligned() -> None:
    for name in ("a", "ab", "abc"):
        assert len(safetensors_header([(name, "bfloat16", (3,))], {})) % 8 == 0
    assert hf_folder.HEADER_LIMIT > 6_000_000  # Ultra's index
