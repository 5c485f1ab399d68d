"""This rank's part of the decoder input, [s_local, b, h], from its own text tokens and its own rows.

With sequence parallelism every tensor rank needs the embeddings of other positions, and each holds a part of
the vocabulary. Megatron looks up all positions of the context rank on every tensor rank, [s / cp, b, h], and
reduce-scatters. Here `text_embeddings` goes slice by slice: all ranks look up one rank's tokens, and the sum
goes to that rank. The bytes are the same, the largest buffer is one slice, and modality positions are left
out. Each sum is of one row and zeros, so it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.placement import (
    Placement,
    RankShard,
    assemble,
    kinds_of_ids,
    kinds_of_runs,
    make_placement,
    on_device,
    sum_of_slices,
)


def place_rows(
    shard: RankShard,
    token_ids: Mapping[str, int],
    input_ids: Tensor,
    microbatch: Microbatch | None,
    documents: Sequence[tuple[int, ...]] = (),
) -> Placement:
    """Places of rows in this rank's part of the lane's input_ids [b, s], from the feed's runs or the ids."""
    batch, length = input_ids.shape
    all_runs = {name: microbatch.runs_of(name) for name in token_ids} if microbatch is not None else {}
    runs = {name: samples for name, samples in all_runs.items() if samples is not None}
    by_feed = bool(runs) and len(runs) == len(token_ids)
    if by_feed:
        kinds = kinds_of_runs(runs, length)
        _check_feed(kinds, input_ids, token_ids)
    else:
        kinds = kinds_of_ids(input_ids, token_ids)
    described = microbatch.documents if microbatch is not None else ()
    cuts = described or documents or [()] * batch
    # With the feed's runs a rank receives only the rows of its own positions.
    return make_placement(kinds, list(token_ids), *shard.owned(length, cuts), pick=not by_feed)


def build_decoder_input(
    embedding: Any,
    shard: RankShard,
    at: Placement,
    input_ids: Tensor,
    position_ids: Tensor | None,
    rows: Mapping[str, Tensor],
) -> Tensor:
    """This rank's part [s_local, b, h] of the lane's input_ids [b, s].

    position_ids: [b, s], or [channels, b, s], or None.
    rows: modality -> [n, h], the lane's rows if `at.picked` has the modality, else those of this rank's
        positions.
    """
    device = input_ids.device
    parts = []
    for name, places in at.rows.items():
        part = rows.get(name)
        if part is None:
            if len(places):
                raise ValueError(
                    f"{len(places)} positions are for {name}, but the model has no encoder of that name: add "
                    "one, or leave these tokens out"
                )
            continue
        if name in at.picked:
            _check_rows_fit(name, at.lane_rows[name], part)
            part = sum_of_slices(part, shard.groups).index_select(0, at.picked[name])
        _check_rows_fit(name, len(places), part)
        parts.append((on_device(places, device), part))
    tokens = [on_device(where, device) for where in at.tokens]
    positions: Sequence[Tensor | None] = [None] * len(tokens)
    if position_ids is not None:
        # Multimodal rotary embedding has several channels; the first is the position.
        channel = position_ids[0] if position_ids.dim() == 3 else position_ids
        positions = [channel.flatten().index_select(0, where) for where in tokens]
    ids = [input_ids.flatten().index_select(0, where) for where in tokens]
    text = text_embeddings(embedding, ids, positions, shard.tensor_rank)
    return assemble(at, [(on_device(at.text, device), text), *parts])


def _check_feed(kinds: Tensor, input_ids: Tensor, token_ids: Mapping[str, int]) -> None:
    """Check that feed and input_ids agree. On a GPU the device asserts it, so the host does not wait."""
    if kinds.shape != input_ids.shape:
        raise ValueError(
            f"the feed describes {list(kinds.shape)} positions of this lane, input_ids has "
            f"{list(input_ids.shape)}: both must be of the same samples"
        )
    device = input_ids.device
    if device.type == "cpu" and not torch.equal(kinds, kinds_of_ids(input_ids, token_ids)):
        raise ValueError("the feed and input_ids mark other positions: both must be of the same samples")
    if device.type == "cuda":
        same = (on_device(kinds, device) == kinds_of_ids(input_ids, token_ids)).all()
        torch._assert_async(same, "the feed and input_ids mark other positions")


def _check_rows_fit(name: str, positions: int, rows: Tensor) -> None:
    if positions != len(rows):
        raise ValueError(
            f"{positions} positions of input_ids are for {name}, but there are {len(rows)} rows: encoder "
            "input, input_ids and the feed's description must be of the same samples, and the communicator "
            "must know whether the language model is sequence parallel"
        )


def text_embeddings(
    embedding: Any, ids: Sequence[Tensor], positions: Sequence[Tensor | None], own: int
) -> Tensor:
    """Embeddings [n, h] of the tokens `ids[own]`.

    ids, positions: [n_rank] of each tensor rank; a single entry if all ranks need the same tokens.
    """
    if len(ids) == 1:
        at = positions[0]
        rows: Tensor = embedding(input_ids=ids[0][None], position_ids=None if at is None else at[None])
        return rows.squeeze(1)
    config, table = embedding.config, embedding.word_embeddings
    if embedding.add_position_embedding:
        raise ValueError(
            "position_embedding_type='learned_absolute' with sequence parallelism: use 'rope' or 'none', or "
            "no sequence parallelism"
        )
    for hook in table._forward_pre_hooks.values():  # one of them waits for overlapped parameter gathering
        hook(table, ())
    rows = _SlicedLookup.apply(table.weight, table.vocab_start_index, tuple(ids), table.tp_group, own)
    if config.use_mup and config.mup_embedding_mult != 1.0:
        rows = rows * config.mup_embedding_mult
    if config.fp32_residual_connection:
        rows = rows.float()
    with get_cuda_rng_tracker().fork():  # as upstream: tensor ranks drop different elements
        dropped: Tensor = embedding.embedding_dropout(rows)
    return dropped


class _SlicedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, start: int, ids: tuple[Tensor, ...], group: dist.ProcessGroup, own: int
    ) -> Tensor:
        ctx.start, ctx.ids, ctx.group, ctx.own = start, ids, group, own
        ctx.weight_like = weight.new_empty(0).expand(0), weight.shape
        mine = weight.new_empty(0, weight.shape[1])
        for rank, tokens in enumerate(ids):
            if not len(tokens):
                continue
            at, absent = _local_vocabulary_rows(tokens, start, weight.shape[0])
            rows = weight.index_select(0, at).masked_fill_(absent[:, None], 0)
            dist.reduce(rows, dist.get_global_rank(group, rank), group=group)
            if rank == own:
                mine = rows
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        some, shape = ctx.weight_like
        # FP32, because tokens repeat: as exact as torch's own backward of an embedding.
        total = torch.zeros(shape, dtype=torch.float32, device=some.device)
        for rank, tokens in enumerate(ctx.ids):
            if not len(tokens):
                continue
            rows = grad.contiguous() if rank == ctx.own else grad.new_empty(len(tokens), shape[1])
            dist.broadcast(rows, dist.get_global_rank(ctx.group, rank), group=ctx.group)
            at, absent = _local_vocabulary_rows(tokens, ctx.start, shape[0])
            total.index_add_(0, at, rows.float().masked_fill_(absent[:, None], 0))
        return total.to(some.dtype), None, None, None, None


def _local_vocabulary_rows(tokens: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """(row in this rank's part of the vocabulary, or 0; whether the token is in another rank's part)."""
    at = tokens - start
    absent = (at < 0) | (at >= size)
    return at.masked_fill(absent, 0), absent
