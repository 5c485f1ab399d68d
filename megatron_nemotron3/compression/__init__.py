"""Pruning and distillation through nvidia-modelopt's Megatron plugin (docs/compression.md).

plugin    import of modelopt's plugin, with or without TransformerEngine
dynamic   our layers in modelopt's registry of prunable modules
minitron  pruning: a model and sizes -> a smaller config and its weights; and saving the result
distill   a student and its teacher as one model with modelopt's losses

modelopt is optional: nothing here imports it until a function is called.
"""

from megatron_nemotron3.compression.distill import distillation_loss, distillation_model
from megatron_nemotron3.compression.minitron import DIMENSIONS, load, prune, save, size
from megatron_nemotron3.compression.plugin import modelopt_problem

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
