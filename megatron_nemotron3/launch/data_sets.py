"""The data sets that a Megatron command line names, and the part of each that every split reads.

Words are paired with weights as `megatron.core.datasets.utils.get_blend_from_list` pairs them, and a split is
cut as `BlendedMegatronDatasetBuilder` cuts it. Of an .idx only a few numbers are read, whatever its length.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from megatron_nemotron3.common.files import Unreadable, open_outside, read_outside

SPLITS = ("training", "validation", "test")
#: Megatron's options for a data set of each split's own.
PER_SPLIT = ("--train-data-path", "--valid-data-path", "--test-data-path")
_FILE, _PER_SPLIT_FILE = "--data-args-path", "--per-split-data-args-path"
#: Where data can come from; Megatron takes one of these, and ignores another one in some combinations.
_SOURCES = (("--data-path",), (_FILE,), PER_SPLIT, (_PER_SPLIT_FILE,), ("--mock-data",))
#: All options of which `blends` reads the values.
NAMES = ("--split", *itertools.chain.from_iterable(_SOURCES))
#: --split where only --data-path is given (megatron/training/arguments.py).
_DEFAULT_SPLIT = "969, 30, 1"
#: Bytes of a file that lists data sets.
_LIMIT = 64 << 20

#: First and last share of a data set that a split reads; None: nothing.
Bounds = tuple[float, float] | None
Options = Mapping[str, tuple[str, ...]]

#: Beginning of an .idx: magic, version, code of the ids' type, sequences, documents + 1.
HEAD = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\0\0", 1
#: Bytes of a token id, by the type's code.
_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
#: Lengths of sequences that are read at once.
_BLOCK = 1 << 14
#: Bytes of the largest file whose conversations are counted.
_COUNTED = 1 << 30
#: A file's content is compared whole up to their product, else at so many places of so many bytes.
_PLACES, _READ = 64, 1 << 16


@dataclass(frozen=True)
class Blend:
    """Data sets that are mixed."""

    #: The option that names them.
    option: str
    #: Of .bin and .idx, or files of conversations.
    prefixes: tuple[str, ...]
    #: None: in proportion to their samples, each of which is read once.
    weights: tuple[float, ...] | None
    #: What each of `SPLITS` reads of every data set.
    bounds: tuple[Bounds, ...]
    #: --split, or "" for a blend of one split's own.
    split: str = ""


def blends(options: Options) -> list[Blend]:
    """Return what a command line reads its data from; [] without data, or with random ones.

    Raises:
        ValueError: Megatron would refuse the words, or ignore some of them.
        OSError: a file of words cannot be read.
    """
    given = [[name for name in names if name in options] for names in _SOURCES]
    sources = [names for names in given if names]
    if len(sources) > 1:
        raise ValueError(f"{sources[0][0]} and {sources[1][0]} both say what to train on: give one")
    if not sources or sources == [["--mock-data"]]:
        return []
    (names,) = sources
    if names[0] in (_FILE, _PER_SPLIT_FILE) and "://" in "".join(options[names[0]]):
        return []  # Megatron reads it from an object store
    split = (options.get("--split") or (None,))[0]
    if names[0] in ("--data-path", _FILE):
        words: Sequence[object] = options[names[0]]
        if names[0] == _FILE:
            words = _text_of(options, _FILE).split()
            if split is None:
                raise ValueError(f"{_FILE} needs --split, for example 98,2,0")
        split = split or _DEFAULT_SPLIT
        return [blend_of(names[0], words, split_bounds(split), split)]
    if split is not None:
        raise ValueError(f"--split {split} and {names[0]}: each split has data sets of its own: drop --split")
    of_splits = _per_split_file(options) if names == [_PER_SPLIT_FILE] else map(options.get, PER_SPLIT)
    found = []
    for number, words_of_split in enumerate(of_splits):
        if words_of_split is not None:
            bounds: list[Bounds] = [None, None, None]
            bounds[number] = (0.0, 1.0)
            own = names == [_PER_SPLIT_FILE]
            option = f"{_PER_SPLIT_FILE}, {_KEYS[number]}" if own else PER_SPLIT[number]
            found.append(blend_of(option, words_of_split, bounds))
    return found


_KEYS = ("train", "valid", "test")


def _per_split_file(options: Options) -> list[Sequence[object] | None]:
    """The words of each split; None where the file has none for it."""
    text, given = _text_of(options, _PER_SPLIT_FILE), f"{_PER_SPLIT_FILE} {options[_PER_SPLIT_FILE][0]}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{given}: not JSON: {problem}") from None
    found: list[Sequence[object] | None] = []
    for key in _KEYS:
        words = content.get(key, "") if isinstance(content, dict) else ""
        if isinstance(words, str) and key in content:
            words = words.split()
        if words is not None and not isinstance(words, list):
            raise ValueError(
                f"{given}: give an object with train, valid and test, each a list, a text or null"
            )
        found.append(words)
    return found


def _text_of(options: Options, option: str) -> str:
    path = (options[option] or ("",))[0]
    return read_outside(path, limit=_LIMIT).decode("utf-8", "replace")


def blend_of(option: str, given: Sequence[object], bounds: Sequence[Bounds] = (), split: str = "") -> Blend:
    """Pair the words of an option; raise ValueError at weights that Megatron would stumble on."""
    words = [str(word).strip() for word in given]
    if not words:
        raise ValueError(f"{option} names no data set: give the path of a .bin and .idx without its ending")
    numbers = [_number(word) for word in words]
    if len(words) % 2 or not any(number is not None for number in numbers[::2]):
        for word, number in zip(words, numbers, strict=True):
            if number is not None and not _exists(word):
                raise ValueError(f"{option}: {word} is no data set, and not the weight of one: {_PAIRS}")
        return Blend(option, tuple(words), None, tuple(bounds), split)
    weights = []
    for word, number, prefix in zip(words[::2], numbers[::2], words[1::2], strict=True):
        if number is None:
            raise ValueError(f"{option}: {word} stands where a weight is expected: {_PAIRS}")
        if _exists(word):
            raise ValueError(
                f"{option}: Megatron reads {word} as the weight of {prefix}, and it is a data set, too: "
                f"write ./{word} for the data set"
            )
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{option}: weight {word} of {prefix}: give a finite number above 0")
        weights.append(number)
    return Blend(option, tuple(words[1::2]), tuple(weights), tuple(bounds), split)


_PAIRS = "give every data set a weight before it, or none"


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _exists(prefix: str) -> bool:
    return os.path.isfile(prefix + ".idx")


def split_bounds(split: str) -> list[Bounds]:
    """Shares at which each split begins and ends, as Megatron reads them; None for weight 0."""
    try:
        weights = [float(weight) for weight in re.findall(r"[.0-9]+", split)]
    except ValueError:
        weights = []
    # Megatron skips what is no digit and no point: it reads 1e2,1 as 1, 2 and 1.
    plain = re.search(r"[A-Za-z_+-]", split) is None
    if not (plain and 0 < len(weights) <= len(SPLITS) and 0 < sum(weights) < math.inf):
        raise ValueError(f"--split {split}: give up to three weights, for example 98,2,0")
    weights += [0.0] * (len(SPLITS) - len(weights))
    total = 0.0
    for weight in weights:  # not by sum, which rounds less than Megatron's numpy
        total += weight
    ends = list(itertools.accumulate((weight / total for weight in weights), initial=0.0))
    return [(start, end) if end > start else None for start, end in itertools.pairwise(ends)]


def cut(bounds: Bounds, documents: int) -> range | None:
    """The documents that a split reads: by document, not by token, in the order of the file."""
    return None if bounds is None else range(*(round(bound * documents) for bound in bounds))


@dataclass(frozen=True)
class SplitPart:
    """What a split reads of a data set."""

    prefix: str
    #: Of the split, and of the whole data set.
    documents: int
    of: int
    #: As many as were counted. None: of conversations, each row of which is a sample.
    tokens: int | None

    def samples(self, length: int) -> int:
        """Samples of `length` tokens and a label behind them."""
        return self.documents if self.tokens is None else max(0, self.tokens - 1) // length


class Index:
    """The .idx of a data set, and the length of its .bin.

    Raises:
        ValueError: it is no index, or describes more than the files hold.
    """

    def __init__(self, prefix: str) -> None:
        self.path = prefix + ".idx"
        with open_outside(self.path) as file:
            head = file.read(HEAD.size)
            magic, version, self.code, self.sequences, self.documents = (
                HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0, 0, 0)
            )
            if magic != MAGIC or version != VERSION or self.code not in _WIDTHS:
                raise ValueError(f"{self.path} is not the index of a Megatron data set")
            need, have = HEAD.size + 12 * self.sequences + 8 * self.documents, os.fstat(file.fileno()).st_size
            if need > have:
                raise Unreadable(
                    self.path,
                    f"it is cut: {self.sequences:,} sequences take {need:,} bytes, and it has {have:,}",
                )
            end = self._end(file)
        if end > (have := os.stat(prefix + ".bin").st_size):
            raise Unreadable(
                prefix + ".bin", f"it is cut: its index describes {end:,} bytes, and it has {have:,}"
            )

    def tokens(self, part: range, enough: int) -> int:
        """Tokens of a range of sequences; they are counted until there are `enough`."""
        counted = 0
        with open_outside(self.path) as file:
            for first in range(part.start, part.stop, _BLOCK):
                lengths = self._lengths(file, first, min(_BLOCK, part.stop - first))
                tokens = sum(lengths)
                if min(lengths) < 0 or len(lengths) == _BLOCK and not tokens:
                    last = first + len(lengths) - 1
                    raise Unreadable(self.path, f"it is no index: sequences {first} to {last} have no tokens")
                counted += tokens
                if counted >= enough:
                    break
        return counted

    def _lengths(self, file: BinaryIO, first: int, count: int) -> array[int]:
        file.seek(HEAD.size + 4 * first)
        return array("i", file.read(4 * count))

    def _end(self, file: BinaryIO) -> int:
        """Bytes of the .bin up to the end of the last sequence."""
        if not self.sequences:
            return 0
        last = self.sequences - 1
        (tokens,) = self._lengths(file, last, 1)
        file.seek(HEAD.size + 4 * self.sequences + 8 * last)
        (offset,) = struct.unpack("<q", file.read(8))
        return int(offset) + tokens * _WIDTHS[self.code]


def parts_of(prefix: str, bounds: Sequence[Bounds], enough: Sequence[int]) -> list[SplitPart | None]:
    """What each split reads of a data set; tokens are counted until there are `enough` for it.

    Raises:
        ValueError: as `Index`.
    """
    index = Index(prefix)
    found: list[SplitPart | None] = []
    for bound, tokens in zip(bounds, enough, strict=True):
        part = cut(bound, index.sequences)
        counted = None if part is None else index.tokens(part, tokens)
        found.append(None if part is None else SplitPart(prefix, len(part), index.sequences, counted))
    return found


def digest_of(path: str) -> str:
    """A digest of a file's length and content; of a large one's content at `_PLACES` places and both ends."""
    with open_outside(path) as file:
        size = os.fstat(file.fileno()).st_size
        whole = size <= _PLACES * _READ
        step, length = (0, size) if whole else ((size - _READ) / (_PLACES - 1), _READ)
        digest = hashlib.sha256(str(size).encode())
        for number in range(1 if whole else _PLACES):
            file.seek(round(number * step))
            digest.update(file.read(length))
    return digest.hexdigest()


def conversations_in(path: str) -> int | None:
    """Lines of a file of conversations; None if it is not JSON in lines, or too long to be counted."""
    lines, counted = 0, False
    with open_outside(path) as file:
        if os.fstat(file.fileno()).st_size > _COUNTED:
            return None
        while piece := file.readline(1 << 20):
            if piece.strip() and not counted:
                if not lines and not piece.lstrip().startswith(b"{"):
                    return None
                lines, counted = lines + 1, True
            if piece.endswith(b"\n"):
                counted = False
    return lines
