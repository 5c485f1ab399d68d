"""Random tokens with pictures and sounds of random sizes, for trials of a layout without data.

A sample is the same on all ranks and in all layouts, so every layout trains on the same ones.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.data.packing import PackedRow
from megatron_nemotron3.train.omni.layouts import SOUND, VISION

#: Sides of a picture in patches, and frames of a spectrogram.
_SIDES, _FRAMES = (2, 4, 6, 8), (16, 100)
#: Samples have no media, a picture, a sound, or two pictures and a sound.
_KINDS = ((0, 0), (1, 0), (0, 1), (2, 1))


class MockSamples:
    """Samples by number (`data.Samples`); `length`: tokens of a sequence."""

    pack = False

    def __init__(self, config: OmniConfig, length: int, seed: int) -> None:
        self.config, self.length, self.seed = config, length, seed

    def row(self, number: int) -> PackedRow:
        ids = self._text(number)
        labels = torch.cat([ids[1:], ids.new_zeros(1)])
        mask = ~self._is_special(labels)
        mask[-1] = False
        return PackedRow(
            tokens=ids.numpy(),
            labels=labels.numpy(),
            loss_mask=mask.float().numpy(),
            positions=torch.arange(self.length).numpy(),
            padding=torch.zeros(self.length, dtype=torch.bool).numpy(),
            borders=torch.tensor([0, self.length], dtype=torch.int32).numpy(),
            conversations=1,
        )

    def media(self, number: int, modalities: tuple[str, ...]) -> list[dict[str, Any]]:
        return [self._media(number, modality) for modality in modalities]

    def _media(self, number: int, modality: str) -> dict[str, Any]:
        sizes, random = self._sizes(number)[modality], self._random(number, 1)
        if not sizes:
            return {}
        if modality == SOUND:
            assert self.config.sound is not None
            (frames,) = sizes
            # As the processor's: the mask does not count the last frame of a centered spectrogram.
            features = torch.randn(1, frames + 1, self.config.sound.mel_bins, generator=random)
            mask = torch.arange(frames + 1)[None] < frames
            return {SOUND: {"parakeet": {"input_features": features, "input_features_mask": mask}}}
        grids = torch.tensor(sizes)
        pixels = 3 * self.config.vision.patch_size**2
        patches = torch.rand(int(grids.prod(1).sum()), pixels, generator=random)
        return {VISION: {"radio": {"pixel_values": patches, "image_grid_hw": grids}}}

    def _is_special(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(ids, torch.tensor(list(self.config.special_ids().values())))

    def _random(self, number: int, part: int) -> torch.Generator:
        return torch.Generator().manual_seed(2 * (self.seed * 1_000_003 + number) + part)

    def _sizes(self, number: int) -> dict[str, list[Any]]:
        random = self._random(number, 0)

        def choose(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=random))

        pictures, sounds = _KINDS[choose(0, len(_KINDS))]
        side = self.config.vision.max_image_size // self.config.vision.patch_size
        sides = [n for n in _SIDES if n <= side]
        found: dict[str, list[Any]] = {VISION: [], SOUND: []}
        room = self.length // 2
        for _ in range(pictures):
            grid = [sides[choose(0, len(sides))] for _ in range(2)]
            room -= grid[0] * grid[1] // self.config.vision.merged_patches**2
            if room >= 0:
                found[VISION].append(grid)
        for _ in range(sounds if self.config.sound else 0):
            frames = choose(*_FRAMES)
            room -= self._sound_rows(frames)
            if room >= 0:
                found[SOUND].append(frames)
        return found

    def _sound_rows(self, frames: int) -> int:
        assert self.config.sound is not None
        return -(-(frames + 1) // self.config.sound.subsampling_factor)

    def _text(self, number: int) -> torch.Tensor:
        sizes, random = self._sizes(number), self._random(number, 1)
        ids = torch.randint(30, self.config.language.vocab_size, (self.length,), generator=random)
        ids[self._is_special(ids)] = 2
        at = 1
        merged = self.config.vision.merged_patches**2
        spans = [(VISION, height * width // merged) for height, width in sizes[VISION]]
        spans += [(SOUND, self._sound_rows(frames)) for frames in sizes[SOUND]]
        for modality, rows in spans:
            ids[at : at + rows] = self.config.special_ids()[modality]
            at += rows + 1
        return ids
