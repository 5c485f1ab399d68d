"""The bytes of checkpoint files: mapped to memory, or fetched where a file stands for a remote one.

torch_dist and safetensors files hold tensors as they are in memory, so a mapped file is read without a copy,
and the pages belong to the system's cache, not to this process. Touching a page that the file no longer has
ends the process (SIGBUS). So every read compares its bounds with the size at the mapping, and that with the
present size; only a file that is truncated in the milliseconds in which a band is used still ends it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_nemotron3.checkpoints.metadata import ArchiveError, explained
from megatron_nemotron3.common.files import open_outside

#: (device, inode) of a placeholder of a remote file (`remote`) -> what fetches a range: offset, length.
REMOTE: dict[tuple[int, int], Callable[[int, int], bytes]] = {}


class MappedFile:
    """The bytes of one regular file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path), open_outside(path) as file:
            found = os.fstat(file.fileno())
            self.size = found.st_size
            self._fetch = REMOTE.get((found.st_dev, found.st_ino))
            self._kept = (0, b"")
            self._map: mmap.mmap | None = None
            self._view = memoryview(b"")
            if self.size and self._fetch is None:
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
                self._view = memoryview(self._map)

    def __call__(self, offset: int, length: int) -> memoryview:
        """The bytes [offset, offset + length), not to be written to.

        Raises:
            ArchiveError: the file is shorter, or has become so.
        """
        if not 0 <= offset <= offset + length <= self.size:
            raise ArchiveError(f"the file ends at byte {self.size:,}, inside the {length:,} from {offset:,}")
        if self._map is not None and (now := self._map.size()) < self.size:
            raise ArchiveError(f"the file had {self.size:,} bytes when it was opened, now it has {now:,}")
        if self._fetch is None:
            return self._view[offset : offset + length]
        begin, kept = self._kept
        if not begin <= offset <= offset + length <= begin + len(kept):
            begin, kept = self._kept = offset, self._fetch(offset, length)
        return memoryview(kept)[offset - begin : offset - begin + length]

    def blocks(self, offset: int, length: int, size: int = 64 << 20) -> Iterator[memoryview]:
        """The same bytes, of at most `size` at a time."""
        for start in range(offset, offset + length, size):
            yield self(start, min(size, offset + length - start))


class HeldBytes(MappedFile):
    """Bytes in memory, read as a file."""

    def __init__(self, data: bytes) -> None:
        self.path, self.size, self._fetch, self._map = Path("bytes"), len(data), None, None
        self._view = memoryview(data)


class MappedFiles(dict[Path, MappedFile]):
    """Files by path, opened when they are first asked for."""

    def __missing__(self, path: Path) -> MappedFile:
        self[path] = found = MappedFile(path)
        return found
