"""Cut the tensors of a checkpoint to the sizes of a pruned model, slice by slice.

`CutTensors` is a view (`checkpoints.convert.sources`): a slice of a tensor is read from the model's tensor
when it is asked for, in bands, so a checkpoint of any size needs little memory, no model and no layout.
Hugging Face's names are used, because there every axis of a tensor is one axis of the table
(`models.tensors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.plan import Slices, bands, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.prefixes import Prefix, prefixes
from megatron_nemotron3.models.tensors import rows_of, symbol_sizes
from megatron_nemotron3.post_training.compress.scores import Array, Axes, Scores

#: Axes of which all stays.
_WHOLE = ("1", "vocab", "kernel", "bc")
#: Tensors whose latent axis is what leaves the experts; in the others it is what enters them.
_OUT = ("fc2_latent_proj", "down_proj")


class CutTensors(TensorSource):
    """The tensors of a pruned model and of `source`, the whole one, both under their Hugging Face names."""

    def __init__(
        self, source: TensorSource, scores: Scores, pruned: Nemotron3Config, layers: Sequence[int]
    ) -> None:
        self.folder, self.files = source.folder, source.files
        self._source = source
        #: Name -> name in the source, and what stays of each axis.
        self._parts: dict[str, tuple[str, tuple[Array | None, ...]]] = {}
        self.tensors: dict[str, SourceTensor] = {}
        for there, here in _layers(scores.config, pruned, layers):
            self._add(there, here, scores.axes(there, here), scores.config, pruned)

    def _add(
        self, there: Prefix, here: Prefix, axes: Axes, model: Nemotron3Config, pruned: Nemotron3Config
    ) -> None:
        sizes, old_sizes = symbol_sizes(here.config), symbol_sizes(there.config)
        experts = axes.get("experts")
        for old_row, row in zip(rows_of(model, there.part), rows_of(pruned, here.part), strict=True):
            for old, new in zip(old_row.hf, row.hf, strict=True):
                chosen = [-1] if experts is None or "{e}" not in new.name else experts.tolist()
                for number, expert in enumerate(chosen):
                    name = here.hf + new.name.replace("{e}", str(number))
                    from_name = there.hf + old.name.replace("{e}", str(expert))
                    kept = []
                    for axis in new.shape:
                        same = sizes[axis] == old_sizes[axis]
                        kept.append(None if same else _indices(axes, axis, new.name, expert))
                    self._parts[name] = (from_name, tuple(kept))
                    shape = tuple(sizes[axis] for axis in new.shape)
                    self.tensors[name] = SourceTensor(self._source.tensors[from_name].dtype, shape)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        there, axes = self._parts[name]
        slices = whole(self.tensors[name].shape) if slices is None else slices
        wanted = [None if index is None else index[start:stop] for index, (start, stop) in zip(axes, slices)]
        if all(index is None for index in wanted):
            return self._source.read(there, slices)
        result = torch.empty(extent(slices), dtype=self.tensors[name].torch_dtype)
        if not result.numel():
            return result
        span = tuple(
            one if index is None else (int(index[0]), int(index[-1]) + 1)
            for index, one in zip(wanted, slices)
        )
        for band in bands(span, BAND // result.element_size()):
            part, places = self._source.read(there, band), []
            for axis, (index, (start, stop)) in enumerate(zip(wanted, band)):
                if index is None:
                    at = slices[axis][0]
                    places.append(slice(start - at, stop - at))
                    continue
                low, high = (int(i) for i in numpy.searchsorted(index, (start, stop)))
                part = part.index_select(axis, torch.from_numpy(index[low:high] - start))
                places.append(slice(low, high))
            result[tuple(places)] = part
        return result


def _layers(
    model: Nemotron3Config, pruned: Nemotron3Config, layers: Sequence[int]
) -> Iterator[tuple[Prefix, Prefix]]:
    head, *rest = prefixes(model)
    decoder, mtp = rest[: model.num_layers], rest[model.num_layers :]
    yield from zip((head, *(decoder[i] for i in layers), *mtp), prefixes(pruned), strict=True)


def _indices(axes: Axes, axis: str, name: str, expert: int) -> Any:
    if axis in _WHOLE:
        return None
    if axis == "latent":
        return axes["latent_out" if any(one in name for one in _OUT) else "latent_in"]
    if axis == "ffn":
        return axes["ffn"][expert]  # type: ignore[index]
    return axes[axis]
