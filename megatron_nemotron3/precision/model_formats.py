"""In which format each linear of a model computes: `ModelFormats`, by its layers and its precision file.

By the rules of megatron-core 0.19.2 a Transformer Engine linear has the format of its layer, or the one that
the first matching glob of the precision file gives it. A layer has the format of the flags, unless its global
number lies in the BF16 layers at the start or end. The stack inside an MTP block numbers its layers from 0,
and its `eh_proj` is in no FP4 layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.formats import BF16, FORMATS, NVFP4, counted, name_of
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.precision.table import LinearRow, Structure, bf16_layers, tail_of_depth
from megatron_nemotron3.precision.yaml_file import NO_FILE, PUBLISHED, PrecisionFile


class CensusError(RuntimeError):
    """The built model is not what the flags ask for."""


@dataclass(frozen=True)
class Ambient:
    """Formats of the layers, as fields of TransformerConfig decide them."""

    #: A name of `formats.FORMATS`, "custom", or "bf16" for none.
    format: str
    num_layers: int
    at_start: int = 0
    at_end: int = 0
    #: Whether the format applies to a whole MTP block (FP8) or only to the layers inside it (FP4).
    whole_mtp: bool = False

    @classmethod
    def of_run(cls, precision: str, num_layers: int, at_start: int = 0, at_end: int = 0) -> Ambient:
        """Formats of the layers in a run of `precision`: a name of `FORMATS`, "bf16" or "fp32"."""
        whole_mtp = precision in FORMATS and FORMATS[precision].kind == "fp8"
        return cls(precision, num_layers, at_start, at_end, whole_mtp)

    @classmethod
    def of(cls, config: Any) -> Ambient:
        """Formats of the layers that a TransformerConfig asks Transformer Engine for."""
        fp8, fp4 = getattr(config, "fp8", None), getattr(config, "fp4", None)
        kept = (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16)
        start, end = kept if config.first_last_layers_bf16 else (0, 0)
        fmt = name_of(config.fp4_recipe if fp4 else config.fp8_recipe) if fp4 or fp8 else BF16
        return cls(fmt, config.num_layers, start, end, bool(fp8))

    def of_layer(self, number: int) -> str:
        """Format of layer `number` (from 0) of any hybrid stack."""
        kept = number < self.at_start or number >= self.num_layers - self.at_end
        return BF16 if kept else self.format

    def of_mtp(self, number: int | None) -> str:
        """Format of layer `number` (from 0) of the stack in an MTP block; None: of the block outside it."""
        if self.whole_mtp:
            return self.format
        return BF16 if number is None else self.of_layer(number)

    def of_linear(self, linear: LinearRow) -> str:
        return self.of_mtp(linear.in_mtp) if linear.layer is None else self.of_layer(linear.layer)


@dataclass(frozen=True)
class Deviation:
    """A difference from the published recipe: what, and what asks for it."""

    text: str
    #: The matcher or switch that asks for it; "" if it is merely left out.
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text}, as {self.source} says" if self.source else self.text

    def line(self) -> str:
        """A line for a log; a warning unless a matcher or switch asks for it."""
        return f"{'' if self.source else 'warning: '}not the published recipe: {self}"


@dataclass(frozen=True)
class ModelFormats:
    """The format of each linear of a whole model, by its precision file and the formats of its layers."""

    structure: Structure
    file: PrecisionFile
    ambient: Ambient

    @classmethod
    def of(
        cls,
        config: Nemotron3Config,
        precision: str,
        kept: tuple[int, int] | None = None,
        file: PrecisionFile | None = None,
    ) -> ModelFormats:
        """Formats in a run of `precision`. `kept`: BF16 layers at start and end. None: as published."""
        if kept is None:
            recommended = bf16_layers(config, precision)
            kept = recommended.start, recommended.end
        if file is None:
            file = PUBLISHED if precision == NVFP4 else NO_FILE
        return cls(Structure.of(config), file, Ambient.of_run(precision, config.num_layers, *kept))

    def linears(self) -> Iterator[tuple[LinearRow, str, str]]:
        """(linear, format of its layer, its format)."""
        for linear in self.structure.linears():
            around = self.ambient.of_linear(linear)
            yield linear, around, self.file.format(linear.name, around)

    def count(self) -> Counter[str]:
        return Counter(has for _, _, has in self.linears())

    def require_some(self) -> None:
        ambient, found = self.ambient, self.count()
        if not found[ambient.format]:
            raise CensusError(
                f"{ambient.format} was asked for, but none of the model's {sum(found.values())} linears is "
                f"{ambient.format} ({counted(found)}): {ambient.at_start} layers at the start and "
                f"{ambient.at_end} at the end of {ambient.num_layers} stay BF16 and "
                f"{len(self.file.matchers)} matchers of the precision file take the rest"
            )

    def deviations(self) -> list[Deviation]:
        """Differences of an NVFP4 run from the published recipe, by kind; empty for another format.

        Megatron says nothing about a file that leaves a kind of linear out: its linears follow their layer,
        which is NVFP4. A kind that a matcher names is taken to be meant, even in another format.
        """
        if self.ambient.format != NVFP4:
            return []
        totals: Counter[str] = Counter()
        found: Counter[tuple[str, str, str, str]] = Counter()
        for linear, around, has in self.linears():
            totals[linear.kind.name] += 1
            wanted = PUBLISHED.format(linear.name, around)
            if has != wanted:
                matcher = self.file.matcher(linear.name)
                found[linear.kind.name, has, wanted, matcher.name if matcher else ""] += 1
        result = [
            Deviation(
                f"{kind}: {number} of {totals[kind]} linears in {has}, published {wanted}"
                + ("" if matcher else " (no matcher names them)"),
                f"matcher {matcher}" if matcher else "",
            )
            for (kind, has, wanted, matcher), number in found.items()
        ]
        ambient, published = self.ambient, tail_of_depth(self.ambient.num_layers).end
        if (ambient.at_start, ambient.at_end) != (0, published):
            result.append(
                Deviation(
                    f"BF16 layers: {ambient.at_start} at the start and {ambient.at_end} at the end of "
                    f"{ambient.num_layers}, published 0 and {published}"
                )
            )
        return result

    def in_force(self, chosen: Emulation | None = None) -> Iterator[str]:
        """Lines: the linears by format, and what deviates from the published recipe.

        `chosen` is None where TransformerEngine computes.
        """
        found: list[Deviation] = []
        if chosen is None or not chosen.every_layer:
            found = self.deviations()
            as_published = ", as published" if self.ambient.format == NVFP4 and not found else ""
            yield f"linears of the whole model: {counted(self.count())}{as_published}"
        if chosen is not None:
            for word, deviation in chosen.switched().items():
                found.append(Deviation(deviation, f"{EMULATE} {word}"))
        yield from (deviation.line() for deviation in found)
