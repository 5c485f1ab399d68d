"""Import of Megatron-Bridge where TransformerEngine (TE) is not installed.

`megatron/bridge/peft/lora_layers.py`, which `import megatron.bridge` loads, imports TE and names a few of its
classes. `allow_missing_te` gives that one module empty classes under these names; TE still cannot be imported
elsewhere, for instance by Megatron-Core for its `HAVE_TE` flags.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

#: Modules of Bridge that `import megatron.bridge` loads and that import TE unconditionally.
NEED_TE = ("megatron.bridge.peft.lora_layers",)


def _empty(name: str) -> type:
    return type(name, (), {"__doc__": "Placeholder for a class of TransformerEngine, which is missing."})


#: What these modules name when they are imported, and in isinstance checks.
_PYTORCH = SimpleNamespace(
    Linear=_empty("Linear"),
    LayerNormLinear=_empty("LayerNormLinear"),
    ops=SimpleNamespace(Sequential=_empty("Sequential")),
)


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    """`__import__` of the modules in `NEED_TE`."""
    if name == "transformer_engine.pytorch":
        return SimpleNamespace(pytorch=_PYTORCH)
    return builtins.__import__(name, *args, **kwargs)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with builtins of its own, whose `__import__` finds TE."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in NEED_TE or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


def allow_missing_te() -> None:
    """Let `import megatron.bridge` succeed without TE, in this process. Does nothing if TE is installed."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if not installed and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
