"""What MTP heads are trained for.

    NEMOTRON3_BOOST="loss=kl,temperature=2,mix=1" nemotron3 run SCRIPT …

The number of recursive steps is that of the model's MTP depths (`--mtp-num-layers`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from megatron_nemotron3.common.parser import option_value
from megatron_nemotron3.common.switches import BOOST, DISTILL, LORA, EnvironmentSetting
from megatron_nemotron3.models.lora import assignments

#: Where a checkpoint's stored arguments keep `Boost.text()`.
ARGUMENT = "nemotron3_boost"
#: Loss -> what it is, per token of the text and MTP depth.
LOSSES = {
    "kl": "KL divergence of MTP from the model's own next-token distribution",
    "tv": "total variation between the two, which is 1 - the probability that a sampled draft is accepted",
    "ce": "cross-entropy with the text's token",
}
_WITH_TEACHER = (
    "MTP's heads are trained on what the model itself predicts, not on a teacher: leave one of them out"
)


@dataclass(frozen=True)
class Boost:
    """How the heads are trained.

    Args:
        loss: of `LOSSES`.
        temperature: of both distributions in the loss (kl, tv). The loss is multiplied by its square.
        mix: share of the tokens whose hidden state, which MTP depth k > 1 is given, is drawn from all depths
            (hidden-state mixing); the others are given that of depth k - 1, as in generation.
        decay: weight of each depth in terms of the one before; the weights add up to 1.
        seed: of the mixing.

    Raises:
        ValueError: a number is out of range, or there is no such loss.
    """

    loss: str = "kl"
    temperature: float = 1.0
    mix: float = 0.0
    decay: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss}: use {', '.join(LOSSES)}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature:g}: give more than 0")
        if self.loss == "ce" and self.temperature != 1:
            raise ValueError(f"loss=ce has no temperature: drop temperature={self.temperature:g}")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix={self.mix:g}: give 0 to 1, the share of tokens that are mixed")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay:g}: give more than 0, at most 1")

    @classmethod
    def parse(cls, text: str) -> Boost:
        """Parse "loss=kl,temperature=2,mix=1"; what is left out keeps its default, and "1" is all defaults.

        Raises:
            ValueError: the text is malformed; or as the constructor.
        """
        kinds = {one.name: type(getattr(cls, one.name)) for one in fields(cls)}
        known = ", ".join(f"{name}=" for name in kinds)
        given = "" if text.strip() == "1" else text
        return cls(**assignments(given, kinds, f"{known} with a value"))

    def text(self) -> str:
        """Return the settings as `parse` reads them."""
        return ",".join(f"{one.name}={getattr(self, one.name)}" for one in fields(self))

    def weights(self, depths: int) -> list[float]:
        """Weight of the loss of each depth."""
        raw = [self.decay**depth for depth in range(depths)]
        return [one / sum(raw) for one in raw]


def _parse(text: str) -> Boost | None:
    try:
        return Boost.parse(text) if text else None
    except ValueError as problem:
        raise ValueError(f"{BOOST}: {problem}") from None


#: The value of NEMOTRON3_BOOST; None: an ordinary training. Raises ValueError if it is malformed.
in_environment = EnvironmentSetting(BOOST, _parse).read


def requested(
    words: Sequence[str], environment: Mapping[str, str] = os.environ, *, distilled: bool = False
) -> Boost | None:
    """Return the training of heads that NEMOTRON3_BOOST requests, or None.

    Raises ValueError if a run with Megatron's arguments `words` cannot train them.
    """
    boost = in_environment(environment)
    if boost is not None:
        try:
            if distilled:
                raise ValueError(_WITH_TEACHER)
            require_trainable(words, environment)
        except ValueError as problem:
            raise ValueError(f"{BOOST}: {problem}") from None
    return boost


def require_trainable(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if a run with Megatron's arguments `words` cannot train the heads."""
    if environment.get(DISTILL) not in (None, "", "0"):
        raise ValueError(f"{DISTILL} is set, too, but {_WITH_TEACHER}")
    if environment.get(LORA):
        raise ValueError(f"{LORA} is set, too, but only MTP's own weights are trained: unset one of them")
    if "/" not in (option_value(words, "--hybrid-layer-pattern") or ""):
        raise ValueError(
            "the model has no MTP block to train: give --hybrid-layer-pattern one (…/*E) with "
            "--mtp-num-layers; where the checkpoint has none, add --dist-ckpt-strictness log_unexpected, and "
            "it begins with random weights"
        )
    if (cp := option_value(words, "--context-parallel-size")) not in (None, "1"):
        raise ValueError(
            f"--context-parallel-size {cp}: a later token's distribution would be another rank's; use 1"
        )
