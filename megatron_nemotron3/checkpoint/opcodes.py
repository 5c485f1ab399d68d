"""The operations of a pickle: which are allowed, and what it describes without dicts and sets.

Nothing of a pickle is run here. Long runs of operations are matched by regular expressions, since the index
of a large checkpoint has millions.
"""

from __future__ import annotations

import pickle
import re

#: Opcodes of plain data, lists, dicts, tuples and instances, by the bytes that follow them. Left out are
#: bytearrays and buffers, the copyreg registry, numbers as text, and what drops an object from the stack.
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
#: Opcodes with a length before their bytes: how wide the length is.
_SIZED = {
    **{pickle.LONG1: 1, pickle.SHORT_BINBYTES: 1},
    **{pickle.BINUNICODE: 4, pickle.BINBYTES: 4, pickle.BINUNICODE8: 8, pickle.BINBYTES8: 8},
}
_SHORT_STRINGS = b"|".join(re.escape(pickle.SHORT_BINUNICODE + bytes([n])) + b".{%d}" % n for n in range(256))
#: An opcode that makes or fills a dict or a set -> the same with a list or a tuple.
_LIKE = {
    **{pickle.EMPTY_DICT: pickle.EMPTY_LIST, pickle.EMPTY_SET: pickle.EMPTY_LIST},
    **{pickle.SETITEMS: pickle.APPENDS, pickle.ADDITEMS: pickle.APPENDS, pickle.FROZENSET: pickle.TUPLE},
    pickle.SETITEM: pickle.TUPLE2 + pickle.APPEND,
    pickle.FRAME: b"",  # its length is no longer right then, and is not needed
}


class Refused(ValueError):
    """The pickle names something that the table does not list, or is no pickle of plain data."""


def _runs(but: bytes = b"") -> re.Pattern[bytes]:
    """Up to 4096 opcodes whose length is known; bounded, since the engine remembers every repetition."""
    codes = {n: b"".join(code for code in some if code not in but) for n, some in _FIXED.items()}
    fixed = b"|".join(b"[%s].{%d}" % (re.escape(some), n) for n, some in codes.items())
    return re.compile(b"(?:%s|c[^\n]*\n[^\n]*\n|%s){1,4096}" % (fixed, _SHORT_STRINGS), re.DOTALL)


_PLAIN = _runs(b"".join(_LIKE))


def without_hashes(data: bytes) -> bytes:
    """A pickle of a tuple of everything that the given one describes, in lists and tuples alone.

    The hash of a tuple that holds another one twice, 30 deep, takes 2^30 steps in which nothing can
    interrupt it, so it must be known that there is none before the first dict is made.

    Refuses opcodes outside the list before any of them is run. Python's unpickler makes a table as long as
    the largest index it is told to store under: one flipped bit can ask for 64 GB. So an index must be
    smaller than the pickle.

    Raises:
        Refused: there is another opcode, or the pickle is cut.
    """
    parts = [pickle.MARK]
    begin = at = 0
    while True:
        if (known := _PLAIN.match(data, at)) is not None:
            at = known.end()
        code = data[at : at + 1]
        if code in _LIKE:
            parts += (data[begin:at], _LIKE[code])
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
