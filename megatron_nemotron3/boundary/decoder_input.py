"""This rank's part of the decoder input, [s_local, b, h], from its own text tokens and its own rows.

s_local is the sequence divided by context and sequence parallelism (`partition.positions`). A place is an
index into the flat [s_local * b, h] view. Places are computed on the host from the runs of the feed, so that
the host never waits for the device; without a feed they are computed from the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.intervals import Intervals
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import Runs, positions, sample_shares


@dataclass(frozen=True)
class RankShard:
    """The part of the language model's input that this rank has: its lane, and its part of the sequence.

    tp is 1 without sequence parallelism; groups: process groups of the dimensions that cut the sequence.
    """

    cp: int = 1
    context_rank: int = 0
    tp: int = 1
    tensor_rank: int = 0
    groups: tuple[Any, ...] = ()
    lane: int = 0
    lanes: int = 1

    @classmethod
    def of(cls, partition: Any, layout: Layout | None) -> RankShard:
        """Make it from upstream's `PartitionConfig` (None: not cut) and the layout (None: one lane)."""
        made = cls()
        if partition is not None and partition.use_cp:
            group = partition.cp_group
            made = replace(made, cp=group.size(), context_rank=group.rank(), groups=(group,))
        if partition is not None and partition.seq_parallel and partition.tp_group.size() > 1:
            group = partition.tp_group
            groups = (*made.groups, group)
            made = replace(made, tp=group.size(), tensor_rank=group.rank(), groups=groups)
        if layout is not None and dist.get_rank() in layout.ranks:
            made = replace(made, lane=layout.lane_of(dist.get_rank()), lanes=layout.dp)
        return made

    def of_lane(self, microbatch: Microbatch | None) -> Microbatch | None:
        if microbatch is None or self.lanes == 1:
            return microbatch
        count = len(microbatch.rows[0][1]) if microbatch.rows else len(microbatch.lengths)
        mine = sample_shares(count, self.lanes)[self.lane]
        cut = slice(mine.start, mine.stop)
        return Microbatch(
            tuple((name, rows[cut]) for name, rows in microbatch.rows),
            tuple((name, runs[cut]) for name, runs in microbatch.runs),
            microbatch.lengths[cut],
            microbatch.documents[cut],
            tuple((name, media[cut]) for name, media in microbatch.media),
        )

    def owned(self, length: int, documents: Sequence[tuple[int, ...]]) -> tuple[list[list[Intervals]], int]:
        """Positions of each sample for each tensor rank that owns other positions, and this rank's index."""
        first, cut = self.context_rank * self.tp, self._positions(length, self.tp, documents)
        return [[ranks[first + t] for ranks in cut] for t in range(self.tp)], self.tensor_rank

    def _positions(
        self, length: int, tp: int, documents: Sequence[tuple[int, ...]]
    ) -> list[tuple[Intervals, ...]]:
        return [
            positions(length, self.cp, tp, sequence_parallel=tp > 1, documents=tuple(bounds))
            for bounds in documents
        ]

    def of_context(self, values: Tensor, documents: Sequence[tuple[int, ...]]) -> Tensor:
        """Values at the positions of this context rank: [b, s] -> [b, s / cp]."""
        if self.cp == 1:
            return values
        cut = self._positions(values.shape[1], 1, documents)
        at = torch.stack([expand(ranks[self.context_rank]) for ranks in cut])
        return values.gather(1, on_device(at, values.device))

    def documents(self, packed: PackedSeqParams | None, length: int) -> tuple[int, ...]:
        """Borders of the padded documents of a packed sequence; () if it is not packed or not cut.

        Tokens after the last document are one more document. On a GPU the host waits for the borders.
        """
        if packed is None or self.cp == self.tp == 1:
            return ()
        padded = packed.cu_seqlens_q_padded
        borders = packed.cu_seqlens_q if padded is None else padded
        if packed.qkv_format != "thd" or borders is None:
            raise ValueError(
                f"packed sequences with qkv_format={packed.qkv_format!r}: use 'thd' and cu_seqlens_q"
            )
        found = borders.tolist()
        if found[-1] > length:
            raise ValueError(
                f"cu_seqlens end at {found[-1]}, but the sequence has {length}: pass those of this batch"
            )
        return tuple(found) if found[-1] == length else (*found, length)


@dataclass(frozen=True)
class Placement:
    """Places of all rows in one rank's part of the decoder input; length, batch: s_local and b.

    text: places [n] of text tokens.
    tokens: indices of text tokens in the flat input_ids [b * s], for each tensor rank; one entry if all
        tensor ranks own the same positions.
    rows: modality -> places of its rows, by sample, then by position.
    picked: modality -> indices of these rows among the lane's rows, if the part is not the whole sequence.
    lane_rows: modality -> number of the lane's rows, for the modalities in `picked`.
    """

    length: int
    batch: int
    text: Tensor
    tokens: tuple[Tensor, ...]
    rows: dict[str, Tensor]
    picked: dict[str, Tensor]
    lane_rows: dict[str, int]


def expand(rows: Intervals) -> Tensor:
    """The row numbers [n] of a set, on the host."""
    return torch.cat([torch.arange(start, stop) for start, stop in rows] or [torch.arange(0)])


def on_device(index: Tensor, device: torch.device) -> Tensor:
    """Copy an index from the host to the device without synchronizing."""
    if index.device == device or device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def kinds_of_runs(runs: Mapping[str, Sequence[Runs]], length: int) -> Tensor:
    """Kind of each position by the feed, [b, s] on the host: 0 for text, i + 1 for the i-th modality."""
    batch = len(next(iter(runs.values())))
    kinds = torch.zeros(batch, length, dtype=torch.int8)
    for number, (name, samples) in enumerate(runs.items(), 1):
        for sample, places in enumerate(samples):
            for first, rows in places:
                part = kinds[sample, first : first + rows]
                if len(part) != rows or bool(part.any()):
                    raise ValueError(
                        f"{name} rows at positions [{first}, {first + rows}) of sample {sample}: the "
                        f"sequence has {length}, and each position takes one row"
                    )
                part.fill_(number)
    return kinds


def kinds_of_ids(input_ids: Tensor, token_ids: Mapping[str, int]) -> Tensor:
    """Kind of each position by the token ids, [b, s] on their device, numbered as in `kinds_of_runs`."""
    kinds = torch.zeros_like(input_ids, dtype=torch.int8)
    for number, token in enumerate(token_ids.values(), 1):
        kinds.masked_fill_(input_ids == token, number)
    return kinds


def make_placement(
    kinds: Tensor,
    names: Sequence[str],
    owned: Sequence[Sequence[Intervals]],
    own: int,
    pick: bool = True,
) -> Placement:
    """Places of a rank's part from kinds [b, s], for which on a GPU the host waits."""
    batch, whole = kinds.shape
    mine = [torch.stack([expand(rows) for rows in samples]).to(kinds.device) for samples in owned]
    start = torch.arange(batch, device=kinds.device)[:, None] * whole
    tokens = tuple((at + start)[kinds.gather(1, at) == 0] for at in mine)
    part = kinds.gather(1, mine[own])  # [b, s_local]
    length = part.shape[1]
    place = (
        torch.arange(length, device=kinds.device) * batch + torch.arange(batch, device=kinds.device)[:, None]
    )
    rows, picked, lane_rows = {}, {}, {}
    for number, name in enumerate(names, 1):
        here = part == number
        rows[name] = place[here]
        if pick and length < whole:
            order = ((kinds == number).flatten().cumsum(0) - 1).view_as(kinds)
            lane_rows[name] = int((kinds == number).sum())
            picked[name] = order.gather(1, mine[own])[here]
    return Placement(length, batch, place[part == 0], tokens, rows, picked, lane_rows)


def assemble(placement: Placement, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Write rows to their places: [s_local, b, h] from parts (places [n], rows [n, h]) that fill it."""
    total = placement.length * placement.batch
    counts = [(len(places), rows.shape[0]) for places, rows in parts]
    if any(a != b for a, b in counts) or sum(a for a, _ in counts) != total:
        raise ValueError(f"(places, rows) = {counts} for {total} positions: give one row for each position")
    kinds = {(rows.dtype, rows.shape[1:]) for _, rows in parts}
    if len(kinds) != 1:
        raise ValueError(
            f"rows of text and modalities differ: {sorted(map(str, kinds))}: use one dtype and width"
        )
    out: Tensor = _Assemble.apply(tuple(places for places, _ in parts), *(rows for _, rows in parts))
    return out.view(placement.length, placement.batch, -1)


class _Assemble(torch.autograd.Function):
    """Writes one buffer once; autograd's own index_copy would copy the buffer for every part."""

    @staticmethod
    def forward(ctx: Any, places: tuple[Tensor, ...], *parts: Tensor) -> Tensor:
        ctx.places = places
        out = parts[0].new_empty(sum(len(p) for p in places), parts[0].shape[1])
        for at, rows in zip(places, parts, strict=True):
            out.index_copy_(0, at, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            grad.index_select(0, at) if need else None for at, need in zip(ctx.places, needed, strict=True)
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
    """This rank's part of the lane's input_ids [b, s]; position_ids: [b, s], or [channels, b, s], or None.

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
            # In backward it is the sum of the gradients. Slices are disjoint, so it is exact.
            for group in shard.groups:
                part = copy_to_tensor_model_parallel_region(part, group=group)
            part = part.index_select(0, at.picked[name])
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

    With sequence parallelism every tensor rank needs the embeddings of other positions, and each holds a part
    of the vocabulary. All ranks look up one rank's tokens, and the sum goes to that rank; each is of one row
    and zeros, so it is exact. Megatron would reduce-scatter [s / cp, b, h]: the same bytes, larger buffers.

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
