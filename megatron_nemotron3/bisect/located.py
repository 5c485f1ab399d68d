"""Where hidden states or router choices were recorded: the first layer that deviates, and causes tried on it.

A layer is judged by itself: it runs on the recorded input, and its output is compared with the recorded one.
So neither earlier deviations nor accumulated rounding count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.bisect.causes import Cause
from megatron_nemotron3.bisect.hypotheses import DRAWS, LEAST, Hypotheses, noise, quantiles, times
from megatron_nemotron3.bisect.recompute import Change
from megatron_nemotron3.bisect.recording import Recording


@dataclass(frozen=True)
class Segment:
    """Layers first to stop - 1 of a recording, between two recorded hidden states.

    The number of layers as `first` stands for the final norm and the output layer.
    """

    hypotheses: Hypotheses
    recording: Recording
    first: int
    stop: int
    #: Sequences that have both hidden states.
    sequences: tuple[int, ...]

    def output(
        self,
        number: int,
        changes: Mapping[int, Change],
        last: Change | None = None,
        start: Tensor | None = None,
    ) -> Tensor:
        """What follows from a recorded input: the stream [s, d], or the recorded log-probabilities."""
        model, one = self.hypotheses.model, self.recording.sequences[number]
        if self.first:
            x = one.hidden[self.first - 1].float()[None]
        else:
            x = self.hypotheses.plain[number].streams[0] if start is None else start
        if self.first >= model.depth:
            return model.logprobs(x, one.ids[None], last)[0][one.first - 1 :]
        for layer in range(self.first, self.stop):
            x = model.layer(layer, x, changes.get(layer)).stream
        return x[0]

    def found(self, number: int) -> Tensor:
        """What was recorded there."""
        one = self.recording.sequences[number]
        if self.first >= self.hypotheses.model.depth:
            return one.logprobs
        return one.hidden[self.stop - 1].float()

    @cached_property
    def plain(self) -> list[Tensor]:
        """The output of each sequence as the checkpoint has it."""
        return [self.output(i, {}) for i in self.sequences]

    @cached_property
    def noise(self) -> Tensor:
        """Quantiles of what rounding changes."""
        everywhere = range(self.first, self.stop)
        draws = []
        for draw in range(DRAWS):
            apart = []
            for i, plain in zip(self.sequences, self.plain, strict=True):
                change = noise(self.recording.dtype, draw and 1000 * draw + i)
                last = Change(steps={"logits": change.steps["logits"]})
                apart.append(_apart(self.output(i, dict.fromkeys(everywhere, change), last), plain))
            draws.append(quantiles(torch.cat(apart)))
        return (
            torch.stack(draws).amax(0).clamp_min(LEAST if self.first >= self.hypotheses.model.depth else 1e-7)
        )

    def quantiles(self, outputs: Sequence[Tensor]) -> Tensor:
        """Of the distances of what was recorded from outputs of each sequence."""
        pairs = zip(self.sequences, outputs, strict=True)
        return quantiles(torch.cat([_apart(self.found(i), output) for i, output in pairs]))

    @cached_property
    def distance(self) -> float:
        """From the plain layers, in units of noise."""
        return times(self.quantiles(self.plain), self.noise)

    def position(self) -> tuple[int, int] | None:
        """Sequence and token of the first token that stands out."""
        for i, plain in zip(self.sequences, self.plain, strict=True):
            apart = _apart(self.found(i), plain).nan_to_num(nan=torch.inf)
            places = (apart > STANDS_OUT * self.noise[2]).nonzero()
            if len(places):
                last = self.first >= self.hypotheses.model.depth
                return i, int(places[0]) + (self.recording.sequences[i].first if last else 0)
        return None

    def with_cause(self, cause: Cause) -> dict[tuple[int, ...], list[Tensor]]:
        """The outputs with a cause in each layer of the segment where it may be, by layers."""
        model = self.hypotheses.model
        found: dict[tuple[int, ...], list[Tensor]] = {}
        if self.first >= model.depth or cause.layer is None:
            lasts: list[Any] = [
                cause.last(self.hypotheses.context(i)) if cause.last else None for i in self.sequences
            ]
            if self.first >= model.depth and any(lasts):
                found[()] = [self.output(i, {}, last) for i, last in zip(self.sequences, lasts, strict=True)]
            elif self.first >= model.depth and cause.reported is not None:
                pairs = zip(self.sequences, self.plain, strict=True)
                found[()] = [
                    cause.reported(self._all(i))[self.recording.sequences[i].first - 1 :] for i, _ in pairs
                ]
            elif self.first == 0 and cause.moves:
                found[()] = [self.output(i, {}, None, self._start(cause, i)) for i in self.sequences]
            return found
        inside = set(range(self.first, self.stop))
        for scope in self.hypotheses.scopes(cause):
            layers = tuple(sorted(inside & set(scope)))
            if not layers or layers in found:
                continue
            each = [self.hypotheses.changes(cause, layers, i) for i in self.sequences]
            if any(each):
                found[layers] = [
                    self.output(i, e or {}, None, self._start(cause, i))
                    for i, e in zip(self.sequences, each, strict=True)
                ]
        return found

    def _start(self, cause: Cause, number: int) -> Tensor | None:
        """What a cause embeds instead, if it does."""
        if not cause.moves:
            return None
        ids = self.recording.sequences[number].ids
        return cause.start(self.hypotheses.model, ids, self.hypotheses.context(number))

    def _all(self, number: int) -> Tensor:
        model, one = self.hypotheses.model, self.recording.sequences[number]
        x = one.hidden[self.first - 1].float()[None]
        return model.logprobs(x, one.ids[None])[0]


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Distance of each token [s]; of rows that were not recorded, none."""
    difference = one - other
    if difference.dim() == 1:
        return difference.abs()
    return difference.norm(dim=-1)[~one.isnan().all(-1)]


def first_segment(hypotheses: Hypotheses, recording: Recording) -> Segment | None:
    """The first layers between two recorded hidden states that deviate; None if none does."""
    depth, sequences = hypotheses.model.depth, recording.sequences
    complete = [
        {n for n, x in one.hidden.items() if n < depth and not x.isnan().any(-1).any()} for one in sequences
    ]
    recorded = sorted(set().union(*complete))
    if not recorded:
        return None
    before = -1
    for layer in [*recorded, depth]:
        if layer == depth and before < depth - 1:
            break
        there = tuple(
            i
            for i, known in enumerate(complete)
            if (before < 0 or before in known) and (layer in known or layer == depth)
        )
        if there:
            segment = Segment(hypotheses, recording, before + 1, layer + 1, there)
            if not segment.distance <= LIMIT_OF_LAYER:
                return segment
        before = layer
    return None


#: A token stands out if it differs by this many times the noise.
STANDS_OUT = 5.0
#: A layer deviates where a quantile of its distances is this many times that of noise.
LIMIT_OF_LAYER = 3.0


def first_router(hypotheses: Hypotheses, recording: Recording) -> int | None:
    """The first layer whose router selects other experts for more tokens than with noise, or None."""

    def others(layer: int, found: Sequence[Tensor | None]) -> int:
        count = 0
        for run, experts in zip(hypotheses.plain, found, strict=True):
            if experts is not None:
                known = (experts >= 0).all(-1)
                plain = run.experts[layer].sort(-1).values
                if experts.shape != plain.shape:  # another number of experts per token
                    return len(plain)
                count += int(((experts.long().sort(-1).values != plain).any(-1) & known).sum())
        return count

    layers = sorted(set().union(*(one.routing.keys() for one in recording.sequences)))
    for layer in layers:
        if layer >= hypotheses.model.depth:
            continue
        noisy = [hypotheses.noisy(recording.dtype, draw) for draw in range(DRAWS)]
        usual = max(others(layer, [run.experts[layer] for run in runs]) for runs in noisy)
        if others(layer, [one.routing.get(layer) for one in recording.sequences]) > 3 * usual + 2:
            return layer
    return None
