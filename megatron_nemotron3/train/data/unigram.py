"""The loss of a model that knows only how often each token occurs.

A model whose final loss is above it has learnt nothing about the order of tokens.

    -sum_t q(t) log p(t)    q: validation split; p: training split, smoothed

in nats per token, as Megatron prints its loss (`lm loss`), end-of-document tokens included. Smoothing is
add-one (Laplace): p(t) = (n(t) + 1) / (N + V), V the vocabulary before Megatron pads it.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from megatron_nemotron3.train.data.indexed import read_documents, split_documents

if TYPE_CHECKING:
    import numpy as np


def unigram_baseline(prefix: str | os.PathLike[str], split: str, vocab_size: int) -> float:
    """The baseline of the data set at `prefix` under `--split split`; vocab_size is the tokenizer's.

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
