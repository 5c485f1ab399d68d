"""The tokens of a case, and each rank's share of them. Runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.proof.certify.case import TrainingCase

#: Tensors of a micro-batch [b, s / cp], and its PackedSeqParams or None.
Batch = tuple[dict[str, Tensor], Any]


def batches(case: TrainingCase) -> Callable[[int], Iterator[Batch]]:
    """Step -> this data-parallel rank's micro-batches, in the order in which one rank would see them."""
    from megatron.core import parallel_state

    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def of(step: int) -> Iterator[Batch]:
        whole = global_batch(case, step)
        for first in range(rank * case.micro_batch_size, case.sequences, dp * case.micro_batch_size):
            yield from case.shares(
                {key: t[first : first + case.micro_batch_size] for key, t in whole.items()}
            )

    return of


def global_batch(case: TrainingCase, step: int) -> dict[str, Tensor]:
    """Tokens, labels, loss mask and positions [sequences, s] of one optimizer step, without padding."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    n, lengths, entries = case.sequences, case.documents or (case.seq_length,), case.config.vocab_size
    streams = [torch.randint(entries, (n, length + 1), generator=generator) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(n, -1)
    # Where another number of tokens counts in every sequence, a mean of means is not the mean.
    random = torch.rand(n, sum(lengths), generator=generator) < torch.linspace(0.5, 1.0, n)[:, None]
    return {
        "tokens": torch.cat([stream[:, :-1] for stream in streams], dim=1),
        "labels": torch.cat([stream[:, 1:] for stream in streams], dim=1),
        "loss_mask": case.counting(positions, random).float(),
        "position_ids": positions,
    }


def cut(batch: dict[str, Tensor]) -> Batch:
    """This context-parallel rank's share of plain sequences."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group), None


def cut_packed(case: TrainingCase, batch: dict[str, Tensor], padded: tuple[int, ...] | None = None) -> Batch:
    """The same of packed documents: two chunks of each, the rank'th from the front and from the back.

    `padded`: the length of each with its padding in the row, if it is padded.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    assert case.documents is not None and case.micro_batch_size == 1
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    inside = padded or case.documents
    lengths = (*inside, case.seq_length - sum(inside))
    held = []
    for document in torch.arange(case.seq_length).split((case.seq_length,) if case.cut_whole else lengths):
        chunks = document.tensor_split(2 * cp)
        held += [chunks[rank], chunks[-1 - rank]]
    index = torch.cat(held)
    borders, physical = (
        torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for sizes in (case.documents, inside)
    )
    longest = max(case.documents)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=physical if padded else None,
        cu_seqlens_kv_padded=physical if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=case.seq_length,
    )
    return {key: t[:, index].contiguous() for key, t in batch.items()}, packed
