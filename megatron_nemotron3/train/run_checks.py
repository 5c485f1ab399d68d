"""What `megatron_nemotron3.run` checks of a command line, and of the model that the script builds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_nemotron3.common.limits import ChildError
from megatron_nemotron3.common.parser import fail, option_value, option_values
from megatron_nemotron3.common.switches import EMULATE, LOCK, LOG_PRECISION
from megatron_nemotron3.launch import data_check, effects
from megatron_nemotron3.launch.stored_model import loaded
from megatron_nemotron3.launch.versions import require_supported
from megatron_nemotron3.models import stack_specs
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.train import isolation
from megatron_nemotron3.train.isolation import ISOLATE


def requested_spec(argv: list[str]) -> tuple[str, Any]:
    """The option `--spec` as text ("" without it), and the stack if it is one of ours, in whatever module."""
    # Megatron-Core 0.19 logs an import error in a spec module and builds its own stack. So it is imported
    # here; where that fails the run ends when a model's first forward begins.
    from megatron_nemotron3 import specs

    module, name = [*(option_values(argv, "--spec") or ()), "", ""][:2]
    words = f"--spec {module} {name}"
    if not module or not name:
        return "", None
    try:
        return words, specs.named(module, name)
    except ValueError as problem:
        fail(f"{words}: {problem}")
    except ImportError as problem:
        message = f"{words}: {problem}, so Megatron built its own stack: put its folder on PYTHONPATH"
        at_first_forward(lambda _: fail(message))
        return words, None


@contextmanager
def failing(*kinds: type[Exception]) -> Iterator[None]:
    """End the run with one line at an exception of these kinds."""
    try:
        yield
    except kinds as problem:
        fail(str(problem))


def require_supported_megatron() -> None:
    """Stop unless the megatron-core that would be imported is a supported version."""
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


def verify_stack(words: str, spec: Any, arguments: list[str]) -> None:
    """Stop unless Megatron builds the stack of ours that `--spec` names, and the checkpoint is one of it."""
    from megatron_nemotron3.layers.backend import te_problem
    from megatron_nemotron3.specs import TransformerEngineMissing

    if spec.module is TransformerEngineMissing:
        fail(f"{words}: {te_problem()}")
    # `--use-checkpoint-args` replaces `--spec` by the checkpoint's.
    require_our_stack(f"{words} was given", " (does --use-checkpoint-args override --spec?)")
    with failing(ValueError, OSError, ChildError):
        found = None if "--use-checkpoint-args" in arguments else loaded(arguments)
    if found is None:
        return
    before, now = stack_specs.stored_experts(found[1].args), stack_specs.experts_text(spec.submodules.model)
    if before not in (None, now):
        fail(
            f"{words} builds {_experts(now)}, and {found[0]} of --load was trained with {_experts(before)}: "
            "weights of the same shapes would load and compute something else; give its --spec"
        )


def _experts(text: str | None) -> str:
    return f"layers of experts (width:top-k) {text}" if text else "the same experts in every layer"


def torch_spec(spec: Any) -> str:
    """The --spec of the torch backend for the same model."""
    model = None if spec is None else spec.submodules.model
    return f"--spec {stack_specs.MODULE} {stack_specs.spec_name(model, 'torch')}"


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


def require_data(arguments: list[str]) -> None:
    """Stop at data that Megatron would loop or fail on. One rank of a node looks: they may be on its disk."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return
    if LOCK in os.environ:
        return  # `nemotron3 train` has done it for its ranks
    with failing(ValueError):
        data_check.require(arguments)


def verify_options(arguments: list[str], spec: Any, announce: Callable[[str], None]) -> None:
    """Stop at options with which our stack would compute something else than asked; name other surprises."""
    from megatron_nemotron3.specs import is_torch

    for severity, sentence in effects.said_of(arguments, "torch" if is_torch(spec) else "te"):
        if severity == "error":
            fail(sentence)
        if LOCK not in os.environ:  # `nemotron3 train` has said it
            announce(f"{severity}: {sentence}")


def verify_formats(arguments: list[str], words: str, spec: Any, *, emulate: bool, measured: bool) -> None:
    """Stop unless linears will compute in the formats that options request."""
    from megatron_nemotron3.precision.census import require_usable
    from megatron_nemotron3.precision.model_formats import CensusError
    from megatron_nemotron3.specs import is_torch

    with_torch = is_torch(spec)
    with failing(CensusError):
        require_usable(arguments, torch_spec=with_torch, emulate=emulate, measured=measured)
    if emulate and spec is not None and not with_torch:
        fail(
            f"{EMULATE} or {emulation.OPTION} emulates linears of the torch backend, and --spec "
            f"names {words.split()[-1]}: use {torch_spec(spec)}, or turn emulation off"
        )
    if emulate:
        require_our_stack(
            f"{EMULATE} or {emulation.OPTION} is set", f", which ignores it: use {torch_spec(None)}"
        )
    verify_quantized(arguments)


def verify_measurable(spec: Any) -> None:
    """Stop a run that would measure precision (NEMOTRON3_LOG_PRECISION) on linears that do not support it."""
    from megatron_nemotron3.specs import is_torch

    if not is_torch(spec):
        fail(
            f"{LOG_PRECISION} measures linears of the torch backend, and --spec names another one: "
            f"use {torch_spec(spec)}, or unset it"
        )


def verify_rows(arguments: list[str], words: str, spec: Any, isolate: bool) -> None:
    """Stop unless the layers keep documents apart in the way in which the script cuts rows over CP ranks."""
    from megatron_nemotron3.specs import is_torch

    if isolate and spec is None:
        fail(f"{ISOLATE}: {words or 'no --spec'} is no stack of this package: use {torch_spec(None)}")
    if isolation.cuts_whole_rows(arguments) and spec is not None and not is_torch(spec):
        fail(
            "--dataloader-inter-document-masking with context parallelism: Megatron cuts the whole row, and "
            f"Transformer Engine's layers take one that is cut document by document: use {torch_spec(spec)}"
        )
