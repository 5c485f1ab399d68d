"""The .bin/.idx written here, read back with Megatron's reader; failures leave no half of a data set."""

import errno
import os

import numpy as np
import pytest

from megatron_nemotron3.train.data import indexed, write_dataset
from tests.train.data.byte_tokenizer import byte_tokenizer

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DOCS = ["first\n", "", "zweites é\n", "3"]


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500])
def test_files_are_those_of_megatrons_builder(tmp_path, vocab_size):
    tokenizer = byte_tokenizer(vocab_size)
    info = write_dataset(DOCS, tokenizer, tmp_path / "ours")
    dtype = indexed_dataset.DType.optimal_dtype(vocab_size)
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "upstream.bin"), dtype=dtype)
    kept = [[*doc.encode(), tokenizer.eod] for doc in DOCS if doc]
    for ids in kept:
        builder.add_document(np.array(ids, dtype=dtype), [len(ids)])
    builder.finalize(str(tmp_path / "upstream.idx"))
    assert sorted(path.name for path in tmp_path.glob("ours*")) == ["ours.bin", "ours.idx"]
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"upstream{end}").read_bytes()
    assert [ids.tolist() for ids in indexed.read_documents(info.prefix)] == kept


def test_what_is_not_such_a_data_set_is_refused(tmp_path):
    prefix = tmp_path / "several"
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(np.array([1, 2, 3], dtype=np.uint16), [1, 2])
    builder.finalize(f"{prefix}.idx")
    (tmp_path / "cut.idx").write_bytes(b"MMIDIDX\0\0")
    for name in ("several", "cut"):
        with pytest.raises(ValueError, match=f"{name}.idx is not the index"):
            indexed.read_documents(tmp_path / name)


@pytest.mark.parametrize(
    ("documents", "vocabulary", "message"),
    [
        (["a", "z"], 100, r"document 1 has a token outside 0 \.\. 99 .*largest 122"),
        (["", ""], 257, "no document with a token"),
    ],
)
def test_nothing_is_left_of_what_cannot_be_written(tmp_path, documents, vocabulary, message):
    with pytest.raises(ValueError, match=message):
        write_dataset(documents, byte_tokenizer(vocabulary), tmp_path / "x")
    assert os.listdir(tmp_path) == []


def _fail_at(monkeypatch, owner, name, call):
    """Let `owner.name` raise ENOSPC at its `call`-th call, as a full disk does."""
    original, calls = getattr(owner, name), []

    def function(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize(
    ("owner", "name", "call", "old_stays"),
    [
        (indexed, "_append", 1, True),
        (indexed, "_write_index", 1, True),
        (os, "fsync", 2, True),
        (os, "replace", 1, False),
        (os, "replace", 2, False),
    ],
)
def test_full_disk(tmp_path, monkeypatch, owner, name, call, old_stays):
    prefix = tmp_path / "corpus"
    write_dataset(["old"], byte_tokenizer(), prefix)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _fail_at(monkeypatch, owner, name, call)
    with pytest.raises(OSError, match=r"while writing corpus\.bin, corpus\.idx \(\d+ MB free\)") as caught:
        write_dataset(DOCS, byte_tokenizer(), prefix)
    assert caught.value.errno == errno.ENOSPC
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if old_stays:
        assert after == before
    else:
        # A move failed: never an .idx beside a .bin that is not its own.
        assert "corpus.idx" not in after
    monkeypatch.undo()
    assert write_dataset(DOCS, byte_tokenizer(), prefix).documents == 3
