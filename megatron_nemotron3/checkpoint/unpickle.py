"""Read a pickle without importing anything it names.

A pickle may name any function of any module and call it. Here names go through a table: what the table
lists becomes plain data, what it does not list is refused by name. Nothing that a pickle calls does more
than store its arguments.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from megatron_nemotron3.checkpoint.opcodes import Refused, without_hashes

__all__ = ["Inert", "Refused", "inert", "loads"]

#: Objects for each byte of a pickle, at most, when shared ones are written out.
_SHARED = 16
#: Objects inside of each other.
_DEEPEST = 200


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
    try:
        rehearsed = _Rehearsal(without_hashes(data), table, stubs, None).load()
        _check_written_out(rehearsed, _SHARED * len(data) + (1 << 16))
        return _Unpickler(data, table, stubs, persistent).load()
    except Refused:
        raise
    except Exception as problem:  # a damaged pickle can fail in any way
        raise Refused(f"it is not a readable pickle ({type(problem).__name__}: {problem})") from None


class _Rough(list[Any]):
    """Stands for every instance and every result, in the rehearsal: what it was given."""

    __setstate__ = list.append

    def __new__(cls, *args: Any) -> _Rough:
        self = list.__new__(cls)
        list.extend(self, args)
        return self

    def __init__(self, *args: Any) -> None:
        pass


class _Rehearsal(_Unpickler):
    """Loads what is `without_hashes`, in lists and tuples alone."""

    def find_class(self, module: str, name: str) -> Any:
        super().find_class(module, name)
        return _Rough

    def persistent_load(self, pid: Any) -> Any:
        return [pid]


def _check_written_out(root: Any, most: int) -> None:
    """Refuse what is more than `most` objects when those that are shared count each time, or very deep.

    200 bytes can describe a tuple of two tuples of two tuples …, 30 deep: the text or the hash of such an
    object takes as long as if it were that large. An object that contains itself is endless. The hash of a
    tuple within a tuple within a tuple … overflows the stack of the process.
    """
    level, depth = [root], 0
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, (list, tuple)):
                below.extend(one)
                if len(below) > most:
                    raise Refused("it repeats an object inside of itself again and again")
        level, depth, most = below, depth + 1, most - len(below)
        if depth > _DEEPEST:
            raise Refused(f"it has objects more than {_DEEPEST} deep inside of each other")
