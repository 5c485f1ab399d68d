"""Losses of held-out conversations in the layout of a training (`measure`): rows hold several, kept apart.

The command line is that of a training on the file of the conversations, with the checkpoint, and the file
for the result: a JSON list of [sum of the losses, tokens] of each conversation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model
from torch import Tensor
from torch.utils.data import default_collate

from megatron_nemotron3.checkpoints.convert.into_model import load_weights
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.layers.context_parallel import borders_of, gathered
from megatron_nemotron3.train import fine_tuning
from megatron_nemotron3.train.build import model_provider
from megatron_nemotron3.train.data.packing import PackedConversations, conversation_multiple
from megatron_nemotron3.train.inputs import MEANS

#: Losses and tokens of a conversation.
Total = tuple[float, int]


def _arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for name in ("--held-out-checkpoint", "--held-out-result"):
        parser.add_argument(name, type=Path, required=True)
    return parser


def _forward(iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    given = fine_tuning.inputs(next(iterator), MEANS[0], cp, rank)
    return fine_tuning.forward(model, given), partial(_totals, given)


def _totals(given: Any, losses: Tensor, non_loss_data: bool = True) -> list[Total]:
    """Of token losses [1, s / cp]: what is of each conversation of the row."""
    cp, mask = mpu.get_context_parallel_group(), given.tensors["loss_mask"]
    _, ends = borders_of(given.packed, mask.numel() * cp.size())
    weighted = losses.double().view_as(mask) * mask
    both = (gathered(one, ends, cp)[0] for one in (weighted, mask.double()))
    sums, counts = (torch.stack([one[a:b].sum() for a, b in pairwise(ends)]).tolist() for one in both)
    return [(total, int(number)) for total, number in zip(sums, counts, strict=True) if number]


def _batches(rows: PackedConversations, places: list[int]) -> Iterator[Any]:
    for done, place in enumerate(places, 1):
        yield default_collate([fine_tuning.sample(rows.row(place))])
        if torch.distributed.get_rank() == 0:
            print(f"{done} of {len(places)} rows", flush=True)


def main() -> None:
    """Measure, and write the result on rank 0."""
    args = parse_and_validate_args(_arguments)
    initialize_megatron()
    (model,) = get_model(model_provider, wrap_with_ddp=False)
    load_weights(unwrapped(model), find_checkpoint(args.held_out_checkpoint).open(None))
    model.eval()
    multiple = conversation_multiple(args.context_parallel_size)
    rows = PackedConversations(
        args.data_path[0], args.tokenizer_model, args.seq_length, multiple, args.data_cache_path
    )
    lanes, lane = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    own = list(range(lane, len(rows), lanes))
    # All lanes compute as many rows, because experts are shared; what a lane lacks repeats the first row.
    steps = -(-len(rows) // lanes)
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=_batches(rows, own + [0] * (steps - len(own))),
            model=model,
            num_microbatches=steps,
            seq_length=args.seq_length,
            micro_batch_size=1,
            decoder_seq_length=args.seq_length,
            forward_only=True,
            collect_non_loss_data=True,
        )
    is_first = mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0
    mine = [total for row in found[: len(own)] for total in row] if found and is_first else []
    every: list[list[Total]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(every, mine)
    if torch.distributed.get_rank() == 0:
        write_json(args.held_out_result, [total for one in every for total in one])


if __name__ == "__main__":
    main()
