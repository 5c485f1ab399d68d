"""Collect documents (strings) from files on this machine."""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_nemotron3.common.files import open_outside
from megatron_nemotron3.train.data.forms import FORMS

#: Folders without text of their own. Folders and files that start with "." are skipped, too.
_NEVER = frozenset({"__pycache__", "node_modules"})
#: Folders of the standard library that are left out: other packages, tests, tables, what some machines lack.
_NOT_SOURCES = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
    + ("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo")
)
#: A line that begins with a number or a string: of a table, not of a program or of its documentation.
_TABLE_LINE = re.compile(r"""[\s\[({]*[bBrRuU]?("(?!"")|'(?!'')|-?\d)""")
#: The share of such lines from which on a file is a table.
_TABLE = 0.1

#: A single text file is cut at line ends into documents of about this many characters.
PIECE = 8192


@dataclass
class Texts:
    """Documents, and counts of the files they come from."""

    #: Where the collection ends, in UTF-8 bytes; None: nowhere.
    max_bytes: int | None = None
    documents: list[str] = field(default_factory=list)
    #: Files opened (lines of a .jsonl are not counted here).
    files: int = 0
    #: Files, or records of a .jsonl, that were skipped: they contain a NUL byte or are not UTF-8.
    skipped: int = 0
    #: Files, or records, that were skipped because they contain only white space.
    empty: int = 0
    #: UTF-8 bytes of the documents.
    size: int = 0
    #: Whether max_bytes ended the collection.
    truncated: bool = False

    def add_file(self, file: Path, piece: int | None) -> None:
        self.files += 1
        if file.suffix == ".jsonl":
            for record in _records(file):
                if self.truncated:
                    break
                self._add(record, None)
            return
        with open_outside(file) as stream:
            # One byte more than the limit distinguishes a file that fits from one that must be cut.
            limit = -1 if self.max_bytes is None else self.max_bytes - self.size + 1
            self._add(stream.read(limit), piece)

    def _add(self, data: bytes | None, piece: int | None) -> None:
        if data is None or b"\0" in data:
            self.skipped += 1
            return
        left = None if self.max_bytes is None else self.max_bytes - self.size
        overflow = left is not None and len(data) > left
        # Not final: an unfinished character at the cut is dropped, an invalid one is still an error.
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(data[:left], final=not overflow)
        except UnicodeDecodeError:
            self.skipped += 1
            return
        self.truncated = overflow
        if overflow:
            text = text[: text.rfind("\n") + 1] or text
        if not text.strip():
            # A cut that leaves only white space is the end of the budget, not an empty file.
            self.empty += not overflow
            return
        self.size += len(text.encode("utf-8"))
        self.documents.extend([text] if piece is None else _pieces(text, piece))


def read_texts(path: str | os.PathLike[str] | None = None, *, max_bytes: int | None = None) -> Texts:
    """Collect documents from `path`, always the same ones in the same order.

    path: a folder (every file below it), one text file (cut at line ends into documents of about PIECE
        characters), or a .jsonl with {"text": ...} per line (one document a line). None: the sources of
        Python's standard library on this machine (*.py), without tests, tables and _NOT_SOURCES.
    max_bytes: stop after this many UTF-8 bytes; the last document is cut, at a line end if it has one.

    Files of a folder come in the order of a hash of their relative path. Megatron's --split holds out the
    last documents and max_bytes keeps the first, so both are fair samples, not the end of the alphabet.
    Documents of a single file or a .jsonl keep their order.

    Raises FileNotFoundError, or ValueError without any text, and at a line of a .jsonl without "text".
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} leaves no text: use a positive number, or None for all")
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if not root.exists():
        cure = "pass a folder of text" if path is None else "check the path"
        raise FileNotFoundError(f"{root} does not exist: {cure}")
    if root.is_dir():
        pattern, excluded = "*", _NEVER
        if path is None:
            pattern, excluded = "*.py", _NEVER | _NOT_SOURCES
        files, piece = _files(root, pattern, excluded), None
    elif root.is_file():
        files, piece = [root], PIECE
    else:
        raise ValueError(
            f"{root} is neither a file nor a folder: pass a folder of text, a text file or a .jsonl"
        )

    texts = Texts(max_bytes)
    for file in files:
        if texts.truncated:
            break
        if path is None and _is_table(file):
            continue
        texts.add_file(file, piece)
    if not texts.documents:
        which = f" matching {pattern!r}" if root.is_dir() else ""
        raise ValueError(
            f"{root} holds no text: looked at {texts.files} files{which}, {texts.skipped} are not "
            f"UTF-8 text and {texts.empty} are empty: pass a folder of text files, a text file, or a "
            '.jsonl with {"text": ...} per line'
        )
    return texts


def _files(root: Path, pattern: str, excluded: frozenset[str]) -> list[Path]:
    """Regular files below `root`, ordered by a hash of their relative path. Linked folders are skipped."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if fnmatch.fnmatchcase(name, pattern) and not name.startswith(".") and file.is_file():
                key = hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).digest()
                found.append((key, file))
    return [file for _, file in sorted(found)]


def _is_table(file: Path) -> bool:
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return sum(_TABLE_LINE.match(line) is not None for line in lines) >= _TABLE * max(1, len(lines))


def _pieces(text: str, size: int) -> Iterator[str]:
    """Cut `text` at line ends into pieces of at least `size` characters; the last may be shorter."""
    lines: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= size:
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def _records(file: Path) -> Iterator[bytes | None]:
    """The "text" of each line of a .jsonl, as UTF-8; None for a string that has no UTF-8 form."""
    with open_outside(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{file}, line {number} is not JSON ({error}): one object per line"
                ) from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                held = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
                talks = isinstance(record, dict) and any(form.fits(record) for form in FORMS.values())
                cure = "give conversations by --conversations" if talks else "rename the key"
                raise ValueError(f'{file}, line {number} has no string under "text" ({held}): {cure}')
            try:
                yield text.encode("utf-8")
            except UnicodeEncodeError:  # a lone surrogate
                yield None
