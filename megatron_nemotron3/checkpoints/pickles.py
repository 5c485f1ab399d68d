"""Read a pickle without importing anything it names.

Names in a table become plain data, others are refused. A pickle that runs nothing can still take all memory
(one opcode asks for 64 GB) or hang: hashing a tuple that contains another tuple twice, 30 levels deep, takes
2^30 steps that cannot be interrupted. So every pickle is read in a forked child with limits before it is read
here.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import pickle
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

from megatron_nemotron3.common.limits import in_child

#: Largest number of objects per byte of a pickle, where shared objects count each time.
_SHARED = 16
#: Largest nesting depth.
_DEEPEST = 200
#: Memory and time that the child may take: bytes and seconds, and more by the size of the pickles.
_MEMORY, _MEMORY_PER_BYTE = 256 << 20, 64
_SECONDS, _BYTES_PER_SECOND = 3, 1 << 20
#: Room for messages of the child, in bytes.
_BOARD = 1 << 20


class Refused(ValueError):
    """The pickle names something that the table does not list, or is not a pickle of plain data."""


class _Frozen(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused(f"it sets {cls.__name__}.{name:.60}")


class Inert(metaclass=_Frozen):
    """Stand-in for an instance of a class: constructor arguments and state, nothing else."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = object.__new__(cls)
        self.args, self.state = args, kwargs
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """An attribute of the pickled instance; None if it does not exist."""
        return self.state.get(name) if isinstance(self.state, dict) else None


@lru_cache(1024)
def inert(name: str) -> type[Inert]:
    """Make a stand-in for the class `name`."""
    return _Frozen(name, (Inert,), {"__slots__": ()})  # type: ignore[return-value]


def stand_ins(names: Mapping[str, str]) -> dict[tuple[str, str], Any]:
    """Return a table of `inert` for the classes that are named for each module."""
    return {(module, name): inert(name) for module, text in names.items() for name in text.split()}


def arguments(*args: Any) -> tuple[Any, ...]:
    """Stand-in for a function: return its arguments."""
    return args


def member(cls: Any, name: Any) -> tuple[Any, ...]:
    """Stand-in for getattr: a member of an enumeration, as Python 3.11 pickles it."""
    known = isinstance(cls, type) and issubclass(cls, Inert) and isinstance(name, str)
    if not known or not name.isidentifier() or name.startswith("_"):
        raise Refused("it calls getattr for something else than a member of an enumeration")
    return cls, name


@lru_cache(1024)
def frozen(function: Callable[..., Any]) -> type:
    """Make a stand-in for a function, whose attributes a pickle could set: a class whose calls return its."""
    return _Frozen(function.__name__, (), {"__slots__": (), "__new__": lambda _, *args: function(*args)})


class _Unpickler(pickle.Unpickler):
    def __init__(self, given: Pickle, stream: io.BytesIO) -> None:
        super().__init__(stream, encoding="utf-8")
        self._given = given

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._given.table:
            found = self._given.table[module, name]
            return frozen(found) if isinstance(found, FunctionType) else found
        if f"{module}.".startswith(self._given.stubs or "\0"):
            return inert(name)
        raise Refused(f"it names {module:.100}.{name:.100}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Any:
        if self._given.persistent is None:
            raise Refused("it refers to data outside itself")
        return self._given.persistent(pid)


class Pickle(NamedTuple):
    """A pickle and how to read it."""

    data: bytes
    #: (module, name) -> stand-in: a class, a function of plain data, or a value.
    table: Mapping[tuple[str, str], Any]
    #: Prefixes of modules whose other names become `Inert`.
    stubs: tuple[str, ...] = ()
    #: Makes data of a persistent id; None: there are none.
    persistent: Callable[[Any], Any] | None = None

    def load(self, stream: io.BytesIO | None = None) -> Any:
        """Read it in this process, after `try_all` has read it; `stream`: its data, and where it begins."""
        try:
            return _Unpickler(self, stream or io.BytesIO(self.data)).load()
        except (Refused, MemoryError):
            raise
        except Exception as problem:  # a damaged pickle can fail in any way
            reason = f"{type(problem).__name__}: {problem!s:.200}"
            raise Refused(f"it is not a readable pickle ({reason})") from None

    def checked(self, most: int = 1) -> Any:
        """Read it, or the last of `most` pickles in it, in the child of `try_all`.

        What it returns can be walked and hashed in bounded time.
        """
        stream, found = io.BytesIO(self.data), None
        for number in range(most):
            if number == 0 or stream.tell() < len(self.data):
                found = self.load(stream)
                _check_expanded_size(found, _SHARED * len(self.data) + (1 << 16))
        return found

    def loaded(self) -> Any:
        """Read it as plain data and `Inert` instances: first in a child, then in this process."""
        if _is_harmless(self.data):
            return self.checked()
        if (digest := hashlib.sha256(self.data).digest()) not in _tried:
            for problem in try_all([self.checked], len(self.data)).values():
                raise Refused(problem)
            _tried.add(digest)
        return self.load()


#: Digests of pickles that a child has read.
_tried: set[bytes] = set()
#: Longest pickle, in bytes, whose opcodes are counted, and how many references it may have: with so few,
#: shared objects repeat at most exp(32 / e) times.
_FEW_BYTES, _FEW_REFERENCES = 2048, 32


def _is_harmless(data: bytes) -> bool:
    """Whether a pickle is so small that reading it takes neither memory nor time, as those of tensors are."""
    if len(data) > _FEW_BYTES:
        return False
    references = 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            references += opcode.name in ("GET", "BINGET", "LONG_BINGET", "DUP")
            if opcode.name in ("PUT", "LONG_BINPUT", "BYTEARRAY8", "LONG4", "LONG") or isinstance(
                argument, bytes
            ):
                return False
    except ValueError:
        return False
    return references <= _FEW_REFERENCES


def try_all(
    reads: Sequence[Callable[[], object]], size: int, wrong: str = "it is not a pickle of a checkpoint"
) -> dict[int, str]:
    """Call functions that read pickles in one forked child. Returns position -> why it fails.

    A function fails by a ValueError. One that ends the child, by its memory, its time or a crash, is the last
    one that is called, and `wrong` says so. Limits depend on `size`, the bytes of all the pickles.
    """
    board = mmap.mmap(-1, _BOARD)  # shared: the position of the current function, then the messages

    def call_each() -> None:
        board.seek(8)
        for position, read in enumerate(reads):
            board[:8] = struct.pack("<q", position)
            try:
                read()
            except ValueError as problem:
                line = f"{position} {problem!s:.1000}".replace("\n", " ").encode(errors="replace")
                if board.tell() + len(line) + 1 < _BOARD:
                    board.write(line + b"\n")

    ended = in_child(
        call_each, memory=_MEMORY + _MEMORY_PER_BYTE * size, seconds=_SECONDS + size // _BYTES_PER_SECOND
    )
    lines = board[8:].rstrip(b"\0").decode().split("\n")[:-1]
    problems = {int(position): problem for position, _, problem in (line.partition(" ") for line in lines)}
    if ended:
        problems[struct.unpack("<q", board[:8])[0]] = f"{wrong}: it {ended}"
    return problems


def _check_expanded_size(root: Any, most: int) -> None:
    """Refuse an object of more than `most` parts, where shared parts count each time, or a very deep one."""
    level, depth = [root], 0
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, (list, tuple, set, frozenset)):
                below.extend(one)
            elif isinstance(one, dict):
                below.extend(one)
                below.extend(one.values())
            elif isinstance(one, Inert):
                below += (one.args, one.state)
            if len(below) > most:
                raise Refused("it contains itself, or repeats shared objects too often")
        level, depth, most = below, depth + 1, most - len(below)
        if depth > _DEEPEST:
            raise Refused(f"it nests objects more than {_DEEPEST} levels deep")
