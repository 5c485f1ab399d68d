"""What a layer computes on its way: quantities of which a fault may change one.

A fault that no list has is often one quantity of the layer with a simple change (`changes`), or with factors
for some of its blocks (`factors`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause, Context
from megatron_nemotron3.proof.bisect.recompute import Steps

#: A change of a quantity [b, s, channels], or of a weight; and one that depends on the place.
Change = Callable[[Tensor], Tensor]
ChangeAt = Callable[[Tensor, Context], Tensor]
#: Most blocks that are looked at one by one; of more, those of so many ranks.
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

    def cause(self, words: str, change: ChangeAt, **options: Any) -> Cause:
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
            if re.search(end + r"$", name):
                y[..., part] = change(y[..., part])
            return y

        return {"linear": linear}

    return steps


def _into(end: str) -> Changed:
    """What a matrix is multiplied with."""

    def linear(change: Change, plain: Any, x: Tensor, name: str) -> Any:
        return plain(change(x) if name.endswith(end + ".weight") else x, name)

    return lambda context, change: {"linear": partial(linear, change)}


def _matrix(end: str) -> Changed:
    """A matrix [rows, columns] that only products read."""

    def linear(change: Change, plain: Any, x: Tensor, name: str) -> Any:
        if not re.search(end + r"\.weight$", name):
            return plain(x, name)
        return x @ change(plain.__self__.weight(name)).T

    return lambda context, change: {"linear": partial(linear, change)}


def _activations(step: str) -> Changed:
    """The activations inside the shared expert or the routed ones."""

    def inside(change: Change, plain: Any, *given: Any) -> Any:
        model = plain.__self__.but(activation=lambda original, x: change(original(x)))
        return plain.__func__(model, *given)

    return lambda context, change: {step: partial(inside, change)}


def _shares(context: Context, change: Change) -> Steps:
    """What each expert counts for a token [b, s, experts]; 0 for those that it did not choose."""

    def routed(plain: Any, name: str, z: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        dense = z.new_zeros(*chosen.shape[:-1], context.config.num_moe_experts or 0)
        return plain(name, z, chosen, change(dense.scatter(-1, chosen, weights)).gather(-1, chosen))

    return {"routed": routed}


def in_proj_sizes(c: Nemotron3Config) -> list[int]:
    """Rows of z, x, B, C and dt in Mamba's in_proj."""
    bc = c.mamba_num_groups * c.mamba_state_dim
    return [c.mamba_inner_size, c.mamba_inner_size, bc, bc, c.mamba_num_heads]


def of_other_layer(context: Context, way: int, names: tuple[str, ...]) -> Steps | None:
    """Weights whose names have one of these texts, of the next layer of the kind (1) or the previous one."""
    pattern, number = context.config.pattern, context.layer
    if not 0 <= number < len(pattern):
        return None
    layers = [n for n, kind in enumerate(pattern) if kind == pattern[number]]
    place = layers.index(number) + way
    if not 0 <= place < len(layers):
        return None

    def moved(name: str) -> str:
        if not any(part in name for part in names):
            return name
        return re.sub(r"layers\.\d+\.", f"layers.{layers[place]}.", name, count=1)

    return {
        "weight": lambda plain, name: plain(moved(name)),
        "linear": lambda plain, x, name: plain(x, moved(name)),
    }


def _part(number: int) -> Callable[[Nemotron3Config], slice]:
    """Rows of z, x, B, C and dt in in_proj."""

    def rows(c: Nemotron3Config) -> slice:
        sizes = in_proj_sizes(c)
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
_shards = lambda c: ("shard", _RANKS)  # noqa: E731

#: Matrices by kind, and the ends of their names.
_MATRICES = {
    "M": {"in_proj": "in_proj", "out_proj": "out_proj"},
    "*": {"the projections of queries, keys and values": "[qkv]_proj", "the output projection": "o_proj"},
    "E": {
        "the router": "gate",
        "the first matrices of the experts": r"\.experts\.\d+\.up_proj",
        "the second matrices of the experts": r"\.experts\.\d+\.down_proj",
        "all matrices of the experts": r"\.experts\.\d+\.(up|down)_proj",
        "the matrices of the shared expert": r"shared_experts\.(up|down)_proj",
        "the first latent projection": "fc1_latent_proj",
        "the second latent projection": "fc2_latent_proj",
    },
}
MATRICES = tuple(
    Quantity(name, kind, _matrix(end), tokens=False)
    for kind, ends in _MATRICES.items()
    for name, end in ends.items()
)

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
    Quantity("the output projection's input", "M", _into("out_proj"), blocks=_heads),
    Quantity("queries, keys and values", "*", _product("[qkv]_proj.weight"), blocks=_shards),
    Quantity("the queries", "*", _of_heads(0), blocks=_queries),
    Quantity("the keys", "*", _of_heads(1), blocks=_queries),
    Quantity("the values", "*", _of_heads(2), blocks=_queries),
    Quantity("attention's output before its projection", "*", _of_heads(None), blocks=_queries),
    Quantity("the router's logits", "E", _output("router"), blocks=_experts),
    Quantity("the expert bias", "E", _weight("e_score_correction_bias"), tokens=False, blocks=_experts),
    Quantity("the weights of the chosen experts", "E", _output("probabilities")),
    Quantity("the latent input of the experts", "E", _product("fc1_latent_proj.weight")),
    Quantity("the sum of the routed experts", "E", _output("routed")),
    Quantity("the shares of the experts", "E", _shares, blocks=_experts),
    Quantity("the activations of the routed experts", "E", _activations("routed"), tokens=False),
    Quantity("the activations of the shared expert", "E", _activations("shared"), blocks=_shards),
    Quantity("the shared expert's output", "E", _output("shared")),
    Quantity("the gain of the final norm", MODEL, _weight("norm_f.weight"), tokens=False),
    Quantity("the final norm's output", MODEL, _output("norm")),
    Quantity("the logits", MODEL, _logits),
)
