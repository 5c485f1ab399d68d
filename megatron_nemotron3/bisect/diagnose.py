"""Which of two systems deviates from the checkpoint, from which token, at which layer, and by what.

    deviates   a system whose log-probabilities lie farther from the checkpoint's than rounding in its type
               explains; so each system is judged by itself, and never by the other one
    position   its first token that does
    layer      with hidden states: the first layer whose output from the recorded input is another one; with
               router choices: the first router that selects other experts (the layer lies at or before it);
               else that of the cause
    cause      the hypothesis that explains the system: recomputed with it, the rest is rounding

Differences are compared by quantiles, in units of what `DRAWS` runs with random rounding differ by at most.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.bisect.causes import LAYERS, Cause, stale_causes, table
from megatron_nemotron3.bisect.findings import LIMIT, Diagnosis, Explanation, Side
from megatron_nemotron3.bisect.hypotheses import DRAWS, LEAST, Hypotheses, Run, Tokens, quantiles, times
from megatron_nemotron3.bisect.located import STANDS_OUT, Segment, first_router, first_segment
from megatron_nemotron3.bisect.recompute import Recomputation
from megatron_nemotron3.bisect.recording import Recording

#: What a cause leaves is at most this many times noise; where a tenth of the differences is left or less,
#: so many, because rounding grows with the numbers of a layer that is wrong.
LEFT, GROWN = 3.0, 20.0
#: The differences that a cause leaves must be at most this share of those without it.
EXPLAINS = 0.5
#: A tenth; of a cause that rounds, whatever noise is: two systems with it round some numbers differently.
ROUNDED = 0.1
#: Causes whose rest is at most this many times the smallest one explain a system as well.
ALIKE = 1.25


class Judge:
    """Distances of one system from runs of the checkpoint, in units of noise.

    Args:
        hypotheses: of the sequences of the recording.
        recording: of the system.
    """

    def __init__(self, hypotheses: Hypotheses, recording: Recording) -> None:
        self.hypotheses, self.recording = hypotheses, recording
        self.sequences = recording.sequences
        self.draws = [hypotheses.noisy(recording.dtype, draw) for draw in range(DRAWS)]
        plain = [run.logprobs for run in hypotheses.plain]
        each = [[run.logprobs for run in draw] for draw in self.draws]
        self.found = [one.logprobs.float() for one in self.sequences]
        self.noise = self._noise([self._differences(plain, scored=self.scored(rows)) for rows in each])

    def scored(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Of log-probabilities of tokens 1 to s, those that were recorded."""
        return [row[one.first - 1 :] for row, one in zip(rows, self.sequences, strict=True)]

    def _differences(self, rows: Sequence[Tensor], scored: Sequence[Tensor] | None = None) -> Tensor:
        pairs = zip(self.found if scored is None else scored, self.scored(rows), strict=True)
        return torch.cat([one - other for one, other in pairs])

    @staticmethod
    def _noise(differences: Sequence[Tensor]) -> Tensor:
        """The largest quantiles of all draws."""
        return torch.stack([quantiles(one) for one in differences]).amax(0).clamp_min(LEAST)

    def distance(self, rows: Sequence[Tensor]) -> float:
        """Of the recorded log-probabilities from others [s - 1] for each sequence."""
        return times(quantiles(self._differences(rows)), self.noise)

    def size(self, rows: Sequence[Tensor]) -> float:
        """How large the differences are as a whole, in units of noise."""
        ratios = quantiles(self._differences(rows)) / self.noise
        return float(ratios[:4].mean())

    def position(self) -> tuple[int, int] | None:
        """Sequence and token of the first token that stands out."""
        for number, (one, run) in enumerate(zip(self.sequences, self.hypotheses.plain, strict=True)):
            plain = run.logprobs[one.first - 1 :]
            each = torch.stack([d[number].logprobs[one.first - 1 :] - plain for d in self.draws])
            usual = torch.maximum(each.abs().amax(0), self.noise[1])
            apart = (one.logprobs - plain).abs().nan_to_num(nan=torch.inf)
            places = (apart > STANDS_OUT * usual).nonzero()
            if len(places):
                return number, int(places[0]) + one.first
        return None


class Investigation:
    """A comparison of recordings with a checkpoint, which may be repeated for the same tokens.

    Args:
        model: the checkpoint that both systems ran.
        previous: an older one, to find weights that were not updated.
        causes: hypotheses; None: all.
    """

    def __init__(
        self,
        model: Recomputation,
        previous: Recomputation | None = None,
        causes: Sequence[Cause] | None = None,
        echo: Callable[[str], Any] = lambda line: None,
    ) -> None:
        self.model, self.previous, self.echo = model, previous, echo
        self.causes = list(table() if causes is None else causes)
        if previous is not None:
            self.causes += stale_causes(previous)
        self._hypotheses: Hypotheses | None = None

    def hypotheses(self, recording: Recording) -> Hypotheses:
        """Those of the recorded tokens."""
        tokens = [Tokens(one.ids, one.prompt) for one in recording.sequences]
        mtp = self.model.config.has_mtp and any(one.mtp_logprobs for one in recording.sequences)
        old = self._hypotheses
        if old is not None and (old.mtp or not mtp) and len(old.sequences) == len(tokens):
            same = zip(old.sequences, tokens, strict=True)
            if all(torch.equal(a.ids, b.ids) and a.prompt == b.prompt for a, b in same):
                return old
        self._hypotheses = Hypotheses(self.model, tokens, mtp)
        return self._hypotheses

    def compare(self, trainer: Recording, engine: Recording) -> Diagnosis:
        """Say what is wrong with which."""
        sides = [self.side("engine", engine), self.side("trainer", trainer)]
        return Diagnosis(sides[1], sides[0], self.model.config.pattern)

    def side(self, name: str, recording: Recording) -> Side:
        """Judge one system by itself."""
        hypotheses = self.hypotheses(recording)
        judge, side = Judge(hypotheses, recording), Side(name, recording.system, recording.dtype)
        plain = [run.logprobs for run in hypotheses.plain]
        apart = judge._differences(plain).abs()
        side.tokens, side.typical, side.largest = len(apart), float(apart.median()), float(apart.max())
        side.noise = judge.distance(plain)
        side.mtp_noise = _mtp_distance(hypotheses, recording, [run.mtp for run in hypotheses.plain])
        segment = first_segment(hypotheses, recording)
        side.deviates = segment is not None or not side.noise <= LIMIT
        if not side.deviates and not side.mtp_noise <= LIMIT:
            side.deviates = side.mtp_only = True
            self._explain_mtp(side, hypotheses, recording)
        elif side.deviates:
            side.routed = first_router(hypotheses, recording)
            side.position = judge.position() if segment is None else segment.position()
            if segment is None:
                stop = self.model.depth + 1 if side.routed is None else side.routed + 1
                self._explain(side, hypotheses, judge, stop)
            else:
                if segment.stop - segment.first == 1:
                    side.layer, side.exactly = segment.first, True
                self._explain_segment(side, hypotheses, judge, segment)
        return side

    def _explain_segment(self, side: Side, hypotheses: Hypotheses, judge: Judge, segment: Segment) -> None:
        before, found = segment.distance, []
        for cause in self.causes:
            for layers, outputs in segment.with_cause(cause).items():
                after = times(segment.quantiles(outputs), segment.noise)
                if _explains(cause, after, after, before):
                    wide = self._widest(hypotheses, judge, cause, layers)
                    found.append((after, Explanation(cause.name, wide, before, after)))
        side.explanations = _best(found)
        if side.explanations and not side.explanations[0].layers and segment.first == 0:
            side.layer, side.exactly = None, False  # what enters the first layer is wrong

    def _widest(
        self, hypotheses: Hypotheses, judge: Judge, cause: Cause, layers: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Of the sets of layers that begin with these, that which explains the log-probabilities best."""
        scopes = [s for s in hypotheses.scopes(cause) if s[:1] == layers[:1]]
        sizes = [(judge.size(rows), s) for s in scopes if (rows := hypotheses.logprobs(cause, s)) is not None]
        return min(sizes)[1] if sizes else layers

    def _explain(self, side: Side, hypotheses: Hypotheses, judge: Judge, stop: int) -> None:
        """Try every cause that begins before layer `stop` on the log-probabilities.

        Faults of code are in all layers of a kind: only if none of these leaves a tenth, each layer is tried.
        """
        before, found = judge.size([run.logprobs for run in hypotheses.plain]), []
        tried = [(cause, scope) for cause in self.causes for scope in hypotheses.scopes(cause)]
        for alone in (False, True):
            self.echo(
                f"{side.name}: trying {len(self.causes)} causes in {'each layer' if alone else 'all layers'}"
            )
            for cause, scope in tried:
                last = cause.layer is None and not cause.moves and cause.prefix is None
                if (len(scope) == 1) != alone or min(scope, default=self.model.depth if last else 0) >= stop:
                    continue
                rows = hypotheses.logprobs(cause, scope)
                if rows is None:
                    continue
                after = judge.size(rows)
                if _explains(cause, judge.distance(rows), after, before):
                    found.append((after, Explanation(cause.name, scope, before, after)))
            if any(after <= ROUNDED * before for after, _ in found):
                break
        side.explanations = _best(found)
        if side.explanations:
            side.layer = min(side.explanations[0].layers, default=None)

    def _explain_mtp(self, side: Side, hypotheses: Hypotheses, recording: Recording) -> None:
        before = side.mtp_noise
        found: list[tuple[float, Explanation]] = []
        depth, model = self.model.depth, self.model
        if self.previous is not None:
            stale = _with_mtp_of(self.model, self.previous)
            rows = [_mtp_of(stale, hypotheses, i, {}) for i in range(len(hypotheses.sequences))]
            found.append(
                (
                    _mtp_distance(hypotheses, recording, rows),
                    Explanation(
                        "MTP of the previous checkpoint", tuple(range(depth, len(model.layers))), before, 0
                    ),
                )
            )
        for cause in self.causes:
            if cause.layer is None:
                continue
            layers = [
                n for n in range(depth, len(model.layers)) if cause.kind in (LAYERS, model.layers[n].part)
            ]
            if not layers:
                continue
            rows = []
            for i in range(len(hypotheses.sequences)):
                changes = hypotheses.changes(cause, layers, i)
                rows.append(
                    hypotheses.plain[i].mtp if changes is None else _mtp_of(model, hypotheses, i, changes)
                )
            found.append(
                (
                    _mtp_distance(hypotheses, recording, rows),
                    Explanation(cause.name, tuple(layers), before, 0),
                )
            )
        side.explanations = _best(
            [
                (after, Explanation(one.cause, one.layers, before, after))
                for after, one in found
                if after <= min(LEFT, EXPLAINS * before)
            ]
        )


def _explains(cause: Cause, distance: float, after: float, before: float) -> bool:
    """Whether what a cause leaves is noise; where numbers grow, or the cause rounds, that is more."""
    if after <= ROUNDED * before:
        return cause.rounds or distance <= GROWN
    return distance <= LEFT and after <= EXPLAINS * before


def _best(found: list[tuple[float, Explanation]]) -> list[Explanation]:
    """The explanation with the smallest rest, and those with about the same."""
    found = sorted(found, key=lambda pair: pair[0])
    return [one for after, one in found if after <= ALIKE * found[0][0] + 0.05]


def _mtp_of(model: Recomputation, hypotheses: Hypotheses, number: int, changes: Any) -> dict[int, Tensor]:
    run, ids = hypotheses.plain[number], hypotheses.sequences[number].ids[None]
    found = model.mtp_logprobs(run.streams[model.depth], ids, changes)
    return {depth: rows[0] for depth, rows in found.items()}


def _mtp_distance(hypotheses: Hypotheses, recording: Recording, rows: Sequence[dict[int, Tensor]]) -> float:
    """Of the recorded log-probabilities of MTP from others, in units of noise; 0 without any."""

    def apart(found: Callable[[int, int], Tensor], other: Sequence[dict[int, Tensor]]) -> Tensor:
        parts = [torch.empty(0)]
        for i, one in enumerate(recording.sequences):
            for depth in one.mtp_logprobs:
                first = max(one.prompt, 1 + depth) - 1 - depth
                if depth in other[i]:
                    parts.append(found(i, depth) - other[i][depth][first:])
        return torch.cat(parts)

    recorded = apart(lambda i, d: recording.sequences[i].mtp_logprobs[d].float(), rows)
    if not len(recorded):
        return 0.0
    plain = [run.mtp for run in hypotheses.plain]
    noise = []
    for draw in range(DRAWS):
        runs = hypotheses.noisy(recording.dtype, draw)

        def noisy(i: int, depth: int, runs: list[Run] = runs) -> Tensor:
            one = recording.sequences[i]
            return runs[i].mtp[depth][max(one.prompt, 1 + depth) - 1 - depth :]

        noise.append(quantiles(apart(noisy, plain)))
    return times(quantiles(recorded), torch.stack(noise).amax(0).clamp_min(LEAST))


def _with_mtp_of(model: Recomputation, previous: Recomputation) -> Recomputation:
    """A model whose MTP blocks are those of another checkpoint."""
    mixed, old = copy.copy(model), previous.reference
    mixed.reference = reference = copy.copy(model.reference)

    def layer(prefix: Any, *rest: Any) -> Any:
        return (old if prefix.megatron.startswith("mtp.") else model.reference).layer(prefix, *rest)

    def norm(x: Tensor, *names: str) -> Tensor:
        return (old if names[0].startswith("mtp.") else model.reference).norm(x, *names)

    for name, function in (("layer", layer), ("norm", norm), ("mtp_input", old.mtp_input)):
        setattr(reference, name, function)
    return mixed
