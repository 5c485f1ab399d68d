"""Where hidden states or router choices were recorded: the first layer that deviates, and causes tried on it.

A layer is judged on its own: it runs on the recorded input, and its output is compared with the recorded one.
So neither earlier deviations nor accumulated rounding count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause
from megatron_nemotron3.proof.bisect.causes_experts import of_experts
from megatron_nemotron3.proof.bisect.causes_mixers import of_window
from megatron_nemotron3.proof.bisect.evidence import NOTHING, Evidence, Trial
from megatron_nemotron3.proof.bisect.factors import factors
from megatron_nemotron3.proof.bisect.hypotheses import Hypotheses, Row, after, padded
from megatron_nemotron3.proof.bisect.quantities import QUANTITIES
from megatron_nemotron3.proof.bisect.recompute import DRAWS, Noise, Recomputation, Steps, rounding
from megatron_nemotron3.proof.bisect.recording import Recording

#: A layer deviates where a quantile of its distances is this many times that of noise.
LIMIT_OF_LAYER = 3.0
#: A channel with this share of the largest squared difference or less does not deviate.
_QUIET = 1e-3


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

    def _outputs(
        self,
        rows: Sequence[Row],
        x: Tensor,
        changes: Mapping[int, Steps] | None = None,
        last: Steps | None = None,
    ) -> list[Tensor]:
        """What follows from x [rows, longest, d]: the stream [s, d] of each row, or its log-probabilities."""
        model, noise = self.hypotheses.model, [one for _, one in rows]
        noise = noise if any(noise) else []
        lengths = [len(self.hypotheses.ids[i]) for i, _ in rows]
        if self.last:
            found = model.logprobs(x, self.hypotheses.padded_ids(rows), last, noise)
            firsts = [self.recording.sequences[i].first - 1 for i, _ in rows]
            return [row[a : n - 1] for row, a, n in zip(found, firsts, lengths, strict=True)]
        x = after(model.run(x, self.first, changes, noise=noise, stop=self.stop), x)
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

    def causes(self, experts: tuple[int, ...], previous: Recomputation | None) -> Iterator[Cause]:
        if experts:
            yield from of_experts(experts, None if previous is None else previous.definition)
        tokens = [int(one.nonzero()[0]) for one in self.evidence.outside() if one.any()]
        if self.kind == "*" and tokens and min(tokens):
            yield of_window(min(tokens))

    def first_token(self) -> int:
        """The first token that deviates, if it is the same one in all sequences; 0: it is not."""
        firsts = {int(one.nonzero()[0]) for one in self.evidence.outside() if one.any()}
        return firsts.pop() if len(firsts) == 1 else 0

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
                lines.append(
                    f"of {len(channels)} channels, only {len(wrong)} between {wrong[0]} and {wrong[-1]}"
                )
        return [*lines, *([evidence.nearest()] if evidence.closest[1] else [])]

    def factors(self) -> Iterator[Trial]:
        """The outputs with the factors of each quantity, and of its blocks, that explain best."""
        config, token = self.hypotheses.model.config, 0 if self.last else self.first_token()
        pattern = config.pattern
        for one in QUANTITIES:
            layers = tuple(
                n for n in range(self.first, min(self.stop, len(pattern))) if one.kind in (LAYERS, pattern[n])
            )
            if self.last != (one.kind == MODEL) or not (layers or self.last):
                continue

            def compute(cause: Cause, layers: tuple[int, ...] = layers) -> list[Tensor] | None:
                return self.hypotheses.each(
                    lambda i: self._with(cause, layers, self.sequences[i]), self.evidence.plain
                )

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

    def trials(self, causes: Sequence[Cause]) -> Iterator[Trial]:
        """The outputs with each cause in each layer of the segment where it may be."""
        inside = set(range(self.first, self.stop))
        tried: dict[tuple[str, tuple[int, ...]], Cause] = {}
        for cause in causes:
            for scope in self.hypotheses.scopes(cause):
                layers = tuple(sorted(inside & set(scope)))
                if bool(layers) == bool(scope) or self.last:
                    tried.setdefault((cause.name, layers), cause)
        with Bar(f"layers {self.first} to {self.stop - 1}", "trials", len(tried)) as bar:
            for (_, layers), cause in tried.items():
                found = self.hypotheses.each(
                    lambda n, c=cause, ls=layers: self._with(c, ls, self.sequences[n]),  # type: ignore[misc]
                    self.evidence.plain,
                )
                if found is not None:
                    yield cause, layers, found
                bar.add(1)

    def _with(self, cause: Cause, layers: tuple[int, ...], number: int) -> Tensor | None:
        """The output for a sequence with a cause in some layers; None if the cause changes nothing here."""
        hypotheses, row = self.hypotheses, [(number, None)]
        context, x = hypotheses.context(number), self._input(number)[None]
        if self.last:
            if cause.reported is not None:
                whole = hypotheses.model.logprobs(x, hypotheses.ids[number][None])[0]
                return cause.reported(whole)[self.recording.sequences[number].first - 1 :]
            change = cause.last(context) if cause.last is not None else None
            return None if change is None else self._outputs(row, x, last=change)[0]
        changes = hypotheses.changes(cause, layers, number) if layers else {}
        moves = cause.moves and self.first == 0
        before = hypotheses.before(cause, number) if self.first == 0 else None
        if cause.joined and layers and self.first and number and number - 1 in self.sequences:
            before = self._input(number - 1)[None]
        if changes is None or not (changes or moves or before is not None):
            return None
        if before is not None:
            return hypotheses.joined(before, x, range(self.first, self.stop), changes)[0]
        if cause.joined:
            return None
        if moves:
            x = cause.start(hypotheses.model, hypotheses.ids[number], context)
        return self._outputs(row, x, changes)[0]


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
            there = tuple(
                i
                for i, known in enumerate(complete)
                if (before < 0 or before in known) and (layer in known or layer == depth)
            )
            if there:
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
