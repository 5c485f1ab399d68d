"""Conversations with media: the batch is what transformers' processor makes of the same files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.omni_data import part, require_media, sample, say, tiny_omni, tiny_processor, write_media

require_media()

import numpy as np  # noqa: E402
import soundfile  # noqa: E402
from PIL import Image  # noqa: E402

from megatron_nemotron3.train.omni import media  # noqa: E402
from megatron_nemotron3.train.omni.conversation import join  # noqa: E402
from megatron_nemotron3.train.omni.media import MediaError  # noqa: E402
from megatron_nemotron3.train.omni.processor import (  # noqa: E402
    check_processor,
    frame_grid,
    frames_of,
    load_processor,
    make_processor,
    picture_grid,
    sound_rows,
)

CONFIG = tiny_omni()
#: Kinds that transformers' processor takes in one call: any pictures and sounds, or one video.
ONE_CALL = {
    "text": ["hello"],
    "pictures": [part("image", "wide.png"), "and", part("image", "turned.jpg"), part("image", "tall.jpg")],
    "sounds": ["hello", part("audio", "long.wav"), "and", part("audio", "short.flac")],
    "video": [part("video", "even.mp4"), "what is it"],
    "odd video": [part("video", "odd.mkv"), "what is it"],
    "mixture": [part("audio", "short.flac"), part("image", "tall.jpg"), part("video", "odd.mkv")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("media")
    write_media(made)
    _damage(made)
    return made


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_processor(tmp_path_factory.mktemp("tokenizer"))


def _transformers(processor: Any, messages: list[Any], folder: Path) -> dict[str, Any]:
    """The processor called directly, with files read by transformers' own functions."""
    from transformers.audio_utils import load_audio
    from transformers.image_utils import load_image
    from transformers.video_utils import load_video

    given: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}
    for one in messages[0]["content"]:
        if one["type"] != "text":
            given[one["type"]].append(str(folder / one["path"]))
    words: dict[str, Any] = {}
    if given["image"]:
        words["images"] = [load_image(path) for path in given["image"]]
    if given["audio"]:
        words["audio"] = [load_audio(path, sampling_rate=16000) for path in given["audio"]]
    if given["video"]:
        (path,) = given["video"]
        metadata = frames_of(processor, media.video_size(path))
        frames, _ = load_video(path, sample_indices_fn=lambda metadata: wanted(metadata, path))
        words |= {"videos": [frames], "video_metadata": metadata, "do_sample_frames": False}
    text = processor.apply_chat_template(messages, tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", **words))


def wanted(metadata: Any, path: str) -> Any:
    """Two frames a second, of the number that the container's header or a decoder gives."""
    from transformers.video_utils import default_sample_indices_fn

    metadata.total_num_frames = metadata.total_num_frames or 18
    return default_sample_indices_fn(metadata, fps=2)


@pytest.mark.parametrize("kind", ONE_CALL)
def test_equals_transformers_processor(processor: Any, folder: Path, kind: str) -> None:
    """Ids, pixels, frames and features are equal bit for bit; lengths came from the files' headers alone."""
    messages = [say("user", *ONE_CALL[kind]), say("assistant", "apples")]
    found = sample(messages, processor, CONFIG, folder=folder)
    expected = _transformers(processor, messages, folder)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    inputs = found["modality_inputs"]
    vision = inputs.get("vision", {}).get("radio", {})
    sound = inputs.get("sound", {}).get("parakeet", {})
    pictures, sounds = ("pixel_values", "image_grid_hw"), ("input_features", "input_features_mask")
    for given, names in ((vision, pictures), (sound, sounds)):
        for name in names:
            assert (name in given) == (name in expected)
            assert name not in given or torch.equal(given[name], expected[name])
    if (frames := expected.get("pixel_values_videos")) is not None:
        (video,) = vision["pixel_values_videos"]
        frames = frames.reshape(-1, 3, *frames.shape[-2:])  # transformers 5.24: in groups, the last repeated
        assert torch.equal(video[: len(frames)], frames)
        assert len(video) == 2 * int(vision["clips"]) == len(frames) + len(frames) % 2
        repeated = torch.equal(video[-1], video[-2])
    assert ("odd" in kind) <= (frames is not None and repeated)


def test_several_videos_and_pictures(processor: Any, folder: Path) -> None:
    """Several videos of different sizes, which transformers' processor does not take, and their order."""
    parts = [part("video", "odd.mkv"), part("image", "tall.jpg"), part("video", "even.mp4"), "hello"]
    found = sample([say("user", *parts)], processor, CONFIG, folder=folder)
    vision = found["modality_inputs"]["vision"]["radio"]
    assert vision["order"].tolist() == [1, 0, 2]
    assert len({video.shape[2:] for video in vision["pixel_values_videos"]}) == 2
    ids = []
    for one in parts[:3]:
        alone = sample([say("user", one)], processor, CONFIG, folder=folder)
        inner = processor.tokenizer.decode(alone["input_ids"][0])
        ids.append(inner.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n"))
        video = alone["modality_inputs"]["vision"]["radio"].get("pixel_values_videos")
        assert video is None or any(torch.equal(video[0], v) for v in vision["pixel_values_videos"])
    text = processor.tokenizer.decode(found["input_ids"][0])
    assert text == f"<|im_start|>user\n{''.join(ids)}hello<|im_end|>\n"


def test_joined_conversations(processor: Any, folder: Path) -> None:
    """Media of several conversations in the order of their positions; sounds padded to the longest."""
    chats = [
        [part("image", "wide.png"), part("audio", "short.flac")],
        ["hello"],
        [part("video", "odd.mkv"), part("image", "tall.jpg"), part("audio", "long.wav")],
    ]
    each = [sample([say("user", *one)], processor, CONFIG, folder=folder)["modality_inputs"] for one in chats]
    vision = join(each, "vision")["radio"]
    assert vision["order"].tolist() == [0, 2, 1]
    assert vision["image_grid_hw"].tolist() == [
        [2, 8],
        each[2]["vision"]["radio"]["image_grid_hw"].tolist()[0],
    ]
    sound = join(each, "sound")["parakeet"]
    short = each[0]["sound"]["parakeet"]["input_features"]
    assert torch.equal(sound["input_features"][:1, : short.shape[1]], short)
    assert not sound["input_features"][0, short.shape[1] :].any()
    assert not sound["input_features_mask"][0, short.shape[1] :].any()
    assert join(each[1:2], "vision") == {}


@pytest.mark.parametrize("marked", [True, False])
def test_only_the_assistants_words_are_learned(
    processor: Any, folder: Path, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [
        say("user", part("image", "wide.png"), "what is it"),
        say("assistant", "pears"),
        say("user", part("audio", "short.flac")),
        {"role": "assistant", "content": "two"},
    ]
    template = processor.chat_template
    if not marked:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for holder in (processor, processor.tokenizer):
        monkeypatch.setattr(holder, "chat_template", template)
    found = sample(messages, processor, CONFIG, folder=folder)
    said = found["labels"][0][found["loss_mask"][0] > 0]
    assert processor.tokenizer.decode(said) == "pears<|im_end|>\ntwo<|im_end|>\n"


def test_saved_processor(processor: Any, folder: Path, tmp_path: Path) -> None:
    """A saved processor makes the same batch; a folder without one, or of another model, is named."""
    processor.save_pretrained(tmp_path / "hf")
    messages = [say("user", *ONE_CALL["mixture"])]
    ours, theirs = (
        sample(messages, one, CONFIG, folder=folder) for one in (processor, load_processor(tmp_path / "hf"))
    )
    assert torch.equal(ours["input_ids"], theirs["input_ids"])
    sounds = (one["modality_inputs"]["sound"]["parakeet"]["input_features"] for one in (ours, theirs))
    assert torch.equal(*sounds)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no processor of an Omni model"):
        load_processor(tmp_path / "empty")
    with pytest.raises(ValueError, match="the id of <image>: 18 in the processor, 19 in nano-omni-tiny"):
        check_processor(processor, CONFIG.but(image_token_id=19))
    with pytest.raises(ValueError, match="mel bands: 32 in the processor, 128"):
        from megatron_nemotron3.models.omni import NANO_OMNI

        check_processor(processor, NANO_OMNI)


def test_released_sizes(processor: Any) -> None:
    """The processor of the released model has transformers' defaults."""
    from transformers.models.nemotron_h_omni import image_processing_nemotron_h_omni as images
    from transformers.models.nemotron_h_omni import video_processing_nemotron_h_omni as videos

    from megatron_nemotron3.models.omni import NANO_OMNI

    made = make_processor(NANO_OMNI, processor.tokenizer)
    defaults = images.NemotronH_Omni_Reasoning_V3ImageProcessor
    for name in ("min_num_patches", "max_num_patches", "patch_size", "downsample_ratio"):
        assert getattr(made.image_processor, name) == getattr(defaults, name)
    assert (
        made.video_processor.video_target_num_patches
        == videos.NemotronH_Omni_Reasoning_V3VideoProcessor.video_target_num_patches
    )
    assert made.feature_extractor.feature_size == 128 and made.audio_subsampling_factor == 8


def _damage(folder: Path) -> None:
    """Files that cannot be used."""
    whole = (folder / "tall.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.mp4").write_text("no video")
    (folder / "half.mp4").write_bytes((folder / "even.mp4").read_bytes()[:900])
    soundfile.write(folder / "click.wav", np.zeros(200), 16000)
    soundfile.write(folder / "nan.wav", np.full(4000, np.nan), 16000, subtype="FLOAT")
    shutil.copy(folder / "long.wav", folder / "sound.mp4")
    Image.new("1", (20_000, 10_000)).save(folder / "huge.png")
    Image.new("L", (20_000, 8)).save(folder / "narrow.png")
    Image.new("L", (64, 64)).save(folder / "script.png", "EPS")
    (folder / "list.mp4").write_text("ffconcat version 1.0\nfile even.mp4\n")
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {folder}/CANARY\n")
    (folder / "gs").chmod(0o755)


BAD = {
    "missing.png": "missing.png: there is no such file",
    "half.jpg": "half.jpg: not a picture that can be decoded: .*truncated",
    "huge.png": "huge.png: .*20,?000.* pixels",
    "narrow.png": "narrow.png: a picture of 20,000 x 8 pixels is too narrow",
    "click.wav": "click.wav: a sound of 200 samples at 16000 Hz; give at least 20 ms",
    "nan.wav": "nan.wav: the sound has samples that are not finite",
    "text.mp4": "text.mp4: not a video",
    "half.mp4": "half.mp4: ",
    "sound.mp4": "sound.mp4: it has no video",
    "script.png": "script.png: not a picture that can be decoded: cannot identify",
    "list.mp4": "list.mp4: not a video",
}


@pytest.mark.parametrize("name", BAD)
def test_media_that_cannot_be_used(
    processor: Any, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the place of the conversation, the file and what is wrong; no program is started."""
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # not looked for yet
    kind = {"wav": "audio", "mp4": "video"}.get(name[-3:], "image")
    with pytest.raises(MediaError, match=f"^chats.jsonl:7: .*{BAD[name]}"):
        sample([say("user", part(kind, name))], processor, CONFIG, folder=folder, place="chats.jsonl:7")
    assert not (folder / "CANARY").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["what is <image>"], "the text of message 1 contains <image>, which stands for a medium"),
        (["<so_embedding>", part("audio", "short.flac")], "message 1 contains <so_embedding>"),
        ([{"type": "picture", "path": "wide.png"}], "message 1: a part is .* not {'type': 'picture'"),
        ([{"type": "image"}], "message 1: a part is"),
        ([part("image", "")], "there is no such file"),
    ],
)
def test_wrong_conversations(processor: Any, folder: Path, content: Any, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        sample([say("user", *content)], processor, CONFIG, folder=folder)


@pytest.mark.parametrize(
    ("library", "name", "kind"), [("av", "even.mp4", "video"), ("PIL", "wide.png", "image")]
)
def test_missing_libraries(
    processor: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str, kind: str
) -> None:
    """What to install, and no traceback of an import."""
    for module in (library, "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    cure = r"\S+ is not installed: pip install megatron-nemotron3\[omni]"
    with pytest.raises(MediaError, match=f"{name}: {cure}"):
        sample([say("user", part(kind, name))], processor, CONFIG, folder=folder)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=f"torchvision {cure[4:]}"):
        load_processor(folder)


def test_media_without_a_place(processor: Any, folder: Path) -> None:
    """The template does not write the assistant's picture, and would write places for no medium."""
    picture = {"role": "assistant", "content": [part("image", "wide.png") | {"text": ""}]}
    with pytest.raises(MediaError, match=r"template wrote <image> 0 times for 1 parts of type 'image'"):
        sample([picture], processor, CONFIG, folder=folder)
    deaf = CONFIG.but(sound=None, sound_token_id=None)
    with pytest.raises(MediaError, match=r"short.flac: nano-omni-tiny has no sound encoder"):
        sample([say("user", part("audio", "short.flac"))], processor, deaf, folder=folder)


def test_sizes_by_headers_are_the_processors(processor: Any) -> None:
    """Grids of pictures and frames, and rows of sounds, of many sizes, as transformers computes them."""
    random = np.random.default_rng(5)
    for limits in ((4, 52), (16, 64), (9, 0)):
        given = make_processor(CONFIG, processor.tokenizer, image_patches=limits, frame_patches=limits[0] * 3)
        given.image_processor.max_model_len = 12
        for _ in range(12):
            sizes = random.integers(8, 200, (int(random.integers(1, 5)), 2)).tolist()
            pictures = [Image.new("RGB", (width, height)) for height, width in sizes]
            grids = given.image_processor(images=pictures, return_tensors="pt")["image_grid_hw"].tolist()
            assert grids == [list(picture_grid(given, (h, w), len(sizes))) for h, w in sizes]
            height, width = sizes[0]
            frames = given.video_processor(
                videos=[np.zeros((1, height, width, 3), np.uint8)],
                do_sample_frames=False,
                input_data_format="channels_last",
                return_tensors="pt",
            )["pixel_values_videos"]
            grid = frame_grid(given, media.VideoSize(1, 1.0, height, width))
            assert [16 * side for side in grid] == list(frames.shape[-2:])
    for samples in random.integers(320, 40_000, 40).tolist():
        assert sound_rows(processor, samples) == max(1, processor._estimate_audio_num_embeddings(samples))


def test_frames_that_are_taken(processor: Any) -> None:
    """Two a second, all of a slower video, at most 256, at least one; or what the processor says."""
    from copy import deepcopy

    def taken(frames: int, rate: float, given: Any = processor) -> list[int]:
        size = media.VideoSize(frames, rate, 64, 64)
        return [int(i) for i in frames_of(given, size).frames_indices]

    assert taken(100, 25.0) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert taken(7, 1.0) == list(range(7)) and taken(1, 30.0) == [0]
    assert len(taken(100_000, 30.0)) == 256
    other = deepcopy(processor)
    other.video_processor.num_frames = 5
    assert taken(100, 25.0, other) == [0, 20, 40, 60, 80] and taken(3, 25.0, other) == [0, 1, 2]
