"""Factors of a quantity, and of its blocks, that explain what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.causes import Cause, Context
from megatron_nemotron3.proof.bisect.quantities import Quantity

#: A factor this near to a number of few digits is that number.
_NEAR = 0.001
#: Change of a factor from which its effect is measured, and the share that each step may leave at most.
_PROBE, _LEFT = 0.25, (0.95, 0.7, 0.7, 0.7)


def _scaled(one: Quantity, by: Tensor, words: str, token: int = 0) -> Cause:
    """A quantity times factors of its blocks [n], from a token on."""

    def change(t: Tensor, context: Context) -> Tensor:
        new = (t.unflatten(-1, (len(by), -1)) * by.float()[:, None]).flatten(-2)
        return torch.cat([t[:, :token], new[:, token:]], 1) if token else new

    return one.cause(words, change)


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

    Args:
        block, count: name and number of the blocks.
        compute: what the checkpoint computes with a cause; None if the cause cannot be there.
        token: the first one with the factors.
    """
    by, recorded = torch.ones(count, dtype=torch.float64), _flat(found)
    usable, whole = recorded.isfinite(), 0.0
    for most in _LEFT:
        rows = compute(_scaled(one, by, f"{{}} times {by.tolist()} from {token}", token))
        if rows is None:
            return
        here = _flat(rows)
        probes = []
        for number in range(count):
            moved = by.clone()
            moved[number] += _PROBE
            other = compute(_scaled(one, moved, f"{{}} times {moved.tolist()} from {token}", token))
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
