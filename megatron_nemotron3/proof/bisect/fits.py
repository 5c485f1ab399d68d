"""What is found step by step: factors of blocks, blocks in place of others, and the number in a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.causes import Cause
from megatron_nemotron3.proof.bisect.quantities import Quantity

#: A factor this near to a number of few digits is that number.
_NEAR = 0.001
#: Change of a factor from which its effect is measured, and the share that each step may leave at most.
_PROBE, _LEFT = 0.25, (0.95, *[0.7] * 9)


def _scaled(one: Quantity, by: Tensor, words: str, token: int = 0) -> Cause:
    """A quantity times factors of its blocks [n], from a token on."""
    change = lambda t: (t.unflatten(-1, (len(by), -1)) * by.float()[:, None]).flatten(-2)  # noqa: E731
    return one.cause(words, change, token or None)


def factors(
    one: Quantity,
    block: str,
    count: int,
    compute: Callable[[Cause], Sequence[Tensor] | None],
    found: Sequence[Tensor],
    token: int = 0,
) -> Iterator[Cause]:
    """Yield the quantity with the factors of its blocks that explain best what was found; none if none do.

    Gauss-Newton steps by finite differences: exact at once where the result is linear in the quantity.
    compute: what the checkpoint computes with a cause; None if the cause cannot be there. token: the first
    one with the factors.
    """
    if one.numbers:
        return
    by, recorded = torch.ones(count, dtype=torch.float64), _flat(found)
    usable, whole = recorded.isfinite(), 0.0
    for most in _LEFT:
        if (rows := compute(_scaled(one, by, "{}", token))) is None:
            return
        here = _flat(rows)
        probes = []
        for number in range(count):
            moved = by.clone()
            moved[number] += _PROBE
            other = compute(_scaled(one, moved, "{}", token))
            assert other is not None
            probes.append((_flat(other) - here) / _PROBE)
        effects, missing = torch.stack(probes, 1)[usable], (recorded - here)[usable]
        if not effects.isfinite().all() or not effects.any():
            return
        change = torch.linalg.lstsq(effects, missing[:, None], driver="gelsd").solution[:, 0]
        rest = missing - effects @ change
        whole = whole or float(missing.norm())
        by, spread = by + change, _spread(effects, rest)
        if not by.isfinite().all() or rest.norm() > most * whole:
            return
        if (change.abs() < (3 * spread).clamp_min(_NEAR)).all():
            break
    by = torch.stack([_rounded(value, float(error)) for value, error in zip(by, spread, strict=True)])
    if (by - 1).abs().max() > _NEAR:
        words = _words(by, block) + (f" from token {token} on" if token else "")
        yield _scaled(one, by, words, token)


def _spread(effects: Tensor, rest: Tensor) -> Tensor:
    """Standard deviations of the factors, by what they leave."""
    variance = rest.square().sum() / max(1, len(rest) - effects.shape[1])
    return (variance * torch.linalg.pinv(effects.T @ effects).diagonal()).clamp_min(0).sqrt()


def _flat(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([row.double().flatten() for row in rows])


def _rounded(value: Tensor, error: float) -> Tensor:
    """The simple number nearby, if there is one within what the error allows; 1 first."""
    for simple in (torch.ones_like(value), *((value * 10**n).round() / 10**n for n in (0, 1, 2))):
        if (value - simple).abs() < max(_NEAR, 3 * error):
            return simple + 0.0  # no -0
    return value


def _words(by: Tensor, block: str) -> str:
    if len(by) == 1 or (by - by[0]).abs().max() < _NEAR:
        return "no {}" if by[0] == 0 else f"{by[0]:.4g} times {{}}"
    if block and len(by) > 4 and (by - 1).abs().gt(_NEAR).sum() > len(by) / 2:
        return f"other values of {{}}, by {block}"
    other = [(number, value) for number, value in enumerate(by.tolist()) if abs(value - 1) > _NEAR]
    said = " and ".join(f"{value:.3g} times {block} {number}" for number, value in other[:4])
    return f"{said}{' and others' * (len(other) > 4)} of {{}}"


#: What a cause leaves of the difference in a few tokens; infinite where it cannot be.
Left = Callable[[Cause], float]
#: A block stands in for another one, or a number is refined, if so much less is left.
_LESS, _PROMISING = 0.98, 0.8
#: Most blocks of which each is tried in place of each.
_BLOCKS = 16


def mapped(one: Quantity, places: Sequence[int], words: str) -> Cause:
    """A quantity with block places[i] in place of block i."""

    return one.cause(words, lambda t: t.unflatten(-1, (len(places), -1))[..., list(places), :].flatten(-2))


def block_map(
    of: Callable[[Sequence[int], str], Cause], block: str, count: int, left: Left
) -> Iterator[Cause]:
    """Yield a cause with other blocks in place of some, if each of them leaves less."""
    if not 1 < count <= _BLOCKS:
        return
    places, best = list(range(count)), 1.0
    for _ in range(2):
        before = list(places)
        for at, number in product(range(count), repeat=2):
            tried = [*places[:at], number, *places[at + 1 :]]
            if tried != places and (less := left(of(tried, "{}"))) < _LESS * best:
                places, best = tried, less
        if places == before:
            break
    moved = [f"{number} in place of {at}" for at, number in enumerate(places) if number != at]
    if moved:
        yield of(places, f"{block} {', '.join(moved)} of {{}}")


#: Changes with a number p.
_FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "{{}} limited to {p:.4g}": lambda t, p: t.clamp(max=p),
    "{{}} of at least {p:.4g}": lambda t, p: t.clamp(min=p),
    "{{}} limited to between -{p:.4g} and {p:.4g}": lambda t, p: t.clamp(-p, p),
    "{{}} capped at {p:.4g} by tanh": lambda t, p: p * torch.tanh(t / p),
    "{{}} plus {p:.4g}": lambda t, p: t + p,
    "{{}} minus {p:.4g}": lambda t, p: t - p,
    "{{}} over {p:.4g} where positive, times it where negative": lambda t, p: torch.where(
        t > 0, t / p, t * p
    ),
    "{{}} to the power of {p:.4g}": lambda t, p: t.sign() * t.abs().clamp_min(1e-30) ** p,
}
_GRID = sorted([*(10 ** (n / 4) for n in range(-10, 9)), 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5])


def numbers(one: Quantity, left: Left) -> Iterator[Cause]:
    """Yield changes of a quantity by a number, with the number that leaves least."""
    for words, function in _FUNCTIONS.items():

        def cause(
            p: float, words: str = words, function: Callable[[Tensor, float], Tensor] = function
        ) -> Cause:
            return one.cause(words.format(p=p), lambda t: function(t, p))

        found = [left(cause(p)) for p in _GRID]
        at = min(range(len(found)), key=lambda n: found[n])
        if found[at] > _PROMISING:
            continue
        low, high = _GRID[max(0, at - 1)], _GRID[min(len(_GRID) - 1, at + 1)]
        for _ in range(24):
            a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
            low, high = (low, b) if left(cause(a)) < left(cause(b)) else (a, high)
        p = (low + high) / 2
        simple = (round(p, n) for n in (0, 1, 2, 3))
        yield cause(next((s for s in simple if s and abs(s - p) < 2e-3 * p), p))
