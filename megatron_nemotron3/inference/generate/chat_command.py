"""`nemotron3 chat`: talk to a checkpoint's model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.remote import local
from megatron_nemotron3.common.options import add_option, option
from megatron_nemotron3.inference.generate.command import (
    add_checkpoint,
    add_sampling,
    check_draft,
    load_engine,
    open_for_tokenizer,
)
from megatron_nemotron3.models.command import stored_model
from megatron_nemotron3.train.inputs import require_tokenizer

if TYPE_CHECKING:
    from megatron_nemotron3.inference.generate.chat import Chat
    from megatron_nemotron3.inference.generate.text import OutputText

NEW_TOKENS = 256
TEMPERATURE, TOP_P = 0.7, 0.9
RESET, EXIT = "/reset", "/exit"


def register(commands: Any) -> None:
    """Add `nemotron3 chat`."""
    command = commands.add_parser("chat")
    command.set_defaults(run=chat_command)
    add_checkpoint(command, positional=True)
    add_option(command, "system", option("a system message, for the chat template", "TEXT"))
    add_sampling(command, "answer", tokens=NEW_TOKENS, temperature=TEMPERATURE, top_p=TOP_P)


def chat_command(options: argparse.Namespace) -> int:
    """Read lines from stdin and answer each. Exit status 0 at its end or `/exit`."""
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: give 1 or more")
    with local(options.checkpoint) as options.checkpoint:
        _loop(_open_chat(options))
    return 0


def _open_chat(options: argparse.Namespace) -> Chat:
    from megatron_nemotron3.common.parser import resolve_device
    from megatron_nemotron3.inference.generate.chat import Chat, Template
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
    from megatron_nemotron3.inference.generate.prompts import GenerationOptions
    from megatron_nemotron3.inference.generate.sampling import Sampling

    options.device = resolve_device(options.device)
    greedy = options.temperature == 0
    if greedy and (options.top_k or options.top_p):
        raise ValueError("--top-k and --top-p restrict sampling, which --temperature 0 does not do")
    top_p = options.top_p if options.top_p is not None or greedy else TOP_P
    sampling = Sampling(options.temperature, options.top_k, top_p, options.seed)
    found = find_checkpoint(options.checkpoint)
    tokenizer = found.tokenizer(options.tokenizer)
    opened = open_for_tokenizer(found, tokenizer, stored_model(options))
    check_draft(opened, options.draft)
    template = Template(tokenizer.folder)
    if options.system is not None and not template.usable:
        raise ValueError(f"--system: the tokenizer in {tokenizer.folder} has no chat template: leave it out")
    engine = load_engine(opened, options, mtp=options.draft > 0)
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
    def push(answer: OutputText) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        print(answer.take().encode(encoding, "replace").decode(encoding), end="", flush=True)

    try:
        chat.say(line, push)
        print(flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", flush=True)
    except ValueError as problem:
        print(f"not answered: {problem}; {RESET} begins anew", file=sys.stderr, flush=True)
