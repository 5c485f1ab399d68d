"""Changes of what a layer computes on its way: a cause for each quantity and each change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, product

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.quantizer import Spec, fake_quantize
from megatron_nemotron3.proof.bisect.causes import MODEL, Cause
from megatron_nemotron3.proof.bisect.quantities import MATRICES, QUANTITIES, ROUTES, Change, Quantity, changed

#: Sizes of tiles, chunks and pages; numbers of tokens that run together, and of ranks.
TILES, TOGETHER, RANKS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 7, 8), (2, 4, 8)


def _nvfp4(t: Tensor) -> Tensor:
    """Rounded to NVFP4: blocks of 16 along the last axis."""
    if t.dim() < 2 or t.shape[-1] % 16:
        return t
    return fake_quantize(t.flatten(0, -2).contiguous(), Spec()).view_as(t)


def _pairs(count: int) -> Tensor:
    return (torch.arange(count) ^ 1).clamp(max=count - 1)


def _halves_mixed(count: int) -> Tensor:
    return torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2)]).argsort()


#: Of any quantity.
PLAIN: dict[str, Change] = {
    "no {}": torch.zeros_like,
    "twice {}": lambda t: 2 * t,
    "half of {}": lambda t: t / 2,
    "{} of 1": torch.ones_like,
    "the negative of {}": torch.neg,
    "{} plus one": lambda t: t + 1,
    "{} squared": torch.square,
    "{} in reverse order": lambda t: t.flip(-1),
    "the two halves of {} swapped": lambda t: t.roll(t.shape[-1] // 2, -1),
    "neighbouring channels of {} swapped": lambda t: t[..., _pairs(t.shape[-1])],
    "even channels of {} before odd ones": lambda t: torch.cat([t[..., ::2], t[..., 1::2]], -1),
    "{} with the second half between the first": lambda t: t[..., _halves_mixed(t.shape[-1])],
    "{} without its mean": lambda t: t - t.mean(-1, keepdim=True),
    "{} over its root mean square": lambda t: t * (t.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
    "SiLU of {}": F.silu,
}


def _levels(t: Tensor) -> Tensor:
    """The nearest number of FP4."""
    grid = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    return grid[torch.bucketize(t.abs().contiguous(), (grid[1:] + grid[:-1]) / 2)] * t.sign()


#: Largest number of a format, and its rounding.
_FORMATS: dict[str, tuple[float, Change]] = {
    "": (1.0, lambda t: t),
    " in FP4": (6.0, _levels),
    " in INT4": (7.0, torch.round),
    " in INT8": (127.0, torch.round),
    " in E4M3": (448.0, lambda t: t.clamp(-448, 448).to(torch.float8_e4m3fn).float()),
}
#: Which scales are read, of those [rows, columns] of the blocks.
_SCALES: dict[str, Change] = {
    "its scale": lambda s: s,
    "the scale of the next columns": lambda s: s.roll(-1, 1),
    "the scale of the columns before": lambda s: s.roll(1, 1),
    "the scale of the next rows": lambda s: s.roll(-1, 0),
    "the scale of the rows before": lambda s: s.roll(1, 0),
    "the scales read along the other axis": lambda s: s.t().reshape(s.shape),
    "the first scale": lambda s: s[:1, :1].expand_as(s),
    "the scale of the other half of the rows": lambda s: s.roll(len(s) // 2, 0),
    "the inverse of its scale": lambda s: 1 / s,
}


def _quantized(size: tuple[int, int], form: str, t: Tensor, read: str = "its scale", zero: int = 0) -> Tensor:
    """In blocks of rows x columns (0: all), each with a scale."""
    w = t.flatten(0, -2) if t.dim() > 1 else t[None]
    rows, columns = (n or w.shape[axis] for axis, n in enumerate(size))
    if len(w) % rows or w.shape[1] % columns:
        return t
    blocks = w.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    most, rounded = _FORMATS[form]
    scale = blocks.abs().amax((-1, -2)).clamp_min(1e-12) / most
    found = (rounded(blocks / scale[..., None, None]) + zero) * _SCALES[read](scale)[..., None, None]
    return found.transpose(1, 2).flatten(2).view_as(t)


ROUNDED: dict[str, Change] = {
    "{} rounded to BF16": lambda t: t.bfloat16().float(),
    "{} rounded to FP16": lambda t: t.half().float(),
    "{} rounded to E4M3": _FORMATS[" in E4M3"][1],
    "{} rounded to NVFP4": _nvfp4,
    **{
        f"{{}}{form} with a scale per {n or 'all'} channels": partial(_quantized, (1, n), form)
        for form, n in product((" in FP4", " in INT8", " in E4M3"), (0, 16, 32, 128))
    },
    "{} in INT8 with one scale": partial(_quantized, (0, 0), " in INT8"),
}
#: Of one block of channels, or of each; factors of blocks are looked for besides.
_INSIDE = list(PLAIN)[list(PLAIN).index("{} in reverse order") :]
#: Along the tokens: [b, s, channels].
MOVED: dict[str, Change] = {
    "{} one token late": lambda t: F.pad(t, (0, 0, 1, 0))[:, :-1],
    "{} one token late, that of the first twice": lambda t: torch.cat([t[:, :1], t[:, :-1]], 1),
    "{} one token early": lambda t: F.pad(t, (0, 0, 0, 1))[:, 1:],
    "{} without that of the first token": lambda t: F.pad(t[:, 1:], (0, 0, 1, 0)),
    "the mean of {} so far": lambda t: t.cumsum(1) / torch.arange(1, t.shape[1] + 1)[None, :, None],
}


#: Orders of the shards [n, size] of n ranks, by words.
_ORDERS: dict[str, Change] = {
    "the shards of {n} ranks of {{}} reversed": lambda s: s.flip(0),
    "the shards of {n} ranks of {{}} rotated": lambda s: s.roll(1, 0),
    "neighbours of the shards of {n} ranks of {{}} swapped": lambda s: s[_pairs(len(s))],
    "the first of {n} shards of {{}} in place of each": lambda s: s[:1].expand_as(s),
    "{{}} dealt out{by} to {n} ranks in turn": lambda s: s.t(),
}


def placed(order: Change, ranks: int, blocks: int, t: Tensor) -> Tensor:
    """Blocks of channels, so many in all (0: each channel), with the shards of ranks in another order."""
    blocks = blocks or t.shape[-1]
    if t.shape[-1] % blocks or blocks % ranks:
        return t
    places = order(torch.arange(blocks).view(ranks, -1)).flatten()
    return t[..., torch.arange(t.shape[-1]).view(blocks, -1)[places].flatten()]


def _shards(ranks: Iterable[int], block: str = "", blocks: int = 0) -> dict[str, Change]:
    """Shards in other orders; those of two ranks have two."""
    by, orders = f" by {block}" * bool(block), list(_ORDERS.items())
    pairs = ((n, one) for n in ranks for one in (orders if n > 2 else [orders[0], *orders[3:]]))
    return {words.format(n=n, by=by): partial(placed, order, n, blocks) for n, (words, order) in pairs}


def _ordered(order: Tensor, t: Tensor) -> Tensor:
    return t[..., order] if t.shape[-1] == len(order) else t


def part_maps(one: Quantity, config: Nemotron3Config) -> dict[str, Change]:
    """Parts in each other's place, of ranks joined without sorting, or sorted where they need not be."""
    parts, found = one.parts(config), dict[str, Change]()
    rows = torch.arange(sum(parts.values())).split(list(parts.values()))
    for ranks in RANKS if parts else ():
        if not any(len(part) % ranks for part in rows):
            joined = torch.cat([part.view(ranks, -1) for part in rows], 1).flatten()
            for words, order in (("joined", joined), ("cut apart", joined.argsort())):
                what = f"the shards of {ranks} ranks of {{}} {words} without sorting {', '.join(parts)}"
                found[what] = partial(_ordered, order)
    for (a, first), (b, second) in combinations(enumerate(parts), 2):
        swapped = torch.cat([rows[{a: b, b: a}.get(n, n)] for n in range(len(rows))])
        found[f"{first} and {second} of {{}} in each other's place"] = partial(_ordered, swapped)
    return found


def maps(one: Quantity, config: Nemotron3Config, ranks: Iterable[int] = RANKS) -> dict[str, Change]:
    """Channels in other places: parts, shards, and blocks of them that are dealt out in turn."""
    block, count = one.blocks(config)
    return part_maps(one, config) | _shards(ranks) | (_shards(RANKS, block, count) if count else {})


def _axes(c: Nemotron3Config) -> list[int]:
    """Lengths of axes that may be read in another order."""
    heads = c.mamba_num_heads, c.mamba_num_groups, c.num_attention_heads, c.num_query_groups
    return sorted({*RANKS, *heads, c.mamba_head_dim, c.mamba_state_dim, c.kv_channels} - {0, 1})


def _misplaced(ranks: int, direction: int, rows: Tensor) -> Tensor:
    """Rows of a table whose shards begin where those of a table padded otherwise would."""
    padded = -(-len(rows) // 128) * 128
    shard = (padded if direction > 0 else len(rows)) // ranks
    moved = rows - direction * (rows // shard) * ((padded - len(rows)) // ranks)
    return moved.clamp(0, len(rows) - 1)


def token_maps(token: int) -> dict[str, Change]:
    """Tokens have the values of other tokens, or none; or a page of them, from a token on."""
    found: dict[str, Callable[[Tensor, int], Tensor]] = {
        "{{}} of the first of {n} tokens in place of each": lambda t, n: t // n * n,
        "{{}} of the last token before each {n}": lambda t, n: t // n * n - 1,
        "{{}} in reverse order in each {n} tokens": lambda t, n: t // n * n + n - 1 - t % n,
        "{{}} of {n} tokens before": lambda t, n: t - n,
        "{{}} of the first {n} tokens again for each {n}": lambda t, n: t % n,
        f"{{{{}}}} of {{n}} tokens before in {{n}} from token {token} on": lambda t, n: (
            t - n * ((t - token) // n == 0)
        ),
    }

    def at(place: Callable[[Tensor, int], Tensor], n: int, t: Tensor) -> Tensor:
        taken = place(torch.arange(t.shape[1]), n)
        return t[:, taken.clamp(0, t.shape[1] - 1)].masked_fill((taken < 0)[:, None], 0)

    sizes = dict.fromkeys((*TOGETHER, *TILES, *([token] if token > 1 else [])))
    return {words.format(n=n): partial(at, place, n) for (words, place), n in product(found.items(), sizes)}


# --- what is tried, the simplest first -------------------------------------------------------------------


def _in_block(number: int, count: int, change: Change, t: Tensor) -> Tensor:
    if t.shape[-1] % count:
        return t
    blocks = list(t.chunk(count, -1))
    return torch.cat([*blocks[:number], change(blocks[number]), *blocks[number + 1 :]], -1)


def _in_each(count: int, change: Change, t: Tensor) -> Tensor:
    return change(t.unflatten(-1, (count, -1))).flatten(-2)


def _capped(cap: float, t: Tensor) -> Tensor:
    return cap * torch.tanh(t / cap)


#: Of the rows of the embedding or of the output layer.
_ROWS: dict[str, Change] = {
    "{} one too low": lambda rows: (rows - 1).clamp_min(0),
    "{} one too high": lambda rows: (rows + 1).clamp_max(len(rows) - 1),
    "row 0 in place of {}": torch.zeros_like,
    **{
        f"{{}} cut into {ranks} shards by the {how}": partial(_misplaced, ranks, direction)
        for ranks in RANKS
        for direction, how in ((1, "vocabulary instead of the padded one"), (-1, "padded vocabulary"))
    },
    **_shards((2,)),
}
#: Of quantities by name: what is tried on log-probabilities, too.
_LISTED: dict[str, dict[str, Change]] = {
    "A": {
        "A_log instead of its exponential": lambda A: -(-A).log().abs(),
        "{} of -1": lambda A: -torch.ones_like(A),
    },
    "D": {"no {}": torch.zeros_like, "{} of 1": torch.ones_like},
    "the convolution's weight": {
        "{} in reverse": lambda w: w.flip(-1),
        "{} read tap by tap, not channel by channel": lambda w: w.view(w.shape[-1], -1).t().reshape(w.shape),
        "{} read channel by channel, not tap by tap": lambda w: w.flatten(1).t().reshape(w.shape),
    },
    "the time steps": {
        f"{{}} limited to [{low:g}, 0.1]": partial(torch.clamp, min=low, max=0.1) for low in (0, 1e-4, 1e-3)
    },
    "the sum of the routed experts": {"no routed experts": torch.zeros_like},
    "the shared expert's output": {"no shared expert": torch.zeros_like},
    "the shares of the experts": {
        f"no experts of rank {rank} of {ranks}": partial(_in_block, rank, ranks, torch.zeros_like)
        for ranks in RANKS
        for rank in range(ranks)
    },
    "the logits": {
        f"log-probabilities at temperature {by}": partial(torch.div, other=by)
        for by in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
    },
}
_LISTED |= dict.fromkeys(("the rows of the embedding", "the rows of the output layer"), _ROWS)
_LISTED["the logits"] |= {f"logits capped at {cap} by tanh": partial(_capped, cap) for cap in (15, 30, 50)}


_MOVABLE = (
    *("the output projection's input", "attention's output before its projection", "the experts"),
    *("B and C of each head", "the keys and values", "the queries, keys and values of all heads"),
    *("in_proj's output", "the convolution's channels"),
)


def changes_first(config: Nemotron3Config) -> Iterator[Cause]:
    """Changes that are tried first, and on log-probabilities, too."""
    for one in QUANTITIES:
        yield from changed(one, maps(one, config, ()) if one.name in _MOVABLE else {})
    for name, changes in _LISTED.items():
        yield from changed(name, changes)
    for by in (config.kv_channels, config.num_attention_heads / config.hidden_size * config.kv_channels):
        scaled = {f"{n:.4g} times {{}}": partial(torch.mul, other=n) for n in (by**-0.5, by**0.5)}
        yield from changed("the scaled scores", scaled)
    for words in ("{} rounded to BF16", "{} rounded to FP16"):
        for name in ("the residual stream", "the router's logits", "the logits"):
            yield from changed(name, {words: ROUNDED[words]}, rounds=True)


def every_change(config: Nemotron3Config, token: int = 0) -> Iterator[Cause]:
    """Every change of every quantity, in all tokens, after the prompt and from a token on, and of one
    block of channels; the simplest first.

    token: the first token that deviates, the same in all sequences; 0: no such one.
    """
    every = [one for one in (*QUANTITIES, *MATRICES) if not one.numbers]
    movable = [one for one in every if one.tokens and one.kind != MODEL]
    for quantities, changes in ((every, PLAIN), (movable, MOVED)):
        for words, change in changes.items():
            for one in quantities:
                yield one.cause(words, change)
    for one in every:
        yield from changed(one, ROUNDED, rounds=True)
    for words, change in (PLAIN | MOVED).items():
        for one in movable:
            yield one.cause(f"{words} after the prompt", change, 0)
            if token > 1:
                yield one.cause(f"{words} from token {token} on", change, token)
    for one in movable:
        for block, count in one.divisions(config)[1:]:
            for words in _INSIDE:
                yield one.cause(f"{words} in each {block}", partial(_in_each, count, PLAIN[words]))
            for number, (words, change) in product(range(count), (PLAIN | MOVED).items()):
                if words in MOVED or words in _INSIDE:
                    what = words.format(f"{block} {number} of {{}}")
                    yield one.cause(what, partial(_in_block, number, count, change))
    for one in QUANTITIES:
        yield from changed(one, maps(one, config, _axes(config)) if one.kind != MODEL else {})
    for one in (ROUTES, *movable):
        yield from changed(one, token_maps(token))


# --- scales of matrices ----------------------------------------------------------------------------------


def scaled_matrices() -> Iterator[Cause]:
    """Matrices in blocks with a scale, of which another is read, or with another zero point."""
    sizes = {"row": (1, 0), "matrix": (0, 0), "column": (0, 1)} | {f"{n} columns": (1, n) for n in TILES}
    sizes |= {f"{n} x {n}": (n, n) for n in TILES}
    for (per, size), form, read, zero in product(sizes.items(), _FORMATS, _SCALES, (0, 1, -1)):
        if (read == "its scale" and "INT" in form) if zero else (form or read != "its scale"):
            point = {0: "", 1: ", zero points one too low", -1: ", zero points one too high"}[zero]
            words = f"{{}}{form} with {read} per {per}{point}"
            change = partial(_quantized, size, form, read=read, zero=zero)
            for one in MATRICES:
                yield one.cause(words, change, rounds=bool(form))
