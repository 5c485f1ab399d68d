"""Environment variables of TransformerEngine (TE) that change a format's recipe. Standard library only.

TE reads most of them when `transformer_engine.common.recipe` is imported, and prints none. Megatron creates
its recipes without arguments (`fp4_utils.get_fp4_recipe`, `fp8_utils.get_fp8_recipe`), so the variables
decide. Linears that emulate a format do not read them: NEMOTRON3_EMULATE has switches of its own.

Source: transformer_engine/common/recipe/__init__.py, transformer_engine/pytorch/csrc and docs/envvars.rst in
every release from 2.7 to 2.18, and on main (2.20.0.dev0).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from megatron_nemotron3.precision.formats import BLOCKWISE, MXFP8, NVFP4, TENSORWISE

_SCOPES = ("weights", "activations", "all")


@dataclass(frozen=True)
class Variable:
    """A variable and what it changes."""

    name: str
    #: First release of TE that reads it.
    since: tuple[int, int]
    #: Formats whose recipe it changes.
    formats: tuple[str, ...]
    #: Values that change the recipe.
    changing: tuple[str, ...]
    #: What the recipe then is, and what the published one is.
    effect: str
    #: Values that TE takes for the default.
    neutral: tuple[str, ...] = ("0",)
    #: Whether TE raises on other values, instead of ignoring them.
    strict: bool = False
    #: The switch of NEMOTRON3_EMULATE that does the same to emulated linears; "" if there is none.
    switch: str = ""


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "NVTE_NVFP4_DISABLE_RHT",
        (2, 8),
        (NVFP4,),
        ("1",),
        "no random Hadamard transform; published: on both operands of the weight gradient",
        switch="rht=0",
    ),
    Variable(
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        (2, 8),
        (NVFP4,),
        ("1",),
        "gradients are rounded to nearest; published: stochastically",
        switch="sr=0",
    ),
    Variable(
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        (2, 8),
        (NVFP4,),
        ("1",),
        "weights have a scale for 1 x 16 elements; published: for 16 x 16",
        switch="2d=0",
    ),
    Variable(
        "NVTE_BACKWARD_OVERRIDE",
        (2, 15),
        (NVFP4, MXFP8, TENSORWISE, BLOCKWISE),
        ("high_precision", "dequantized"),
        "backward computes in high precision; published: in the format of forward",
        neutral=(),
        strict=True,
    ),
    Variable(
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
        (2, 16),
        (NVFP4,),
        ("1",),
        "activations have an FP32 scale for each row; published: one for the tensor",
    ),
    Variable(
        "NVTE_NVFP4_4OVER6",
        (2, 17),
        (NVFP4,),
        _SCOPES,
        "blocks map to 4 or to 6, whichever errs less; published: to 6",
        neutral=("none",),
        strict=True,
    ),
    Variable(
        "NVTE_NVFP4_4OVER6_E4M3_USE_256",
        (2, 17),
        (NVFP4,),
        ("none", "weights", "activations"),
        "other bound of the scales of 4over6 than TE's 256",
        neutral=("all",),
        strict=True,
    ),
    Variable(
        "NVTE_NVFP4_4OVER6_ERR_MODE",
        (2, 17),
        (NVFP4,),
        ("MSE", "mse"),
        "4over6 compares squared errors instead of absolute ones",
        neutral=("MAE", "mae"),
        strict=True,
    ),
    Variable(
        "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
        (2, 17),
        (NVFP4,),
        ("1",),
        "4over6 compares errors of products that were rounded to FP16",
        strict=True,
    ),
    Variable(
        "NVTE_USE_FAST_MATH",
        (2, 12),
        (NVFP4,),
        ("1",),
        "approximate reciprocals, and rotated values are not rounded to BF16 first; the published recipe is "
        "exact, NVIDIA's performance configuration of Super sets it",
        strict=True,
    ),
    Variable(
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        (2, 8),
        (TENSORWISE,),
        ("1",),
        "scales are powers of two; TE's default: FP32 scales",
    ),
    Variable(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        (2, 3),
        (BLOCKWISE,),
        ("1",),
        "scales are FP32; TE's default: powers of two",
    ),
)
#: Variables without effect unless NVTE_NVFP4_4OVER6 is on.
_OF_4OVER6 = "NVTE_NVFP4_4OVER6"


@dataclass(frozen=True)
class Remark:
    """What a variable of the environment does, in one line."""

    name: str
    value: str
    text: str
    #: Whether the recipe is another one than the published; False if the variable is without effect.
    deviates: bool
    #: Whether TE fails on it.
    fails: bool = False

    def line(self) -> str:
        """A line for a log."""
        warning = "warning: " if self.deviates or self.fails else ""
        return f"{warning}{self.name}={self.value}: {self.text}"


def te_version() -> tuple[int, ...] | None:
    """Version of the installed TransformerEngine; None if there is none. Does not import it."""
    try:
        text = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdecimal())


def remarks(
    formats: Collection[str] | None = None,
    environment: Mapping[str, str] | None = None,
    version: tuple[int, ...] | None = None,
    *,
    emulated: bool = False,
) -> list[Remark]:
    """What TE's variables do to the recipes of some formats, for each variable that is set.

    Args:
        formats: those of the run; None for all.
        environment: None for that of this process.
        version: of TransformerEngine; None: any.
        emulated: the linears emulate their format, so that TE's variables do not apply.
    """
    environment = os.environ if environment is None else environment
    return [
        _remark(variable, environment, version, emulated)
        for variable in VARIABLES
        if environment.get(variable.name) is not None
        and (formats is None or set(formats) & set(variable.formats))
        and environment[variable.name] not in variable.neutral
    ]


def _remark(
    variable: Variable, environment: Mapping[str, str], version: tuple[int, ...] | None, emulated: bool
) -> Remark:
    name, value = variable.name, environment[variable.name]
    since = ".".join(map(str, variable.since))
    if emulated:
        cure = f"; NEMOTRON3_EMULATE=nvfp4,{variable.switch} does" if variable.switch else ""
        return Remark(name, value, f"does not change emulated linears{cure}", False)
    if version is not None and version < variable.since:
        return Remark(name, value, f"ignored: TransformerEngine reads it from {since} on", False)
    if value not in variable.changing:
        known = ", ".join((*variable.changing, *variable.neutral))
        if variable.strict and (value or variable.neutral != ("0",)):  # TE takes an empty number for 0
            return Remark(
                name, value, f"TransformerEngine raises on it: unset it or use {known}", False, True
            )
        return Remark(name, value, f"ignored: TransformerEngine reads only {variable.changing[0]}", False)
    scope = environment.get(_OF_4OVER6, "none")
    if name.startswith(_OF_4OVER6 + "_") and scope not in _SCOPES:
        return Remark(name, value, f"no effect without {_OF_4OVER6}", False)
    if name == _OF_4OVER6 and value != "weights" and environment.get("NVTE_NVFP4_DISABLE_RHT") != "1":
        text = (
            "TransformerEngine raises on 4over6 activations with the random Hadamard transform: use weights"
        )
        return Remark(name, value, text, True, True)
    return Remark(name, value, variable.effect, True)


def nvfp4_ingredients(environment: Mapping[str, str] | None = None) -> str:
    """The ingredients of NVFP4 that TE computes with, as `NVFP4BlockScaling` has them by default."""
    environment = os.environ if environment is None else environment
    on = {name: environment.get(f"NVTE_NVFP4_DISABLE_{name}") != "1" for name in _INGREDIENTS}
    return ", ".join(words[not on[name]] for name, words in _INGREDIENTS.items())


#: Name in the variable -> the ingredient in words, and without it.
_INGREDIENTS = {
    "RHT": ("random Hadamard transform of the weight gradient's operands", "no random Hadamard transform"),
    "STOCHASTIC_ROUNDING": ("gradients rounded stochastically", "gradients rounded to nearest"),
    "2D_QUANTIZATION": ("a scale for 16 x 16 weights", "a scale for 1 x 16 weights"),
}


def markdown() -> Iterator[str]:
    """Rows of the table in docs/nvfp4.md."""
    yield "| variable | TE from | formats | values | what it changes |"
    yield "|-|-|-|-|-|"
    for v in VARIABLES:
        values = ", ".join(f"`{value}`" for value in v.changing)
        since = ".".join(map(str, v.since))
        yield f"| `{v.name}` | {since} | {', '.join(v.formats)} | {values} | {v.effect} |"
