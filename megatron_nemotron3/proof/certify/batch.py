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
    cut = _cut_packed if case.documents else _cut

    def of(step: int) -> Iterator[Batch]:
        whole = global_batch(case, step)
        for first in range(rank * case.micro_batch_size, case.sequences, dp * case.micro_batch_size):
            batch = {key: t[first : first + case.micro_batch_size] for key, t in whole.items()}
            if case.separate:
                assert case.documents is not None
                lengths = [length for length in case.documents if length]
                parts = zip(*(t.split(lengths, dim=1) for t in batch.values()))
                yield from ((_masked(case, dict(zip(batch, part))), None) for part in parts)
            else:
                share, packed = cut(case, batch)
                yield _masked(case, share), packed

    return of


def _masked(case: TrainingCase, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    if case.model_mask == "absent":
        return batch
    counted = batch.pop("padding", 0) if case.model_mask == "padding counts" else 0
    return {**batch, "model_mask": batch["loss_mask"] + counted}


def global_batch(case: TrainingCase, step: int) -> dict[str, Tensor]:
    """Tokens, labels, loss mask and positions [sequences, s] of one optimizer step, without padding."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    n, lengths, entries = case.sequences, case.documents or (case.seq_length,), case.config.vocab_size
    streams = [torch.randint(entries, (n, length + 1), generator=generator) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(n, -1)
    # Where another number of tokens counts in every sequence, a mean of means is not the mean.
    random = torch.rand(n, sum(lengths), generator=generator) < torch.linspace(0.5, 1.0, n)[:, None]
    heads = positions >= (case.config.mtp_num_layers or 0)
    quarter = case.seq_length // 4
    masks = {
        "none": positions >= 0,
        "random": random,
        "heads": heads,
        "random heads": random & heads,
        "middle": (positions < quarter) | (positions >= case.seq_length - quarter),
    }
    return {
        "tokens": torch.cat([stream[:, :-1] for stream in streams], dim=1),
        "labels": torch.cat([stream[:, 1:] for stream in streams], dim=1),
        "loss_mask": masks[case.mask].float(),
        "position_ids": positions,
    }


def _cut(case: TrainingCase, batch: dict[str, Tensor]) -> Batch:
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group), None


def _cut_packed(case: TrainingCase, batch: dict[str, Tensor]) -> Batch:
    """The same for packed documents: two chunks of each, the rank'th from the front and from the back."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    assert case.documents is not None and case.micro_batch_size == 1
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    padded = case.padded or case.documents
    lengths = (*padded, case.seq_length - sum(padded))
    if padded != case.documents:
        batch = _pad(batch, case.documents, lengths)
    held = []
    for document in torch.arange(case.seq_length).split((case.seq_length,) if case.cut_whole else lengths):
        chunks = document.tensor_split(2 * cp)
        held += [chunks[rank], chunks[-1 - rank]]
    index = torch.cat(held)
    borders, physical = (
        torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for sizes in (case.documents, padded)
    )
    longest = max(case.documents)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=physical if case.padded else None,
        cu_seqlens_kv_padded=physical if case.padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=case.seq_length,
    )
    return {key: t[:, index].contiguous() for key, t in batch.items()}, packed


def _pad(batch: dict[str, Tensor], documents: tuple[int, ...], padded: tuple[int, ...]) -> dict[str, Tensor]:
    """Documents with tokens and labels of 1, which no loss must see, behind each and behind the last."""
    n = next(iter(batch.values())).shape[0]
    real = torch.cat([torch.arange(p) < d for d, p in zip((*documents, 0), padded)])
    result = {"padding": (~real).float().expand(n, -1)}
    for key, t in batch.items():
        result[key] = t.new_full((n, len(real)), 0 if key == "loss_mask" else 1)
        result[key][:, real] = t
    return result
