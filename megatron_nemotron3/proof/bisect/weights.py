"""Weights that a layer has from elsewhere: from another layer of its kind, or from an older checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.causes import (
    EMBEDDING,
    LAYERS,
    MODEL,
    Cause,
    Context,
    layer_beside,
    step,
    where,
)
from megatron_nemotron3.proof.bisect.recompute import Recomputation, Steps

#: Kind of layers -> words, and a text in the names of weights.
_NAMES = {
    LAYERS: {"weights": "", "norm": r"\d\.norm\."},
    "M": {
        **{name: name for name in ("in_proj", "conv1d", "A_log", "dt_bias", "out_proj")},
        **{"conv1d.weight": r"conv1d\.w", "conv1d.bias": r"conv1d\.b", "D": r"mixer\.D"},
        "the norm after the scan": r"mixer\.norm",
    },
    "*": {"q_proj, k_proj and v_proj": "[qkv]_proj", **{f"{one}_proj": f"{one}_proj" for one in "qkvo"}},
    "E": {
        **{"routers": "gate", "router matrices": r"gate\.weight", "expert biases": "correction_bias"},
        **{"routed experts": r"\.experts\.", "shared experts": "shared_experts", "latent": "_latent"},
        **{name: name for name in ("fc1_latent", "fc2_latent")},
    },
}
_HALVES = {
    f"the {word} half of the {what} of ": (axis, half / 2, (half + 1) / 2)
    for axis, what in enumerate(("rows", "columns"))
    for half, word in enumerate(("first", "second"))
}


def _elsewhere(
    read: Callable[[Any, str], Tensor], text: str, axis: int = 0, start: float = 0, stop: float = 1
) -> Steps:
    """Tensors whose names have a text, or a part of them along an axis, are what `read` finds elsewhere."""

    def weight(plain: Any, name: str) -> Any:
        if not re.search(text, name):
            return plain(name)
        new = read(plain, name)
        if (start, stop) == (0, 1) or new.dim() <= axis:
            return new
        place = torch.arange(new.shape[axis]) / new.shape[axis]
        inside = ((place >= start) & (place < stop)).view(-1, *[1] * (new.dim() - 1 - axis))
        return torch.where(inside, new, plain(name))

    def linear(plain: Any, x: Tensor, name: str) -> Any:
        return x @ plain.__self__.weight(name).T if re.search(text, name) else plain(x, name)

    return {"weight": weight, "linear": linear}


@where
def _of_layer(context: Context, way: int, text: str) -> Steps | None:
    if (place := layer_beside(context, way)) is None:
        return None
    there = f"layers.{place}."
    return _elsewhere(lambda plain, name: plain(re.sub(r"layers\.\d+\.", there, name, count=1)), text)


def neighbours() -> Iterator[Cause]:
    """Weights of the next or the previous layer of the kind."""
    for kind, names in _NAMES.items():
        for words, text in names.items():
            for way, which in ((-1, "previous"), (1, "next")):
                name, located = f"{words} of the {which} layer of its kind", "latent" not in words
                yield Cause(name, kind, _of_layer(way, text), located=located)


def of_previous(
    previous: Recomputation, words: str, kind: str, text: str, *part: float, **options: Any
) -> Cause:
    """A cause: tensors of a layer, or a part of them, that were not updated."""
    steps = _elsewhere(lambda plain, name: previous.definition.weight(name), text, *part)  # type: ignore[arg-type]
    return Cause(f"{words} of the previous checkpoint", kind, lambda context: steps, **options)


def stale_causes(previous: Recomputation) -> Iterator[Cause]:
    """Weights of an older checkpoint that were not updated."""
    old, words = previous.definition, "of the previous checkpoint"
    layer = step(weight=lambda plain, name: old.weight(name), linear=lambda plain, *given: old.linear(*given))
    embed = step(embed=lambda plain, ids: old.embed(ids))
    last = step(norm=lambda plain, *given: old.norm(*given), vocabulary=lambda plain, h: old.vocabulary(h))
    yield Cause(f"every weight {words}", MODEL, layer, last, embed)
    yield Cause(f"the final norm and the output layer {words}", MODEL, last=last)
    yield Cause(f"the embedding {words}", EMBEDDING, embed=embed)
    yield Cause(f"MTP {words}", "mtp", mtp=previous)
    whole = ("weights", "routers", "routed experts", "shared experts")
    for kind, names in _NAMES.items():
        for name, text in names.items():
            yield of_previous(previous, name, kind, text, located=name not in whole)
            for half, part in _HALVES.items() if name not in whole else ():
                yield of_previous(previous, half + name, kind, text, *part, located=True)
