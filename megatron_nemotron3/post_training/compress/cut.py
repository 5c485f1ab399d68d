"""Cut a checkpoint, or a model that is whole in memory, to the sizes of a pruned model.

`CutTensors` is a view (`checkpoints.convert.sources`): a slice of a tensor is read from the model's tensor
when it is asked for, in bands, so a checkpoint of any size needs little memory, no model and no layout.
Hugging Face's names are used, because there every axis of a tensor is one axis of the table
(`models.tensors`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import config_json, from_hf, inventory, to_hf
from megatron_nemotron3.checkpoints.convert.block_configs import KEY, MTP_KEY
from megatron_nemotron3.checkpoints.convert.config_keys import DENSE, FIELDS, LAYERS, MOE, MTP_LAYERS
from megatron_nemotron3.checkpoints.convert.hf_folder import read_config
from megatron_nemotron3.checkpoints.convert.job import Job, run
from megatron_nemotron3.checkpoints.convert.opened import EMBEDDING, Checkpoint
from megatron_nemotron3.checkpoints.convert.origin import copied_files, release_files, stated_keys
from megatron_nemotron3.checkpoints.convert.plan import Slices, bands, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.checkpoints.convert.views import Converted, InMemory
from megatron_nemotron3.checkpoints.folders import HUGGING_FACE, TOKENIZER
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.tensors import PARAMETER, rows_of, symbol_sizes
from megatron_nemotron3.post_training.compress.scores import Array, Axes, Scores
from megatron_nemotron3.post_training.compress.sizes import Sizes, candidate_config

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


#: The pruned model, for --model.
MODEL = "model.json"


def cut_job(
    opened: Checkpoint,
    scores: Scores,
    pruned: Nemotron3Config,
    layers: Sequence[int],
    target: Path,
    tokenizer: Path | None = None,
) -> Job:
    """Plan the folder of a pruned model."""
    cut = CutTensors(opened.hf_view(), scores, pruned, layers)
    dtype = cut.tensors[next(iter(cut.tensors))].dtype
    stored = {MODEL: (pruned.to_json() + "\n").encode()}
    about = {"source": shown(opened.folder.absolute()), "source_kind": opened.kind, "model": pruned.name}
    options = {"model": pruned.to_json(), "layers": list(layers), "scores": scores.digest()}
    if opened.kind == "hugging face":
        files = to_hf.files(cut.tensors)
        base = _reference(read_config(opened.folder), pruned, dtype)
        small = to_hf.small_files(pruned, files, copied=copied_files(opened.folder), base=base, dtype=dtype)
        return Job(target, cut, files, stored | small, origin=about, options=options)
    rows = opened.padded_vocab_size or pruned.vocab_size
    view = Converted(cut, inventory.mappings(pruned, padded_vocab_size=rows), to_hf=False)
    plan = from_hf.plan(view, pruned, padded_vocab_size=rows, dtype=dtype)
    if tokenizer is not None:
        stored |= release_files(copied_files(tokenizer), TOKENIZER)
    if opened.origin is not None:
        base = _reference(stated_keys(opened.origin), pruned, dtype)
        stored |= release_files(copied_files(opened.origin), HUGGING_FACE, base)
    return Job(target, view, plan.files, stored | plan.small, plan.index, about, options)


def _reference(data: Mapping[str, Any], pruned: Nemotron3Config, dtype: str) -> dict[str, object]:
    """A model's config.json with the sizes of the pruned one; what says nothing of sizes stays."""
    tables = (FIELDS, DENSE, MOE)
    stale = {key for table in tables for keys in table.values() for key in keys}
    stale |= {LAYERS[0], *LAYERS[1], MTP_LAYERS[0], *MTP_LAYERS[1], KEY, MTP_KEY, "quantization_config"}
    there = {key: value for key, value in data.items() if key not in stale}
    return there | config_json.write(pruned, dtype=dtype)


def prune(
    model: torch.nn.Module, scores: Scores, sizes: Sizes
) -> tuple[Nemotron3Config, dict[str, torch.Tensor]]:
    """Return the config and the weights that are left of a model, which stays as it is."""
    number = sizes.get("num_layers", scores.config.num_layers)
    assert isinstance(number, int)
    layers = scores.layers(number)
    pruned = candidate_config(scores.config, sizes, layers)
    weights = model.state_dict()
    rows = weights[EMBEDDING].shape[0]
    cut = CutTensors(_hf_view(weights, scores.config), scores, pruned, layers)
    mappings = inventory.mappings(pruned, dialect=PARAMETER, padded_vocab_size=rows)
    view = Converted(cut, mappings, to_hf=False)
    return pruned, {name: view.read(name).clone() for name in view.tensors}


def load(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights into a model of their config.

    Raises:
        RuntimeError: names or shapes differ, except for TransformerEngine's empty state.
    """
    missing, unknown = model.load_state_dict(weights, strict=False)  # raises where shapes differ
    if odd := sorted(name for name in (*missing, *unknown) if not name.endswith("_extra_state")):
        raise RuntimeError(
            f"weights do not fit the model: {len(odd)} names are on one side only, first {odd[0]}"
        )


def save(model: torch.nn.Module, config: Nemotron3Config, folder: Path) -> None:
    """Write a release checkpoint (torch_dist) to a new folder, as `nemotron3 convert from-hf` does."""
    weights = model.state_dict()
    embedding = weights[EMBEDDING]
    rows, dtype = embedding.shape[0], str(embedding.dtype).removeprefix("torch.")
    mappings = inventory.mappings(config, padded_vocab_size=rows)
    view = Converted(_hf_view(weights, config), mappings, to_hf=False)
    plan = from_hf.plan(view, config, padded_vocab_size=rows, dtype=dtype)
    run(Job(folder, view, plan.files, plan.small, plan.index, {"model": config.name}))


def _hf_view(weights: Mapping[str, Any], config: Nemotron3Config) -> TensorSource:
    tensors = {
        name: t.detach().cpu()
        for name, t in weights.items()
        if isinstance(t, torch.Tensor) and not name.endswith("_extra_state")
    }
    rows = weights[EMBEDDING].shape[0]
    mappings = inventory.mappings(config, dialect=PARAMETER, padded_vocab_size=rows)
    return Converted(InMemory(Path(os.devnull), tensors), mappings, to_hf=True)
