"""Read a pickle without importing anything it names.

A pickle can name any function of any module and call it. Here every name is looked up in a table: names in
the table become plain data, other names are refused. Functions that a pickle calls only store their
arguments.

The opcodes are checked before any of them runs. Long runs of opcodes are matched by regular expressions,
because the index of a large checkpoint has millions.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

#: Allowed opcodes of plain data, lists, dicts, tuples and instances, by the number of bytes that follow
#: them. Not allowed: bytearrays and buffers, the copyreg registry, numbers as text, opcodes that pop objects.
_FIXED = {
    0: [
        *(pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM),
        *(pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.MEMOIZE),
        *(pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
        pickle.BINPERSID,
    ],
    1: [pickle.PROTO, pickle.BININT1, pickle.BINPUT, pickle.BINGET],
    2: [pickle.BININT2],
    4: [pickle.BININT, pickle.LONG_BINGET],
    8: [pickle.BINFLOAT, pickle.FRAME],
}
#: Opcodes whose argument is preceded by its length: bytes of that length field.
_SIZED = {
    **{pickle.LONG1: 1, pickle.SHORT_BINBYTES: 1},
    **{pickle.BINUNICODE: 4, pickle.BINBYTES: 4, pickle.BINUNICODE8: 8, pickle.BINBYTES8: 8},
}
_SHORT_STRINGS = b"|".join(re.escape(pickle.SHORT_BINUNICODE + bytes([n])) + b".{%d}" % n for n in range(256))
#: Opcode that makes or fills a dict or a set -> opcodes that do the same with a list or a tuple.
_WITHOUT_HASHES = {
    **{pickle.EMPTY_DICT: pickle.EMPTY_LIST, pickle.EMPTY_SET: pickle.EMPTY_LIST},
    **{pickle.SETITEMS: pickle.APPENDS, pickle.ADDITEMS: pickle.APPENDS, pickle.FROZENSET: pickle.TUPLE},
    pickle.SETITEM: pickle.TUPLE2 + pickle.APPEND,
    pickle.FRAME: b"",  # its length would be wrong, and it is optional
}


class Refused(ValueError):
    """The pickle names something that the table does not list, or is not a pickle of plain data."""


def _opcode_runs(but: bytes = b"") -> re.Pattern[bytes]:
    """Match up to 4096 opcodes of known length; bounded, because the engine stores every repetition."""
    codes = {n: b"".join(code for code in some if code not in but) for n, some in _FIXED.items()}
    fixed = b"|".join(b"[%s].{%d}" % (re.escape(some), n) for n, some in codes.items())
    return re.compile(b"(?:%s|c[^\n]*\n[^\n]*\n|%s){1,4096}" % (fixed, _SHORT_STRINGS), re.DOTALL)


_PLAIN = _opcode_runs(b"".join(_WITHOUT_HASHES))


def without_hashes(data: bytes) -> bytes:
    """Rewrite a pickle so that it makes only lists and tuples; the result is a tuple of all objects.

    Hashing a tuple that contains another tuple twice, 30 levels deep, takes 2^30 steps that cannot be
    interrupted. Such tuples must therefore be found before the first dict is made.

    Opcodes that are not allowed are refused before any opcode runs. Python's unpickler allocates a memo as
    long as the largest memo index, so one flipped bit can ask for 64 GB. A memo index must therefore be
    smaller than the pickle.
    """
    parts = [pickle.MARK]
    begin = at = 0
    while True:
        if (known := _PLAIN.match(data, at)) is not None:
            at = known.end()
        code = data[at : at + 1]
        if code in _WITHOUT_HASHES:
            parts += (data[begin:at], _WITHOUT_HASHES[code])
            at = begin = at + (9 if code == pickle.FRAME else 1)
        elif code == pickle.STOP:
            return b"".join((*parts, data[begin:at], pickle.TUPLE, pickle.STOP))
        elif code == pickle.LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") < len(data):
            at += 5
        elif code in _SIZED:
            width = _SIZED[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif known is None:
            raise Refused(f"it is not a pickle of plain data (byte {at:,} of {len(data):,})")
        if at > len(data):
            raise Refused(f"it is not a readable pickle (it ends at byte {len(data):,})")


#: Largest number of objects per byte of a pickle, where shared objects count each time.
_SHARED = 16
#: Largest nesting depth.
_DEEPEST = 200


class _Frozen(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused(f"it sets {cls.__name__}.{name}")


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
    """Load a pickle as plain data and `Inert` instances."""
    try:
        as_lists = _ListUnpickler(without_hashes(data), table, stubs, None).load()
        _check_expanded_size(as_lists, _SHARED * len(data) + (1 << 16))
        return _Unpickler(data, table, stubs, persistent).load()
    except Refused:
        raise
    except Exception as problem:  # a damaged pickle can fail in any way
        raise Refused(f"it is not a readable pickle ({type(problem).__name__}: {problem})") from None


class _Rough(list[Any]):
    """Stand-in for every instance and every result of a call while `_ListUnpickler` runs: its arguments."""

    __setstate__ = list.append

    def __new__(cls, *args: Any) -> _Rough:
        self = list.__new__(cls)
        list.extend(self, args)
        return self

    def __init__(self, *args: Any) -> None:
        pass


class _ListUnpickler(_Unpickler):
    """Load the output of `without_hashes`."""

    def find_class(self, module: str, name: str) -> Any:
        super().find_class(module, name)
        return _Rough

    def persistent_load(self, pid: Any) -> Any:
        return [pid]


def _check_expanded_size(root: Any, most: int) -> None:
    """Refuse an object of more than `most` parts, where shared parts count each time, or a very deep one."""
    level, depth = [root], 0
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, (list, tuple)):
                below.extend(one)
                if len(below) > most:
                    raise Refused("it contains itself, or repeats shared objects too often")
        level, depth, most = below, depth + 1, most - len(below)
        if depth > _DEEPEST:
            raise Refused(f"it nests objects more than {_DEEPEST} levels deep")
