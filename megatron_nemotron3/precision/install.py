"""Puts emulation on a stack when it is built, if NEMOTRON3_EMULATE asks for it.

Megatron hands the matching entry of `--te-precision-config-file` to every module that has `finish_init`, at
the end of `HybridModel.__init__`. So each linear of the torch backend is given a `finish_init`, which settles
its format by the rules of `census`: the layer's (NVFP4 outside the BF16 layers), unless the file has another.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)

from megatron_nemotron3.precision import settings
from megatron_nemotron3.precision.census import Ambient, require_nvfp4
from megatron_nemotron3.precision.linear import Emulated
from megatron_nemotron3.precision.products import recipe
from megatron_nemotron3.precision.schema import Setting, read_config
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.precision.spec import BLOCK
from megatron_nemotron3.precision.table import BF16, NVFP4

_MODEL_PARALLEL = "model-parallel-rng"


def ambient_of(config: Any, chosen: Emulation) -> Ambient:
    """The formats of layers under emulation: NVFP4 outside the BF16 layers of a TransformerConfig.

    Raises:
        ValueError: the config itself asks for FP8 or FP4, or counts of BF16 layers do not fit.
    """
    if config.fp8 or config.fp4:
        raise ValueError(
            f"{settings.VARIABLE} and fp8={config.fp8!r}, fp4={config.fp4!r}: leave --fp8-format and "
            "--fp4-format out, emulation replaces them"
        )
    if chosen.every_layer:
        return Ambient(NVFP4, config.num_layers)
    ambient = dataclasses.replace(Ambient.of(config), format=NVFP4)
    if min(ambient.at_start, ambient.at_end) < 0 or ambient.at_start + ambient.at_end > ambient.num_layers:
        raise ValueError(
            f"{ambient.at_start} BF16 layers at the start and {ambient.at_end} at the end of "
            f"{ambient.num_layers}: use counts from 0 that fit"
        )
    return ambient


def emulate_stack(stack: Any) -> None:
    """Prepare the linears of a decoder stack, if emulation is on.

    Args:
        stack: HybridStack with `layers` and `config`.

    Raises:
        ValueError: NEMOTRON3_EMULATE has no meaning, or as `ambient_of`.
    """
    chosen = settings.emulation()
    if chosen is None:
        return
    ambient = ambient_of(stack.config, chosen)
    for layer in stack.layers:
        _prepare(
            layer, f"decoder layer {layer.layer_number}", ambient.of_layer(layer.layer_number - 1), chosen
        )
    _look_at_first_forward(stack, ambient, chosen)


def emulate_mtp(mtp_layer: Any) -> None:
    """As `emulate_stack`, of an MTP block: its layers count anew, its projection is in no quantized layer."""
    chosen = settings.emulation()
    if chosen is None:
        return
    ambient = ambient_of(mtp_layer.config, chosen)
    for layer in mtp_layer.mtp_model_layer.layers:
        _prepare(layer, f"MTP layer {layer.layer_number}", ambient.of_layer(layer.layer_number - 1), chosen)
    _prepare(mtp_layer.eh_proj, "MTP eh_proj", BF16, chosen)


def _prepare(tree: torch.nn.Module, where: str, ambient: str, chosen: Emulation) -> None:
    for name, module in tree.named_modules():
        if hasattr(module, "products"):
            place = f"{where}, {name}" if name else where
            module.finish_init = partial(settle, module, place, ambient, chosen)


def settle(module: Any, where: str, ambient: str, chosen: Emulation, quant_config: Any) -> None:
    """Set `module.products`; what `finish_init` does.

    Args:
        module: a linear of the torch backend.
        where: its place, for messages.
        ambient: the format of its layer.
        quant_config: Megatron's `QuantizationConfig` of the first matcher that matches, or None.

    Raises:
        ValueError: the entry is wrong, its format is not emulated, or the weight does not fill the blocks.
    """
    formats = [ambient, ambient]
    if quant_config is not None and not chosen.every_layer:
        training, evaluation = _settings(quant_config)
        formats = [training.applied(ambient), evaluation.applied(ambient)]
    recipes = [recipe(fmt, chosen) for fmt in formats]
    module.products = None
    if recipes == [None, None]:
        return
    for fmt in formats:
        _check(module, where, fmt)
    # The schedule signals first microbatches only to models with a precision file (megatron-core 0.19.2).
    reuse = module.config.quant_recipe is not None
    if reuse:
        module.is_first_microbatch = True
    module.products = Emulated(recipes[0], recipes[1], (formats[0], formats[1]), _stream(module), reuse)


def _settings(quant_config: Any) -> tuple[Setting, Setting]:
    problems: list[str] = []
    found = read_config(problems, f"configs.{quant_config.config_key}", quant_config.config)
    if problems or found is None:
        raise ValueError("\n".join(problems))
    return found


def _check(module: Any, where: str, fmt: str) -> None:
    """Refuse a weight that does not fill the blocks of its format."""
    if fmt == BF16:
        return
    for shape in {tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() == 2}:
        if any(size % BLOCK[fmt] for size in shape):
            raise ValueError(
                f"{where}: this rank's weight {list(shape)} does not fill blocks of {BLOCK[fmt]} ({fmt}): "
                "use a smaller TP, or keep it BF16 in the precision file"
            )


def _stream(module: Any) -> str:
    """Whose draws stochastic rounding takes: equal on ranks where the gradient is equal."""
    if hasattr(module, "num_gemms"):
        return get_expert_parallel_rng_tracker_name()
    if getattr(module.weight, "partition_dim", None) == 0:  # column parallel: a part of the gradient
        return _MODEL_PARALLEL
    return get_data_parallel_rng_tracker_name()


def emulated(model: torch.nn.Module) -> Iterator[tuple[str, Emulated]]:
    """(name, products) of the linears that are not plain."""
    for name, module in model.named_modules():
        if isinstance(products := getattr(module, "products", None), Emulated):
            yield name, products


def _look_at_first_forward(stack: Any, ambient: Ambient, chosen: Emulation) -> None:
    """When the model around `stack` first runs: say what is emulated, abort if NVFP4 reached no linear."""
    wanted = weakref.ref(stack)

    def look(module: torch.nn.Module, _inputs: Any) -> None:
        if wanted() is None:
            handle.remove()
        elif getattr(module, "decoder", None) is wanted():
            handle.remove()
            if not chosen.every_layer:
                require_nvfp4(module, ambient)
            _announce(module, chosen)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)


def _announce(model: torch.nn.Module, chosen: Emulation) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    found = Counter(products.formats[0] for _, products in emulated(model))
    linears = ", ".join(f"{number} {fmt}" for fmt, number in sorted(found.items()))
    print(f"megatron_nemotron3: emulating {chosen.text()}: linears of this rank: {linears}", flush=True)
