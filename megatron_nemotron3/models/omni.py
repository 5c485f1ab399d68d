"""Nemotron 3 Nano Omni and 3.5 Super VL: a language model with a vision encoder, and with a sound encoder.

    picture, frames --> RADIO (a ViT) --> 2 x 2 patches in one --> projector --+
                                                                               +--> language model
    sound --> mel spectrogram --> Parakeet (a Conformer) --------> projector --+

Encoders are data like the language model: their sizes are here, their tensors in `models.omni_tensors`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_nemotron3.models.catalog import NANO, SUPER
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.tiny import TINY_SUFFIX
from megatron_nemotron3.models.tiny import tiny as tiny_language

#: Megatron's argument (`--omni-encoders`) with the text of `OmniConfig.encoders_json`.
ARGUMENT = "omni_encoders"


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Sizes of a RADIO encoder. Fields are transformers' `RadioConfig`, by Megatron's names."""

    hidden_size: int = 1280
    num_layers: int = 32
    num_attention_heads: int = 16
    ffn_hidden_size: int = 5120
    #: Pixels of a side of a patch.
    patch_size: int = 16
    #: Pixels of the longest side for which positions are stored; others are interpolated.
    max_image_size: int = 2048
    #: Learned tokens before the patches: class tokens and registers.
    class_tokens: int = 3
    registers: int = 7
    #: Frames of a video in one patch.
    temporal_patch_size: int = 2
    #: Patches of a side that the pixel shuffle joins into one position of the language model.
    merged_patches: int = 2
    layernorm_epsilon: float = 1e-6
    #: A LayerNorm after the last layer: released models have it where the language model has MTP.
    final_layernorm: bool = False

    @property
    def merged_size(self) -> int:
        """Width of the projector's input."""
        return self.hidden_size * self.merged_patches**2


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Sizes of a Parakeet encoder. Fields have the names of transformers' `ParakeetEncoderConfig`."""

    hidden_size: int = 1024
    num_layers: int = 24
    num_attention_heads: int = 8
    ffn_hidden_size: int = 4096
    #: Bands of the mel spectrogram.
    mel_bins: int = 128
    #: Frames of the spectrogram in one position of the language model: a power of 2.
    subsampling_factor: int = 8
    subsampling_channels: int = 256
    conv_kernel_size: int = 9


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class OmniConfig:
    """A language model with encoders.

    Raises:
        ValueError: a size is not positive, or sizes do not fit each other; the message has the numbers.
    """

    name: str
    title: str
    language: Nemotron3Config
    vision: Vision
    #: None: a model without sound.
    sound: Sound | None
    #: Width inside the projectors.
    vision_projector_size: int
    sound_projector_size: int
    #: Ids that stand for one row of an encoder each; pictures and videos share one.
    image_token_id: int
    sound_token_id: int | None
    published_total: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        self._check_encoder("vision", self.vision, self.vision_projector_size)
        self._check_vision(self.vision)
        if self.sound:
            self._check_encoder("sound", self.sound, self.sound_projector_size)
            self._check_sound(self.sound)
        ids = {"image_token_id": self.image_token_id}
        if (self.sound is None) != (self.sound_token_id is None):
            raise ValueError(
                f"{self.name}: sound={'a Sound' if self.sound else None} and "
                f"sound_token_id={self.sound_token_id}: give both, or None twice"
            )
        if self.sound_token_id is not None:
            ids["sound_token_id"] = self.sound_token_id
        for field, token in ids.items():
            if not _is_count(token) or not 0 <= token < self.language.vocab_size:
                raise ValueError(
                    f"{self.name}: {field}={token!r}: give one of the {self.language.vocab_size:,} ids of "
                    "the vocabulary"
                )
        if len(set(ids.values())) < len(ids):
            raise ValueError(
                f"{self.name}: image_token_id and sound_token_id are both {self.image_token_id}: give two ids"
            )

    def _check_encoder(self, name: str, encoder: Vision | Sound, projector_size: int) -> None:
        for field, size in vars(encoder).items():
            if field not in ("layernorm_epsilon", "final_layernorm") and (not _is_count(size) or size < 1):
                raise ValueError(f"{self.name}: {field}={size!r} of {name}: give a number from 1")
        if encoder.hidden_size % encoder.num_attention_heads:
            raise ValueError(
                f"{self.name}: the width {encoder.hidden_size} of the {name} encoder is no multiple of its "
                f"{encoder.num_attention_heads} heads"
            )
        if not _is_count(projector_size) or projector_size < 1:
            raise ValueError(f"{self.name}: {name}_projector_size={projector_size!r}: give a number from 1")

    def _check_vision(self, vision: Vision) -> None:
        if vision.max_image_size % vision.patch_size:
            raise ValueError(
                f"{self.name}: max_image_size={vision.max_image_size} is no multiple of "
                f"patch_size={vision.patch_size}"
            )
        if vision.temporal_patch_size < 2:
            raise ValueError(f"{self.name}: temporal_patch_size={vision.temporal_patch_size}: give 2 or more")
        # transformers' configuration has the ratio, and rounds the product down.
        if int(vision.hidden_size * (vision.ffn_hidden_size / vision.hidden_size)) != vision.ffn_hidden_size:
            raise ValueError(
                f"{self.name}: ffn_hidden_size={vision.ffn_hidden_size} of vision is no ratio of its width "
                f"{vision.hidden_size} that transformers' mlp_ratio can state: give a multiple"
            )

    def _check_sound(self, sound: Sound) -> None:
        factor = sound.subsampling_factor
        if factor < 2 or factor & (factor - 1):
            raise ValueError(f"{self.name}: subsampling_factor={factor}: give a power of 2")
        if sound.mel_bins % factor:
            raise ValueError(
                f"{self.name}: mel_bins={sound.mel_bins} is no multiple of subsampling_factor={factor}"
            )
        if sound.conv_kernel_size % 2 == 0:
            raise ValueError(f"{self.name}: conv_kernel_size={sound.conv_kernel_size}: give an odd number")

    def but(self, **changes: Any) -> OmniConfig:
        """Return the model with other fields."""
        return replace(self, **changes)

    def special_ids(self) -> dict[str, int]:
        """Return encoder -> the id that stands for one of its rows, "vision" first."""
        sound = {} if self.sound is None or self.sound_token_id is None else {"sound": self.sound_token_id}
        return {"vision": self.image_token_id} | sound

    def encoders_json(self) -> str:
        """Return everything but the language model as one line of JSON, for arguments and checkpoints."""
        fields = asdict(self)
        for name in ("name", "title", "language", "published_total", "source"):
            del fields[name]
        if not self.vision.final_layernorm:  # runs that began before there was one go on with the same line
            del fields["vision"]["final_layernorm"]
        return json.dumps(fields)


def with_encoders(language: Nemotron3Config, encoders: str) -> OmniConfig:
    """Return the model of `language` and of what `OmniConfig.encoders_json` wrote."""
    try:
        fields = json.loads(encoders)
        sound = fields.pop("sound")
        return OmniConfig(
            name=f"{language.name}-omni",
            title=f"{language.title} with encoders",
            language=language,
            vision=Vision(**fields.pop("vision")),
            sound=sound and Sound(**sound),
            **fields,
        )
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as problem:
        raise ValueError(f"encoders {encoders[:60]!r}: not what encoders_json wrote ({problem})") from problem


def sizes(model: OmniConfig) -> dict[str, dict[str, Any]]:
    """Return the sizes of "vision", "sound" if the model has it, and the "token_ids"."""
    found = {
        "vision": vars(model.vision) | {"projector_size": model.vision_projector_size},
        "token_ids": {"image": model.image_token_id},
    }
    if model.sound:
        found["sound"] = vars(model.sound) | {"projector_size": model.sound_projector_size}
        found["token_ids"]["sound"] = model.sound_token_id
    return found


# Biases: none in Parakeet, as NemotronH_Omni's config takes it.
NANO_OMNI = OmniConfig(
    name="nano-omni",
    title="Nemotron 3 Nano Omni 30B-A3B",
    language=NANO,
    vision=Vision(),
    sound=Sound(),
    vision_projector_size=20480,
    sound_projector_size=4096,
    image_token_id=18,
    sound_token_id=27,
    published_total="33,015,546,816 parameters without expert biases; 7,349 tensors",
    source=(
        "transformers 5.23 models/nemotron_h_omni, radio, parakeet; Megatron-Bridge 2026-08-22 "
        "models/nemotron_omni, recipes/nemotron_omni and its verification card of "
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16 (total, tensors)"
    ),
)
SUPER_VL = OmniConfig(
    name="super-vl",
    title="Nemotron 3.5 Super VL 120B-A12B",
    language=SUPER,
    vision=Vision(final_layernorm=True),
    sound=None,
    vision_projector_size=20480,
    sound_projector_size=0,
    image_token_id=18,
    sound_token_id=None,
    published_total="43,079 tensors, 248,906,833,960 bytes",
    source=(
        "transformers 5.24 models/nemotron_h_omni, radio; Megatron-Bridge 0.7 models/nemotron_omni (norm, "
        "MTP, token id) and its verification card of nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16 "
        "(tensors, bytes); THUDM/slime #2379 (Super's language model); ollama nemotron-3.5-super (projector)"
    ),
)

_ALL = {model.name: model for model in (NANO_OMNI, SUPER_VL)}


def omni_names() -> tuple[str, ...]:
    """Return the names of the models with encoders."""
    return tuple(_ALL)


def get_omni(name: str) -> OmniConfig | None:
    """Return the model with encoders of that name, its tiny form for "<name>-tiny", or None."""
    base = name.strip().lower()
    model = _ALL.get(base.removesuffix(TINY_SUFFIX))
    return tiny(model) if model and base.endswith(TINY_SUFFIX) else model


def tiny(config: OmniConfig) -> OmniConfig:
    """Return `config` shrunk for two CPU cores: two layers an encoder, pictures of 128 pixels.

    The sound encoder keeps its subsampling, the vision encoder its patches, pixel shuffle and video.
    """
    return config.but(
        name=config.name + TINY_SUFFIX,
        title=f"{config.title}, tiny",
        language=tiny_language(config.language),
        vision=replace(
            config.vision,
            hidden_size=64,
            num_layers=2,
            num_attention_heads=4,
            ffn_hidden_size=256,
            max_image_size=128,
        ),
        sound=config.sound
        and replace(
            config.sound,
            hidden_size=64,
            num_layers=2,
            num_attention_heads=4,
            ffn_hidden_size=256,
            mel_bins=32,
            subsampling_channels=16,
        ),
        vision_projector_size=512,
        sound_projector_size=256 if config.sound else 0,
        published_total=None,
        source=f"{config.name}, shrunk by megatron_nemotron3.models.omni",
    )
