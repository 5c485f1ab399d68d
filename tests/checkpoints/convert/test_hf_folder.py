"""Hugging Face folders: headers as the safetensors package reads them, and names of other programs."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import config_json, hf_folder
from megatron_nemotron3.checkpoints.convert.hf_folder import (
    DTYPES,
    read_safetensors_header,
    safetensors_header,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.models import get
from tests.support.hf_folders import read_hf, write_hf

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


Capture = pytest.CaptureFixture[str]
NANO = get("nano-tiny").but(pattern="M*E")
SUPER = get("super-tiny").but(pattern="M*E")


def status(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_a_folder_that_transformers_saved_of_a_model_made_from_its_configuration(tmp_path: Path) -> None:
    """5.15.1 writes backbone.embedding.weight; whatever it writes, the values are those of its modules."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.NemotronHConfig.from_dict(config_json.write(NANO))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    assert status("convert", "from-hf", tmp_path / "hf", tmp_path / "m") == 0
    assert status("convert", "to-hf", tmp_path / "m", tmp_path / "back") == 0
    found = read_hf(tmp_path / "back")
    assert found["backbone.embeddings.weight"].equal(model.model.embeddings.weight)
    assert found["backbone.norm_f.weight"].equal(model.model.norm_f.weight)
    assert found["backbone.layers.0.mixer.A_log"].equal(model.model.layers[0].mixer.A_log)


@pytest.mark.parametrize(
    ("name", "roots"),
    [("nano-tiny", ("model", "embedding")), ("puzzle-tiny", ("backbone", "embeddings"))],
)
def test_all_spellings_are_the_same_tensors(name: str, roots: tuple[str, str], tmp_path: Path) -> None:
    config = get(name)
    values = write_hf(tmp_path / "hf", config)
    own = "model" if config.moe_layers else "backbone"
    root, embedding = roots
    spelled = {
        key.replace(f"{own}.", f"{root}.", 1).replace(".embeddings.", f".{embedding}."): value
        for key, value in values.items()
    }
    assert spelled.keys() != values.keys() or roots == (own, "embeddings")
    save_file(spelled, tmp_path / "hf/model.safetensors")
    assert status("convert", "from-hf", tmp_path / "hf", tmp_path / "m") == 0
    assert status("convert", "verify", tmp_path / "hf", tmp_path / "m") == 0
    assert status("convert", "to-hf", tmp_path / "m", tmp_path / "back") == 0
    found = read_hf(tmp_path / "back")
    assert found.keys() == values.keys() and all(found[key].equal(values[key]) for key in values)


def test_one_tensor_under_two_names(tmp_path: Path, capsys: Capture) -> None:
    values = write_hf(tmp_path / "hf", NANO)
    values["backbone.embedding.weight"] = values["backbone.embeddings.weight"].clone()
    save_file(values, tmp_path / "hf/model.safetensors")
    assert status("convert", "from-hf", tmp_path / "hf", tmp_path / "m") == 2
    assert "'backbone.embeddings.weight' are the same tensor" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "convert"])
def test_one_file_beside_an_index_of_others_is_refused(command: str, tmp_path: Path, capsys: Capture) -> None:
    """transformers reads the one file, and we would read the index."""
    values = write_hf(tmp_path / "hf", NANO, files=3)
    save_file({key: value + 1 for key, value in values.items()}, tmp_path / "hf/model.safetensors")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours = values["backbone.norm_f.weight"]
    assert theirs.model.norm_f.weight.equal(ours + 1) and not theirs.model.norm_f.weight.equal(ours)
    words = ("from-hf", tmp_path / "hf", tmp_path / "m") if command == "convert" else (tmp_path / "hf",)
    capsys.readouterr()
    assert status(command, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "it has model.safetensors, which transformers reads, and model.safetensors.index.json with 3" in line
    )
    # An index that names it is no contradiction.
    shutil.rmtree(tmp_path / "hf")
    write_hf(tmp_path / "hf", NANO)
    index = {"metadata": {}, "weight_map": dict.fromkeys(values, "model.safetensors")}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    assert status("check", tmp_path / "hf") == 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "the index is missing: it has 2 files like model-00001-of-00002.safetensors and no "
            "model.safetensors.index.json: copy it here",
        ),
        (
            ["config.json", "pytorch_model.bin"],
            "it has pytorch_model.bin and no safetensors: save it as safetensors (transformers: "
            "from_pretrained, then save_pretrained)",
        ),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "it is a LoRA adapter without a model: give the model, and the adapter as --adapter",
        ),
        (
            ["config.json"],
            "it has neither model.safetensors nor model.safetensors.index.json: is it a Megatron checkpoint?",
        ),
    ],
)
def test_a_folder_without_weights_and_its_cure(
    names: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    assert status("convert", "from-hf", tmp_path, tmp_path / "out") == 2
    assert capsys.readouterr().err == f"nemotron3 convert from-hf: {tmp_path}: {message}\n"


def test_mtp_in_a_file_of_its_own_is_named(tmp_path: Path, capsys: Capture) -> None:
    values = write_hf(tmp_path / "hf", SUPER)
    mtp = {key: value for key, value in values.items() if key.startswith("mtp.")}
    save_file(
        {key: value for key, value in values.items() if key not in mtp}, tmp_path / "hf/model.safetensors"
    )
    save_file(mtp, tmp_path / "hf/mtp.safetensors")
    assert status("check", tmp_path / "hf") == 2
    (line,) = capsys.readouterr().err.splitlines()
    file = tmp_path / "hf/mtp.safetensors"
    assert f"{file}, which no index lists, has MTP: --mtp-from {file}" in line
    data = json.loads((tmp_path / "hf/config.json").read_text())
    without = {key: value for key, value in data.items() if "mtp" not in key and "nextn" not in key}
    without.pop("megatron_nemotron3")
    (tmp_path / "hf/config.json").write_text(json.dumps(without))
    assert status("check", tmp_path / "hf") == 0
    out = capsys.readouterr().out
    assert f"mtp.safetensors: no index lists it (its {len(mtp)} tensors of MTP: --mtp-from {file})" in out
