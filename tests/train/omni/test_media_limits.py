"""A small file whose header states much is refused before it is decoded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_nemotron3.train.omni import media
from tests.support.omni_data import require_media, write_media

require_media()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("media")
    write_media(place)
    return place


def test_a_long_sound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence packs to a few bytes: 5 GB of it are 1.3 MB of FLAC."""
    import soundfile

    for name in ("short.flac", "long.wav"):
        path = str(folder / name)
        header = soundfile.info(path)
        length = math.ceil(header.frames * 16000 / header.samplerate)
        values = max(header.frames * header.channels, length)
        monkeypatch.setattr(media, "MOST_VALUES", values)
        assert media.sound_length(path, 16000) == length == len(media.load_sound(path, 16000))
        monkeypatch.setattr(media, "MOST_VALUES", values - 1)
        said = (
            f"{header.frames:,} x {header.channels} values, {length:,} at 16,000 Hz; at most {values - 1:,}"
        )
        for read in (media.sound_length, media.load_sound):
            with pytest.raises(media.MediaError, match=said):
                read(path, 16000)


def test_a_sound_that_grows(tmp_path: Path) -> None:
    """At 1 Hz in its header, 20 KB of samples become 640 MB at the rate of the model."""
    import numpy as np
    import soundfile

    path = str(tmp_path / "slow.wav")
    soundfile.write(path, np.zeros(10_000), 1, subtype="PCM_16")
    for read in (media.sound_length, media.load_sound):
        with pytest.raises(media.MediaError, match="160,000,000 at 16,000 Hz"):
            read(path, 16000)


@pytest.mark.parametrize("name", ["even.mp4", "odd.mkv"])
@pytest.mark.parametrize(("limit", "number"), [("MOST_SAMPLED", 2), ("MOST_DECODED", 5)])
def test_large_frames(
    name: str, limit: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames 0 and 4: two are kept, five are decoded."""
    path = str(folder / name)
    size = media.video_size(path)
    pixels = number * size.height * size.width
    monkeypatch.setattr(media, limit, pixels)
    assert media.load_video(path, [0, 4]).shape == (2, size.height, size.width, 3)
    monkeypatch.setattr(media, limit, pixels - 1)
    with pytest.raises(media.MediaError, match=f"{number} frames of .* pixels; at most"):
        media.load_video(path, [0, 4])
