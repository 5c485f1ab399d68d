"""Turn text on this machine into a data set for stock Megatron. Nothing is downloaded.

    prepared = prepare(None, "build/data")          # Python's own sources, about 6 MB
    subprocess.run([..., "pretrain_hybrid.py", *flags, *prepared.flags])
    baseline = unigram_baseline(prepared.prefix, prepared.split, prepared.tokenizer.vocab_size)

Importing this package costs neither torch nor megatron.
"""

from megatron_nemotron3.train.data.conversations import Conversation as Conversation
from megatron_nemotron3.train.data.indexed import default_split as default_split
from megatron_nemotron3.train.data.indexed import split_documents as split_documents
from megatron_nemotron3.train.data.indexed import write_dataset as write_dataset
from megatron_nemotron3.train.data.prepare import prepare as prepare
from megatron_nemotron3.train.data.prepare import unigram_baseline as unigram_baseline
from megatron_nemotron3.train.data.text import read_texts as read_texts
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo as TokenizerInfo
from megatron_nemotron3.train.data.tokenizer import train_tokenizer as train_tokenizer
