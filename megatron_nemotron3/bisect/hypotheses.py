"""What the checkpoint computes for the recorded tokens: plainly, with rounding as noise, and with a cause.

Everything is kept, so that a cause is recomputed once, from the first layer that it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.bisect.causes import LAYERS, MODEL, Cause, Context
from megatron_nemotron3.bisect.recompute import Change, Recomputation

#: Relative rounding error of a number of each type. Types below BF16 are treated as it.
ROUNDING = {"float64": 2.0**-24, "float32": 2.0**-24, "float16": 2.0**-11}
BF16_ROUNDING = 2.0**-9
#: Standard deviation of a layer's output in roundings of one number: its products, norm and activation.
INSIDE = {"float32": 6.0, "bfloat16": 3.0}
#: Runs with noise. In FP32 routers rarely have near ties: the first run decides each the other way.
DRAWS = 6
#: Memory for residual streams from which causes are recomputed; with less, from an earlier layer.
KEPT_BYTES = 2 << 30
#: Least noise of a log-probability: four units in the last place of one of size 8, in FP32.
LEAST = 2e-6
#: Quantiles by which differences are compared with noise.
QUANTILES = (0.5, 0.75, 0.9, 0.97, 1.0)


@dataclass(frozen=True)
class Tokens:
    """One recorded sequence: ids [s], its prompt, and all sequences of the recording for leaks."""

    ids: Tensor
    prompt: int


@dataclass
class Run:
    """What a model computes for a sequence.

    Attributes:
        streams: the residual stream [1, s, d] before some layers and after the last; with noise, none.
        logprobs: of tokens 1 to s [s - 1].
        experts: layer -> the selected experts [s, topk].
        mtp: depth -> log-probabilities [s - 1 - depth].
    """

    streams: dict[int, Tensor]
    logprobs: Tensor
    experts: dict[int, Tensor] = field(default_factory=dict)
    mtp: dict[int, Tensor] = field(default_factory=dict)


def rounding(dtype: str) -> float:
    """Relative rounding error of a system's numbers."""
    return ROUNDING.get(dtype, BF16_ROUNDING)


def noise(dtype: str, seed: int) -> Change:
    """Rounding in a layer, in the stream after it, in the router's scores, and in the logits, at random."""
    unit = rounding(dtype)
    inside = INSIDE["float32" if unit < 1e-6 else "bfloat16"]
    generator = torch.Generator().manual_seed(seed)

    def layer(plain: Any, prefix: Any, x: Tensor, *rest: Any) -> Any:
        update, routing = plain(prefix, x, *rest)
        size = update.square().mean(-1, keepdim=True).sqrt()
        update = update + inside * unit * size * torch.randn(update.shape, generator=generator)
        stream = x + update
        stream = stream * (1 + unit * (2 * torch.rand(stream.shape, generator=generator) - 1))
        return stream - x, routing

    def ranking(plain: Any, scores: Tensor, bias: Tensor) -> Tensor:
        ranked: Tensor = plain(scores, bias)
        if seed or unit > 1e-6:
            return ranked + unit * torch.randn(ranked.shape, generator=generator)
        # Scores are below 1; those of two correct systems differ by a few roundings.
        reference = plain.__self__.config.moe_router_topk
        if ranked.shape[-1] <= reference:
            return ranked
        best = ranked.topk(reference + 1, dim=-1)
        tie = (best.values[..., -2] - best.values[..., -1]) < 8 * inside * unit
        last, rejected = best.indices[..., -2:-1], best.indices[..., -1:]
        other = ranked.scatter(-1, rejected, ranked.gather(-1, last) + 1e-3)
        return torch.where(tie.unsqueeze(-1), other, ranked)

    def logits(plain: Any, x: Tensor) -> Any:
        for start, stop, band in plain(x):
            yield start, stop, band * (1 + unit * torch.randn(band.shape, generator=generator))

    return Change(steps={"layer": layer, "ranking": ranking, "logits": logits})


class Hypotheses:
    """A checkpoint and the sequences of a recording.

    Args:
        model: the checkpoint.
        sequences: tokens of every sequence.
        mtp: also recompute MTP.
    """

    def __init__(self, model: Recomputation, sequences: Sequence[Tokens], mtp: bool) -> None:
        self.model, self.sequences, self.mtp = model, list(sequences), mtp
        self._noise: dict[tuple[str, int], list[Run]] = {}
        self._found: dict[tuple[str, tuple[int, ...]], list[Tensor] | None] = {}

    @cached_property
    def plain(self) -> list[Run]:
        """The sequences as the checkpoint computes them."""
        return [self._run(i) for i in range(len(self.sequences))]

    def noisy(self, dtype: str, draw: int) -> list[Run]:
        """The same with the rounding of a type."""
        key = (str(rounding(dtype)), draw)
        if key not in self._noise:
            self._noise[key] = [
                self._run(i, noise(dtype, draw and 1000 * draw + i)) for i in range(len(self.sequences))
            ]
        return self._noise[key]

    def _run(self, number: int, change: Change | None = None) -> Run:
        ids = self.sequences[number].ids[None]
        changes = {} if change is None else dict.fromkeys(range(len(self.model.layers)), change)
        x, depth = self.model.embed(ids), self.model.depth
        streams, experts = {0: x}, {}
        for step in self.model.run(x, 0, changes):
            x = step.stream
            if change is None and (step.layer + 1) % self._stride(x) == 0:
                streams[step.layer + 1] = x
            if step.routing:
                experts[step.layer] = step.routing[0].experts
        streams[depth] = x
        last = None if change is None else Change(steps={"logits": change.steps["logits"]})
        logprobs = self.model.logprobs(x, ids, last)[0]
        mtp = self.model.mtp_logprobs(x, ids, changes) if self.mtp else {}
        kept = streams if change is None else {}
        return Run(kept, logprobs, experts, {number: rows[0] for number, rows in mtp.items()})

    def _stride(self, stream: Tensor) -> int:
        """Every how many layers a stream is kept."""
        tokens = sum(len(one.ids) for one in self.sequences)
        each = 4 * tokens * stream.shape[-1]
        return max(1, -(-self.model.depth * each // KEPT_BYTES))

    def context(self, number: int, layer: int = -1) -> Context:
        """What a cause is told."""
        return Context(self.model.config, self.sequences[number].prompt, layer)

    def scopes(self, cause: Cause) -> list[tuple[int, ...]]:
        """The sets of layers in which a cause may be: all of its kind first, then each."""
        pattern = self.model.config.pattern
        if cause.layer is None:
            return [()]
        if cause.kind == MODEL:
            return [tuple(range(len(pattern)))]
        if cause.kind == LAYERS:
            kinds = [tuple(n for n, k in enumerate(pattern) if k == kind) for kind in dict.fromkeys(pattern)]
            sets = [tuple(range(len(pattern))), *kinds]
        else:
            sets = [tuple(n for n, kind in enumerate(pattern) if kind == cause.kind)]
        sets += [(n,) for n in sets[0]]
        return list(dict.fromkeys(s for s in sets if s))

    def changes(self, cause: Cause, layers: Sequence[int], number: int) -> dict[int, Change] | None:
        """The changes of some layers for a sequence; None if the cause cannot be there."""
        made = {n: cause.layer(self.context(number, n)) for n in layers} if cause.layer is not None else {}
        found = {n: change for n, change in made.items() if change is not None}
        return found if found or not made else None

    def logprobs(self, cause: Cause, layers: tuple[int, ...]) -> list[Tensor] | None:
        """Log-probabilities of every sequence with a cause in some layers; None where it cannot be."""
        key = (cause.name, layers)
        if key not in self._found:
            runs = [self._with(cause, layers, i) for i in range(len(self.sequences))]
            applies = any(run is not None for run in runs)
            plain = [run.logprobs for run in self.plain]
            chosen = [p if run is None else run for run, p in zip(runs, plain, strict=True)]
            self._found[key] = chosen if applies else None
        return self._found[key]

    def _with(self, cause: Cause, layers: tuple[int, ...], number: int) -> Tensor | None:
        plain, ids = self.plain[number], self.sequences[number].ids
        if cause.reported is not None:
            return cause.reported(plain.logprobs)
        changes = self.changes(cause, layers, number)
        if changes is None:
            return None
        last = cause.last(self.context(number)) if cause.last is not None else None
        before = None
        if cause.prefix is not None:
            before = cause.prefix([one.ids for one in self.sequences], number)
            if before is None:
                return None
            ids = torch.cat([before, ids])
        first = min(changes, default=self.model.depth)
        if before is not None or cause.moves:
            first, x = 0, cause.start(self.model, ids, self.context(number))
        else:
            if not changes and last is None:
                return None
            first = max(layer for layer in plain.streams if layer <= first)
            x = plain.streams[first]
        for step in self.model.run(x, first, changes):
            x = step.stream
        found = self.model.logprobs(x, ids[None], last)[0]
        return found if before is None else found[len(before) :]


def quantiles(differences: Tensor) -> Tensor:
    """`QUANTILES` of absolute differences; what is not a number is infinite."""
    flat = differences.detach().abs().flatten().nan_to_num(nan=torch.inf, posinf=torch.inf)
    ordered = flat.sort().values
    if not len(ordered):
        return torch.zeros(len(QUANTILES))
    return torch.stack([ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES])


def times(found: Tensor, noise: Tensor) -> float:
    """The largest quantile over that of noise; the last, often one token's, counts half."""
    ratios = found / noise
    ratios[-1] *= 0.5
    return float(ratios.max())
