"""What a layer computes on its way, and changes of it: a cause for each quantity and each change.

A fault that no list has is often one quantity of the layer with a simple change: missing, doubled, of another
token, rounded, of another layer, or with factors for some of its blocks. Factors are not listed: `factors`
finds them from what was recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause, Context, Make
from megatron_nemotron3.proof.bisect.recompute import Steps

#: A change of a quantity [b, s, channels], or of a weight.
Change = Callable[[Tensor], Tensor]
#: Most blocks whose factors are looked for one by one; of more, those of so many ranks.
_BLOCKS, _RANKS = 32, 8
#: Steps that compute a layer with a change of one quantity.
Changed = Callable[[Context, Change], Steps]


@dataclass(frozen=True)
class Quantity:
    """A tensor on the way through a layer."""

    #: To follow "no" or "twice": "the gate".
    name: str
    #: Letter of the layers that have it, `LAYERS`, or `MODEL` for what follows the last layer.
    kind: str
    steps: Changed
    #: Whether it is [b, s, channels]; else a weight.
    tokens: bool = True
    #: Name and number of its natural blocks of channels: heads, groups, experts.
    blocks: Callable[[Nemotron3Config], tuple[str, int]] | None = None

    def divisions(self, config: Nemotron3Config) -> Iterator[tuple[str, int]]:
        """The whole, then its blocks if they are few, or what eight ranks hold of them."""
        yield "", 1
        block, count = self.blocks(config) if self.blocks is not None else ("", 0)
        if 1 < count <= _BLOCKS:
            yield block, count
        elif count and not count % _RANKS:
            yield "shard", _RANKS

    def cause(self, words: str, change: Callable[[Tensor, Context], Tensor], **options: Any) -> Cause:
        """A cause with a change of this quantity; `words` have {} in its place."""

        def make(context: Context) -> Steps:
            return self.steps(context, lambda t: change(t, context))

        name = words.format(self.name)
        if self.kind == MODEL:
            return Cause(name, MODEL, last=make, **options)
        return Cause(name, self.kind, layer=make, **options)


# --- where a quantity is ---------------------------------------------------------------------------------


def _output(step: str) -> Changed:
    return lambda context, change: {step: lambda plain, *given: change(plain(*given))}


def _argument(step: str, number: int) -> Changed:
    """An argument of a step, [b, s, …], whose last axes are taken for one."""

    def other(change: Change, plain: Any, *given: Any) -> Any:
        old = given[number]
        flat = old.flatten(2) if old.dim() > 2 else old
        return plain(*given[:number], change(flat).view_as(old), *given[number + 1 :])

    return lambda context, change: {step: partial(other, change)}


def _of_heads(number: int | None) -> Changed:
    """An argument of attention [b, h, s, c], or its result (None)."""

    def flat(change: Change, t: Tensor) -> Tensor:
        return change(t.transpose(1, 2).flatten(2)).unflatten(-1, (t.shape[1], -1)).transpose(1, 2)

    def attend(change: Change, plain: Any, *given: Any) -> Any:
        if number is None:
            return flat(change, plain(*given))
        return plain(*given[:number], flat(change, given[number]), *given[number + 1 :])

    return lambda context, change: {"attend": partial(attend, change)}


def _weight(end: str) -> Changed:
    return lambda context, change: {
        "weight": lambda plain, name: change(plain(name)) if name.endswith(end) else plain(name)
    }


def _product(end: str, rows: Callable[[Nemotron3Config], slice] | None = None) -> Changed:
    """The product with a matrix, or some channels of it."""

    def steps(context: Context, change: Change) -> Steps:
        part = slice(None) if rows is None else rows(context.config)

        def linear(plain: Any, x: Tensor, name: str) -> Any:
            y = plain(x, name)
            if name.endswith(end):
                y[..., part] = change(y[..., part])
            return y

        return {"linear": linear}

    return steps


def _part(number: int) -> Callable[[Nemotron3Config], slice]:
    """Rows of z, x, B, C and dt in in_proj."""

    def rows(c: Nemotron3Config) -> slice:
        bc = c.mamba_num_groups * c.mamba_state_dim
        sizes = [c.mamba_inner_size, c.mamba_inner_size, bc, bc, c.mamba_num_heads]
        return slice(sum(sizes[:number]), sum(sizes[: number + 1]))

    return rows


def _scanned(context: Context, change: Change) -> Steps:
    def scan(plain: Any, *given: Any) -> Any:
        y, ssm = plain(*given)
        return change(y.flatten(2)).view_as(y), ssm

    return {"scan": scan}


def _norm_before(context: Context, change: Change) -> Steps:
    """The gain of the norm before the layer."""
    number = context.layer

    def weight(plain: Any, name: str) -> Any:
        return change(plain(name)) if re.search(rf"layers\.{number}\.norm\.weight$", name) else plain(name)

    return {"weight": weight}


def _logits(context: Context, change: Change) -> Steps:
    return {"vocabulary": lambda plain, h: (change(band) for band in plain(h))}


_heads = lambda c: ("head", c.mamba_num_heads)  # noqa: E731
_groups = lambda c: ("group", c.mamba_num_groups)  # noqa: E731
_queries = lambda c: ("head", c.num_attention_heads)  # noqa: E731
_experts = lambda c: ("expert", c.num_moe_experts or 0)  # noqa: E731

QUANTITIES: tuple[Quantity, ...] = (
    Quantity("the gain of the norm before the layer", LAYERS, _norm_before, tokens=False),
    Quantity("the layer's update", LAYERS, _output("layer")),
    Quantity("the gate z", "M", _product("in_proj.weight", _part(0)), blocks=_heads),
    Quantity("x before the convolution", "M", _product("in_proj.weight", _part(1)), blocks=_heads),
    Quantity("B before the convolution", "M", _product("in_proj.weight", _part(2)), blocks=_groups),
    Quantity("C before the convolution", "M", _product("in_proj.weight", _part(3)), blocks=_groups),
    Quantity("dt before its bias", "M", _product("in_proj.weight", _part(4)), blocks=_heads),
    Quantity("dt_bias", "M", _weight("mixer.dt_bias"), tokens=False, blocks=_heads),
    Quantity("the time steps", "M", _output("time_steps"), blocks=_heads),
    Quantity("x of the scan", "M", _argument("scan", 0), blocks=_heads),
    Quantity("A", "M", _argument("scan", 2), tokens=False, blocks=_heads),
    Quantity("B of the scan", "M", _argument("scan", 3), blocks=_groups),
    Quantity("C of the scan", "M", _argument("scan", 4), blocks=_groups),
    Quantity("D", "M", _weight("mixer.D"), tokens=False, blocks=_heads),
    Quantity("the scan's output", "M", _scanned, blocks=_heads),
    Quantity("the convolution's output", "M", _output("conv")),
    Quantity("the convolution's weight", "M", _weight("conv1d.weight"), tokens=False),
    Quantity("the convolution's bias", "M", _weight("conv1d.bias"), tokens=False),
    Quantity("the norm after the scan", "M", _output("gated_norm"), blocks=_groups),
    Quantity("the gain of the norm after the scan", "M", _weight("mixer.norm.weight"), tokens=False),
    Quantity("the queries", "*", _of_heads(0), blocks=_queries),
    Quantity("the keys", "*", _of_heads(1), blocks=_queries),
    Quantity("the values", "*", _of_heads(2), blocks=_queries),
    Quantity("attention's output before its projection", "*", _of_heads(None), blocks=_queries),
    Quantity("the router's logits", "E", _output("router"), blocks=_experts),
    Quantity("the expert bias", "E", _weight("e_score_correction_bias"), tokens=False, blocks=_experts),
    Quantity("the weights of the chosen experts", "E", _output("probabilities")),
    Quantity("the latent input of the experts", "E", _product("fc1_latent_proj.weight")),
    Quantity("the sum of the routed experts", "E", _output("routed")),
    Quantity("the first product of the experts", "E", _product("up_proj.weight"), tokens=False),
    Quantity("the shared expert's output", "E", _output("shared")),
    Quantity("the gain of the final norm", MODEL, _weight("norm_f.weight"), tokens=False),
    Quantity("the final norm's output", MODEL, _output("norm")),
    Quantity("the logits", MODEL, _logits),
)


# --- changes ---------------------------------------------------------------------------------------------


def _int8(t: Tensor) -> Tensor:
    """Rounded to 8 bits with one scale."""
    scale = t.abs().amax().clamp_min(1e-30) / 127
    return (t / scale).round() * scale


def _neighbours(t: Tensor) -> Tensor:
    even = t.shape[-1] // 2 * 2
    return torch.cat([t[..., :even].unflatten(-1, (-1, 2)).flip(-1).flatten(-2), t[..., even:]], -1)


#: Of any quantity; a change that rounds is known by its dtype.
_PLAIN: dict[str, Change] = {
    "no {}": torch.zeros_like,
    "twice {}": lambda t: 2 * t,
    "half of {}": lambda t: t / 2,
    "the negative of {}": torch.neg,
    "{} plus one": lambda t: t + 1,
    "{} squared": torch.square,
    "{} in reverse order": lambda t: t.flip(-1),
    "the two halves of {} swapped": lambda t: t.roll(t.shape[-1] // 2, -1),
    "neighbouring channels of {} swapped": _neighbours,
    "{} without its mean": lambda t: t - t.mean(-1, keepdim=True),
    "SiLU of {}": F.silu,
}
_ROUNDED: dict[str, Change] = {
    "{} rounded to BF16": lambda t: t.bfloat16().float(),
    "{} rounded to FP16": lambda t: t.half().float(),
    "{} rounded to E4M3": lambda t: t.clamp(-448, 448).to(torch.float8_e4m3fn).float(),
    "{} rounded to INT8 with one scale": _int8,
}
#: Along the tokens: [b, s, channels].
_MOVED: dict[str, Change] = {
    "{} one token late": lambda t: F.pad(t, (0, 0, 1, 0))[:, :-1],
    "{} one token early": lambda t: F.pad(t, (0, 0, 0, 1))[:, 1:],
    "{} without that of the first token": lambda t: F.pad(t[:, 1:], (0, 0, 1, 0)),
    "the mean of {} so far": lambda t: t.cumsum(1) / torch.arange(1, t.shape[1] + 1)[None, :, None],
}


def _everywhere(change: Change) -> Callable[[Tensor, Context], Tensor]:
    return lambda t, c: change(t)


def _after_prompt(change: Change) -> Callable[[Tensor, Context], Tensor]:
    return lambda t, c: torch.cat([t[:, : c.prompt], change(t)[:, c.prompt :]], 1)


def _from(token: int, change: Change) -> Callable[[Tensor, Context], Tensor]:
    return lambda t, c: torch.cat([t[:, :token], change(t)[:, token:]], 1)


def listed(quantities: Sequence[Quantity] = QUANTITIES, token: int = 0) -> Iterator[Cause]:
    """Every change of every quantity, in all tokens, after the prompt, and from a token on.

    token: the first token that deviates, the same in all sequences; 0: no such one.
    """
    for one in quantities:
        moved = _MOVED if one.tokens and one.kind != MODEL else {}
        for words, change in (_PLAIN | moved).items():
            yield one.cause(words, _everywhere(change), located=True)
        for words, change in _ROUNDED.items():
            yield one.cause(words, _everywhere(change), located=True, rounds=True)
        for words, change in (_PLAIN | moved).items() if moved else ():
            yield one.cause(f"{words} after the prompt", _after_prompt(change), located=True)
            if token > 1:
                yield one.cause(f"{words} from token {token} on", _from(token, change), located=True)


#: Weights of a layer, by the ends of their names.
_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "M": ("in_proj", "conv1d.weight", "conv1d.bias", "A_log", "mixer.D", "dt_bias", "mixer.norm", "out_proj"),
    "*": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "E": ("gate.weight", "correction_bias", "fc1_latent", "fc2_latent", "shared_experts", ".experts."),
}


def neighbours() -> Iterator[Cause]:
    """Weights of the next or the previous layer of the kind, one tensor or all of them."""
    for kind, ends in _WEIGHTS.items():
        for end in (*ends, "latent", "norm.weight", ""):
            for way, of in ((-1, "previous"), (1, "next")):
                what = end.removesuffix(".weight").removeprefix("mixer.").strip(".") or "every weight"
                name = f"{what} of the {of} layer of its kind"
                yield Cause(name, kind, layer=_neighbour(end, way), located=True)


def _neighbour(end: str, way: int) -> Make:
    def steps(context: Context) -> Steps | None:
        pattern = context.config.pattern
        if not 0 <= context.layer < len(pattern):
            return None
        layers = [n for n, kind in enumerate(pattern) if kind == pattern[context.layer]]
        place = layers.index(context.layer) + way
        if not 0 <= place < len(layers):
            return None

        def moved(name: str) -> str:
            other = f"layers.{layers[place]}."
            return re.sub(r"layers\.\d+\.", other, name, count=1) if end in name else name

        return {
            "weight": lambda plain, name: plain(moved(name)),
            "linear": lambda plain, x, name: plain(x, moved(name)),
        }

    return steps


# --- factors ---------------------------------------------------------------------------------------------

#: A factor this near to a number of few digits is that number.
_NEAR = 0.004
#: Change of a factor from which its effect is measured, and the share that each step may leave at most.
_PROBE, _LEFT = 0.25, (0.95, 0.7, 0.7, 0.7)


def _scaled(one: Quantity, by: Tensor, words: str) -> Cause:
    """A quantity times factors of its blocks [n]."""

    def change(t: Tensor, context: Context) -> Tensor:
        return (t.unflatten(-1, (len(by), -1)) * by.float()[:, None]).flatten(-2)

    return one.cause(words, change)


def factors(
    one: Quantity,
    block: str,
    count: int,
    compute: Callable[[Cause], Sequence[Tensor] | None],
    found: Sequence[Tensor],
) -> Iterator[Cause]:
    """Yield the quantity with the factors of its blocks that explain best what was found; none if none do.

    Gauss-Newton steps by finite differences: exact at once where the result is linear in the quantity.

    Args:
        block, count: name and number of the blocks.
        compute: what the checkpoint computes with a cause; None if the cause cannot be there.
    """
    by, recorded = torch.ones(count, dtype=torch.float64), _flat(found)
    usable, whole = recorded.isfinite(), 0.0
    for most in _LEFT:
        rows = compute(_scaled(one, by, f"{{}} times {by.tolist()}"))
        if rows is None:
            return
        here = _flat(rows)
        probes = []
        for number in range(count):
            moved = by.clone()
            moved[number] += _PROBE
            other = compute(_scaled(one, moved, f"{{}} times {moved.tolist()}"))
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
        yield _scaled(one, by, _words(by, block))


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
    other = [(number, value) for number, value in enumerate(by.tolist()) if abs(value - 1) > _NEAR]
    said = " and ".join(f"{value:.3g} times {block} {number}" for number, value in other[:4])
    return f"{said}{' and others' * (len(other) > 4)} of {{}}"
