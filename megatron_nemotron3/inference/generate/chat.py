"""A conversation with a model whose states are kept from turn to turn.

If the text of the conversation begins with what the states have read, only the rest is read. Otherwise all is
read again: a template may write an earlier turn differently once others follow (it drops thoughts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import (
    ConversationState,
    Generation,
    GenerationOptions,
    generate,
)
from megatron_nemotron3.inference.generate.text import OutputText, Tokenizer

#: Placeholder for an answer, to find what a template writes after one.
_MARK = "ANSWER"


class Template:
    """The chat template of a tokenizer's folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder))

    @property
    def usable(self) -> bool:
        return isinstance(self._tokenizer.chat_template, str)

    def render(self, messages: list[dict[str, str]]) -> str:
        return self._apply(messages, add_generation_prompt=True)

    def end(self) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        return self._apply(messages).rpartition(_MARK)[2]

    def _apply(self, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as problem:  # a template may raise any exception
            raise ValueError(f"the chat template: {problem}") from None


@dataclass
class Chat:
    """A conversation.

    Args:
        options: `max_new_tokens` of an answer, fewer where the context ends, sampling and drafts; the seed
            grows by one with each turn.
        template: None: the model continues the text of all turns, each on a line of its own.
        system: a system message, with a template.
    """

    engine: Engine
    tokenizer: Tokenizer
    options: GenerationOptions
    template: Template | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    #: All tokens in front of the last answer, and how many of them were read for it.
    context: list[int] = field(default_factory=list)
    read: int = 0
    _states: ConversationState = field(default_factory=ConversationState)
    #: Tokens that the states have seen.
    _seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        end = self.template.end() if self.template is not None else ""
        #: Texts that end an answer. That of a template that has no special token for it is plain text.
        self.stops = (end,) if end else ()
        self.reset()

    def reset(self) -> None:
        self.messages = []
        if self.system is not None and self.template is not None:
            self.messages.append({"role": "system", "content": self.system})
        self._drop_states()

    def say(self, message: str, push: Callable[[OutputText], None]) -> Generation:
        """Add a message of the user and the model's answer."""
        self.messages.append({"role": "user", "content": message})
        answer = OutputText(self.tokenizer, self.stops)
        new: list[int] = []

        def on_token(_: int, token: int) -> bool:
            new.append(token)
            ended = answer.push(token)
            push(answer)
            return ended

        try:
            ids = self._unread()
            self.context, self.read = [*self._seen, *ids], len(ids)
            turns = sum(one["role"] == "user" for one in self.messages)
            sampling = replace(self.options.sampling, seed=self.options.sampling.seed + turns - 1)
            room = self.engine.max_context - len(self.context)
            if room < 1:
                raise ValueError(
                    f"the conversation has {len(self.context):,} tokens, and the model's context "
                    f"{self.engine.max_context:,}"
                )
            new_tokens = min(self.options.max_new_tokens, room)
            stop = self.tokenizer.stop
            options = replace(self.options, max_new_tokens=new_tokens, sampling=sampling, stop=stop)
            result = generate(self.engine, [ids], options, on_token, self._states)
        except KeyboardInterrupt:
            self._drop_states()  # a pass may have been cut in two
            self._close(answer)
            raise
        except ValueError:
            self.messages.pop()
            self._drop_states()
            raise
        self._seen = [*self.context, *new[:-1]]
        if self._states.lengths != [len(self._seen)]:
            self._drop_states()  # drafts after the end of the answer were read, too
        self._close(answer)
        push(answer)
        return result

    def _close(self, answer: OutputText) -> None:
        answer.end()
        self.messages.append({"role": "assistant", "content": answer.text})

    def _unread(self) -> list[int]:
        rendered, seen = self._rendered(), self.tokenizer.decode(self._seen, special=True)
        if self._seen and rendered.startswith(seen) and len(rendered) > len(seen):
            return self.tokenizer.encode(rendered[len(seen) :], whole=False)
        self._drop_states()
        # A template writes the tokens around a text itself.
        return self.tokenizer.encode(rendered, whole=self.template is None)

    def _rendered(self) -> str:
        if self.template is not None:
            return self.template.render(self.messages)
        text = ""
        for one in self.messages:
            line_before = one["role"] == "user" and text and not text.endswith("\n")
            text += "\n" * bool(line_before) + one["content"]
        return text

    def _drop_states(self) -> None:
        self._states, self._seen = ConversationState(), []
