"""Where hidden states or router choices were recorded: the first layer that deviates, and causes tried on it.

A layer is judged on its own: it runs on the recorded input, and its output is compared with the recorded one.
So neither earlier deviations nor accumulated rounding count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, combinations

import torch
from torch import Tensor

from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause
from megatron_nemotron3.proof.bisect.changes import TILES, every_change, scaled_matrices
from megatron_nemotron3.proof.bisect.evidence import EXPLAINS, NOTHING, ROUNDED, Evidence, Trial
from megatron_nemotron3.proof.bisect.fits import block_map, factors, mapped, numbers
from megatron_nemotron3.proof.bisect.hypotheses import Hypotheses, Place, Row, after, padded, trials
from megatron_nemotron3.proof.bisect.listed import routers, sights, summed
from megatron_nemotron3.proof.bisect.quantities import QUANTITIES, Quantity
from megatron_nemotron3.proof.bisect.recompute import DRAWS, Noise, Steps, rounding
from megatron_nemotron3.proof.bisect.recording import Recording
from megatron_nemotron3.proof.bisect.structure import all_handed_on, at_borders, of_tokens, sources, together

#: A layer deviates where a quantile of its distances is this many times that of noise.
LIMIT_OF_LAYER = 3.0
#: A channel with this share of the largest squared difference or less does not deviate.
_QUIET = 1e-3
#: Tokens that deviate in the probe by which causes are left out. A cause that leaves less than this share is
#: tried together with others, so many at most.
_PROBED, _USEFUL, _PAIRED = 24, 0.9, 12


@dataclass(frozen=True)
class LayerSegment:
    """Layers first to stop - 1 of a recording, between two recorded hidden states.

    The number of layers as `first` stands for the final norm and the output layer.
    """

    hypotheses: Hypotheses
    recording: Recording
    first: int
    stop: int
    #: Sequences that have both hidden states.
    sequences: tuple[int, ...]

    @property
    def last(self) -> bool:
        return self.first >= self.hypotheses.model.depth

    def _input(self, number: int) -> Tensor:
        """What was recorded before it [s, d]; the first layer gets the checkpoint's embeddings."""
        if self.first:
            return self.recording.sequences[number].hidden[self.first - 1].float()
        return self.hypotheses.plain[number].streams[0][0]

    def _outputs(self, rows: Sequence[Row], x: Tensor, last: Steps | None = None) -> list[Tensor]:
        """What follows from x [rows, longest, d]: the stream [s, d] of each row, or its log-probabilities."""
        model, noise = self.hypotheses.model, [one for _, one in rows]
        noise = noise if any(noise) else []
        lengths = [len(self.hypotheses.ids[i]) for i, _ in rows]
        if self.last:
            found = model.logprobs(x, padded([self.hypotheses.ids[i] for i, _ in rows]), last, noise)
            firsts = [self.recording.sequences[i].first - 1 for i, _ in rows]
            return [row[a : n - 1] for row, a, n in zip(found, firsts, lengths, strict=True)]
        x = after(model.run(x, self.first, noise=noise, stop=self.stop), x)
        return [row[:n] for row, n in zip(x, lengths, strict=True)]

    @cached_property
    def evidence(self) -> Evidence:
        """What was recorded after it, and what the checkpoint makes of what was recorded before it."""
        unit, count = rounding(self.recording.dtype), len(self.sequences)
        noises = [None, *range(DRAWS)]
        rows = [(i, None if n is None else Noise(unit, n, i)) for n in noises for i in self.sequences]
        outputs: dict[int, Tensor] = {}
        for batch in self.hypotheses.batches(rows):
            some = [rows[n] for n in batch]
            x = padded([self._input(i) for i, _ in some])
            outputs |= zip(batch, self._outputs(some, x), strict=True)
        plain, *draws = ([outputs[n + i] for i in range(count)] for n in range(0, len(rows), count))
        recorded = [self.recording.sequences[i] for i in self.sequences]
        found = [one.logprobs if self.last else one.hidden[self.stop - 1] for one in recorded]
        places = [(i, self.recording.sequences[i].first if self.last else 0) for i in self.sequences]
        return Evidence(places, found, plain, draws)

    @property
    def kind(self) -> str | None:
        pattern = self.hypotheses.model.config.pattern
        return pattern[self.first] if self.stop - self.first == 1 and not self.last else None

    def experts(self) -> tuple[int, ...]:
        """The fewest experts that every token that deviates, and no other, selected; () if there are none."""
        model = self.hypotheses.model
        if self.kind != "E":
            return ()
        steps = [model.layer(self.first, self._input(i)[None]) for i in self.sequences]
        taken = torch.cat([step.routing.chosen[0] for step in steps if step.routing is not None])
        left = torch.cat(self.evidence.outside())
        of = {e: (taken == e).any(-1) for e in taken.unique().tolist()}
        wrong = {e: mine for e, mine in of.items() if left[mine].all()}
        chosen: list[int] = []
        while wrong and left.any() and not left.all() and 4 * len(chosen) < len(of):
            chosen.append(max(wrong, key=lambda e: int((wrong[e] & left).sum())))
            left = left & ~wrong.pop(chosen[-1])
        return () if left.any() else tuple(sorted(chosen))

    def first_token(self) -> int:
        """The first token that deviates, if it is the same one in all sequences; 0: it is not."""
        firsts = {int(one.nonzero()[0]) for one in self.evidence.outside() if one.any()}
        return firsts.pop() if len(firsts) == 1 and not self.last else 0

    def known(self) -> list[str]:
        """What a deviation without a cause looks like: which tokens and channels, how large."""
        evidence, outside = self.evidence, self.evidence.outside()
        count, total = sum(int(one.sum()) for one in outside), sum(map(len, outside))
        apart = torch.cat([a - b for a, b in zip(evidence.found, evidence.plain, strict=True)])
        size = torch.cat(list(evidence.plain)).norm() / max(1, len(apart)) ** 0.5
        usual = float(evidence.differences().median() / size.clamp_min(1e-30))
        lines = [f"{count} of {total} tokens deviate; the median is {usual:.2g} of the size of the output"]
        prompts = [self.recording.sequences[i].prompt for i in self.sequences]
        if count and not any(bool(one[:p].any()) for one, p in zip(outside, prompts, strict=True)):
            lines.append("all of them follow the prompt")
        if apart.dim() == 2 and apart.isfinite().all():
            channels = apart.square().sum(0)
            wrong = (channels > _QUIET * channels.max()).nonzero().flatten()
            if len(wrong) < len(channels) // 2:
                ends = f"{wrong[0]} and {wrong[-1]}"
                lines.append(f"of {len(channels)} channels, only {len(wrong)} between {ends}")
        return lines

    def factors(self) -> Iterator[Trial]:
        """The outputs with the factors of each quantity, and of its blocks, that explain best."""
        config, token = self.hypotheses.model.config, self.first_token()
        for one in (*QUANTITIES, *([summed(token)] if token else [])):
            for layers in self._layers(one.cause("{}", lambda t: t))[:1]:
                compute = partial(self._all_with, layers=layers)
                divided = [(*division, 0) for division in one.divisions(config)]
                divided += [("", 1, token)] if one.tokens and token > 1 else []
                for block, count, start in divided:
                    left = 1.0
                    for cause in factors(one, block, count, compute, self.evidence.found, start):
                        if (rows := compute(cause)) is not None:
                            left = self.evidence.size(rows) / self.evidence.size()
                            yield cause, layers, rows
                    if left <= NOTHING:  # what the whole explains needs no blocks
                        break

    @cached_property
    def probe(self) -> tuple[int, int, Tensor] | None:
        """A sequence, how many of its first tokens hold enough that deviate, and which do; None: all."""
        found = []
        for number, outside in zip(self.sequences, self.evidence.outside(), strict=True):
            if (wrong := outside.nonzero().flatten()).numel():
                stop = int(wrong[min(len(wrong), _PROBED) - 1]) + 1
                found.append((-min(len(wrong), _PROBED), stop, number, outside[:stop]))
        if self.last or not found or not self.evidence.finite:
            return None
        _, stop, number, outside = min(found, key=lambda one: one[:3])
        return number, stop, outside

    def left(self, cause: Cause, layers: tuple[int, ...]) -> float:
        """What a cause leaves of the difference in the tokens of the probe; infinite where it cannot be."""
        if self.probe is None:
            rows = self._all_with(cause, layers)
            return torch.inf if rows is None else self.evidence.size(rows) / self.evidence.size()
        number, stop, outside = self.probe
        row = self._with(cause, layers, number, stop)
        if row is None:
            return torch.inf
        at = self.sequences.index(number)
        found, plain = self.evidence.found[at][:stop][outside], self.evidence.plain[at][:stop][outside]
        after = (found - row[outside]).norm(dim=-1) / (found - plain).norm(dim=-1)
        return float(after.nan_to_num(nan=2.0).clamp(max=2.0).mean())

    def _layers(self, cause: Cause) -> list[tuple[int, ...]]:
        """The layers of the segment in which a cause may be: all, then each; () outside the layers."""
        pattern = self.hypotheses.model.config.pattern
        if self.last or cause.layer is None:
            return [()]
        inside = range(self.first, min(self.stop, len(pattern)))
        found = tuple(n for n in inside if cause.kind in (LAYERS, MODEL, pattern[n]))
        return list(dict.fromkeys(([found] if found else []) + [(n,) for n in found]))

    def changes(self) -> Iterator[Trial]:
        """Changes of quantities and of structure, by numbers, and two at once; the simplest first."""
        config, token, near = self.hypotheses.model.config, self.first_token(), list[tuple[float, Place]]()
        handed, sums = all_handed_on(token), [summed(n) for n in dict.fromkeys((token, *TILES)) if n]
        simple = every_change(config, token), at_borders(config, token), sources(handed)
        listed, fitted = (routers(2), scaled_matrices()), self._fitted((*QUANTITIES, *sums, *handed))
        yield from self._promising(chain(sights(token or 1), *simple, *listed, fitted), near)
        near = sorted(near, key=lambda one: one[0])[:_PAIRED]
        pairs = (together(a, b) for (_, (a, n)), (_, (b, m)) in combinations(near, 2) if n == m and n)
        yield from self._promising(pairs, [])

    def _promising(self, causes: Iterable[Cause], near: list[tuple[float, Place]]) -> Iterator[Trial]:
        """Trials of causes that leave little in the probe, or less than those before."""
        best = 1.0
        for cause in causes:
            for layers in self._layers(cause):
                if (left := self.left(cause, layers)) < _USEFUL:
                    near.append((left, (cause, layers)))
                if left <= EXPLAINS or left < best:
                    best, rows = min(best, left), self._all_with(cause, layers)
                    assert rows is not None
                    yield cause, layers, rows
                    yield from self._of_some_tokens((cause, layers, rows))

    def _fitted(self, quantities: Sequence[Quantity]) -> Iterator[Cause]:
        config = self.hypotheses.model.config
        for one in quantities:
            for layers in self._layers(one.cause("{}", lambda t: t))[:1]:
                left = partial(self.left, layers=layers)
                for block, count in one.divisions(config)[1:]:
                    yield from block_map(partial(mapped, one), block, count, left)
                if not one.numbers:
                    yield from numbers(one, left)

    def _of_some_tokens(self, trial: Trial) -> Iterator[Trial]:
        """A cause in the tokens that it brings nearer only, if it leaves next to nothing there."""
        cause, layers, rows = trial
        of_each = list(zip(self.evidence.found, self.evidence.plain, rows, strict=True))
        if self.kind is None:
            return
        nearer = [(a - c).norm(dim=-1) < (a - b).norm(dim=-1) for a, b, c in of_each]
        mixed = [torch.where(n[:, None], c, b) for n, (_, b, c) in zip(nearer, of_each, strict=True)]
        if not all(map(torch.all, nearer)) and self.evidence.size(mixed) <= ROUNDED * self.evidence.size():
            named = of_tokens(cause, self._tokens(), dict(zip(self.sequences, nearer, strict=True)))
            yield named, layers, mixed

    def _tokens(self) -> str:
        """Words for the tokens that deviate."""
        outside = self.evidence.outside()
        if token := self.first_token():
            return f"from token {token} on"
        firsts = [int(one.nonzero()[0]) if one.any() else len(one) for one in outside]
        if firsts == [self.recording.sequences[i].prompt for i in self.sequences]:
            return "after the prompt"
        return f"in {sum(int(one.sum()) for one in outside)} of {sum(map(len, outside))} tokens"

    def trials(self, causes: Sequence[Cause]) -> Iterator[Trial]:
        """The outputs with each cause in each layer of the segment where it may be."""
        tried = {(cause.name, layers): (cause, layers) for cause in causes for layers in self._layers(cause)}
        return trials(f"layers {self.first} to {self.stop - 1}", list(tried.values()), self._all_with)

    def _all_with(self, cause: Cause, layers: tuple[int, ...]) -> list[Tensor] | None:
        return self.hypotheses.each(
            lambda i: self._with(cause, layers, self.sequences[i]), self.evidence.plain
        )

    def _with(
        self, cause: Cause, layers: tuple[int, ...], number: int, stop: int | None = None
    ) -> Tensor | None:
        """The output for a sequence, or its tokens before `stop`, with a cause in some layers; None if the
        cause changes nothing here."""
        hypotheses = self.hypotheses
        if not self.last:
            known = lambda n: self._input(n)[None, :stop] if n in self.sequences else None  # noqa: E731
            x = hypotheses.stream(cause, layers, number, (self.first, self.stop), known)
            return None if x is None else x[0]
        x, context = self._input(number)[None], hypotheses.context(number)
        if cause.reported is not None:
            whole = hypotheses.model.logprobs(x, hypotheses.ids[number][None])[0]
            return cause.reported(whole)[self.recording.sequences[number].first - 1 :]
        change = cause.last(context) if cause.last is not None else None
        return None if change is None else self._outputs([(number, None)], x, change)[0]


def first_segment(hypotheses: Hypotheses, recording: Recording) -> LayerSegment | None:
    """The first layers between two recorded hidden states that deviate; None if none does."""
    depth, sequences = hypotheses.model.depth, recording.sequences
    complete = [
        {n for n, x in one.hidden.items() if n < depth and not x.isnan().any(-1).any()} for one in sequences
    ]
    recorded = sorted(set().union(*complete))
    if not recorded:
        return None
    before = -1
    with Bar("hidden states", "layers", len(recorded) + 1) as bar:
        for layer in [*recorded, depth]:
            if layer == depth and before < depth - 1:
                break
            needed = {before, layer} - {-1, depth}
            if there := tuple(i for i, known in enumerate(complete) if needed <= known):
                segment = LayerSegment(hypotheses, recording, before + 1, layer + 1, there)
                if not segment.evidence.distance() <= LIMIT_OF_LAYER:
                    return segment
            before = layer
            bar.add(1)
    return None


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

    noisy = hypotheses.noisy(recording.dtype)
    for layer in sorted(set().union(*(one.routing.keys() for one in recording.sequences))):
        usual = max(others(layer, [run.experts[layer] for run in runs]) for runs in noisy)
        if others(layer, [one.routing.get(layer) for one in recording.sequences]) > 3 * usual + 2:
            return layer
    return None
