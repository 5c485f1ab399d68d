"""Prompts with pictures, sounds and videos: their options, and what the model reads of them.

    --image a.png --prompt "<image> What is it?" --audio b.wav --prompt "<so_embedding> Who speaks?"

A file belongs to the next prompt, or to the only one. The prompt has the name of a medium's token where
the medium stands; with `--chat` the media may also come before the text.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_nemotron3.inference.generate.text import Tokenizer
    from megatron_nemotron3.models.omni import OmniConfig
    from megatron_nemotron3.train.data.conversations import Encoded
    from megatron_nemotron3.train.omni.conversation import OmniEncoder

#: Option -> its help.
OPTIONS = {
    "image": "image for the next prompt, or for the only one; may be repeated, as --audio and --video",
    "audio": "audio file",
    "video": "video file",
}
#: Files of which one says that a folder has a processor.
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
#: Placeholder for an answer, to find what a template writes after one.
_MARK = "ANSWER"


@dataclass(frozen=True)
class Prompt:
    """A prompt and its media.

    media: (kind, file) in the order of the command line; a kind is a key of `OPTIONS`.
    place: its name in messages.
    """

    text: str
    media: tuple[tuple[str, str], ...] = ()
    place: str = "the prompt"


@dataclass(frozen=True)
class ReadPrompt:
    """What the model reads; media: `train.omni.conversation.Medium`s in the order of their positions."""

    ids: list[int]
    media: list[Any] = field(default_factory=list)


class InOrder(argparse.Action):
    """Appends (option, value) to `options.ordered`, which keeps the order of several options."""

    def __call__(self, parser: Any, options: argparse.Namespace, value: Any, name: str | None = None) -> None:
        options.ordered = [*options.ordered, (self.dest, value)]


def add_media(command: argparse.ArgumentParser) -> None:
    """Add --prompt and the options of media, which go into `options.ordered`."""
    command.add_argument("--prompt", action=InOrder, metavar="TEXT", help="text to continue; may be repeated")
    group = command.add_argument_group("media, for a model with encoders")
    for name, what in OPTIONS.items():
        group.add_argument(f"--{name}", action=InOrder, dest=name, metavar="FILE", help=what)
    command.set_defaults(ordered=[])


def prompts_of(ordered: Sequence[tuple[str, str]]) -> list[Prompt]:
    """Return the prompts in order, each with its media."""
    texts = [value for name, value in ordered if name == "prompt"]
    if not texts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file F")
    if len(texts) == 1:
        return [Prompt(texts[0], tuple(one for one in ordered if one[0] != "prompt"))]
    result: list[Prompt] = []
    waiting: list[tuple[str, str]] = []
    for name, value in ordered:
        if name != "prompt":
            waiting.append((name, value))
            continue
        result.append(Prompt(value, tuple(waiting), f"prompt {len(result) + 1}"))
        waiting = []
    if waiting:
        raise ValueError(
            f"--{waiting[0][0]} {waiting[0][1]} follows the last prompt: with several prompts, put a file "
            "before its own"
        )
    return result


class Template:
    """The chat template of a tokenizer's folder; `variables`: what else it is rendered with."""

    def __init__(self, folder: Path, variables: Mapping[str, Any] | None = None) -> None:
        from megatron_nemotron3.train.data.chat_template import ChatTemplate
        from megatron_nemotron3.train.data.tokenizer import read_tokenizer

        tokenizer = read_tokenizer(folder)
        self.usable = isinstance(tokenizer.chat_template, str)
        self._template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens_map)
        self.variables = dict(variables or {})
        self._template.require_used(self.variables, folder)

    def render(self, messages: list[dict[str, str]]) -> str:
        return self._template.prompt(messages, variables=self.variables)

    def end(self) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        return self._template.render(messages).text.rpartition(_MARK)[2]


class PromptReader:
    """Tokens of prompts for a model.

    model: its encoders; None: a model of text.
    variables: of the chat template, and prompts are a user's messages; None: they are texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: OmniConfig | None,
        display_name: str,
        variables: Mapping[str, Any] | None,
    ) -> None:
        self.tokenizer, self.model, self.display_name = tokenizer, model, display_name
        self.template: Template | None = None
        if variables is not None:
            self.template = Template(tokenizer.folder, variables)
            if not self.template.usable:
                raise ValueError(f"--chat: the tokenizer in {tokenizer.folder} has none: leave it out")
        self._encoder: OmniEncoder | None = None

    @property
    def encoder(self) -> OmniEncoder:
        """What reads media; made when the first prompt has some."""
        if self._encoder is None:
            from megatron_nemotron3.train.omni.conversation import OmniEncoder
            from megatron_nemotron3.train.omni.processor import names_of

            assert self.model is not None
            processor = _processor(self.tokenizer.folder, self.model)
            text = _Text(self.tokenizer, names_of(processor)) if self.template is None else None
            self._encoder = OmniEncoder(processor, self.model, text=text)
        return self._encoder

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Tokens of a prompt; of its media only the headers are read."""
        if prompt.media and self.model is None:
            kind, file = prompt.media[0]
            raise ValueError(f"--{kind} {file}: {self.display_name} reads only text: leave it out")
        if not prompt.media:
            return self._without_media(prompt)
        from megatron_nemotron3.train.data.conversations import Conversation
        from megatron_nemotron3.train.omni.processor import names_of

        content = _content(prompt, names_of(self.encoder.processor), self.template is not None)
        message = {"role": "user", "content": content}
        variables = {} if self.template is None else self.template.variables
        conversation = Conversation([message], None, prompt.place, variables=variables)
        found = self.encoder.encode(conversation, prompt=True)
        return ReadPrompt(found.ids, found.media)

    def inputs(self, read: ReadPrompt, place: str) -> dict[str, Any]:
        """Decode the media of a prompt: arguments of the encoders, {} without any."""
        return self.encoder.decode(read.media, place) if read.media else {}

    def _without_media(self, prompt: Prompt) -> ReadPrompt:
        if self.template is None:
            ids = self.tokenizer.encode(prompt.text)
        else:
            rendered = self.template.render([{"role": "user", "content": prompt.text}])
            ids = self.tokenizer.encode(rendered, whole=False)
        if self.model is not None and (name := self._named(prompt.text, ids)):
            raise ValueError(f"{prompt.place} has {name}, which stands for a medium, but no file is given")
        return ReadPrompt(ids)

    def _named(self, text: str, ids: Sequence[int]) -> str:
        """The name of a medium's token in a text; "" if it has none."""
        from megatron_nemotron3.train.omni.processor import VIDEO

        assert self.model is not None
        found = next((one for one in self.model.special_ids().values() if one in ids), None)
        if found is not None:
            return self.tokenizer.decode([found], special=True)
        return VIDEO if VIDEO in text else ""  # videos have the tokens of pictures


class _Text:
    """Texts of prompts that no template changes. As `train.data.conversations.Encoder`, for prompts."""

    def __init__(self, tokenizer: Tokenizer, names: dict[str, str]) -> None:
        self.tokenizer, self.names = tokenizer, names

    def prompt(self, conversation: Any) -> str:
        (message,) = conversation.messages
        return "".join(part.get("text") or self.names[part["type"]] for part in message["content"])

    def tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        from megatron_nemotron3.train.data.conversations import Encoded

        ids = self.tokenizer.encode(text)
        return Encoded(ids, [False] * len(ids))


def _content(prompt: Prompt, names: dict[str, str], template: bool) -> list[dict[str, str]]:
    """The parts of a prompt: its text, cut where media stand."""
    waiting = {kind: [file for one, file in prompt.media if one == kind] for kind in names}
    named = {kind: prompt.text.count(name) for kind, name in names.items()}
    if template and not any(named.values()):
        media = [{"type": kind, "path": file} for kind, file in prompt.media]
        return [*media, {"type": "text", "text": prompt.text}]
    for kind, name in names.items():
        if named[kind] != (count := len(waiting[kind])):
            raise ValueError(
                f"{prompt.place} has {name} {named[kind]} times, and --{kind} is given {count} times: write "
                f"{name} where each stands"
            )
    kinds = {name: kind for kind, name in names.items()}
    parts = re.split("(" + "|".join(map(re.escape, kinds)) + ")", prompt.text)
    return [
        {"type": kinds[part], "path": waiting[kinds[part]].pop(0)}
        if part in kinds
        else {"type": "text", "text": part}
        for part in parts
        if part
    ]


def _processor(folder: Path, model: OmniConfig) -> Any:
    from megatron_nemotron3.train.omni.processor import load_processor, make_processor

    if any((folder / name).is_file() for name in _PROCESSOR):
        return load_processor(folder)
    return make_processor(model, folder)
