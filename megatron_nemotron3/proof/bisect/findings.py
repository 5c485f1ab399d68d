"""What was found of two systems: the data, and the words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

#: A system deviates where a quantile is this many times that of noise; correct ones stay near 1.
LIMIT = 2.0
KIND_NAMES = {"M": "Mamba", "*": "attention", "E": "experts", "-": "MLP"}


@dataclass(frozen=True)
class CauseExplanation:
    """A cause that explains a system.

    Attributes:
        cause: what the system computes with.
        layers: where; empty outside the layers.
        before, after: difference from the checkpoint without and with it, in units of noise.
    """

    cause: str
    layers: tuple[int, ...]
    before: float
    after: float


@dataclass
class Side:
    """What was found of one system.

    Attributes:
        name: "trainer" or "engine".
        system, dtype: as recorded.
        noise: its distance from the checkpoint in units of noise; of its MTP, too.
        typical, largest: median and largest difference of a log-probability.
        none: log-probabilities that are no finite numbers.
        deviates: whether it does; mtp_only: in the log-probabilities of MTP alone.
        position: sequence and token, from 0, of the first token that stands out.
        layer: the first layer that deviates, from 0; the number of layers: what follows them. `exactly`: seen
            in hidden states.
        routed: the first layer whose router selects other experts than rounding explains.
        entering: what enters the first layer may be wrong instead.
        experts: the tokens that deviate in the first layer are those that selected one of these.
        rest: where the log-probabilities lie with the first explanation, if that leaves another fault.
        explanations: the best cause first, then those that explain it as well.
        known: without one, what is known of the deviation. searched: whether one was looked for.
    """

    name: str
    system: str
    dtype: str
    noise: float = 0.0
    mtp_noise: float = 0.0
    typical: float = 0.0
    largest: float = 0.0
    tokens: int = 0
    none: int = 0
    deviates: bool = False
    mtp_only: bool = False
    position: tuple[int, int] | None = None
    layer: int | None = None
    exactly: bool = False
    routed: int | None = None
    entering: bool = False
    experts: tuple[int, ...] = ()
    rest: float = 0.0
    explanations: list[CauseExplanation] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    searched: bool = True

    @property
    def cause(self) -> str | None:
        return self.explanations[0].cause if self.explanations else None


@dataclass
class Diagnosis:
    """What was found of both."""

    trainer: Side
    engine: Side
    pattern: str

    @property
    def deviating(self) -> list[str]:
        return [side.name for side in (self.trainer, self.engine) if side.deviates]

    @property
    def exit_status(self) -> int:
        """0: both agree with the checkpoint; 1: one or both deviate."""
        return 1 if self.deviating else 0

    def as_json(self) -> dict[str, Any]:
        sides = {side.name: asdict(side) | {"cause": side.cause} for side in (self.trainer, self.engine)}
        return {"deviates": self.deviating, "pattern": self.pattern, **sides}

    def lines(self) -> list[str]:
        result = [line for side in (self.trainer, self.engine) for line in self._side(side)]
        if not self.deviating:
            result.append("neither deviates: what they differ by is rounding and ties of routers")
        elif len(self.deviating) == 2:
            result.append("both deviate from the checkpoint: is it the one that they ran?")
        return result

    def _side(self, side: Side) -> Iterator[str]:
        word = "deviates" if side.deviates else "agrees with the checkpoint"
        yield (
            f"{side.name} ({side.system}, {side.dtype}) {word}: {side.tokens} log-probabilities, median "
            f"difference {side.typical:.2g}, largest {side.largest:.2g}; {side.noise:.2g} times the noise of "
            f"{side.dtype} (limit {LIMIT:g})"
        )
        if not side.deviates:
            return
        if side.none:
            yield (
                f"  {side.none} log-probabilities are no finite numbers, so no cause was tried on them; a "
                "filter of the sampler, such as top-k, leaves -inf: record those before it"
            )
        if side.mtp_only:
            yield f"  only in MTP: {side.mtp_noise:.2g} times the noise"
        if side.position is not None:
            yield f"  from token {side.position[1]} of sequence {side.position[0]} on"
        if side.layer is not None:
            how = "seen in hidden states" if side.exactly else "where the cause begins"
            other = ", or the tokens and embeddings that enter it" if side.entering else ""
            yield f"  first layer: {self._place(side.layer)}{other} ({how})"
        if side.experts:
            numbers = " or ".join(map(str, side.experts))
            yield f"  the tokens that deviate are those that selected expert {numbers}"
        if side.routed is not None:
            yield f"  routers select other experts from layer {side.routed} on"
        for number, found in enumerate(side.explanations):
            where = f"in {self._places(found.layers)}" if found.layers else "outside the layers"
            yield (
                f"  {'it computes with' if not number else 'or with'}: {found.cause}, {where}; "
                f"recomputed so, {found.after:.2g} times the noise remains of {found.before:.2g}"
            )
        if side.rest:
            yield f"  there is another fault: with this cause alone, {side.rest:.2g} times the noise remains"
        if not side.explanations:
            seen = side.exactly or side.mtp_only or side.none
            cure = "" if seen else "; record hidden states to find the layer"
            what = (
                "unknown cause: none of the hypotheses explains it" if side.searched else "no cause was tried"
            )
            yield f"  {what}{cure}"
            yield from (f"    {line}" for line in side.known)

    def _place(self, layer: int) -> str:
        if layer >= len(self.pattern):
            return "after the last layer"
        return f"layer {layer} ({KIND_NAMES[self.pattern[layer]]})"

    def _places(self, layers: tuple[int, ...]) -> str:
        if len(layers) == 1:
            return self._place(layers[0])
        kinds = {self.pattern[n] for n in layers if n < len(self.pattern)}
        if len(layers) == len(self.pattern):
            return "all layers"
        return f"all {' and '.join(KIND_NAMES[k] for k in sorted(kinds))} layers" if kinds else "MTP"
