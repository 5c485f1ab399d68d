"""End to end: prepare(), then what a stock training script does with the flags, on one CPU process.

The flags go through Megatron's own parser, build_tokenizer and BlendedMegatronDatasetBuilder, with the
network refused; samples are drawn and turned back into the text they came from.
"""

import argparse
import os
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_nemotron3.train.data import (
    prepare,
    read_texts,
    split_documents,
    unigram_baseline,
    write_dataset,
)
from megatron_nemotron3.train.isolation import ISOLATION_OPTIONS
from tests.train.data.byte_tokenizer import byte_tokenizer

arguments = pytest.importorskip("megatron.training.arguments")
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.utils import get_blend_from_list  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402

MAX_BYTES = 600_000
VOCAB = 512
SEQ_LENGTH = 128


def _parse(flags):
    """Megatron's own tokenizer and data flags; `rank` and TP are set where training sets them."""
    parser = argparse.ArgumentParser()
    arguments._add_tokenizer_args(parser)
    arguments._add_data_args(parser)
    args = parser.parse_args([*flags, "--seq-length", str(SEQ_LENGTH)])
    args.rank, args.tensor_model_parallel_size, args.make_vocab_size_divisible_by = 0, 1, 128
    return args


def _datasets(args, tokenizer, sizes):
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


@pytest.fixture(scope="module", params=["bpe", pytest.param("bytes", marks=pytest.mark.full)])
def run(request, tmp_path_factory):
    """(prepared, args, Megatron's tokenizer, one epoch of training, one epoch of validation)."""
    folder = tmp_path_factory.mktemp("data")
    prepared = prepare(None, folder, VOCAB, MAX_BYTES, split="90,10,0")
    if request.param == "bytes":
        tokenizer = byte_tokenizer()
        dataset = write_dataset(prepared.texts.documents, tokenizer, folder / "bytes/corpus")
        prepared = replace(prepared, folder=str(folder / "bytes"), tokenizer=tokenizer, dataset=dataset)

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        args = _parse(prepared.flags)
        tokenizer = build_tokenizer(args)
        train, valid, test = _datasets(args, tokenizer, [None, None, None])
    assert test is None
    return prepared, args, tokenizer, train, valid


def test_megatron_sees_the_same_tokenizer(run):
    prepared, args, tokenizer, _, _ = run
    assert (tokenizer.vocab_size, tokenizer.eod) == (prepared.tokenizer.vocab_size, prepared.tokenizer.eod)
    assert tokenizer.pad != tokenizer.eod
    assert args.padded_vocab_size == -(-prepared.tokenizer.vocab_size // 128) * 128
    if prepared.tokenizer.tokenizer_model:
        text = "def f(x):\n\treturn 'é漢'  # tab\r\n"
        assert [tokenizer.tokenize(text)] == prepared.tokenizer.encode([text])
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_samples_are_the_documents(run):
    """One epoch, put back in order, is the documents of the split, each ended by eod."""
    prepared, _, tokenizer, train, valid = run
    documents = read_texts(None, max_bytes=MAX_BYTES).documents
    for dataset in (train, valid):
        by_position = np.argsort(dataset.shuffle_index)
        stream = torch.cat([dataset[int(i)]["tokens"] for i in by_position]).tolist()
        expected = [documents[i] for i in dataset.document_index]
        # The epoch drops less than one sample, and the last label, at its end.
        lengths = dataset.dataset.sequence_lengths[dataset.indices]
        assert 1 <= lengths.sum() - len(stream) <= SEQ_LENGTH
        texts, ids = [], []
        for token in stream:
            if token == prepared.tokenizer.eod:
                texts.append(prepared.tokenizer.decode(ids))
                ids = []
            else:
                ids.append(token)
        assert texts == expected[: len(texts)]
        tail = prepared.tokenizer.decode(ids).rstrip("\ufffd")
        assert expected[len(texts)].startswith(tail) if len(texts) < len(expected) else not tail


def test_labels_and_mask(run):
    prepared, _, _, train, _ = run
    has_end = 0
    for i in range(len(train)):
        sample = train[i]
        assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
        # No token is taken for padding, the end of document least of all.
        assert sample["loss_mask"].sum() == SEQ_LENGTH
        has_end += int((sample["labels"] == prepared.tokenizer.eod).sum())
    assert has_end > 0


def test_isolated_documents(run):
    """Borders lie behind ends of documents, where nothing is predicted, and positions start anew."""
    prepared, *_ = run
    args = _parse([*prepared.flags, *ISOLATION_OPTIONS[:2]])
    train, *_ = _datasets(args, build_tokenizer(args), [None, None, None])
    borders = 0
    for i in range(len(train)):
        sample = train[i]
        end = sample["tokens"] == prepared.tokenizer.eod
        inside = sample["cu_seqlens"][(sample["cu_seqlens"] > 0) & (sample["cu_seqlens"] < SEQ_LENGTH)]
        assert inside.tolist() == (end[:-1].nonzero().flatten() + 1).tolist()
        assert torch.equal(sample["loss_mask"] == 0, end)
        assert (sample["position_ids"] == 0).nonzero().flatten().tolist() == [0, *inside.tolist()]
        borders += len(inside)
    assert borders > 10


def test_the_split_is_megatrons(run):
    prepared, args, tokenizer, train, valid = run
    parts = split_documents(prepared.split, prepared.dataset.documents)
    assert [list(part) for part in parts[:2]] == [train.indices.tolist(), valid.indices.tolist()]
    assert train.dataset.sequence_lengths.sum() == prepared.dataset.tokens


def test_the_baseline_is_the_loss_of_a_model_without_context(run):
    """Fixed logits log(n + 1) over the labels Megatron serves: the validation loss of that model."""
    prepared, _, _, train, valid = run
    vocab_size = prepared.tokenizer.vocab_size
    baseline = unigram_baseline(prepared.prefix, prepared.split, vocab_size)
    counts = sum(
        torch.bincount(torch.from_numpy(train.dataset[int(i)].astype(np.int64)), minlength=vocab_size)
        for i in train.indices
    )
    labels = torch.cat([valid[i]["labels"] for i in range(len(valid))])
    logits = (counts + 1).double().log().expand(len(labels), vocab_size)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    # All but the first token and the dropped end of the epoch.
    assert valid.dataset.sequence_lengths[valid.indices].sum() - len(labels) <= SEQ_LENGTH
    assert loss == pytest.approx(baseline, rel=2e-3)


def test_indices_are_cached_where_the_flags_say(run):
    prepared, args, tokenizer, _, _ = run
    assert any(name.endswith("sample_index.npy") for name in os.listdir(prepared.data_cache_path))
    assert not os.path.exists(os.path.join(prepared.prefix, "cache"))
    before = sorted(os.listdir(prepared.data_cache_path))
    _datasets(args, tokenizer, [None, None, None])
    assert sorted(os.listdir(prepared.data_cache_path)) == before


def test_validation_samples_of_a_run_without_evaluations() -> None:
    """`nemotron3 distill logits` gives no --eval-interval."""
    from megatron_nemotron3.train.pretrain_script import validation_samples

    assert validation_samples(argparse.Namespace(eval_interval=None), 0) == 0
