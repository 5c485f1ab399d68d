"""Checkpoints elsewhere: URLs through fsspec (s3://, gs://, hf://, memory://, …) and Hugging Face ids.

A remote folder is read through a local one with the same names (`local`): small files are copied, files with
tensors are sparse files of the right size, for which `read` fetches the range that is read. Zeros, which a
reader that passed by would find, are no valid header of any format.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from megatron_nemotron3.checkpoints.folders import (
    CHECKPOINTS,
    HF_INDEX,
    HUGGING_FACE,
    RELEASE,
    TOKENIZER,
    iteration_of,
    named_checkpoint,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_json
from megatron_nemotron3.checkpoints.read import REMOTE

_URL = re.compile(r"[A-Za-z][\w+.-]*(::[^/]*)?://")
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
#: Ends of the names of files with tensors.
_TENSORS = (".safetensors", ".distcp", ".pt", ".bin", ".pth", ".gguf", ".h5", ".msgpack")
#: Files that are copied whole, although they end like one with tensors.
_COPIED = ("common.pt",)
#: Largest size of a copied file, in bytes.
_LIMIT = 1 << 30
#: Shorter reads, of headers, fetch a block of this many bytes; this many blocks are kept per file.
_BLOCK, _KEPT = 256 << 10, 8
_MEMORY = "memory://"  # of this process
#: What `local` made -> URL.
_shown: dict[str, str] = {}


def place(text: str) -> Path | str:
    """Return a URL as it is, and anything else as a path; the type of arguments of `local`."""
    return text if _URL.match(text) else Path(text)


def shown(path: Path | str) -> str:
    """Return a path, or a message, as the user knows it: with URLs for the folders that `local` made."""
    text = os.fspath(path)
    for folder, url in _shown.items():
        text = text.replace(folder, url)
    return text


@contextlib.contextmanager
def target(where: Path | str) -> Iterator[tuple[Path, str | None]]:
    """Yield the path to write to, and the URL if it only stands for one: nothing is written to it then."""
    if isinstance(where, Path) or _named(where).startswith("file://"):
        yield _path_of(where), None
        return
    if where.startswith(_MEMORY):
        raise ValueError(f"{where}: its files end with this command: give a folder, or another store")
    with tempfile.TemporaryDirectory(prefix="nemotron3-remote-") as home:
        path = Path(home) / "target"
        _shown[os.fspath(path)] = where.rstrip("/")
        try:
            yield path, where.rstrip("/")
        finally:
            del _shown[os.fspath(path)]


def _named(url: str) -> str:
    """The URL, after a check that it names a folder."""
    if _URL.fullmatch(url.rstrip("/") + "//"):
        raise ValueError(f"{url} names no folder: write it behind ://")
    return url


def _path_of(where: Path | str) -> Path:
    return where if isinstance(where, Path) else Path(unquote(urlsplit(where).path))


@contextlib.contextmanager
def local(
    where: Path | str, *, iteration: int | None = None, every: bool = False, download: bool = True
) -> Iterator[Path]:
    """Yield a local folder to read `where` through: a path, a URL, or the id of a Hugging Face repository.

    An id that is not in Hugging Face's cache is downloaded, or else read as a URL.
    """
    if isinstance(where, Path) or not _URL.match(where):
        path = Path(where)
        is_id = _ID.fullmatch(os.fspath(where)) and not os.path.lexists(path) and not path.parent.exists()
        if is_id and not download and _cached(os.fspath(where)) is None:
            with local(f"hf://{where}") as folder:
                yield folder
            return
        yield _snapshot(os.fspath(where)) if is_id else path
        return
    if _named(where).startswith("file://"):
        yield _path_of(where)
        return
    home = Path(tempfile.mkdtemp(prefix="nemotron3-remote-"))
    folder = home / (where.rstrip("/").rpartition("/")[2] or "root")
    _shown[os.fspath(folder)] = where.rstrip("/")
    mirror = _Mirror(where, iteration, every)
    try:
        mirror.folder(root(where), folder)
        yield folder
    except (ValueError, OSError) as problem:
        raise ValueError(shown(str(problem))) from None
    finally:
        for key in mirror.made:
            REMOTE.pop(key, None)
        del _shown[os.fspath(folder)]
        shutil.rmtree(home, ignore_errors=True)


def filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, a new one in each process: sockets do not survive a fork."""
    return _opened(url)[0]


def root(url: str) -> str:
    """Return the path of a URL in its file system."""
    return _opened(url)[1].rstrip("/") or "/"


def _opened(url: str) -> tuple[Any, str]:
    try:
        import fsspec

        found: tuple[Any, str] = fsspec.core.url_to_fs(url)  # kept by fsspec, for each process
    except ModuleNotFoundError as problem:
        if problem.name != "fsspec":
            raise ValueError(f"{url}: {problem}") from None
        raise ValueError(f"{url}: URLs need the package fsspec: pip install fsspec") from None
    except Exception as problem:  # of a file system that needs options, for instance
        raise ValueError(f"{url}: it cannot be opened: {problem!r:.300}") from None
    return found


class _Mirror:
    """Makes the local folder of a remote one."""

    def __init__(self, url: str, iteration: int | None, every: bool) -> None:
        self.url, self.iteration, self.every = url, iteration, every
        #: Keys in `REMOTE`.
        self.made: list[tuple[int, int]] = []

    def folder(self, remote: str, folder: Path) -> None:
        try:
            entries = filesystem(self.url).ls(remote, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{folder}: it does not exist") from None
        except Exception as problem:  # each file system has its own
            raise ValueError(f"{folder}: it cannot be listed: {problem!r:.300}") from None
        folder.mkdir(parents=True)
        folders = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if name in ("", ".", "..") or "\0" in name:
                continue
            if entry["type"] == "directory":
                folders[name] = f"{remote.rstrip('/')}/{name}"
            elif str(entry["name"]).rstrip("/") != remote.rstrip("/"):  # a file was asked for
                self.file(entry, folder / name)
        if not entries or not (folders or any(folder.iterdir())):
            raise ValueError(f"{folder}: it is not a folder, or is empty")
        for name, below in folders.items():
            number = iteration_of(name)
            if number is not None or name == RELEASE:
                if not self._needed(folder, number if number is not None else name):
                    (folder / name).mkdir()
                    continue
            elif name not in (CHECKPOINTS, TOKENIZER, HUGGING_FACE) and not name.startswith("mp_rank_"):
                continue
            self.folder(below, folder / name)

    def file(self, entry: dict[str, Any], path: Path) -> None:
        """Copy a small file, or make the placeholder of a file with tensors."""
        remote, size = entry["name"], entry.get("size")
        if type(size) is not int:
            raise ValueError(f"{path}: {entry.get('size')!r} is not its size")
        if path.name.endswith(_TENSORS) and path.name not in _COPIED or size > _LIMIT:
            with open(path, "wb") as file:
                os.truncate(file.fileno(), size)
                found = os.fstat(file.fileno())
            REMOTE[found.st_dev, found.st_ino] = _reader(partial(_fetch, self.url, remote, path), size)
            self.made.append((found.st_dev, found.st_ino))
        else:
            path.write_bytes(_fetch(self.url, remote, path, 0, size))
        os.utime(path, ns=(0, _changed(entry)))

    def _needed(self, folder: Path, which: int | str) -> bool:
        if self.every:
            return True
        if self.iteration is not None:
            return which == self.iteration
        return named_checkpoint(folder) == which


def _reader(fetch: Callable[[int, int], bytes], size: int) -> Callable[[int, int], bytes]:
    """Return what reads ranges of a remote file of `size` bytes: short ones through blocks that are kept."""

    @lru_cache(_KEPT)
    def block(number: int) -> bytes:
        return fetch(number * _BLOCK, min(_BLOCK, size - number * _BLOCK))

    def read(offset: int, length: int) -> bytes:
        number = offset // _BLOCK
        if length >= _BLOCK or number != (offset + length - 1) // _BLOCK:
            return fetch(offset, length)
        return block(number)[offset - number * _BLOCK :][:length]

    return read


def _fetch(url: str, remote: str, path: Path, offset: int, length: int) -> bytes:
    if not length:
        return b""
    try:
        data = filesystem(url).cat_file(remote, start=offset, end=offset + length)
    except Exception as problem:  # each file system has its own
        raise OSError(0, f"bytes from {offset:,} cannot be fetched: {problem!r:.300}", path) from None
    if len(data) != length:
        raise CheckpointError(f"{path}: {len(data):,} of {length:,} bytes came from {offset:,}")
    return bytes(data)


def _changed(entry: dict[str, Any]) -> int:
    """Return the time of the last change in ns, or of the number that stands for a version; 0 if unknown."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found = entry.get(key)
        if isinstance(found, datetime):
            return int(found.timestamp() * 1e9)
        if isinstance(found, (int, float)):
            return int(found * 1e9)
    return 0


def _cached(name: str) -> Path | None:
    """Return the whole folder of a repository in Hugging Face's cache."""
    with contextlib.suppress(Exception):
        from huggingface_hub import snapshot_download

        if _is_whole(found := Path(snapshot_download(name, local_files_only=True))):
            return found
    return None


def _snapshot(name: str) -> Path:
    """Return the folder of a repository in Hugging Face's cache; download it if it is not there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{name}: it does not exist here; as a Hugging Face id it needs the package huggingface_hub"
        ) from None
    if (cached := _cached(name)) is not None:
        return cached
    print(f"{name}: not in Hugging Face's cache; downloading it (hf://{name} only reads)", file=sys.stderr)
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py", "LICENSE*", "NOTICE*"]
    try:
        found = Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as problem:  # httpx's, requests' or the package's own
        text = f"{type(problem).__name__}: {' '.join(str(problem).split()):.200}"
    else:
        if _is_whole(found):
            return found
        text = "files with weights are missing"
    raise ValueError(
        f"{name}: no such folder is here, and as a Hugging Face id it is neither in the cache nor can it be "
        f"downloaded ({text})"
    )


def _is_whole(folder: Path) -> bool:
    if not (folder / HF_INDEX).exists():
        return any(folder.glob("*.safetensors"))
    return all((folder / str(name)).exists() for name in read_json(folder / HF_INDEX)["weight_map"].values())
