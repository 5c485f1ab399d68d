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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.processes import one_thread
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.bisect.causes import LAYERS, Cause
from megatron_nemotron3.proof.bisect.chains import chains
from megatron_nemotron3.proof.bisect.changes import changes_first
from megatron_nemotron3.proof.bisect.evidence import ENOUGH, NOTHING, ROUNDED, Evidence, Trial, best
from megatron_nemotron3.proof.bisect.findings import LIMIT, CauseExplanation, Diagnosis, Side
from megatron_nemotron3.proof.bisect.fits import factors
from megatron_nemotron3.proof.bisect.hypotheses import Hypotheses, Place, SequenceRun, trials
from megatron_nemotron3.proof.bisect.listed import attention_causes, expert_causes, model_causes, of_experts
from megatron_nemotron3.proof.bisect.located import first_router, first_segment
from megatron_nemotron3.proof.bisect.quantities import QUANTITIES
from megatron_nemotron3.proof.bisect.recompute import Recomputation
from megatron_nemotron3.proof.bisect.recording import Recording
from megatron_nemotron3.proof.bisect.structure import states
from megatron_nemotron3.proof.bisect.weights import neighbours, stale_causes

#: Layers of a smaller hidden size run in one thread: threads that share processors with other programs wait
#: for each other at every small product, and two took 15 times as long as one.
_ONE_THREAD = 1024


def cause_table(config: Nemotron3Config) -> list[Cause]:
    """Return all causes that are tried first, but for those of an older checkpoint."""
    layers = states(), changes_first(config), chains(), attention_causes(), expert_causes()
    return [*chain(*layers), *model_causes(), *neighbours()]


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
        self.causes = list(cause_table(model.config) if causes is None else causes)
        self.general = causes is None
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
        with one_thread() if self.model.config.hidden_size < _ONE_THREAD else nullcontext():
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
                side.explanations = best(mtp.explained(self._trials_of_mtp(name, hypotheses, recording)))
            return side
        side.deviates, side.searched = True, bool(self.causes)
        side.routed = first_router(hypotheses, recording)
        if segment is None:
            side.position = evidence.position()
            self._say_first(side)
            side.explanations = self._explained(side, hypotheses, recording, evidence)
            if side.explanations:
                side.layer = min(side.explanations[0].layers, default=None)
            return side
        side.position, side.experts = segment.evidence.position(), segment.experts()
        self._say_first(side)
        causes = [*self.causes, *of_experts(side.experts, self.previous)]
        found = best(segment.evidence.explained(segment.trials(causes)))
        for more, search in (("factors", segment.factors), ("changes", segment.changes)):
            if not self.general or (found and _enough(found[0])):
                break
            self.echo(f"{name}: trying {more} of its quantities")
            for trial in search():
                explained = segment.evidence.explained([trial])
                if not segment.evidence.everywhere(trial[0], trial[2]):
                    continue
                causes += [trial[0]] if explained else []
                found = best([*((one.after, one) for one in found), *explained])
                if explained and _enough(found[0]):
                    break
        by_name = {cause.name: cause for cause in causes}
        whole = []
        for one in found:
            wide = _widest(one, by_name[one.cause], hypotheses, recording, evidence)
            rows = hypotheses.logprobs(by_name[one.cause], wide.layers)
            rest = 0.0 if rows is None else evidence.rest(by_name[one.cause], _scored(recording, rows))
            whole.append((rest, wide))
        # Of causes that explain the layer as well, those that explain the end, too.
        whole = [pair for pair in whole if not pair[0]] or whole
        side.rest, side.explanations = whole[0][0] if whole else 0.0, [wide for _, wide in whole]
        side.known = [] if found else segment.known()
        side.entering = segment.first == 0 and not (found and found[0].layers)
        if segment.stop - segment.first == 1 and not (found and side.entering):
            side.layer, side.exactly = segment.first, True
        return side

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
        before, found, first = evidence.size(), [], [one for one in self.causes if not one.located]

        def scopes(cause: Cause, alone: bool) -> Iterator[tuple[int, ...]]:
            last = not (cause.layer or cause.embed or cause.joined) and cause.token is None
            for number, scope in enumerate(hypotheses.scopes(cause)):
                begin = min(scope, default=self.model.depth if last else 0)
                if (number > 0 and len(scope) == 1) == alone and begin < stop:
                    yield scope

        def compute(cause: Cause, scope: tuple[int, ...]) -> list[Tensor] | None:
            rows = hypotheses.logprobs(cause, scope)
            return None if rows is None else _scored(recording, rows)

        def fitted(alone: bool) -> Iterator[Place]:
            for one in QUANTITIES:
                for scope in scopes(one.cause("{}", lambda t: t), alone):
                    for cause in factors(one, "", 1, partial(compute, scope=scope), evidence.found):
                        yield cause, scope

        # Factors in each layer before causes in each layer, which are many more.
        for alone, of_list in ((False, True), (False, False), (True, False), (True, True)):
            if not (of_list or self.general):
                continue
            what = f"{len(self.causes)} causes" if of_list else "factors of every quantity"
            self.echo(f"{side.name}: trying {what} in {'each layer' if alone else 'all layers'}")
            places = list(
                ((one, s) for one in first for s in scopes(one, alone)) if of_list else fitted(alone)
            )
            most = torch.inf if of_list else max(ENOUGH, ROUNDED * before)
            now = evidence.explained(trials(side.name, places, compute))
            found += [(after, one) for after, one in now if after <= most]
            if any(after <= ROUNDED * before for after, _ in found):
                break
        return best(found)

    def _trials_of_mtp(self, name: str, hypotheses: Hypotheses, recording: Recording) -> Iterator[Trial]:
        """MTP's log-probabilities with each cause in all of its layers; `name` of the side."""
        model, numbers = self.model, range(self.model.depth, len(self.model.layers))
        tried: list[Place] = []
        for cause in self.causes:
            layers = tuple(n for n in numbers if cause.kind in (LAYERS, model.layers[n].part))
            if cause.mtp is not None:
                tried.append((cause, tuple(numbers)))
            elif cause.layer is not None and layers and not cause.located and not cause.joined:
                tried.append((cause, layers))

        def compute(cause: Cause, layers: tuple[int, ...]) -> list[Tensor]:
            found = []
            for i, run in enumerate(hypotheses.plain):
                changes = hypotheses.changes(cause, layers, i) or {}
                given = run.streams[model.depth], hypotheses.ids[i][None], changes
                changed = changes or cause.mtp
                rows = model.mtp_logprobs(*given, blocks=cause.mtp) if changed else run.logprobs
                found.append({depth: row.view(-1) for depth, row in rows.items()})
            return _mtp_scored(recording, found)

        return trials(f"{name}, MTP", tried, compute)


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
    found: CauseExplanation, cause: Cause, hypotheses: Hypotheses, recording: Recording, evidence: Evidence
) -> CauseExplanation:
    """Of the sets of layers that begin with those found, that which explains the log-probabilities best."""
    scopes = [s for s in hypotheses.scopes(cause) if s[:1] == found.layers[:1]]
    rows = [(scope, hypotheses.logprobs(cause, scope)) for scope in dict.fromkeys([*scopes, found.layers])]
    sizes = [(evidence.size(_scored(recording, one)), scope) for scope, one in rows if one is not None]
    return replace(found, layers=min(sizes)[1] if sizes else found.layers)
