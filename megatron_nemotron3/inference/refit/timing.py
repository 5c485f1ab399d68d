"""Time of a refit by the links of the GPUs (`launch.plan.hardware`). Needs numpy.

A rank sends and receives at the same time, and its NVLink and its network port work side by side. Ranks are
numbered as by `Refit`, NVLink domains are consecutive ranks. Latency and the checksums are not counted.
"""

from __future__ import annotations

import numpy

from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.launch.plan.hardware import GPU


def seconds(plan: RefitPlan, gpu: GPU) -> float:
    """Seconds of the busiest port, after the first step has been packed (read and written once)."""
    trainers = plan.training.layout.world_size
    offset = 0 if plan.colocated else trainers
    busy = {}
    for side, number in (("out", trainers), ("in", plan.serving.size)):
        for link in (gpu.nvlink, gpu.network):
            busy[side, link] = numpy.zeros(number)
    first = 0
    for transfer in plan.transfers:
        senders, receivers = transfer.pairs
        near = senders // gpu.nvlink_domain == (receivers + offset) // gpu.nvlink_domain
        other = plan.between(senders, receivers)
        first = max(first, transfer.space if transfer.step == 0 else 0)
        for link, those in ((gpu.nvlink, near & other), (gpu.network, ~near & other)):
            for side, ranks in (("out", senders), ("in", receivers)):
                numpy.add.at(busy[side, link], ranks[those], transfer.bytes / link)
    return float(max(one.max() for one in busy.values())) + 2 * first / gpu.hbm
