"""The random Hadamard transform of NVFP4 training: blocks of 16 times diag(signs) H / 4.

H is Sylvester's matrix of order 16. The product is orthogonal, so rotating both operands of a product along
the axis that is summed over changes nothing but rounding. The signs are drawn once and for all:
TransformerEngine hard-codes them, and so do we, to the bit.
"""

from __future__ import annotations

import functools

import torch

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.lru_cache(maxsize=8)
def matrix(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """diag(SIGNS) H16 / 4, [16, 16]; a row vector times it is the transform. Exact in every dtype."""
    # Entry (i, j) of Sylvester's matrix is the parity of the bits that i and j share.
    entries = [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(SIZE)] for i, sign in enumerate(SIGNS)]
    with torch.inference_mode(False):  # the cached tensor outlives the caller's mode
        return torch.tensor(entries, dtype=dtype, device=device)


def rotate(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Transform blocks along axis 1.

    Args:
        blocks: float32 [n, 16] or [n, 16, k], contiguous.
        out: same shape, contiguous; receives the result and is returned.
    """
    h = matrix(blocks.device)
    if blocks.ndim == 2:
        return torch.mm(blocks, h, out=out)
    return torch.bmm(h.t().expand(len(blocks), SIZE, SIZE), blocks, out=out)
