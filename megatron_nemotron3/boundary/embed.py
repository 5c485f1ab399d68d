"""Text embeddings of a rank's own tokens, for all tokens of a slice or for text alone.

With sequence parallelism every tensor rank needs the embeddings of other positions, and each holds a part of
the vocabulary. Megatron looks up all positions of the context rank on every tensor rank, [s / cp, b, h], and
reduce-scatters. Here it goes slice by slice: all ranks look up one rank's tokens, and the sum goes to that
rank. The bytes are the same, the largest buffer is one slice, and modality positions are left out. Each sum
is of one row and zeros, so it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


def lookup(embedding: Any, ids: Sequence[Tensor], positions: Sequence[Tensor | None], own: int) -> Tensor:
    """Embeddings [n, h] of the tokens `ids[own]`.

    Args:
        embedding: Megatron's `LanguageModelEmbedding`.
        ids: of each tensor rank, [n_rank]; one entry: all ranks need the same tokens.
        positions: of the same tokens, or None.
        own: this rank's entry.

    Raises:
        ValueError: learned positions under sequence parallelism, whose gradients would stay partial.
    """
    if len(ids) == 1:
        at = positions[0]
        rows: Tensor = embedding(input_ids=ids[0][None], position_ids=None if at is None else at[None])
        return rows.squeeze(1)
    config, words = embedding.config, embedding.word_embeddings
    if embedding.add_position_embedding:
        raise ValueError(
            "position_embedding_type='learned_absolute' with sequence parallelism: use 'rope' or 'none', or "
            "no sequence parallelism"
        )
    for hook in words._forward_pre_hooks.values():  # overlapped parameter gathering waits in one
        hook(words, ())
    rows = _Sliced.apply(words.weight, words.vocab_start_index, tuple(ids), words.tp_group, own)
    if config.use_mup and config.mup_embedding_mult != 1.0:
        rows = rows * config.mup_embedding_mult
    if config.fp32_residual_connection:
        rows = rows.float()
    with get_cuda_rng_tracker().fork():  # as upstream: tensor ranks drop different places
        dropped: Tensor = embedding.embedding_dropout(rows)
    return dropped


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, start: int, ids: tuple[Tensor, ...], group: dist.ProcessGroup, own: int
    ) -> Tensor:
        ctx.start, ctx.ids, ctx.group, ctx.own = start, ids, group, own
        ctx.like = weight.new_empty(0).expand(0), weight.shape
        mine = weight.new_empty(0, weight.shape[1])
        for rank, tokens in enumerate(ids):
            if not len(tokens):
                continue
            at, absent = _local(tokens, start, weight.shape[0])
            rows = weight.index_select(0, at).masked_fill_(absent[:, None], 0)
            dist.reduce(rows, dist.get_global_rank(group, rank), group=group)
            if rank == own:
                mine = rows
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        some, shape = ctx.like
        # In FP32, because tokens repeat: as exact as torch's own backward of an embedding.
        total = torch.zeros(shape, dtype=torch.float32, device=some.device)
        for rank, tokens in enumerate(ctx.ids):
            if not len(tokens):
                continue
            rows = grad.contiguous() if rank == ctx.own else grad.new_empty(len(tokens), shape[1])
            dist.broadcast(rows, dist.get_global_rank(ctx.group, rank), group=ctx.group)
            at, absent = _local(tokens, ctx.start, shape[0])
            total.index_add_(0, at, rows.float().masked_fill_(absent[:, None], 0))
        return total.to(some.dtype), None, None, None, None


def _local(tokens: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """(row of this rank's part of the vocabulary, or 0; whether it is another rank's)."""
    at = tokens - start
    absent = (at < 0) | (at >= size)
    return at.masked_fill(absent, 0), absent
