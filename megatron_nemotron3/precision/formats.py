"""Megatron's low-precision recipes, written once.

| name | elements | scales |
|-|-|-|
| fp8-delayed | E4M3, gradients E5M2 | one for the tensor, from the largest magnitudes of earlier steps |
| fp8-tensorwise | E4M3, gradients E5M2 | one for the tensor, from its own largest magnitude |
| fp8-blockwise | E4M3 | one for 1 x 128 elements, of weights 128 x 128 |
| mxfp8 | E4M3 | a power of two for 32 elements |
| nvfp4 | E2M1 | E4M3 for 16 elements, and one FP32 for the tensor |

Sources: `Fp8Recipe`, `Fp4Recipe`, `get_fp8_align_size` and `get_fp4_align_size` of megatron-core 0.19; the
support checks of Transformer Engine (TE) 2.20 (pytorch/quantization.py) and its documentation of each recipe
("Supported devices", dimensions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_nemotron3.precision.numerics import MXFP8_BLOCK, NVFP4_BLOCK

BF16 = "bf16"
NVFP4, MXFP8 = "nvfp4", "mxfp8"
DELAYED, TENSORWISE, BLOCKWISE = "fp8-delayed", "fp8-tensorwise", "fp8-blockwise"

#: A CUDA compute capability, (9, 0) for Hopper.
Capability = tuple[int, int]


@dataclass(frozen=True)
class Format:
    """A recipe in which Megatron trains quantized linears."""

    #: The value of --precision, and the name in tables and messages.
    name: str
    #: The value of --fp8-recipe or --fp4-recipe.
    recipe: str
    #: The value of --fp8-format or --fp4-format.
    elements: str
    #: Both sizes of a weight, and the rows of its input, are multiples of this.
    multiple: int
    #: TE's documentation names a larger multiple for the same sizes, which its tests do not keep to.
    documented: int
    #: Compute capabilities that TE supports, and whether all later ones work, too.
    capabilities: tuple[Capability, ...]
    later: bool
    #: Bytes of a stored element with its share of the scales.
    stored: float
    #: Whether the first and last layers can stay BF16.
    bf16_layers: bool = True
    #: Whether linears of the torch backend can compute it on any device.
    emulated: bool = False

    @property
    def kind(self) -> str:
        """Units of the GPU and Megatron's family of options: "fp8" or "fp4"."""
        return "fp4" if self.elements == "e2m1" else "fp8"

    @property
    def options(self) -> tuple[tuple[str, tuple[object, ...]], ...]:
        """Megatron's options that turn it on."""
        extra: tuple[tuple[str, tuple[object, ...]], ...] = ()
        if self.name == DELAYED:
            # TE's defaults, and those of NVIDIA's configurations; Megatron's are 1 and most_recent.
            extra = (("--fp8-amax-history-len", (1024,)), ("--fp8-amax-compute-algo", ("max",)))
        return (
            (f"--{self.kind}-format", (self.elements,)),
            (f"--{self.kind}-recipe", (self.recipe,)),
            *extra,
        )

    @property
    def needs(self) -> str:
        """The compute capabilities as text: "10.0 or 10.3", "8.9 or later"."""
        numbers = [capability_text(c) for c in self.capabilities]
        return " or ".join((*numbers, "later") if self.later else numbers)

    def runs_on(self, capability: Capability) -> bool:
        """Whether TE computes it on a GPU of this compute capability."""
        return capability in self.capabilities or (self.later and capability >= self.capabilities[-1])


# TE's code accepts mxfp8 and nvfp4 on every GPU from 10.0 on, but its documentation names these two for
# training. From 12.0 on it refuses MXFP8, and stochastic rounding returned zeros (TE #3281).
_BLACKWELL: tuple[Capability, ...] = ((10, 0), (10, 3))

#: All recipes, those first that a GPU's owner should try first: the least bits, then the published ones.
FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format(NVFP4, "nvfp4", "e2m1", NVFP4_BLOCK, 32, _BLACKWELL, False, 1 / 2 + 1 / 16, emulated=True),
        Format(MXFP8, "mxfp8", "e4m3", MXFP8_BLOCK, 32, _BLACKWELL, False, 1 + 1 / 32, emulated=True),
        Format(TENSORWISE, "tensorwise", "hybrid", 16, 16, ((8, 9),), True, 1.0),
        # On Blackwell TE computes it with MXFP8's units. Scales are FP32.
        Format(BLOCKWISE, "blockwise", "e4m3", 16, 128, ((9, 0),), True, 1 + 4 / 128),
        Format(DELAYED, "delayed", "hybrid", 16, 16, ((8, 9),), True, 1.0, bf16_layers=False),
    )
}
#: Formats that linears of the torch backend can emulate.
EMULATED = tuple(fmt.name for fmt in FORMATS.values() if fmt.emulated)

#: Megatron's recipe where only --fp8-format or --fp4-format is given.
DEFAULT_RECIPES = {"fp8": "delayed", "fp4": "nvfp4"}

_BY_RECIPE = {fmt.recipe: fmt for fmt in FORMATS.values()}


def name_of(recipe: object) -> str:
    """Our name of Megatron's recipe (an enum or text); an unknown one ("custom") keeps its name."""
    text = str(getattr(recipe, "value", recipe))
    return _BY_RECIPE[text].name if text in _BY_RECIPE else text


def requested(value: Callable[[str], str | None]) -> list[str]:
    """Our names of the recipes that options ask for, FP4's last; `value` of an option not given is None."""
    kinds = [kind for kind in DEFAULT_RECIPES if value(f"--{kind}-format") is not None]
    return [name_of(value(f"--{kind}-recipe") or DEFAULT_RECIPES[kind]) for kind in kinds]


def runnable(capability: Capability) -> tuple[str, ...]:
    """Precisions that a GPU of this compute capability can train in, best first, BF16 last."""
    return (*(fmt.name for fmt in FORMATS.values() if fmt.runs_on(capability)), BF16)


def counted(numbers: Mapping[str, int]) -> str:
    """`2 bf16, 40 nvfp4`: how many linears have each format."""
    return ", ".join(f"{number} {fmt}" for fmt, number in sorted(numbers.items()))


def either(names: Sequence[str]) -> str:
    """`a, b or c`, for a message."""
    return " or ".join((*((", ".join(names[:-1]),) if names[1:] else ()), *names[-1:]))


def capability_text(capability: Capability) -> str:
    """`(9, 0)` as "9.0"."""
    return f"{capability[0]}.{capability[1]}"
