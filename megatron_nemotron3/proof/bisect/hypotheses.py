"""What the checkpoint computes for the recorded tokens: plainly, with rounding as noise, and with a cause.

Everything is kept, so that a cause is recomputed once, from the first layer that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause, Context
from megatron_nemotron3.proof.bisect.evidence import Trial
from megatron_nemotron3.proof.bisect.quantities import Quantity
from megatron_nemotron3.proof.bisect.recompute import DRAWS, LayerStep, Noise, Recomputation, Steps, rounding
from megatron_nemotron3.proof.bisect.recording import Sequence as Recorded

#: Memory for residual streams from which causes are recomputed; with less, from an earlier layer.
KEPT_BYTES = 2 << 30

#: A cause, and the layers in which it is tried.
Place = tuple[Cause, tuple[int, ...]]
#: A row that runs through layers: number of the sequence, and its noise.
Row = tuple[int, Noise | None]


@dataclass
class SequenceRun:
    """What a model computes for a sequence."""

    #: The residual stream [1, s, d] before some layers and after the last; with noise, none.
    streams: dict[int, Tensor] = field(default_factory=dict)
    #: Of tokens 1 to s [s - 1] by depth 0; of MTP by depth from 1 on [s - 1 - depth].
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    #: Layer -> the selected experts [s, topk].
    experts: dict[int, Tensor] = field(default_factory=dict)


class Hypotheses:
    """A checkpoint and the sequences of a recording.

    Args:
        model: the checkpoint.
        sequences: recorded ones; their tokens and prompts count.
        mtp: also recompute MTP.
    """

    def __init__(self, model: Recomputation, sequences: Sequence[Recorded], mtp: bool) -> None:
        self.model, self.mtp = model, mtp
        self.ids = [one.ids for one in sequences]
        self.prompts = [one.prompt for one in sequences]
        self._runs: dict[tuple[float, int], list[SequenceRun]] = {}
        self._kept: dict[tuple[str, int, int], Tensor | None] = {}
        self._found: dict[Place, list[Tensor] | None] = {}

    def prepare(self, *dtypes: str) -> None:
        """Run everything that is needed for systems of these types; each weight is read once for all rows."""
        units = {rounding(dtype) for dtype in dtypes}
        keys = [(0.0, 0), *((unit, draw) for unit in sorted(units) for draw in range(DRAWS))]
        new = [key for key in keys if key not in self._runs]
        if not new:
            return
        for key in new:
            self._runs[key] = [SequenceRun() for _ in self.ids]
        rows = [
            (i, Noise(unit, draw, i) if unit else None) for unit, draw in new for i in range(len(self.ids))
        ]
        runs = [run for key in new for run in self._runs[key]]
        batches = list(self.batches(rows))
        with Bar("recompute", "layers", len(batches) * self.model.depth) as bar:
            for batch in batches:
                self._run([rows[n] for n in batch], [runs[n] for n in batch], bar)

    @property
    def plain(self) -> list[SequenceRun]:
        self.prepare()
        return self._runs[0.0, 0]

    def noisy(self, dtype: str) -> list[list[SequenceRun]]:
        """The same with the rounding of a type, `DRAWS` times."""
        self.prepare(dtype)
        return [self._runs[rounding(dtype), draw] for draw in range(DRAWS)]

    def batches(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Numbers of rows that run together: as many tokens as run through a layer at a time."""
        lengths = [len(self.ids[i]) for i, _ in rows]
        left = sorted(range(len(rows)), key=lambda n: lengths[n])
        while left:
            fit = (n for n in range(1, len(left)) if (n + 1) * lengths[left[n]] > self.model.tokens)
            count = next(fit, len(left))
            batch, left = left[:count], left[count:]
            for number in batch:
                if (noise := rows[number][1]) is not None:
                    noise.padding = lengths[batch[-1]] - lengths[number]
            yield batch

    def _run(self, rows: Sequence[Row], runs: Sequence[SequenceRun], bar: Bar) -> None:
        ids, noise = padded([self.ids[i] for i, _ in rows]), [one for _, one in rows]
        lengths, depth = [len(self.ids[i]) for i, _ in rows], self.model.depth
        # Every how many layers a stream is kept.
        each = 4 * sum(map(len, self.ids)) * self.model.config.hidden_size
        stride = max(1, -(-depth * each // KEPT_BYTES))

        def keep(layer: int, x: Tensor) -> None:
            for row, (length, one, run) in enumerate(zip(lengths, noise, runs, strict=True)):
                if one is None and (layer % stride == 0 or layer == depth):
                    run.streams[layer] = x[row : row + 1, :length].clone()

        x = self.model.embed(ids)
        keep(0, x)
        for step in self.model.run(x, noise=noise):
            x = step.stream
            keep(step.layer + 1, x)
            for length, run, chosen in zip(lengths, runs, step.routing.chosen if step.routing else ()):
                run.experts[step.layer] = chosen[:length]
            bar.add(1)
        found = {0: self.model.logprobs(x, ids, noise=noise)}
        found |= self.model.mtp_logprobs(x, ids, noise=noise) if self.mtp else {}
        for row, (length, run) in enumerate(zip(lengths, runs, strict=True)):
            run.logprobs = {ahead: values[row, : length - 1 - ahead] for ahead, values in found.items()}

    def context(self, number: int, layer: int = -1) -> Context:
        before = len(self.ids[number - 1]) if number else 0
        taken = partial(self._taken, number)
        return Context(
            self.model.config, self.prompts[number], layer, before, number, self.ids[number], taken
        )

    def _taken(self, number: int, one: Quantity, layer: int, beside: bool) -> Tensor | None:
        """What the checkpoint computes of a quantity; None where it is not computed once, or not known."""
        number = (number + beside) % len(self.ids)
        if (key := (one.name, layer, number)) not in self._kept:
            kept, x = list[Tensor](), self.plain[number].streams.get(layer)
            keep = lambda t: (t, kept.append(t.clone()))[0]  # type: ignore[func-returns-value]  # noqa: E731
            if x is not None and one.kind in (LAYERS, self.model.config.pattern[layer]):
                self.model.layer(layer, x, one.steps(self.context(number, layer), keep))
            self._kept[key] = kept[0] if len(kept) == 1 else None
        return self._kept[key]

    def scopes(self, cause: Cause) -> list[tuple[int, ...]]:
        """The sets of layers in which a cause may be: all of its kind first, then each."""
        pattern = self.model.config.pattern
        if cause.layer is None:
            return [()]
        everywhere = tuple(range(len(pattern)))
        if cause.kind == MODEL:
            return [everywhere]
        kinds = dict.fromkeys(pattern) if cause.kind == LAYERS else [cause.kind]
        sets = [tuple(n for n in everywhere if pattern[n] == kind) for kind in kinds]
        if cause.kind == LAYERS:
            sets.insert(0, everywhere)
        return list(dict.fromkeys(s for s in (*sets, *((n,) for n in sets[0])) if s))

    def changes(self, cause: Cause, layers: Sequence[int], number: int) -> dict[int, Steps] | None:
        """The changes of some layers for a sequence; None if the cause cannot be there."""
        made = {n: cause.layer(self.context(number, n)) for n in layers} if cause.layer is not None else {}
        found = {n: change for n, change in made.items() if change is not None}
        return found if found or not made else None

    def each(self, found: Callable[[int], Tensor | None], plain: Sequence[Tensor]) -> list[Tensor] | None:
        """What `found` gives for each sequence, plain values where that is None; None if it always is."""
        rows = [found(i) for i in range(len(plain))]
        if all(row is None for row in rows):
            return None
        return [p if row is None else row for row, p in zip(rows, plain, strict=True)]

    def logprobs(self, cause: Cause, layers: tuple[int, ...]) -> list[Tensor] | None:
        """Log-probabilities of every sequence with a cause in some layers; None where it cannot be."""
        if (cause, layers) not in self._found:
            plain = [run.logprobs[0] for run in self.plain]
            self._found[cause, layers] = self.each(lambda i: self._with(cause, layers, i), plain)
        return self._found[cause, layers]

    def _with(self, cause: Cause, layers: tuple[int, ...], number: int) -> Tensor | None:
        model, plain = self.model, self.plain[number]
        if cause.reported is not None:
            return cause.reported(plain.logprobs[0])
        last = cause.last(self.context(number)) if cause.last is not None else None
        start = 0 if cause.embed or cause.joined or cause.token is not None else min(layers, default=0)
        first = max(n for n in plain.streams if n <= start)
        x = self.stream(cause, layers, number, (first, model.depth), lambda n: self.plain[n].streams[first])
        if x is None and last is None:
            return None
        return model.logprobs(plain.streams[model.depth] if x is None else x, self.ids[number][None], last)[0]

    def stream(
        self,
        cause: Cause,
        layers: tuple[int, ...],
        number: int,
        places: tuple[int, int],
        entering: Callable[[int], Tensor | None],
    ) -> Tensor | None:
        """The stream behind some layers with a cause; None if it changes nothing there.

        places: the first layer and the one behind the last. entering: the stream [1, s, d] of a sequence
        before the first layer, None where it is not known.
        """
        model, x, changes = self.model, entering(number), self.changes(cause, layers, number)
        before = entering(number - 1) if cause.joined and number else None
        if cause.token is not None and not places[0]:
            before = model.embed(torch.tensor([[cause.token]]))
        if x is None or changes is None or (cause.joined and before is None):
            return None
        if before is not None:
            return self.joined(before, x, range(*places), changes)
        if cause.embed is not None and not places[0]:
            x = model.embed(self.ids[number][None], cause.embed(self.context(number)))[:, : x.shape[1]]
        elif not changes:
            return None
        return after(model.run(x, places[0], changes, stop=places[1]), x)

    def joined(
        self, before: Tensor, x: Tensor, layers: Iterable[int], changes: Mapping[int, Steps]
    ) -> Tensor:
        """The stream after layers of which those with a change see what stands before; without any, all
        do."""
        for n in layers:
            if n in changes or not changes:
                both = self.model.layer(n, torch.cat([before, x], 1), changes.get(n)).stream
                before, x = both.tensor_split([before.shape[1]], 1)
            else:
                before, x = (self.model.layer(n, one).stream for one in (before, x))
        return x


def trials(
    name: str, places: Sequence[Place], compute: Callable[..., Sequence[Tensor] | None]
) -> Iterator[Trial]:
    """What follows from causes in some layers, where they can be; `name` of the bar."""
    with Bar(name, "trials", len(places)) as bar:
        for cause, layers in places:
            if (rows := compute(cause, layers)) is not None:
                yield cause, layers, rows
            bar.add(1)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several lengths as one tensor; the shorter ones repeat their last entry."""
    last = torch.arange(max(map(len, rows)))
    return torch.stack([one[last.clamp_max(len(one) - 1)] for one in rows])


def after(steps: Iterable[LayerStep], x: Tensor) -> Tensor:
    """The residual stream after the last of some steps, or that before any."""
    for step in steps:
        x = step.stream
    return x
