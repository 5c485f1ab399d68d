"""Turn text on this machine into a data set for stock Megatron. Nothing is downloaded.

    prepared = prepare(None, "build/data")          # Python's own sources, about 6 MB
    subprocess.run([..., "pretrain_hybrid.py", *flags, *prepared.flags])
    baseline = unigram_baseline(prepared.prefix, prepared.split, prepared.tokenizer.vocab_size)

Importing this package costs neither torch nor megatron; writing a data set imports both.
"""

from megatron_nemotron3.train.data.conversations import Conversation
from megatron_nemotron3.train.data.indexed import DatasetInfo, default_split, split_documents, write_dataset
from megatron_nemotron3.train.data.prepare import PreparedData, prepare
from megatron_nemotron3.train.data.text import Texts, read_texts
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo, byte_tokenizer, train_tokenizer
from megatron_nemotron3.train.data.unigram import UnigramBaseline, unigram_baseline

__all__ = [
    "Conversation",
    "DatasetInfo",
    "PreparedData",
    "Texts",
    "TokenizerInfo",
    "UnigramBaseline",
    "byte_tokenizer",
    "default_split",
    "prepare",
    "read_texts",
    "split_documents",
    "train_tokenizer",
    "unigram_baseline",
    "write_dataset",
]
