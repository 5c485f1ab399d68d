"""The tokenizer trained here: lossless, the same every time, and whole on disk or absent."""

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.train.data import read_texts, train_tokenizer
from megatron_nemotron3.train.data.conversations import Encoder
from megatron_nemotron3.train.data.tokenizer import END_OF_DOCUMENT, read_tokenizer
from tests.train.data.byte_tokenizer import byte_tokenizer

VOCAB = 512
TEXTS = read_texts(max_bytes=200_000).documents
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_tokenizer(TEXTS, VOCAB, tmp_path_factory.mktemp("bpe"))


def test_what_it_says_of_itself(bpe):
    assert (bpe.vocab_size, bpe.eod) == (VOCAB, 0)
    assert bpe.flags == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", bpe.tokenizer_model]
    assert Path(bpe.tokenizer_model).is_absolute()
    assert sorted(os.listdir(bpe.tokenizer_model)) == ["tokenizer.json", "tokenizer_config.json"]
    config = json.loads(Path(bpe.tokenizer_model, "tokenizer_config.json").read_text())
    assert config["eos_token"] != config["pad_token"]


@given(ANY_TEXT)
@example(f"see {END_OF_DOCUMENT} there")  # does not end a document
def test_any_text_comes_back(bpe, text):
    for tokenizer in (bpe, byte_tokenizer()):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids
        assert tokenizer.decode([*ids, tokenizer.eod]) == text


_TRAIN = """
import sys
from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.train.data import read_texts, train_tokenizer
train_tokenizer(read_texts(max_bytes=200_000).documents, 512, sys.argv[1])
"""


def test_same_input_same_bytes_in_another_process(bpe, tmp_path):
    environment = {**os.environ, "RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "4"}
    subprocess.run([sys.executable, "-c", _TRAIN, str(tmp_path)], env=environment, check=True)
    for name in os.listdir(bpe.tokenizer_model):
        digests = [
            hashlib.sha256(Path(f, name).read_bytes()).digest() for f in (bpe.tokenizer_model, tmp_path)
        ]
        assert digests[0] == digests[1]


def test_few_texts_give_a_smaller_vocabulary(tmp_path):
    info = train_tokenizer(["ab ab ab"], 2048, tmp_path)
    assert 258 < info.vocab_size < 270
    assert max(info.encode(["ab ab"])[0]) < info.vocab_size


def test_vocabulary_too_small(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size=257 .* use 258 or more"):
        train_tokenizer(TEXTS, 257, tmp_path)
    assert train_tokenizer(TEXTS, 258, tmp_path).vocab_size == 258


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_leaves_no_tokenizer(tmp_path, monkeypatch, call):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"os.{call}", full)
    with pytest.raises(OSError, match=r"No space left .* MB free.*free some space") as caught:
        train_tokenizer(["text"], 258, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_code_of_a_folder_is_not_run(bpe, tmp_path, monkeypatch):
    """transformers would ask on stdin, where the first line of a chat may be a y."""
    folder = shutil.copytree(bpe.tokenizer_model, tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'CANARY')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match=r"/tokenizer: its tokenizer is code \(auto_map\), which is not run"):
        read_tokenizer(folder)
    with pytest.raises(ValueError, match=r"^theirs: its tokenizer is code"):  # `finetune` reads a copy
        Encoder(folder, "theirs")
    assert not (tmp_path / "CANARY").exists()
    assert read_tokenizer(bpe.tokenizer_model).eos_token == END_OF_DOCUMENT


def test_a_file_that_is_too_long_for_a_tokenizer(bpe, tmp_path):
    """A sparse one, which takes no room on disk, would be read into memory by transformers."""
    folder = shutil.copytree(bpe.tokenizer_model, tmp_path / "tokenizer")
    with (folder / "special_tokens_map.json").open("wb") as file:
        file.truncate(1 << 40)
    for read in (read_tokenizer, require_tokenizer):
        with pytest.raises(
            ValueError, match=r"/special_tokens_map.json: it is longer than 268,435,456 bytes"
        ):
            read(folder)
