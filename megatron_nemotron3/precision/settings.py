"""Whether and how NVFP4 is emulated. Standard library only.

This is the one place that reads the environment variable:

    NEMOTRON3_EMULATE=nvfp4                  the published recipe
    NEMOTRON3_EMULATE=nvfp4,rht=0,sr=0       without single ingredients
    NEMOTRON3_EMULATE=nvfp4,every_layer=1    no precision file, no BF16 layers
    NEMOTRON3_EMULATE=0, or not set          off
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "NEMOTRON3_EMULATE"
FORMAT = "nvfp4"
#: Name in the variable -> field of `Emulation`.
SWITCHES = {
    "rht": "hadamard",
    "sr": "stochastic",
    "2d": "tile",
    "fprop": "fprop",
    "dgrad": "dgrad",
    "wgrad": "wgrad",
    "every_layer": "every_layer",
}


@dataclass(frozen=True)
class Emulation:
    """What is emulated; the defaults are the published recipe.

    hadamard: rotate both operands of wgrad (NVFP4).
    stochastic: round gradients stochastically (NVFP4).
    tile: scale weights by 16 x 16 tiles; without, by 1 x 16 and anew for dgrad (NVFP4).
    fprop, dgrad, wgrad: quantize the operands of this product.
    every_layer: NVFP4 in every linear that Megatron would give it to without precision file and BF16 layers.
    """

    hadamard: bool = True
    stochastic: bool = True
    tile: bool = True
    fprop: bool = True
    dgrad: bool = True
    wgrad: bool = True
    every_layer: bool = False

    def text(self) -> str:
        """The value of NEMOTRON3_EMULATE that means this."""
        default = Emulation()
        changed = [
            f"{name}={int(getattr(self, field))}"
            for name, field in SWITCHES.items()
            if getattr(self, field) != getattr(default, field)
        ]
        return ",".join((FORMAT, *changed))


def parse(text: str) -> Emulation | None:
    """The meaning of a value of NEMOTRON3_EMULATE; None: off.

    Raises:
        ValueError: an unknown format or switch, a switch given twice, or a value other than 0 and 1.
    """
    first, *rest = (part.strip() for part in text.split(","))
    if first in ("", "0") and not rest:
        return None
    if first != FORMAT:
        raise ValueError(f"{VARIABLE}={text!r}: {first!r} is not emulated: start with {FORMAT}, or 0 for off")
    chosen: dict[str, bool] = {}
    for part in rest:
        name, _, value = part.partition("=")
        if name not in SWITCHES:
            raise ValueError(f"{VARIABLE}={text!r}: {name!r} is no switch: use {', '.join(SWITCHES)}")
        if value not in ("0", "1"):
            raise ValueError(f"{VARIABLE}={text!r}: {part!r}: give {name}=0 or {name}=1")
        if SWITCHES[name] in chosen:
            raise ValueError(f"{VARIABLE}={text!r}: {name} is given twice")
        chosen[SWITCHES[name]] = value == "1"
    return Emulation(**chosen)


def emulation() -> Emulation | None:
    """What NEMOTRON3_EMULATE of this process says; None: nothing is emulated.

    Raises:
        ValueError: as `parse`.
    """
    return parse(os.environ.get(VARIABLE, ""))
