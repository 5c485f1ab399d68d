"""transformers' processor of an Omni model, and a tokenizer for a small model. Needs the extra `omni`.

processor = load_processor("HF_DIR")
processor = make_processor(get_omni("nano-omni-tiny"), omni_tokenizer(texts, 2048, "build/tokenizer"))
processor.save_pretrained("build/hf")
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from megatron_nemotron3.models.omni import OmniConfig, Sound
from megatron_nemotron3.train.data.tokenizer import read_tokenizer, train_tokenizer
from megatron_nemotron3.train.omni.media import MediaError, VideoSize, missing

#: Frames of a video per second, and at most: what NVIDIA serves the released model with (NVIDIA/xr-ai #82).
FRAMES_PER_SECOND, MOST_FRAMES = 2, 256
#: Limits of the released model on the patches of a picture, and patches of a frame (defaults of
#: transformers 5.23), for positions of 2048 pixels a side. They shrink with the area of the positions.
IMAGE_PATCHES, FRAME_PATCHES, POSITIONS = (1024, 13312), 1024, 2048

#: Names of the media's tokens, as transformers' processor writes them.
IMAGE, IMAGE_START, IMAGE_END = "<image>", "<img>", "</img>"
SOUND, SOUND_START, SOUND_END = "<so_embedding>", "<so_start>", "<so_end>"
VIDEO = "<video>"

#: Chat template of small models: roles in marks, parts of a message in their order.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endgeneration %}"
    "{% else %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>"
    "{% elif part.type == 'video' %}<video>{% elif part.type == 'audio' %}<so_embedding>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_processor(
    config: OmniConfig,
    tokenizer: Any,
    *,
    image_patches: tuple[int, int] | None = None,
    frame_patches: int | None = None,
) -> Any:
    """Make transformers' `NemotronH_Omni_Reasoning_V3Processor` with the sizes of `config`.

    Args:
        tokenizer: transformers' fast tokenizer with a chat template, or the folder of one.
        image_patches: least and most patches of a picture; frame_patches: about as many of a frame. Default:
            those of the released model, in proportion to the positions of the vision encoder.

    Raises:
        ValueError: the tokenizer does not fit the model, or a library is missing.
    """
    images, videos, processing = _classes()
    from transformers import ParakeetFeatureExtractor
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = read_tokenizer(tokenizer)
    vision, sound = config.vision, config.sound or Sound()  # transformers requires the extractor
    part = (vision.max_image_size / POSITIONS) ** 2
    least, most = image_patches or (round(IMAGE_PATCHES[0] * part), round(IMAGE_PATCHES[1] * part))
    sizes = {"patch_size": vision.patch_size, "downsample_ratio": 1 / vision.merged_patches}
    processor = processing.NemotronH_Omni_Reasoning_V3Processor(
        image_processor=images.NemotronH_Omni_Reasoning_V3ImageProcessor(
            min_num_patches=least,
            max_num_patches=most,
            max_model_len=config.language.seq_length,
            **sizes,
        ),
        video_processor=videos.NemotronH_Omni_Reasoning_V3VideoProcessor(
            norm_mean=list(OPENAI_CLIP_MEAN),
            norm_std=list(OPENAI_CLIP_STD),
            video_target_num_patches=frame_patches or max(round(FRAME_PATCHES * part), 16),
            fps=FRAMES_PER_SECOND,
            **sizes,
        ),
        tokenizer=tokenizer,
        feature_extractor=ParakeetFeatureExtractor(feature_size=sound.mel_bins),
        chat_template=tokenizer.chat_template,
        audio_subsampling_factor=sound.subsampling_factor,
        video_temporal_patch_dim=vision.temporal_patch_size,
    )
    check_processor(processor, config)
    return processor


def load_processor(folder: str | os.PathLike[str]) -> Any:
    """Read the processor of a Hugging Face folder."""
    _, _, processing = _classes()
    try:
        return processing.NemotronH_Omni_Reasoning_V3Processor.from_pretrained(
            os.fspath(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, TypeError, ValueError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise ValueError(
            f"{os.fspath(folder)}: no processor of an Omni model is in it: {reason}; a folder of "
            "make_processor(…).save_pretrained has one"
        ) from None


def _classes() -> tuple[Any, Any, Any]:
    """transformers' modules of the image processor, the video processor and the processor."""
    try:
        import torchvision  # noqa: F401  transformers names many reasons if it is missing
        from transformers.models.nemotron_h_omni import image_processing_nemotron_h_omni as images
        from transformers.models.nemotron_h_omni import processing_nemotron_h_omni as processing
        from transformers.models.nemotron_h_omni import video_processing_nemotron_h_omni as videos
    except ImportError as problem:
        raise ValueError(f"a processor of Omni: {missing(problem)}") from None
    return images, videos, processing


def check_processor(processor: Any, config: OmniConfig) -> None:
    """Compare a processor with a model."""
    vision, sound = config.vision, config.sound
    pairs: list[tuple[str, Any, Any]] = [
        (f"the id of {processor.image_token}", processor.image_token_id, config.image_token_id),
        ("the patches of pictures", processor.image_processor.patch_size, vision.patch_size),
        ("the patches of videos", processor.video_processor.patch_size, vision.patch_size),
        ("merged patches", round(1 / processor.image_processor.downsample_ratio), vision.merged_patches),
        ("the frames of a patch", processor.video_temporal_patch_dim, vision.temporal_patch_size),
    ]
    if sound is not None:
        extractor = processor.feature_extractor
        pairs += [
            (f"the id of {processor.audio_token}", processor.audio_token_id, config.sound_token_id),
            ("the mel bands", extractor and extractor.feature_size, sound.mel_bins),
            ("the subsampling of sound", processor.audio_subsampling_factor, sound.subsampling_factor),
        ]
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(f"{what}: {theirs} in the processor, {ours} in {config.name}: they do not fit")


def names_of(processor: Any) -> dict[str, str]:
    """Kind of a medium -> name of its token in a text."""
    return {"image": processor.image_token, "video": processor.video_token, "audio": processor.audio_token}


def omni_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str], config: OmniConfig
) -> Any:
    """Train a small tokenizer with the media's tokens at the ids of `config` and a chat template.

    Returns: transformers' tokenizer, which is saved in `folder`. Raises ValueError as `train_tokenizer`.
    """
    given = {config.image_token_id: IMAGE}
    if config.sound_token_id is not None:
        given[config.sound_token_id] = SOUND
    rest = [IMAGE_START, IMAGE_END, SOUND_START, SOUND_END, "<|im_start|>", "<|im_end|>"]
    first = 2  # train_tokenizer's own two
    named: list[str] = []
    while rest or max(given) >= first + len(named):
        at = first + len(named)
        named.append(given.get(at) or (rest.pop(0) if rest else f"<SPECIAL_{at}>"))
    train_tokenizer(texts, vocab_size, folder, special=named, chat_template=TEMPLATE, end="<|im_end|>")
    return read_tokenizer(folder)


def picture_grid(processor: Any, size: tuple[int, int], pictures: int) -> tuple[int, int]:
    """Patches (rows, columns) that the processor makes of a picture of (height, width) pixels."""
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import get_patch_grid_size

    sizes = processor.image_processor
    merged = round(1 / sizes.downsample_ratio)
    least, most = sizes.min_num_patches, sizes.max_num_patches
    budget = max((sizes.max_model_len - 4) * merged**2, least * pictures)
    budget = max(min(budget, most) if most else budget, least)
    try:
        rows, columns = get_patch_grid_size(*size, sizes.patch_size, merged, least, budget)
    except ZeroDivisionError:
        rows = columns = 0
    if not rows or not columns:
        raise MediaError(
            f"a picture of {size[1]:,} x {size[0]:,} pixels is too narrow to be scaled to {budget:,} patches "
            f"of {sizes.patch_size} pixels a side: cut it"
        )
    return rows, columns


def frame_grid(processor: Any, size: VideoSize) -> tuple[int, int]:
    """Patches (rows, columns) that the processor makes of each frame of a video."""
    columns, rows = processor.video_processor._compute_target_patches(size.height, size.width)
    return rows, columns


def frames_of(processor: Any, size: VideoSize) -> Any:
    """Metadata for the processor of the frames to take: transformers' uniform sampling."""
    from transformers.video_utils import VideoMetadata

    videos = processor.video_processor
    rate = videos.fps or FRAMES_PER_SECOND
    count = videos.num_frames or min(MOST_FRAMES, int(size.frames / size.frames_per_second * rate))
    metadata = VideoMetadata(
        total_num_frames=size.frames,
        fps=size.frames_per_second,
        duration=size.frames / size.frames_per_second,
        height=size.height,
        width=size.width,
        video_backend="pyav",
    )
    metadata.frames_indices = videos.sample_frames(metadata, num_frames=max(1, min(count, size.frames)))
    return metadata


def sound_rows(processor: Any, samples: int) -> int:
    """Positions of a sound of so many samples: frames of its spectrogram, which the encoder halves."""
    frames = 1 + samples // processor.audio_hop_length
    for _ in range(int(math.log2(processor.audio_subsampling_factor))):
        frames = (frames - 1) // 2 + 1
    return max(1, frames)
