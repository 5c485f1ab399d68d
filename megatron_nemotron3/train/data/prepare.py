"""Build tokenizer and data set from text, once per input, and the flags that name them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.train.data.indexed import (
    DatasetInfo,
    default_split,
    read_documents,
    split_documents,
    write_dataset,
)
from megatron_nemotron3.train.data.text import Texts, read_texts
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo, train_tokenizer

#: Version of what this module writes; folders of an older version are not reused.
FORMAT = 1
MAX_BYTES = 6_000_000
VOCAB_SIZE = 2048

# Names in the folder of one input.
_PREFIX = "corpus"
_TOKENIZER = "tokenizer"
_CACHE = "cache"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PreparedData:
    """A data set and its tokenizer on disk, and the Megatron flags for them."""

    #: Holds everything below: PREFIX.bin, PREFIX.idx, tokenizer/, cache/, manifest.json.
    folder: str
    split: str
    tokenizer: TokenizerInfo
    dataset: DatasetInfo
    texts: Texts
    #: Whether an earlier call had already written it.
    reused: bool

    @property
    def prefix(self) -> str:
        """--data-path"""
        return self.dataset.prefix

    @property
    def data_cache_path(self) -> str:
        """--data-cache-path: where GPTDataset keeps its sample indices."""
        return os.path.join(self.folder, _CACHE)

    @property
    def flags(self) -> list[str]:
        """Megatron's flags of the data set and of the tokenizer."""
        data = ["--data-path", self.prefix, "--split", self.split, "--data-cache-path", self.data_cache_path]
        return data + self.tokenizer.flags


def prepare(
    path: str | os.PathLike[str] | None,
    folder: str | os.PathLike[str],
    vocab_size: int = VOCAB_SIZE,
    max_bytes: int | None = MAX_BYTES,
    *,
    split: str | None = None,
) -> PreparedData:
    """Turn the text at `path` (None: Python's own sources, see read_texts) into data for stock Megatron.

    Writes FOLDER/<digest of the documents and settings>/ and returns the flags that name it. The same input
    reuses its folder; other input gets another folder, because Megatron names the sample indices that it
    caches by the path of a data set, not by its content.

    vocab_size: of the tokenizer. split: --split; None: `default_split`.

    The documents must fit in memory. Call it in one process, not on every rank.

    Raises the errors of read_texts, train_tokenizer, write_dataset and split_documents.
    """
    texts = read_texts(path, max_bytes=max_bytes)
    digest = _digest(texts.documents, vocab_size)
    root = Path(folder).absolute() / digest[:16]
    manifest = _read_manifest(root, digest)
    reused = manifest is not None
    if split is not None:
        split_documents(split, len(texts.documents))  # refuses a bad split before the work begins
    if manifest is None:
        manifest = _build(root, digest, texts.documents, vocab_size)
    _remove_cut_indices(root / _CACHE)
    held = replace(TokenizerInfo(**manifest["tokenizer"]), tokenizer_model=str(root / _TOKENIZER))
    return PreparedData(
        folder=str(root),
        split=split or manifest["split"],
        tokenizer=held,
        dataset=replace(DatasetInfo(**manifest["dataset"]), prefix=str(root / _PREFIX)),
        texts=texts,
        reused=reused,
    )


def _build(root: Path, digest: str, documents: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """Write everything below `root`, the manifest last; return the manifest."""
    split = default_split([len(document) for document in documents])
    (root / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(root / _CACHE, ignore_errors=True)  # indices of files that are about to be replaced
    tokenizer = train_tokenizer(documents, vocab_size, root / _TOKENIZER)
    dataset = write_dataset(documents, tokenizer, root / _PREFIX)
    manifest = {
        "digest": digest,
        "split": split,
        "tokenizer": asdict(tokenizer),
        "dataset": asdict(dataset),
        "sizes": {
            file.relative_to(root).as_posix(): file.stat().st_size
            for file in sorted(root.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
        },
    }
    write_json(root / _MANIFEST, manifest, indent=2)
    return manifest


def _remove_cut_indices(cache: Path) -> None:
    import numpy

    for file in cache.glob("*.npy"):
        try:
            numpy.load(file, mmap_mode="r")
        except (ValueError, EOFError):
            file.unlink()


def _read_manifest(root: Path, digest: str) -> dict[str, Any] | None:
    """Return the manifest if it belongs to this input and every file has the size it names; else None."""
    try:
        manifest: dict[str, Any] = record.read(root / _MANIFEST)
        whole = manifest["digest"] == digest and all(
            (root / name).stat().st_size == size for name, size in manifest["sizes"].items()
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def _digest(documents: Sequence[str], vocab_size: int) -> str:
    library = importlib.metadata.version("tokenizers")
    digest = hashlib.sha256(json.dumps([FORMAT, "bpe", vocab_size, library]).encode())
    for document in documents:
        data = document.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


if TYPE_CHECKING:
    import numpy as np


def unigram_baseline(prefix: str | os.PathLike[str], split: str, vocab_size: int) -> float:
    """The loss of a model that knows only how often each token occurs, of the data set at `prefix`.

        -sum_t q(t) log p(t)    q: validation split; p: training split, p(t) = (n(t) + 1) / (N + V)

    in nats per token, as Megatron prints its loss, end-of-document tokens included. A model whose final loss
    is above it has learnt nothing about the order of tokens.

    Args:
        vocab_size: V, the tokenizer's, before Megatron pads it.

    Raises ValueError if the split has no training or no validation documents, or if a token is outside the
    vocabulary.
    """
    dataset = read_documents(prefix)
    train, valid, _ = split_documents(split, len(dataset))
    if train is None or valid is None:
        raise ValueError(f"--split {split} has no training or no validation part: use for example 98,2,0")
    return cross_entropy(_counts(dataset, valid, vocab_size), _counts(dataset, train, vocab_size))


def cross_entropy(held_out: np.ndarray, counts: np.ndarray) -> float:
    """Nats per token of counts `held_out` [V] under the add-one smoothed frequencies of `counts` [V]."""
    import numpy as np

    log_p = np.log(counts + 1.0) - math.log(counts.sum() + counts.size)
    return float(-(held_out * log_p).sum() / held_out.sum())


def _counts(dataset: list[np.ndarray], documents: range, vocab_size: int) -> np.ndarray:
    import numpy as np

    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        found = np.bincount(dataset[document], minlength=vocab_size)
        if found.size > vocab_size:
            raise ValueError(
                f"document {document} holds token {found.size - 1}, outside a vocabulary of {vocab_size}: "
                "pass the vocab_size of the tokenizer that wrote the data set"
            )
        counts += found
    return counts
