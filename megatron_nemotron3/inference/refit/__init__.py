"""Weights from a trainer's ranks to an inference engine's, without a file, planned ahead and proved after."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.inference.refit.execute import Refit as Refit
    from megatron_nemotron3.inference.refit.layouts import EngineLayout as EngineLayout
    from megatron_nemotron3.inference.refit.layouts import Training as Training
    from megatron_nemotron3.inference.refit.parts import training_tensors as training_tensors
    from megatron_nemotron3.inference.refit.planner import make_plan as make_plan
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "execute": ["Refit"],
            "parts": ["training_tensors"],
            "layouts": ["EngineLayout", "Training"],
            "planner": ["make_plan"],
        },
    )
