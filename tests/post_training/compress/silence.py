"""A model in which everything that a pruning takes away is silent, so that what is left computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megatron_nemotron3 import build_model
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import prefixes
from megatron_nemotron3.post_training.compress.scores import Axes, Scores, statistics


def random_scores(config: Nemotron3Config, seed: int = 0) -> Scores:
    """Importance of nothing that was measured."""
    made = numpy.random.default_rng(seed)
    values = {key: made.random(shape, numpy.float32) for key, _, _, shape in statistics(config)}
    return Scores(config, 1, {key: numpy.asarray(value, numpy.float32) for key, value in values.items()})


def build(config: Nemotron3Config) -> Any:
    """A model in FP32, with signals against which the epsilon of norms is small."""
    torch.manual_seed(1)
    model = build_model(config, precision="fp32", backend="torch")
    with torch.no_grad():
        model.embedding.word_embeddings.weight.mul_(30)
        for name, parameter in model.named_parameters():
            if name.endswith(".D"):
                parameter.fill_(30)
            elif "norm" in name and parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def all_logits(model: Any, seed: int = 0) -> list[torch.Tensor]:
    """Logits of every MTP depth, then of the model, for [2, 130] tokens, more than a chunk."""
    found: list[torch.Tensor] = []
    hook = model.output_layer.register_forward_hook(lambda _m, _i, output: found.append(output[0].clone()))
    tokens = torch.randint(0, 2048, (2, 130), generator=torch.Generator().manual_seed(seed))
    model.eval()
    model(tokens, torch.arange(130).expand(2, -1), None)
    hook.remove()
    return found


def _others(index: Any, size: int) -> torch.Tensor:
    gone = torch.ones(size, dtype=torch.bool)
    if index is not None:
        gone[torch.from_numpy(numpy.asarray(index)).long()] = False
    else:
        gone[:] = False
    return gone


@torch.no_grad()
def silence(model: Any, scores: Scores, pruned: Nemotron3Config, layers: Sequence[int]) -> None:
    """Silence what is not left in the model of `pruned`."""
    config, weights = scores.config, dict(model.named_parameters()) | dict(model.named_buffers())
    there = list(prefixes(config))
    here = iter(prefixes(pruned))
    for number, prefix in enumerate(there):
        dropped = 0 < number <= config.num_layers and number - 1 not in layers
        axes = {} if dropped else scores.axes(prefix, next(here))
        own = {name: t for name, t in weights.items() if name.startswith(prefix.megatron)}
        _silence_layer(prefix.megatron, prefix.part, own, axes, config, dropped)
        gone = _others(scores.hidden(pruned.hidden_size), config.hidden_size)
        for name, t in own.items():
            if any(one in name for one in ("out_proj", "linear_proj", "linear_fc2", "fc2_latent", "eh_proj")):
                if ".experts." not in name.replace("shared_experts", "") or not config.moe_latent_size:
                    t[gone] = 0
            elif name.endswith("word_embeddings.weight"):
                t[:, gone] = 0


def _silence_layer(
    prefix: str, part: str, own: dict[str, torch.Tensor], axes: Axes, config: Nemotron3Config, dropped: bool
) -> None:
    def of(name: str) -> torch.Tensor:
        return own[prefix + name]

    last = {"M": "mixer.out_proj.weight", "*": "self_attention.linear_proj.weight"}
    last |= {"-": "mlp.linear_fc2.weight"}
    if dropped:
        ends = ("fc2_latent_proj.weight", "shared_experts.linear_fc2.weight", last.get(part, "?"))
        for name, t in own.items():
            if name.endswith(ends) or (not config.moe_latent_size and ".experts.linear_fc2" in name):
                t.zero_()
    elif part == "M":
        inner = config.mamba_inner_size
        gone = _others(axes["inner"], inner)
        of("mixer.in_proj.weight")[inner : 2 * inner][gone] = 0
        of("mixer.conv1d_weight")[:inner][gone] = 0
        of("mixer.conv1d_bias")[:inner][gone] = 0
    elif part == "*":
        weight = of("self_attention.linear_proj.weight")
        weight[:, _others(axes["q"], weight.shape[1])] = 0
    elif part == "-":
        weight = of("mlp.linear_fc2.weight")
        weight[:, _others(axes["dense"], weight.shape[1])] = 0
    elif part == "E":
        of("mlp.router.expert_bias")[_others(axes["experts"], config.num_moe_experts or 0)] = -10
        shared = of("mlp.shared_experts.linear_fc2.weight")
        shared[:, _others(axes["shared"], shared.shape[1])] = 0
        for expert in range(config.num_moe_experts or 0):
            weight = of(f"mlp.experts.linear_fc2.weight{expert}")
            weight[:, _others(axes["ffn"][expert], weight.shape[1])] = 0  # type: ignore[index]
        if config.moe_latent_size:
            of("mlp.fc1_latent_proj.weight")[_others(axes["latent_in"], config.moe_latent_size)] = 0
            of("mlp.fc2_latent_proj.weight")[:, _others(axes["latent_out"], config.moe_latent_size)] = 0


@torch.no_grad()
def scale_norms(weights: dict[str, torch.Tensor], old: Nemotron3Config, new: Nemotron3Config) -> None:
    """Silent channels count in a norm's mean; scale the gains of what is left by what they took."""
    hidden = (old.hidden_size / new.hidden_size) ** 0.5
    inner = (old.mamba_inner_size / new.mamba_inner_size) ** 0.5
    for name, t in weights.items():
        if "norm" in name and t.dim() == 1:
            t.mul_(inner if name.endswith("mixer.norm.weight") else hidden)
