"""Which of two systems deviates from the checkpoint, from which token, at which layer, and by what.

    deviates   a system whose log-probabilities lie farther from the checkpoint's than rounding in its type
               explains; so each system is judged on its own, and never by the other one
    position   its first token that does
    layer      with hidden states: the first layer whose output from the recorded input is another one; with
               router choices: the first router that selects other experts (the layer lies at or before it);
               else that of the cause
    cause      the hypothesis that explains the system: recomputed with it, the rest is rounding

Differences are compared by quantiles, in units of what `DRAWS` runs with random rounding differ by at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.proof.bisect.causes import LAYERS, Cause, model_causes, stale_causes
from megatron_nemotron3.proof.bisect.causes_experts import expert_causes
from megatron_nemotron3.proof.bisect.causes_mixers import attention_causes, mamba_causes
from megatron_nemotron3.proof.bisect.changes import listed, neighbours, residuals
from megatron_nemotron3.proof.bisect.evidence import ENOUGH, NOTHING, ROUNDED, Evidence, Trial, best
from megatron_nemotron3.proof.bisect.factors import factors
from megatron_nemotron3.proof.bisect.findings import LIMIT, CauseExplanation, Diagnosis, Side
from megatron_nemotron3.proof.bisect.hypotheses import Hypotheses, SequenceRun
from megatron_nemotron3.proof.bisect.located import LayerSegment, first_router, first_segment
from megatron_nemotron3.proof.bisect.quantities import QUANTITIES
from megatron_nemotron3.proof.bisect.recompute import Recomputation
from megatron_nemotron3.proof.bisect.recording import Recording

#: A cause, and the layers in which it is tried.
_Place = tuple[Cause, tuple[int, ...]]


def cause_table() -> list[Cause]:
    """Return all causes that are tried, but for those of an older checkpoint."""
    return [*mamba_causes(), *attention_causes(), *expert_causes(), *model_causes()]


class Investigation:
    """A comparison of recordings with a checkpoint, which may be repeated for the same tokens.

    Args:
        model: the checkpoint that both systems ran.
        previous: an older one, to find weights that were not updated.
        causes: hypotheses; None: all, then the changes of every quantity of a layer (`quantities`).
        echo: called with lines about the progress.
    """

    def __init__(
        self,
        model: Recomputation,
        previous: Recomputation | None = None,
        causes: Sequence[Cause] | None = None,
        echo: Callable[[str], Any] = lambda line: None,
    ) -> None:
        self.model, self.previous, self.echo = model, previous, echo
        self.causes, self.general = list(cause_table() if causes is None else causes), causes is None
        if previous is not None:
            self.causes += stale_causes(previous)
        self._hypotheses: Hypotheses | None = None

    def hypotheses(self, recording: Recording) -> Hypotheses:
        sequences, old = recording.sequences, self._hypotheses
        mtp = self.model.config.has_mtp and any(one.mtp_logprobs for one in sequences)
        if (
            old is None
            or (mtp and not old.mtp)
            or old.prompts != [one.prompt for one in sequences]
            or not all(torch.equal(a, one.ids) for a, one in zip(old.ids, sequences, strict=True))
        ):
            old = self._hypotheses = Hypotheses(self.model, sequences, mtp)
        return old

    def compare(self, trainer: Recording, engine: Recording) -> Diagnosis:
        self.hypotheses(engine).prepare(engine.dtype, trainer.dtype)
        sides = [self.side("engine", engine), self.side("trainer", trainer)]
        return Diagnosis(sides[1], sides[0], self.model.config.pattern)

    def side(self, name: str, recording: Recording) -> Side:
        hypotheses = self.hypotheses(recording)
        side, evidence = Side(name, recording.system, recording.dtype), _evidence(hypotheses, recording)
        apart = evidence.differences()
        finite = apart[apart.isfinite()]
        side.tokens, side.none = len(apart), len(apart) - len(finite)
        side.typical, side.largest = float(finite.median()), float(apart.max())
        side.noise = evidence.distance()
        mtp = None
        if any(len(values) for one in recording.sequences for values in one.mtp_logprobs.values()):
            mtp = _evidence(hypotheses, recording, mtp=True)
            side.mtp_noise = mtp.distance()
        segment = first_segment(hypotheses, recording)
        if segment is None and side.noise <= LIMIT:
            side.deviates = side.mtp_only = not side.mtp_noise <= LIMIT
            if mtp is not None and side.mtp_only:
                trials = self._trials_of_mtp(name, hypotheses, recording)
                side.explanations = best(mtp.explained(trials))
            return side
        side.deviates, side.searched = True, bool(self.causes)
        side.routed = first_router(hypotheses, recording)
        if segment is None:
            side.position = evidence.position()
            self._say_first(side)
            side.explanations = self._explained(side, hypotheses, recording, evidence)
            if side.explanations:
                side.layer = min(side.explanations[0].layers, default=None)
            elif evidence.closest[1]:
                side.known = [evidence.nearest()]
            return side
        side.position, side.experts = segment.evidence.position(), segment.experts()
        self._say_first(side)
        causes = [*self.causes, *segment.causes(side.experts, self.previous)]
        found = best(segment.evidence.explained(segment.trials(causes)))
        for more, trials in self._more(segment):
            if found and _enough(found[0]):
                break
            self.echo(f"{name}: trying {more}")
            for trial in trials:
                explained = segment.evidence.explained([trial])
                causes += [trial[0]] if explained else []
                found = best([*((one.after, one) for one in found), *explained])
                if explained and _enough(explained[0][1]):
                    break
        by_name = {cause.name: cause for cause in causes}
        whole = []
        for one in found:
            wide = _widest(one, by_name[one.cause], hypotheses, recording, evidence)
            rows = hypotheses.logprobs(by_name[one.cause], wide.layers)
            rest = 0.0 if rows is None else evidence.rest(by_name[one.cause], _scored(recording, rows))
            whole.append((rest, wide))
        # Of causes that explain the layer as well, first those that explain the end, too.
        whole.sort(key=lambda pair: pair[0] > 0)
        side.rest, side.explanations = whole[0][0] if whole else 0.0, [wide for _, wide in whole]
        side.known = [] if found else segment.known()
        side.entering = segment.first == 0 and not (found and found[0].layers)
        if segment.stop - segment.first == 1 and not (found and side.entering):
            side.layer, side.exactly = segment.first, True
        return side

    def _more(self, segment: LayerSegment) -> Iterator[tuple[str, Iterator[Trial]]]:
        """What is tried where no cause of the list explains a layer, the simplest first."""
        if self.general:
            yield "factors of its quantities", segment.factors()
            changes = [*listed(self.model.config, segment.first_token()), *residuals(), *neighbours()]
            yield "changes of its quantities", segment.trials(changes)

    def _say_first(self, side: Side) -> None:
        """What is known before the search for the cause, which may take long."""
        sequence, token = side.position or (0, 0)
        router = "" if side.routed is None else f"; the router of layer {side.routed} is the first to differ"
        self.echo(f"{side.name}: it deviates from token {token} of sequence {sequence} on{router}")

    def _explained(
        self, side: Side, hypotheses: Hypotheses, recording: Recording, evidence: Evidence
    ) -> list[CauseExplanation]:
        """Try every cause that begins before the first router that differs on the log-probabilities."""
        if not (self.causes and evidence.finite):  # else nothing explains it
            return []
        stop = self.model.depth + 1 if side.routed is None else side.routed + 1
        before, found = evidence.size(), []

        def places(alone: bool) -> Iterator[_Place]:
            for cause in self.causes:
                if cause.located:
                    continue
                last = cause.layer is None and not cause.moves and cause.token is None and not cause.joined
                for number, scope in enumerate(hypotheses.scopes(cause)):
                    begin = min(scope, default=self.model.depth if last else 0)
                    if (number > 0 and len(scope) == 1) == alone and begin < stop:
                        yield cause, scope

        def trials(tried: Sequence[_Place]) -> Iterator[Trial]:
            with Bar(side.name, "trials", len(tried)) as bar:
                for cause, scope in tried:
                    rows = hypotheses.logprobs(cause, scope)
                    if rows is not None:
                        yield cause, scope, _scored(recording, rows)
                    bar.add(1)

        def fitted(alone: bool) -> Iterator[Trial]:
            for one in QUANTITIES:
                probe = one.cause("{}", lambda t, context: t)
                for number, scope in enumerate(hypotheses.scopes(probe)):
                    if (number > 0 and len(scope) == 1) != alone or min(scope, default=0) >= stop:
                        continue

                    def compute(cause: Cause, scope: tuple[int, ...] = scope) -> list[Tensor] | None:
                        rows = hypotheses.logprobs(cause, scope)
                        return None if rows is None else _scored(recording, rows)

                    for cause in factors(one, "", 1, compute, evidence.found):
                        if (rows := compute(cause)) is not None:
                            yield cause, scope, rows

        # Factors in each layer before causes in each layer, which are many more.
        for alone, of_list in ((False, True), (False, False), (True, False), (True, True)):
            if not (of_list or self.general):
                continue
            what = f"{len(self.causes)} causes" if of_list else "factors of every quantity"
            self.echo(f"{side.name}: trying {what} in {'each layer' if alone else 'all layers'}")
            if of_list:
                found += evidence.explained(trials(list(places(alone))))
            else:
                fits = evidence.explained(fitted(alone))
                found += [(after, one) for after, one in fits if after <= max(ENOUGH, ROUNDED * before)]
            if any(after <= ROUNDED * before for after, _ in found):
                break
        return best(found)

    def _trials_of_mtp(self, name: str, hypotheses: Hypotheses, recording: Recording) -> Iterator[Trial]:
        """MTP's log-probabilities with each cause in all of its layers; `name` of the side."""
        model, numbers = self.model, range(self.model.depth, len(self.model.layers))
        tried: list[_Place] = []
        for cause in self.causes:
            layers = tuple(n for n in numbers if cause.kind in (LAYERS, model.layers[n].part))
            if cause.mtp is not None:
                tried.append((cause, tuple(numbers)))
            elif cause.layer is not None and layers and not cause.located and not cause.joined:
                tried.append((cause, layers))
        with Bar(f"{name}, MTP", "trials", len(tried)) as bar:
            for cause, layers in tried:
                found = []
                for i, run in enumerate(hypotheses.plain):
                    changes = hypotheses.changes(cause, layers, i) or {}
                    given = run.streams[model.depth], hypotheses.ids[i][None], changes
                    changed = changes or cause.mtp
                    rows = model.mtp_logprobs(*given, blocks=cause.mtp) if changed else run.logprobs
                    found.append({depth: row.view(-1) for depth, row in rows.items()})
                yield cause, layers, _mtp_scored(recording, found)
                bar.add(1)


def _enough(one: CauseExplanation) -> bool:
    """Whether an explanation needs no better one."""
    return one.after <= max(ENOUGH, NOTHING * one.before)


def _evidence(hypotheses: Hypotheses, recording: Recording, mtp: bool = False) -> Evidence:
    """Compare the recorded log-probabilities of the decoder, or of MTP, with those of the checkpoint."""
    recorded = [
        (number, max(one.prompt, 1 + depth), values)
        for number, one in enumerate(recording.sequences)
        for depth, values in (one.mtp_logprobs if mtp else {0: one.logprobs}).items()
    ]

    def computed(runs: Sequence[SequenceRun]) -> list[Tensor]:
        rows = [run.logprobs for run in runs]
        return _mtp_scored(recording, rows) if mtp else _scored(recording, [row[0] for row in rows])

    places = [(number, first) for number, first, _ in recorded]
    draws = [computed(runs) for runs in hypotheses.noisy(recording.dtype)]
    return Evidence(places, [values for *_, values in recorded], computed(hypotheses.plain), draws)


def _scored(recording: Recording, rows: Sequence[Tensor]) -> list[Tensor]:
    """Of log-probabilities of tokens 1 to s of every sequence, those that were recorded."""
    return [row[one.first - 1 :] for row, one in zip(rows, recording.sequences, strict=True)]


def _mtp_scored(recording: Recording, rows: Sequence[Mapping[int, Tensor]]) -> list[Tensor]:
    """The same of MTP, by depth."""
    pairs = zip(rows, recording.sequences, strict=True)
    return [row[d][max(one.prompt - 1 - d, 0) :] for row, one in pairs for d in one.mtp_logprobs]


def _widest(
    found: CauseExplanation,
    cause: Cause,
    hypotheses: Hypotheses,
    recording: Recording,
    evidence: Evidence,
) -> CauseExplanation:
    """Of the sets of layers that begin with those found, that which explains the log-probabilities best."""
    scopes = [s for s in hypotheses.scopes(cause) if s[:1] == found.layers[:1]]
    scopes += [found.layers] if found.layers not in scopes else []
    if len(scopes) == 1:
        return replace(found, layers=scopes[0])
    rows = [(scope, hypotheses.logprobs(cause, scope)) for scope in scopes]
    sizes = [(evidence.size(_scored(recording, one)), scope) for scope, one in rows if one is not None]
    return replace(found, layers=min(sizes)[1] if sizes else found.layers)
