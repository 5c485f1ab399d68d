"""The module that `--spec` names for a twin whose E layers differ: Megatron has one option for all layers."""

from __future__ import annotations

import sys
from types import ModuleType

from megatron_nemotron3.models import Nemotron3Config

#: Name of the module, and of what it holds: words for `--spec`.
WORDS = ("nemotron3_twin_stack", "spec")


def source(config: Nemotron3Config) -> str:
    """Return the module's text, for a script in processes of its own."""
    return (
        "from megatron_nemotron3.models import Nemotron3Config\n"
        "from megatron_nemotron3.specs import stack_spec\n\n"
        f'{WORDS[1]} = stack_spec("torch", Nemotron3Config.from_json({config.to_json()!r}))\n'
    )


def define(config: Nemotron3Config) -> None:
    """Make the module importable in this process."""
    from megatron_nemotron3.specs import stack_spec

    module = ModuleType(WORDS[0])
    setattr(module, WORDS[1], stack_spec("torch", config))
    sys.modules[WORDS[0]] = module
