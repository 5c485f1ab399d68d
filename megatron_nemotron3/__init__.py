"""megatron_nemotron3: build, train and convert NVIDIA Nemotron 3 with a stock Megatron-LM.

Every public name is here and is loaded on first use, so importing the package costs neither torch nor
megatron:

    import megatron_nemotron3 as n3
    n3.get("super").num_layers                   # model numbers, standard library only
    model = n3.build_model("super", tiny=True)   # a Megatron HybridModel
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name -> module that defines it
_PUBLIC = {
    "Nemotron3Config": "models.config",
    "get": "models.catalog",
    "names": "models.catalog",
    "count": "models.parameters",
    "Launch": "launch.launch",
    "ParallelLayout": "launch.layout",
    "TrainingSchedule": "launch.schedule",
    "flags": "launch.flags",
    "cpu_mode": "cpu",
    "build_model": "train.build",
    "model_provider": "train.build",
    "nemotron3_stack_spec": "specs",
    "nemotron3_torch_stack_spec": "specs",
    "nemotron3_te_stack_spec": "specs",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from megatron_nemotron3.cpu import cpu_mode
    from megatron_nemotron3.launch.flags import flags
    from megatron_nemotron3.launch.launch import Launch
    from megatron_nemotron3.launch.layout import ParallelLayout
    from megatron_nemotron3.launch.schedule import TrainingSchedule
    from megatron_nemotron3.models.catalog import get, names
    from megatron_nemotron3.models.config import Nemotron3Config
    from megatron_nemotron3.models.parameters import count
    from megatron_nemotron3.specs import (
        nemotron3_stack_spec,
        nemotron3_te_stack_spec,
        nemotron3_torch_stack_spec,
    )
    from megatron_nemotron3.train.build import build_model, model_provider


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        except ImportError:
            from megatron_nemotron3.launch.versions import require_supported

            require_supported()  # an old megatron-core lacks modules: name the version, not the module
            raise
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
