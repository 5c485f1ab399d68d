"""Pictures and sounds whose captions can be learned, deterministic by sample index; for omni_cpu.py.

A picture is a grid of 1x2 to 3x3 patches of 4x4 pixels in one of eight colors and four patterns; a sound is
the spectrogram of a tone in one of eight bands that rises, falls or stays. The caption after each names both.
Some samples have several, some none: those are text, a counting rhyme.

    [start] picture picture … [color] [pattern] sound … [band] [trend] zero one two … [end] padding

A caption cannot be guessed from text alone: without the encoders its words cost ln 8 and ln 4 (ln 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PAD, START, END, PICTURE, SOUND = range(5)
SPECIAL = {"vision": PICTURE, "audio": SOUND}
COLORS, PATTERNS, BANDS, TRENDS, NUMBERS = (
    range(a, b) for a, b in ((8, 16), (16, 20), (20, 28), (28, 31), (32, 48))
)
VOCABULARY = 48
CAPTIONS = range(COLORS.start, TRENDS.stop)
PATCH = 4  # pixels
MELS = 16
#: Frames of a sound for each of its rows: the Conformer's subsampling.
FRAMES = 4
#: Enough for two pictures, a sound and a line of the rhyme.
LENGTH = 32


@dataclass(frozen=True)
class Sample:
    """One sequence. `pictures`: [3, height, width] each; `sounds`: [frames, MELS] each."""

    tokens: list[int]
    pictures: list[Tensor] = field(default_factory=list)
    sounds: list[Tensor] = field(default_factory=list)


def sample(index: int) -> Sample:
    """The sample of an index, the same on every rank."""
    random = torch.Generator().manual_seed(1_000_003 * index + 7)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=random))

    made = Sample([START])
    for kind in [(), ("picture",), ("picture", "sound"), ("sound",), ("picture", "picture")][draw(5)]:
        if kind == "picture":
            color, pattern = draw(len(COLORS)), draw(len(PATTERNS))
            made.pictures.append(_picture(color, pattern, 1 + draw(3), 2 + draw(2), random))
            rows = made.pictures[-1][0].numel() // PATCH**2
            made.tokens.extend([PICTURE] * rows + [COLORS[color], PATTERNS[pattern]])
        else:
            band, trend, rows = draw(len(BANDS)), draw(len(TRENDS)), 2 + draw(4)
            made.sounds.append(_sound(band, trend, rows * FRAMES, random))
            made.tokens.extend([SOUND] * rows + [BANDS[band], TRENDS[trend]])
    first = draw(len(NUMBERS))
    made.tokens.extend(NUMBERS[(first + i) % len(NUMBERS)] for i in range(3 + draw(6)))
    made.tokens.append(END)
    assert len(made.tokens) <= LENGTH + 1
    return made


def _picture(color: int, pattern: int, rows: int, columns: int, random: torch.Generator) -> Tensor:
    """[3, height, width]: bits of the color per channel, dimmed by the pattern, plus noise."""
    hue = torch.tensor([color >> bit & 1 for bit in range(3)]).float() * 2 - 1
    y, x = torch.meshgrid(torch.arange(rows * PATCH), torch.arange(columns * PATCH), indexing="ij")
    dim = (torch.zeros_like(x), y % 2, x % 2, (x + y) % 2)[pattern]
    picture = hue[:, None, None] * (1 - dim) + dim
    return picture + 0.1 * torch.randn(picture.shape, generator=random)


def _sound(band: int, trend: int, frames: int, random: torch.Generator) -> Tensor:
    """[frames, MELS]: energy around a bin that moves by two bins from first to last frame, and noise."""
    shift = torch.linspace(-1, 1, frames) * (0, 1, -1)[trend]
    center = 2 * band + 0.5 + shift
    bins = torch.arange(MELS)
    return 3 * torch.exp(-((bins - center[:, None]) ** 2)) + 0.1 * torch.randn(frames, MELS, generator=random)


def microbatch(first: int, size: int, blind: bool = False) -> list[Sample]:
    """Samples first … first + size - 1. `blind`: noise of the same shapes in place of pictures and sounds."""
    samples = [sample(index) for index in range(first, first + size)]
    if blind:
        random = torch.Generator().manual_seed(first)
        for media in (media for one in samples for media in (*one.pictures, *one.sounds)):
            media.normal_(generator=random)
    return samples


def language_batch(samples: Sequence[Sample]) -> dict[str, Any]:
    """Tensors [b, s] of the language model. Placeholders and padding do not count."""
    full = torch.full((len(samples), LENGTH + 1), PAD)
    for row, one in zip(full, samples, strict=True):
        row[: len(one.tokens)] = torch.tensor(one.tokens)
    labels = full[:, 1:].clone()
    return {
        "input_ids": full[:, :-1].clone(),
        "position_ids": torch.arange(LENGTH).expand(len(samples), -1),
        "labels": labels,
        "loss_mask": torch.isin(labels, torch.tensor([PAD, PICTURE, SOUND]), invert=True).float(),
    }


def encoder_batch(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """`modality_inputs[name]` of MIMO's model; without any picture or sound the list is empty."""
    if name == "vision":
        return {"vit": {"pictures": [picture for one in samples for picture in one.pictures]}}
    return {"conformer": {"sounds": [sound for one in samples for sound in one.sounds]}}
