"""`nemotron3 chat`: talk to a checkpoint's model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.checkpoints.remote import local, place
from megatron_nemotron3.common.options import add_command, argument, option
from megatron_nemotron3.inference.generate.command import (
    CHECKPOINT,
    SamplingOptions,
    load_engine,
    new_tokens_option,
    open_text_model,
    temperature_option,
)

if TYPE_CHECKING:
    from megatron_nemotron3.inference.generate.chat import Chat

TOP_P = 0.9
RESET, EXIT = "/reset", "/exit"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """Options of `nemotron3 chat`."""

    checkpoint: Path = argument(CHECKPOINT, "RUN", parse=place)
    system: str | None = option("a system message, for the chat template", "TEXT")
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
    from megatron_nemotron3.inference.generate.chat import Chat, Template
    from megatron_nemotron3.inference.generate.prompts import GenerationOptions

    sampling = options.sampling()
    if options.temperature and options.top_p is None:
        sampling = replace(sampling, top_p=TOP_P)
    tokenizer, opened = open_text_model(folder, options)
    template = Template(tokenizer.folder)
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
    from megatron_nemotron3.inference.generate.text import write

    try:
        chat.say(line, lambda answer: write(answer.take()))
        print(flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", flush=True)
    except ValueError as problem:
        print(f"not answered: {problem}; {RESET} begins anew", file=sys.stderr, flush=True)
