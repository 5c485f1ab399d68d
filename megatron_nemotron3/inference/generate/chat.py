"""`nemotron3 chat`: a conversation in the terminal with a model whose states are kept from turn to turn.

If the text of the conversation begins with what the states have read, only the rest is read. Otherwise all is
read again: a template may write an earlier turn differently once others follow (it drops thoughts).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.checkpoints.remote import local
from megatron_nemotron3.common.options import add_command, option
from megatron_nemotron3.inference.generate.command import (
    SamplingOptions,
    load_engine,
    new_tokens_option,
    open_text_model,
    temperature_option,
    template_variables,
    template_variables_option,
)
from megatron_nemotron3.inference.generate.media import Template
from megatron_nemotron3.inference.generate.text import OutputText, Tokenizer, write

if TYPE_CHECKING:
    from megatron_nemotron3.inference.generate.engine import Engine
    from megatron_nemotron3.inference.generate.prompts import ConversationState, Generation, GenerationOptions

TOP_P = 0.9
RESET, EXIT = "/reset", "/exit"


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
    _states: ConversationState = field(init=False)
    #: Tokens that the states have seen.
    _seen: list[int] = field(init=False)

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
        from megatron_nemotron3.inference.generate.prompts import generate

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
        from megatron_nemotron3.inference.generate.prompts import ConversationState

        self._states, self._seen = ConversationState(), []


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """Options of `nemotron3 chat`."""

    system: str | None = option("system message for the chat template", "TEXT")
    chat_template_kwargs: str | None = template_variables_option()
    max_new_tokens: int = new_tokens_option(256, "answer")
    temperature: float = temperature_option(0.7)


def register(commands: Any) -> None:
    """Add `nemotron3 chat`."""
    add_command(commands.add_parser("chat"), ChatOptions, chat_command)


def chat_command(options: ChatOptions) -> int:
    """Read lines from stdin and answer each. Exit status 0 at its end or `/exit`."""
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    with local(options.checkpoint) as folder:
        _loop(_open_chat(folder, options))
    return 0


def _open_chat(folder: Path, options: ChatOptions) -> Chat:
    from megatron_nemotron3.inference.generate.prompts import GenerationOptions

    sampling = options.sampling()
    if options.temperature and options.top_p is None:
        sampling = replace(sampling, top_p=TOP_P)
    variables = template_variables(options.chat_template_kwargs)
    tokenizer, opened = open_text_model(folder, options)
    template = Template(tokenizer.folder, variables)
    if options.system is not None and not template.usable:
        raise ValueError(f"--system: the tokenizer in {tokenizer.folder} has no chat template: leave it out")
    engine = load_engine(opened, options.device, options.dtype, mtp=options.draft > 0)
    generation = GenerationOptions(options.max_new_tokens, sampling, options.draft)
    if sys.stdin.isatty():
        form = "chat template" if template.usable else "no chat template: the model continues the text"
        print(f"{opened.config.name}, {form}")
        print(f"{RESET} begins anew, {EXIT} or Ctrl-D ends, Ctrl-C stops an answer")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, lines can be edited
    return Chat(engine, tokenizer, generation, template if template.usable else None, options.system)


def _loop(chat: Chat) -> None:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        except KeyboardInterrupt:
            print(f"\n({EXIT} or Ctrl-D ends)")
            continue
        if line == EXIT:
            return
        if line == RESET:
            chat.reset()
        elif line:
            _answer(chat, line)


def _answer(chat: Chat, line: str) -> None:
    try:
        chat.say(line, lambda answer: write(answer.take()))
        print(flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", flush=True)
    except ValueError as problem:
        print(f"not answered: {problem}; {RESET} begins anew", file=sys.stderr, flush=True)
