"""Pictures, sounds and videos made here, for examples and tests: nothing is downloaded.

A word is drawn with Pillow's own font, turned, moved, scaled and on noise. A word is spoken by Debian's
espeak-ng in voices, speeds and pitches, or, without it, played as a tune of its letters. A video shows words
one after the other. The same seed gives the same file.

    draw("apple", "a.png", seed=1)
    speak("seven", "b.wav", seed=2)
    film(["red", "blue"], "c.mp4", seed=3)
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Samples of a second of a tune, in Hz.
RATE = 16000
#: Voices of espeak-ng.
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+f3", "en-gb+m3", "en-us+f5", "en-us+m7")


def picture(word: str, seed: int, size: tuple[int, int] = (128, 32)) -> Any:
    """A PIL image with a word on noise, of (width, height) pixels."""
    from PIL import Image, ImageDraw, ImageFont

    pick, (width, height) = random.Random(f"{word} {seed}"), size
    noise = np.random.default_rng(pick.getrandbits(32)).integers(0, 64, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    font = ImageFont.load_default(height * pick.uniform(0.6, 0.8))
    left, top, right, bottom = font.getbbox(word)
    scale = min(1.0, 0.95 * width / (right - left))
    if scale < 1:
        font = ImageFont.load_default(font.size * scale)
        left, top, right, bottom = font.getbbox(word)
    drawn = Image.new("L", size)
    at = (
        pick.uniform(0, width - (right - left)) - left,
        pick.uniform(0, max(0, height - (bottom - top))) - top,
    )
    ImageDraw.Draw(drawn).text(at, word, 255, font)
    drawn = drawn.rotate(pick.uniform(-4, 4), Image.Resampling.BILINEAR)
    color = tuple(pick.randrange(150, 256) for _ in range(3))
    image.paste(color, mask=drawn)
    return image


def spaced(word: str, seed: int, fonts: Sequence[str], sizes: range, cell: int = 32) -> Any:
    """A gray PIL image with a letter in each cell of as many pixels, all moved alike, on noise.

    Args:
        fonts: files of TrueType fonts, of which the seed chooses; sizes: in pixels.
    """
    from PIL import Image, ImageDraw, ImageFont

    pick = random.Random(f"{word} {seed}")
    font = ImageFont.truetype(pick.choice(fonts), pick.choice(sizes))
    right, down = pick.uniform(-3, 3), pick.uniform(-3, 3)
    image = Image.new("L", (cell * len(word), cell))
    for number, letter in enumerate(word):
        at = (cell * (number + 0.5) + right, 0.78 * cell + down)
        ImageDraw.Draw(image).text(at, letter, 255, font, anchor="ms")
    paper, ink = pick.uniform(150, 255), pick.uniform(0, 100)
    noise = np.random.default_rng(pick.getrandbits(32)).normal(0, 13, (cell, image.width))
    shades = paper + (ink - paper) * np.asarray(image) / 255 + noise
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8))


def draw(word: str, path: str | os.PathLike[str], seed: int, size: tuple[int, int] = (128, 32)) -> None:
    """Write `picture` to a file; its ending says in which format."""
    picture(word, seed, size).save(path)


def can_speak() -> bool:
    """Whether espeak-ng is installed."""
    return shutil.which("espeak-ng") is not None


def spoken(word: str, seed: int, voices: Sequence[str] = VOICES) -> tuple[Any, int]:
    """([samples] float32 in -1 … 1, samples per second) of a word by espeak-ng, else of its tune."""
    pick = random.Random(f"{word} {seed}")
    if not can_speak():
        return tune(word, seed), RATE
    import soundfile

    voice, speed, pitch = pick.choice(voices), pick.randrange(130, 220), pick.randrange(30, 70)
    line = ["espeak-ng", "--stdout", "-v", voice, "-s", str(speed), "-p", str(pitch), "--", word]
    made = subprocess.run(line, check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(made), dtype="float32")
    noise = np.random.default_rng(pick.getrandbits(32)).normal(0, 0.002, len(samples))
    return (samples + noise).astype(np.float32), int(rate)


def tune(word: str, seed: int) -> Any:
    """[samples] float32: a tone of 80 ms for each letter, at a speed and a loudness of the seed."""
    pick = random.Random(f"{word} {seed}")
    each = int(RATE * 0.08 * pick.uniform(0.9, 1.1))
    time = np.arange(each) / RATE
    shape = np.minimum(1, np.minimum(time, time[::-1]) * 200)
    tones = [np.sin(2 * np.pi * 200 * 2 ** (ord(letter) % 32 / 8) * time) * shape for letter in word]
    samples = np.concatenate(tones) * pick.uniform(0.3, 0.8)
    noise = np.random.default_rng(pick.getrandbits(32)).normal(0, 0.002, len(samples))
    return (samples + noise).astype(np.float32)


def speak(word: str, path: str | os.PathLike[str], seed: int) -> None:
    """Write `spoken` to a file; its ending says in which format."""
    import soundfile

    soundfile.write(os.fspath(path), *spoken(word, seed))


def film(
    words: Sequence[str],
    path: str | os.PathLike[str],
    seed: int,
    size: tuple[int, int] = (128, 64),
    *,
    rate: int = 4,
    frames: int = 4,
) -> None:
    """Write a video that shows each word for so many frames, at `rate` frames a second."""
    import av

    with av.open(os.fspath(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 2_000_000
        for number, word in enumerate(words):
            for _ in range(frames):
                frame = av.VideoFrame.from_image(picture(word, seed + number, size))
                container.mux(stream.encode(frame))
        container.mux(stream.encode())
