"""What a layer computes on its way: quantities of which a fault changes one (`changes`, `fits`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.bisect.causes import EMBEDDING, LAYERS, MODEL, Cause, Context, at_place, compose
from megatron_nemotron3.proof.bisect.recompute import Steps

#: A change of a quantity [b, s, channels], or of a weight.
Change = Callable[[Tensor], Tensor]
#: Most blocks that are looked at one by one; of more, those of so many ranks.
_BLOCKS, _RANKS = 32, 8
#: Steps that compute a layer with a change of one quantity.
Changed = Callable[[Context, Change], Steps]


@dataclass(frozen=True)
class Quantity:
    """A tensor on the way through a layer."""

    name: str  # to follow "no" or "twice": "the gate"
    kind: str  # letter of the layers that have it, or as in `causes`
    steps: Changed
    tokens: bool = True  # it is [b, s, channels]; else a weight, or the numbers of what may be elsewhere
    numbers: bool = False
    #: Name and number of its natural blocks of channels: heads, groups, experts.
    blocks: Callable[[Nemotron3Config], tuple[str, int]] = lambda c: ("", 0)
    #: Name and size of the parts that each rank of a training has a share of.
    parts: Callable[[Nemotron3Config], dict[str, int]] = lambda c: {}

    def divisions(self, config: Nemotron3Config) -> list[tuple[str, int]]:
        """The whole, then its blocks if they are few, or what eight ranks hold of them."""
        block, count = self.blocks(config)
        if not 1 < count <= _BLOCKS:
            block, count = ("shard", _RANKS) if count and not count % _RANKS else ("", 0)
        return [("", 1), *([(block, count)] if count else [])]

    def cause(self, words: str, change: Change, start: int | None = None, **options: Any) -> Cause:
        """A cause with a change of this quantity, {} in `words`, from a token on; 0: after the prompt."""

        def make(context: Context) -> Steps:
            first = 0 if start is None else start or context.prompt
            later = lambda t: torch.cat([t[:, :first], change(t)[:, first:]], 1)  # noqa: E731
            return self.steps(context, later if first else change)

        name = words.format(self.name).replace("no the ", "no ")
        return at_place(name, self.kind, make, **options)


# --- where a quantity is ---------------------------------------------------------------------------------


def _at(
    step: str,
    number: int | None = None,
    end: str = "",
    *,
    heads: bool = False,
    rows: Callable[[Nemotron3Config], slice] = lambda c: slice(None),
) -> Changed:
    """An argument of a step or its result, axes joined; for tensors whose name ends so, of some rows."""

    def viewed(change: Change, part: slice, t: Tensor) -> Tensor:
        if heads:
            return change(t.transpose(1, 2).flatten(2)).unflatten(-1, (t.shape[1], -1)).transpose(1, 2)
        if part != slice(None):
            t = t.clone()
            t[..., part] = change(t[..., part])
            return t
        return change(t.flatten(2)).view_as(t) if t.dim() > 3 else change(t)

    def called(change: Change, part: slice, plain: Any, *given: Any) -> Any:
        if end and not any(re.search(end + "$", one) for one in given if isinstance(one, str)):
            return plain(*given)
        if number is not None:
            return plain(*given[:number], viewed(change, part, given[number]), *given[number + 1 :])
        found = plain(*given)
        if isinstance(found, Iterator):
            return map(change, found)
        return (
            (viewed(change, part, found[0]), *found[1:])
            if isinstance(found, tuple)
            else viewed(change, part, found)
        )

    return lambda context, change: {step: partial(called, change, rows(context.config))}


_weight, _product, _into = (
    partial(_at, "weight", None),
    partial(_at, "linear", None),
    partial(_at, "linear", 0),
)


def _attention(number: int, context: Context, change: Change) -> Steps:
    """Scaled scores [b, h, s, s] (0), the sums of their exponentials [b, h, s, 1] (1), their quotient (2)."""

    def weights(scores: Tensor, t: Tensor, u: Tensor) -> Tensor:
        changes = [change if n == number else (lambda t: t) for n in range(3)]
        of_each = changes[0](scores).exp() * (u <= t)
        return changes[2](of_each / changes[1](of_each.sum(-1, keepdim=True))) * (u <= t)

    return {"attend": weighted(weights)}


def weighted(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention by weights [b, h, s, s] of scaled scores; queries [s, 1] and keys [1, s] are numbered."""

    def attend(plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = torch.arange(q.shape[2])
        return change(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, t[:, None], t[None]).nan_to_num() @ v

    return attend


def _matrix(end: str) -> Changed:
    """A matrix [rows, columns] that only products read."""

    def linear(change: Change, plain: Any, x: Tensor, name: str) -> Any:
        if not re.search(end + r"\.weight$", name):
            return plain(x, name)
        return x @ change(plain.__self__.weight(name)).T

    return lambda context, change: {"linear": partial(linear, change)}


def _activations(step: str, before: bool = False) -> Changed:
    """The activations inside the shared expert or the routed ones, or what they are made of."""

    def inside(change: Change, plain: Any, *given: Any) -> Any:
        other = lambda old, x: old(change(x)) if before else change(old(x))  # noqa: E731
        return plain.__func__(plain.__self__.but(activation=other), *given)

    return lambda context, change: {step: partial(inside, change)}


def _shares(context: Context, change: Change) -> Steps:
    """What each expert counts for a token [b, s, experts]; 0 for those that it did not choose."""

    def routed(plain: Any, name: str, z: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        dense = z.new_zeros(*chosen.shape[:-1], context.config.num_moe_experts or 0)
        return plain(name, z, chosen, change(dense.scatter(-1, chosen, weights)).gather(-1, chosen))

    return {"routed": routed}


def conv_parts(c: Nemotron3Config) -> dict[str, int]:
    """Channels of the convolution."""
    bc = c.mamba_num_groups * c.mamba_state_dim
    return {"x": c.mamba_inner_size, "B": bc, "C": bc}


def in_proj_parts(c: Nemotron3Config) -> dict[str, int]:
    """Rows of Mamba's in_proj."""
    return {"z": c.mamba_inner_size, **conv_parts(c), "dt": c.mamba_num_heads}


def _qkv_parts(c: Nemotron3Config) -> dict[str, int]:
    heads = {"queries": c.num_attention_heads, "keys": c.num_query_groups, "values": c.num_query_groups}
    return {name: count * c.kv_channels for name, count in heads.items()}


def _in_proj(name: str) -> Changed:
    """Rows of a part of in_proj."""

    def rows(c: Nemotron3Config) -> slice:
        sizes = in_proj_parts(c)
        start = sum(list(sizes.values())[: list(sizes).index(name)])
        return slice(start, start + sizes[name])

    return _product("in_proj.weight", rows=rows)


def _joint(context: Context, change: Change) -> Steps:
    """The queries, keys and values of all heads, one behind the other."""
    sizes = list(_qkv_parts(context.config).values())

    def linear(plain: Any, x: Tensor, name: str) -> Any:
        if not (found := re.search(r"([qkv])_proj\.weight$", name)):
            return plain(x, name)
        names = (f"{name[: found.start()]}{one}_proj.weight" for one in "qkv")
        return change(torch.cat([plain(x, one) for one in names], -1)).split(sizes, -1)["qkv".index(found[1])]

    return {"linear": linear}


def _of_each_head(context: Context, change: Change) -> Steps:
    """B and C of the scan as each head sees them."""

    def scan(plain: Any, x: Tensor, dt: Tensor, A: Tensor, *given: Tensor) -> Any:
        bc = (t.repeat_interleave(x.shape[2] // t.shape[2], 2).flatten(2) for t in given[:2])
        return plain(x, dt, A, *(change(t).unflatten(-1, (x.shape[2], -1)) for t in bc), given[2])

    return {"scan": scan}


def _skip(number: int, context: Context, change: Change) -> Steps:
    """D of each channel [inner] (0), or the x that it multiplies (1)."""

    def recurrence(plain: Any, name: str, c: Nemotron3Config, *given: Any) -> Any:
        def scan(plain: Any, x: Tensor, *given: Any) -> Any:
            y, ssm = plain(x, *given)
            pair = [plain.__self__.weight(name + "D")[:, None].expand(x.shape[2:]), x]
            old, new = pair[number], change(pair[number].flatten(-2)).view_as(pair[number])
            return y + (new - old) * pair[1 - number], ssm

        return plain.__func__(plain.__self__.but(scan=scan), name, c, *given)

    return {"recurrence": recurrence}


def _whole(change: Change) -> Steps:
    """The logits of all tokens of the vocabulary at once."""
    return {"vocabulary": lambda plain, h: iter([change(torch.cat(list(plain(h)), -1))])}


def _seen(ids: Tensor | None, logits: Tensor) -> Tensor:
    """Whether a token of the vocabulary stood before."""
    assert ids is not None
    return torch.nn.functional.one_hot(ids[: logits.shape[-2]], logits.shape[-1]).cumsum(0) > 0


def _expert_numbers(context: Context, change: Change) -> Steps:
    """Which expert has the weights of each."""
    order = change(torch.arange(context.config.num_moe_experts or 0)).tolist()

    def mlp(plain: Any, name: str, u: Tensor) -> Any:
        return plain(re.sub(r"(?<=\.experts\.)\d+", lambda m: str(order[int(m[0])]), name), u)

    return {"mlp": mlp}


#: Steps that are short: of the context and a change.
_STEPS: dict[str, Changed] = {
    "update": lambda c, f: {"layer": lambda plain, prefix, x, run: plain(prefix, x, run) + f(x) - x},
    "stream": lambda c, f: {"layer": lambda plain, prefix, x, run: f(x + plain(prefix, x, run)) - x},
    "input": lambda c, f: {"scan": lambda plain, x, dt, *abc: plain(x * (f(dt) / dt)[..., None], dt, *abc)},
    "both": lambda c, f: compose(*(_at("attend", number, heads=True)(c, f) for number in (1, 2))),
    "routing": lambda c, f: {"routed": lambda plain, name, z, e, w: plain(name, z, f(e), f(w))},
    "seen": lambda c, f: _whole(lambda logits: torch.where(_seen(c.ids, logits), f(logits), logits)),
    "output": lambda c, f: _whole(lambda logits: logits[..., f(torch.arange(logits.shape[-1]))]),
    "rows": lambda c, f: {"embed": lambda plain, ids: plain(f(torch.arange(c.config.vocab_size))[ids])},
    "channels": lambda c, f: {
        "conv": lambda plain, x, w, bias: plain(x, *(t[f(torch.arange(len(t)))] for t in (w, bias)))
    },
}

mamba_heads = lambda c: ("head", c.mamba_num_heads)  # noqa: E731
_groups = lambda c: ("group", c.mamba_num_groups)  # noqa: E731
query_heads = lambda c: ("head", c.num_attention_heads)  # noqa: E731
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
    Quantity("the gain of the norm before the layer", LAYERS, _weight(r"\d.norm.weight"), tokens=False),
    Quantity("the layer's update", LAYERS, _at("layer")),
    Quantity("the residual stream", LAYERS, _STEPS["stream"]),
    Quantity("the gate z", "M", _in_proj("z"), blocks=mamba_heads),
    Quantity("x before the convolution", "M", _in_proj("x"), blocks=mamba_heads),
    Quantity("B before the convolution", "M", _in_proj("B"), blocks=_groups),
    Quantity("C before the convolution", "M", _in_proj("C"), blocks=_groups),
    Quantity("dt before its bias", "M", _in_proj("dt"), blocks=mamba_heads),
    Quantity("dt_bias", "M", _weight("mixer.dt_bias"), tokens=False, blocks=mamba_heads),
    Quantity("the time steps", "M", _at("time_steps"), blocks=mamba_heads),
    Quantity("x of the scan", "M", _at("scan", 0), blocks=mamba_heads),
    Quantity("A", "M", _at("scan", 2), tokens=False, blocks=mamba_heads),
    Quantity("B of the scan", "M", _at("scan", 3), blocks=_groups),
    Quantity("C of the scan", "M", _at("scan", 4), blocks=_groups),
    Quantity("the scan's output", "M", _at("scan"), blocks=mamba_heads),
    Quantity("the convolution's output", "M", _at("conv")),
    Quantity("the convolution's weight", "M", _weight("conv1d.weight"), tokens=False),
    Quantity("the convolution's bias", "M", _weight("conv1d.bias"), tokens=False),
    Quantity("the norm after the scan", "M", _at("gated_norm"), blocks=_groups),
    Quantity("the gain of the norm after the scan", "M", _weight("mixer.norm.weight"), tokens=False),
    Quantity("the output projection's input", "M", _into("out_proj.weight"), blocks=mamba_heads),
    Quantity("queries, keys and values", "*", _product("[qkv]_proj.weight"), blocks=_shards),
    Quantity("the queries", "*", _at("attend", 0, heads=True), blocks=query_heads),
    Quantity("the keys", "*", _at("attend", 1, heads=True), blocks=query_heads),
    Quantity("the values", "*", _at("attend", 2, heads=True), blocks=query_heads),
    Quantity("attention's output before its projection", "*", _at("attend", heads=True), blocks=query_heads),
    Quantity("the router's logits", "E", _at("router"), blocks=_experts),
    Quantity("the expert bias", "E", _weight("e_score_correction_bias"), tokens=False, blocks=_experts),
    Quantity("the weights of the chosen experts", "E", _at("probabilities")),
    Quantity("the latent input of the experts", "E", _product("fc1_latent_proj.weight")),
    Quantity("the sum of the routed experts", "E", _at("routed")),
    Quantity("the shares of the experts", "E", _shares, blocks=_experts),
    Quantity("the activations of the routed experts", "E", _activations("routed"), tokens=False),
    Quantity("the activations of the shared expert", "E", _activations("shared"), blocks=_shards),
    Quantity("the shared expert's output", "E", _at("shared")),
    Quantity("the gain of the final norm", MODEL, _weight("norm_f.weight"), tokens=False),
    Quantity("the final norm's output", MODEL, _at("norm")),
    Quantity("the logits", MODEL, _at("vocabulary")),
    Quantity("the logits of tokens that stood before", MODEL, _STEPS["seen"]),
    Quantity("the stream that the norm reads", LAYERS, _at("norm", 0, r"\d.norm.weight")),
    Quantity("the stream that the update is added to", LAYERS, _STEPS["update"]),
    Quantity("the normed input", LAYERS, _at("norm", None, r"\d.norm.weight")),
    Quantity("B and C of each head", "M", _of_each_head, blocks=mamba_heads),
    Quantity("the keys and values", "*", _STEPS["both"], blocks=query_heads),
    Quantity("D", "M", partial(_skip, 0), tokens=False, blocks=mamba_heads),
    Quantity("the x that D multiplies", "M", partial(_skip, 1), blocks=mamba_heads),
    Quantity("the time steps of the scan's input", "M", _STEPS["input"], blocks=mamba_heads),
    Quantity("in_proj's output", "M", _product("in_proj.weight"), parts=in_proj_parts),
    Quantity("the queries, keys and values of all heads", "*", _joint, parts=_qkv_parts),
    Quantity("the input of the queries", "*", _into("q_proj.weight")),
    Quantity("the input of the keys", "*", _into("k_proj.weight")),
    Quantity("the input of the values", "*", _into("v_proj.weight")),
    Quantity("the scaled scores", "*", partial(_attention, 0), tokens=False),
    Quantity("the softmax's sum", "*", partial(_attention, 1), tokens=False),
    Quantity("the softmax of the scores", "*", partial(_attention, 2), tokens=False),
    Quantity("the router's input", "E", _at("router", 0)),
    Quantity("the router's scores", "E", _at("scores"), blocks=_experts),
    Quantity("the ranks of the experts", "E", _at("ranking"), blocks=_experts),
    Quantity("the shared expert's input", "E", _at("shared", 1)),
    Quantity("the routed experts' input", "E", _at("routed", 1)),
    Quantity("the first latent projection's input", "E", _into("fc1_latent_proj.weight")),
    Quantity("the routed experts before activation", "E", _activations("routed", True), tokens=False),
    Quantity("the shared expert before activation", "E", _activations("shared", True), tokens=False),
    Quantity("the second latent projection's output", "E", _product("fc2_latent_proj.weight")),
    Quantity("the embeddings", EMBEDDING, _at("embed")),
    Quantity("the experts", "E", _expert_numbers, tokens=False, numbers=True, blocks=_experts),
    Quantity("the convolution's channels", "M", _STEPS["channels"], False, True, parts=conv_parts),
    Quantity("the rows of the embedding", EMBEDDING, _STEPS["rows"], tokens=False, numbers=True),
    Quantity("the rows of the output layer", MODEL, _STEPS["output"], tokens=False, numbers=True),
)
_BY_NAME = {one.name: one for one in QUANTITIES}


def changed(one: Quantity | str, changes: Mapping[str, Change], **options: Any) -> Iterator[Cause]:
    """Causes with changes of a quantity, or of that of `QUANTITIES` with a name."""
    quantity = _BY_NAME[one] if isinstance(one, str) else one
    for words, change in changes.items():
        yield quantity.cause(words, change, **options)


#: Only its tokens are moved.
ROUTES = Quantity("the routing", "E", _STEPS["routing"])
