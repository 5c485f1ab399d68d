"""The unigram baseline against sums written out, and the split against its own laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.launch.data_sets import split_bounds
from megatron_nemotron3.train.data import (
    default_split,
    split_documents,
    unigram_baseline,
    write_dataset,
)
from tests.train.data.byte_tokenizer import byte_tokenizer

pytest.importorskip("megatron.core")


def entropy(counts):
    """Nats per token of counts under their own frequencies."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def test_against_torch(tmp_path):
    generator = np.random.default_rng(0)
    docs = ["".join(map(chr, generator.integers(97, 97 + 1 + i % 20, 50))) for i in range(100)]
    info = write_dataset(docs, byte_tokenizer(), tmp_path / "x")
    baseline = unigram_baseline(info.prefix, "90,10,0", 257)
    train, valid = (
        torch.tensor([t for doc in part for t in [*doc.encode(), 256]]) for part in (docs[:90], docs[90:])
    )
    counts = torch.bincount(train, minlength=257).double()
    logits = (counts + 1).log().expand(len(valid), 257)
    assert baseline == pytest.approx(torch.nn.functional.cross_entropy(logits, valid).item())
    assert entropy(counts.numpy()) < baseline < math.log(257)


def test_errors(tmp_path):
    info = write_dataset(["a"] * 10, byte_tokenizer(), tmp_path / "x")
    with pytest.raises(ValueError, match="no training or no validation part"):
        unigram_baseline(info.prefix, "100,0,0", 257)
    with pytest.raises(ValueError, match="holds token 256, outside a vocabulary of 256"):
        unigram_baseline(info.prefix, "50,50,0", 256)
    with pytest.raises(ValueError, match="gives validation none of the 10 documents"):
        unigram_baseline(info.prefix, "98,2,0", 257)


@given(st.lists(st.decimals(0, 1000, places=2).map(str), min_size=1, max_size=3))
def test_splits_are_read_as_megatron_reads_them(weights):
    from megatron.core.datasets import blended_megatron_dataset_config as upstream

    split = ",".join(weights)
    if not any(map(float, weights)):
        with pytest.raises(ValueError, match="give up to three weights"):
            split_bounds(split)
        return
    assert split_bounds(split) == upstream.convert_split_vector_to_split_matrix(
        upstream.parse_and_normalize_split(split)
    )


@pytest.mark.parametrize("split", ["", "a", "1.2.3", "1,1,1,1", "0,0,0"])
def test_a_split_that_says_nothing_is_refused(split):
    with pytest.raises(ValueError, match="give up to three weights"):
        split_documents(split, 10)


@given(st.tuples(*[st.integers(0, 100)] * 3).filter(any), st.integers(1, 10_000))
def test_splits_are_a_partition(weights, documents):
    split = ",".join(map(str, weights))
    try:
        parts = split_documents(split, documents)
    except ValueError as error:
        assert f"none of the {documents} documents" in str(error)
        assert documents * min(w for w in weights if w) / sum(weights) <= 1
        return
    assert [part is None for part in parts] == [weight == 0 for weight in weights]
    assert [i for part in parts if part is not None for i in part] == list(range(documents))


@pytest.mark.parametrize(
    ("lengths", "split"),
    [
        ([1] * 1000, "98,2,0"),
        ([1] * 300, "90,10,0"),  # 6 and 15 documents are few
        ([1] * 150, "98,2,0"),  # so are 15, and more would be over a tenth of all
        ([1] * 10, "90,10,0"),  # round(0.98 * 10) = 10 holds out nothing, round(9.5) = 10 neither
        ([1] * 2, "50,50,0"),
        ([1000] * 96 + [1] * 4, "95,5,0"),  # the last two documents are too little
        ([10_000, 1], "50,50,0"),  # nothing better exists
    ],
)
def test_default_split(lengths, split):
    assert default_split(lengths) == split
    train, valid, test = split_documents(split, len(lengths))
    assert train and valid and test is None
