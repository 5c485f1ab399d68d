"""`nemotron3 generate`: prompts -> text, from a checkpoint of either kind."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.convert.command import DTYPES
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import add_stored_model, stored_model

if TYPE_CHECKING:
    from megatron_nemotron3.convert.checkpoints import Checkpoint
    from megatron_nemotron3.generate.engine import Engine
    from megatron_nemotron3.generate.folder import Folder
    from megatron_nemotron3.generate.sampling import Sampling
    from megatron_nemotron3.generate.speculative import SpeculativeGeneration
    from megatron_nemotron3.generate.text import Passage, Tokenizer

NEW_TOKENS = 64
#: Drafts of a verification, at most: every depth has keys and values of its own.
MOST_DRAFTS = 32


def register(commands: Any) -> None:
    """Add `nemotron3 generate`."""
    command = commands.add_parser("generate", help="continue prompts with a checkpoint's model")
    command.set_defaults(run=generate_command)
    add_checkpoint(command)
    command.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    command.add_argument(
        "--prompt-file", type=Path, metavar="F", help="one prompt: the file's text, - is stdin"
    )
    command.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=str(NEW_TOKENS))
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: greedy")
    command.add_argument(
        "--top-p", type=float, metavar="P", help="only the likeliest tokens that add up to P"
    )
    command.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the first prompt (0)")
    command.add_argument(
        "--draft", type=int, default=0, metavar="K", help="MTP drafts K tokens a step (0: off)"
    )
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a text, as the tokenizer's end does"
    )
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.add_argument("--no-stream", action="store_true", help="print the texts when all are complete")


def add_checkpoint(command: argparse.ArgumentParser) -> None:
    """The options that say what to load, and how."""
    command.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="Megatron, Hugging Face, or a run's folder",
    )
    command.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="default: the checkpoint's or the run's"
    )
    command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    command.add_argument("--dtype", choices=DTYPES, help="default: as stored")
    add_stored_model(command)


def open_fitting(found: Folder, tokenizer: Tokenizer, model: Nemotron3Config | None) -> Checkpoint:
    """The checkpoint, with the tokens of a tokenizer and no padding behind them.

    Raises:
        ValueError: it is damaged, or has fewer tokens than the tokenizer.
    """
    opened = found.open(model)
    if tokenizer.vocab_size > opened.config.vocab_size:
        raise ValueError(
            f"{tokenizer.folder}: its {tokenizer.vocab_size:,} tokens are more than the "
            f"{opened.config.vocab_size:,} of {found.checkpoint}: it is another model's tokenizer; give "
            "--tokenizer DIR"
        )
    return found.open(model, tokenizer.vocab_size) if opened.vocabulary_guessed else opened


def check_draft(opened: Checkpoint, draft: int) -> None:
    """Refuse drafts that the checkpoint cannot make.

    Raises:
        ValueError: a number out of range, no MTP block, or a block for each depth and fewer of them.
    """
    config = opened.config
    if not 0 <= draft <= MOST_DRAFTS:
        raise ValueError(f"--draft {draft}: give 1 to {MOST_DRAFTS}, or leave it out")
    if draft and not config.has_mtp:
        raise ValueError(f"--draft {draft}: {opened.folder} has no MTP block to draft with: leave it out")
    if draft > config.mtp_num_layers and draft and not config.mtp_use_repeated_layer:
        raise ValueError(
            f"--draft {draft}: {opened.folder} has {config.mtp_num_layers} MTP blocks, one for each depth: "
            f"use --draft {config.mtp_num_layers} or less"
        )


def load_engine(opened: Checkpoint, options: argparse.Namespace, mtp: bool) -> Engine:
    """The model on `options.device`, "cpu" or "cuda"."""
    import torch

    from megatron_nemotron3.generate.engine import Engine
    from megatron_nemotron3.generate.weights import read

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return Engine(read(opened.hf_view(), opened.config, device=options.device, dtype=dtype, mtp=mtp))


def generate_command(options: argparse.Namespace) -> int:
    """Continue the prompts and print the texts. Exit status 0.

    Args:
        options: of `register`.

    Raises:
        ValueError: no or an empty prompt, an option out of range, a context beyond the model's, no checkpoint
            or tokenizer, one that does not fit the other, --draft without MTP.
        OSError: the file of --prompt-file cannot be read.
    """
    from megatron_nemotron3.generate.folder import find
    from megatron_nemotron3.generate.screen import Screen
    from megatron_nemotron3.generate.speculative import speculate
    from megatron_nemotron3.run import resolve_device

    options.device = resolve_device(options.device)
    prompts = _prompts(options)
    sampling = _sampling(options)
    if "" in options.stop:
        raise ValueError("--stop '': give a text")
    found = find(options.checkpoint)
    tokenizer = found.tokenizer(options.tokenizer)
    opened = open_fitting(found, tokenizer, stored_model(options))
    check_draft(opened, options.draft)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    _check_lengths(ids, options.max_new_tokens, opened.config)
    engine = load_engine(opened, options, mtp=options.draft > 0)
    screen = Screen(prompts, tokenizer, options.stop, live=not (options.no_stream or options.json))
    result = speculate(
        engine,
        ids,
        options.max_new_tokens,
        draft=options.draft,
        sampling=sampling,
        stop=tokenizer.stop,
        on_token=screen.push,
    )
    screen.end()
    if options.json:
        print(json.dumps(_describe(found, opened, result, screen.passages, ids), indent=2))
    else:
        screen.show()
        print(_summary(result))
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        try:
            data = (
                sys.stdin.buffer.read()
                if str(options.prompt_file) == "-"
                else options.prompt_file.read_bytes()
            )
            # Editors end the last line.
            prompts.append(data.decode("utf-8").removesuffix("\n"))
        except UnicodeDecodeError as problem:
            raise ValueError(f"--prompt-file {options.prompt_file}: no UTF-8 text: {problem}") from None
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file F")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: give at least one character")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"prompt {number} is no UTF-8 text") from None
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: give 1 or more")
    return prompts


def _sampling(options: argparse.Namespace) -> Sampling:
    from megatron_nemotron3.generate.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    if options.temperature == 0 and (options.top_k or options.top_p):
        raise ValueError(
            "--top-k and --top-p say what is drawn from, but temperature 0 draws nothing: give --temperature "
            "T"
        )
    return sampling


def _check_lengths(ids: Sequence[Sequence[int]], new: int, config: Nemotron3Config) -> None:
    most = config.max_position_embeddings
    for number, prompt in enumerate(ids, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: the tokenizer makes no token of it")
        if len(prompt) + new > most:
            left = most - len(prompt)
            cure = f"use --max-new-tokens {left} or less" if left > 0 else "shorten it"
            raise ValueError(
                f"prompt {number} and {new:,} new tokens are {len(prompt):,} + {new:,} tokens, more than the "
                f"{most:,} of the model (max_position_embeddings): {cure}"
            )


def _summary(result: SpeculativeGeneration) -> str:
    seconds = result.prefill_seconds + result.decode_seconds
    line = f"{result.new_tokens:,} tokens in {seconds:.2f} s, {result.tokens_per_second:,.1f} tokens/s"
    s = result.speculation
    if s.draft:
        line += f", acceptance length {s.acceptance_length:.2f} of at most {s.draft + 1}"
    return line


def _describe(
    found: Folder,
    opened: Checkpoint,
    result: SpeculativeGeneration,
    passages: Sequence[Passage],
    ids: Sequence[Sequence[int]],
) -> dict[str, Any]:
    s = result.speculation
    return {
        "checkpoint": str(found.checkpoint),
        "model": opened.config.name,
        "texts": [
            {
                "prompt_tokens": len(prompt),
                "text": passage.text,
                "tokens": row.tokens,
                "stopped": row.stopped or passage.stopped_by is not None,
            }
            for row, passage, prompt in zip(result.rows, passages, ids)
        ],
        "new_tokens": result.new_tokens,
        "passes": result.passes,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "tokens_per_second": result.tokens_per_second,
        "speculation": {
            "draft": s.draft,
            "verifications": s.steps,
            "acceptance_length": s.acceptance_length,
            "acceptance_by_position": s.by_position,
        }
        if s.draft
        else None,
    }
