"""Small tokenizers, trained here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "There were 201 hundreds of naïve cats in 1984, and 12 dogs; 201 of them ran. ",
    "Hundreds of hundreds: 100, 201, 512, 999 and 1984. Überall sind 42 Katzen. ",
    "def total(values): return sum(values) + 201  # 日本語 🙂 ",
] * 4


def train(
    folder: Path,
    size: int,
    *,
    digits: int = 0,
    special: Sequence[str] = ("<|end|>",),
    eos: str | None = None,
    texts: Sequence[str] = TEXT,
) -> Path:
    """Train a byte-level BPE; `digits`: numerals are cut into as many digits at most (0: they are not)."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = pre_tokenizers.Split(Regex(rf"\d{{1,{digits}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, level]) if digits else level
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return save(tokenizer, folder, eos or special[0])


def save(tokenizer: Tokenizer, folder: Path, eos: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def sentence_piece(folder: Path) -> Path:
    """Words with a space in front, bytes for everything else, as SentencePiece tokenizers are converted."""
    words = ["▁", "▁There", "▁were", "▁of", "▁cats", "s", "a", "t", "1", "2", "0", "▁201", ".", "▁hundred"]
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    vocabulary = [(token, 0.0 if i == 0 else -1.0 - len(words) / (i + 1)) for i, token in enumerate(tokens)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tokenizer, folder, "<unk>")
