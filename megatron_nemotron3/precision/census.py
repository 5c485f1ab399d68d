"""The census of a built model, and checks that runs compute in the formats they ask for.

A linear with `finish_init` (TE's, and emulated ones) has its format of `model_formats`; any other computes in
the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.common.parser import option_value, option_values
from megatron_nemotron3.common.switches import EMULATE, megatron_options
from megatron_nemotron3.models.pattern import MTP_SEPARATOR, without_layout
from megatron_nemotron3.precision.formats import BF16, FORMATS
from megatron_nemotron3.precision.model_formats import Ambient, CensusError, ModelFormats
from megatron_nemotron3.precision.settings import OPTION
from megatron_nemotron3.precision.table import ModuleKind, Structure, kind_of
from megatron_nemotron3.precision.yaml_file import FLAG, NO_FILE, PrecisionFile, parse, read, require_fit

_TORCH_SPEC = "--spec megatron_nemotron3.specs nemotron3_torch_stack_spec"
_LAYER = re.compile(r"(?:^|\.)layers\.\d+(?=\.|$)")
_ROOT = re.compile(r"(?:^|\.)(?=(?:decoder|mtp|embedding|output_layer)\.|output_layer$)")


@dataclass(frozen=True)
class Entry:
    """One module that holds a matrix."""

    #: As in `named_modules()`.
    name: str
    kind: ModuleKind
    #: Layer number, from 0 over all pipeline stages, or from 0 in an MTP block; None outside layers.
    layer: int | None
    #: Format of its layer.
    ambient: str
    #: Format that flags and file ask for.
    format: str
    #: Matrix elements on this rank.
    parameters: int
    #: Whether the module can take a format, which means it has `finish_init`.
    follows: bool

    @property
    def effective(self) -> str:
        """Format that the module computes in."""
        return self.format if self.follows or not self.kind.quantizable else BF16


def formats_of_model(model: Any, ambient: Ambient | None = None) -> ModelFormats:
    """The formats of a whole `HybridModel`; `ambient`: None for that of its config, which TE reads."""
    ambient = Ambient.of(model.config) if ambient is None else ambient
    return ModelFormats(structure_of(model), recipe_of(model.config), ambient)


def census(model: Any, formats: ModelFormats | None = None) -> list[Entry]:
    """List every module of this rank that holds a matrix; `formats`: None for those of its config."""
    modules = dict(model.named_modules() if hasattr(model, "named_modules") else model)
    formats = formats_of_model(_hybrid_model(modules.values())) if formats is None else formats
    found = (_census_entry(name, modules, formats) for name in modules)
    return [entry for entry in found if entry is not None]


def recipe_of(config: Any) -> PrecisionFile:
    """The precision file that a TransformerConfig has loaded (`quant_recipe`), or `NO_FILE`."""
    recipe = config.quant_recipe
    if recipe is None:
        return NO_FILE
    matchers = {
        str(i): {"config": m.config_key, "type": "glob", "pattern": m.pattern, "enabled": True}
        for i, m in enumerate(recipe.matchers)
    }
    return parse({"configs": recipe.configs, "matchers": matchers}, where="config.quant_recipe")


def require_format(model: Any, wanted: str, ambient: Ambient | None = None) -> list[Entry]:
    """The census of a model; raise CensusError if its run asks for a format and would compute without it.

    Ranks decide without communication. `ambient` is that of `formats_of_model`.
    """
    formats, fmt = formats_of_model(_hybrid_model(model.modules()), ambient), FORMATS[wanted]
    if formats.ambient.format != wanted:
        options = " and ".join(" ".join(map(str, (name, *values))) for name, values in fmt.options[:2])
        raise CensusError(
            f"{wanted} was asked for, but the layers' format is {formats.ambient.format}: pass {options}"
        )
    require_fit(formats.file, formats.structure, "config.quant_recipe")
    formats.require_some()
    entries = census(model, formats)
    unfit = [entry for entry in entries if entry.format == wanted and entry.effective != wanted]
    if unfit:
        total = sum(entry.format == wanted for entry in entries)
        raise CensusError(
            f"{wanted} was asked for, but {len(unfit)} of {total} {wanted} linears of this rank cannot "
            f"compute it, first {unfit[0].name}: use the TransformerEngine backend on a GPU with compute "
            f"capability {fmt.needs}" + (", or emulate" if fmt.emulated else "")
        )
    return entries


def structure_of(model: Any) -> Structure:
    """Structure of the whole model that a `HybridModel` belongs to, on any pipeline stage."""
    pattern = model.hybrid_layer_pattern
    if pattern is None or "[" in pattern:
        raise CensusError(
            f"hybrid_layer_pattern={pattern!r}: number formats are only checked in models whose layers are "
            "given by a pattern without groups, because a recipe names layers one by one: use such a pattern"
        )
    main, *depths = pattern.split(MTP_SEPARATOR)
    blocks = depths[:1] if model.config.mtp_use_repeated_layer else depths
    return Structure(without_layout(main), tuple(blocks), bool(model.config.moe_latent_size))


def _hybrid_model(modules: Iterable[Any]) -> Any:
    """The outermost hybrid model."""
    found = next((module for module in modules if hasattr(module, "hybrid_layer_pattern")), None)
    if found is None:
        raise CensusError("no HybridModel among these modules: give formats")
    return found


def _census_entry(name: str, modules: Mapping[str, Any], formats: ModelFormats) -> Entry | None:
    """The entry of a module; None if it holds no matrix."""
    module, file = modules[name], formats.file
    parameters = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)
    if not parameters:
        return None
    kind = kind_of(name)
    if kind is None:
        raise CensusError(
            f"{name} ({type(module).__name__}) holds a matrix, but no row of the table covers it"
        )
    layer, around = _layer_format(name, modules, formats.ambient)
    if not kind.quantizable:
        return Entry(name, kind, layer, around, kind.recipe, parameters, False)
    local = name[found.end() :] if (found := _ROOT.search(name)) else name
    outer = re.sub(r"^(module\.)+", "", name)
    # Megatron matches the name inside the hybrid model; a loop over an outer model matches the longer name.
    formats_of_names = {file.format(n, around) for n in (local, outer)}
    if len(formats_of_names) > 1:
        matcher = file.matcher(local) or file.matcher(outer)
        assert matcher is not None
        raise CensusError(
            f"pattern {matcher.pattern!r} matches only one of {local} and {outer}: start it with *, as in "
            f"{'*' + matcher.pattern!r}"
        )
    return Entry(
        name, kind, layer, around, formats_of_names.pop(), parameters, hasattr(module, "finish_init")
    )


def _layer_format(name: str, modules: Mapping[str, Any], ambient: Ambient) -> tuple[int | None, str]:
    """Layer number (from 0) and format of the layer that a module is in."""
    found = list(_LAYER.finditer(name))
    if not found:
        return None, BF16
    path = name[: found[-1].end()]
    number: int = modules[path].layer_number - 1
    in_mtp = ".mtp." in f".{name}"
    if in_mtp:
        return number, ambient.of_mtp(None if len(found) == 1 else number)
    return number, ambient.of_layer(number)


def _without_effect(options: Sequence[str]) -> str:
    """The message on options that ask for formats in which linears of the torch backend do not compute."""
    names = " and ".join(options)
    return (
        f"{names} would have no effect: linears of the torch backend compute in BF16 or FP32 "
        f"unless they emulate. To emulate NVFP4, pass {OPTION} nvfp4 to nemotron3 run, or set "
        f"{EMULATE}=nvfp4 in the training processes, and leave --fp4-format and --fp8-format out. On GPUs "
        "with FP4 or FP8 use --spec megatron_nemotron3.specs nemotron3_te_stack_spec. For a plain run drop "
        f"{names}"
    )


def _format_options(fp4: object, fp8: object, file: object) -> list[str]:
    """Names of the options among these that are set."""
    values = {"--fp4-format": fp4, "--fp8-format": fp8, FLAG: file}
    return [name for name, value in values.items() if value]


def require_followed(stack: Any, *, emulate: bool, measured: bool) -> None:
    """Raise CensusError if a stack's linears would silently ignore the formats that are asked for."""
    linears = [module for module in stack.modules() if hasattr(module, "products")]
    if emulate and len(stack.layers) and not linears:
        raise CensusError(
            f"{EMULATE} emulates linears of the torch backend, and this stack has none: use {_TORCH_SPEC}, "
            "or unset it"
        )
    if emulate or all(hasattr(module, "finish_init") for module in linears):
        return
    config = stack.config
    options = _format_options(config.fp4, config.fp8, config.quant_recipe is not None and not measured)
    if options:
        raise CensusError(_without_effect(options))


def require_well_formed_file(config: Any) -> None:
    """Read the precision file of a Megatron script strictly: Megatron ignores most mistakes in it."""
    file = getattr(megatron_options(), "te_precision_config_file", None)
    if file and config.quant_recipe is not None:
        read(file)


def require_usable(arguments: Sequence[str], *, torch_spec: bool, emulate: bool, measured: bool) -> None:
    """Check a Megatron script's options on number formats before the script starts."""
    file = option_value(arguments, FLAG)
    fp4, fp8 = (option_values(arguments, f"--{kind}-format") is not None for kind in ("fp4", "fp8"))
    options = _format_options(fp4, fp8, file is not None and not measured)
    if torch_spec and not emulate and options:
        raise CensusError(_without_effect(options))
