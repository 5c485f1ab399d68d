"""Convert config.json of a Nano Omni or Super VL folder to `OmniConfig` and back.

Two dialects are read. transformers 5.23 writes `nemotron_h_omni`; released folders have older names for
some keys, and describe RADIO by the arguments it was trained with:

    nemotron_h_omni      image_token_id        audio_token_id          text_config  audio_config
    released             img_context_token_id  sound_context_token_id  llm_config   sound_config

A size that RADIO's part does not state is transformers' default, as transformers takes it. Values that our
encoders do not have are refused like those of the language model (`config_json`), and so are unknown keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.config_keys import named_errors, positive_number, stated
from megatron_nemotron3.common.files import printable
from megatron_nemotron3.models import Nemotron3Config, identify, named
from megatron_nemotron3.models.omni import OmniConfig, Sound, Vision, get_omni, omni_names
from megatron_nemotron3.models.tiny import TINY_SUFFIX

MODEL_TYPE, ARCHITECTURE = "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3"
#: Model types that are read, the released one last.
MODEL_TYPES = (MODEL_TYPE, "NemotronH_Nano_Omni_Reasoning_V3")
#: Parts of the file, with the released name.
TEXT, VISION, SOUND = ("text_config", "llm_config"), ("vision_config",), ("audio_config", "sound_config")
_IMAGE_ID = ("image_token_id", "img_context_token_id")
_SOUND_ID = ("audio_token_id", "sound_context_token_id")
_WIDTH = ("vision_hidden_size", "vit_hidden_size")
_PROJECTOR, _RATIO, _FRAMES = "projector_hidden_size", "downsample_ratio", "video_temporal_patch_size"
#: Key of RADIO and Parakeet -> field of `Vision` and `Sound`.
_VISION = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "patch_size": "patch_size",
    "max_img_size": "max_image_size",
    "num_cls_tokens": "class_tokens",
    "num_registers": "registers",
    _FRAMES: "temporal_patch_size",
    "layer_norm_eps": "layernorm_epsilon",
}
_SOUND = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "num_mel_bins": "mel_bins",
    "subsampling_factor": "subsampling_factor",
    "subsampling_conv_channels": "subsampling_channels",
    "conv_kernel_size": "conv_kernel_size",
}
_SOUND_PROJECTOR, _MLP_RATIO = "projection_hidden_size", "mlp_ratio"
#: Keys with the only value that our model has.
_FIXED: dict[str, Any] = {"ps_version": "v2"}
_VISION_FIXED: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "layerscale_value": 1.0,
    "num_channels": 3,
    "qkv_bias": True,
    "summary_idxs": [0, 1],
    "use_swiglu_ffn": False,
    "separate_video_embedder": True,
    "feature_normalizer_config": None,
    "inter_feature_normalizer_config": None,
    "vitdet_window_size": None,
}
_SOUND_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "convolution_bias": False,
    "hidden_act": "silu",
    "projection_bias": False,
    "scale_input": False,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
}
#: Written besides the sizes.
# fmt: off
_VISION_WRITTEN = (
    "hidden_act", "layerscale_value", "num_channels", "qkv_bias", "summary_idxs", "use_swiglu_ffn",
)
# fmt: on
#: Keys of files and libraries, preprocessing, tokens as text, initialization and dropout.
_LIBRARY = frozenset(
    (
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("model_type", "initializer_range", "attn_implementation", "_attn_implementation", "return_dict"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("problem_type", "id2label", "label2id", "_commit_hash"),
    )
)
_IGNORED = _LIBRARY | frozenset(
    (
        *("force_image_size", "patch_size", "use_thumbnail", "template", "image_tag_type", "norm_mean"),
        *("norm_std", "max_sequence_length", "img_context_token", "img_start_token", "img_end_token"),
        *("video_context_token", "video_context_token_id", "video_token_id", "sound_context_token"),
        *("video_pruning_rate", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("min_num_patches", "max_num_patches", "max_num_tiles", "layers_block_type", "is_composition"),
        *("img_start_token_id", "img_end_token_id", "sound_start_token", "sound_end_token", "use_cache"),
    )
)
_VISION_IGNORED = _LIBRARY | frozenset(
    (
        *("image_size", "patch_dim", "video_patch_dim", "norm_mean", "norm_std", "use_flash_attn"),
        *("version", "max_resolution", "preferred_resolution", "adaptor_names", "adaptor_configs"),
        *("min_num_patches", "max_num_patches", "video_target_num_patches", "video_maintain_aspect_ratio"),
    )
)
_SOUND_IGNORED = _LIBRARY | frozenset(
    (
        *("activation_dropout", "attention_dropout", "dropout", "dropout_positions", "layerdrop"),
        *("feat_in", "sampling_rate", "max_position_embeddings"),
    )
)
#: RADIO's own arguments: its ViT, and the field of the longest side; the others are of its training.
_ARGS, _VIT, _LONGEST = "args", "model", "cpe_max_size"
_VITS = ("vit_huge_patch16_224",)


def is_omni(data: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with encoders that `omni_config` reads."""
    return data.get("model_type") in MODEL_TYPES


def part(data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return a part of the file under any of its names; None if there is none."""
    value = stated(data, names)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{names[0]} is a {type(value).__name__}, expected an object")
    return value


def text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the language model in a config.json, also in that of a model with encoders."""
    if not is_omni(data):
        return data
    if (found := part(data, TEXT)) is None:
        raise ValueError(f"config.json has no {TEXT[0]}")
    return found


def omni_config(
    data: Mapping[str, Any], *, name: str = "model", base: Nemotron3Config | None = None
) -> OmniConfig:
    """Return the model that the config.json of an Omni folder describes."""
    if not is_omni(data):
        raise ValueError(
            f"{name}: config.json has model_type={data.get('model_type')!r:.60}: not a Nemotron Omni model, "
            f"which has {' or '.join(MODEL_TYPES)}"
        )
    with named_errors(name):
        text, vision, sound = text_part(data), *(part(data, names) for names in (VISION, SOUND))
        if vision is None:
            raise ValueError(f"config.json has no {VISION[0]}")
        sizes = (*TEXT, *VISION, *SOUND, *_IMAGE_ID, *_SOUND_ID, *_WIDTH, _PROJECTOR, _RATIO, _FRAMES)
        _check("", data, sizes, _FIXED, _IGNORED)
        encoders: dict[str, Any] = {
            "vision": _vision(data, vision),
            "vision_projector_size": positive_number(data, (_PROJECTOR,)),
            "image_token_id": positive_number(data, _IMAGE_ID),
            **{"sound": None, "sound_projector_size": 0, "sound_token_id": None},
        }
        if sound is not None:
            encoders["sound"], encoders["sound_projector_size"] = _sound(sound)
            encoders["sound_token_id"] = positive_number(data, _SOUND_ID)
    language = config_json.read(text, name=f"{name}: {TEXT[0]}", base=base)
    # No key says it: with MTP Megatron built the norm, and so does transformers.
    encoders["vision"] = replace(encoders["vision"], final_layernorm=language.has_mtp)
    language = base or named(language, identify(language))
    return named_omni(OmniConfig(name=name, title=name, language=language, **encoders))


def omni_json(
    config: OmniConfig, *, reference: Mapping[str, Any] | None = None, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Return the config.json of a model with encoders, which transformers 5.23 reads.

    All of `reference`, that of the same model in either dialect, is kept except for what `config_json.write`
    writes of the language model.
    """
    if config.vision.final_layernorm != config.language.has_mtp:
        norm, mtp = config.vision.final_layernorm, config.language.has_mtp
        only = "config.json has both or neither: give --only language"
        raise ValueError(f"{config.name}: final_layernorm={norm} of vision, and MTP is {mtp}: {only}")
    if reference is not None:
        require_same(config, omni_config(reference, name=f"{config.name}, reference"))
        place = next(key for key in TEXT if reference.get(key) is not None)
        text = config_json.write(config.language, reference=reference[place], dtype=dtype)
        types = {key: dtype for key in ("dtype", "torch_dtype") if key in reference}
        return {**reference, **types, place: text}
    vision, sound = config.vision, config.sound
    result: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        TEXT[0]: config_json.write(config.language, dtype=dtype),
        VISION[0]: {
            "model_type": "radio",
            **{key: getattr(vision, field) for key, field in _VISION.items()},
            _MLP_RATIO: vision.ffn_hidden_size / vision.hidden_size,
            **{key: _VISION_FIXED[key] for key in _VISION_WRITTEN},
        },
        _WIDTH[0]: vision.hidden_size,
        _PROJECTOR: config.vision_projector_size,
        _RATIO: 1 / vision.merged_patches,
        _FRAMES: vision.temporal_patch_size,
        _IMAGE_ID[0]: config.image_token_id,
        SOUND[0]: None,
    }
    if sound is not None:
        result |= {
            SOUND[0]: {
                "model_type": "parakeet_encoder",
                **{key: getattr(sound, field) for key, field in _SOUND.items()},
                **_SOUND_FIXED,
                _SOUND_PROJECTOR: config.sound_projector_size,
            },
            _SOUND_ID[0]: config.sound_token_id,
        }
    return result


def require_same(config: OmniConfig, other: OmniConfig) -> None:
    """Check that two models have the same encoders and projectors."""
    both = zip(_fields(config), _fields(other), strict=True)
    if differ := [
        f"{name}={ours!r} (expected {theirs!r})" for (name, ours), (_, theirs) in both if ours != theirs
    ]:
        raise ValueError(f"{config.name}: it is not the model {other.name}: {', '.join(differ)}")


def pruning_note(data: Mapping[str, Any]) -> str | None:
    """Return what to say of a config.json with which engines drop rows of videos, and training does not."""
    rate = data.get("video_pruning_rate")
    if not rate:
        return None
    return f"config.json has video_pruning_rate={rate!r:.20}: engines drop rows of videos there"


def _fields(config: OmniConfig) -> list[tuple[str, Any]]:
    """Names and values of everything but the language model."""
    parts = {"vision": asdict(config.vision), "sound": asdict(config.sound or Sound())}
    found = [(f"{part}.{field}", value) for part, fields in parts.items() for field, value in fields.items()]
    found.append(("sound", config.sound is not None))
    names = ("vision_projector_size", "sound_projector_size", "image_token_id", "sound_token_id")
    return found + [(name, getattr(config, name)) for name in names]


def _vision(data: Mapping[str, Any], vision: dict[str, Any]) -> Vision:
    """Return RADIO's sizes, which the rest of the file repeats in part."""
    with named_errors(VISION[0]):
        values, width = _radio(vision)
    if (repeated := stated(data, _WIDTH)) not in (None, width):
        raise ValueError(f"{_WIDTH[0]}={repeated!r:.40}, but {VISION[0]} has hidden_size={width}")
    joined = data.get(_RATIO, 1 / Vision.merged_patches)
    if not isinstance(joined, (int, float)) or not 0 < joined <= 1 or not math.isclose(1 / joined % 1, 0):
        raise ValueError(f"{_RATIO}={joined!r:.40}: give 1, 1/2, 1/3, …")
    frames = values.setdefault("temporal_patch_size", data.get(_FRAMES) or Vision.temporal_patch_size)
    if data.get(_FRAMES) not in (None, frames):
        raise ValueError(f"{_FRAMES}={data[_FRAMES]!r:.40}, but {VISION[0]} has {frames}")
    return Vision(**values, merged_patches=round(1 / joined))


def _radio(vision: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the fields that RADIO's part states, and the width."""
    _check(f"{VISION[0]}.", vision, (*_VISION, _MLP_RATIO, _ARGS), _VISION_FIXED, _VISION_IGNORED)
    found = dict(vision)
    if isinstance(args := vision.get(_ARGS), dict):
        if args.get(_VIT, _VITS[0]) not in _VITS:
            raise ValueError(f"{_ARGS}.{_VIT}={args[_VIT]!r:.60}: known is {', '.join(_VITS)}")
        found.setdefault("max_img_size", args.get(_LONGEST))
    values: dict[str, Any] = {
        field: positive_number(found, (key,), real=key == "layer_norm_eps")
        for key, field in _VISION.items()
        if found.get(key) is not None
    }
    if values.get("temporal_patch_size", 2) < 2:
        raise ValueError(f"{_FRAMES}=1: a video's patch has 2 frames or more")
    width: int = values.get("hidden_size", Vision.hidden_size)
    ratio = found.get(_MLP_RATIO) or Vision.ffn_hidden_size / Vision.hidden_size
    if not isinstance(ratio, (int, float)) or not 0 < ratio < 1 << 31 or width >> 62 or width * ratio % 1:
        raise ValueError(f"{_MLP_RATIO}={ratio!r:.40} of the width {width} is no whole number")
    values["ffn_hidden_size"] = int(width * ratio)
    return values, width


def _sound(sound: dict[str, Any]) -> tuple[Sound, int]:
    """Return Parakeet's sizes, and that of its projector."""
    known = (*_SOUND, _SOUND_PROJECTOR, "num_key_value_heads")
    with named_errors(SOUND[0]):
        _check(f"{SOUND[0]}.", sound, known, _SOUND_FIXED, _SOUND_IGNORED)
        values = {field: positive_number(sound, (key,)) for key, field in _SOUND.items()}
        if (heads := sound.get("num_key_value_heads")) not in (None, values["num_attention_heads"]):
            raise ValueError(f"num_key_value_heads={heads!r:.40} is not num_attention_heads")
        return Sound(**values), positive_number(sound, (_SOUND_PROJECTOR,))


def _check(
    prefix: str,
    data: Mapping[str, Any],
    sizes: tuple[str, ...],
    fixed: Mapping[str, Any],
    ignored: frozenset[str],
) -> None:
    if unknown := sorted(set(data) - {*sizes, *fixed, *ignored}):
        keys = ", ".join(prefix + printable(key) for key in unknown)
        raise ValueError(
            f"config.json has {len(unknown)} unknown keys: {keys}: remove those that change neither "
            "a tensor nor a result"
        )
    for key, value in fixed.items():
        if data.get(key) is not None and data[key] != value:
            raise ValueError(f"{key}={data[key]!r:.60} cannot be built, only {value!r}")


def named_omni(config: OmniConfig) -> OmniConfig:
    """Return the model with the catalog's name and sources, or a name made from its language model's."""
    alike = {one.name for one in identify(config.language)}
    for name in omni_names():
        for known in (get_omni(name), get_omni(name + TINY_SUFFIX)):
            if known and known.language.name in alike and _fields(known) == _fields(config):
                kept = {f: getattr(known, f) for f in ("name", "title", "published_total", "source")}
                return config.but(**kept)
    return config.but(name=f"{config.language.name}-omni", title=f"{config.language.title} with encoders")
