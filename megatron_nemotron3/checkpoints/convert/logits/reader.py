"""Checkpoint tensors as FP32 torch tensors, read a band of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.sources import TensorSource, owned

#: Elements read at once: 8 MiB of BF16, which become 16 MiB of FP32.
BAND_ELEMENTS = 4 << 20
#: Dtypes weights may be stored in; the source unpacks quantized ones.
PLAIN_DTYPES = ("bfloat16", "float16", "float32", "float64")


class TensorReader:
    """The tensors of one checkpoint, which messages call `side`; `names`: requested -> name in the source."""

    def __init__(self, side: str, source: TensorSource, names: Mapping[str, str] | None = None) -> None:
        self.side, self.source = side, source
        self.names = {name: name for name in source.tensors} if names is None else names

    def find(self, *names: str) -> str:
        """Return the first of these names that exists."""
        for name in names:
            if name in self.names:
                return name
        raise ValueError(f"{self.side}: no tensor {' or '.join(names)}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a whole tensor as FP32."""
        result = None
        for start, stop, band in self.bands(name, shape):
            if stop - start == shape[0]:
                return band
            result = torch.empty(shape) if result is None else result
            result[start:stop] = band
        return torch.empty(shape) if result is None else result

    def rows(self, name: str, shape: tuple[int, ...], rows: list[int]) -> Tensor:
        """Read some rows of a table [rows, d], each once. Errors as for `tensor`."""
        self._check_stored(name, shape)
        read = {row: self._read_fp32(name, ((row, row + 1), (0, shape[1]))) for row in sorted(set(rows))}
        return torch.cat([read[row] for row in rows])

    def bands(
        self, name: str, shape: tuple[int, ...], *, within: tuple[int, ...] = (), stop: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first row, one past the last, rows [n, ...] in FP32) in order. Errors as for `tensor`."""
        self._check_stored(name, shape)
        fixed = tuple((i, i + 1) for i in within)
        rest = shape[len(within) :]
        total = rest[0] if stop is None else stop
        step = max(1, BAND_ELEMENTS // max(1, prod(rest[1:])))
        for start in range(0, total, step):
            end = min(start + step, total)
            part = self._read_fp32(name, (*fixed, (start, end), *((0, n) for n in rest[1:])))
            yield start, end, part.reshape(end - start, *rest[1:])

    def linear(self, x: Tensor, name: str, shape: tuple[int, ...], *, within: tuple[int, ...] = ()) -> Tensor:
        """x [..., columns] times the transpose of a weight [rows, columns], which is read in bands."""
        y = x.new_empty(*x.shape[:-1], shape[-2])
        for start, stop, band in self.bands(name, shape, within=within):
            y[..., start:stop] = x @ band.t()
        return y

    def _check_stored(self, name: str, shape: tuple[int, ...]) -> None:
        self.find(name)
        stored = self.source.tensors[self.names[name]]
        if tuple(stored.shape) != tuple(shape):
            raise ValueError(
                f"{self.side}: {name} has shape {list(stored.shape)}, its config asks for {list(shape)}"
            )
        if stored.dtype not in PLAIN_DTYPES:
            raise ValueError(
                f"{self.side}: {name} is {stored.dtype}; weights are read as {', '.join(PLAIN_DTYPES)}"
            )

    def _read_fp32(self, name: str, slices: tuple[tuple[int, int], ...]) -> Tensor:
        stored = self.names[name]
        return owned(self.source.read(stored, slices), torch.float32)
