"""Causal depthwise convolution and activation of the Mamba-2 mixer.

    y_t = silu(bias + sum_j weight_j x_{t - (k - 1) + j})       per channel, j = 0 .. k - 1

On CUDA in BF16 and FP16 the package causal-conv1d computes it, if it is installed. Else this does, in blocks
of tokens that stay in cache, with a hand-written backward.

x is [b, s, c], channels last as in the mixer. A token sees only its own document (`seq_idx`). Sums are FP32
(FP64 if x is FP64); y has the dtype of x, every gradient the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.chunked_scan import document_starts
from megatron_nemotron3.layers.functional import Place, accumulation_dtype
from megatron_nemotron3.layers.ssd import HALF, library
from megatron_nemotron3.precision.settings import library_kernels_enabled

#: Elements [rows, tokens, c] per block, by device type. On a CPU 512 KiB in FP32, so that the few live
#: tensors fit the second-level cache: the fastest of 2^15 to 2^18 on two AVX-512 cores.
BLOCK_ELEMENTS = {"cpu": 2**17, "cuda": 2**26}
#: Devices on which the host reads the borders of documents, to cut x at them. That is less work than masks,
#: but on a GPU the host would wait, and launch kernels for each document.
CUTTING = {"cpu"}
#: The package's kernel computes offsets, in elements, in 32 bits without a check.
LIBRARY_ELEMENTS = 2**32
#: Name of the activation -> whether SiLU is applied.
ACTIVATIONS = {"silu": True, "swish": True, None: False}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    x_gradient: Place = None,
) -> Tensor:
    """Causal depthwise convolution and activation; differentiable once. Saves only its inputs.

    Args:
        x: [b, s, c], any strides.   bias: [c] or None.
        weight: [c, 1, k] or [c, k]; the last tap multiplies the current token.
        activation: "silu" (or "swish"), or None.
        seq_idx: [b, s] integer document index, non-decreasing.
        x_gradient: not used by the package's kernel, which allocates.

    Returns: y [b, s, c] in the dtype of x. Before a document are zeros.
    """
    taps = _checked_taps(x, weight, bias, activation, seq_idx)
    if library_computes(x, taps) and (kernel := library_kernel()) is not None:
        return by_library(kernel, x, taps, bias, activation, seq_idx)
    y: Tensor = _CausalConv.apply(x, taps, bias, seq_idx, ACTIVATIONS[activation], x_gradient)
    return y


@cache
def library_kernel() -> Any:
    """`causal_conv1d_fn` of the package causal-conv1d, None if it is not installed or not compiled."""
    compiled, package = library("causal_conv1d_cuda"), library("causal_conv1d")
    return package.causal_conv1d_fn if package and hasattr(compiled, "causal_conv1d_fwd") else None


def library_computes(x: Tensor, taps: Tensor) -> bool:
    """Whether the package's kernel is used. Its gradients of taps and bias are sums in no fixed order."""
    (c, k), elements = taps.shape, x.numel()
    supported = x.is_cuda and x.dtype in HALF and c % 8 == 0 and 2 <= k <= 4 and elements < LIBRARY_ELEMENTS
    return supported and library_kernels_enabled() and not torch.are_deterministic_algorithms_enabled()


def by_library(
    kernel: Any, x: Tensor, taps: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Tensor | None
) -> Tensor:
    """Call the package's function, whose x is [b, c, s], with channels next to each other."""
    (b, s, c), (row, token, channel) = x.shape, x.stride()
    # It reads 16 bytes at a time.
    aligned = channel == 1 and row % 8 == token % 8 == x.data_ptr() % 16 == 0
    if not aligned or min(row, token) < c or max(b * row, s * token) >= LIBRARY_ELEMENTS:
        x = x.clone(memory_format=torch.contiguous_format)
    if seq_idx is not None:
        seq_idx = document_starts(seq_idx).cumsum(1, dtype=torch.int32)  # to the kernel negative is padding
    bias = None if bias is None else bias.to(taps.dtype)
    y: Tensor = kernel(x.transpose(1, 2), taps, bias, seq_idx, activation=activation)
    return y.transpose(1, 2)


@dataclass(frozen=True)
class _DocumentPiece:
    """Tokens lo .. hi - 1 of some batch rows, all in the document start .. stop - 1."""

    rows: slice
    start: int
    lo: int
    hi: int
    stop: int

    def load(self, x: Tensor, hi: int, k: int) -> Tensor:
        """Tokens lo - (k - 1) .. hi - 1 as [rows, tokens, c]; zeros before the document."""
        first = self.lo - (k - 1)
        part = x[self.rows, max(first, self.start) : hi].to(accumulation_dtype(x))
        missing = self.start - first
        return part if missing <= 0 else F.pad(part, (0, 0, missing, 0))


def _document_pieces(x: Tensor, seq_idx: Tensor | None) -> list[_DocumentPiece]:
    """Cut [b, s] into pieces of at most `BLOCK_ELEMENTS`, and at document borders if seq_idx is given."""
    b, s, c = x.shape
    tokens = max(1, BLOCK_ELEMENTS.get(x.device.type, BLOCK_ELEMENTS["cuda"]) // c)
    nb = min(b, max(1, tokens // s))
    if seq_idx is None:
        documents = [(slice(row, min(row + nb, b)), 0, s) for row in range(0, b, nb)]
    else:
        borders: list[list[int]] = [[0] for _ in range(b)]
        for row, t in document_starts(seq_idx).nonzero().tolist():
            borders[row].append(t)
        documents = [
            (slice(row, row + 1), start, stop)
            for row, starts in enumerate(borders)
            for start, stop in zip(starts, [*starts[1:], s], strict=True)
        ]
    return [
        _DocumentPiece(rows, start, lo, min(lo + tokens, stop), stop)
        for rows, start, stop in documents
        for lo in range(start, stop, tokens)
    ]


class _SameDocument:
    """Masks instead of pieces: whether two tokens of a row belong to one document, without the host."""

    def __init__(self, seq_idx: Tensor, k: int) -> None:
        first, last = seq_idx[:, :1].expand(-1, k - 1), seq_idx[:, -1:].expand(-1, k - 1)
        self.index, self.k = torch.cat([first, seq_idx, last], dim=1), k

    def earlier(self, rows: slice, lo: int, hi: int) -> list[Tensor | None]:
        """For tap j and tokens lo .. hi - 1: is the token k - 1 - j before of its document? [n, m, 1]"""
        return [self._apart(rows, lo, hi, -(self.k - 1 - j)) for j in range(self.k)]

    def later(self, rows: slice, lo: int, hi: int) -> list[Tensor | None]:
        """For i in 0 .. k - 1 and tokens lo .. hi - 1: is the token i after of its document? [n, m, 1]"""
        return [self._apart(rows, lo, hi, i) for i in range(self.k)]

    def _apart(self, rows: slice, lo: int, hi: int, distance: int) -> Tensor | None:
        if distance == 0:
            return None
        lo, hi, index = lo + self.k - 1, hi + self.k - 1, self.index[rows]
        return (index[:, lo:hi] == index[:, lo + distance : hi + distance]).unsqueeze(-1)


def _correlate(
    x: Tensor, columns: Tensor, bias: Tensor | None, masks: Sequence[Tensor | None] | None = None
) -> Tensor:
    """[n, m + k - 1, c] and columns [k, c] -> [n, m, c] = bias + sum_j columns[j] x[:, j : j + m]."""
    k = len(columns)
    m = x.shape[1] - (k - 1)
    first = _tap(x, 0, m, masks)
    y = first * columns[0] if bias is None else torch.addcmul(bias, first, columns[0])
    for j in range(1, k):
        y.addcmul_(_tap(x, j, m, masks), columns[j])
    return y


def _tap(x: Tensor, j: int, m: int, masks: Sequence[Tensor | None] | None) -> Tensor:
    """x[:, j : j + m], with zeros where the mask of j is False."""
    part, mask = x[:, j : j + m], None if masks is None else masks[j]
    return part if mask is None else torch.where(mask[:, :m], part, 0.0)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        taps: Tensor,
        bias: Tensor | None,
        seq_idx: Tensor | None,
        silu: bool,
        x_gradient: Place,
    ) -> Tensor:
        ctx.save_for_backward(x, taps, bias, seq_idx)
        ctx.silu, ctx.x_gradient = silu, x_gradient
        k, acc = taps.shape[1], accumulation_dtype(x)
        columns, bias = taps.t().to(acc).contiguous(), None if bias is None else bias.to(acc)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.autocast(x.device.type, enabled=False):
            pieces, same = _pieces_and_masks(x, seq_idx, k)
            for piece in pieces:
                masks = None if same is None else same.earlier(piece.rows, piece.lo, piece.hi)
                out = _correlate(piece.load(x, piece.hi, k), columns, bias, masks)
                y[piece.rows, piece.lo : piece.hi] = F.silu(out, inplace=True) if silu else out
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps_, bias_, seq_idx = ctx.saved_tensors
        k, acc = taps_.shape[1], accumulation_dtype(x)
        columns, bias = taps_.t().to(acc).contiguous(), None if bias_ is None else bias_.to(acc)
        flipped = columns.flip(0)
        own = ctx.x_gradient is None
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if own else ctx.x_gradient()
        dcolumns = torch.zeros_like(columns)
        dbias = torch.zeros_like(columns[0])
        with torch.autocast(x.device.type, enabled=False):
            pieces, same = _pieces_and_masks(x, seq_idx, k)
            for piece in pieces:
                m = piece.hi - piece.lo
                # The next k - 1 tokens, if they are of the same document, have this piece as input.
                end = min(piece.hi + k - 1, piece.stop)
                padded = piece.load(x, end, k)
                dout = dy[piece.rows, piece.lo : end].to(acc)
                masks = None if same is None else same.earlier(piece.rows, piece.lo, end)
                if ctx.silu:
                    dout = torch.ops.aten.silu_backward(dout, _correlate(padded, columns, bias, masks))
                for j in range(k):
                    product = dout[:, :m] * _tap(padded, j, m, masks)
                    dcolumns[j] += product.sum((0, 1))
                dbias += dout[:, :m].sum((0, 1))
                if end < piece.hi + k - 1:
                    dout = F.pad(dout, (0, 0, 0, piece.hi + k - 1 - end))
                # Tap i of these correlations reads the gradient i tokens later.
                later = None if same is None else same.later(piece.rows, piece.lo, piece.hi)
                dx[piece.rows, piece.lo : piece.hi] = _correlate(dout, flipped, None, later)
        dweight = dcolumns.t().to(taps_.dtype)
        return dx, dweight, None if bias_ is None else dbias.to(bias_.dtype), None, None, None


def _pieces_and_masks(
    x: Tensor, seq_idx: Tensor | None, k: int
) -> tuple[list[_DocumentPiece], _SameDocument | None]:
    """Pieces of one document each; on devices not in `CUTTING` larger ones, and masks."""
    if seq_idx is None or x.device.type in CUTTING:
        return _document_pieces(x, seq_idx), None
    return _document_pieces(x, None), _SameDocument(seq_idx, k)


def _checked_taps(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None,
) -> Tensor:
    """Check shapes and return the weight as [c, k]."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown: use one of {list(ACTIVATIONS)}")
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"x {tuple(x.shape)} must be [b, s, c] with at least one token")
    taps = weight.squeeze(1) if weight.dim() == 3 else weight
    b, s, c = x.shape
    if taps.dim() != 2 or taps.shape[0] != c:
        raise ValueError(f"weight {tuple(weight.shape)} must be [c, 1, k] or [c, k] with c={c} as x")
    for name, tensor, shape in (("bias", bias, (c,)), ("seq_idx", seq_idx, (b, s))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, x {tuple(x.shape)} needs {shape}")
    return taps
