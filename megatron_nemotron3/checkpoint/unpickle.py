"""Read a pickle without importing anything it names.

A pickle may name any function of any module and call it. Here names go through a table: what the table
lists becomes plain data, what it does not list is refused by name. Nothing that a pickle calls does more
than store its arguments.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

#: Opcodes of plain data, lists, dicts, tuples and instances, by the bytes that follow them. Left out are
#: bytearrays and buffers, the copyreg registry, persistent ids and numbers as text.
_FIXED = {
    0: [
        *(pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM),
        *(pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.MEMOIZE),
        *(pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.REDUCE, pickle.BUILD),
        pickle.BINPERSID,
    ],
    1: [pickle.PROTO, pickle.BININT1, pickle.BINPUT, pickle.BINGET],
    2: [pickle.BININT2],
    4: [pickle.BININT, pickle.LONG_BINGET],
    8: [pickle.BINFLOAT, pickle.FRAME],
}
#: Opcodes with a length before their bytes: how wide the length is.
_SIZED = {
    **{pickle.LONG1: 1, pickle.SHORT_BINBYTES: 1},
    **{pickle.BINUNICODE: 4, pickle.BINBYTES: 4, pickle.BINUNICODE8: 8, pickle.BINBYTES8: 8},
}
_SHORT_STRINGS = b"|".join(re.escape(pickle.SHORT_BINUNICODE + bytes([n])) + b".{%d}" % n for n in range(256))
#: Up to 4096 opcodes whose length the pattern knows; bounded, since the engine remembers every repetition.
_OPCODES = re.compile(
    b"(?:%s|c[^\n]*\n[^\n]*\n|%s){1,4096}"
    % (
        b"|".join(b"[%s].{%d}" % (re.escape(b"".join(codes)), n) for n, codes in _FIXED.items()),
        _SHORT_STRINGS,
    ),
    re.DOTALL,
)


class Refused(ValueError):
    """The pickle names something that the table does not list, or is no pickle of plain data."""


class _Frozen(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused(f"it sets {cls.__name__}.{name}")


class Inert(metaclass=_Frozen):
    """Stands for an instance of a class: constructor arguments and state, nothing else."""

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
        """A field of the pickled instance; None if it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def inert(name: str) -> type[Inert]:
    """A class that stands for the class `name`."""
    return _Frozen(name, (Inert,), {"__slots__": ()})  # type: ignore[return-value]


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        table: Mapping[tuple[str, str], Any],
        stubs: tuple[str, ...],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._table, self._stubs, self._persistent = dict(table), stubs, persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._table:
            if not f"{module}.".startswith(self._stubs or "\0"):
                raise Refused(f"it names {module}.{name}, which no checkpoint needs")
            self._table[module, name] = inert(name)
        return self._table[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise Refused("it refers to data outside itself")
        return self._persistent(pid)


def loads(
    data: bytes,
    table: Mapping[tuple[str, str], Any],
    *,
    stubs: tuple[str, ...] = (),
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The object a pickle describes, made of plain data and `Inert` instances.

    Args:
        table: (module, name) -> what stands for it. It must be safe to call with anything.
        stubs: package prefixes ("megatron.") whose names become inert classes.
        persistent: what stands for data outside the pickle, from its persistent id.

    Raises:
        Refused: a name that is not in the table, an unexpected opcode, or a damaged pickle.
    """
    _scan(data)
    try:
        return _Unpickler(data, table, stubs, persistent).load()
    except Refused:
        raise
    except Exception as problem:  # a damaged pickle can fail in any way
        raise Refused(f"it is not a readable pickle ({type(problem).__name__}: {problem})") from None


def _scan(data: bytes) -> None:
    """Refuse opcodes outside the list before any of them is run.

    Python's unpickler makes a table as long as the largest index it is told to store under: one flipped
    bit can ask for 64 GB. So an index must be smaller than the pickle.
    """
    at = 0
    while True:
        if (known := _OPCODES.match(data, at)) is not None:
            at = known.end()
            continue
        code = data[at : at + 1]
        if code == pickle.STOP:
            return
        if code == pickle.LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") < len(data):
            at += 5
        elif code in _SIZED:
            width = _SIZED[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        else:
            raise Refused(f"it is not a pickle of plain data (byte {at:,} of {len(data):,})")
        if at > len(data):
            raise Refused(f"it is not a readable pickle (it ends at byte {len(data):,})")
