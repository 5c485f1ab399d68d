"""Vocabularies: whether two models mean the same tokens by the same ids, and tokens as bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.folders import TOKENIZER as FOLDER
from megatron_nemotron3.checkpoints.metadata import read_file, read_json
from megatron_nemotron3.checkpoints.tokenizer_file import LIMIT, require_bounded
from megatron_nemotron3.common.files import Unreadable, json_outside

FILE = "tokenizer.json"


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


#: What tokenizer_config.json calls the special tokens that other tokenizers have under other names.
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
#: A space in the tokens of SentencePiece.
_SPACE = "▁"


def find(path: Path) -> Path:
    """The tokenizer of a folder: its own, that of a checkpoint, or that of a run of `nemotron3 train`.

    Raises:
        ValueError: there is none, or there are several.
    """
    if path.is_file() or (path / FILE).is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: give a folder with {FILE}")
    places = [path / FOLDER, path.parent / FOLDER, *(path / "data").glob("*/tokenizer")]
    found = [place for place in places if (place / FILE).is_file()]
    if len(found) != 1:
        which = f"{len(found)} tokenizers below {path}" if found else f"{path}: there is no {FILE} in it"
        raise ValueError(f"{which}: give the folder of a Hugging Face tokenizer")
    return found[0]


class ByteVocabulary:
    """The tokens of a Hugging Face tokenizer folder, each as the bytes that it stands for.

    Args:
        path: a folder with tokenizer.json, or that file. tokenizer_config.json next to it names the roles of
            special tokens.

    Attributes:
        tokens: bytes of each id; of a special token its name; None for an id without a token.
        special: ids of special tokens.
        roles: id of each of `ROLES` that the tokenizer has.
        digest: SHA-256 of what tokenizer.json says, without truncation and padding, which vary with use.

    Raises:
        ValueError: there is no tokenizer.json, it cannot be read, or its tokens do not say their bytes.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path}: there is no {FILE} in it: give a Hugging Face tokenizer folder")
        require_bounded(file)
        data = read_file(file, LIMIT)
        self._tokenizer, content = Tokenizer.from_buffer(data), json.loads(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A text that mentions a special token's name is plain text.
        self._tokenizer.encode_special_tokens = True
        self.path = path
        content |= {"truncation": None, "padding": None}
        self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {one["id"]: one for one in content.get("added_tokens") or []}
        self.special = frozenset(i for i, one in added.items() if one.get("special"))
        self.tokens: list[bytes | None] = [None] * (max(ids.values(), default=-1) + 1)
        to_bytes = _byte_function(content, file)
        for text, i in ids.items():
            self.tokens[i] = text.encode() if i in added else to_bytes(text)
        config_file = file.parent / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        self.roles: dict[str, int] = {}
        for role in ROLES:
            name = config.get(role)
            name = name.get("content") if isinstance(name, dict) else name
            if isinstance(name, str) and ids.get(name) in self.special:
                self.roles[role] = ids[name]

    def __len__(self) -> int:
        return len(self.tokens)

    def name(self, token: int) -> str:
        """Return a token for a reader, in quotes; bytes that are not text are escaped."""
        content = self.tokens[token] if 0 <= token < len(self) else None
        if content is None:
            return f"<{token}>"
        return repr(content.decode(errors="backslashreplace"))

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The id of each ordinary token, by its bytes; the lowest, if several tokens have the same bytes."""
        pairs = [(b, i) for i, b in enumerate(self.tokens) if b and i not in self.special]
        return dict(reversed(pairs))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids), default=0)

    def encode(self, texts: Iterable[bytes]) -> list[list[int] | None]:
        """Return tokens whose bytes are those of each text; None: some byte is in no token.

        Where the tokenizer's own answer has other bytes (a normalizer, a space in front) and where bytes are
        no characters, each token is the longest one that fits.
        """
        parts = [(text, *_characters(text)) for text in texts]
        whole = [text[first:last].decode() for text, first, last in parts]
        found: list[list[int] | None] = []
        encodings = self._tokenizer.encode_batch(whole, add_special_tokens=False)
        for (text, first, last), encoding in zip(parts, encodings):
            same = self.text(encoding.ids) == text[first:last]
            middle = encoding.ids if same else self._fit(text[first:last])
            pieces = self._fit(text[:first]), middle, self._fit(text[last:])
            known = [piece for piece in pieces if piece is not None]
            found.append(sum(known, []) if len(known) == 3 else None)
        return found

    def text(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ordinary tokens; special tokens and unknown ids have none."""
        known = (i for i in ids if 0 <= i < len(self) and i not in self.special)
        return b"".join(self.tokens[i] or b"" for i in known)

    def _fit(self, text: bytes) -> list[int] | None:
        found, at = [], 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (token := self.ids.get(text[at:end])) is not None:
                    found.append(token)
                    at = end
                    break
            else:
                return None
        return found


def _characters(text: bytes) -> tuple[int, int]:
    """Return where the whole characters of a text begin and end that was cut anywhere; (0, 0): none."""
    first = next((i for i in range(min(4, len(text))) if text[i] & 0xC0 != 0x80), 0)
    for last in range(len(text), max(first, len(text) - 4), -1):
        try:
            text[first:last].decode()
            return first, last
        except UnicodeDecodeError:
            continue
    return 0, 0


def _byte_function(content: dict[str, Any], file: Path) -> Any:
    decoder = content.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback"} or any(_replaces_space(step) for step in steps):
        return _sentence_piece
    raise ValueError(
        f"{file}: the bytes of its tokens are not known (decoder {decoder.get('type')}): X-Token reads "
        "tokenizers with a ByteLevel, Metaspace or ByteFallback decoder"
    )


def _replaces_space(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and (step.get("pattern") or {}).get("String") == _SPACE


def _byte_level(token: str) -> bytes:
    table = _byte_characters()
    return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()


@cache
def _byte_characters() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow at 256."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(i): i for i in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _sentence_piece(token: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()
