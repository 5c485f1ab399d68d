"""Read a pickle without importing anything it names.

A pickle can name any function of any module and call it. Here every name is looked up in a table: names in
the table become plain data, other names are refused. Functions that a pickle calls only store their
arguments.

A pickle that runs nothing can still take all memory (one opcode asks for 64 GB) or hang: hashing a tuple
that contains another tuple twice, 30 levels deep, takes 2^30 steps that cannot be interrupted. So every
pickle is read first in a forked child with limits, and in this process only if the child has read it.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from megatron_nemotron3.common.processes import in_child

#: Largest number of objects per byte of a pickle, where shared objects count each time.
_SHARED = 16
#: Largest nesting depth.
_DEEPEST = 200
#: Memory in bytes, beyond a multiple of the largest pickle's size, and seconds that the child may take.
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


def inert(name: str) -> type[Inert]:
    """Make a stand-in for the class `name`."""
    return _Frozen(name, (Inert,), {"__slots__": ()})  # type: ignore[return-value]


def arguments(*args: Any) -> tuple[Any, ...]:
    """Stand-in for a function: return its arguments."""
    return args


class _Unpickler(pickle.Unpickler):
    def __init__(self, given: Pickle) -> None:
        super().__init__(io.BytesIO(given.data), encoding="utf-8")
        self._table, self._stubs, self._persistent = given.table, given.stubs, given.persistent
        self._found: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._found:
            if (module, name) in self._table:
                found = self._table[module, name]
            elif f"{module}.".startswith(self._stubs or "\0"):
                found = inert(name)
            else:
                raise Refused(f"it names {module:.100}.{name:.100}, which no checkpoint needs")
            if isinstance(found, FunctionType):  # a pickle could set attributes of a function
                found = _Frozen(name, (), {"__slots__": (), "__new__": partial(_call, found)})
            self._found[module, name] = found
        return self._found[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise Refused("it refers to data outside itself")
        return self._persistent(pid)


def _call(function: Callable[..., Any], cls: type, *args: Any) -> Any:
    return function(*args)


class Pickle(NamedTuple):
    """A pickle and how to read it.

    table: (module, name) -> stand-in: a class, a function of plain data, or a value.
    stubs: prefixes of modules whose other names become `Inert`.
    persistent: makes data of a persistent id; None: there are none.
    """

    data: bytes
    table: Mapping[tuple[str, str], Any]
    stubs: tuple[str, ...] = ()
    persistent: Callable[[Any], Any] | None = None

    def load(self) -> Any:
        """Read it in this process; for one that `try_all` has read."""
        try:
            return _Unpickler(self).load()
        except (Refused, MemoryError):
            raise
        except Exception as problem:  # a damaged pickle can fail in any way
            reason = f"{type(problem).__name__}: {problem!s:.200}"
            raise Refused(f"it is not a readable pickle ({reason})") from None


def loads(
    data: bytes,
    table: Mapping[tuple[str, str], Any],
    *,
    stubs: tuple[str, ...] = (),
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Load a pickle as plain data and `Inert` instances: first in a child, then in this process."""
    given = Pickle(data, table, stubs, persistent)
    for problem in try_all([given]).values():
        raise Refused(problem)
    return given.load()


def try_all(pickles: Sequence[Pickle]) -> dict[int, str]:
    """Read pickles in one forked child with limits. Returns position -> why it cannot be read.

    One that ends the child, by its memory, its time or a crash, is the last one that is read.
    """
    board = mmap.mmap(-1, _BOARD)  # shared: the position that is read, then the messages

    def read_each() -> None:
        board.seek(8)
        for position, one in enumerate(pickles):
            board[:8] = struct.pack("<q", position)
            try:
                _check_expanded_size(one.load(), _SHARED * len(one.data) + (1 << 16))
            except Refused as problem:
                line = f"{position} {problem}".replace("\n", " ").encode(errors="replace")
                if board.tell() + len(line) + 1 < _BOARD:
                    board.write(line + b"\n")

    sizes = [len(one.data) for one in pickles]
    ended = in_child(
        read_each,
        memory=_MEMORY + _MEMORY_PER_BYTE * max(sizes, default=0),
        seconds=_SECONDS + sum(sizes) // _BYTES_PER_SECOND,
    )
    lines = board[8:].rstrip(b"\0").decode().splitlines()
    problems = {int(position): problem for position, _, problem in (line.partition(" ") for line in lines)}
    if ended:
        problems[struct.unpack("<q", board[:8])[0]] = f"it is not a pickle of a checkpoint: it {ended}"
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
