"""Small checkpoints of models with encoders: transformers' folders, and Megatron's saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_nemotron3 import cli
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of
from megatron_nemotron3.models.omni import ARGUMENT, OmniConfig
from megatron_nemotron3.train.omni.model import LANGUAGE, SOUND, VISION, build
from tests.support.model_mapping import unclamped


def nemotron3(*words: object) -> int:
    """Run the command; its exit status."""
    return cli.main([str(word) for word in words])


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, as the safetensors package reads it."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def rewritten(source: Path, folder: Path, change: Any, **config: Any) -> Path:
    """A copy of a Hugging Face folder with changed tensors and other keys in config.json."""
    folder.mkdir()
    values = tensors(source)
    change(values)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    data = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def constants(config: OmniConfig) -> dict[str, Tensor]:
    """The release's constants of preprocessing, in small."""
    assert config.sound is not None
    vision, sound = "vision_model.radio_model.input_conditioner.", "sound_encoder.encoder.feature_extractor."
    return {
        vision + "norm_mean": torch.tensor([0.48, 0.45, 0.40]).view(3, 1, 1).bfloat16(),
        vision + "norm_std": torch.tensor([0.26, 0.26, 0.27]).view(3, 1, 1).bfloat16(),
        sound + "featurizer.fb": torch.rand(1, config.sound.mel_bins, 257),
        sound + "featurizer.window": torch.hann_window(400),
    }


def is_scale(name: str) -> bool:
    """Whether transformers makes a tensor itself: a scale of RADIO's layers, or the summary's places."""
    return "layer_scale" in name or name.endswith("summary_idxs")


def renamed(source: Path, folder: Path, names: Callable[[str], str]) -> Path:
    """A copy of a torch_dist checkpoint with other keys."""
    from dataclasses import replace

    from megatron_nemotron3.checkpoints.metadata import read_metadata
    from tests.support.checkpoint_writer import index_bytes

    shutil.copytree(source, folder)
    index = read_metadata(source)
    tensors = {names(name): replace(tensor) for name, tensor in index.tensors.items()}
    (folder / ".metadata").write_bytes(index_bytes(tensors, index.objects))
    return folder


def built(config: OmniConfig, ep: int = 1, tp: int = 1, dp: int = 1) -> Any:
    """Our model with random weights, every module in the same layout of the whole world."""
    one = Layout.of(tp=tp, dp=dp)
    model, _ = build(config, {LANGUAGE: one, VISION: one, SOUND: one}, ep=ep)
    return model.eval()


def save(model: Any, config: OmniConfig, folder: Path) -> None:
    """Save a model as Megatron does, with arguments that say what it is."""
    from megatron.core import dist_checkpointing

    args = args_of(config.language, padded_vocab_size=config.language.vocab_size, dtype="float32")
    setattr(args, ARGUMENT, config.encoders_json())
    state = {**model.sharded_state_dict(), "args": args, "iteration": 3, "checkpoint_version": 3.0}
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(folder))


def load(model: Any, folder: Path) -> Any:
    """Load a checkpoint as Megatron does."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(model.sharded_state_dict(), str(folder))
    model.load_state_dict({name: value for name, value in state.items() if "." in name}, strict=True)
    return model


def logits(model: Any, media: Any) -> Tensor:
    """Logits of our model for a medium."""
    positions = torch.arange(media.ids.shape[1])[None].expand_as(media.ids)
    with torch.no_grad():
        found, _ = model(input_ids=media.ids, position_ids=positions, modality_inputs=media.ours())
    assert isinstance(found, Tensor)
    return found


def from_transformers(folder: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' model of a folder, and what it says of the tensors."""
    from transformers import AutoModelForImageTextToText

    model, said = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    model.config.text_config._experts_implementation = "eager"
    for module in unclamped(model).modules():
        if hasattr(module, "compute_default_relative_positional_parameters"):
            # Not stored; inside a process group, `from_pretrained` of 5.23 leaves arbitrary numbers in it.
            module.inv_freq.copy_(module.compute_default_relative_positional_parameters(module.config))
    return model.eval(), said
