"""Activation recomputation: what Megatron's options keep for backward.

none        everything that backward reads is kept
selective   the named modules keep only their input (`--recompute-modules`)
full        each run of layers keeps only its input (`--recompute-method`, `--recompute-num-layers`)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.models import Nemotron3Config

GRANULARITIES = ("none", "selective", "full")
METHODS = ("uniform", "block")

#: Module of `--recompute-modules` -> (layer kind it is part of, backends that support it). Megatron 0.19.2
#: also has `mla_up_proj` and `gdn_norm_out`, which belong to parts that this family lacks. `layernorm` and
#: `moe_act` need Transformer Engine (`launch.rules`); in the torch spec the norms of M, * and - are parts of
#: their linears.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "core_attn": ("*", ("te", "torch")),
    "mlp": ("-", ("te", "torch")),
    "moe": ("E", ("te", "torch")),
    "shared_experts": ("E", ("te", "torch")),
    "moe_act": ("E", ("te",)),
    "layernorm": ("E", ("te",)),
}


@dataclass(frozen=True)
class Recompute:
    """A choice of recomputation, in the terms of Megatron's flags.

    Args:
        modules: with "selective", names of `MODULES`.
        method: with "full": "uniform" cuts a stage's layers into runs of `num_layers` and keeps each run's
            input; "block" does so for the first `num_layers` layers of a stage, one by one, and keeps the
            others whole.
    """

    granularity: str = "none"
    modules: tuple[str, ...] = ()
    method: str = "uniform"
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity={self.granularity!r}: use one of {', '.join(GRANULARITIES)}")
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}: use one of {', '.join(METHODS)}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers}: use 1 or more")
        if unknown := [name for name in self.modules if name not in MODULES]:
            raise ValueError(f"unknown module {unknown[0]!r}: use some of {', '.join(MODULES)}")
        if (self.granularity == "selective") != bool(self.modules):
            raise ValueError(
                f"granularity={self.granularity!r} with modules={self.modules!r}: name modules with "
                "'selective', and only then"
            )

    @staticmethod
    def of(launch: Launch) -> Recompute:
        return _asked(*(launch.options.get(name, default) for name, default in _OPTIONS.items()))

    @property
    def full(self) -> bool:
        return self.granularity == "full"

    def flags(self) -> list[str]:
        if self.granularity == "none":
            return []
        words = ["--recompute-granularity", self.granularity]
        if self.granularity == "selective":
            return [*words, "--recompute-modules", *self.modules]
        return [*words, "--recompute-method", self.method, "--recompute-num-layers", str(self.num_layers)]

    def __str__(self) -> str:
        if self.granularity == "selective":
            return " ".join(self.modules)
        return f"full {self.method} {self.num_layers}" if self.full else "none"


NONE = Recompute()
#: Option -> Megatron's default.
_OPTIONS = {
    "--recompute-granularity": ("none",),
    "--recompute-modules": ("core_attn",),
    "--recompute-method": ("uniform",),
    "--recompute-num-layers": ("1",),
}


@lru_cache(maxsize=256)
def _asked(
    granularity: tuple[str, ...],
    modules: tuple[str, ...],
    method: tuple[str, ...],
    num_layers: tuple[str, ...],
) -> Recompute:
    if granularity[0] == "selective":
        return Recompute(granularity[0], modules)
    return Recompute(granularity[0], method=method[0], num_layers=int(num_layers[0]))


def modules(config: Nemotron3Config, backend: str) -> tuple[str, ...]:
    """The modules of this model that this backend ("te" or "torch") can recompute."""
    kinds = config.pattern + (config.mtp_pattern or "")
    return tuple(name for name, (kind, by) in MODULES.items() if kind in kinds and backend in by)


def runs(pattern: str, recompute: Recompute) -> tuple[tuple[str, ...], str]:
    """Split a stage's layers into (runs that keep only their input, layers that keep everything)."""
    n = recompute.num_layers
    if not recompute.full:
        return (), pattern
    if recompute.method == "uniform":
        return tuple(pattern[i : i + n] for i in range(0, len(pattern), n)), ""
    return tuple(pattern[:n]), pattern[n:]
