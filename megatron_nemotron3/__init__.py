"""megatron_nemotron3: build, train and convert NVIDIA Nemotron 3 with a stock Megatron-LM.

The names that most programs need are here; the others are in the subpackages (`megatron_nemotron3.models`,
`megatron_nemotron3.train`, …), each in its `__all__`. A name is loaded on first use, so importing the package
costs neither torch nor megatron:

    import megatron_nemotron3 as n3
    n3.get("super").num_layers                   # model numbers, standard library only
    model = n3.build_model("super", tiny=True)   # a Megatron HybridModel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_nemotron3.common import lazy

__version__ = "0.1.0"

_load, __dir__, _PUBLIC = lazy(
    __name__,
    {
        "cpu": ["cpu_mode"],
        "launch.flags": ["flags"],
        "launch.launch": ["Launch"],
        "launch.layout": ["ParallelLayout"],
        "launch.schedule": ["TrainingSchedule"],
        "models.catalog": ["get", "names"],
        "models.config": ["Nemotron3Config"],
        "models.definition": ["Definition"],
        "models.parameters": ["count"],
        "specs": ["nemotron3_stack_spec", "nemotron3_te_stack_spec", "nemotron3_torch_stack_spec"],
        "train.build": ["build_model", "model_provider"],
    },
)
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from megatron_nemotron3.cpu import cpu_mode as cpu_mode
    from megatron_nemotron3.launch.flags import flags as flags
    from megatron_nemotron3.launch.launch import Launch as Launch
    from megatron_nemotron3.launch.layout import ParallelLayout as ParallelLayout
    from megatron_nemotron3.launch.schedule import TrainingSchedule as TrainingSchedule
    from megatron_nemotron3.models.catalog import get as get
    from megatron_nemotron3.models.catalog import names as names
    from megatron_nemotron3.models.config import Nemotron3Config as Nemotron3Config
    from megatron_nemotron3.models.definition import Definition as Definition
    from megatron_nemotron3.models.parameters import count as count
    from megatron_nemotron3.specs import nemotron3_stack_spec as nemotron3_stack_spec
    from megatron_nemotron3.specs import nemotron3_te_stack_spec as nemotron3_te_stack_spec
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec as nemotron3_torch_stack_spec
    from megatron_nemotron3.train.build import build_model as build_model
    from megatron_nemotron3.train.build import model_provider as model_provider


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ImportError:
        from megatron_nemotron3.launch.versions import require_supported

        require_supported()  # an old megatron-core lacks modules: name the version, not the module
        raise
