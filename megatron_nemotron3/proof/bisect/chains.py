"""Steps of the plain forward as chains: a link is missing, another one, twice, or in another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models.config import GATED_NORM_EPSILON
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause, Context, at_place, step
from megatron_nemotron3.proof.bisect.quantities import conv_parts
from megatron_nemotron3.proof.bisect.recompute import Steps

#: A link: of the model, what the link before gives, and what the whole step gets besides.
_Link = Callable[..., Tensor]
#: Links of a chain, and others in the place of each, by words.
_Links = dict[str, _Link]
_Others = dict[str, _Links]
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{"ReLU": F.relu, "SiLU": F.silu, "GELU": F.gelu, "softplus": F.softplus, "sigmoid": torch.sigmoid},
    **{"tanh": torch.tanh, "the exponential": torch.exp, "the absolute value": torch.abs},
}


def _of(function: Callable[[Tensor], Tensor]) -> _Link:
    return lambda m, x, *given: function(x)


def _gated(function: Callable[[Tensor], Tensor]) -> _Link:
    return lambda m, y, z, *given: y * function(z)


def _instead(link: str) -> _Links:
    return {f"{word} instead of {link}": _of(f) for word, f in _FUNCTIONS.items() if word != link}


def _norm(epsilon: float = 0.0, centred: bool = False) -> _Link:
    mean = lambda x: x.mean(-1, keepdim=True) if centred else 0.0  # noqa: E731
    return lambda m, x, *given: m.rms(x - mean(x), epsilon or m.config.layernorm_epsilon)


def _grouped(by: float, epsilon: float = GATED_NORM_EPSILON) -> _Link:
    def rms(m: Any, y: Tensor, z: Tensor, gain: Tensor, groups: int) -> Tensor:
        n = int(by * groups) or 1
        return y if y.shape[-1] % n else m.rms(y.unflatten(-1, (n, -1)), epsilon).flatten(-2)

    return rms


def _taps(m: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), taps, groups=len(taps)).transpose(1, 2)


_EPSILONS = 1e-6, 1e-8, 1e-12, 1e-4, 1e-3, 1e-2
_NORM = {"norm": _norm(), "gain": lambda m, x, name: x * m.weight(name)}
_NORMS = {
    "norm": {f"epsilon {e:.0e}": _norm(e) for e in _EPSILONS},
    "gain": {"1 + gain": lambda m, x, name: x * (1 + m.weight(name))},
}
_NORMS["norm"]["a norm without the mean"] = _norm(centred=True)
_GATED_NORM = {"gate": _gated(F.silu), "norm": _grouped(1), "gain": lambda m, y, z, gain, n: y * gain}
_GATED_NORMS = {
    "gate": {f"a gate by {word}": _gated(f) for word, f in _FUNCTIONS.items() if word != "SiLU"},
    "norm": {f"{by:g} times the groups": _grouped(by) for by in (2, 4, 0.5)} | {"one group": _grouped(0)},
}
_GATED_NORMS["norm"] |= {f"epsilon {e:.0e}": _grouped(1, e) for e in _EPSILONS}
_GATED_NORMS["gate"]["a gate without SiLU"] = _gated(lambda z: z)
_STEPS = {"bias": lambda m, dt, bias: dt + bias, "softplus": _of(F.softplus)}
_CONV = {"bias": lambda m, x, w, bias: x + bias, "SiLU": _of(F.silu)}
_ACTIVATION = {"activation": _of(lambda x: x.relu().square())}
#: Step, kind of layers, words, what runs first, the links, and others.
_CHAINS: tuple[tuple[str, str, str, Sequence[_Link], _Links, _Others], ...] = (
    ("gated_norm", "M", "the norm after the scan", [], _GATED_NORM, _GATED_NORMS),
    ("time_steps", "M", "the time steps", [], _STEPS, {"softplus": _instead("softplus")}),
    ("conv", "M", "the convolution", [_taps], _CONV, {"SiLU": _instead("SiLU")}),
    ("activation", "E", "the experts", [], {"ReLU": _of(F.relu), "square": _of(torch.square)}, {}),
    ("activation", "E", "the experts", [], _ACTIVATION, {"activation": _instead("squared ReLU")}),
    ("norm", LAYERS, "the norm before the layer", [], _NORM, _NORMS),
    ("norm", MODEL, "the final norm", [], _NORM, _NORMS),
)


def _variants(words: str, links: _Links, others: _Others) -> Iterator[tuple[str, list[_Link]]]:
    """A link is missing, another one, or twice; or the order is another one."""
    names = list(links)
    for number, name in enumerate(names):
        before, after = [links[n] for n in names[:number]], [links[n] for n in names[number + 1 :]]
        yield f"no {name} in {words}", [*before, *after]
        yield f"{name} twice in {words}", [*before, links[name], links[name], *after]
        for what, link in others.get(name, {}).items():
            yield f"{what} in {words}", [*before, link, *after]
    for order in (one for n in range(len(names), 1, -1) for one in permutations(names, n)):
        if [n for n in names if n in order] != list(order):
            yield f"{words} as {', '.join(order)}", [links[name] for name in order]


def _run(order: Sequence[_Link]) -> Callable[..., Tensor]:
    def run(plain: Any, x: Tensor, *given: Any) -> Tensor:
        for link in order:
            x = link(plain.__self__, x, *given)
        return x

    return run


def _inside(place: str, run: Callable[..., Tensor]) -> Callable[..., Any]:
    """Another activation inside the routed experts or the shared one only."""
    return lambda plain, *given: plain.__func__(plain.__self__.but(activation=run), *given)


def _in_part(part: str, run: Callable[..., Tensor], context: Context) -> Steps:
    """Another convolution of x, B or C only."""
    sizes = conv_parts(context.config)
    other = torch.cat([torch.full((size,), name == part) for name, size in sizes.items()])
    return {"conv": lambda plain, *given: torch.where(other, run(plain, *given), plain(*given))}


def chains() -> Iterator[Cause]:
    """Links of a chain are missing, others, twice, or in another order."""
    for name, kind, words, first, links, others in _CHAINS:
        for what, order in _variants(words, links, others):
            run = _run([*first, *order])
            made = step(**{name: run})
            rare = " twice" in what or what.removeprefix("a gate by ").startswith(tuple(_FUNCTIONS)[3:])
            yield at_place(what, kind, made, located=rare)
            for place in ("routed", "shared") if name == "activation" else ():
                yield Cause(f"{what}, {place} only", "E", step(**{place: _inside(place, run)}), located=rare)
            for part in "xBC" if name == "conv" else ():
                yield Cause(f"{what}, {part} only", "M", partial(_in_part, part, run), located=True)
            if kind == LAYERS:
                yield Cause(what.replace(words, "every norm of the stream"), MODEL, made, made, located=rare)
