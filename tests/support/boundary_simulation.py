"""Plans executed without processes: every rank's buffer is an array."""

from __future__ import annotations

import numpy as np

from megatron_nemotron3.boundary.plan import TransferPlan


def deliver(plan: TransferPlan, held: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Buffers of the receivers after messages and gathers.

    Args:
        held: buffer of each sender, [rows, ...].
    """
    some = next(iter(held.values()))
    wanting = {rank for lane in plan.receivers for group in lane for rank in group.ranks}
    buffers = {rank: np.zeros((plan.rows_wanted(rank), *some.shape[1:]), some.dtype) for rank in wanting}
    filled = {rank: np.zeros(len(buffer), bool) for rank, buffer in buffers.items()}
    for message in plan.messages:
        source, to = held[message.source], message.destination
        for sent, received, rows in message.pieces:
            assert sent + rows <= len(source) and received + rows <= len(buffers[to])
            assert not filled[to][received : received + rows].any(), f"rows arrive twice: {message}"
            filled[to][received : received + rows] = True
            buffers[to][received : received + rows] = source[sent : sent + rows]
    for ranks, rows, part in plan.gathers:
        own = [slice(i * part, min((i + 1) * part, rows)) for i in range(len(ranks))]
        for rank, mine in zip(ranks, own):
            assert filled[rank].sum() == filled[rank][mine].sum(), f"rank {rank} has more than its part"
        total = np.concatenate([buffers[rank][mine] for rank, mine in zip(ranks, own)])
        has = np.concatenate([filled[rank][mine] for rank, mine in zip(ranks, own)])
        assert len(total) == rows
        for rank in ranks:
            buffers[rank], filled[rank] = total.copy(), has.copy()
    assert all(mask.all() for mask in filled.values())
    return buffers
