"""Pruning and distillation through nvidia-modelopt's Megatron plugin (docs/compression.md).

plugin    import of modelopt's plugin, with or without TransformerEngine
dynamic   our layers in modelopt's registry of prunable modules
minitron  a model and sizes -> the smaller config and its weights
distill   a student and its teacher as one model with modelopt's losses
release   a model of this process -> a checkpoint to start from

modelopt is optional: nothing here imports it until a function is called.
"""

from megatron_nemotron3.compression.distill import distillation_loss, distillation_model
from megatron_nemotron3.compression.minitron import DIMENSIONS, load, prune, size
from megatron_nemotron3.compression.plugin import modelopt_problem
from megatron_nemotron3.compression.release import save

__all__ = [
    "DIMENSIONS",
    "distillation_loss",
    "distillation_model",
    "load",
    "modelopt_problem",
    "prune",
    "save",
    "size",
]
