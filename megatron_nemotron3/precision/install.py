"""Install emulation or precision logging on a stack while it is built, as `settings` say.

At the end of `HybridModel.__init__` Megatron passes the matching entry of the precision file to every module
that has `finish_init`. So each linear of the torch backend gets one, which chooses its format by the rules of
`census`. A plain run is measured in the formats of its precision file, or without a file in those of the
published recipe.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)

from megatron_nemotron3.common.hooks import agree_on_interval, find_model
from megatron_nemotron3.common.switches import EMULATE, LOG_PRECISION
from megatron_nemotron3.models.series import decoder_layers, decoder_row, mtp_row
from megatron_nemotron3.precision import settings, yaml_file
from megatron_nemotron3.precision.census import (
    formats_of_model,
    require_followed,
    require_format,
    require_well_formed_file,
    structure_of,
)
from megatron_nemotron3.precision.formats import BF16, FORMATS, MXFP8, NVFP4, counted
from megatron_nemotron3.precision.linear import Emulated
from megatron_nemotron3.precision.model_formats import Ambient, CensusError
from megatron_nemotron3.precision.observe import Observed, PrecisionObserver
from megatron_nemotron3.precision.packed import PackedProducts
from megatron_nemotron3.precision.products import MODEL_PARALLEL_STREAM
from megatron_nemotron3.precision.recipe import BLOCK, recipe
from megatron_nemotron3.precision.serving import PACKED_KINDS, named_recipe, unquantized_layers
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.precision.table import kind_of, tail_of_depth
from megatron_nemotron3.precision.yaml_file import NO_FILE, PUBLISHED, PrecisionFile, read_config


def ambient_of(config: Any, chosen: Emulation) -> Ambient:
    """Formats of layers under emulation: `chosen.format` outside the BF16 layers of a TransformerConfig."""
    if config.fp8 or config.fp4:
        raise ValueError(
            f"{EMULATE} and fp8={config.fp8!r}, fp4={config.fp4!r}: leave --fp8-format and "
            "--fp4-format out, emulation replaces them"
        )
    if chosen.packed:  # its kinds of linears; never in MTP
        return Ambient(BF16, config.num_layers)
    if chosen.every_layer:
        return Ambient.of_run(chosen.format, config.num_layers)
    kept = Ambient.of(config)
    ambient = Ambient.of_run(chosen.format, config.num_layers, kept.at_start, kept.at_end)
    if min(ambient.at_start, ambient.at_end) < 0 or ambient.at_start + ambient.at_end > ambient.num_layers:
        raise ValueError(
            f"{ambient.at_start} BF16 layers at the start and {ambient.at_end} at the end of "
            f"{ambient.num_layers}: use counts from 0 that fit"
        )
    return ambient


@dataclasses.dataclass(frozen=True)
class _LinearsPlan:
    """How the linears of a stack are set up."""

    ambient: Ambient
    chosen: Emulation
    #: Whether the linears compute in their formats.
    emulate: bool
    observer: PrecisionObserver | None
    #: Applied to the formats of the layers, before the entries that Megatron passes to the linears.
    file: PrecisionFile = NO_FILE

    @classmethod
    def of(cls, config: Any, observer: PrecisionObserver | None) -> _LinearsPlan | None:
        """The plan that `settings` ask for; None for plain linears that are not measured."""
        chosen = settings.current()
        if chosen is not None:
            return cls(ambient_of(config, chosen), chosen, True, observer)
        if observer is None:
            return None
        ambient = ambient_of(config, Emulation())
        if not config.first_last_layers_bf16:
            ambient = dataclasses.replace(ambient, at_end=tail_of_depth(config.num_layers).end)
        # Without a precision file it is measured in the formats of the published recipe.
        file = PUBLISHED if config.quant_recipe is None else NO_FILE
        return cls(ambient, Emulation(), False, observer, file)


#: Observer of the stack that was built last. Megatron builds the MTP blocks of the same model next.
_latest_observer: weakref.ref[PrecisionObserver] | None = None


def emulate_stack(stack: Any) -> None:
    """Prepare the linears of a decoder stack for emulation or precision logging, if `settings` ask for it."""
    global _latest_observer
    observer, log, chosen = None, settings.current_logging(), settings.current()
    require_well_formed_file(stack.config)
    require_followed(stack, emulate=chosen is not None, measured=log is not None)
    if torch.distributed.is_initialized():
        agree_on_interval(f"the interval of {LOG_PRECISION}", 0 if log is None else log.interval)
    if chosen is not None and chosen.packed and (log is not None or stack.config.quant_recipe is not None):
        other = LOG_PRECISION if log is not None else yaml_file.FLAG
        raise ValueError(f"{EMULATE}={chosen.packed} says which weights are packed: drop {other}")
    if log is not None:
        if not any(hasattr(module, "products") for module in stack.modules()) and len(stack.layers):
            raise ValueError(
                f"{LOG_PRECISION} measures linears of the torch backend, and this stack has none: "
                "use --spec megatron_nemotron3.specs nemotron3_torch_stack_spec"
            )
        observer = PrecisionObserver(stack, log, chosen is not None)
    _latest_observer = None if observer is None else weakref.ref(observer)
    plan = _LinearsPlan.of(stack.config, observer)
    if plan is None:
        if (stack.config.fp4 or stack.config.fp8) and not getattr(stack.config, "use_kitchen", False):
            _check_at_first_forward(stack, None, None)
        return
    for layer in decoder_layers(stack):
        number = layer.layer_number
        _prepare_linears(
            layer, f"decoder layer {number}", decoder_row(number), plan.ambient.of_layer(number - 1), plan
        )
    if plan.emulate:
        _check_at_first_forward(stack, plan.ambient, plan.chosen)


def emulate_mtp(mtp_layer: Any) -> None:
    """As `emulate_stack`, for an MTP block; call it after `emulate_stack` of the same model."""
    plan = _LinearsPlan.of(mtp_layer.config, None if _latest_observer is None else _latest_observer())
    if plan is None:
        return
    depth = None if mtp_layer.config.mtp_use_repeated_layer else mtp_layer.layer_number
    for layer in mtp_layer.mtp_model_layer.layers:
        number = layer.layer_number
        row, ambient = mtp_row(depth, number), plan.ambient.of_mtp(number - 1)
        _prepare_linears(layer, f"MTP layer {number}", row, ambient, plan, "mtp.")
    row = "mtp" if depth is None else f"mtp_{depth}"
    _prepare_linears(mtp_layer.eh_proj, "MTP eh_proj", row, plan.ambient.of_mtp(None), plan, "mtp.")


def _prepare_linears(
    tree: torch.nn.Module, where: str, row: str, ambient: str, plan: _LinearsPlan, prefix: str = "decoder."
) -> None:
    """`where` is for messages ("decoder layer 3"), `row` for the report ("layer_003")."""
    for name, module in tree.named_modules():
        if hasattr(module, "products"):
            path = f"{prefix}layers.0.{name}"
            fmt = plan.file.format(path, ambient)
            if plan.chosen.packed:
                kind = kind_of(path)
                packs = kind is not None and kind.name in PACKED_KINDS[plan.chosen.packed.partition(",")[0]]
                fmt = NVFP4 if packs else BF16
            place, row_and_module = f"{where}, {name}" if name else where, (row, name or "eh_proj")
            module.finish_init = partial(_finish_linear, module, plan, place, row_and_module, fmt)


def _finish_linear(
    module: Any,
    plan: _LinearsPlan,
    where: str,
    row_and_module: tuple[str, str],
    ambient: str,
    quant_config: Any,
) -> None:
    """Choose the format of a linear; Megatron calls this as `finish_init`."""
    if plan.emulate:
        assign_products(module, where, ambient, plan.chosen, quant_config)
        products = module.products
        if plan.observer is not None and products is not None and products.training is not None:
            products.record = plan.observer.add(
                module, *row_and_module, products.formats[0], products.training
            )
        return
    del module.finish_init
    fmt = _chosen_formats(ambient, plan.chosen, quant_config)[0]
    how = recipe(fmt, plan.chosen)
    if how is None or plan.observer is None:
        return
    try:
        _require_whole_blocks(module, where, fmt)
    except ValueError as problem:
        plan.observer.print(f"not measured: {problem}")
        return
    module.products = Observed(plan.observer.add(module, *row_and_module, fmt, how), how)


def assign_products(module: Any, where: str, ambient: str, chosen: Emulation, quant_config: Any) -> None:
    """Set `module.products`, the object that computes the matmuls of an emulated linear.

    `quant_config` is Megatron's `QuantizationConfig` of the first matcher that fits, or None.
    """
    if chosen.packed:
        _require_whole_blocks(module, where, ambient)
        module.products = None
        if ambient == NVFP4:
            module.products = PackedProducts(named_recipe(chosen.packed)[1].search)
        return
    formats = _chosen_formats(ambient, chosen, quant_config)
    recipes = [recipe(fmt, chosen) for fmt in formats]
    module.products = None
    if recipes == [None, None]:
        return
    for fmt in formats:
        if fmt != MXFP8:  # `products.operand` fills its last block with zeros
            _require_whole_blocks(module, where, fmt)
    # Megatron's schedule announces first microbatches only to models with a precision file (0.19.2).
    reuse = module.config.quant_recipe is not None
    if reuse:
        module.is_first_microbatch = True
    module.products = Emulated(recipes[0], recipes[1], formats, _random_stream(module), reuse)


def _chosen_formats(ambient: str, chosen: Emulation, quant_config: Any) -> tuple[str, str]:
    if quant_config is None or chosen.every_layer:
        return ambient, ambient
    problems: list[str] = []
    training, evaluation = read_config(problems, f"configs.{quant_config.config_key}", quant_config.config)
    if problems:
        raise ValueError("\n".join(problems))
    return training.applied(ambient), evaluation.applied(ambient)


def _require_whole_blocks(module: Any, where: str, fmt: str) -> None:
    """Raise ValueError if a weight is not divisible into the blocks of its format."""
    if fmt == BF16:
        return
    for shape in {tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() == 2}:
        if any(size % BLOCK[fmt] for size in shape):
            raise ValueError(
                f"{where}: this rank's weight {list(shape)} is not divisible into {fmt} blocks of "
                f"{BLOCK[fmt]}: use a smaller TP, or keep it BF16 in the precision file"
            )


def _random_stream(module: Any) -> str:
    """Megatron's random stream for stochastic rounding, common to ranks with the same gradient."""
    if hasattr(module, "num_gemms"):
        return get_expert_parallel_rng_tracker_name()
    if getattr(module.weight, "partition_dim", None) == 0:
        return MODEL_PARALLEL_STREAM  # column parallel: each rank has a shard of the gradient
    return get_data_parallel_rng_tracker_name()


def _restrict_packed(model: Any, recipe: str) -> None:
    """Unset the products of the layers that a recipe does not quantize; print how many linears are left."""
    structure = structure_of(model)
    if PACKED_KINDS[recipe.partition(",")[0]].isdisjoint(
        linear.kind.name for linear in structure.linears() if linear.layer is not None
    ):
        raise CensusError(f"recipe {recipe!r} packs no weight of this model ({structure.pattern})")
    plain, count = unquantized_layers(recipe, structure.pattern), 0
    for layer in decoder_layers(model.decoder):
        for module in layer.modules():
            if isinstance(getattr(module, "products", None), PackedProducts):
                if layer.layer_number - 1 in plain:
                    module.products = None
                else:
                    count += 1
    _print_on_rank_0([f"{count} linears of this rank have the weights of {recipe}"])


def emulated(model: torch.nn.Module) -> Iterator[tuple[str, Emulated]]:
    """Yield (name, `Emulated`) of the linears that emulate a format."""
    for name, module in model.named_modules():
        if isinstance(products := getattr(module, "products", None), Emulated):
            yield name, products


def _check_at_first_forward(stack: Any, ambient: Ambient | None, chosen: Emulation | None) -> None:
    """At the model's first forward print the recipe in force; raise if no linear computes in its format."""

    def check(model: Any) -> None:
        if chosen is not None and chosen.packed:
            _restrict_packed(model, chosen.packed)
            return
        around = Ambient.of(model.config) if ambient is None else ambient
        if around.format in FORMATS and not (chosen and chosen.every_layer):
            require_format(model, around.format, around)
        _print_on_rank_0(_announcement(model, around, chosen))

    find_model(stack, check)


def _announcement(model: Any, ambient: Ambient, chosen: Emulation | None) -> Iterator[str]:
    """What is emulated, the recipe in force, and where it deviates from the published one."""
    if chosen is not None:
        found = Counter(products.formats[0] for _, products in emulated(model))
        yield f"emulating {chosen.text()}: linears of this rank: {counted(found)}"
    yield from formats_of_model(model, ambient).in_force(chosen)


def _print_on_rank_0(lines: Iterable[str]) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for line in lines:
            print(f"megatron_nemotron3: {line}", flush=True)
