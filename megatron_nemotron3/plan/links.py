"""Which links a process group's traffic takes, and how long. Standard library only.

Megatron's rank order is tp, cp, dp, pp (expert grid: etp, ep, edp, pp), fastest first, so a group is a run of
ranks with a fixed stride. The part of it in one NVLink domain talks over NVLink, the rest over the network.
Collectives over several domains are taken as NCCL's two levels: inside the domain first, then one rank of
each domain with its like, each with its share of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.plan.hardware import GPU
from megatron_nemotron3.plan.traffic import ALL_REDUCE, ALL_TO_ALL, SEND, Transfer


def strides(layout: ParallelLayout) -> dict[str, int]:
    """Link -> distance of neighbors in its group, in ranks."""
    stage = layout.tp * layout.cp * layout.dp
    return {
        "tp": 1,
        "cp": layout.tp,
        "dp": layout.tp,  # context ranks are part of the group
        "pp": stage,
        "embedding": stage * (layout.pp - 1),
        "etp": 1,
        "ep": layout.etp,
        "edp": layout.expert_ranks,
    }


def usable_domain(gpu: GPU) -> int:
    """GPUs of a domain that groups of powers of two can use: 64 of 72, as NVIDIA's launches do."""
    return int(2 ** (gpu.nvlink_domain.bit_length() - 1))


@dataclass(frozen=True)
class Split:
    """Bytes that one rank sends."""

    nvlink: float
    network: float


def neighbors(ranks: int, stride: int, domain: int) -> int:
    """How many ranks of a group share an NVLink domain."""
    return max(1, min(ranks, domain // stride))


def split(transfer: Transfer, layout: ParallelLayout, gpu: GPU) -> Split:
    """Where a rank's bytes go."""
    local = neighbors(transfer.ranks, strides(layout)[transfer.link], usable_domain(gpu))
    if transfer.collective == SEND:
        return Split(transfer.buffer, 0.0) if local > 1 else Split(0.0, transfer.buffer)
    if transfer.collective == ALL_TO_ALL:
        each = transfer.buffer / transfer.ranks
        return Split(each * (local - 1), each * (transfer.ranks - local))
    times = 2 if transfer.collective == ALL_REDUCE else 1
    domains = transfer.ranks / local
    return Split(
        times * transfer.buffer * (local - 1) / local,
        times * transfer.buffer / local * (domains - 1) / domains,
    )


def deduplicated(whole: Split, topk: int, ranks: int, local: int) -> Split:
    """What a dispatcher sends that sends a token once to each domain and rank (HybridEP, DeepEP).

    With a token's experts drawn evenly; the all-to-all dispatcher sends every one of its `topk` copies.

    Args:
        whole: what the all-to-all dispatcher sends.
        ranks, local: of the expert group, and those of them in a domain.
    """
    domains = ranks / local

    def reached(places: float) -> float:
        """Places that topk draws reach."""
        return places * (1 - (1 - 1 / places) ** topk)

    nvlink = reached(ranks) * (local - 1) / ranks / (topk * (local - 1) / ranks) if local > 1 else 1.0
    network = (
        reached(domains) * (domains - 1) / domains / (topk * (ranks - local) / ranks) if domains > 1 else 1.0
    )
    return replace(whole, nvlink=whole.nvlink * nvlink, network=whole.network * network)
