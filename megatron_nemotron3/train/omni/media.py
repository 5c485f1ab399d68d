"""Pictures, sounds and videos from files: what their headers say, and their contents as arrays.

Each is read as transformers' processors read it: a picture upright and in RGB, a sound as one channel at the
model's sampling rate (soundfile, soxr), the sampled frames of a video (PyAV). Files are local; nothing is
fetched. Importing this costs none of the libraries.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: Pixels of the largest picture that is decoded: Pillow's own limit. The model sees 3.4 million at most.
MOST_PIXELS = 89_478_485
#: Formats of pictures. Pillow knows others: for EPS it starts Ghostscript, whatever the file is called.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: ffmpeg's settings for videos: no playlists, which name other files.
_VIDEOS = {
    "format_whitelist": "mov,matroska,avi,mpegts,mpeg,ogg,asf,gif,wav",
    "protocol_whitelist": "file",
}
#: Values of the longest sound, all channels: an hour at 16 kHz, and 512 MiB while it is decoded.
MOST_VALUES = 1 << 26
#: Pixels of a video's sampled frames, 256 of 1080p, and of all that are decoded for them: 27 minutes of it.
MOST_SAMPLED, MOST_DECODED = 1 << 29, 100 * 10**9
#: Seconds of the shortest sound: two frames of a spectrogram, without which its variance is 0 / 0.
SHORTEST_SOUND = 0.02
#: Tag of a picture's orientation in EXIF, and its values for a quarter turn.
_ORIENTATION, _TURNED = 274, (5, 6, 7, 8)


class MediaError(ValueError):
    """A medium that cannot be used. The message names the file, the problem, and the conversation."""


def missing(problem: ImportError) -> str:
    """Message about a library that is not installed."""
    return f"{problem.name or problem} is not installed: pip install megatron-nemotron3[omni]"


@dataclass(frozen=True)
class VideoSize:
    """What is known of a video before it is decoded."""

    frames: int
    frames_per_second: float
    height: int
    width: int


def picture_size(path: str) -> tuple[int, int]:
    """Height and width in pixels, upright; nothing is decoded."""
    with _picture(path) as image:
        width, height = image.size
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (width, height) if turned else (height, width)


def load_picture(path: str) -> Any:
    """Read a picture: a PIL image in RGB, upright. Of several frames the first."""
    from PIL import ImageOps

    with _picture(path) as image:
        upright = ImageOps.exif_transpose(image)
        return upright.convert("RGB")


def sound_length(path: str, sampling_rate: int) -> int:
    """Number of samples at `sampling_rate`, in Hz; nothing is decoded."""
    with _named(path, "sound (WAV, FLAC, Ogg or MP3)"):
        length = _sound_length(path, sampling_rate)
    _long_enough(path, length, sampling_rate)
    return length


def load_sound(path: str, sampling_rate: int) -> Any:
    """Read a sound: [samples] float32 at `sampling_rate`, in Hz, the mean of its channels."""
    with _named(path, "sound (WAV, FLAC, Ogg or MP3)"):
        import numpy as np
        from transformers.audio_utils import load_audio

        _sound_length(path, sampling_rate)
        samples = load_audio(path, sampling_rate=sampling_rate, backend="soundfile")
        if not np.isfinite(samples).all():
            raise MediaError(f"{path}: the sound has samples that are not finite")
    _long_enough(path, len(samples), sampling_rate)
    return samples


def video_size(path: str) -> VideoSize:
    """Number and size of a video's frames; nothing is decoded."""
    with _video(path) as (container, stream):
        # Some containers (Matroska) do not store the number of frames: count the packets, still without
        # decoding.
        frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        if not frames or not stream.height or not stream.width:
            raise MediaError(f"{path}: a video without frames")
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise MediaError(f"{path}: a video without a frame rate")
        return VideoSize(int(frames), float(rate), stream.height, stream.width)


def load_video(path: str, indices: Sequence[int]) -> Any:
    """Read frames of a video: [frames, height, width, 3] uint8."""
    import numpy as np

    wanted, last = set(map(int, indices)), int(max(indices))
    frames = []
    with _video(path) as (container, stream):
        pixels = stream.height * stream.width
        for number, most in ((len(wanted), MOST_SAMPLED), (last + 1, MOST_DECODED)):
            if number * pixels > most:
                raise MediaError(
                    f"{path}: {number:,} frames of {stream.width:,} x {stream.height:,} pixels; at most "
                    f"{most:,} pixels are decoded: shorten it or scale it down"
                )
        from av.video.reformatter import VideoReformatter

        # One of its own, without threads: PyAV's is kept by the process, and hangs in a process forked later.
        convert = VideoReformatter()
        for number, frame in enumerate(container.decode(video=0)):
            if frame.width * frame.height > pixels:
                raise MediaError(f"{path}: frame {number:,} is larger than the header of the video says")
            if number in wanted:
                frames.append(convert.reformat(frame, format="rgb24", threads=1).to_ndarray())
            if number == last:
                break
    if len(frames) != len(indices):
        raise MediaError(f"{path}: only {len(frames)} of the {len(indices)} sampled frames can be decoded")
    return np.stack(frames)


def _sound_length(path: str, sampling_rate: int) -> int:
    """Number of samples at this rate, by the header, which also bounds what libsndfile decodes."""
    import soundfile

    header = soundfile.info(path)
    length = math.ceil(header.frames * sampling_rate / header.samplerate)
    if max(header.frames * header.channels, length) > MOST_VALUES:
        raise MediaError(
            f"{path}: a sound of {header.frames:,} x {header.channels} values, {length:,} at "
            f"{sampling_rate:,} Hz; at most {MOST_VALUES:,} are read: cut it, or lower its rate"
        )
    return length


@contextmanager
def _named(path: str, what: str) -> Iterator[None]:
    if not os.path.isfile(path):
        raise MediaError(f"{path}: there is no such file")
    try:
        yield
    except MediaError:
        raise
    except ImportError as problem:
        raise MediaError(f"{path}: {missing(problem)}") from None
    except Exception as problem:  # decoders raise what they like
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise MediaError(f"{path}: not a {what} that can be decoded: {reason[:200]}") from None


@contextmanager
def _picture(path: str) -> Iterator[Any]:
    with _named(path, "picture"):
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise MediaError(
                        f"{path}: a picture of {width:,} x {height:,} pixels; at most {MOST_PIXELS:,} are "
                        "decoded: scale it down"
                    )
                yield image


@contextmanager
def _video(path: str) -> Iterator[tuple[Any, Any]]:
    with _named(path, "video"):
        import av

        with av.open(path, options=_VIDEOS) as container:
            if not container.streams.video:
                raise MediaError(f"{path}: it has no video, only {len(container.streams)} other streams")
            yield container, container.streams.video[0]


def _long_enough(path: str, length: int, sampling_rate: int) -> None:
    if length < SHORTEST_SOUND * sampling_rate:
        what = f"of {length} samples at {sampling_rate} Hz" if length else "without samples"
        raise MediaError(f"{path}: a sound {what}; give at least {SHORTEST_SOUND * 1000:.0f} ms")
