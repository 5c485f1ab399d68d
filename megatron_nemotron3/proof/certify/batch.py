"""A context-parallel rank's share of a micro-batch. Runs on the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Tensors of a micro-batch [b, s / cp], and its PackedSeqParams or None.
Batch = tuple[dict[str, Tensor], Any]


def cut(batch: dict[str, Tensor]) -> Batch:
    """This context-parallel rank's share of plain sequences."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group), None


def cut_packed(
    batch: dict[str, Tensor],
    documents: tuple[int, ...],
    padded: tuple[int, ...] | None = None,
    whole: bool = False,
) -> Batch:
    """The same of packed documents: two chunks of each, the rank'th from the front and from the back.

    Args:
        documents: their lengths.
        padded: the same with the padding of each inside the row, if they are padded.
        whole: cut the row as if it were one document.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    rows, length = batch["tokens"].shape
    assert rows == 1
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    inside = padded or documents
    lengths = (*inside, length - sum(inside))
    held = []
    for document in torch.arange(length).split((length,) if whole else lengths):
        chunks = document.tensor_split(2 * cp)
        held += [chunks[rank], chunks[-1 - rank]]
    index = torch.cat(held)
    borders, physical = (
        torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for sizes in (documents, inside)
    )
    longest = max(documents)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=physical if padded else None,
        cu_seqlens_kv_padded=physical if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=length,
    )
    return {key: t[:, index].contiguous() for key, t in batch.items()}, packed
