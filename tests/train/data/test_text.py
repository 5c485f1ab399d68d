"""Collecting documents: order, limits, what is not text, and errors that name numbers and a cure."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3.train.data import default_split, read_texts, split_documents
from megatron_nemotron3.train.data.text import _pieces


def _folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


FILES = {f"d{i % 3}/f{i}.txt": f"text number {i}\n".encode() for i in range(20)}


def test_folder_is_read_recursively_and_in_an_order_of_its_own(tmp_path, monkeypatch):
    walk = os.walk
    first = read_texts(_folder(tmp_path / "a", FILES))
    # Another place, and a file system that lists names the other way round: the same order.
    monkeypatch.setattr(
        os, "walk", lambda root: ((folder, dirs, sorted(names)[::-1]) for folder, dirs, names in walk(root))
    )
    second = read_texts(_folder(tmp_path / "b", FILES))
    assert first == second
    assert sorted(first.documents) == sorted(data.decode() for data in FILES.values())
    assert first.files == 20 and first.size == sum(map(len, FILES.values()))
    # Not alphabetical: the held-out tail is a sample of all files.
    assert list(first.documents) != [FILES[name].decode() for name in sorted(FILES)]


def test_what_is_not_text_is_skipped_and_counted(tmp_path):
    _folder(
        tmp_path,
        {
            "good.txt": "é漢\r\n".encode(),
            "nul.bin": b"a\0b",
            "latin1.txt": "é".encode("latin-1"),
            "cut.txt": "漢".encode()[:2],
            "empty.txt": b"",
            "blank.txt": b" \n\t",
            ".hidden": b"hidden",
            ".git/config": b"hidden",
            "__pycache__/x.py": b"cache",
        },
    )
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    texts = read_texts(tmp_path)
    assert texts.documents == ["é漢\r\n"]
    assert (texts.files, texts.skipped, texts.empty, texts.truncated) == (6, 3, 2, False)


@pytest.mark.parametrize("name", ["x.jsonl", "folder/x.jsonl"])
def test_jsonl(tmp_path, name):
    lines = [{"text": "one\n"}, {"text": "é", "meta": 1}, {"text": ""}, {"text": "\ud800"}, {"text": "a\0"}]
    data = "\n\n".join(map(json.dumps, lines)).encode()
    _folder(tmp_path, {name: data})
    path = tmp_path / name
    texts = read_texts(path if name == "x.jsonl" else path.parent)
    assert texts.documents == ["one\n", "é"]
    assert (texts.files, texts.skipped, texts.empty) == (1, 2, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"line 2 is not JSON"),
        (b'{"content": "x"}', r'line 2 has no string under "text" \(keys \[\'content\'\]\): rename the key'),
        (
            b'{"messages": [{"role": "user"}]}',
            r"'messages'.*: give conversations by --conversations",
        ),
        (b'{"text": 3}', r'line 2 has no string under "text"'),
        (b"[1]", r"\(list\)"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / "x.jsonl")


@given(st.text(), st.integers(1, 20))
def test_pieces_lose_nothing(text, size):
    pieces = list(_pieces(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) >= size and piece.splitlines() for piece in pieces[:-1])
    assert [line for piece in pieces for line in piece.splitlines()] == text.splitlines()  # cut at line ends


@settings(max_examples=200)
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), st.integers(1, 60)
)
def test_max_bytes_keeps_a_prefix(tmp_path_factory, text, max_bytes):
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_bytes(text.encode())
    try:
        texts = read_texts(path, max_bytes=max_bytes)
    except ValueError:  # nothing but white space, or not even one character, within max_bytes
        kept = text.encode()[:max_bytes].decode(errors="ignore")
        assert not (kept[: kept.rfind("\n") + 1] or kept).strip() or not kept.strip()
        return
    kept = "".join(texts.documents)
    assert text.startswith(kept)
    assert texts.size == len(kept.encode()) <= max_bytes
    assert texts.truncated == (len(text.encode()) > max_bytes)
    if "\n" in text.encode()[:max_bytes].decode(errors="ignore") and texts.truncated:
        assert kept.endswith("\n")


def test_max_bytes_over_a_folder(tmp_path):
    _folder(tmp_path, FILES)
    everything = read_texts(tmp_path)
    some = read_texts(tmp_path, max_bytes=100)
    assert some.truncated and 80 <= some.size <= 100
    assert "".join(everything.documents).startswith("".join(some.documents))
    assert everything.documents[: len(some.documents) - 1] == some.documents[:-1]
    assert not read_texts(tmp_path, max_bytes=everything.size).truncated


TABLE = b"NAMES = {\n" + b"    'Aacute': '\\xc1',  # \xc3\x81\n" * 9 + b"}\n"
PROGRAM = b'def f(x):\n    """Say "x".\n\n    "x" is text.\n    """\n' + b"    print('a', 1)\n" * 9


def test_default_leaves_out_tests_tables_and_other_packages(tmp_path, monkeypatch):
    left_out = ("test/t.py", "site-packages/p.py", "encodings/ascii.py", "tkinter/__init__.py", "a.txt")
    _folder(tmp_path, {"os.py": PROGRAM, "entities.py": TABLE} | dict.fromkeys(left_out, b"import os"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert read_texts().documents == [PROGRAM.decode()]
    assert TABLE.decode() in read_texts(tmp_path).documents  # a folder that is named is read whole
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match="pass a folder of text"):
        read_texts()


def test_the_default_text_is_programs():
    """Nearly every line of it is code or words, and many documents are held out."""
    documents = read_texts(max_bytes=6_000_000).documents
    lines = [line.strip() for document in documents for line in document.splitlines() if line.strip()]
    assert sum(line[0] in "'0123456789" for line in lines) < 0.03 * len(lines)
    _, held_out, _ = split_documents(default_split([len(document) for document in documents]), len(documents))
    assert held_out is not None and 20 <= len(held_out) <= len(documents) // 9


def test_errors_name_the_path_the_numbers_and_the_cure(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: check the path"):
        read_texts(tmp_path / "nowhere")
    _folder(tmp_path, {"a.bin": b"\0", "b.bin": b"\xff", "c.txt": b""})
    with pytest.raises(
        ValueError, match=r"looked at 3 files matching '\*', 2 are not UTF-8 text and 1 are empty: pass"
    ):
        read_texts(tmp_path)
    with pytest.raises(ValueError, match=r"a\.bin holds no text: looked at 1 files, 1 are not"):
        read_texts(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        read_texts("/dev/null")
    with pytest.raises(ValueError, match="max_bytes=0"):
        read_texts(tmp_path, max_bytes=0)
