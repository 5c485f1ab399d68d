"""A tiny Omni processor and media that were made here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_nemotron3.models.omni import OmniConfig, get_omni

EXAMPLES = Path(__file__).parents[2] / "examples"


def require_media() -> None:
    """Skip a module whose libraries are not installed."""
    for name in ("torchvision", "av", "soundfile", "soxr", "PIL"):
        pytest.importorskip(name, reason=f"needs {name} (extra omni)")


def maker() -> ModuleType:
    """examples/omni_media.py."""
    spec = importlib.util.spec_from_file_location("omni_media", EXAMPLES / "omni_media.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_omni() -> OmniConfig:
    """The tiny model."""
    found = get_omni("nano-omni-tiny")
    assert found is not None
    return found


def tiny_processor(folder: Path) -> Any:
    """Its processor with a tokenizer of few tokens, which is saved in `folder`."""
    from megatron_nemotron3.train.omni.processor import make_processor, omni_tokenizer

    texts = ["user assistant what is it hello apples and pears one two three Frame sampled at seconds"] * 50
    config = tiny_omni()
    return make_processor(config, omni_tokenizer(texts, 400, folder, config))


def write_media(folder: Path) -> None:
    """wide.png, tall.jpg, turned.jpg (EXIF), long.wav (22 kHz), short.flac (stereo), even.mp4, odd.mkv."""
    import numpy as np
    import soundfile
    from PIL import Image

    made = maker()
    made.draw("apple", folder / "wide.png", 1)
    made.draw("pear", folder / "tall.jpg", 2, (70, 110))
    exif = Image.Exif()
    exif[274] = 6
    made.picture("plum", 3, (150, 60)).save(folder / "turned.jpg", exif=exif)
    soundfile.write(folder / "long.wav", np.repeat(made.tune("seven", 1), 2), 22050)
    one = made.tune("two", 2)
    soundfile.write(folder / "short.flac", np.stack([one, one[::-1]], 1), 16000)
    made.film(["red", "blue"], folder / "even.mp4", 1, rate=4, frames=4)
    made.film(["up", "down", "left"], folder / "odd.mkv", 2, (64, 96), rate=5, frames=6)


def part(kind: str, path: str) -> dict[str, str]:
    """A part of a message."""
    return {"type": kind, "path": path}


def say(role: str, *content: Any) -> dict[str, Any]:
    """A message; texts may be given as such."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return {"role": role, "content": parts}


def sample(
    messages: list[dict[str, Any]],
    processor: Any,
    config: OmniConfig,
    *,
    folder: str | os.PathLike[str] = "",
    prompt: bool = False,
    place: str = "the conversation",
) -> dict[str, Any]:
    """Make the batch of one conversation, a keyword for each argument of `BoundaryMimoModel.forward`."""
    import torch

    from megatron_nemotron3.train.data import Conversation
    from megatron_nemotron3.train.omni import OmniEncoder

    encoder = OmniEncoder(processor, config, folder)
    encoded = encoder.encode(Conversation(messages, None, place), prompt)
    ids = torch.tensor([encoded.ids])
    batch: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": torch.arange(ids.shape[1])[None],
        "modality_inputs": encoder.decode(encoded.media, place),
    }
    if not prompt:
        batch["labels"] = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
        batch["loss_mask"] = torch.tensor([[*encoded.trained[1:], False]]).float()
    return batch
