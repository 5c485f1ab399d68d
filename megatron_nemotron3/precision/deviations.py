"""Compare the formats of a run with the published recipe, by kind of linear.

Megatron says nothing about a precision file that leaves a kind of linear out: its linears follow their layer,
which is NVFP4. A kind that a matcher names is taken to be meant, even if its format is not the published one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision.census import (
    Ambient,
    ambient_of_linear,
    census,
    formats_of,
    recipe_of,
    structure_of,
)
from megatron_nemotron3.precision.formats import BF16, NVFP4, counted
from megatron_nemotron3.precision.settings import SWITCHES, Emulation
from megatron_nemotron3.precision.table import Structure, tail_of_depth
from megatron_nemotron3.precision.yaml_file import PrecisionFile

#: What each switch of the emulation leaves out.
_WITHOUT = {
    "rht": "no random Hadamard transform",
    "sr": "gradients rounded to nearest",
    "2d": "a scale for 1 x 16 weights",
    "fprop": "forward not quantized",
    "dgrad": "gradient of the input not quantized",
    "wgrad": "gradient of the weight not quantized",
    "every_layer": "every linear of every layer",
    "4over6": "four-over-six scales of weights",
}


@dataclass(frozen=True)
class Deviation:
    """A difference from the published recipe: what, and what asks for it."""

    text: str
    #: The matcher or switch that asks for it; "" if it is merely left out.
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text}, as {self.source} says" if self.source else self.text


def deviations(structure: Structure, file: PrecisionFile, ambient: Ambient) -> list[Deviation]:
    """Differences of an NVFP4 run from the published recipe; empty for another format."""
    if ambient.format != NVFP4:
        return []
    totals: Counter[str] = Counter()
    found: Counter[tuple[str, str, str, str]] = Counter()
    for linear in structure.linears():
        around, matcher = ambient_of_linear(linear, ambient), file.matcher(linear.name)
        totals[linear.kind.name] += 1
        has = file.format(linear.name, around)
        wanted = BF16 if around == BF16 else linear.kind.recipe
        if has != wanted:
            found[linear.kind.name, has, wanted, matcher.name if matcher else ""] += 1
    result = [
        Deviation(
            f"{kind}: {number} of {totals[kind]} linears in {has}, published {wanted}"
            + ("" if matcher else " (no matcher names them)"),
            f"matcher {matcher}" if matcher else "",
        )
        for (kind, has, wanted, matcher), number in found.items()
    ]
    published = tail_of_depth(ambient.num_layers).end
    if (ambient.at_start, ambient.at_end) != (0, published):
        result.append(
            Deviation(
                f"BF16 layers: {ambient.at_start} at the start and {ambient.at_end} at the end of "
                f"{ambient.num_layers}, published 0 and {published}"
            )
        )
    return result


def _of_emulation(chosen: Emulation) -> list[Deviation]:
    """Differences of what emulation computes from the published recipe; its switches ask for them."""
    default = Emulation()
    return [
        Deviation(_WITHOUT[name], f"{EMULATE} {name}={int(getattr(chosen, field))}")
        for name, field in SWITCHES.items()
        if getattr(chosen, field) != getattr(default, field) and name in _WITHOUT
    ]


def recipe_in_force(
    structure: Structure, file: PrecisionFile, ambient: Ambient, chosen: Emulation | None = None
) -> Iterator[str]:
    """Lines: the linears of a whole model by format, and what deviates from the published recipe.

    `chosen` is None where TransformerEngine computes.
    """
    found: list[Deviation] = []
    if chosen is None or not chosen.every_layer:
        found = deviations(structure, file, ambient)
        linears = counted(formats_of(structure, file, ambient))
        as_published = ", as published" if ambient.format == NVFP4 and not found else ""
        yield f"linears of the whole model: {linears}{as_published}"
    yield from map(line, found + ([] if chosen is None else _of_emulation(chosen)))


def census_lines(model: Any) -> Iterator[str]:
    """The census of a built model, a line for each module, and the recipe in force."""
    hybrid = next(module for module in model.modules() if hasattr(module, "hybrid_layer_pattern"))
    for entry in census(model):
        yield f"{entry.effective:<14} {entry.kind.name:<15} {entry.name}"
    yield from recipe_in_force(structure_of(hybrid), recipe_of(hybrid.config), Ambient.of(hybrid.config))


def line(found: Deviation) -> str:
    """A line for a log; a warning unless a matcher or switch asks for it."""
    return f"{'' if found.source else 'warning: '}not the published recipe: {found}"
