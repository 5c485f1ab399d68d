"""What omni_learns.py learns: to read words from pictures and to name spoken digits.

A sample is a conversation of one turn: a picture or a sound and a question, and the answer. The lines of
train.jsonl and held_out.jsonl are such conversations, beside the files that they name. Held-out words, fonts
and voices do not occur in training.

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "train/0.png"},
     {"type": "text", "text": "word?"}]}, {"role": "assistant", "content": "KAL"}]}
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import omni_media
import torch
from torch import Tensor

from megatron_nemotron3.models import OmniConfig, get_omni
from megatron_nemotron3.train.data import Conversation
from megatron_nemotron3.train.omni import OmniEncoder, join, make_processor, omni_tokenizer

CONSONANTS, VOWELS = "BDFGKLMNPRST", "AEIOU"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: Kind of medium -> question, and the share of right answers by chance.
QUESTIONS = {"image": "word?", "audio": "digit?"}
CHANCE = {"image": 1 / (len(CONSONANTS) ** 2 * len(VOWELS)), "audio": 1 / len(DIGITS)}
#: Fonts of matplotlib, and voices of espeak-ng.
FONTS = {
    "train": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "DejaVuSansMono-Bold")
    + ("STIXGeneral",),
    "held_out": ("DejaVuSerif-Bold", "STIXGeneralBol"),
}
VOICES = {
    "train": tuple(f"en-us+{name}" for name in ("m1", "m2", "m3", "m4", "m5", "m6", "f1", "f2", "f3")),
    "held_out": ("en-us+m7", "en-us+f4", "en-us+f5"),
}
PADDING = 1
#: Positions of a sequence; a sound takes one for each 80 ms.
LENGTH = 40


def model() -> OmniConfig:
    """The tiny model with half the layers and experts, and a small vocabulary."""
    tiny = get_omni("nano-omni-tiny")
    assert tiny is not None
    language = tiny.language.but(
        name="nano-learns-tiny",
        pattern="M*EM*E",
        vocab_size=336,
        seq_length=LENGTH,
        max_position_embeddings=LENGTH,
        num_moe_experts=8,
    )
    return tiny.but(name="nano-omni-learns-tiny", language=language)


def words(part: str) -> list[str]:
    """The words of "train" or "held_out": all of consonant, vowel, consonant, in a fixed order."""
    every = [a + b + c for a in CONSONANTS for b in VOWELS for c in CONSONANTS]
    random.Random(5).shuffle(every)
    held_out = len(every) // 6
    return every[:held_out] if part == "held_out" else every[held_out:]


def write(folder: Path, pictures: dict[str, int], sounds: dict[str, int]) -> None:
    """Write media and conversations.

    Args:
        pictures, sounds: how many of "train" and of "held_out".
    """
    import matplotlib
    import soundfile

    of_matplotlib = Path(matplotlib.get_data_path(), "fonts/ttf")
    for part in ("train", "held_out"):
        (folder / part).mkdir(parents=True)
        fonts = [str(of_matplotlib / f"{name}.ttf") for name in FONTS[part]]
        lines = []
        for number in range(pictures[part]):
            word = words(part)[number % len(words(part))]
            sizes = range(22, 31, 2) if part == "train" else range(23, 30, 2)
            path = f"{part}/{number}.png"
            omni_media.spaced(word, number, fonts, sizes).save(folder / path)
            lines.append(_line("image", path, word))
        for number in range(sounds[part]):
            digit = DIGITS[number % len(DIGITS)]
            path = f"{part}/{number}.wav"
            seed = number if part == "train" else -1 - number
            soundfile.write(folder / path, *omni_media.spoken(digit, seed, VOICES[part]))
            lines.append(_line("audio", path, digit))
        (folder / f"{part}.jsonl").write_text("".join(line + "\n" for line in lines))


def _line(kind: str, path: str, answer: str) -> str:
    asked = [{"type": kind, "path": path}, {"type": "text", "text": QUESTIONS[kind]}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def processor(folder: Path) -> Any:
    """transformers' processor of the model, saved in `folder` with a tokenizer.

    Its tokens are the words of the conversations' frame, the digits, and letters: words are spelled.
    """
    config = model()
    texts = ["user assistant", *QUESTIONS.values(), *DIGITS]
    tokenizer = omni_tokenizer(texts, config.language.vocab_size, folder, config)
    made = make_processor(config, tokenizer)
    made.save_pretrained(folder)
    return made


def encoded(folder: Path, part: str, processor: Any) -> list[dict[str, Any]]:
    """Conversations of a part as tokens and decoded media: "ids", "trained" [s], "inputs", "kind"."""
    encoder = OmniEncoder(processor, model(), folder)
    samples = []
    for number, line in enumerate((folder / f"{part}.jsonl").read_text().splitlines(), 1):
        place = f"{part}.jsonl:{number}"
        one = encoder.encode(Conversation(json.loads(line)["messages"], None, place))
        sample = {"ids": torch.tensor(one.ids), "trained": torch.tensor(one.trained)}
        (medium,) = one.media
        samples.append(sample | {"kind": medium.kind, "inputs": encoder.decode(one.media, place)})
    return samples


def draws(samples: Sequence[dict[str, Any]], size: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Microbatches without end, half pictures and half sounds, each kind reordered for each pass."""
    kinds = [[one for one in samples if one["kind"] == kind] for kind in QUESTIONS]
    left: list[list[dict[str, Any]]] = [[] for _ in kinds]
    order = random.Random(seed)
    while True:
        drawn = []
        for number in range(size):
            kind = number % len(kinds)
            if not left[kind]:
                left[kind] = order.sample(kinds[kind], len(kinds[kind]))
            drawn.append(left[kind].pop())
        yield drawn


def language_batch(samples: Sequence[dict[str, Any]], blind: bool = False) -> dict[str, Tensor]:
    """Tensors [b, s] of the language model; only answers count.

    Args:
        blind: padding in place of the media's ids, so that the language model is on its own.
    """
    full = torch.full((len(samples), LENGTH + 1), PADDING)
    mask = torch.zeros(len(samples), LENGTH)
    for number, one in enumerate(samples):
        length = len(one["ids"])
        full[number, :length] = one["ids"]
        mask[number, : length - 1] = one["trained"][1:]
    if blind:
        config = model()
        full[torch.isin(full, torch.tensor([config.image_token_id, config.sound_token_id]))] = PADDING
    return {
        "input_ids": full[:, :-1].clone(),
        "position_ids": torch.arange(LENGTH).expand(len(samples), -1),
        "labels": full[:, 1:].clone(),
        "loss_mask": mask,
    }


def encoder_batch(modality: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`modality_inputs` of "vision" or "sound"; {} if no sample has any."""
    made = join([one["inputs"] for one in samples], modality)
    return {modality: made} if made else {}
