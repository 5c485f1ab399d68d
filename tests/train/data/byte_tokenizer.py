"""UTF-8 bytes as tokens 0 to 255, and the last id for the end of a document."""

from __future__ import annotations

from megatron_nemotron3.train.data import TokenizerInfo


def byte_tokenizer(vocab_size: int = 257) -> TokenizerInfo:
    """Make one; it needs no file."""
    return TokenizerInfo("NullTokenizer", None, vocab_size=vocab_size, eod=vocab_size - 1)
