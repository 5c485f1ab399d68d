"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import Unreadable, json_outside

FILE = "tokenizer.json"
#: Longest tokenizer.json that is read, in bytes.
LIMIT = 256 << 20


@dataclass(frozen=True)
class Vocabulary:
    """What is known of a model's vocabulary.

    entries: tokens, without the padding of the embedding; None if not known.
    padded: rows of the embedding, of which up to `multiple` - 1 are padding; None if not known.
    digest: of every token and its id; None if there is no tokenizer.json to read.
    """

    entries: int | None
    padded: int | None = None
    multiple: int = 1
    digest: str | None = None

    def bounds(self) -> tuple[int, int] | None:
        """Least and largest number of tokens; None if nothing is known."""
        if self.entries is not None:
            return self.entries, self.entries
        return None if self.padded is None else (self.padded - self.multiple + 1, self.padded)

    def differs(self, other: Vocabulary) -> str | None:
        """How another one differs as far as both are known; None if they may be the same."""
        if self.digest and other.digest:
            return None if self.digest == other.digest else "their tokenizers differ in tokens or ids"
        mine, theirs = self.bounds(), other.bounds()
        # A table of embeddings may be larger than its tokenizer, but no id may lie beyond a table.
        if mine is None or theirs is None or (mine[0] <= theirs[1] and theirs[0] <= mine[1]):
            return None
        return f"{_range_text(mine)} and {_range_text(theirs)} tokens"


def _range_text(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]:,}" if bounds[0] == bounds[1] else f"{bounds[0]:,} to {bounds[1]:,}"


def of_tokenizer(folder: Path) -> Vocabulary | None:
    """Vocabulary of a Hugging Face tokenizer's folder; None if it has no tokenizer.json that can be read."""
    try:
        data = json_outside(folder / FILE, limit=LIMIT)
        tokens: Any = data["model"]["vocab"]
        if isinstance(tokens, list):  # Unigram: [token, score] in the order of the ids
            tokens = {token: i for i, (token, _) in enumerate(tokens)}
        ids = {**tokens, **{added["content"]: added["id"] for added in data.get("added_tokens") or ()}}
        entries = max(ids.values()) + 1
    except (OSError, Unreadable, ValueError, KeyError, TypeError):
        return None
    digest = hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()
    return Vocabulary(entries, digest=digest)
