"""Train: build a model, prepare text, run Megatron's training loop, report the losses."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.train.build import build_model as build_model
    from megatron_nemotron3.train.build import model_provider as model_provider
    from megatron_nemotron3.train.pretrain_script import datasets_provider as datasets_provider
    from megatron_nemotron3.train.pretrain_script import forward_step as forward_step
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "build": ["build_model", "model_provider"],
            "pretrain_script": ["datasets_provider", "forward_step"],
        },
    )
