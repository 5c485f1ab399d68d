"""Write documents as Megatron's .bin and .idx, with Megatron's own IndexedDatasetBuilder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

from megatron_nemotron3.bars import Bar
from megatron_nemotron3.checkpoint.files import atomic_group
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo

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

    Tokens are uint16 where the vocabulary allows (< 65500, Megatron's DType.optimal_dtype), else int32.
    Both files are built under other names in the same folder and then renamed, the .idx last. Documents
    without a token are left out.

    Raises ValueError if no document is left or a token is outside the vocabulary, OSError if the disk is
    full (no incomplete file is left, and an older data set under `prefix` stays).
    """
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = os.path.abspath(prefix)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    documents = tokens = 0
    files = atomic_group(Path(prefix + ".bin"), Path(prefix + ".idx"))
    total = len(docs) if isinstance(docs, Sized) else None
    with files as (bin_path, idx_path), Bar("encode text", "documents", total, lines=False) as bar:
        builder = IndexedDatasetBuilder(str(bin_path), dtype=dtype)
        try:
            for ids in _encoded(docs, tokenizer):
                # numpy would silently wrap an id that does not fit.
                if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                    raise ValueError(
                        f"document {documents} has a token outside 0 .. {tokenizer.vocab_size - 1} "
                        f"(smallest {min(ids)}, largest {max(ids)}): the tokenizer's vocab_size is wrong"
                    )
                builder.add_document(np.array(ids, dtype=dtype), [len(ids)])
                documents += 1
                tokens += len(ids)
                bar.to(documents, note=f"{tokens / bar.seconds:,.0f} tokens/s")
            if not documents:
                raise ValueError(f"no document with a token for {prefix}: collect some text first")
            builder.finalize(str(idx_path))
        finally:
            # Closing flushes the buffer, which fails again on a full disk.
            with contextlib.suppress(OSError):
                builder.data_file.close()
    return DatasetInfo(prefix, documents, tokens, np.dtype(dtype).name)


def _encoded(docs: Iterable[str], tokenizer: TokenizerInfo) -> Iterator[list[int]]:
    for batch in batched(docs, _BATCH):
        for ids in tokenizer.encode(batch):
            if ids:
                yield [*ids, tokenizer.eod]
