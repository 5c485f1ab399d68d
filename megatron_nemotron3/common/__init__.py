"""Files, locks, processes, ranks, options and output: other rooms import them. It imports none of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any


def lazy(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names load on first use.

    Importing the package then imports none of its modules. A public name must not be the name of a submodule:
    importing the submodule would replace it.

    Args:
        package: full name of the package, its `__name__`.
        names: module, relative to the package -> the public names that it defines.
    """
    modules = {name: module for module, group in names.items() for name in group}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules), sorted(modules)


if TYPE_CHECKING:
    from megatron_nemotron3.common.output import Interval as Interval
    from megatron_nemotron3.common.output import interval as interval
    from megatron_nemotron3.common.output import paired as paired
    from megatron_nemotron3.common.plots import picture as picture
    from megatron_nemotron3.common.plots import step_axis as step_axis
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {"output": ["Interval", "interval", "paired"], "plots": ["picture", "step_axis"]}
    )
