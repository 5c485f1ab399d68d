"""Quantization blocks of a tensor: views, largest magnitudes, and pieces that fit the cache.

In the view for axis -1, [blocks, block], a row has a scale; in that for axis -2 and tiles, [groups, block,
k], a column has one, and a tile repeats its scale in 16 columns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from megatron_nemotron3.precision.recipe import Spec

#: Elements that a CPU thread processes at once: 512 KiB in FP32, so that two such buffers fit an L2 cache.
PIECE = 2**17


def check(x: torch.Tensor, spec: Spec) -> None:
    """Raise ValueError if x has fewer than 2 axes, an unsupported dtype, or is not divisible into blocks."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{x.dtype} cannot be quantized: use float32, bfloat16 or float16")
    if x.ndim < 2:
        raise ValueError(f"shape {list(x.shape)} has {x.ndim} axes: 2 or more are needed")
    for axis in (-1, -2) if spec.tile else (spec.axis,):
        if x.shape[axis] % spec.block:
            raise ValueError(
                f"axis {axis} of {list(x.shape)} is not divisible by the {spec.format} block of "
                f"{spec.block}: pad it, or leave this operand unquantized"
            )


def view(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """View of a contiguous x in which blocks lie along axis 1."""
    if spec.axis == -1 and not spec.tile:
        return x.view(-1, spec.block)
    return x.view(-1, spec.block, x.shape[-1])


def grid_shape(x: torch.Tensor, spec: Spec) -> list[int]:
    """Shape of the block grid of x: [..., m, k/16], [..., m/16, k] or [..., m/16, k/16]."""
    shape = list(x.shape)
    for axis in (-1, -2) if spec.tile else (spec.axis,):
        shape[axis] //= spec.block
    return shape


def pieces(*views: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split views of equal length in axis 0 into parts that fit the cache; on a GPU yield them whole.

    The first view is the largest.
    """
    first = views[0]
    step = len(first)
    if first.device.type == "cpu":
        step = max(1, PIECE * torch.get_num_threads() * len(first) // first.numel())
    if step >= len(first):
        return iter((views,))
    return zip(*(v.split(step) for v in views), strict=True)


class _ScratchBuffers(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}


_scratch_buffers = _ScratchBuffers()
_SMALL = 2**14


def scratch(like: torch.Tensor, number: int) -> torch.Tensor:
    """Uninitialized FP32 memory of the shape of a piece; buffer `number` is 0, 1 or 2.

    On a CPU each thread reuses its buffers: new memory costs a page fault per 4 KiB, more than one pass.
    """
    count = like.numel()
    if like.device.type != "cpu" or not _SMALL < count <= PIECE * torch.get_num_threads():
        return torch.empty_like(like, dtype=torch.float32)
    buffers = _scratch_buffers.buffers
    if number not in buffers or len(buffers[number]) < count:
        with torch.inference_mode(False):
            buffers[number] = torch.empty(count)
    return buffers[number][:count].view(like.shape)


def largest(magnitudes: torch.Tensor) -> torch.Tensor:
    """Maxima along axis 1 of a piece of non-negative float32, [n] or [n, k]; NaN propagates."""
    # Integers have the same order (NaN last), and torch reduces them over 16 neighbors twice as fast.
    return magnitudes.view(torch.int32).amax(1).view(torch.float32)


def expand(grid: torch.Tensor, blocks: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Reshape values on the block grid to [n, 1] or [n, 1, k], which broadcast to a view."""
    if spec.tile:
        grid = grid.reshape(len(blocks), -1, 1).expand(-1, -1, spec.block)
    return grid.reshape(len(blocks), 1, *blocks.shape[2:])
