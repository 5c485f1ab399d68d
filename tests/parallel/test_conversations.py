"""Packed conversations are the conversations one by one: loss and gradients of both means, in every layout.

The reference takes each conversation alone, without padding, borders or our loss function: its token losses
are added up with weight 1, or 1 / n for a mean over conversations, and divided by the number of tokens or
conversations.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors, gather, gradients
from megatron_nemotron3.proof.certify.world import TrainingRun, initial_weights
from megatron_nemotron3.train.data import packing
from megatron_nemotron3.train.data.conversations import Conversation, Encoded
from tests.parallel.case import Case
from tests.parallel.layouts import CASES, PER_TOKEN

ROW = 64
#: Tokens of each conversation, and how many the prompt has: more than MTP has depths, as with any template.
CONVERSATIONS = [(13, 5), (39, 11), (7, 4), (22, 3), (30, 25), (9, 3), (18, 6), (51, 9)]
#: The load-balancing loss is of a row, so a pack has another one than its conversations.
NO_AUX = ("--moe-aux-loss-coeff", "0")
BASE: dict[str, Case] = {
    name: replace(CASES[name], extra=(*NO_AUX, PER_TOKEN), steps=1) for name in ("super", "nano")
}


def _tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 128, (n,), generator=generator) for n, _ in CONVERSATIONS]


class Numbered:
    """Tokens of the conversation whose only message is its number."""

    def encode(self, conversation: Conversation) -> Encoded:
        i = int(conversation.messages[0]["content"])
        n, prompt = CONVERSATIONS[i]
        return Encoded(_tokens()[i].tolist(), [place >= prompt for place in range(n)])

    def key(self) -> bytes:
        return b"numbered"


def _packed(folder: str, multiple: int = 1) -> packing.PackedConversations:
    return packing.PackedConversations(f"{folder}/chats.jsonl", Numbered(), ROW, multiple, cache=folder)


def _write(folder: str) -> None:
    """A file of the conversations, and its tokens as the packer keeps them: ranks only read them."""
    lines = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(len(CONVERSATIONS))]
    Path(folder, "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _packed(folder)


def _alone(mean: str) -> Iterator[Any]:
    """A micro-batch of each conversation alone: tensors [1, n], and what counts as 1."""
    for tokens, (n, prompt) in zip(_tokens(), CONVERSATIONS, strict=True):
        counted = torch.arange(1, n + 1).ge(prompt) & torch.arange(1, n + 1).lt(n)
        number = int(counted.sum())
        mask = counted[None].float() / (1 if mean == "tokens" else number)
        labels = torch.cat([tokens[1:], tokens.new_zeros(1)])
        yield tokens[None], labels[None], mask, number if mean == "tokens" else 1


def _step_alone(iterator: Iterator[Any], model: Any) -> Any:
    tokens, labels, mask, number = next(iterator)
    positions = torch.arange(tokens.shape[1])[None]
    output = model(tokens, positions, None, labels=labels, loss_mask=mask)

    def loss(output: Tensor) -> Any:
        total = (output * mask).sum()
        said = torch.stack([total.detach(), torch.tensor(1.0 * number)])
        return total, torch.tensor(number), {"lm loss": said}

    return output, loss


def _measure(case: Case, weights: Tensors, mean: str, separate: bool, folder: str) -> Any:
    """Loss and gradients on this rank."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_nemotron3.proof.certify.world import _mean_loss
    from megatron_nemotron3.train import fine_tuning

    run = TrainingRun(case, weights)
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
        chunk.force_all_reduce = True
    dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    if separate:
        rows, step = list(_alone(mean)), _step_alone
    else:
        cp = case.layout.cp
        multiple = 2 * cp if cp > 1 else 1
        packed = _packed(folder, multiple)
        assert len(packed) == 4, "two conversations to a row on average, and padding"
        samples = [fine_tuning.sample(packed.row(i)) for i in range(rank, len(packed), dp)]
        rows = [{name: tensor[None] for name, tensor in one.items()} for one in samples]
        step = fine_tuning.forward_step
    with fine_tuning.MEAN.using(mean):
        reported = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(rows) for _ in run.chunks] if len(run.chunks) > 1 else iter(rows),
            model=run.chunks if len(run.chunks) > 1 else run.chunks[0],
            num_microbatches=len(rows),
            seq_length=ROW,
            micro_batch_size=1,
            decoder_seq_length=ROW,
            forward_only=False,
            force_all_reduce=True,
        )
    return _mean_loss(reported), gradients(run.chunks)


def measure(case: Case, weights: Tensors, mean: str, separate: bool = False) -> tuple[float, Tensors]:
    with tempfile.TemporaryDirectory() as folder:
        _write(folder)
        work = partial(_measure, case, weights, mean, separate, folder)
        ranks = run_distributed(work, case.layout.world_size, apart=True)
    assert len({loss for loss, _ in ranks}) == 1
    return ranks[0][0], gather([pieces for _, pieces in ranks])


ROWS = [
    ("super", ParallelLayout(), "tokens", True),
    ("super", ParallelLayout(tp=2), "conversations", True),
    ("super", ParallelLayout(pp=2), "conversations", True),
    ("nano", ParallelLayout(cp=2), "tokens", True),
    ("super", ParallelLayout(cp=2), "conversations", False),
    ("super", ParallelLayout(cp=2), "tokens", True),
    ("super", ParallelLayout(), "conversations", True),
    ("super", ParallelLayout(tp=2), "tokens", True),
    ("super", ParallelLayout(pp=2), "tokens", True),
    ("super", ParallelLayout(pp=2, vpp=2), "conversations", True),
    ("super", ParallelLayout(dp=2, ep=2), "conversations", True),
    ("nano", ParallelLayout(cp=2, tp=2), "conversations", True),
]


@functools.cache
def initial(model: str) -> Tensors:
    """The weights that every layout starts from."""
    return initial_weights(BASE[model])


@functools.cache
def alone(model: str, mean: str) -> tuple[float, Tensors]:
    """The reference."""
    return measure(BASE[model], initial(model), mean, separate=True)


@pytest.mark.parametrize(
    ("model", "layout", "mean"),
    [
        pytest.param(*row[:3], marks=pytest.mark.full if row[3] else (), id=f"{row[0]}-{row[1]}-{row[2]}")
        for row in ROWS
    ],
)
def test_packed_equals_alone(model: str, layout: ParallelLayout, mean: str) -> None:
    loss, expected = alone(model, mean)
    found_loss, found = measure(BASE[model].at(layout), initial(model), mean)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-5 * scale, msg=name)


def test_the_means_differ() -> None:
    assert abs(alone("super", "tokens")[0] - alone("super", "conversations")[0]) > 1e-3
