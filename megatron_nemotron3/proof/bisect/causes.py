"""Causes to try when a system deviates: other steps of a layer, of the model's ends, or of the tokens.

A cause says what to recompute instead. If the recomputation agrees with the deviating system as well as two
correct systems agree, it is named. Most are one quantity of the plain forward with a change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Concatenate, ParamSpec

from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.bisect.recompute import Recomputation, Steps

P = ParamSpec("P")
#: Kinds of a cause: those of a layer, every layer, the model's end, its embedding, the tokens.
LAYERS, MODEL, EMBEDDING, TOKENS = "any layer", "model", "embedding", "tokens"


@dataclass(frozen=True)
class Context:
    """What a cause knows of the sequence and the place where it is tried."""

    config: Nemotron3Config
    prompt: int  # its length: tokens from there on may have been decoded one at a time
    layer: int = -1  # of the pattern, from 0; -1 outside the layers
    before: int = 0  # length of the sequence before this one
    number: int = 0  # of this one
    ids: Tensor | None = None  # its tokens [s]
    #: What the checkpoint computes of a quantity in a layer, for this sequence or for another one (True).
    taken: Callable[[Any, int, bool], Tensor | None] | None = None


def layer_beside(context: Context, way: int, any_kind: bool = False) -> int | None:
    """The next layer of the kind or of any (1), that before (-1), or one farther away; None: no such one."""
    pattern, number = context.config.pattern, context.layer
    if not 0 <= number < len(pattern):
        return None
    layers = [n for n, kind in enumerate(pattern) if any_kind or kind == pattern[number]]
    place = layers.index(number) + way
    return layers[place] if 0 <= place < len(layers) else None


#: Other steps at a place, or None where the cause cannot occur.
Make = Callable[[Context], Steps | None]


@dataclass(frozen=True)
class Cause:
    """One way to be wrong; its name says what the system does, to follow "it computes with"."""

    name: str
    kind: str  # letter of the layers that it concerns, or one of those above
    layer: Make | None = None  # other steps of a layer
    last: Make | None = None  # of the final norm and the output layer
    embed: Make | None = None  # of the embedding
    token: int | None = None  # stands before the first one
    joined: bool = False  # layers with a change, or all, see the sequence before this one as its beginning
    #: Log-probabilities [s - 1] of tokens 1 to s to what the system reports.
    reported: Callable[[Tensor], Tensor] | None = None
    mtp: Recomputation | None = None  # the checkpoint whose MTP blocks run instead
    located: bool = False  # it is tried only where hidden states name the layers
    rounds: bool = False  # two systems with it differ where a number lies between two others


def at_place(name: str, kind: str, make: Make, **options: Any) -> Cause:
    """A cause with other steps where those of its kind are."""
    if kind == MODEL:
        return Cause(name, kind, last=make, **options)
    return (
        Cause(name, kind, embed=make, **options) if kind == EMBEDDING else Cause(name, kind, make, **options)
    )


def step(**steps: Callable[..., Any]) -> Make:
    """Other steps that are the same everywhere."""
    return lambda context: steps


def where(steps: Callable[Concatenate[Context, P], Steps | None]) -> Callable[P, Make]:
    """Decorate what gives the steps for a place, or None where the cause cannot occur."""
    return lambda *args, **options: lambda context: steps(context, *args, **options)


def compose(first: Steps, second: Steps) -> Steps:
    """Both: the steps of the second one around those of the first."""

    def both(name: str, plain: Any, *given: Any) -> Any:
        inner = MethodType(lambda m, *args: first[name](MethodType(plain.__func__, m), *args), plain.__self__)
        return second[name](inner, *given)

    return {**first, **second, **{name: partial(both, name) for name in first.keys() & second.keys()}}


@where
def both(context: Context, first: Make, second: Make) -> Steps | None:
    """Both, where both can occur."""
    a, b = first(context), second(context)
    return None if a is None or b is None else compose(a, b)
