"""`nemotron3 evaluate`: held-out loss of the model and its MTP depths, acceptance by number of drafts."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.remote import local, shown
from megatron_nemotron3.common.files import require_plot
from megatron_nemotron3.common.options import (
    add_option,
    data_path_option,
    json_flag,
    option,
    text_option,
)
from megatron_nemotron3.common.output import Bar, print_json
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.inference.generate.command import (
    add_checkpoint,
    check_draft,
    load_engine,
    speculation_as_json,
)
from megatron_nemotron3.models.command import stored_model
from megatron_nemotron3.train.inputs import require_tokenizer

if TYPE_CHECKING:
    from megatron_nemotron3.inference.generate.checkpoint_folder import CheckpointFolder
    from megatron_nemotron3.inference.generate.engine import Engine
    from megatron_nemotron3.inference.generate.evaluate import Acceptance, MeanLosses
    from megatron_nemotron3.models import Nemotron3Config

TOKENS = 16384
DRAFT = 7
#: Tokens read per token used, because windows are spread over the text.
SPREAD = 16
#: Number of prompts for acceptance, tokens per prompt, and new tokens per prompt.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 128


def register(commands: Any) -> None:
    """Add `nemotron3 evaluate`."""
    command = commands.add_parser("evaluate")
    command.set_defaults(run=evaluate_command)
    add_checkpoint(command)
    measured = command.add_argument_group("what is measured")
    add_option(measured, "text", text_option("default: the run's held-out data"))
    add_option(measured, "data_path", data_path_option())
    chats = ".jsonl conversations (the loss of the assistant's tokens; needs --tokenizer)"
    add_option(measured, "conversations", option(chats, "FILE", one_of="text"))
    what = f"of the loss, at most (default {TOKENS})"
    add_option(measured, "tokens", option(what, "N", default=TOKENS), int)
    what = "tokens per sequence (default: the model's)"
    add_option(measured, "seq_length", option(what, "N"), int)
    what = f"tokens that MTP drafts per step (1 to K are measured; default {DRAFT}, 0: none)"
    add_option(measured, "draft", option(what, "K"), int)
    add_option(command, "plot", option("write losses and acceptance as a picture", "PNG"), Path)
    add_option(command, "json", json_flag(), bool)


def evaluate_command(options: argparse.Namespace) -> int:
    """Measure and print. Exit status 0."""
    if options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens}: give 1 or more")
    if options.plot is not None:
        require_plot(options.plot, "--plot")
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    if options.conversations is not None and options.tokenizer is None:
        raise ValueError("--conversations needs --tokenizer DIR (a tokenizer with a chat template)")
    if options.conversations is not None and (options.plot is not None or options.draft is not None):
        raise ValueError("--plot and --draft measure texts, not --conversations: drop them")
    with local(options.checkpoint) as options.checkpoint:
        return _evaluate(options)


def _evaluate(options: argparse.Namespace) -> int:
    from megatron_nemotron3.common.parser import resolve_device
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
    from megatron_nemotron3.inference.generate.evaluate import acceptance, losses, plot, windows

    options.device = resolve_device(options.device)
    if options.device == "cpu":
        quiet_on_cpu()
    found = find_checkpoint(options.checkpoint)
    opened = found.open(stored_model(options))
    if opened.vocabulary_guessed is False and opened.padded_vocab_size not in (
        None,
        opened.config.vocab_size,
    ):
        # Megatron's loss is over the padded vocabulary.
        opened = found.open(stored_model(options), opened.padded_vocab_size)
    config = opened.config
    title = f"{shown(found.checkpoint)}: {config.name}"
    if options.conversations is not None:
        return _evaluate_conversations(load_engine(opened, options, mtp=False), options, title)
    draft = _chosen_draft(options.draft, config)
    check_draft(opened, draft)
    seq_length = chosen_seq_length(options.seq_length, config)
    most = SPREAD * max(options.tokens + 1, PROMPTS * PROMPT_TOKENS)
    ids, source = evaluation_tokens(found, most, options.text, options.data_path, options.tokenizer)
    text = windows(ids, seq_length, options.tokens)
    depths = max(draft, config.mtp_num_layers)
    engine = load_engine(opened, options, mtp=depths > 0)
    with Bar("loss", "tokens", text.shape[0] * (text.shape[1] - 1), lines=False) as bar:
        measured = losses(engine, text, depths, report=bar.add)
    accepted: list[Acceptance] = []
    new = min(NEW_TOKENS, config.max_position_embeddings // 2)
    prompts = spread_prompts(ids, min(PROMPT_TOKENS, config.max_position_embeddings - new))
    if draft:
        with Bar("drafts", "tokens", len(prompts) * new * (draft + 1), lines=False) as bar:
            accepted = acceptance(engine, prompts, new, range(draft + 1), bar.add)
    if options.plot is not None:
        plot(measured, accepted, config.mtp_num_layers, options.plot, title)
    if options.json:
        about = {"checkpoint": shown(found.checkpoint), "model": config.name, "text": source}
        about["mtp_source"] = opened.mtp_source
        print_json({**about, **_evaluation_as_json(config, measured, accepted)})
        return 0
    print(f"checkpoint   {title}")
    print(
        f"text         {source}: {measured.tokens:,} tokens in {len(text):,} windows of {text.shape[1] - 1:,}"
    )
    if config.has_mtp:
        print(f"mtp          depths: {config.mtp_num_layers}; by {opened.mtp_source}")
    for line in (*_loss_lines(measured, config.mtp_num_layers), *_agreement_lines(measured)):
        print(line)
    if accepted:
        print(
            f"greedy continuation of {len(prompts)} prompts of {len(prompts[0])} tokens by {new} tokens each"
        )
        for line in _acceptance_lines(accepted):
            print(line)
    if options.plot is not None:
        print(f"plot         {options.plot}")
    return 0


def _evaluate_conversations(engine: Engine, options: argparse.Namespace, title: str) -> int:
    from megatron_nemotron3.inference.generate.evaluate import conversation_losses
    from megatron_nemotron3.train.data.conversations import Encoder, read_conversations

    encoder = Encoder(options.tokenizer)
    encoded = [encoder.encode(one) for one in read_conversations(options.conversations)]
    with Bar("loss", "tokens", sum(len(one.ids) for one in encoded), lines=False) as bar:
        measured = conversation_losses(engine, encoded, bar.add)
    if options.json:
        print_json({"checkpoint": title, "text": options.conversations, **asdict(measured)})
        return 0
    counted = f"{measured.tokens:,} tokens of the assistant in {measured.conversations:,} conversations"
    print(f"checkpoint   {title}")
    print(f"text         {options.conversations}: {counted}")
    print(
        f"loss         {measured.per_token:.4f} per token, {measured.per_conversation:.4f} per conversation"
    )
    return 0


def evaluation_tokens(
    found: CheckpointFolder, tokens: int, text: str | None, data_path: str | None, tokenizer: Path | None
) -> tuple[list[int], str]:
    """Return about `tokens` ids to evaluate on, and their source."""
    if text is not None:
        from megatron_nemotron3.train.data import read_texts

        encoder = found.tokenizer(tokenizer)
        end = encoder.stop[:1]
        ids: list[int] = []
        for document in read_texts(text).documents:
            ids += [*encoder.encode(document), *end]
            if len(ids) >= tokens:
                break
        return ids, text
    if data_path is not None:
        return data_tokens(data_path, None, tokens), data_path
    prefix, split = found.data()
    return data_tokens(prefix, split, tokens), f"held out by --split {split} of {prefix}"


def data_tokens(prefix: str, split: str | None, tokens: int) -> list[int]:
    """Read the first tokens of a Megatron data set, document by document."""
    from megatron_nemotron3.train.data import split_documents

    if not Path(f"{prefix}.idx").is_file() or not Path(f"{prefix}.bin").is_file():
        raise ValueError(
            f"{prefix}: there is no {prefix}.bin and .idx: give --data-path PREFIX or --text PATH"
        )
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(prefix)
    documents = range(len(data)) if split is None else split_documents(split, len(data))[1]
    if documents is None:
        raise ValueError(
            f"{prefix}: --split {split} holds nothing out: give --text PATH or --data-path PREFIX"
        )
    ids: list[int] = []
    for document in documents:
        ids.extend(data[document].tolist())
        if len(ids) >= tokens:
            break
    return ids


def _chosen_draft(draft: int | None, config: Nemotron3Config) -> int:
    if draft is not None or not config.has_mtp:
        return draft or 0
    return DRAFT if config.mtp_use_repeated_layer else min(DRAFT, config.mtp_num_layers)


def chosen_seq_length(length: int | None, config: Nemotron3Config) -> int:
    """Return --seq-length, or the model's."""
    if length is None:
        return min(config.seq_length, config.max_position_embeddings)
    if not 1 <= length <= config.max_position_embeddings:
        raise ValueError(
            f"--seq-length {length}: give 1 to {config.max_position_embeddings:,}, the model's "
            "max_position_embeddings"
        )
    return length


def spread_prompts(ids: list[int], length: int) -> list[list[int]]:
    """Up to `PROMPTS` excerpts, spread over the text."""
    length = min(length, len(ids))
    count = min(PROMPTS, len(ids) // length)
    step = len(ids) // count
    return [ids[i * step : i * step + length] for i in range(count)]


def _loss_lines(measured: MeanLosses, stated: int) -> list[str]:
    lines = ["", "loss                nats per token", f"  next token        {measured.next_token:14.4f}"]
    for depth, loss in enumerate(measured.depths, 1):
        note = "" if depth <= stated else f"   (beyond mtp_num_layers={stated})"
        lines.append(f"  MTP depth {depth:<8}{loss:14.4f}{note}")
    return [*lines, ""]


def _agreement_lines(measured: MeanLosses) -> list[str]:
    """MTP against the model's own distribution; nothing without MTP."""
    if not measured.agreement:
        return []
    from megatron_nemotron3.common.output import interval

    lines = [
        "drafts against the model's own next-token distribution, along the text",
        "  MTP depth        KL   overlap   top-1   expected tokens per verification, greedy and sampled",
    ]
    for depth, one in enumerate(measured.agreement, 1):
        expected = "   ".join(f"{interval(values):.3f}" for values in (one.greedy, one.sampled))
        lines.append(f"  {depth:>9}{one.kl:>10.4f}{one.overlap:>10.4f}{one.top1:>8.4f}   {expected}")
    note = "KL(model || MTP) in nats; overlap is 1 - total variation"
    if len(measured.agreement[0].greedy) > 1:
        note += "; ±: 95 % interval by Student's t over the windows"
    return [*lines, note, ""]


def _acceptance_lines(accepted: list[Acceptance]) -> list[str]:
    lines = ["  drafts   acceptance length   tokens/s   accepted at each position"]
    for one in accepted:
        s = one.speculation
        shares = " ".join("   -" if share is None else f"{share:.2f}" for share in s.by_position)
        length, rate = s.acceptance_length, one.tokens_per_second
        lines.append(f"  {s.draft:>6}   {length:>17.2f}   {rate:>8,.1f}   {shares}".rstrip())
    return [*lines, "acceptance length: tokens per verification, including the model's own token"]


def _evaluation_as_json(
    config: Nemotron3Config, measured: MeanLosses, accepted: list[Acceptance]
) -> dict[str, Any]:
    return {
        "tokens": measured.tokens,
        "loss": measured.next_token,
        "mtp_loss": list(measured.depths),
        "mtp_agreement": [asdict(one) for one in measured.agreement],
        "mtp_num_layers": config.mtp_num_layers,
        "acceptance": [
            {**speculation_as_json(one.speculation), "tokens_per_second": one.tokens_per_second}
            for one in accepted
        ],
    }
