"""Importance of the parts of a model, which parts stay, and what is lost without the others.

    decoder.layers.0. normed     [d]             input of the layer, normalized
    decoder.layers.0. distance   []              1 - cosine of the layer's input and output
    M  x                         [heads, c]      x in the output of in_proj
    *  heads                     [heads, c]      input of linear_proj
    -  ffn                       [f]             input of linear_fc2
    E  experts                   [N]             norm of an expert's weighted output, over its tokens
       ffn                       [N, f]          input of each expert's linear_fc2
       ranks                     [k]             weight of a token's first, second, … expert
       shared                    [f]             input of the shared expert's linear_fc2
       latent_in, latent_out     [l]             output of fc1_latent_proj, input of fc2_latent_proj

Entries are root mean squares over tokens, except for those of `MEANS` (Minitron, arXiv 2407.14679; Mamba:
2504.11409; experts: 2510.13999). MTP's layers have entries of their own, but no
`normed` and `distance`, because the decoder decides about the residual stream.

The parts that stay keep their order, so a pruning to the sizes that a model has changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy

from megatron_nemotron3.checkpoints.convert.hf_folder import (
    header_tensor,
    read_safetensors_header,
    safetensors_header,
)
from megatron_nemotron3.checkpoints.convert.sources import FileSource
from megatron_nemotron3.common.files import atomic
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix, prefixes

Array = numpy.ndarray[Any, Any]
#: Axis of a tensor -> indices that stay, ascending; None: all. "ffn" of experts: [N, f], one row for each.
Axes = dict[str, Array | None]

#: Entries that are means; the others are root mean squares.
MEANS = ("distance", "experts", "ranks")
#: In the metadata of a file.
_FORMAT = "nemotron3 scores"


def statistics(config: Nemotron3Config) -> Iterator[tuple[str, Prefix, str, tuple[int, ...]]]:
    """Yield key, layer, kind and shape of every entry, in the order of the layers."""
    for prefix in prefixes(config):
        if prefix.part not in "M*E-":
            continue
        one, decoder = prefix.config, prefix.megatron.startswith("decoder.")
        shapes: dict[str, tuple[int, ...]] = {"distance": (), "normed": (one.hidden_size,)} if decoder else {}
        if prefix.part == "M":
            shapes["x"] = (one.mamba_num_heads, one.mamba_head_dim)
        elif prefix.part == "*":
            shapes["heads"] = (one.num_attention_heads, one.kv_channels)
        elif prefix.part == "-":
            shapes["ffn"] = (one.dense_ffn_hidden_size or 0,)
        else:
            experts = one.num_moe_experts or 0
            shapes |= {"experts": (experts,), "ffn": (experts, one.moe_ffn_hidden_size or 0)}
            shapes["ranks"] = (one.moe_router_topk or 0,)
            shapes["shared"] = (one.moe_shared_expert_intermediate_size or 0,)
            if one.moe_latent_size:
                shapes |= dict.fromkeys(("latent_in", "latent_out"), (one.moe_latent_size,))
        for kind, shape in shapes.items():
            yield f"{prefix.megatron} {kind}", prefix, kind, shape


@dataclass(frozen=True)
class Scores:
    """The entries of a model by key (`statistics`)."""

    config: Nemotron3Config
    tokens: int
    values: Mapping[str, Array]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        about = {_FORMAT: "1", "tokens": str(self.tokens), "model": self.config.to_json()}
        shapes = ((key, "float32", value.shape) for key, value in self.values.items())
        with atomic(path) as temporary, open(temporary, "wb") as file:
            file.write(safetensors_header(shapes, about))
            for value in self.values.values():
                file.write(value.astype("<f4", copy=False).tobytes())

    @classmethod
    def load(cls, path: Path, config: Nemotron3Config) -> Scores:
        """Read the scores of a model.

        Raises:
            ValueError: it is no file of scores, or the scores are those of another model.
        """
        entries, about = read_safetensors_header(path)
        if about.get(_FORMAT) != "1" or not about.get("tokens", "").isdecimal():
            raise ValueError(f"{path}: it holds no scores: `nemotron3 prune … --text … --scores FILE` does")
        wanted = {key: shape for key, _, _, shape in statistics(config)}
        for key in sorted(wanted.keys() | entries.keys()):
            found = entries[key].shape if key in entries else None
            if found != wanted.get(key):
                raise ValueError(
                    f"{path}: its scores are not those of {config.name}: {key!r} has shape {found}, expected "
                    f"{wanted.get(key)}: measure again with --text"
                )
        source = FileSource(path.parent, {k: header_tensor(path, e) for k, e in entries.items()}, {})
        values = {key: source.read(key).numpy() for key in wanted}
        for key, value in values.items():
            if not numpy.isfinite(value).all():
                raise ValueError(f"{path}: {key!r} has values that are no finite numbers: measure again")
        return cls(config, int(about["tokens"]), values)

    def digest(self) -> str:
        found = hashlib.sha256()
        for key in sorted(self.values):
            found.update(key.encode() + self.values[key].tobytes())
        return found.hexdigest()

    def layers(self, number: int) -> tuple[int, ...]:
        """Return the decoder layers (from 0, in order) that change the residual stream most."""
        layers = range(self.config.num_layers)
        distance = numpy.array([self.values[f"decoder.layers.{i}. distance"] for i in layers])
        return tuple(best(distance, number).tolist())

    def axes(self, there: Prefix, here: Prefix) -> Axes:
        """Return what stays of a layer.

        Args:
            there, here: the layer in the model, and in what is left of it.
        """
        old, new = there.config, here.config
        start = f"{there.megatron} "
        of = {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}
        hidden = self.hidden(new.hidden_size)
        twice = None if hidden is None else numpy.concatenate([hidden, old.hidden_size + hidden])
        found: Axes = {"d": hidden, "2d": twice}
        if there.part == "M":
            found |= _mamba(of["x"], old, new)
        elif there.part == "*":
            found |= _attention(of["heads"], old, new)
        elif there.part == "-":
            found["dense"] = best(of["ffn"], new.dense_ffn_hidden_size or 0)
        elif there.part == "E":
            found["experts"] = best(of["experts"], new.num_moe_experts or 0)
            found["ffn"] = best(of["ffn"], new.moe_ffn_hidden_size or 0)
            found["shared"] = best(of["shared"], new.moe_shared_expert_intermediate_size or 0)
            # Nothing ties a channel into the experts to one out of them.
            for way in ("latent_in", "latent_out"):
                found[way] = best(of[way], new.moe_latent_size or 0) if way in of else found["d"]
        return found

    def hidden(self, number: int) -> Array | None:
        """Return the channels of the residual stream that stay; None: all."""
        return None if number == self.config.hidden_size else best(self._residual, number)

    @cached_property
    def _residual(self) -> Array:
        normed = [self.values[f"decoder.layers.{i}. normed"] for i in range(self.config.num_layers)]
        return numpy.sum(normed, axis=0, dtype=numpy.float64)


def best(scores: Array, number: int) -> Array:
    """Return the indices of the largest scores along the last axis, ascending; of equal ones the first."""
    order = numpy.argsort(-scores, axis=-1, kind="stable")[..., :number]
    return numpy.sort(order, axis=-1).astype(numpy.int32)


def _norm(scores: Array, axis: int | Sequence[int]) -> Array:
    return numpy.sqrt(numpy.square(scores, dtype=numpy.float64).sum(axis=axis))  # type: ignore[arg-type]


def _mamba(x: Array, old: Nemotron3Config, new: Nemotron3Config) -> Axes:
    """Keep the best heads of every group, and the same channels in each head."""
    groups, inner, bc = old.mamba_num_groups, x.size, 2 * old.mamba_num_groups * old.mamba_state_dim
    channels = best(_norm(x, 0), new.mamba_head_dim)
    each = _norm(x[:, channels], 1).reshape(groups, -1)
    first = numpy.arange(groups)[:, None] * each.shape[1]
    heads = (best(each, new.mamba_num_heads // groups) + first).ravel()
    kept = (heads[:, None] * old.mamba_head_dim + channels).ravel()
    return {
        "heads": heads,
        "inner": kept,
        "conv": numpy.concatenate([kept, inner + numpy.arange(bc)]),
        "in_proj": numpy.concatenate(
            [kept, inner + kept, 2 * inner + numpy.arange(bc), 2 * inner + bc + heads]
        ),
    }


def _attention(heads: Array, old: Nemotron3Config, new: Nemotron3Config) -> Axes:
    """Keep the best KV groups, and the best query heads of each."""
    width, each = old.kv_channels, _norm(heads, 1).reshape(old.num_query_groups, -1)
    groups = best(_norm(each, 1), new.num_query_groups)
    kept = best(each[groups], new.num_attention_heads // new.num_query_groups)
    kept = (kept + groups[:, None] * each.shape[1]).ravel()
    channels = numpy.arange(width)
    return {
        "q": (kept[:, None] * width + channels).ravel(),
        "kv": (groups[:, None] * width + channels).ravel(),
    }


#: Kind of layer -> (entry of the scores, axis of `Scores.axes`) of what is cut; `experts` has the widths.
_PARTS = {
    "M": (("x", "inner"),),
    "*": (("heads", "q"),),
    "-": (("ffn", "dense"),),
    "E": (
        ("experts", "experts"),
        ("shared", "shared"),
        ("latent_in", "latent_in"),
        ("latent_out", "latent_out"),
    ),
}


class ScoredLosses:
    """What a smaller form of a model loses (`candidates.CandidateLosses`), by the scores of the model.

    A part of a layer that goes takes a share of what was measured there: of the sum of squares where the
    entry is a root mean square, of the sum where it is a mean. A layer loses the sum of these shares,
    times the `distance` by which the layer changes the residual stream; a layer that goes loses all of it. So
    losses add up over layers and sizes, as the search needs. That two cuts of one layer overlap is left out.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._there = _decoder(scores.config)
        self.experts = cache(self._experts)

    def layers(self, number: int) -> Sequence[int]:
        return self.scores.layers(number)

    def _experts(self, layer: int, width: int, topk: int) -> float:
        ffn, ranks = self._of(layer, "ffn"), self._of(layer, "ranks")
        channels = numpy.sort(ffn, axis=-1)[..., : ffn.shape[-1] - width]
        lost = _share("ffn", channels, ffn) + _share("ranks", ranks[topk:], ranks)
        return self._distance(layer) * lost

    def rest(self, config: Nemotron3Config, layers: Sequence[int]) -> float:
        lost = sum(map(self._distance, set(range(len(self._there))) - set(layers)))
        for number, here in zip(layers, _decoder(config), strict=True):
            there, part = self._there[number], 0.0
            axes = self.scores.axes(there, here)
            if (hidden := axes["d"]) is not None:
                normed = self._of(number, "normed")
                part += _share("normed", numpy.delete(normed, hidden), normed)
            for entry, axis in _PARTS[there.part]:
                if f"{there.megatron} {entry}" in self.scores.values:
                    whole, kept = self._of(number, entry).ravel(), axes[axis]
                    part += 0.0 if kept is None else _share(entry, numpy.delete(whole, kept), whole)
            lost += self._distance(number) * part
        return lost

    def _of(self, layer: int, entry: str) -> Array:
        return self.scores.values[f"{self._there[layer].megatron} {entry}"]

    def _distance(self, layer: int) -> float:
        return float(self._of(layer, "distance"))


def _decoder(config: Nemotron3Config) -> list[Prefix]:
    return [one for one in prefixes(config) if one.megatron.startswith("decoder.layers.")]


def _share(entry: str, dropped: Array, whole: Array) -> float:
    """The share of an entry that is dropped; none of it where nothing was measured."""
    power = 1 if entry in MEANS else 2
    total = float(numpy.power(whole, power, dtype=numpy.float64).sum())
    return float(numpy.power(dropped, power, dtype=numpy.float64).sum()) / total if total else 0.0
