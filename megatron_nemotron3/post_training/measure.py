"""Measure a checkpoint before and after a training, once: drafts of MTP heads, or held-out conversations."""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import json_outside, write_json
from megatron_nemotron3.common.output import Bar, interval, paired
from megatron_nemotron3.common.switches import CONVERSATIONS, LORA, TRUST_CHECKPOINT
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.inference.generate.command import load_engine
from megatron_nemotron3.inference.generate.evaluate import (
    ConversationLosses,
    DepthAgreement,
    conversation_losses,
    windows,
)
from megatron_nemotron3.inference.generate.evaluate_command import (
    TOKENS,
    chosen_seq_length,
    measured_drafts,
    tokens_read,
)
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.text import Tokenizer
from megatron_nemotron3.launch import Launch, TrainingSchedule, flags, to_argv
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.post_training.boost.inputs import BoostInputs
from megatron_nemotron3.post_training.steps import ProcessWatch, length_step
from megatron_nemotron3.train import processes
from megatron_nemotron3.train.data.conversations import READING, Encoded, Reading
from megatron_nemotron3.train.data.packing import PackedConversations, conversation_multiple
from megatron_nemotron3.train.inputs import ALL_TRAIN, CONVERSATION_OPTIONS, given_data

#: What the ranks print after each row.
_MEASURED = re.compile(r"(\d+) of (\d+) rows$")
#: Tokens of a sample.
ANSWER_TOKENS = 48


#: What the ranks run that measure held-out conversations.
SCRIPT = Path(__file__).parent / "held_out_script.py"


@dataclass(frozen=True)
class HeldOut:
    """Held-out conversations, and what computes their loss."""

    config: Nemotron3Config
    conversations: Sequence[Encoded]
    #: Their file, as it is read, and a folder with their tokenizer and template.
    file: Path
    reading: Reading
    tokenizer: Path
    #: "cpu" or "cuda".
    device: str
    #: The training whose ranks compute it, where one GPU has no room for the model; None: this process.
    launch: Launch | None = None


@dataclass(frozen=True)
class HeldOutResult:
    """What a checkpoint does with the held-out conversations."""

    per_token: float
    per_conversation: float
    #: What it answers in the first of them, greedily; None: ranks of a training generate nothing.
    answer: str | None


@contextlib.contextmanager
def _returning_memory() -> Iterator[None]:
    """Return a GPU's memory to the system, of which torch keeps what is free: training processes need it."""
    import torch

    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()


@_returning_memory()
def measure_held_out(checkpoint: Path, held_out: HeldOut, kept: Path) -> HeldOutResult:
    """Measure a checkpoint, or read from the file `kept` what was measured before.

    Raises:
        ValueError: the ranks of `held_out.launch` failed.
    """
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return HeldOutResult(**record.read(kept))
    measure = _measured_here if held_out.launch is None else _measured_by_ranks
    measured, answer = measure(checkpoint, held_out, kept)
    found = HeldOutResult(measured.per_token, measured.per_conversation, answer)
    write_json(kept, asdict(found))
    return found


def _measured_here(checkpoint: Path, held_out: HeldOut, kept: Path) -> tuple[ConversationLosses, str]:
    config, conversations, encoding = held_out.config, held_out.conversations, Tokenizer(held_out.tokenizer)
    opened = find_checkpoint(checkpoint).open(config, config.vocab_size)
    engine = load_engine(opened, held_out.device)
    # No layer encodes positions: what was trained on may be longer than the folder's number says.
    engine.max_context = max(engine.max_context, max(len(one.ids) for one in conversations) + ANSWER_TOKENS)
    with Bar("held-out loss", "tokens", sum(len(one.ids) for one in conversations)) as bar:
        measured = conversation_losses(engine, conversations, bar.add)
    prompt = first_prompt(conversations)
    (row,) = generate(engine, [prompt], GenerationOptions(ANSWER_TOKENS, stop=encoding.stop)).rows
    return measured, encoding.decode(row.tokens)


def _measured_by_ranks(checkpoint: Path, held_out: HeldOut, kept: Path) -> tuple[ConversationLosses, None]:
    """Start the ranks of a training for a forward pass over rows that hold the longest conversation."""
    launch, log, result = held_out.launch, kept.with_suffix(".log"), kept.with_suffix(".totals.json")
    assert launch is not None
    layout, cache = replace(launch.layout, vpp=1), str(kept.parent / "held_out")
    longest, step = max(len(one.ids) for one in held_out.conversations), length_step(launch.config, layout)
    launch = replace(
        launch,
        config=launch.config.but(mtp_pattern=None, mtp_num_layers=0),
        layout=layout,
        schedule=TrainingSchedule(
            global_batch_size=layout.dp,
            seq_length=-(-longest // step) * step,
            train_iters=1,
            lr=1.0,  # Megatron's parser asks for one
            lr_decay_style="constant",
            eval_iters=0,
            eval_interval=None,
        ),
        data=given_data(
            [str(held_out.file)], str(held_out.tokenizer), conversations=True, split=ALL_TRAIN, cache=cache
        ),
        extra=CONVERSATION_OPTIONS,
    )
    with READING.using(held_out.reading):  # the ranks map what is encoded here
        multiple = conversation_multiple(layout.cp)
        PackedConversations(str(held_out.file), str(held_out.tokenizer), launch.seq_length, multiple, cache)
    own = ["--held-out-checkpoint", str(checkpoint), "--held-out-result", str(result)]
    words = [*to_argv(flags(launch)), *own]
    env = processes.environment(layout.world_size, held_out.device, launch.config.hidden_size)
    env |= {TRUST_CHECKPOINT: "1", CONVERSATIONS: held_out.reading.text(), LORA: ""}
    words = processes.command(words, layout.world_size, held_out.device, SCRIPT)
    with Bar("held-out loss", "rows") as bar:
        watch = ProcessWatch(bar, _MEASURED)
        status = processes.follow(words, env, log, watch)
    if watch.was_interrupted:
        raise KeyboardInterrupt
    if status:
        raise ValueError(f"the ranks that measure the held-out loss ended with {status} (see {log})")
    totals = [(total, number) for total, number in json_outside(result, limit=record.LIMIT)]
    result.unlink()
    return ConversationLosses.of(totals), None


def first_prompt(held_out: Sequence[Encoded]) -> list[int]:
    """Tokens in front of the first answer of the first conversation that has one."""
    one = next(one for one in held_out if any(one.trained[1:]))
    return one.ids[: one.trained.index(True, 1)]


@dataclass(frozen=True)
class DraftResult:
    """One checkpoint on the held-out text.

    Attributes:
        checkpoint: its folder's name; that of a run says the step.
        agreement: of each MTP depth.
        accepted: for 1, 2, … drafts, the acceptance length of greedy continuations.
    """

    checkpoint: str
    agreement: tuple[DepthAgreement, ...]
    accepted: tuple[float, ...]


@_returning_memory()
def measure_drafts(
    checkpoint: Path, given: BoostInputs, options: argparse.Namespace, kept: Path
) -> DraftResult:
    """Measure a checkpoint, or read from the file `kept` what was measured of it before."""
    found = find_checkpoint(checkpoint)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        read = record.read(kept)
        agreement = tuple(
            DepthAgreement(**{**one, "greedy": tuple(one["greedy"]), "sampled": tuple(one["sampled"])})
            for one in read["agreement"]
        )
        if read["checkpoint"] == found.checkpoint.name:  # a run may have been trained further
            return DraftResult(found.checkpoint.name, agreement, tuple(read["accepted"]))
    opened = found.open(given.config)
    engine = load_engine(found.open(given.config, opened.padded_vocab_size), options.device, mtp=True)
    config, depths = given.config, given.config.mtp_num_layers
    ids = given.held_out(options.output, tokens_read(TOKENS))
    text = windows(ids, chosen_seq_length(options.seq_length, config), TOKENS)
    measured, accepted, _ = measured_drafts(engine, ids, text, depths, range(1, depths + 1))
    lengths = tuple(one.speculation.acceptance_length for one in accepted)
    result = DraftResult(found.checkpoint.name, measured.agreement, lengths)
    write_json(kept, asdict(result), indent=None)
    return result


def report_drafts(before: DraftResult | None, after: DraftResult) -> list[str]:
    """Tables of both; without `before` of one, as after a new MTP block has grown."""
    old = [None] * len(after.agreement) if before is None else list(before.agreement)
    lines = ["", "drafts against the model's own next-token distribution, on held-out text"]
    lines.append("  MTP depth                    KL               overlap        same top token")
    for depth, (was, new) in enumerate(zip(old, after.agreement, strict=True), 1):
        pairs: list[tuple[float | None, float]] = [
            (None if was is None else getattr(was, what), getattr(new, what))
            for what in ("kl", "overlap", "top1")
        ]
        lines.append(f"  {depth:>9}" + "".join(f"  {_change(*pair):>20}" for pair in pairs))
    windows = len(after.agreement[0].greedy)
    for title, values in (
        (f"expected tokens per verification along the text, greedy ({windows} windows)", "greedy"),
        ("the same, sampled at temperature 1", "sampled"),
    ):
        lines += ["", title]
        for draft, (was, new) in enumerate(zip(old, after.agreement, strict=True), 1):
            now = getattr(new, values)
            if was is None:
                lines.append(f"  {draft} drafted   {interval(now):.3f}")
            else:
                then = getattr(was, values)
                change = _change(interval(then).mean, interval(now).mean)
                lines.append(f"  {draft} drafted   {change}   {paired(now, then):+.3f}")
    lines += ["", "tokens per verification of greedy continuations"]
    for draft, length in enumerate(after.accepted, 1):
        change = _change(None if before is None else before.accepted[draft - 1], length)
        lines.append(f"  {draft} drafted   {change}")
    return [*lines, "±: 95 % interval by Student's t over the windows; differences are paired", ""]


def _change(old: float | None, new: float) -> str:
    return f"{new:.4f}" if old is None else f"{old:.4f} -> {new:.4f}"
