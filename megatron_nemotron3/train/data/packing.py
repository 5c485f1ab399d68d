"""Conversations packed into rows of one length: first fit, no conversation is cut.

Tokens and marks of a file are computed once per tokenizer and kept as arrays in its folder (or
in `--data-cache-path`), which all processes map. Which conversation goes into which row depends on the length
of a row and is computed at each start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from megatron_nemotron3.checkpoints.folders import TOKENIZER_LIMIT
from megatron_nemotron3.common.files import atomic_group, printable, read_outside
from megatron_nemotron3.common.output import Bar, count
from megatron_nemotron3.train.data.conversations import (
    READING,
    Conversation,
    Encoded,
    Encoder,
    encoded_conversations,
)
from megatron_nemotron3.train.data.forms import Findings
from megatron_nemotron3.train.data.tokenizer import read_tokenizer

#: Version of the arrays.
_FORMAT = 4
_NAMES = ("findings.json", "tokens.npy", "trained.npy", "origins.npy", "borders.npy")
#: Conversations of `samples`, and characters of each.
_SAMPLES, _SHOWN = 3, 1200


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Assign each length to the first bin with enough room left, in order; bins hold indices of `lengths`.

    A tree with the largest room of its bins finds the bin in log(n) steps.
    """
    if lengths and max(lengths) > room:
        raise ValueError(f"a length of {max(lengths)} does not fit {room}")
    size = 1 << max(0, len(lengths) - 1).bit_length()
    largest = [room] * (2 * size)
    bins: list[list[int]] = [[] for _ in lengths]
    for index, length in enumerate(lengths):
        node = 1
        while node < size:
            node = 2 * node if largest[2 * node] >= length else 2 * node + 1
        bins[node - size].append(index)
        largest[node] -= length
        while node > 1:
            node //= 2
            largest[node] = max(largest[2 * node], largest[2 * node + 1])
    return [found for found in bins if found]


def conversation_multiple(cp: int) -> int:
    """Number of tokens whose multiple each conversation is padded to: CP cuts 2 * cp parts."""
    return 2 * cp if cp > 1 else 1


def pack_arguments(borders: Any, longest: int, total: int) -> dict[str, Any]:
    """Keywords of Megatron's `PackedSeqParams` for a row of `total` tokens.

    Attention treats the padding behind a conversation as part of it, which changes no real token.

    Args:
        borders: int32 [documents + 1], as of `PackedRow`.
        longest: tokens of the longest document.
    """
    return {
        **{f"cu_seqlens_{side}{padded}": borders for side in ("q", "kv") for padded in ("", "_padded")},
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": total,
    }


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> Any:
    """Order of the rows in an epoch, [rows]."""
    import numpy as np

    return np.random.default_rng((seed, epoch)).permutation(rows)


@dataclass(frozen=True)
class PackedRow:
    """Conversations in one row, each padded to a multiple; arrays of NumPy."""

    #: [s] ids; padding is token 0, as where Megatron's shift for MTP leaves a document.
    tokens: Any
    #: [s] the next token of the same conversation, 0 if there is none.
    labels: Any
    #: [s] float32, 1 where the label is the assistant's.
    loss_mask: Any
    #: [s] position in its conversation.
    positions: Any
    #: [s] whether the token is padding.
    padding: Any
    #: [conversations + 1] first token of each, or one more if the row ends in padding; the last is s.
    borders: Any
    #: Conversations.
    conversations: int


class ConversationEncoder(Protocol):
    """What makes tokens of conversations."""

    def encode(self, conversation: Conversation) -> Encoded: ...

    def key(self) -> bytes:
        """Changes with what the tokens depend on."""


class PackedConversations:
    """The rows of a file.

    Args:
        path: .jsonl file.
        tokenizer: folder of a Hugging Face tokenizer with a chat template, or another maker of tokens.
        length: tokens of a row.
        multiple: conversations are padded to a multiple of it; 2 * CP under context parallelism.
        cache: folder for the arrays; None: `cache` in the file's folder.
        pack: several conversations in a row; else each has a row of its own.

    `READING` says how the rows are read; another maker of tokens takes its template variables itself.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | ConversationEncoder,
        length: int,
        multiple: int = 1,
        cache: str | None = None,
        pack: bool = True,
    ) -> None:
        import numpy as np

        self.path, self.length, self.multiple = path, length, multiple
        reading = READING.current()
        encoder = _digest(tokenizer) if isinstance(tokenizer, str) else tokenizer.key()
        key = _key(path, encoder + reading.text().encode())
        self.folder = Path(cache or Path(path).absolute().parent / "cache") / f"conversations-{key}"
        if not (self.folder / _NAMES[-1]).is_file():
            made = (
                Encoder(tokenizer, variables=reading.variables) if isinstance(tokenizer, str) else tokenizer
            )
            _write(path, made, self.folder, reading.form)
        #: Lines about the file, for the log.
        self.findings: list[str] = json.loads((self.folder / _NAMES[0]).read_text())
        self._tokens, self._trained, self._origins, self._starts = (
            np.load(self.folder / name, mmap_mode="r") for name in _NAMES[1:]
        )
        sizes = np.diff(self._starts)
        padded = -(-sizes // multiple) * multiple
        trained = np.add.reduceat(self._labels_trained(), self._starts[:-1]) if len(sizes) else sizes
        #: Conversations of the file.
        self.in_file = len(sizes)
        usable = (padded <= length) & (trained > 0)
        self._kept = np.flatnonzero(usable)
        #: Conversations that are left out: longer than a row, or without a token of the assistant.
        self.too_long, self.untrained = int((padded > length).sum()), int((trained == 0).sum())
        if not len(self._kept):
            raise ValueError(
                f"{path}: none of {len(sizes)} conversations can be trained on: {self.too_long} are longer "
                f"than {length} tokens, {self.untrained} have no message of the assistant"
            )
        self._rows = (
            first_fit(padded[self._kept].tolist(), length) if pack else [[i] for i in range(len(self._kept))]
        )
        #: Of the conversations that are used.
        self.conversations, self.tokens = len(self._kept), int(sizes[self._kept].sum())

    def _labels_trained(self) -> Any:
        """Of each token, whether the next one is a label; conversations do not reach into the next."""
        import numpy as np

        label = np.append(self._trained[1:], False)
        label[self._starts[1:] - 1] = False
        return label.astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def members(self, index: int) -> list[int]:
        """Conversations of a row, in order, by their number in the file."""
        return [int(self._kept[which]) for which in self._rows[index]]

    def tokens_of(self, conversation: int) -> Any:
        """[n] ids of a conversation, by its number in the file."""
        return self._tokens[int(self._starts[conversation]) : int(self._starts[conversation + 1])]

    def origin(self, conversation: int) -> tuple[int, int, int]:
        """Where a conversation is in the file: line from 1, first byte of the line, number in the line."""
        line, offset, part = map(int, self._origins[conversation])
        return line, offset, part

    def row(self, index: int) -> PackedRow:
        import numpy as np

        length = self.length
        tokens, labels, positions = (np.zeros(length, np.int64) for _ in range(3))
        mask, padding = np.zeros(length, np.float32), np.ones(length, np.bool_)
        borders, at = [0], 0
        for which in self.members(index):
            first, last = int(self._starts[which]), int(self._starts[which + 1])
            n = last - first
            tokens[at : at + n] = self._tokens[first:last]
            labels[at : at + n - 1] = self._tokens[first + 1 : last]
            mask[at : at + n - 1] = self._trained[first + 1 : last]
            padding[at : at + n] = False
            padded = -(-n // self.multiple) * self.multiple
            positions[at : at + padded] = np.arange(padded)
            at += padded
            borders.append(at)
        if at < length:
            positions[at:] = np.arange(length - at)
            borders.append(length)
        count = len(self._rows[index])
        return PackedRow(tokens, labels, mask, positions, padding, np.array(borders, np.int32), count)

    def describe(self) -> str:
        """For the log: what was found in the file, how full the rows are, and what is left out."""
        share = self.tokens / (len(self) * self.length)
        conversations = count(self.conversations, "conversation")
        text = f"{self.path}: {conversations} in {count(len(self), 'row')}, {share:.1%} full"
        if self.too_long:
            text += f"; {self.too_long:,} longer than {self.length:,} tokens are left out"
        if self.untrained:
            text += f"; {self.untrained:,} without a message of the assistant are left out"
        return printable("\n".join([*self.findings, text]), "\n")

    def samples(self, tokenizer: str) -> str:
        """The first conversations that are used, decoded, with what is trained between ⟦ and ⟧."""
        from itertools import groupby

        decoder, shown = read_tokenizer(tokenizer), []
        for which in self._kept[:_SAMPLES]:
            first, last = int(self._starts[which]), int(self._starts[which + 1])
            text = ""
            marks = self._trained[first:last].tolist()
            for trained, part in groupby(zip(self._tokens[first:last].tolist(), marks), lambda one: one[1]):
                words = decoder.decode([token for token, _ in part])
                text += f"⟦{words}⟧" if trained else words
            cut = f"{text[:_SHOWN]} … ({len(text):,} characters)" if len(text) > _SHOWN else text
            shown.append(
                f"line {self.origin(int(which))[0]}, trained is what ⟦ ⟧ encloses:\n{printable(cut, chr(10))}"
            )
        return "\n".join(shown)


def _key(path: str, encoder: bytes) -> str:
    """Changes with the file, what makes its tokens and the format of the arrays."""
    found = os.stat(path)
    # The time of change as well: `touch`, `cp -p` and `rsync -t` set the other one.
    numbers = _FORMAT, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    data = "\n".join([os.path.realpath(path), *map(str, numbers)]).encode() + encoder
    return hashlib.sha256(data).hexdigest()[:20]


def _digest(tokenizer: str) -> bytes:
    """Changes with the files of a tokenizer."""
    digest = hashlib.sha256()
    for file in sorted(Path(tokenizer).iterdir()):
        if file.is_file() and file.suffix in (".json", ".model", ".jinja", ".txt"):
            digest.update(file.name.encode() + read_outside(file, limit=TOKENIZER_LIMIT))
    return digest.digest()


def _write(path: str, encoder: Encoder | ConversationEncoder, folder: Path, form: str) -> None:
    """Encode a file into a folder, which gets its name when it is complete."""
    import numpy as np

    tokens, trained, origins, borders = array("i"), array("b"), array("q"), array("q", [0])
    findings = Findings()
    forks = isinstance(encoder, Encoder)  # libraries of media are not made for it
    with Bar("encode conversations", "lines") as bar:
        for conversation, encoded in encoded_conversations(path, encoder.encode, form, findings, forks):
            line = int(conversation.place.rpartition(":")[2])
            if encoded.ids:
                tokens.extend(encoded.ids)
                trained.extend(encoded.trained)
                origins.extend((line, conversation.offset, conversation.part))
                borders.append(len(tokens))
            bar.to(line, note=f"{len(tokens) / bar.seconds:,.0f} tokens/s")
    arrays: tuple[Any, ...] = (
        np.array(tokens, dtype=np.int32),
        np.array(trained, dtype=np.bool_),
        np.array(origins, dtype=np.int64).reshape(-1, 3),
        np.array(borders, dtype=np.int64),
    )
    staging = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        with atomic_group(*(staging / name for name in _NAMES)) as places:
            places[0].write_text(json.dumps(findings.lines(path)))
            for place, values in zip(places[1:], arrays, strict=True):
                np.save(place, values)
        try:
            os.rename(staging, folder)
        except OSError:  # another rank was first, and others read what it wrote
            if not (folder / _NAMES[-1]).is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
