"""`nemotron3 generate` with media: greedy texts of transformers' model, and one-line errors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.inference.generate import command
from megatron_nemotron3.inference.generate.encoders import to_device
from megatron_nemotron3.inference.generate.media import Prompt, PromptReader
from megatron_nemotron3.inference.generate.text import Tokenizer
from tests.support.generation_folders import Folders
from tests.support.omni_folders import OmniFolder, make, tiny_omni

pytest.importorskip("transformers")
for library in ("torchvision", "av", "soundfile"):
    pytest.importorskip(library)

NEW = 50
FULL = pytest.mark.full
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniFolder]:
    yield make(tmp_path_factory.mktemp("omni"))


def run(capsys: Capture, *words: object) -> list[dict[str, Any]]:
    status = cli.main(["generate", "--device", "cpu", "--json", *map(str, words)])
    out, err = capsys.readouterr()
    assert status == 0, err
    texts: list[dict[str, Any]] = json.loads(out)["texts"]
    return texts


def refused(capsys: Capture, *words: object) -> str:
    try:
        status = cli.main(["generate", "--device", "cpu", *map(str, words)])
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


def theirs(omni: OmniFolder, text: str, video: Path | None = None, **media: Any) -> list[int]:
    """Greedy tokens of transformers' model from its own processor.

    Its `generate` says them. With a video it fails where it joins the rows (5.23): the model gets them.
    """
    from transformers.audio_utils import load_audio
    from transformers.image_utils import load_image
    from transformers.video_utils import load_video

    model = omni.model
    if "images" in media:
        media["images"] = [load_image(str(path)).convert("RGB") for path in media["images"]]
    if "audio" in media:
        media["audio"] = [load_audio(str(path), sampling_rate=16000) for path in media["audio"]]
    if video is not None:
        frames, metadata = load_video(str(video), backend="pyav", fps=2)
        metadata.frames_indices = list(range(len(frames)))
        media |= {
            "videos": [frames],
            "videos_kwargs": {"do_sample_frames": False, "video_metadata": metadata},
        }
    given = dict(omni.processor(text=[text], return_tensors="pt", **media))
    ids = given.pop("input_ids")
    del given["attention_mask"]
    if "pixel_values_videos" in given:
        rows = model.get_video_features(given.pop("pixel_values_videos"))
        rows.pooler_output = tuple(rows.pooler_output)
        given["mm_encoder_outputs"] = {"video": rows}
    tokens = greedy(omni, ids, **given)
    if video is None:
        with torch.no_grad():
            how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            assert model.generate(ids, **given, **how)[0, ids.shape[1] :].tolist() == tokens
    return tokens


@torch.no_grad()
def greedy(omni: OmniFolder, ids: torch.Tensor, **given: Any) -> list[int]:
    """Tokens of transformers' model with its cache, of which none ends the text; `given`: at the first."""
    tokens: list[int] = []
    model, gap = omni.model, torch.inf
    out = model(input_ids=ids, use_cache=True, **given)
    while True:
        best = out.logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if len(tokens) == NEW:
            break
        cache = {"past_key_values": out.past_key_values, "use_cache": True}
        out = model(input_ids=torch.tensor([tokens[-1:]]), **cache)
    assert gap > 1e-4, f"two logits are {gap:.1e} apart: another seed"
    assert not {*tokens} & {*Tokenizer(omni.folder).stop}, "the text ends: another seed"
    return tokens


def test_super_vl(tmp_path: Path, capsys: Capture) -> None:
    """Pictures before the text of a model that has MTP; drafts are for texts alone, and change nothing."""
    folder = make(tmp_path, name="super-vl")
    text = "what <image> is it? <image>"
    expected = theirs(folder, text, images=folder.images)
    asked = [folder.folder, "--max-new-tokens", NEW]
    words = ["--image", folder.images[0], "--image", folder.images[1], "--prompt", text]
    [found] = run(capsys, *asked, *words)
    assert found["tokens"] == expected
    [plain], [drafted] = (run(capsys, *asked, "--prompt", "who?", *draft) for draft in ([], ["--draft", 2]))
    assert drafted == plain
    assert "MTP does not see media" in refused(capsys, *asked, *words, "--draft", 2)
    heard = ["--audio", folder.sounds[0], "--prompt", "<so_embedding>"]
    assert "super-vl" in (message := refused(capsys, *asked, *heard)) and "sound" in message, message


def test_a_mixture(omni: OmniFolder, capsys: Capture) -> None:
    """Two pictures around a sound; the tokens depend on all three."""
    text = "what <image> is <so_embedding> it? <image>"
    expected = theirs(omni, text, images=omni.images, audio=omni.sounds[:1])
    asked = [omni.folder, "--max-new-tokens", NEW, "--prompt", text]
    words = ["--image", omni.images[0], "--audio", omni.sounds[0], "--image", omni.images[1]]
    [found] = run(capsys, *asked, *words)
    assert found["tokens"] == expected
    assert len(set(expected)) > NEW / 3
    others = (
        ["--image", omni.images[1], "--audio", omni.sounds[0], "--image", omni.images[0]],
        ["--image", omni.images[0], "--audio", omni.sounds[1], "--image", omni.images[1]],
    )
    for words in others:
        [other] = run(capsys, *asked, *words, "--max-new-tokens", 8)
        assert other["tokens"] != expected[:8]


@pytest.mark.parametrize(
    ("text", "media"),
    [
        ("<image>", {"images": 0}),
        ("who says <so_embedding> and <so_embedding>?", {"audio": 0}),
        ("line <video> is", {"video": 0}),
        ("<so_embedding> or <video>", {"audio": 1, "video": 1}),
    ],
)
@FULL
def test_each_kind(omni: OmniFolder, capsys: Capture, text: str, media: dict[str, int]) -> None:
    given: dict[str, Any] = {}
    words: list[object] = []
    if "images" in media:
        given["images"] = omni.images[:1]
    if "audio" in media:
        given["audio"] = omni.sounds[media["audio"] :]
    if "video" in media:
        given["video"] = omni.videos[media["video"]]
    for option, files in (("image", "images"), ("audio", "audio")):
        words += [word for file in given.get(files, ()) for word in (f"--{option}", file)]
    words += ["--video", given["video"]] if "video" in given else []
    expected = theirs(omni, text, **given)
    [found] = run(capsys, omni.folder, *words, "--prompt", text, "--max-new-tokens", NEW)
    assert found["tokens"] == expected


@FULL
def test_a_picture_and_a_video(omni: OmniFolder, capsys: Capture) -> None:
    """transformers takes one of the two in a prompt; given the rows of both, its text is ours."""
    text = "<image> and <video> or <image>"
    words = ["--image", omni.images[0], "--image", omni.images[1], "--video", omni.videos[0]]
    asked = [omni.folder, *words, "--max-new-tokens", NEW]
    [found] = run(capsys, *asked, "--prompt", text)
    reader = PromptReader(Tokenizer(omni.folder), tiny_omni(), "", None)
    media = tuple((str(kind).removeprefix("--"), str(file)) for kind, file in zip(words[::2], words[1::2]))
    read = reader.read(Prompt(text, media))
    given = reader.inputs(read, "")["vision"]["radio"]
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    model, (video,) = omni.model, given["pixel_values_videos"]
    with torch.no_grad():
        first, last = model.get_image_features(given["pixel_values"], given["image_grid_hw"]).pooler_output
        rows = (first, *model.get_video_features(video).pooler_output, last)
        both = {"image": BaseModelOutputWithPooling(pooler_output=rows)}
        expected = greedy(omni, torch.tensor([read.ids]), mm_encoder_outputs=both)
    assert found["tokens"] == expected


def test_a_megatron_checkpoint(omni: OmniFolder, capsys: Capture, tmp_path: Path) -> None:
    """The same text as from the Hugging Face folder, whose tokenizer and processor are given."""
    convert = ["convert", "from-hf", str(omni.folder), str(tmp_path / "megatron"), "--workers", "1"]
    assert cli.main([*convert, "--dtype", "float32"]) == 0
    capsys.readouterr()
    asked = ["--image", omni.images[1], "--audio", omni.sounds[1], "--prompt", "<image> <so_embedding>"]
    asked += ["--max-new-tokens", 12]
    expected = run(capsys, omni.folder, *asked)
    words = [tmp_path / "megatron", "--tokenizer", omni.folder]
    assert run(capsys, *words, *asked) == expected
    # Another picture is another text: the encoders' weights are those of the checkpoint.
    assert run(capsys, *words, "--image", omni.images[0], *asked[2:]) != expected


def test_prompts_with_different_media(omni: OmniFolder, capsys: Capture) -> None:
    """A file belongs to the prompt behind it. Each row has the text that it has alone."""
    prompts = [
        (["--video", omni.videos[0]], "line <video> is"),
        ([], "what is the word"),
        (["--image", omni.images[0], "--audio", omni.sounds[0]], "<so_embedding> or <image>"),
    ]
    asked = [omni.folder, "--max-new-tokens", NEW]
    words = [word for files, text in prompts for word in (*files, "--prompt", text)]
    found = run(capsys, *asked, *words)
    assert found[0]["tokens"] == theirs(omni, prompts[0][1], omni.videos[0])
    for (files, text), row in zip(prompts[1:], found[1:], strict=True):
        assert run(capsys, *asked, *files, "--prompt", text) == [row]


def test_bf16(omni: OmniFolder, capsys: Capture) -> None:
    words = ["--image", omni.images[0], "--audio", omni.sounds[0], "--video", omni.videos[0]]
    asked = ["--prompt", "<image> <so_embedding> <video>", "--max-new-tokens", 2, "--dtype", "bfloat16"]
    [found] = run(capsys, omni.folder, *words, *asked)
    assert len(found["tokens"]) == 2


def test_all_of_a_medium_is_on_the_device(omni: OmniFolder) -> None:
    """Frames of videos are in a list."""
    reader = PromptReader(Tokenizer(omni.folder), tiny_omni(), "", None)
    prompt = Prompt("<video> <image>", (("video", str(omni.videos[0])), ("image", str(omni.images[0]))))
    given = to_device(reader.inputs(reader.read(prompt), "")["vision"]["radio"], "meta")
    assert given["pixel_values_videos"][0].is_meta and given["pixel_values"].is_meta


def test_the_chat_template(omni: OmniFolder, capsys: Capture) -> None:
    """Media come first in a message, or where the prompt names them."""
    asked = [omni.folder, "--max-new-tokens", 8, "--image", omni.images[0]]
    asked += ["--audio", omni.sounds[0]]
    for message, text in (
        ("who?", "<image><so_embedding>who?"),
        ("<so_embedding> who? <image>", "<so_embedding> who? <image>"),
    ):
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        plain = run(capsys, *asked, "--prompt", rendered)
        assert run(capsys, *asked, "--prompt", message, "--chat") == plain
    words = [omni.folder, "--max-new-tokens", 8]
    plain = run(capsys, *words, "--prompt", "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n")
    assert run(capsys, *words, "--prompt", "who?", "--chat") == plain


def test_chat_reads_text_only(omni: OmniFolder, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that stands for a medium is refused, and the conversation goes on."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a <image>\nwho?\n"))
    words = ["--device", "cpu", "--temperature", "0", "--max-new-tokens", "4"]
    assert cli.main(["chat", str(omni.folder), *words]) == 0
    out, err = capsys.readouterr()
    assert "not answered: " in err and "stands for a row of an encoder" in err and err.count("\n") == 1
    asked = [omni.folder, "--max-new-tokens", 4, "--prompt", "who?", "--chat"]
    [expected] = run(capsys, *asked)
    assert out == expected["text"] + "\n"


# --- invalid input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--image", "IMAGE", "--prompt", "a"],
            "the prompt has <image> 0 times, and --image is given 1 time",
        ),
        (
            ["--prompt", "a <image>"],
            "the prompt has <image>, which stands for a medium, but no file is given",
        ),
        (["--image", "IMAGE", "--prompt", "<so_embedding><image>"], "--audio is given 0 times"),
        (["--image", "SOUND", "--prompt", "<image>"], "not a picture that can be decoded"),
        (["--image", "CUT", "--prompt", "<image>"], "cut.png: not a picture that can be decoded"),
        (
            ["--image", "IMAGE", "--prompt", "<image>", "--max-new-tokens", 512],
            "of media) + 512 tokens, more than the 512 of the model",
        ),
        (["--image", "IMAGE", "--prompt", "<image>", "--draft", 1], "has no MTP block to draft with"),
        (["--prompt", "a", "--prompt", "b", "--image", "IMAGE"], "follows the last prompt"),
    ],
)
def test_bad_media(
    omni: OmniFolder,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[Any],
    message: str,
) -> None:
    """Everything is refused before a weight is read."""
    (tmp_path / "cut.png").write_bytes(omni.images[0].read_bytes()[:-300])
    files = {"IMAGE": omni.images[0], "SOUND": omni.sounds[0], "CUT": tmp_path / "cut.png"}
    for name in ("load_engine", "load_encoders"):
        monkeypatch.setattr(command, name, lambda *_, **__: pytest.fail("weights are read"))
    found = [files.get(word, word) for word in words]
    assert message in refused(capsys, omni.folder, *found)


@pytest.mark.parametrize(
    ("package", "kind"), [("torchvision", "image"), ("soundfile", "audio"), ("av", "video")]
)
def test_a_package_of_media_is_missing(
    omni: OmniFolder, capsys: Capture, monkeypatch: pytest.MonkeyPatch, package: str, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    files = {"image": omni.images, "audio": omni.sounds, "video": omni.videos}
    names = {"image": "<image>", "audio": "<so_embedding>", "video": "<video>"}
    words = [omni.folder, f"--{kind}", files[kind][0], "--prompt", names[kind]]
    message = refused(capsys, *words)
    assert f"{package} is not installed: pip install" in message and "megatron-nemotron3[omni]" in message


def test_media_for_a_model_of_text(folders_with_text: Folders, capsys: Capture, omni: OmniFolder) -> None:
    words = [folders_with_text.hf, "--image", omni.images[0], "--prompt", "<image>"]
    assert "reads only text: leave it out" in refused(capsys, *words)
    assert "has none: leave it out" in refused(capsys, folders_with_text.hf, "--prompt", "a", "--chat")
