"""Write and read documents as Megatron's .bin and .idx, and split them as its --split does.

The format is that of `megatron.core.datasets.indexed_dataset`, whose import takes seconds:

    .bin   token ids of all documents, one after the other
    .idx   magic, version (u64), code of the ids' type (u8), sequences (u64), documents + 1 (u64),
           length of each sequence (i32), its byte offset in the .bin (i64), documents' first sequences (i64)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron_nemotron3.common.files import atomic_group
from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.launch import data_sets
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo

if TYPE_CHECKING:
    import numpy as np

#: Of the format's types, those that ids are written in: name in numpy -> code.
_CODES = {"uint16": 8, "int32": 4}
#: Vocabularies below it fit Megatron's smaller type.
_SMALL = 65_500
#: Documents encoded at once: enough for every core, few enough for memory.
_BATCH = 128


@dataclass(frozen=True)
class DatasetInfo:
    """The data set in `prefix`.bin and `prefix`.idx."""

    prefix: str
    documents: int
    #: End-of-document tokens included.
    tokens: int
    #: numpy's name of the type on disk.
    dtype: str


def write_dataset(
    docs: Iterable[str], tokenizer: TokenizerInfo, prefix: str | os.PathLike[str]
) -> DatasetInfo:
    """Write `docs` to `prefix`.bin and `prefix`.idx: one sequence per document, each ended by `eod`.

    Tokens are uint16 where the vocabulary allows (< 65500, as in Megatron), else int32. Documents without a
    token are left out. Both files appear whole or not at all, the .idx last.

    Raises ValueError if no document is left or a token is outside the vocabulary, OSError if the disk is full
    (an older data set under `prefix` stays).
    """
    prefix = os.path.abspath(prefix)
    dtype = "uint16" if tokenizer.vocab_size < _SMALL else "int32"
    lengths: list[int] = []
    tokens = 0
    files = atomic_group(Path(prefix + ".bin"), Path(prefix + ".idx"))
    total = len(docs) if isinstance(docs, Sized) else None
    with files as (bin_path, idx_path), Bar("encode text", "documents", total) as bar:
        with bin_path.open("wb") as stream:
            for ids in _encoded(docs, tokenizer):
                # numpy would silently wrap an id that does not fit.
                if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                    raise ValueError(
                        f"document {len(lengths)} has a token outside 0 .. {tokenizer.vocab_size - 1} "
                        f"(smallest {min(ids)}, largest {max(ids)}): the tokenizer's vocab_size is wrong"
                    )
                _append(stream, ids, dtype)
                lengths.append(len(ids))
                tokens += len(ids)
                bar.to(len(lengths), note=f"{tokens / bar.seconds:,.0f} tokens/s")
        if not lengths:
            raise ValueError(f"no document with a token for {prefix}: collect some text first")
        _write_index(idx_path, lengths, dtype)
    return DatasetInfo(prefix, len(lengths), tokens, dtype)


def _append(stream: BinaryIO, ids: list[int], dtype: str) -> None:
    import numpy as np

    stream.write(np.array(ids, dtype=dtype).tobytes())


def _write_index(path: Path, lengths: list[int], dtype: str) -> None:
    import numpy as np

    count, size = len(lengths), np.dtype(dtype).itemsize
    offsets = np.cumsum([0, *lengths[:-1]], dtype=np.int64) * size
    with path.open("wb") as stream:
        head = data_sets.MAGIC, data_sets.VERSION, _CODES[dtype], count, count + 1
        stream.write(data_sets.HEAD.pack(*head))
        stream.write(np.array(lengths, dtype=np.int32).tobytes())
        stream.write(offsets.tobytes())
        stream.write(np.arange(count + 1, dtype=np.int64).tobytes())


def read_documents(prefix: str | os.PathLike[str]) -> list[np.ndarray]:
    """Ids of each document of a data set with one sequence per document, as `write_dataset` writes it."""
    import numpy as np

    lengths, dtype = _read_index(os.fspath(prefix))
    ids = np.fromfile(os.fspath(prefix) + ".bin", dtype=dtype)
    return np.split(ids, np.cumsum(lengths)[:-1])


def _read_index(prefix: str, most: int | None = None) -> tuple[np.ndarray, str]:
    """Lengths of the documents, or of the first `most`, and numpy's name of the type of the ids."""
    import numpy as np

    index, names = data_sets.Index(prefix), {code: name for name, code in _CODES.items()}
    if index.code not in names or index.documents != index.sequences + 1:
        raise ValueError(f"{index.path} is not the index of a data set with one sequence per document")
    count = index.sequences if most is None else min(most, index.sequences)
    return np.fromfile(index.path, np.int32, count, offset=data_sets.HEAD.size), names[index.code]


#: Documents and tokens that `require_ended` looks at.
_LOOKED_AT, _TOKENS_LOOKED_AT = 256, 1 << 20


def require_ended(prefix: str) -> str:
    """Look whether documents end with the same token, as `preprocess_data.py --append-eod` makes them.

    Returns:
        A warning if that token also stands inside of documents, else "".

    Raises:
        ValueError: the first documents end with different tokens.
    """
    import numpy as np

    lengths, dtype = _read_index(prefix, _LOOKED_AT)
    ids = np.memmap(prefix + ".bin", dtype=dtype, mode="r")
    borders = np.cumsum(lengths, dtype=np.int64)
    if len(lengths) == 0 or lengths.min() < 0 or borders[-1] > len(ids):
        raise ValueError(f"{prefix}.idx does not describe {prefix}.bin: prepare them again")
    ends = ids[borders[lengths > 0] - 1]
    if (different := len(set(ends.tolist()))) > 1:
        raise ValueError(
            f"{prefix}: its first {len(ends)} documents end with {different} different tokens, so nothing "
            "marks where the loss must stop: prepare them with --append-eod"
        )
    inside = int((ids[: min(int(borders[-1]), _TOKENS_LOOKED_AT)] == ends[0]).sum()) if len(ends) > 1 else 0
    whole = int((borders <= _TOKENS_LOOKED_AT).sum())
    if inside <= whole:
        return ""
    return (
        f"{prefix}: its first {whole} documents hold their last token, {ends[0]}, {inside} times: what is "
        "joined in one document is not isolated: write a document on each line"
    )


def _encoded(docs: Iterable[str], tokenizer: TokenizerInfo) -> Iterator[list[int]]:
    left = iter(docs)
    while batch := tuple(islice(left, _BATCH)):
        for ids in tokenizer.encode(batch):
            if ids:
                yield [*ids, tokenizer.eod]


#: Tried in this order by `default_split`.
SPLITS = ("98,2,0", "95,5,0", "90,10,0", "80,20,0", "50,50,0")

# The validation split of a default --split holds at least this share of the text.
_ENOUGH = 0.01
# It has so many documents, unless they are over a tenth of all: the loss on a few is that of their subject.
_MANY, _TENTH = 20, "90,10,0"


def split_documents(split: str, documents: int) -> list[range | None]:
    """Documents of (training, validation, test) under `--split split`; None where its weight is 0.

    GPTDataset cuts by document, not by token, in file order: split i is [round(a_i n), round(a_(i+1) n))
    of the n documents, a_i the running sum of the normalized weights (Megatron's
    BlendedMegatronDatasetBuilder._build_megatron_dataset_splits).

    Raises ValueError if a split with a weight gets no document: Megatron would then loop forever over epochs
    of 0 tokens.
    """
    ranges: list[range | None] = []
    for name, bounds in zip(data_sets.SPLITS, data_sets.split_bounds(split), strict=True):
        part = data_sets.cut(bounds, documents)
        if part is not None and not part:
            raise ValueError(
                f"--split {split} gives {name} none of the {documents} documents, and Megatron would hang: "
                "use more documents or a larger share"
            )
        ranges.append(part)
    return ranges


def default_split(lengths: Sequence[int]) -> str:
    """Return the first of SPLITS that holds out at least 1% of the text; `lengths` of documents, in any unit.

    One with 20 documents is preferred, if they are at most a tenth of all. Without 1%, the first that holds
    out any document. Raises ValueError if there is none.
    """
    possible, enough, many = [], [], []
    for split in SPLITS:
        try:
            _, held_out, _ = split_documents(split, len(lengths))
        except ValueError:
            continue
        assert held_out is not None
        possible.append(split)
        if sum(lengths[i] for i in held_out) >= _ENOUGH * sum(lengths):
            enough.append(split)
            if len(held_out) >= _MANY and SPLITS.index(split) <= SPLITS.index(_TENTH):
                many.append(split)
    if best := many or enough or possible:
        return best[0]
    raise ValueError(
        f"{len(lengths)} document(s) cannot be split into training and validation: collect at least 2 "
        "(a single text file is cut into documents of about 8 kB)"
    )
