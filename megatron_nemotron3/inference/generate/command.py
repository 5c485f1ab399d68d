"""`nemotron3 generate`: continue prompts with the model of a Megatron or Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.convert.job_options import DTYPES
from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.checkpoints.remote import local, place, shown
from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.common.options import (
    add_command,
    argument,
    device_option,
    flag,
    json_flag,
    option,
    repeated,
    tokenizer_option,
)
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.common.processes import NARROW, THREADS, no_garbage_collection
from megatron_nemotron3.inference.generate.media import (
    Prompt,
    PromptReader,
    ReadPrompt,
    add_media,
    prompts_of,
)
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import StoredModelOptions, stored_model

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
    from megatron_nemotron3.inference.generate.checkpoint_folder import CheckpointFolder
    from megatron_nemotron3.inference.generate.encoders import Encoders
    from megatron_nemotron3.inference.generate.engine import EncoderRows, Engine
    from megatron_nemotron3.inference.generate.prompts import Generation, Speculation
    from megatron_nemotron3.inference.generate.sampling import Sampling
    from megatron_nemotron3.inference.generate.text import OutputText, Tokenizer

#: Longest prompt that is read, in bytes.
_PROMPT_LIMIT = 64 << 20
#: Most drafts per verification, because every depth has a KV cache of its own.
MAX_DRAFT = 32
#: What CHECKPOINT names.
CHECKPOINT = "run, Megatron or Hugging Face checkpoint folder, URL, or Hugging Face repository id"
_MODEL, _NEW = "model", "new tokens"


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """A checkpoint, and how its model is loaded."""

    checkpoint: Path = argument(CHECKPOINT, "CHECKPOINT", parse=place)
    tokenizer: Path | None = tokenizer_option("the checkpoint's or the run's", group=_MODEL)
    device: str = device_option(group=_MODEL)
    dtype: str | None = option("weight dtype (default: as stored)", choices=DTYPES, group=_MODEL)
    which: StoredModelOptions


def new_tokens_option(default: int, each: str) -> Any:
    """--max-new-tokens."""
    what = f"maximum number of new tokens per {each} (default {default})"
    return option(what, "N", default=default, least=1, group=_NEW)


def temperature_option(default: float) -> Any:
    """--temperature."""
    what = f"sampling temperature (default {default:g}; 0: greedy decoding)"
    return option(what, "T", default=default, group=_NEW)


def template_variables_option() -> Any:
    """--chat-template-kwargs, which `template_variables` reads."""
    return option('chat template variables, a JSON object, as {"enable_thinking": false}', "JSON")


def template_variables(text: str | None) -> dict[str, Any]:
    """Variables of the chat template. Raises ValueError for what is not a JSON object of them."""
    from megatron_nemotron3.train.data.conversations import Reading

    given = Reading.of(None, text).variables
    return json.loads(given) if given else {}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(CheckpointOptions):
    """How new tokens are chosen."""

    draft: int = option(
        "number of tokens drafted by MTP per step (default 0: off)", "K", default=0, least=0, most=MAX_DRAFT
    )
    max_new_tokens: int = new_tokens_option(64, "prompt")
    temperature: float = temperature_option(0.0)
    top_p: float | None = option("sample from the most likely tokens of total probability P", "P", group=_NEW)
    top_k: int | None = option("sample from the K most likely tokens", "K", group=_NEW)
    seed: int = option("sampling seed (default 0; prompt i uses N + i)", "N", default=0, group=_NEW)

    def sampling(self) -> Sampling:
        """Raises ValueError for options that have no effect."""
        from megatron_nemotron3.inference.generate.sampling import Sampling

        if self.temperature == 0 and (self.top_k or self.top_p or self.seed):
            raise ValueError(
                "--top-k, --top-p and --seed are about sampling, but temperature 0 does not sample: give "
                "--temperature T"
            )
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Options of `nemotron3 generate`."""

    prompt_file: Path | None = option("file with one prompt; - reads stdin", "FILE")
    stop: list[str] = repeated("stop string, besides the end token; may be repeated", "TEXT", group=_NEW)
    chat: bool = flag("format each prompt as a user message with the tokenizer's chat template")
    chat_template_kwargs: str | None = template_variables_option()
    json: bool = json_flag()
    logprobs: bool = flag("with --json: log-probability of each new token, at temperature 1")
    no_stream: bool = flag("print no text before all are complete")
    #: --prompt and the options of media with their values, in order.
    ordered: list[tuple[str, str]] = field(default_factory=list)


def register(commands: Any) -> None:
    """Add `nemotron3 generate`."""
    command = commands.add_parser("generate")
    add_media(command)
    add_command(command, GenerateOptions, generate_command)


def open_for_tokenizer(
    found: CheckpointFolder, tokenizer: Tokenizer, model: Nemotron3Config | None
) -> Checkpoint:
    """Open a checkpoint with as many tokens as the tokenizer has, without padding."""
    opened = found.open(model)
    if tokenizer.vocab_size > opened.config.vocab_size:
        raise ValueError(
            f"{tokenizer.folder}: its {tokenizer.vocab_size:,} tokens are more than the "
            f"{opened.config.vocab_size:,} of {found.checkpoint}: it is another model's tokenizer; give "
            "--tokenizer DIR"
        )
    return found.open(model, tokenizer.vocab_size) if opened.vocabulary_guessed else opened


def open_text_model(folder: Path, options: SamplingOptions) -> tuple[Tokenizer, Checkpoint]:
    """Open the tokenizer and the checkpoint of a folder, and check that it can make the drafts."""
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint

    found = find_checkpoint(folder)
    tokenizer = found.tokenizer(options.tokenizer)
    opened = open_for_tokenizer(found, tokenizer, stored_model(options.which))
    check_draft(opened, options.draft)
    return tokenizer, opened


def check_draft(opened: Checkpoint, draft: int) -> None:
    """Refuse drafts that the checkpoint cannot make."""
    config = opened.config
    if draft and not config.has_mtp:
        raise ValueError(f"--draft {draft}: {opened.folder} has no MTP block to draft with: leave it out")
    if draft > config.mtp_num_layers and draft and not config.mtp_use_repeated_layer:
        raise ValueError(
            f"--draft {draft}: {opened.folder} has {config.mtp_num_layers} MTP blocks, one per depth: "
            f"use --draft {config.mtp_num_layers} or less"
        )


def load_engine(opened: Checkpoint, device: str, dtype: str | None = None, *, mtp: bool = False) -> Engine:
    """Load the model onto "auto", "cpu" or "cuda"."""
    import torch

    from megatron_nemotron3.common.parser import resolve_device
    from megatron_nemotron3.inference.generate.decode import read_weights
    from megatron_nemotron3.inference.generate.engine import Engine

    device = resolve_device(device)
    if device == "cpu" and opened.config.hidden_size <= NARROW and THREADS not in os.environ:
        torch.set_num_threads(1)  # as in training: threads of a narrow model wait for each other
    kind = None if dtype is None else getattr(torch, dtype)
    language = opened.language_part() if opened.omni else opened
    model = read_weights(language.hf_view(), opened.config, device=device, dtype=kind, mtp=mtp)
    return Engine(model, media=tuple(opened.omni.special_ids().values()) if opened.omni else ())


def load_encoders(opened: Checkpoint, options: CheckpointOptions) -> Encoders:
    """Load the encoders of a model that has some onto `options.device`."""
    import torch

    from megatron_nemotron3.common.parser import resolve_device
    from megatron_nemotron3.inference.generate.encoders import Encoders

    assert opened.omni is not None
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return Encoders(opened.hf_view(), opened.omni, device=resolve_device(options.device), dtype=dtype)


def generate_command(options: GenerateOptions) -> int:
    """Continue the prompts and print the texts. Exit status 0."""
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    with local(options.checkpoint) as folder:
        return _generate(folder, options)


def _generate(folder: Path, options: GenerateOptions) -> int:
    with no_garbage_collection():
        from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
        from megatron_nemotron3.inference.generate.text import OutputStream

    prompts, sampling = _read_prompts(options), options.sampling()
    variables = template_variables(options.chat_template_kwargs)
    if variables and not options.chat:
        raise ValueError("--chat-template-kwargs goes with --chat: drop it")
    if options.logprobs and not options.json:
        raise ValueError("--logprobs goes with --json: add it")
    if "" in options.stop:
        raise ValueError("--stop '': give a text")
    tokenizer, opened = open_text_model(folder, options)
    display_name = f"{opened.name}, {shown(opened.folder)},"
    reader = PromptReader(tokenizer, opened.omni, display_name, variables if options.chat else None)
    read = [reader.read(prompt) for prompt in prompts]
    ids = [one.ids for one in read]
    _check_lengths(read, options.max_new_tokens, opened.config)
    rows = _encode_media(opened, options, reader, prompts, read)
    engine = load_engine(opened, options.device, options.dtype, mtp=options.draft > 0)
    texts = [prompt.text for prompt in prompts]
    stream = OutputStream(texts, tokenizer, options.stop, live=not (options.no_stream or options.json))
    generation = GenerationOptions(
        options.max_new_tokens, sampling, options.draft, tokenizer.stop, logprobs=options.logprobs
    )
    result = generate(engine, ids, generation, stream.push, rows=rows)
    stream.end()
    if options.json:
        about: dict[str, Any] = {"checkpoint": shown(opened.folder), "model": opened.name}
        about |= {"mtp_num_layers": opened.config.mtp_num_layers, "mtp_source": opened.mtp_source}
        print_json({**about, **_generation_as_json(result, stream.outputs, ids)})
    else:
        stream.print_rest()
        print(_generation_summary(result), file=sys.stderr)
    return 0


def _encode_media(
    opened: Checkpoint,
    options: GenerateOptions,
    reader: PromptReader,
    prompts: Sequence[Prompt],
    read: Sequence[ReadPrompt],
) -> Sequence[EncoderRows | None]:
    """The rows that stand for the media of each prompt; the encoders are in memory only here."""
    if not any(one.media for one in read):
        return ()
    if options.draft:
        raise ValueError(f"--draft {options.draft}: MTP does not see media: leave it out")
    inputs = [reader.inputs(one, prompt.place) for prompt, one in zip(prompts, read)]
    encoders = load_encoders(opened, options)
    return [encoders.rows(one.ids, media) if media else None for one, media in zip(read, inputs)]


def _read_prompts(options: GenerateOptions) -> list[Prompt]:
    ordered = list(options.ordered)
    if (file := options.prompt_file) is not None:
        data = sys.stdin.buffer.read() if str(file) == "-" else read_outside(file, limit=_PROMPT_LIMIT)
        try:
            # Editors add a newline at the end of a file.
            ordered.append(("prompt", data.decode("utf-8").removesuffix("\n")))
        except UnicodeDecodeError as problem:
            raise ValueError(f"--prompt-file {file}: not UTF-8: {problem}") from None
    prompts = prompts_of(ordered)
    for number, prompt in enumerate(prompts, 1):
        if not prompt.text:
            raise ValueError(f"prompt {number} is empty: give at least one character")
        try:
            prompt.text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"prompt {number} is not UTF-8") from None
    return prompts


def _check_lengths(read: Sequence[ReadPrompt], new: int, config: Nemotron3Config) -> None:
    most = config.max_position_embeddings
    for number, prompt in enumerate(read, 1):
        if not prompt.ids:
            raise ValueError(f"prompt {number} is empty: the tokenizer makes no token of it")
        if (length := len(prompt.ids)) + new > most:
            left = most - length
            cure = f"use --max-new-tokens {left} or less" if left > 0 else "shorten it"
            media = sum(one.rows for one in prompt.media)
            of_media = f" ({media:,} of media)" if media else ""
            raise ValueError(
                f"prompt {number} and {new:,} new tokens are {length:,}{of_media} + {new:,} tokens, more "
                f"than the {most:,} of the model (max_position_embeddings): {cure}"
            )


def _generation_summary(result: Generation) -> str:
    seconds = result.prefill_seconds + result.decode_seconds
    line = f"{result.new_tokens:,} tokens in {seconds:.2f} s, {result.tokens_per_second:,.1f} tokens/s"
    s = result.speculation
    if s.draft:
        line += f", acceptance length {s.acceptance_length:.2f} of at most {s.draft + 1}"
    return line


def speculation_as_json(speculation: Speculation) -> dict[str, Any]:
    """Statistics of drafting, for --json."""
    return {
        "draft": speculation.draft,
        "verifications": speculation.steps,
        "acceptance_length": speculation.acceptance_length,
        "acceptance_by_position": speculation.by_position,
    }


def _generation_as_json(
    result: Generation, outputs: Sequence[OutputText], ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    return {
        "texts": [
            {
                "prompt_tokens": len(prompt),
                "text": output.text,
                "tokens": row.tokens,
                **({"logprobs": row.logprobs} if row.logprobs else {}),
                "stopped": row.stopped or output.stopped_by is not None,
            }
            for row, output, prompt in zip(result.rows, outputs, ids)
        ],
        "new_tokens": result.new_tokens,
        "passes": result.passes,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "tokens_per_second": result.tokens_per_second,
        "speculation": speculation_as_json(result.speculation) if result.speculation.draft else None,
    }
