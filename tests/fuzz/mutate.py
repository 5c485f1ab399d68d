"""Mutations of valid files: bytes, JSON, pickles, and the archives around them."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]

#: Numbers where something may turn over.
EXTREMES = (0, 1, 2, 7, 8, 64, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1)
EXTREMES += (2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400)
#: What JSON has, and what Python's reader takes for it.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.0, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), *EXTREMES,
    "", "\0", "..", "../x", "/etc/passwd", "\ud800", "x" * 5000, "M*E-", [], {}, [[]], {"": None}, [0] * 70,
)  # fmt: skip


def flip(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Some bits."""
    result = bytearray(data)
    for _ in range(pick.choice((1, 1, 2, 8))):
        result[pick.randrange(len(result))] ^= 1 << pick.randrange(8)
    return bytes(result)


def overwrite(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Some bytes at one place, most often a number."""
    number = pick.choice(EXTREMES[:-3] + (len(data), len(data) - 1, len(data) + 1))
    width = pick.choice((1, 2, 4, 8))
    new = (number % 256**width).to_bytes(width, pick.choice(("little", "little", "big")))
    at = pick.randrange(len(data))
    return data[:at] + new + data[at + width :]


def truncate(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The beginning alone, or the end."""
    at = pick.randrange(len(data))
    return data[:at] if pick.random() < 0.8 else data[at:]


def extend(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Something behind."""
    return data + pick.choice((b"\0", bytes(8), data[: pick.randrange(len(data))], b"}" * 9, bytes(5000)))


def splice(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A piece of another file, or of this one, in place of a piece."""
    other = pick.choice((data, *others))
    length = min(len(other), pick.choice((1, 4, 16, 64, 1000)))
    begin, at = pick.randrange(len(other) - length + 1), pick.randrange(len(data))
    cut = pick.choice((0, length))
    return data[:at] + other[begin : begin + length] + data[at + cut :]


def digits(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Another number in place of one that is written in digits."""
    found = list(re.finditer(rb"\d+", data[: 1 << 20]))
    if not found:
        return flip(pick, data, others)
    one = pick.choice(found)
    new = pick.choice(
        (*map(str, EXTREMES), "-1", "1e9", "0.5", "1e999", str(int(one[0][:20]) + pick.choice((-1, 1))))
    )
    return data[: one.start()] + new.encode() + data[one.end() :]


BYTES: tuple[Change, ...] = (flip, flip, overwrite, overwrite, truncate, extend, splice, digits)


# -- JSON --------------------------------------------------------------------------------------------------


def json_value(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One value of a JSON text another one, gone, twice, or elsewhere."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return flip(pick, data, others)
    for _ in range(pick.choice((1, 1, 2, 3))):
        root = _change(pick, root)
    text = json.dumps(root)
    if pick.random() < 0.05:  # a key twice
        text = re.sub(r"\{(\"[^\"]*\": [^,{}\[\]]*),", r"{\1, \1,", text, count=1)
    if pick.random() < 0.05:
        text = "[" * 5000 + text + "]" * 5000
    return text.encode("utf-8", "surrogatepass")


def _change(pick: random.Random, root: Any) -> Any:
    places = [(owner, key) for owner, key in _places(root)]
    if not places:
        return copy.deepcopy(pick.choice(VALUES))
    owner, key = pick.choice(places)
    kind, old = pick.randrange(10), owner[key]
    if kind < 4:
        owner[key] = copy.deepcopy(pick.choice(VALUES))
    elif kind < 6 and isinstance(old, (int, float)) and not isinstance(old, bool):
        owner[key] = pick.choice(
            (old + 1, old - 1, -old, float(str(old)), str(old), [old], old * 2, old // 2)
        )
    elif kind == 6:
        del owner[key]
    elif kind == 7 and isinstance(owner, dict):
        owner[pick.choice(("", "..", "x", "__metadata__", key + " ", key * 2))] = owner.pop(key)
    elif kind == 8:
        other, place = pick.choice(places)
        owner[key], other[place] = other[place], old
        if _loops(root):
            owner[key], other[place] = None, None
    else:
        owner[key] = [old] if pick.random() < 0.5 else {"x": old}
    return root


def _places(root: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    todo = [root]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        todo += [one[key] for key in keys if isinstance(one[key], (dict, list))]
    return found


def _loops(root: Any) -> bool:
    try:
        json.dumps(root)
    except (ValueError, RecursionError):
        return True
    return False


def safetensors_header(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The JSON of a safetensors file changed, its length put right."""
    if len(data) < 10:
        return flip(pick, data, others)
    (length,) = struct.unpack("<Q", data[:8])
    length = min(length, len(data) - 8)
    change = pick.choice((json_value, json_value, json_value, digits, flip, splice))
    header = change(pick, data[8 : 8 + length] or b"{}", others)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


# -- pickles -----------------------------------------------------------------------------------------------

#: A tuple of tuples of tuples …: 200 bytes whose text would have 2^30.
BOMB = b"()q\x05" + b"h\x05h\x05\x86q\x05" * 30 + b"t"
_OPCODES = (
    b"0", b"1", b"2", b"(", b"t", b"]", b"}", b")", b"N", b"\x88", b"\x8f", b"\x91", b"\x90", b"a", b"e",
    b"s", b"u", b"b", b"R", b"\x81", b"\x92", b"\x93", b"\x94", b"\x85", b"\x86", b"\x87", b"Q", b"h\x00",
    b"h\x01", b"K\xff", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\0",
    b"\x8a\xff" + b"\x7f" * 255, b"G\x7f\xf0" + bytes(6), b"G\x7f\xf8" + bytes(6), b"X\x02\0\0\0..",
    b"X\x05\0\0\0\xed\xa0\x80ab", b"\x8c\x00", b"I99\n", b"S'x'\n", b".", BOMB, BOMB,
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"cbuiltins\ngetattr\n", b"ctorch\nfloat32\n", b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n", b"cargparse\nNamespace\n", b"cmegatron.core.x\nY\n",
    b"r\xff\xff\xff\x7f", b"q\xff", b"j\0\0\0\0", b"\x96" + b"\xff" * 8, b"B\xff\xff\xff\xff",
)  # fmt: skip


def opcodes(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Operations of a pickle left out, put in, doubled or exchanged."""
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return flip(pick, data, others)
    ends = [*starts[1:], len(data)]
    parts = [data[a:b] for a, b in zip(starts, ends, strict=True)]
    for _ in range(pick.choice((1, 1, 2, 4))):
        at, kind = pick.randrange(len(parts)), pick.randrange(6)
        if kind < 2:
            parts[at : at + (kind == 1)] = [pick.choice(_OPCODES)]
        elif kind == 2 and len(parts) > 1:
            del parts[at]
        elif kind == 3:
            parts.insert(at, parts[at])
        elif kind == 4:
            other = pick.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        else:
            numbers = [i for i, part in enumerate(parts) if part[:1] in b"KMJ\x8a"]
            if numbers:
                parts[pick.choice(numbers)] = _number(pick.choice(EXTREMES[:-1] + (-1, 3, 5)))
    return b"".join(parts)


def _number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def archive(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The pickle of a torch.save file changed, and the archive written anew with the right checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            records = {name: found.read(name) for name in found.namelist()}
    except Exception:  # zipfile fails in many ways
        return flip(pick, data, others)
    for name, content in records.items():
        if name.endswith("data.pkl"):
            records[name] = pick.choice((opcodes, opcodes, opcodes, flip, splice, overwrite))(
                pick, content, others
            )
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as new:
        for name, content in records.items():
            new.writestr(zipfile.ZipInfo(name), content)
    return output.getvalue()


def inner_pickle(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Bytes of a pickle inside an archive inside a file, of the same length; the checksums are taken away."""
    begins = [m.end() for m in re.finditer(rb"data\.pkl", data)]
    if not begins:
        return flip(pick, data, others)
    begin = pick.choice(begins)
    end = min(len(data), begin + 300)
    change = pick.choice((flip, flip, overwrite))
    inside = change(pick, data[begin:end], others)
    result = bytearray(data[:begin] + inside[: end - begin].ljust(end - begin, b"\0") + data[end:])
    for found in re.finditer(rb"PK\x01\x02", data):
        result[found.start() + 16 : found.start() + 20] = bytes(4)
    return bytes(result)


def directory(pick: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A field of the headers of a zip archive."""
    found = [m.start() for m in re.finditer(rb"PK(?:\x01\x02|\x03\x04|\x05\x06|\x06\x06|\x06\x07)", data)]
    if not found:
        return flip(pick, data, others)
    at, width = pick.choice(found) + pick.randrange(4, 56), pick.choice((2, 4, 8))
    number = pick.choice((*EXTREMES[:-3], len(data), pick.randrange(len(data))))
    return data[:at] + (number % 256**width).to_bytes(width, "little") + data[at + width :]


#: Changes by the ending of a file's name.
BY_ENDING: dict[str, tuple[Change, ...]] = {
    ".json": (json_value, json_value, json_value, *BYTES),
    ".jsonl": BYTES,
    ".safetensors": (safetensors_header, safetensors_header, safetensors_header, *BYTES),
    ".metadata": (opcodes, opcodes, opcodes, *BYTES),
    ".pt": (archive, archive, archive, directory, *BYTES),
    ".distcp": (inner_pickle, inner_pickle, directory, directory, *BYTES),
}


def change(pick: random.Random, name: str, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate a file once or twice, in ways that depend on its type."""
    changes = next((c for ending, c in BY_ENDING.items() if name.endswith(ending)), BYTES)
    for _ in range(pick.choice((1, 1, 1, 2))):
        data = pick.choice(changes)(pick, data, others) if data else bytes(pick.randrange(9))
    return data
