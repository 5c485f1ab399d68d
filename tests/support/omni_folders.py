"""Folders of a tiny Omni model that transformers wrote, with a processor, and files of media."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megatron_nemotron3.checkpoints.convert.omni_config import omni_json
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.train.omni.processor import make_processor, omni_tokenizer
from tests.support.engines import tensors
from tests.support.model_mapping import stack_experts, unclamped
from tests.support.omni_oracle import transformers_omni, without_mtp

TEXT = [f"line {i}: what is the word, and who says it? {i * 7 % 23} or none" for i in range(300)]
#: Tokens of the tokenizer: more than 256 bytes, 30 special ones, and some merges.
TOKENS = 400


@dataclass(frozen=True)
class OmniFolder:
    """A Hugging Face folder, its model and processor in transformers, and media of each kind."""

    folder: Path
    model: Any
    processor: Any
    #: Two of each, of different sizes.
    images: list[Path]
    sounds: list[Path]
    videos: list[Path]


def tiny_omni(name: str = "nano-omni") -> OmniConfig:
    """The tiny model with as many tokens as the tokenizer, and room for a video."""
    config = get_omni(f"{name}-tiny")
    assert config is not None
    return config.but(language=config.language.but(vocab_size=TOKENS, max_position_embeddings=512))


def oracle(config: OmniConfig, seed: int) -> Any:
    """transformers' model with random weights that neither vanish nor explode from layer to layer."""
    model = transformers_omni(config)
    model.config.text_config.time_step_limit = (0.0, math.inf)
    unclamped(model)
    model.language_model.load_state_dict(
        stack_experts(tensors(without_mtp(config).language, seed)), strict=True
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("language_model") or "layer_scale" in name:  # stored models have scales of 1
                continue
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else p + 0.2 * noise)
    return model


def make(folder: Path, seed: int = 5, name: str = "nano-omni") -> OmniFolder:
    """Write the folder. transformers saves no MTP: its tensors are put beside its own."""
    config = tiny_omni(name)
    model, hf = oracle(config, seed), folder / "hf"
    model.save_pretrained(hf)
    if config.language.has_mtp:
        stored = load_file(hf / "model.safetensors")
        own = {f"language_model.{name}": value for name, value in tensors(config.language, seed).items()}
        save_file(own | stored, hf / "model.safetensors", {"format": "pt"})
        read = json.loads((hf / "config.json").read_text())
        read["text_config"] = omni_json(config, dtype="float32")["text_config"]
        (hf / "config.json").write_text(json.dumps(read))
    processor = make_processor(config, omni_tokenizer(TEXT, TOKENS, folder / "tokenizer", config))
    processor.save_pretrained(hf)
    media = folder / "media"
    media.mkdir()
    images = [media / "a.png", media / "b.jpg"]
    sounds = [media / "a.wav", media / "b.flac"]
    videos = [media / "a.mp4", media / "b.mp4"]
    for number, path in enumerate(images):
        write_picture(path, (90 + 50 * number, 60), number)
    for number, path in enumerate(sounds):
        write_sound(path, 0.4 + 0.3 * number, 16000 - 4000 * number)
    for number, path in enumerate(videos):
        write_video(path, 5 + 3 * number, (96, 64))
    return OmniFolder(hf, model, processor, images, sounds, videos)


def write_picture(path: Path, size: tuple[int, int], seed: int) -> None:
    """A picture of random colors."""
    from PIL import Image

    width, height = size
    colors = np.random.default_rng(seed).integers(0, 256, (height // 10, width // 10, 3), dtype=np.uint8)
    Image.fromarray(colors).resize(size, Image.Resampling.NEAREST).save(path)


def write_sound(path: Path, seconds: float, rate: int) -> None:
    """A tone that rises."""
    import soundfile

    at = np.arange(int(seconds * rate)) / rate
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * (300 + 400 * at) * at), rate)


def write_video(path: Path, frames: int, size: tuple[int, int]) -> None:
    """A bar that moves, at 2 frames a second."""
    import av

    width, height = size
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            shown = np.full((height, width, 3), 40, np.uint8)
            shown[:, 10 * number : 10 * number + 20] = (220, 40 * number % 256, 90)
            for packet in stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
