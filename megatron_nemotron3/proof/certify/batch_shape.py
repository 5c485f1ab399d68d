"""What a step of a proxy trains on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify import small
from megatron_nemotron3.proof.certify.large import FullLaunch
from megatron_nemotron3.proof.certify.layouts import Sizes

#: Documents of a packed row. The last one ends with the row, as the data sets of Megatron make it.
_DOCUMENTS = (27, 5, 32)
#: The same in multiples of 2 * CP, to which `--sft` pads each document.
_EVEN = (24, 8, 32)
#: Largest number of micro-batches of a step that is tried, if it need not be more.
_MOST = 20


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What a step of the proxy trains on."""

    seq_length: int = small.SEQUENCE
    micro_batch_size: int = 1
    #: Those of a global batch, the same in all layouts.
    sequences: int = 8
    #: Whether tokens are left out of the loss, another number of them in every sequence.
    masked: bool = False
    #: Lengths of documents packed into a row, None without packing.
    documents: tuple[int, ...] | None = None
    #: Whether a packed row is cut over CP ranks as if it were one document.
    cut_whole: bool = False


def batch_of(launch: FullLaunch, sizes: Sequence[Sizes]) -> BatchShape:
    """Return the batch of a proxy: as many micro-batches against pipeline ranks as in the launch, or few."""
    given = launch.given
    sft, borders = "--sft" in given, "--dataloader-inter-document-masking" in given
    packed = sft or borders
    micro = 1 if packed or (given.get("--micro-batch-size") or ("1",))[0] == "1" else 2
    cp = launch.sizes.layout.cp > 1
    return BatchShape(
        micro_batch_size=micro,
        sequences=micro * _microbatches(launch, sizes),
        masked=sft or "--eod-mask-loss" in given,
        documents=(_EVEN if sft and cp else _DOCUMENTS) if packed else None,
        cut_whole=borders and not sft and cp,
    )


def _microbatches(launch: FullLaunch, sizes: Sequence[Sizes]) -> int:
    """Return the micro-batches of all data-parallel ranks together, the same number in all layouts."""
    large, own = launch.sizes.layout, _own_microbatches(launch)

    def kept(total: int, layout: ParallelLayout) -> bool:
        count = total // layout.dp
        if layout.pp == 1 or large.pp == 1:
            return (count > 1) == (own != 1)
        return _compared(count, layout.pp) == _compared(own or large.pp + 1, large.pp)

    every = [s.layout for s in sizes]
    step = math.lcm(*(one.dp * (one.pp if one.vpp > 1 else 1) for one in every))
    return max(
        range(step, max(4 * step, _MOST) + 1, step),
        key=lambda total: (sum((2 if one.pp > 1 else 1) * kept(total, one) for one in every), -total),
    )


def _compared(count: int, pp: int) -> int:
    return (count > pp) - (count < pp)


def _own_microbatches(launch: FullLaunch) -> int | None:
    """Return the micro-batches of a rank of the launch; None if the options do not say."""
    sizes = [(launch.given.get(name) or ("",))[0] for name in ("--global-batch-size", "--micro-batch-size")]
    if not launch.world_known or not all(size.isdecimal() and int(size) for size in sizes):
        return None
    return max(1, int(sizes[0]) // int(sizes[1]) // launch.sizes.layout.dp)
