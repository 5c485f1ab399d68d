"""Held-out loss and a sample of one checkpoint, measured once and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.inference.generate.command import load_engine
from megatron_nemotron3.inference.generate.evaluate import ConversationLosses, conversation_losses
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.text import Tokenizer
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.train.data.conversations import Encoded

#: Tokens of a sample.
NEW_TOKENS = 48


@dataclass(frozen=True)
class HeldOutResult:
    """What a checkpoint does with the held-out conversations."""

    per_token: float
    per_conversation: float
    #: What it answers in the first of them, greedily.
    answer: str


def measure(
    checkpoint: Path,
    config: Nemotron3Config,
    held_out: Sequence[Encoded],
    tokenizer: Path,
    device: str,
    kept: Path,
) -> HeldOutResult:
    """Measure a checkpoint, or read from the file `kept` what was measured before."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return HeldOutResult(**record.read(kept))
    encoding = Tokenizer(tokenizer)
    opened = find_checkpoint(checkpoint).open(config, config.vocab_size)
    engine = load_engine(opened, device)
    # No layer encodes positions: what was trained on may be longer than the folder's number says.
    engine.max_context = max(engine.max_context, max(len(one.ids) for one in held_out) + NEW_TOKENS)
    with Bar("held-out loss", "tokens", sum(len(one.ids) for one in held_out), lines=False) as bar:
        losses: ConversationLosses = conversation_losses(engine, held_out, bar.add)
    prompt = first_prompt(held_out)
    (row,) = generate(engine, [prompt], GenerationOptions(NEW_TOKENS, stop=encoding.stop)).rows
    answer = encoding.decode(row.tokens)
    found = HeldOutResult(losses.per_token, losses.per_conversation, answer)
    write_json(kept, asdict(found))
    return found


def first_prompt(held_out: Sequence[Encoded]) -> list[int]:
    """Tokens in front of the first answer of the first conversation that has one."""
    one = next(one for one in held_out if any(one.trained[1:]))
    return one.ids[: one.trained.index(True, 1)]
