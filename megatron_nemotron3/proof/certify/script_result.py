"""What a run of a launch's script showed, and its comparison with one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from megatron_nemotron3.proof.certify import observer
from megatron_nemotron3.proof.certify.bench import Finding, failed
from megatron_nemotron3.proof.certify.compare import equal, farthest, spread, verdict
from megatron_nemotron3.proof.certify.tensors import Tensors, unmatched
from megatron_nemotron3.train.log import Curve

R = TypeVar("R")
#: Norms are printed with three decimals.
_NORM = 1e-3


@dataclass(frozen=True)
class ScriptResult:
    """A run that came to its end, or was killed as planned."""

    seen: observer.Observed
    curve: Curve

    def weights(self, step: int) -> Tensors:
        return {k: t for k, t in self.seen[step, observer.WEIGHTS].items() if not _is_bias(k)}

    def biases(self, step: int) -> Tensors:
        return {k: t for k, t in self.seen[step, observer.WEIGHTS].items() if _is_bias(k)}

    def gradients(self, step: int) -> Tensors:
        """What the optimizer got, clipped."""
        return self.seen[step, observer.GRADIENTS]

    def state(self, step: int) -> dict[str, Tensors]:
        """What the optimizer keeps of each parameter after a step."""
        known = (observer.GRADIENTS, observer.WEIGHTS, observer.MODEL)
        kinds = {kind for s, kind in self.seen if s == step and not kind.startswith(observer.BEFORE)}
        return {kind: self.seen[step, kind] for kind in kinds.difference(known)}

    @property
    def loaded(self) -> dict[str, Tensors]:
        before = observer.BEFORE
        return {k.removeprefix(before): t for (_, k), t in self.seen.items() if k.startswith(before)}


def _is_bias(key: str) -> bool:
    return key.endswith("expert_bias")


@dataclass(frozen=True)
class NoiseComparison(Generic[R]):
    """Compares a run with one process, by the noise of the one process with nudged weights."""

    #: One process, then the nudged ones: what `of` takes, results of runs or their names.
    bases: Sequence[R]
    #: Length of the longest sum: tokens of the batch.
    terms: int

    def __call__(
        self,
        what: str,
        found: R,
        where: str,
        of: Callable[[R], Tensors],
        least: float = 0.0,
        detail: str = "",
    ) -> Finding:
        expected, *moved = map(of, self.bases)
        if odd := unmatched(expected, of(found)):
            return failed(what, where, odd)
        allowed = spread(expected, moved, self.terms, least)
        return verdict(farthest(what, expected, of(found), allowed), where, detail)


def run_findings(
    compared: NoiseComparison, base: ScriptResult, found: ScriptResult, where: str
) -> Iterator[Finding]:
    """Hold a run of two steps against one process."""
    yield compared("losses (script)", found, where, partial(logged, "lm loss"))
    for what, names, least in (
        ("losses of MTP", r"mtp_\d+ loss", 0.0),
        ("losses of routers", r"\w+_loss", 0.0),
        ("parameter norms", "params norm", _NORM),
    ):
        if any(re.fullmatch(names, name) for name in base.curve.steps[1].values):
            yield compared(f"{what} (script)", found, where, partial(logged, names), least)
    if set(base.curve.validation) & set(found.curve.validation):
        yield compared("validation loss (script)", found, where, evaluated)
    yield compared("gradient norms (script)", found, where, partial(logged, "grad norm"), _NORM)
    yield compared("learning rates (script)", found, where, partial(logged, "learning rate"))
    for step in (1, 2):
        yield compared(
            f"gradients of step {step} (script)", found, where, partial(ScriptResult.gradients, step=step)
        )
    yield compared("weights after two steps (script)", found, where, partial(ScriptResult.weights, step=2))
    yield equal("expert biases (script)", base.biases(2), found.biases(2), where)


def logged(pattern: str, ran: ScriptResult) -> Tensors:
    """Return the numbers of a run's log whose names match, of each step."""
    return {
        f"{name}, step {number}": torch.tensor(value, dtype=torch.float64)
        for number, step in sorted(ran.curve.steps.items())
        for name, value in step.values.items()
        if re.fullmatch(pattern, name)
    }


def evaluated(ran: ScriptResult) -> Tensors:
    """Return the validation loss after the second step."""
    return {"validation loss, step 2": torch.tensor(ran.curve.validation[2], dtype=torch.float64)}
