"""Tensors of a checkpoint as FP32 tensors of torch, read a band of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

#: Elements read at once: 8 MiB of BF16, which become 16 MiB of FP32.
BAND_ELEMENTS = 4 << 20
#: What weights may be stored as; packed types are unpacked by the source.
PLAIN = ("bfloat16", "float16", "float32", "float64")


class Stored(Protocol):
    """Type and shape of a tensor; torch's name of the type."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class FileSource(Protocol):
    """What is read from: `convert.stored.FileSource`, its wrappers, or anything alike."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """`Stored` by name."""
        ...

    def read(self, name: str, slices: tuple[tuple[int, int], ...]) -> Any:
        """The raw bits of a slice, a C-contiguous numpy array of unsigned integers of the element's size."""
        ...


class TensorReader:
    """The tensors of one side.

    Args:
        names: name to ask for -> name in the source; default: the source's own.
    """

    def __init__(self, side: str, source: FileSource, names: Mapping[str, str] | None = None) -> None:
        self.side, self.source = side, source
        self.names = {name: name for name in source.tensors} if names is None else names

    def find(self, *names: str) -> str:
        """The first of these names that there is.

        Raises:
            ValueError: there is none.
        """
        for name in names:
            if name in self.names:
                return name
        raise ValueError(f"{self.side}: no tensor {' or '.join(names)}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """All of a tensor, FP32.

        Raises:
            ValueError: it is missing, has another shape than `shape`, or a type that is not a plain one.
        """
        result = None
        for start, stop, band in self.bands(name, shape):
            if stop - start == shape[0]:
                return band
            result = torch.empty(shape) if result is None else result
            result[start:stop] = band
        return torch.empty(shape) if result is None else result

    def rows(self, name: str, shape: tuple[int, ...], rows: list[int]) -> Tensor:
        """Single rows of a table [rows, d], each read once. Raises as `tensor`."""
        self._check(name, shape)
        read = {row: self._read(name, ((row, row + 1), (0, shape[1]))) for row in sorted(set(rows))}
        return torch.cat([read[row] for row in rows])

    def bands(
        self, name: str, shape: tuple[int, ...], *, within: tuple[int, ...] = (), stop: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, one past the last, rows [n, ...] in FP32) in order. Raises as `tensor`.

        Args:
            shape: of the whole tensor.
            within: leading indices: (e,) reads the rows of expert e of [experts, rows, columns].
            stop: rows from here on are not read.
        """
        self._check(name, shape)
        fixed = tuple((i, i + 1) for i in within)
        rest = shape[len(within) :]
        total = rest[0] if stop is None else stop
        step = max(1, BAND_ELEMENTS // max(1, prod(rest[1:])))
        for start in range(0, total, step):
            end = min(start + step, total)
            part = self._read(name, (*fixed, (start, end), *((0, n) for n in rest[1:])))
            yield start, end, part.reshape(end - start, *rest[1:])

    def linear(self, x: Tensor, name: str, shape: tuple[int, ...], *, within: tuple[int, ...] = ()) -> Tensor:
        """x [..., columns] times the transpose of a weight [rows, columns], never whole in memory."""
        y = x.new_empty(*x.shape[:-1], shape[-2])
        for start, stop, band in self.bands(name, shape, within=within):
            y[..., start:stop] = x @ band.t()
        return y

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self.find(name)
        stored: Stored = self.source.tensors[self.names[name]]
        if tuple(stored.shape) != tuple(shape):
            raise ValueError(
                f"{self.side}: {name} has shape {list(stored.shape)}, its config asks for {list(shape)}"
            )
        if stored.dtype not in PLAIN:
            raise ValueError(f"{self.side}: {name} is {stored.dtype}; weights are read as {', '.join(PLAIN)}")

    def _read(self, name: str, slices: tuple[tuple[int, int], ...]) -> Tensor:
        stored = self.names[name]
        bits = torch.from_numpy(self.source.read(stored, slices))
        return bits.view(getattr(torch, self.source.tensors[stored].dtype)).float()
