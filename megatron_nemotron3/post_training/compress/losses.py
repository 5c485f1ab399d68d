"""What a smaller form of a model loses, estimated from measured importance (`scores`). Needs numpy.

A part of a layer that goes takes a share of what was measured there: of the sum of squares where the entry
is a root mean square, of the sum where it is a mean. The loss of a layer is the sum of these shares, times
the `distance` by which the layer changes the residual stream; a layer that goes loses all of it. So losses
add up over layers and sizes, as the search needs. That two cuts of one layer overlap is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.prefixes import Prefix, prefixes
from megatron_nemotron3.post_training.compress.scores import MEANS, Array, Scores

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
    """Losses by the scores of a model (`search.Losses`)."""

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
