"""Readers of what people paste and download: launches, conversations, templates, tokenizers, media.

They run here without the child in which the commands run them (`common.limits`), which would hide what they
do. A script is left out: the guard takes the bash that reads it for a violation.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

from megatron_nemotron3.checkpoints import tokenizer_file
from megatron_nemotron3.launch import command_line, installed_options, script, yaml_launch
from megatron_nemotron3.train.data.chat_template import _Renderer
from megatron_nemotron3.train.data.conversations import read_conversations
from megatron_nemotron3.train.data.tokenizer import train_tokenizer

Folder = dict[str, bytes]
_SAY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def launches() -> dict[str, Folder]:
    """A command, options alone, and the two kinds of YAML."""
    texts = {
        "command": "torchrun --nproc-per-node 8 pretrain_hybrid.py --num-layers 4 --lr 1e-4 \\\n --bf16\n",
        "options": "--hybrid-override-pattern M*E-\n--mtp-hybrid-override-pattern *E --mtp-num-layers 2\n",
        "model_args": "MODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --lr: 1e-4\n  --x: [1, 2]\n",
        "bridge": "model:\n  num_layers: 4\n  hidden_size: &h 64\n  ffn_hidden_size: *h\ntrain:\n  lr: 1\n",
    }
    return {name: {"launch.txt": text.encode()} for name, text in texts.items()}


def read_launch(folder: Path, sample: str) -> None:
    """Read it, unless it has become a script; the parser of the Megatron that Python imports is left out."""
    text = (folder / "launch.txt").read_bytes().decode(errors="replace")
    if yaml_launch.is_yaml(text) or script._plain_words(text) is not None:
        with mock.patch.object(installed_options, "importable", lambda version: False):
            command_line._read_launch(script.LaunchSource(text))


def rows() -> dict[str, Folder]:
    """A row of each form, as lines and as a list."""
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    forms: list[dict[str, object]] = [
        {"messages": [*_SAY, {"role": "tool", "content": [{"type": "text", "text": "c"}]}], "tools": [{}]},
        {"messages": [*_SAY, {"role": "assistant", "tool_calls": [call]}], "chat_template_kwargs": {"x": 1}},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
        {"prompt": "a", "completion": _SAY[1:]},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in forms)
    return {"lines": {"rows.json": lines.encode()}, "list": {"rows.json": json.dumps(forms).encode()}}


def read_rows(folder: Path, sample: str) -> None:
    """All conversations."""
    for conversation in read_conversations(folder / "rows.json"):
        json.dumps(conversation.messages)


def templates() -> dict[str, Folder]:
    """A template with a loop, a filter and marks."""
    return {"marked": {"template.jinja": _TEMPLATE.encode()}}


def read_template(folder: Path, sample: str) -> None:
    """Render it, as the child does."""
    from jinja2 import Environment

    def plain(*_: object) -> None:
        raise sys.exception() or AssertionError

    source = (folder / "template.jinja").read_bytes().decode(errors="replace")
    with mock.patch.object(Environment, "handle_exception", plain):  # jinja makes code for its tracebacks
        for prompt in (False, True):
            request = {"messages": _SAY, "tools": None, "variables": {}, "prompt": prompt}
            json.loads(_Renderer(source, {"eos_token": "<|end|>"}).answer(json.dumps(request).encode()))


def tokenizers() -> dict[str, Folder]:
    """A byte-level BPE of few merges."""
    with tempfile.TemporaryDirectory() as name:
        train_tokenizer(["one two"], 262, name)
        return {"bpe": {"tokenizer.json": (Path(name) / "tokenizer.json").read_bytes()}}


def read_tokenizer(folder: Path, sample: str) -> None:
    """The trial of every tokenizer."""
    try:
        tokenizer_file._try(folder / "tokenizer.json")
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise ValueError(str(problem)) from None


def media() -> dict[str, Folder]:
    """A sound and a picture of each kind."""
    import numpy as np
    import soundfile
    from PIL import Image

    Image.init()  # its readers are imported when they are needed
    found: dict[str, Folder] = {}
    for kind in ("WAV", "FLAC", "OGG"):
        sound = io.BytesIO()
        soundfile.write(sound, np.sin(np.arange(1600) / 9), 16000, format=kind)
        found[kind] = {"medium": sound.getvalue()}
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        picture = io.BytesIO()
        Image.new("RGB", (20, 10), "red").save(picture, kind)
        found[kind] = {"medium": picture.getvalue()}
    return found


def read_medium(folder: Path, sample: str) -> None:
    """Its header and its contents."""
    from megatron_nemotron3.train.omni import media as readers

    path = str(folder / "medium")
    if sample in ("WAV", "FLAC", "OGG"):
        readers.sound_length(path, 16000)
        readers.load_sound(path, 16000)
    else:
        readers.picture_size(path)
        readers.load_picture(path)
