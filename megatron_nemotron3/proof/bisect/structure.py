"""Quantities from other places; at borders, what the tokens before hand on: states, windows, keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.definition import Forward
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.proof.bisect.causes import LAYERS, Cause, Context, both, layer_beside, where
from megatron_nemotron3.proof.bisect.changes import MOVED, PLAIN, ROUNDED, TILES, TOGETHER, maps
from megatron_nemotron3.proof.bisect.quantities import (
    QUANTITIES,
    Change,
    Quantity,
    changed,
    conv_parts,
    mamba_heads,
    query_heads,
)
from megatron_nemotron3.proof.bisect.recompute import Steps

# --- another place ---------------------------------------------------------------------------------------


@where
def _taken(
    context: Context, one: Quantity, other: Quantity, way: int = 0, beside: bool = False
) -> Steps | None:
    """A quantity has the values of another one, of the next layer but `way`, or of another sequence."""
    if context.taken is None or (place := layer_beside(context, way, one.kind == LAYERS)) is None:
        return None
    own, new = context.taken(one, context.layer, False), context.taken(other, place, beside)
    if own is None or new is None or own.shape[-1] != new.shape[-1] or torch.equal(own, new):
        return None
    # What another sequence lacks stays.
    return one.steps(context, lambda t: torch.cat([new[:, : t.shape[1]], t[:, new.shape[1] :]], 1))


def sources(handed: Sequence[Quantity]) -> Iterator[Cause]:
    """Quantities of another layer or sequence, in the place of others of the layer, or swapped with them."""
    along = [one for one in QUANTITIES if one.tokens and one.kind in (LAYERS, *"M*E")]
    for one in (*along, *handed):
        yield Cause(f"{one.name} of another sequence", one.kind, _taken(one, one, beside=True))
    for one in along:
        for way, words in ((-1, "one layer before"), (-2, "two layers before"), (1, "one layer after")):
            of = "" if one.kind == LAYERS else " of its kind"
            yield Cause(f"{one.name} of {words}{of}", one.kind, _taken(one, one, way))
    for one, other in combinations(along, 2):
        if LAYERS in (kinds := {one.kind, other.kind}) or len(kinds) == 1:
            kind = other.kind if one.kind == LAYERS else one.kind
            yield Cause(f"{other.name} in place of {one.name}", kind, _taken(one, other))
            yield Cause(f"{one.name} in place of {other.name}", kind, _taken(other, one))
            swapped = both(_taken(one, other), _taken(other, one))
            yield Cause(f"{one.name} and {other.name} in each other's place", kind, swapped)


def together(one: Cause, other: Cause) -> Cause:
    """Two causes of a layer at once."""
    assert one.layer is not None and other.layer is not None
    kind, steps = other.kind if one.kind == LAYERS else one.kind, both(one.layer, other.layer)
    return Cause(f"{one.name}, and {other.name}", kind, steps, rounds=one.rounds or other.rounds)


def of_tokens(cause: Cause, words: str, tokens: Mapping[int, Tensor]) -> Cause:
    """A cause in the outputs of some tokens [s] of each sequence."""

    def make(context: Context) -> Steps | None:
        steps, some = cause.layer(context) if cause.layer is not None else None, tokens.get(context.number)
        if steps is None or some is None:
            return None

        def layer(plain: Any, prefix: Prefix, x: Tensor, run: Forward) -> Tensor:
            inner = MethodType(plain.__func__, plain.__self__.but(**steps))
            outer = partial(steps["layer"], inner) if "layer" in steps else inner
            new = outer(prefix, x, Forward(run.documents, choose=run.choose))
            return torch.where(some[: x.shape[1], None], new, plain(prefix, x, run))

        return {"layer": layer}

    return Cause(f"{cause.name} {words}", cause.kind, make, rounds=cause.rounds)


# --- borders ---------------------------------------------------------------------------------------------

#: Tokens before which states are handed on, given their number.
Edges = Callable[[Context, int], Sequence[int]]


def _parts(edges: Edges, context: Context, tokens: int) -> list[tuple[int, int]]:
    cuts = [0, *(e for e in edges(context, tokens) if 0 < e < tokens), tokens]
    return list(zip(cuts, cuts[1:]))


def borders(token: int = 0) -> dict[str, Edges]:
    """Where states are handed on. token: the first one that deviates; 0: none."""
    found: dict[str, Edges] = {
        "after the prompt": lambda c, s: [c.prompt],
        "at every chunk": lambda c, s: range(c.config.mamba_chunk_size, s, c.config.mamba_chunk_size),
    }
    if token > 1:
        found[f"at token {token}"] = lambda c, s: [token]
        found[f"every {token} tokens"] = lambda c, s: range(token, s, token)
    for n in TOGETHER:
        every = lambda c, s, n=n: range(c.prompt + n, s, n) if c.prompt else []  # noqa: E731
        found[f"every {n} tokens after the prompt"] = every
    found["at every token after the prompt"] = lambda c, s: range(c.prompt, s) if c.prompt else []
    found["at every token"] = lambda c, s: range(1, s)
    return found


def _window(edges: Edges, context: Context, change: Change) -> Steps:
    def conv(plain: Any, x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        x, n, outputs = x.clone(), taps.shape[-1] - 1, []
        for begin, end in _parts(edges, context, x.shape[1] - n):
            if begin:
                known = x[:, max(0, begin - 8) : begin + n].clone()  # a change sees tokens before the window
                x[:, begin : begin + n] = change(known)[:, -n:]
            outputs.append(plain(x[:, begin : end + n], taps, bias))
        return torch.cat(outputs, 1)

    return {"conv": conv}


def _scan(edges: Edges, context: Context, start: Callable[..., Tensor], lost: bool = False) -> Steps:
    """start: the state at a border, from the right one and x, dt, A, B, C of the part before and after it.
    lost: the state does not decay on its way to the outputs."""

    def scan(plain: Any, *given: Tensor) -> Any:
        x, dt, A, B, C, ssm = given
        outputs, last = [], None
        for i, j in _parts(edges, context, x.shape[1]):
            part = x[:, i:j], dt[:, i:j], A, B[:, i:j], C[:, i:j]
            begin = ssm if last is None else start(ssm, plain, *last, part)
            y, ssm = plain(*part, begin)
            if lost and i:
                heads = C[:, i:j].repeat_interleave(x.shape[2] // C.shape[2], 2)
                y = plain(*part, torch.zeros_like(begin))[0] + (heads[:, :, :, None] * begin[:, None]).sum(-1)
            last = part, begin
            outputs.append(y)
        return torch.cat(outputs, 1), ssm

    return {"scan": scan}


def _state(edges: Edges, context: Context, change: Change) -> Steps:
    return _scan(edges, context, lambda ssm, *_: change(ssm.flatten(1)[:, None]).view_as(ssm))


def _late(n: int, ssm: Tensor, plain: Any, before: Any, begin: Tensor, after: Any) -> Tensor:
    """The state without the last n tokens."""
    x, dt, A, B, C = before
    k = x.shape[1] - n
    return begin if k < 1 else plain(x[:, :k], dt[:, :k], A, B[:, :k], C[:, :k], begin)[1]


def _decayed(times: int, ssm: Tensor, plain: Any, before: Any, begin: Tensor, after: Any) -> Tensor:
    """The state decays more or fewer times by the token behind it."""
    return ssm * (times * after[1][:, 0] * after[2]).exp()[..., None, None]


def _seen(numbers: tuple[int, ...], edges: Edges, context: Context, change: Change) -> Steps:
    """Keys (1), values (2) or both before a border, as tokens behind it see them."""

    def attend(plain: Any, *qkv: Tensor) -> Tensor:
        outputs, given = [], list(qkv)
        for i, j in _parts(edges, context, qkv[0].shape[2]):
            for number in numbers if i else ():
                old = given[number]
                new = change(old[:, :, :i].transpose(1, 2).flatten(2)).unflatten(-1, (old.shape[1], -1))
                given[number] = torch.cat([new.transpose(1, 2), old[:, :, i:]], 2)
            outputs.append(plain(given[0][:, :, i:j], given[1][:, :, :j], given[2][:, :, :j]))
        return torch.cat(outputs, 2)

    return {"attend": attend}


_HANDED: dict[str, tuple[str, Callable[..., Steps], dict[str, Any]]] = {
    "the convolution's window": ("M", _window, {"parts": conv_parts}),
    "the SSM state": ("M", _state, {"blocks": mamba_heads}),
    "the keys before": ("*", partial(_seen, (1,)), {"blocks": query_heads}),
    "the values before": ("*", partial(_seen, (2,)), {"blocks": query_heads}),
    "the keys and values before": ("*", partial(_seen, (1, 2)), {"blocks": query_heads}),
}


def handed_on(name: str, words: str, edges: Edges) -> Quantity:
    """What is handed on at borders. name: of `_HANDED`."""
    kind, steps, options = _HANDED[name]
    return Quantity(f"{name} {words}", kind, partial(steps, edges), **options)


def all_handed_on(token: int) -> list[Quantity]:
    """Everything that is handed on at every border, but at every token."""
    at = {words: edges for words, edges in borders(token).items() if "at every token" not in words}
    return [handed_on(name, words, edges) for words, edges in at.items() for name in _HANDED]


def at_borders(config: Nemotron3Config, token: int) -> Iterator[Cause]:
    """Changes of what is handed on. token: the first one that deviates; 0: none."""
    for one in all_handed_on(token):
        is_state = one.name.startswith("the SSM")
        yield from changed(one, PLAIN | maps(one, config) | ({} if is_state else MOVED))
        yield from changed(one, ROUNDED, rounds=True)
    for words, edges in borders(token).items():
        if "at every token" in words:
            yield from changed(handed_on("the SSM state", words, edges), ROUNDED, rounds=True)
        made = {f"without the last {n} tokens": partial(_late, n) for n in (1, *TOGETHER, *TILES)}
        made |= {f"decayed {n + 1} times by the token behind it": partial(_decayed, n) for n in (-1, 1)}
        for what, start in made.items():
            layer = lambda c, e=edges, f=start: _scan(e, c, f)  # noqa: E731
            yield Cause(f"the SSM state {words} {what}", "M", layer)
        for n in TOGETHER:
            state = lambda c, e=edges, n=n: _scan(e, c, partial(_late, n))  # noqa: E731
            late = lambda t, n=n: F.pad(t, (0, 0, n, 0))[:, :-n]  # noqa: E731
            window = handed_on("the convolution's window", words, edges).cause("{}", late).layer
            yield Cause(f"the states {words} without the last {n} tokens", "M", both(state, window))  # type: ignore[arg-type]
        never = lambda c, e=edges: _scan(e, c, lambda ssm, *_: ssm, lost=True)  # noqa: E731
        yield Cause(f"the SSM state {words} without decay in the outputs", "M", never)


def _lost(handed: Sequence[Callable[..., Steps]], context: Context) -> Steps:
    """What is handed on from the sequence before is not."""
    edges: Edges = lambda c, s: [c.before]  # noqa: E731
    return {name: f for one in handed for name, f in one(edges, context, torch.zeros_like).items()}


def states() -> Iterator[Cause]:
    """What is handed on to decoded tokens, to the next chunk or sequence: tried on log-probabilities, too."""
    at = {
        (name, words): handed_on(name, words, edges) for words, edges in borders().items() for name in _HANDED
    }
    for words, when in (("at every token after the prompt", "while decoding"), ("at every token",) * 2):
        for dtype, word in ((torch.bfloat16, "BF16"), (torch.float16, "FP16")):
            rounded = lambda t, d=dtype: t.to(d).float()  # noqa: E731
            yield at["the SSM state", words].cause(f"the SSM state in {word} {when}", rounded, rounds=True)
    for words in ("after the prompt", "at every chunk"):
        yield from changed(at["the SSM state", words], {"no {}": torch.zeros_like})
    yield from changed(
        at["the convolution's window", "after the prompt"], {"no {}": torch.zeros_like} | MOVED
    )
    of = {"states": (), "SSM states": (_window,), "windows of convolutions": (_state,), "keys": ()}
    for words, other in of.items():
        kind = "*" if words == "keys" else "M"
        yield Cause(f"{words} of the sequence before this one", kind, partial(_lost, other), joined=True)
