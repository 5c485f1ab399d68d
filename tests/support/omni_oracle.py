"""Our Omni model and transformers' on the same random weights and media, FP32 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.omni.encoders import parakeet_config, radio_config
from megatron_nemotron3.train.omni.model import LANGUAGE, SOUND, VISION, build
from tests.support import parity
from tests.support.model_mapping import randomize, to_transformers, transformers_config, unclamped


def video_rows(model: Any, frames: Tensor) -> list[Tensor]:
    """Rows [n, d] that transformers makes of a video; until 5.23 they are [groups, rows, d]."""
    made = model.get_video_features(frames).pooler_output
    return list(made) if isinstance(made, tuple) else [made.flatten(0, 1)]


@dataclass
class Media:
    """What sequences of token ids [b, s] refer to, by sample, then by position.

    Videos have sizes of their own. `order`: place of each picture, then of each video, as of `VisionEncoder`.
    """

    ids: Tensor
    pixel_values: Tensor | None = None
    image_grid_hw: Tensor | None = None
    videos: list[Tensor] = field(default_factory=list)
    order: Tensor | None = None
    input_features: Tensor | None = None
    input_features_mask: Tensor | None = None
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.labels = torch.randint(30, 2048, self.ids.shape, generator=torch.Generator().manual_seed(9))

    def theirs(self, model: Any) -> dict[str, Any]:
        """Arguments of transformers' model.

        Its own call cannot take what is here: of videos it joins [groups, rows, d] to the rows [n, d] of
        pictures, and it looks for as many positions as pictures have rows, though videos have the same id.
        So the rows of its `get_image_features` and `get_video_features` go in by `mm_encoder_outputs`, which
        is an argument for rows that are known already.
        """
        given: dict[str, Any] = {
            "input_features": self.input_features,
            "input_features_mask": self.input_features_mask,
        }
        if not self.videos:
            given |= {"pixel_values": self.pixel_values, "image_grid_hw": self.image_grid_hw}
        else:
            rows: list[Tensor] = []
            if self.pixel_values is not None:
                rows += model.get_image_features(self.pixel_values, self.image_grid_hw).pooler_output
            for video in self.videos:
                rows += video_rows(model, video)
            places = range(len(rows)) if self.order is None else self.order.tolist()
            ordered = tuple(
                row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])
            )
            given["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=ordered)}
        return {"input_ids": self.ids} | {name: value for name, value in given.items() if value is not None}

    def ours(self) -> dict[str, dict[str, Any]]:
        """`modality_inputs` of our model."""
        made: dict[str, dict[str, Any]] = {}
        vision: dict[str, Any] = {
            "pixel_values": self.pixel_values,
            "image_grid_hw": self.image_grid_hw,
            "pixel_values_videos": self.videos or None,
            "order": self.order,
        }
        if any(value is not None for value in vision.values()):
            made[VISION] = {"radio": vision}
        if self.input_features is not None:
            mask = self.input_features_mask
            made[SOUND] = {"parakeet": {"input_features": self.input_features, "input_features_mask": mask}}
        return made


def transformers_omni_config(config: OmniConfig) -> Any:
    """transformers' configuration of `config`."""
    from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3_Config,
    )

    audio = None
    if config.sound is not None:
        audio = parakeet_config(config.sound).to_dict()
        audio |= {"projection_hidden_size": config.sound_projector_size, "projection_bias": False}
    # All that transformers takes of MTP: whether the vision encoder ends with a norm.
    mtp = {"num_nextn_predict_layers": int(config.vision.final_layernorm)}
    return NemotronH_Omni_Reasoning_V3_Config(
        text_config=transformers_config(config.language).to_dict() | mtp,
        vision_config=radio_config(config.vision).to_dict(),
        audio_config=audio,
        vision_hidden_size=config.vision.hidden_size,
        projector_hidden_size=config.vision_projector_size,
        image_token_id=config.image_token_id,
        audio_token_id=config.sound_token_id,
    )


def transformers_omni(config: OmniConfig) -> Any:
    """transformers' model of `config`, initialized at random."""
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

    given = transformers_omni_config(config)
    given._attn_implementation = "eager"
    given.text_config._experts_implementation = "eager"
    return NemotronH_Omni_Reasoning_V3(given).eval()


def pair(config: OmniConfig, seed: int) -> tuple[Any, Any]:
    """(our model without MTP, transformers' with its weights), inside `world_of_one`."""
    config = without_mtp(config)
    ours, _ = build(config, dict.fromkeys((LANGUAGE, *config.special_ids()), Layout.of()))
    ours.eval()
    randomize(ours.language_model, seed)
    generator = torch.Generator().manual_seed(seed)
    encoders = ours.modality_submodules
    with torch.no_grad():
        for p in encoders.parameters():
            noise = 0.2 * torch.randn(p.shape, generator=generator)
            p.copy_(noise if p.dim() > 1 else p + noise)
    theirs = transformers_omni(config)
    language = to_transformers(parity.weights_of(ours.language_model), config.language)
    theirs.language_model.load_state_dict(language, strict=True)
    unclamped(theirs)
    radio = encoders[VISION].encoders["radio"].state_dict()
    if config.vision.final_layernorm:
        norm = {name: radio.pop(f"final_layernorm.{name}") for name in ("weight", "bias")}
        theirs.vision_final_layernorm.load_state_dict(norm)
    left = theirs.vision_model.load_state_dict(radio, strict=False)
    assert not left.unexpected_keys and all(
        "layer_scale" in k or k == "summary_idxs" for k in left.missing_keys
    )
    theirs.multi_modal_projector.load_state_dict(encoders[VISION].input_projections[0].state_dict())
    if config.sound is not None:
        theirs.audio_tower.load_state_dict(encoders[SOUND].encoders["parakeet"].state_dict())
        theirs.embed_audio.load_state_dict(encoders[SOUND].input_projections[0].state_dict())
    return ours, theirs


def without_mtp(config: OmniConfig) -> OmniConfig:
    """The model whose language model has no MTP; its vision encoder is the same."""
    return config.but(language=config.language.but(mtp_pattern=None, mtp_num_layers=0))


def parts(ours: Any) -> dict[str, Any]:
    """Beginning of transformers' names -> our module with the rest of the names."""
    vision = ours.modality_submodules[VISION]
    radio = vision.encoders["radio"]
    found = {"vision_model": radio, "multi_modal_projector": vision.input_projections[0]}
    if radio.sizes.final_layernorm:
        found["vision_final_layernorm"] = radio.final_layernorm
    if SOUND in ours.modality_submodules:
        sound = ours.modality_submodules[SOUND]
        found |= {"audio_tower": sound.encoders["parakeet"], "embed_audio": sound.input_projections[0]}
    return found
