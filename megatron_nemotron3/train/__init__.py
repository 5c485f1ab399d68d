"""`nemotron3 train`: prepare text, run Megatron's training loop, report the losses.

command.py           the command and its options
training.py          the steps of a run, in the calling process
processes.py         start and follow the training processes
pretrain_script.py   what they run: a short form of the stock `pretrain_hybrid.py`
log.py, report/      read Megatron's log; print and plot the losses
data/                text -> tokenizer and data set
build.py             `build_model` and `model_provider`: a model inside a Python program
monitor/             stability of a run
omni/                Nano Omni's model, data and entry
teacher/             settings of a teacher, and what is checked of it
"""

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
