"""`nemotron3 evaluate`: held-out loss of the model and its MTP depths, acceptance by number of drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.checkpoints.remote import local, shown
from megatron_nemotron3.common.options import add_command, data_path_option, json_flag, option, text_option
from megatron_nemotron3.common.output import Bar, interval, result, say
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.inference.generate.command import (
    MAX_DRAFT,
    CheckpointOptions,
    check_draft,
    load_engine,
    speculation_as_json,
)
from megatron_nemotron3.models.command import stored_model
from megatron_nemotron3.train.inputs import format_option, reading, require_no_reading, variables_option

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
    from megatron_nemotron3.inference.generate.checkpoint_folder import CheckpointFolder
    from megatron_nemotron3.inference.generate.engine import Engine
    from megatron_nemotron3.inference.generate.evaluate import MeanLosses
    from megatron_nemotron3.inference.generate.prompts import Generation
    from megatron_nemotron3.models import Nemotron3Config

TOKENS = 16384
DRAFT = 7
#: Tokens read per token used, because windows are spread over the text.
SPREAD = 16
#: Number of prompts for acceptance, tokens per prompt, and new tokens per prompt.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 128
#: Hidden size at which drafts were measured to save time; at 256 they cost more (docs/measurements.md).
_PAYS = 1024
_MEASURED = "evaluation data"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CheckpointOptions):
    """Options of `nemotron3 evaluate`."""

    text: str | None = text_option("default: the run's held-out data", group=_MEASURED)
    data_path: str | None = data_path_option(group=_MEASURED)
    conversations: str | None = option(
        "conversation file; loss on the assistant's tokens (requires --tokenizer)",
        "FILE",
        one_of="text",
        group=_MEASURED,
    )
    format: str | None = format_option(group=_MEASURED)
    chat_template_kwargs: str | None = variables_option(group=_MEASURED)
    tokens: int = option(
        f"maximum number of tokens (default {TOKENS})", "N", default=TOKENS, least=1, group=_MEASURED
    )
    seq_length: int | None = option("tokens per sequence (default: the model's)", "N", group=_MEASURED)
    draft: int | None = option(
        f"maximum number of drafted tokens per step; 1 to K are measured (default {DRAFT}, 0: none)",
        "K",
        least=0,
        most=MAX_DRAFT,
        group=_MEASURED,
    )
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 evaluate`."""
    add_command(commands.add_parser("evaluate"), EvaluateOptions, evaluate_command)


def evaluate_command(options: EvaluateOptions) -> int:
    """Measure and print. Exit status 0."""
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    if options.conversations is None:
        require_no_reading(options)
    else:
        reading(options)
    if options.conversations is not None and options.draft is not None:
        raise ValueError("--draft measures texts, not --conversations: drop it")
    with local(options.checkpoint) as folder:
        measure = _evaluate if options.conversations is None else _evaluate_conversations
        with result(options.json):
            measure(*_opened(folder, options), options)
    return 0


def _opened(folder: Path, options: EvaluateOptions) -> tuple[CheckpointFolder, Checkpoint]:
    from megatron_nemotron3.common.parser import resolve_device
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint

    if resolve_device(options.device) == "cpu":
        quiet_on_cpu()
    found = find_checkpoint(folder)
    opened = found.open(stored_model(options.which))
    padded = opened.padded_vocab_size not in (None, opened.config.vocab_size)
    if opened.vocabulary_guessed is False and padded:
        # Megatron's loss is over the padded vocabulary.
        opened = found.open(stored_model(options.which), opened.padded_vocab_size)
    return found, opened


def _evaluate(found: CheckpointFolder, opened: Checkpoint, options: EvaluateOptions) -> None:
    from megatron_nemotron3.inference.generate.evaluate import windows

    config = opened.config
    draft = _chosen_draft(options.draft, config)
    check_draft(opened, draft)
    seq_length = chosen_seq_length(options.seq_length, config)
    ids, source = evaluation_tokens(
        found, tokens_read(options.tokens), options.text, options.data_path, options.tokenizer
    )
    text = windows(ids, seq_length, options.tokens)
    depths, stated = max(draft, config.mtp_num_layers), config.mtp_num_layers
    engine = load_engine(opened, options.device, options.dtype, mtp=depths > 0)
    measured, accepted, prompts = measured_drafts(
        engine, ids, text, depths, range(draft + 1) if draft else ()
    )
    name = shown(found.checkpoint)
    say(f"checkpoint   {name}: {config.name}", checkpoint=name, model=config.name)
    of_windows = f"{measured.tokens:,} tokens in {len(text):,} windows of {text.shape[1] - 1:,}"
    say(f"text         {source}: {of_windows}", text=source, tokens=measured.tokens)
    mtp = f"mtp          depths: {stated}; by {opened.mtp_source}" if config.has_mtp else None
    say(mtp, mtp_source=opened.mtp_source, mtp_num_layers=stated)
    _say_losses(measured, stated)
    _say_agreement(measured)
    _say_acceptance(accepted, prompts, timed=config.hidden_size >= _PAYS)


def tokens_read(tokens: int) -> int:
    """Tokens of a text to read for `measured_drafts` over windows of `tokens` tokens."""
    return SPREAD * max(tokens + 1, PROMPTS * PROMPT_TOKENS)


def measured_drafts(
    engine: Engine, ids: list[int], text: Tensor, depths: int, drafts: Sequence[int]
) -> tuple[MeanLosses, list[Generation], str]:
    """Losses over windows `text` of the ids, greedy continuations of some, and what these are."""
    from megatron_nemotron3.inference.generate.evaluate import acceptance, losses

    most = engine.config.max_position_embeddings
    with Bar("loss", "tokens", text.shape[0] * (text.shape[1] - 1)) as bar:
        measured = losses(engine, text, depths, report=bar.add)
    accepted: list[Generation] = []
    new = min(NEW_TOKENS, most // 2)
    length = min(PROMPT_TOKENS, most - new, len(ids))
    count = min(PROMPTS, len(ids) // length)
    step = len(ids) // count  # they are spread over the text
    prompts = [ids[i * step : i * step + length] for i in range(count)]
    if drafts:
        with Bar("drafts", "tokens", len(prompts) * new * len(drafts)) as bar:
            accepted = acceptance(engine, prompts, new, drafts, bar.add)
    return measured, accepted, f"{len(prompts)} prompts of {len(prompts[0])} tokens by {new} tokens each"


def _evaluate_conversations(found: CheckpointFolder, opened: Checkpoint, options: EvaluateOptions) -> None:
    from megatron_nemotron3.inference.generate.evaluate import conversation_losses
    from megatron_nemotron3.train.data.conversations import Encoder, encoded_conversations
    from megatron_nemotron3.train.data.forms import Findings

    assert options.conversations is not None
    how, tokenizer = reading(options), options.tokenizer or found.tokenizer().folder
    encode, findings = Encoder(tokenizer, variables=how.variables).encode, Findings()
    rows = encoded_conversations(options.conversations, encode, how.form, findings)
    encoded = [one for _, one in rows]
    for line in findings.lines(options.conversations):
        say(line, findings=[line])
    engine = load_engine(opened, options.device, options.dtype)
    with Bar("loss", "tokens", sum(len(one.ids) for one in encoded)) as bar:
        measured = conversation_losses(engine, encoded, bar.add)
    title = f"{shown(found.checkpoint)}: {opened.config.name}"
    say(f"checkpoint   {title}", checkpoint=title, text=options.conversations, **asdict(measured))
    counted = f"{measured.tokens:,} tokens of the assistant in {measured.conversations:,} conversations"
    say(f"text         {options.conversations}: {counted}")
    say(f"loss         {measured.per_token:.4f} per token, {measured.per_conversation:.4f} per conversation")


def evaluation_tokens(
    found: CheckpointFolder, tokens: int, text: str | None, data_path: str | None, tokenizer: Path | None
) -> tuple[list[int], str]:
    """Return about `tokens` ids to evaluate on, and their source."""
    if text is not None:
        from megatron_nemotron3.train.data import read_texts

        encoder = found.tokenizer(tokenizer)
        end = encoder.stop[:1]
        documents = ([*encoder.encode(document), *end] for document in read_texts(text).documents)
        return _first_tokens(documents, tokens), text
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
    return _first_tokens((data[document].tolist() for document in documents), tokens)


def _first_tokens(documents: Iterable[list[int]], tokens: int) -> list[int]:
    """Whole documents with at least so many tokens, if there are as many."""
    ids: list[int] = []
    for document in documents:
        ids += document
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


def _say_losses(measured: MeanLosses, stated: int) -> None:
    say("\nloss                nats per token")
    say(f"  next token        {measured.next_token:14.4f}", loss=measured.next_token)
    say(mtp_loss=list(measured.depths))
    for depth, loss in enumerate(measured.depths, 1):
        note = "" if depth <= stated else f"   (beyond mtp_num_layers={stated})"
        say(f"  MTP depth {depth:<8}{loss:14.4f}{note}")
    say("")


def _say_agreement(measured: MeanLosses) -> None:
    """MTP against the model's own distribution; no text without MTP."""
    say(mtp_agreement=[asdict(one) for one in measured.agreement])
    if not measured.agreement:
        return
    say("drafts against the model's own next-token distribution, along the text")
    say("  MTP depth        KL   overlap   top-1   expected tokens per verification, greedy and sampled")
    for depth, one in enumerate(measured.agreement, 1):
        expected = "   ".join(f"{interval(values):.3f}" for values in (one.greedy, one.sampled))
        say(f"  {depth:>9}{one.kl:>10.4f}{one.overlap:>10.4f}{one.top1:>8.4f}   {expected}")
    several = len(measured.agreement[0].greedy) > 1
    note = "; ±: 95 % interval by Student's t over the windows" if several else ""
    say(f"KL(model || MTP) in nats; overlap is 1 - total variation{note}\n")


def _say_acceptance(accepted: list[Generation], prompts: str, *, timed: bool) -> None:
    say(acceptance=[])
    if not accepted:
        return
    say(f"greedy continuation of {prompts}")
    say(f"  drafts   acceptance length   {'tokens/s   ' if timed else ''}accepted at each position")
    for one in accepted:
        s, rate = one.speculation, one.tokens_per_second
        shares = " ".join("   -" if share is None else f"{share:.2f}" for share in s.by_position)
        speed = f"{rate:>8,.1f}   " if timed else ""
        line = f"  {s.draft:>6}   {s.acceptance_length:>17.2f}   {speed}{shares}".rstrip()
        say(line, acceptance=[{**speculation_as_json(s), "tokens_per_second": rate}])
    say("acceptance length: tokens per verification, including the model's own token")
    if not timed:
        say(f"no tokens/s: in measurements drafts saved time at hidden size {_PAYS:,}, and not at 256")
