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

#: Objects for each byte of a pickle, at most, when shared ones are written out.
_SHARED = 16
_PLAIN = {str, int, type(None), bool, float, bytes}
#: Opcodes of plain data, lists, dicts, tuples and instances, by the bytes that follow them. Left out are
#: bytearrays and buffers, the copyreg registry, persistent ids and numbers as text.
_FIXED = {
    0: [
        *(pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
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
#: Opcodes with a length before their bytes: how wide the length is.
_SIZED = {
    **{pickle.LONG1: 1, pickle.SHORT_BINBYTES: 1},
    **{pickle.BINUNICODE: 4, pickle.BINBYTES: 4, pickle.BINUNICODE8: 8, pickle.BINBYTES8: 8},
}
_SHORT_STRINGS = b"|".join(re.escape(pickle.SHORT_BINUNICODE + bytes([n])) + b".{%d}" % n for n in range(256))
#: Up to 4096 opcodes whose length the pattern knows; bounded, since the engine remembers every repetition.
_RUN = b"(?:%s|c[^\n]*\n[^\n]*\n|%s){1,4096}"


def _runs(without: bytes = b"") -> re.Pattern[bytes]:
    codes = {n: [c for c in several if c not in without] for n, several in _FIXED.items()}
    fixed = b"|".join(b"[%s].{%d}" % (re.escape(b"".join(c)), n) for n, c in codes.items())
    return re.compile(_RUN % (fixed, _SHORT_STRINGS), re.DOTALL)


_OPCODES = _runs()


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
    most = _SHARED * len(data) + (1 << 16)
    try:
        _check_written_out(_Rehearsal(_without_hashes(data), table, stubs, None).load(), most)
        result = _Unpickler(data, table, stubs, persistent).load()
    except Refused:
        raise
    except Exception as problem:  # a damaged pickle can fail in any way
        raise Refused(f"it is not a readable pickle ({type(problem).__name__}: {problem})") from None
    _check_written_out(result, most)
    return result


class _Rough:
    """Stands for everything that a pickle calls, in the rehearsal: what it was given."""

    __slots__ = ("given",)

    given: list[Any]

    def __new__(cls, *args: Any) -> _Rough:
        self = object.__new__(cls)
        self.given = list(args)
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.given.append(state)

    def extend(self, items: list[Any]) -> None:
        self.given.extend(items)


class _Rehearsal(_Unpickler):
    """Builds lists where the pickle says dicts and sets, so that nothing is hashed."""

    def find_class(self, module: str, name: str) -> Any:
        super().find_class(module, name)
        return _Rough

    def persistent_load(self, pid: Any) -> Any:
        return [pid]


#: An opcode that makes a dict or a set, or puts something into one -> one that does so with a list or tuple.
_LIKE = {
    **{pickle.EMPTY_DICT: pickle.EMPTY_LIST, pickle.EMPTY_SET: pickle.EMPTY_LIST},
    **{pickle.SETITEMS: pickle.APPENDS, pickle.ADDITEMS: pickle.APPENDS},
    **{pickle.SETITEM: pickle.TUPLE3, pickle.FROZENSET: pickle.TUPLE},
}


_NO_HASH = _runs(b"".join(_LIKE))


def _without_hashes(data: bytes) -> bytes:
    """A scanned pickle that describes the same with lists and tuples.

    The hash of a tuple that holds another one twice, 30 deep, takes 2^30 steps in which nothing can
    interrupt it, so it must be known that there are none before the first dict is made.
    """
    result, at = bytearray(data), 0
    while True:
        if (known := _NO_HASH.match(data, at)) is not None:
            at = known.end()
        code = data[at : at + 1]
        if code in _LIKE:
            result[at] = _LIKE[code][0]
            at += 1
        elif code == pickle.STOP:
            return bytes(result)
        elif code == pickle.LONG_BINPUT:
            at += 5
        elif code in _SIZED:
            width = _SIZED[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")


def _check_written_out(root: Any, most: int) -> None:
    """Refuse what is more than `most` objects when those that are shared count each time.

    200 bytes can describe a tuple of two tuples of two tuples …, 30 deep: the text or the hash of such an
    object takes as long as if it were that large. An object that contains itself is endless.
    """
    todo: list[Any] = [root]
    while todo:
        one = todo.pop()
        if type(one) in _PLAIN:
            continue
        if isinstance(one, dict):
            todo.extend(one)
            todo.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo.extend(one)
        elif isinstance(one, Inert):
            todo.append(one.state)
            todo.extend(one.args)
        elif isinstance(one, _Rough):
            todo.extend(one.given)
        else:
            continue
        most -= 1
        if most < 0 or len(todo) > most:
            raise Refused("it repeats an object inside of itself again and again")


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
