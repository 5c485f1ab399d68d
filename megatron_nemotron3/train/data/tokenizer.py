"""A byte-level BPE that is trained here and that stock Megatron loads by flags.

Two of Megatron 0.19's --tokenizer-type choices need no network, no GPU and no file from elsewhere:

- HuggingFaceTokenizer with --tokenizer-model FOLDER, read by transformers. `eod` is its eos_token.
- NullTokenizer with --vocab-size N: ids without text, of which `eod` is the last one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.folders import require_small_files
from megatron_nemotron3.common.files import atomic_group

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
# Must not be the end of document: Megatron masks the loss of every pad token.
PAD = "<|pad|>"
BYTES = 256
SMALLEST_VOCABULARY = BYTES + 2


def read_tokenizer(folder: str | os.PathLike[str], called: str | os.PathLike[str] | None = None) -> Any:
    """transformers' tokenizer of a folder, `called` in the ValueError if it is code, which is not run."""
    from transformers import AutoTokenizer

    require_small_files(Path(folder))
    try:  # without the option transformers asks on stdin
        return AutoTokenizer.from_pretrained(os.fspath(folder), trust_remote_code=False)
    except ValueError as problem:
        if "trust_remote_code" not in str(problem):
            raise
        why = "its tokenizer is code (auto_map), which is not run"
        raise ValueError(f"{called or folder}: {why}: save it as tokenizer.json by transformers") from None


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer: Megatron's flags for it, and encoding and decoding here."""

    #: --tokenizer-type
    tokenizer_type: str
    #: --tokenizer-model; None for plain bytes.
    tokenizer_model: str | None
    #: Ids 0 .. vocab_size - 1, special tokens included, before Megatron pads it.
    vocab_size: int
    #: Id of the end-of-document token.
    eod: int

    @property
    def flags(self) -> list[str]:
        if self.tokenizer_model is None:
            return ["--tokenizer-type", self.tokenizer_type, "--vocab-size", str(self.vocab_size)]
        return ["--tokenizer-type", self.tokenizer_type, "--tokenizer-model", self.tokenizer_model]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without the end of document. A special token's name in a text is plain text."""
        if self.tokenizer_model is None:
            return [list(text.encode("utf-8")) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens are dropped, a cut UTF-8 character becomes U+FFFD."""
        if self.tokenizer_model is None:
            return bytes(i for i in ids if i < BYTES).decode("utf-8", errors="replace")
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        assert self.tokenizer_model is not None
        tokenizer = Tokenizer.from_file(os.path.join(self.tokenizer_model, "tokenizer.json"))
        # Documents that mention <|endoftext|> must not end there.
        tokenizer.encode_special_tokens = True
        return tokenizer


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike[str],
    *,
    special: Sequence[str] = (),
    chat_template: str | None = None,
    end: str = END_OF_DOCUMENT,
) -> TokenizerInfo:
    """Train a byte-level BPE on `texts` and save it in `folder` (tokenizer.json, tokenizer_config.json).

    Equal texts give equal files, whatever the number of threads. The vocabulary holds the 256 bytes, so any
    text can be encoded, the end of document and a pad token; it is smaller than `vocab_size` if the texts
    offer too few merges. `eod` is 0.

    Args:
        special: more special tokens, with the ids 2, 3, …
        chat_template: Jinja, saved with the tokenizer.
        end: the special token that is saved as `eos_token`, which is Megatron's `eod`.

    Raises ValueError if vocab_size < 258 + len(special).
    """
    if vocab_size < (smallest := SMALLEST_VOCABULARY + len(special)):
        raise ValueError(
            f"vocab_size={vocab_size} does not hold the {BYTES} bytes and {2 + len(special)} special tokens: "
            f"use {smallest} or more"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PAD, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)

    # PreTrainedTokenizerFast: whatever tokenizer.json says (run with transformers 5.23; 4 not tried).
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        **({} if chat_template is None else {"chat_template": chat_template}),
    }
    folder = Path(folder).absolute()
    with atomic_group(folder / "tokenizer_config.json", folder / "tokenizer.json") as (config_path, path):
        config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8", newline="")
    eod = tokenizer.token_to_id(end)
    assert eod is not None
    return TokenizerInfo(
        "HuggingFaceTokenizer", os.path.abspath(folder), vocab_size=tokenizer.get_vocab_size(), eod=eod
    )
