"""Whether and how NVFP4 or MXFP8 is emulated, and whether errors are logged.

NEMOTRON3_EMULATE, NEMOTRON3_LOG_PRECISION and NEMOTRON3_GPU_KERNELS (docs/environment.md) are each read once
by a process. Callers inside it use `emulating`, `logging_precision` and `gpu_kernels` instead. Linears take
the first two settings when they are built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_nemotron3.common.switches import EMULATE, GPU_KERNELS, LOG_PRECISION, EnvironmentSetting
from megatron_nemotron3.precision.formats import EMULATED, NVFP4
from megatron_nemotron3.precision.serving import PACKED_KINDS, RECIPES, named_recipe

#: Option of `nemotron3 run` with a value of the variable. It may stand among the script's own options.
OPTION = "--nemotron3-emulate"
#: Default number of iterations from one measurement to the next (cost: docs/nvfp4.md).
LOG_DEFAULT = 100
#: Switch in the variable -> (field of `Emulation`, how a run with it deviates from the published recipe).
SWITCHES = {
    "rht": ("hadamard", "no random Hadamard transform"),
    "sr": ("stochastic", "gradients rounded to nearest"),
    "2d": ("tile", "a scale for 1 x 16 weights"),
    "fprop": ("fprop", "forward not quantized"),
    "dgrad": ("dgrad", "gradient of the input not quantized"),
    "wgrad": ("wgrad", "gradient of the weight not quantized"),
    "every_layer": ("every_layer", "every linear of every layer"),
    "4over6": ("four_over_six", "four-over-six scales of weights"),
}
#: Switches that MXFP8 has, too.
_COMMON = ("fprop", "dgrad", "wgrad", "every_layer")


@dataclass(frozen=True)
class Emulation:
    """What emulation computes; the defaults are the published recipe.

    Args:
        hadamard, stochastic: rotate both operands of wgrad, round gradients stochastically (NVFP4).
        tile: scale weights by 16 x 16 tiles (NVFP4); otherwise by 1 x 16, and anew for dgrad.
        fprop, dgrad, wgrad: quantize the operands of this matmul.
        every_layer: the format in every linear of every layer, without precision file and BF16 layers.
        four_over_six: scale blocks of weights to 4 where that is closer than to 6 (NVFP4).
        packed: a recipe of `serving.named_recipe`, alone: products take the weights that the converter packs,
            everything else is as in a plain run.
    """

    hadamard: bool = True
    stochastic: bool = True
    tile: bool = True
    fprop: bool = True
    dgrad: bool = True
    wgrad: bool = True
    every_layer: bool = False
    four_over_six: bool = False
    format: str = NVFP4
    packed: str = ""

    def __post_init__(self) -> None:
        if self.packed and (name := self.packed.partition(",")[0]) not in PACKED_KINDS:
            what = "has no NVFP4, or an output head in it" if name in RECIPES else "is unknown"
            raise ValueError(f"recipe {self.packed!r} {what}: use one of {', '.join(PACKED_KINDS)}")
        if self.packed and replace(self, packed="") != Emulation():
            raise ValueError(f"recipe {self.packed!r} has no such switch: products are those of a plain run")
        if self.format not in EMULATED:
            raise ValueError(f"{self.format!r} is not emulated: use {' or '.join(EMULATED)}")
        if not (self.fprop or self.dgrad or self.wgrad):
            raise ValueError(
                "fprop=0, dgrad=0 and wgrad=0 leave no matmul to quantize, which is a plain run: keep one of "
                "the three, or turn emulation off"
            )

    def text(self) -> str:
        """The value of NEMOTRON3_EMULATE with this meaning."""
        return self.packed or ",".join((self.format, *self.switched()))

    def switched(self) -> dict[str, str]:
        """The switches in text ("sr=0") that differ from the published recipe -> how a run deviates."""
        default = Emulation()
        return {
            f"{name}={int(getattr(self, field))}": deviation
            for name, (field, deviation) in SWITCHES.items()
            if getattr(self, field) != getattr(default, field)
        }


def parse_emulation(text: str) -> Emulation | None:
    """Parse a value of NEMOTRON3_EMULATE; None for off.

    Raises:
        ValueError: an unknown format or switch, a switch given twice, a value other than 0 and 1, or no
            matmul is left to quantize.
    """
    first, *rest = (part.strip() for part in text.split(","))
    if first in ("", "0") and not rest:
        return None
    if first not in (*EMULATED, *RECIPES):
        raise ValueError(
            f"{EMULATE}={text!r}: {first!r} is not emulated: start with {', '.join(EMULATED)}, a recipe of "
            f"packed weights ({', '.join(PACKED_KINDS)}), or 0 for off"
        )
    known = tuple(SWITCHES) if first == NVFP4 else _COMMON
    chosen: dict[str, Any] = {}
    for part in () if first in RECIPES else rest:
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"{EMULATE}={text!r}: {name!r} is no switch of {first}: use {', '.join(known)}")
        if value not in ("0", "1"):
            raise ValueError(f"{EMULATE}={text!r}: {part!r}: give {name}=0 or {name}=1")
        field, _ = SWITCHES[name]
        if field in chosen:
            raise ValueError(f"{EMULATE}={text!r}: {name} is given twice")
        chosen[field] = value == "1"
    try:
        if first in RECIPES:
            return Emulation(packed=named_recipe(",".join((first, *rest)))[0])
        return Emulation(**chosen, format=first)
    except ValueError as problem:
        raise ValueError(f"{EMULATE}={text!r}: {problem}") from None


_EMULATION = EnvironmentSetting(EMULATE, parse_emulation)
#: Context manager: linears built inside it emulate this `Emulation`; None for plain linears.
emulating = _EMULATION.using
#: `Emulation` of linears that are built now, or None: from `emulating`, else NEMOTRON3_EMULATE.
current = _EMULATION.current
#: Value of NEMOTRON3_EMULATE as it is now, for entry points. Raises ValueError as `parse_emulation` does.
emulation_in_environment = _EMULATION.read


@dataclass(frozen=True)
class Logging:
    """Interval in iterations between measurements, and the folder of `precision.csv`."""

    interval: int
    folder: str = "."

    def text(self) -> str:
        """The value of NEMOTRON3_LOG_PRECISION with this meaning."""
        return f"{self.interval}:{self.folder}"


def parse_logging(text: str) -> Logging | None:
    """Parse a value of NEMOTRON3_LOG_PRECISION; None for off."""
    interval, colon, folder = text.partition(":")
    if text in ("", "0"):
        return None
    if not (interval.isascii() and interval.isdigit() and int(interval)) or (colon and not folder):
        raise ValueError(
            f"{LOG_PRECISION}={text!r}: give an interval of 1 or more iterations, then optionally a folder, "
            f"as in {LOG_DEFAULT} or {LOG_DEFAULT}:runs/mine; 0 is off"
        )
    return Logging(int(interval), folder or ".")


_LOGGING = EnvironmentSetting(LOG_PRECISION, parse_logging)
#: Context manager: quantization errors of linears built inside it are logged with this `Logging`; None: not.
logging_precision = _LOGGING.using
#: `Logging` of linears that are built now, or None: from `logging_precision`, else NEMOTRON3_LOG_PRECISION.
current_logging = _LOGGING.current
#: Value of NEMOTRON3_LOG_PRECISION as it is now, for entry points. Raises ValueError as `parse_logging` does.
logging_in_environment = _LOGGING.read


_GPU_KERNELS: EnvironmentSetting[bool | None] = EnvironmentSetting(GPU_KERNELS, {"1": True, "0": False}.get)
#: Context manager: inside it the torch backend uses our CUDA kernels (True), those of libraries alone (None),
#: or not even torch's own that compute all experts or documents in one launch (False).
#:
#: Our kernels are the compiled quantizers of emulated training, and its products of experts in Triton. They
#: are off by default until their tests (`pytest -m gpu`) have run on a GPU.
gpu_kernels = _GPU_KERNELS.using


def gpu_kernels_enabled() -> bool:
    """Whether our CUDA kernels are used now: from `gpu_kernels`, else NEMOTRON3_GPU_KERNELS=1."""
    return _GPU_KERNELS.current() is True


def library_kernels_enabled() -> bool:
    """Whether kernels of torch, mamba-ssm and causal-conv1d are used: unless NEMOTRON3_GPU_KERNELS=0."""
    return _GPU_KERNELS.current() is not False
