"""What a training run costs: floating-point operations, memory, traffic, layouts. Closed forms."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.launch.plan.hardware import GPUS as GPUS
    from megatron_nemotron3.launch.plan.serving import ServingUse as ServingUse
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"hardware": ["GPUS"], "serving": ["ServingUse"]})
