"""What `megatron_nemotron3.run` checks of a command line, and of the model that the script builds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_nemotron3.common.parser import fail, first_missing, not_installed, option_value
from megatron_nemotron3.common.switches import LOCK
from megatron_nemotron3.launch import data_check
from megatron_nemotron3.launch.versions import require_supported
from megatron_nemotron3.train.isolation import is_first_of_node


@contextmanager
def failing(*kinds: type[Exception]) -> Iterator[None]:
    """End the run with one line at an exception of these kinds."""
    try:
        yield
    except kinds as problem:
        fail(str(problem))


def require_supported_megatron() -> None:
    """Stop unless there is a megatron-core to import, of a supported version."""
    if first_missing("megatron.core"):
        fail(not_installed("megatron.core"))
    with failing(ValueError):
        require_supported()


def at_first_forward(inspect: Callable[[Any], None]) -> None:
    """Call `inspect` with the hybrid model when its first forward begins."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_nemotron3.common import hooks

    hooks.at_first_forward(HybridModel, inspect)


def require_our_stack(wanted: str, hint: str) -> None:
    """Stop when the first forward of the hybrid model begins, if its stack is not ours."""

    def look(model: Any) -> None:
        from megatron_nemotron3.layers.stack import Nemotron3Stack

        if not isinstance(model.decoder, Nemotron3Stack):
            fail(f"{wanted}, but Megatron built {type(model.decoder).__name__}{hint}")

    at_first_forward(look)


def verify_quantized(arguments: list[str]) -> None:
    """Stop a script with `--fp4-format` or `--fp8-format` if its hybrid model computes without it.

    Megatron silently drops a format if layer counts or the precision file leave no linear for it, and drops
    FP8 in a dense model without Transformer Engine.
    """
    from megatron_nemotron3.precision.formats import FORMATS, requested

    wanted = requested(partial(option_value, arguments))
    if len(wanted) != 1 or wanted[0] not in FORMATS:  # Megatron refuses two; "custom" is the user's own
        return
    from megatron_nemotron3.precision.census import require_format
    from megatron_nemotron3.precision.model_formats import CensusError
    from megatron_nemotron3.precision.yaml_file import PrecisionFileError

    def require_linears(model: Any) -> None:
        with failing(CensusError, PrecisionFileError):
            require_format(model, wanted[0])

    at_first_forward(require_linears)


def require_well_formed_file(arguments: list[str]) -> None:
    """Stop if the precision file has mistakes: Megatron ignores most, and crashes on some."""
    if (file := option_value(arguments, "--te-precision-config-file")) is None:
        return
    from megatron_nemotron3.precision import yaml_file

    try:
        yaml_file.read(file)
    except ModuleNotFoundError:
        fail("package pyyaml is not installed, which reads the precision file: pip install pyyaml")
    except (ValueError, OSError) as problem:
        fail(str(problem))


def require_data(arguments: list[str], script: str = "") -> None:
    """Stop at data that Megatron would loop or fail on."""
    if not is_first_of_node() or LOCK in os.environ:  # `nemotron3 train` has done it for its ranks
        return
    with failing(ValueError):
        for warning in data_check.require(arguments, script=script):
            print(f"megatron_nemotron3: warning: {warning}", file=sys.stderr)
