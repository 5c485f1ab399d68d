"""Measure the importance of a checkpoint's parts on text, on this process or on all ranks of a layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.into_model import load_weights
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.launch import Launch
from megatron_nemotron3.post_training.compress.importance import measure
from megatron_nemotron3.post_training.compress.scores import Scores
from megatron_nemotron3.train.build import build


def calibrate(opened: Checkpoint, launch: Launch, text: Tensor, device: str) -> tuple[Scores, float]:
    """Return the scores of a checkpoint's model, and its loss on the text in nats per token. Collective."""
    with cpu_mode() if device == "cpu" else nullcontext(), _world(device):
        model = build(launch)
        load_weights(model, opened)
        model.eval()
        losses: list[Tensor] = []
        scores = measure(model, opened.config, partial(_forward, model, text, losses))
        total = torch.stack(losses).sum(0) if losses else text.new_zeros(2, dtype=torch.float64)
        total = total.to(next(model.parameters()).device)
        torch.distributed.all_reduce(total)  # ranks that share tokens count them alike
        return scores, float(total[0] / total[1])


@contextmanager
def _world(device: str) -> Iterator[None]:
    """The ranks of torchrun, if it started this process; `build` makes a world of one process otherwise."""
    existed = torch.distributed.is_initialized()
    if "RANK" in os.environ and not existed:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        if not existed and torch.distributed.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _forward(model: HybridModel, text: Tensor, losses: list[Tensor]) -> None:
    """Run this data-parallel rank's windows through the stages; sums of losses are added on the last one."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = text[rank::size].to(next(model.parameters()).device)
    positions = torch.arange(own.shape[1] - 1, device=own.device)[None]

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        losses.append(torch.stack([output.double().sum(), output.new_tensor(output.numel()).double()]))
        return output.float().mean(), {}

    def step(windows: Iterator[Tensor], part: Any) -> tuple[Tensor, Any]:
        window = next(windows)[None]
        return part(window[:, :-1], positions, None, labels=window[:, 1:].contiguous()), loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(own),
        model=model,
        num_microbatches=len(own),
        seq_length=own.shape[1] - 1,
        micro_batch_size=1,
        forward_only=True,
    )
