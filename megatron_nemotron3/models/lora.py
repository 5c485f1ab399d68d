"""Settings of LoRA: which linears, at what rank. The modules are in `layers.lora`.

    NEMOTRON3_LORA="base=BASE_DIR,dim=16,alpha=32,targets=linear_qkv+linear_proj" nemotron3 run SCRIPT …

Names of targets and parameters are those of Megatron-Bridge's LoRA, so checkpoints of adapters are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.common.switches import LORA, EnvironmentSetting

#: Linears that can have an adapter, by the last part of their name.
LINEARS = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"),
    *("fc1_latent_proj", "fc2_latent_proj", "eh_proj"),
)
#: Bridge's default and `in_proj`. `out_proj` is left out because peft refuses it for this family.
DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj")
#: Largest rank: no matrix of the family has a larger one.
MAX_RANK = 1 << 16
#: Where a checkpoint's stored arguments keep `LoRASettings.text()`.
ARGUMENT = "nemotron3_lora"


def assignments(text: str, kinds: Mapping[str, Callable[[str], Any]], expected: str) -> dict[str, Any]:
    """Parse "dim=16,alpha=32" by `kinds`; a word is one of `expected`, else ValueError."""
    found: dict[str, Any] = {}
    for word in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = word.partition("=")
        try:
            if not equals or name in found:
                raise ValueError
            found[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise ValueError(f"{text!r}: {word!r} is not one of {expected}, each at most once") from None
    return found


@dataclass(frozen=True)
class LoRASettings:
    """y = W x + alpha / dim * B (A x), with W frozen.

    Args:
        targets: last parts of names ("linear_qkv"), or whole names with * for any text
            ("*.layers.0.*.in_proj"; layers count from 0 over all stages).
        dim: rank of the product: A is [dim, input], B is [output, dim].
        alpha: the scale is alpha / dim.
        seed: of A's first values, which do not depend on the parallel layout. B begins at zero.
        base: Megatron checkpoint (torch_dist) whose weights are adapted. It is read when the model is built,
            so a run begins without --load. None: the weights are loaded otherwise.
    """

    targets: tuple[str, ...] = DEFAULT_TARGETS
    dim: int = 32
    alpha: float = 32
    seed: int = 1234
    base: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.dim <= MAX_RANK or not 0 < self.alpha < float("inf"):
            raise ValueError(
                f"LoRA with dim={self.dim}, alpha={self.alpha}: both must be greater than 0, and dim at most "
                f"{MAX_RANK:,}"
            )
        if not self.targets:
            raise ValueError(f"LoRA without targets: give some of {', '.join(LINEARS)}")
        for target in self.targets:
            last = target.rpartition(".")[2]
            if not any(_matches(last, linear) for linear in LINEARS):
                raise ValueError(f"LoRA target {target!r}: give some of {', '.join(LINEARS)}")

    @classmethod
    def parse(cls, text: str) -> LoRASettings:
        """Parse "dim=16,alpha=32,targets=linear_qkv+linear_proj"; what is left out keeps its default."""
        kinds: dict[str, Callable[[str], Any]] = {"dim": int, "alpha": float, "seed": int, "base": str}
        kinds["targets"] = lambda names: tuple(names.split("+"))
        try:
            values = assignments(text, kinds, "dim=N, alpha=N, seed=N, base=DIR and targets=NAME+NAME")
        except ValueError as problem:
            raise ValueError(f"LoRA settings {problem}") from None
        return cls(**values)

    def text(self) -> str:
        """The settings in the form that `parse` reads, without `base`."""
        return f"dim={self.dim},alpha={self.alpha:g},seed={self.seed},targets={'+'.join(self.targets)}"

    def require_expert_tp(self, size: int) -> None:
        """Raise ValueError unless as many expert-tensor-parallel ranks can divide `dim`, as they must."""
        if self.dim % size:
            raise ValueError(
                f"LoRA dim={self.dim} is not divisible by ETP={size}, which splits experts' adapters: give a "
                f"multiple of {size}, another ETP, or targets without linear_fc1 and linear_fc2"
            )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.dim

    def matches(self, name: str) -> bool:
        """Whether a linear of this name, "decoder.layers.0.mixer.in_proj", gets an adapter."""
        last = name.rpartition(".")[2]
        return last in LINEARS and any(target == last or _matches(target, name) for target in self.targets)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def _parse(text: str) -> LoRASettings | None:
    try:
        return LoRASettings.parse("" if text == "1" else text) if text else None
    except ValueError as problem:
        raise ValueError(f"{LORA}: {problem}") from None


_LORA = EnvironmentSetting(LORA, _parse, once=False)
#: Settings in NEMOTRON3_LORA; None: no LoRA. Raises ValueError if it is malformed.
in_environment = _LORA.read
#: Settings for models that are built now: of `adding_lora`, else of the environment.
current = _LORA.current
#: Context manager: adds adapters to the models that are built inside; None: to none of them.
adding_lora = _LORA.using
