"""The file: what is written is read, and what cannot be right is refused by name."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.models import get
from megatron_nemotron3.proof.bisect.recording import (
    FORMAT,
    Recording,
    Sequence,
    check_model,
    check_same,
    read,
    write,
)

CONFIG = get("super-tiny")
S = 12


def made() -> Recording:
    torch.manual_seed(0)
    experts = torch.stack(
        [torch.randperm(CONFIG.num_moe_experts or 0)[: CONFIG.moe_router_topk] for _ in range(S)]
    )
    long = Sequence(
        torch.randint(CONFIG.vocab_size, (S,)),
        4,
        -torch.rand(S - 4),
        {1: experts.int()},
        {0: torch.randn(S, CONFIG.hidden_size).bfloat16()},
        {1: -torch.rand(S - 4), 2: -torch.rand(S - 4)},
    )
    return Recording(
        "vllm 0.12", "bfloat16", [long, Sequence(torch.tensor([3, 4]), 0, torch.tensor([-1.0]))], "tiny"
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recording = made()
    one = recording.sequences[0]
    one.hidden[0] = torch.cat([one.hidden[0], torch.zeros(100_000, CONFIG.hidden_size).bfloat16()])[:S]
    one.logprobs[2] = torch.nan
    write(tmp_path / "a.pt", recording)
    assert (tmp_path / "a.pt").stat().st_size < 20_000, "a view must not bring its whole tensor along"
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    found = read(tmp_path / "a.pt")
    assert (found.system, found.dtype, found.model) == ("vllm 0.12", "bfloat16", "tiny")
    torch.testing.assert_close(
        [vars(s) for s in found.sequences],
        [vars(s) for s in recording.sequences],
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    check_model(found, CONFIG)
    check_same(found, recording)
    assert [s.first for s in found.sequences] == [4, 1]


Edit = Callable[[Recording], Any]
#: What is wrong -> the message.
WRONG: dict[str, tuple[Edit, str]] = {
    "no sequence": (lambda r: r.sequences.clear(), "there is no sequence"),
    "dtype": (
        lambda r: setattr(r, "dtype", "bf16"),
        "dtype 'bf16' must be one of float64, float32, bfloat16",
    ),
    "system": (lambda r: setattr(r, "system", ""), "system must be a name"),
    "negative id": (lambda r: r.sequences[1].ids.fill_(-1), "sequence 1: token id -1 is negative"),
    "prompt": (lambda r: setattr(r.sequences[1], "prompt", 2), "sequence 1: prompt 2 of 2 tokens"),
    "length": (
        lambda r: setattr(r.sequences[0], "logprobs", torch.zeros(S)),
        r"sequence 0: logprobs has shape \[12\], \[8\] is expected",
    ),
    "probabilities": (
        lambda r: r.sequences[0].logprobs.fill_(0.3),
        r"logprobs: 8 values are above 0, the largest 0\.3: give natural logarithms",
    ),
    "routing by position": (
        lambda r: setattr(r.sequences[0], "routing", [torch.zeros(S, 4).int()]),
        "routing must be a dict from numbers",
    ),
    "depth": (
        lambda r: r.sequences[0].mtp_logprobs.update({4: torch.zeros(8)}),
        r"mtp_logprobs of depth 4 has shape \[8\], \[7\] is expected",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_contents(tmp_path: Path, what: str) -> None:
    change, message = WRONG[what]
    recording = made()
    change(recording)
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a.pt", recording)
    assert not list(tmp_path.iterdir())


#: What another model's recording has -> the message.
OTHER: dict[str, tuple[Edit, str]] = {
    "vocabulary": (
        lambda r: r.sequences[1].ids.fill_(5000),
        "vllm 0.12, sequence 1: token id 5000 is outside the vocabulary of super-tiny, 2048 entries",
    ),
    "layer": (
        lambda r: r.sequences[0].hidden.update({12: r.sequences[0].hidden[0]}),
        "sequence 0: hidden of layer 12: super-tiny has 12 layers, numbered from 0",
    ),
    "kind": (
        lambda r: r.sequences[0].routing.update({0: r.sequences[0].routing[1]}),
        "routing of layer 0, which is 'M' in MEM",
    ),
    "topk": (
        lambda r: r.sequences[0].routing.update({1: torch.zeros(S, 3).int()}),
        "layer 1 has 3 experts per token, super-tiny selects",
    ),
    "experts": (
        lambda r: r.sequences[0].routing[1].fill_(99),
        "names experts from 99 to 99, super-tiny has 32",
    ),
    "width": (
        lambda r: r.sequences[0].hidden.update({2: torch.zeros(S, 64)}),
        "hidden of layer 2 has width 64, super-tiny has 128",
    ),
    "depth": (
        lambda r: r.sequences[0].mtp_logprobs.update({3: torch.zeros(8)}),
        r"mtp_logprobs of depths \[1, 2, 3\]; super-tiny has 2 depths, numbered from 1",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_model(what: str) -> None:
    change, message = OTHER[what]
    recording = made()
    change(recording)
    with pytest.raises(ValueError, match=message):
        check_model(recording, CONFIG)


def test_other_tokens() -> None:
    a, b = made(), made()
    b.sequences[0].ids[5] += 1
    with pytest.raises(
        ValueError, match=r"sequence 0: the tokens differ from position 5 on \(12 tokens of vllm"
    ):
        check_same(a, b)
    b.sequences[0].ids = a.sequences[0].ids[:9]
    with pytest.raises(ValueError, match=r"from position 9 on \(12 tokens of vllm 0.12, 9 of vllm 0.12\)"):
        check_same(a, b)
    b.sequences.pop()
    with pytest.raises(ValueError, match="has 2 sequences, vllm 0.12 1: record the same"):
        check_same(a, b)


SPARSE = torch.zeros(S - 4).to_sparse()
#: A tensor that is not in the file as a whole -> the message.
HOLLOW = {
    "expanded": (torch.zeros(1).expand(10**11), r"logprobs: the tensors have 400,000,000,\d+ bytes or more"),
    "meta": (torch.zeros(S - 4, device="meta"), "it names torch._utils._rebuild_meta_tensor_no_storage"),
    "sparse": (SPARSE, "it names torch._utils._rebuild_sparse_tensor, which"),
    "nested": (
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "it names torch._utils._rebuild_",
    ),
}


@pytest.mark.parametrize("name", HOLLOW)
def test_tensors_that_are_not_in_the_file(name: str, tmp_path: Path) -> None:
    tensor, message = HOLLOW[name]
    one = vars(made().sequences[0]) | {"logprobs": tensor}
    data = {"format": FORMAT, "system": "a", "dtype": "float32", "model": None, "sequences": [one]}
    torch.save(data, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.pt")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="a.pt"):
        read(tmp_path / "a.pt")


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    """A small file of them could fill the memory."""
    write(tmp_path / "a.pt", made())
    with zipfile.ZipFile(tmp_path / "a.pt") as one, zipfile.ZipFile(tmp_path / "b.pt", "w", 8) as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    with pytest.raises(ValueError, match="is compressed or encrypted: record it again"):
        read(tmp_path / "b.pt")


class Attack:
    """Would run code when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("attacked"),)


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.pt", made())
    whole, made_bytes = (tmp_path / "a.pt").read_bytes(), made().sequences[0].logprobs.numpy().tobytes()
    assert whole.count(made_bytes) == 1
    data: dict[str, Any] = torch.load("a.pt", weights_only=True)
    torch.save({"format": Attack()}, "b.pt")
    objects = (tmp_path / "b.pt").read_bytes()
    cases = {
        "missing.pt": (None, "missing.pt: No such file"),
        "empty.pt": (b"", "not a readable recording, it is empty: record it again"),
        "text.pt": (b"hello", "not a readable recording, nothing that torch.save writes"),
        "cut.pt": (whole[: len(whole) // 2], "not a readable recording, it is not an archive of torch.save"),
        "code.pt": (pickle.dumps(Attack()), "not a readable recording, nothing that torch.save writes"),
        "flipped.pt": (
            whole.replace(made_bytes, bytes([made_bytes[0] ^ 1]) + made_bytes[1:]),
            r"recording, record 'data/\d+' \(bytes .* has CRC32 .*: record it again",
        ),
        "objects.pt": (objects, "not a readable recording, it is not a readable pickle .*: record it"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)
    saved = {
        "other.pt": ([1], "its format is 'list', 'nemotron3-recording-1' is expected"),
        "new.pt": (data | {"format": "nemotron3-recording-2"}, "its format is 'nemotron3-recording-2'"),
        "less.pt": ({k: v for k, v in data.items() if k != "dtype"}, "the field 'dtype' is missing"),
        "field.pt": (data | {"sequences": [data["sequences"][0] | {"x": 1}]}, "unknown field 'x'"),
        "ids.pt": (data | {"sequences": [{"prompt": 1}]}, "sequence 0: the field 'ids' is missing"),
        "flat.pt": (data | {"sequences": data["sequences"][0]}, "sequences must be a list of dicts"),
    }
    for name, (content, message) in saved.items():
        torch.save(content, name)
        with pytest.raises(ValueError, match=message):
            read(name)
    assert not Path("attacked").exists()
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        write("nowhere/a.pt", made())
