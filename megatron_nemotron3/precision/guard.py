"""Refuse runs whose options ask for formats that they would not compute in.

`require_usable` acts on a command line; the others act where a stack is built, our first place in a stock
script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_nemotron3.common.parser import option_value, option_values
from megatron_nemotron3.common.switches import EMULATE, megatron_options
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.census import CensusError
from megatron_nemotron3.precision.settings import OPTION
from megatron_nemotron3.precision.yaml_file import FLAG

_TORCH_SPEC = "--spec megatron_nemotron3.specs nemotron3_torch_stack_spec"


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
        yaml_file.read(file)


def require_usable(arguments: Sequence[str], *, torch_spec: bool, emulate: bool, measured: bool) -> None:
    """Check a Megatron script's options on number formats before the script starts."""
    file = option_value(arguments, FLAG)
    fp4, fp8 = (option_values(arguments, f"--{kind}-format") is not None for kind in ("fp4", "fp8"))
    options = _format_options(fp4, fp8, file is not None and not measured)
    if torch_spec and not emulate and options:
        raise CensusError(_without_effect(options))
