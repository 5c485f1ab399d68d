"""Every linear of a built model with the format Megatron gives it. Imports neither torch nor megatron.

The rules are those of megatron-core 0.19.2:

* a layer of the hybrid stack runs in the format of `--fp4-format` or `--fp8-format`, unless its global number
  lies in the BF16 layers at the start or end (`fp4_utils.get_fp4_context`). The stack inside an MTP block
  counts its own layers from 0, and its `eh_proj` is in no FP4 layer;
* a linear takes that format, or what the first matching glob of the precision file makes of it
  (`HybridModel.__init__` hands it to every module with `finish_init`; TE linears and emulated ones have it);
* any other linear computes in the model's dtype, whatever the flags say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.precision.fit import require_fit
from megatron_nemotron3.precision.table import BF16, NVFP4, ModuleKind, Structure, kind_of
from megatron_nemotron3.precision.yaml_file import NO_FILE, PrecisionFile, parse

_LAYER = re.compile(r"(?:^|\.)layers\.\d+(?=\.|$)")
_ROOT = re.compile(r"(?:^|\.)(?=(?:decoder|mtp|embedding|output_layer)\.|output_layer$)")


class CensusError(RuntimeError):
    """The model is not what the flags asked for. The message names modules and the cure."""


@dataclass(frozen=True)
class Ambient:
    """What a layer's format depends on (fields of TransformerConfig)."""

    #: "nvfp4", "mxfp8" or another FP8 recipe, or "bf16": none.
    format: str
    num_layers: int
    at_start: int = 0
    at_end: int = 0
    #: FP8 surrounds an MTP block as a whole, FP4 only the layers in it.
    whole_mtp: bool = False

    @classmethod
    def of(cls, config: Any) -> Ambient:
        """From a TransformerConfig."""
        fp8, fp4 = getattr(config, "fp8", None), getattr(config, "fp4", None)
        kept = (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16)
        start, end = kept if config.first_last_layers_bf16 else (0, 0)
        recipe = config.fp4_recipe if fp4 else config.fp8_recipe
        fmt = str(getattr(recipe, "value", recipe)) if fp4 or fp8 else BF16
        return cls(fmt, config.num_layers, start, end, bool(fp8))

    def of_layer(self, number: int) -> str:
        """The format of layer `number`, from 0, of any hybrid stack."""
        kept = number < self.at_start or number >= self.num_layers - self.at_end
        return BF16 if kept else self.format


@dataclass(frozen=True)
class Entry:
    """A module that holds a matrix."""

    #: As in `named_modules()`.
    name: str
    kind: ModuleKind
    #: Number of its layer, from 0 over all pipeline stages; in MTP from 0 in the block; None outside layers.
    layer: int | None
    #: The format of its layer.
    ambient: str
    #: The format the flags and the file ask for.
    format: str
    #: Elements on this rank.
    parameters: int
    #: Whether it takes formats at all: it has `finish_init`.
    follows: bool

    @property
    def effective(self) -> str:
        """The format it computes in."""
        return self.format if self.follows or not self.kind.quantizable else BF16


def census(
    model: Any,
    file: PrecisionFile | None = None,
    ambient: Ambient | None = None,
    *,
    training: bool = True,
) -> list[Entry]:
    """Every module of this rank that holds a matrix.

    Args:
        model: a `HybridModel`, alone, wrapped, or inside another; or its `named_modules()`.
        file: the precision file; None: `model.config.quant_recipe`, which may be none.
        ambient: None: from `model.config`.
        training: False: what evaluation recipes say.

    Raises:
        CensusError: a module with a matrix that no row of the table knows, or a glob that means another
            thing where the model is nested.
        PrecisionFileError: `model.config.quant_recipe` is none that Megatron's TE linears take.
    """
    modules = dict(model.named_modules() if hasattr(model, "named_modules") else model)
    config = _config(modules) if file is None or ambient is None else None
    file = recipe_of(config) if file is None else file
    ambient = Ambient.of(config) if ambient is None else ambient
    return [
        entry
        for name, module in modules.items()
        if (parameters := _matrix_elements(module))
        and (entry := _entry(name, module, modules, file, ambient, parameters, training))
    ]


def recipe_of(config: Any) -> PrecisionFile:
    """The precision file that a TransformerConfig has loaded (`quant_recipe`), or none."""
    recipe = config.quant_recipe
    if recipe is None:
        return NO_FILE
    matchers = {
        str(i): {"config": m.config_key, "type": "glob", "pattern": m.pattern, "enabled": True}
        for i, m in enumerate(recipe.matchers)
    }
    return parse({"configs": recipe.configs, "matchers": matchers}, where="config.quant_recipe")


def formats(entries: Iterable[Entry]) -> Counter[str]:
    """Effective format -> number of linears the table has a choice about."""
    return Counter(entry.effective for entry in entries if entry.kind.quantizable)


def require_nvfp4(model: Any, ambient: Ambient | None = None) -> list[Entry]:
    """Abort a run that asked for NVFP4 and would compute without it. No communication: each rank can tell.

    Args:
        model: the `HybridModel` of this rank, bare or wrapped.
        ambient: the layers' format; None: from its config, as TransformerEngine takes it (`config.fp4`).

    Returns:
        Its census.

    Raises:
        CensusError: no linear of the whole model is NVFP4, or linears of this rank that should be do not
            follow the flags.
        PrecisionFileError: the file's globs do not fit the model.
    """
    root = next(m for _, m in model.named_modules() if hasattr(m, "hybrid_layer_pattern"))
    config, structure = root.config, structure_of(root)
    file = recipe_of(config)
    ambient = Ambient.of(config) if ambient is None else ambient
    if ambient.format != NVFP4:
        raise CensusError(
            f"NVFP4 was asked for, but the layers' format is {ambient.format}: pass --fp4-format e2m1 and "
            "--fp4-recipe nvfp4"
        )
    if file is not NO_FILE:
        require_fit(file, structure, "config.quant_recipe")
    asked = Counter(
        file.format(linear.name, BF16 if linear.layer is None else ambient.of_layer(linear.layer))
        for linear in structure.linears()
    )
    if not asked[NVFP4]:
        found = ", ".join(f"{number} {fmt}" for fmt, number in sorted(asked.items()))
        raise CensusError(
            f"NVFP4 was asked for, but none of the model's {sum(asked.values())} linears is NVFP4 ({found}): "
            f"{ambient.at_start} layers at the start and {ambient.at_end} at the end of {ambient.num_layers} "
            f"stay BF16 and {len(file.matchers)} matchers of the precision file take the rest"
        )
    entries = census(model, file, ambient)
    deaf = [entry for entry in entries if entry.format == NVFP4 and entry.effective != NVFP4]
    if deaf:
        total = sum(entry.format == NVFP4 for entry in entries)
        raise CensusError(
            f"NVFP4 was asked for, but {len(deaf)} of {total} NVFP4 linears of this rank cannot compute it, "
            f"first {deaf[0].name}: use the TransformerEngine backend on a GPU with compute capability 10.0 "
            "or 10.3, or emulate"
        )
    return entries


def structure_of(model: Any) -> Structure:
    """What a built `HybridModel`'s names depend on; the whole model's, whatever stage this rank holds."""
    main, *depths = model.hybrid_layer_pattern.split("/")
    blocks = depths[:1] if model.config.mtp_use_repeated_layer else depths
    return Structure(main.replace("|", ""), tuple(blocks), bool(model.config.moe_latent_size))


def _config(modules: Mapping[str, Any]) -> Any:
    """The TransformerConfig of the outermost hybrid model."""
    for module in modules.values():
        if hasattr(module, "hybrid_layer_pattern"):
            return module.config
    raise CensusError("no HybridModel among these modules: give file and ambient")


def _matrix_elements(module: Any) -> int:
    """Elements of the matrices a module holds itself; 0: none (norms, containers)."""
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)


def _entry(
    name: str,
    module: Any,
    modules: Mapping[str, Any],
    file: PrecisionFile,
    ambient: Ambient,
    parameters: int,
    training: bool,
) -> Entry:
    kind = kind_of(name)
    if kind is None:
        raise CensusError(
            f"{name} ({type(module).__name__}) holds a matrix, but no row of the table knows it"
        )
    layer, around = _layer(name, modules, ambient)
    if not kind.quantizable:
        return Entry(name, kind, layer, around, kind.recipe, parameters, False)
    local = name[found.end() :] if (found := _ROOT.search(name)) else name
    outer = re.sub(r"^(module\.)+", "", name)
    # Megatron matches the name inside the hybrid model; a loop over an outer model would match the longer.
    answers = {file.format(n, around, training=training) for n in (local, outer)}
    if len(answers) > 1:
        matcher = file.matcher(local) or file.matcher(outer)
        assert matcher is not None
        raise CensusError(
            f"pattern {matcher.pattern!r} matches only one of {local} and {outer}: start it with *, as in "
            f"{'*' + matcher.pattern!r}"
        )
    return Entry(name, kind, layer, around, answers.pop(), parameters, hasattr(module, "finish_init"))


def _layer(name: str, modules: Mapping[str, Any], ambient: Ambient) -> tuple[int | None, str]:
    """(layer number from 0, format of the layer) of a module."""
    found = list(_LAYER.finditer(name))
    if not found:
        return None, BF16
    path = name[: found[-1].end()]
    number: int = modules[path].layer_number - 1
    in_mtp = ".mtp." in f".{name}"
    if in_mtp and ambient.whole_mtp:
        return number, ambient.format
    if in_mtp and len(found) == 1:  # beside the stack inside the block
        return number, BF16
    return number, ambient.of_layer(number)


def lines(entries: Iterable[Entry]) -> Iterator[str]:
    """One line an entry, for a log."""
    for entry in entries:
        yield f"{entry.effective:<6} {entry.kind.name:<15} {entry.name}"
