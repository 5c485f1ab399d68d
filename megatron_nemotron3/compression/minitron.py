"""Minitron pruning (arXiv 2407.14679, 2504.11409) of a hybrid through nvidia-modelopt.

    pruned, weights = prune(model, config, {"mamba_num_heads": 8, "hidden_size": 96}, calibrate)
    student = build_model(pruned, …)
    load(student, weights)

modelopt ranks by activations of `calibrate(model)`, keeps Mamba heads within their groups and query heads
within theirs, drops the layers whose input and output are most alike, and cuts. What comes back is an
ordinary config and ordinary weights: a fresh model of that config takes them, Megatron trains it, `nemotron3
convert` exports it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_nemotron3.compression.plugin import gloo_gathers_scalars, load_plugin
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tiny import TINY_SUFFIX

#: modelopt's name (Megatron's field) -> ours, where they differ.
_FIELDS = {"ffn_hidden_size": "dense_ffn_hidden_size"}
#: Dimension -> layer kinds it is a width of; what no layer has cannot be pruned.
DIMENSIONS = {
    "hidden_size": "M*E-",
    "num_layers": "M*E-",
    "mamba_num_heads": "M",
    "mamba_head_dim": "M",
    "num_attention_heads": "*",
    "ffn_hidden_size": "-",
    "num_moe_experts": "E",
    "moe_ffn_hidden_size": "E",
    "moe_shared_expert_intermediate_size": "E",
}
#: modelopt's granularity option -> the dimensions it holds for.
_DIVISORS = {
    "hidden_size_divisor": ("hidden_size",),
    "ffn_hidden_size_divisor": (
        "ffn_hidden_size",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
    ),
    "mamba_head_dim_divisor": ("mamba_head_dim",),
    "num_moe_experts_divisor": ("num_moe_experts",),
    "num_layers_divisor": ("num_layers",),
}


def size(config: Nemotron3Config, dimension: str) -> int | None:
    """The value of a dimension of `DIMENSIONS` in a config."""
    value: int | None = getattr(config, _FIELDS.get(dimension, dimension))
    return value


def check(config: Nemotron3Config, sizes: Mapping[str, int]) -> None:
    """Refuse what modelopt would refuse less clearly, or cut to a model that does not fit together.

    Raises:
        ValueError: a dimension that modelopt does not prune or the model does not have, a size that is not
            smaller or that breaks a group, or a width of the MTP block, which modelopt leaves as it is.
    """
    for dimension, new in sizes.items():
        if dimension not in DIMENSIONS:
            raise ValueError(f"{dimension} cannot be pruned by modelopt: choose from {', '.join(DIMENSIONS)}")
        kinds, old = DIMENSIONS[dimension], size(config, dimension)
        if old is None or not set(kinds) & set(config.pattern):
            raise ValueError(f"{dimension}: {config.name} has no {' or '.join(kinds)} layer")
        if not 0 < new <= old:
            raise ValueError(f"{dimension}={new}: {config.name} has {old}, give 1 to {old}")
        if dimension != "num_layers" and set(kinds) & set(config.mtp_pattern or ""):
            raise ValueError(
                f"{dimension} is also a size of the MTP block {config.mtp_pattern!r}, which modelopt leaves "
                "as it is: build the model without it, config.but(mtp_pattern=None, mtp_num_layers=0)"
            )
    if (experts := sizes.get("num_moe_experts")) is not None and experts < (config.moe_router_topk or 0):
        raise ValueError(
            f"num_moe_experts={experts} is less than moe_router_topk={config.moe_router_topk}: keep that many"
        )
    for dimension, groups in (
        ("mamba_num_heads", config.mamba_num_groups),
        ("num_attention_heads", config.num_query_groups),
    ):
        if sizes.get(dimension, 0) % groups:
            raise ValueError(
                f"{dimension}={sizes[dimension]}: heads are pruned within their {groups} groups, use a "
                f"multiple of {groups}"
            )


def prune(
    model: HybridModel,
    config: Nemotron3Config,
    sizes: Mapping[str, int],
    calibrate: Callable[[torch.nn.Module], None],
    *,
    scores: str | None = None,
) -> tuple[Nemotron3Config, dict[str, torch.Tensor]]:
    """Prune a model to the sizes given.

    The model is cut in place and not usable then (its router still counts the old experts): build a new one
    from what is returned.

    Args:
        model: HybridModel of `config` on any spec of this package, one process, no wrapper. What modelopt
            prunes with TE layers needs their GPU.
        sizes: dimension of `DIMENSIONS` -> new size.
        calibrate: runs forward passes on text that importance is measured on; evaluation mode, no gradient.
        scores: a folder for modelopt's scores; with the same folder another pruning of the same model
            measures nothing. None: they are not kept.

    Returns:
        The pruned model's config, and its state dict.

    Raises:
        ImportError: modelopt is missing; the message has the pip line.
        ValueError: `check`.
    """
    check(config, sizes)
    load_plugin()
    from modelopt.torch import opt
    from modelopt.torch import prune as modelopt_prune
    from modelopt.torch.prune.plugins.mcore_minitron import get_mcore_minitron_config

    from megatron_nemotron3.compression import dynamic

    def measure(prunable: torch.nn.Module) -> None:
        with dynamic.measuring(prunable):
            calibrate(prunable)

    mode = get_mcore_minitron_config(**_granularity(config, sizes))
    search: dict[str, Any] = {"forward_loop": measure}
    if scores is not None:
        # modelopt puts the rank before the dot; a folder that exists without the file would be an error.
        search["checkpoint"] = os.path.join(scores, "rank.pth")
    with gloo_gathers_scalars():
        modelopt_prune.prune(
            model,
            mode=[("mcore_minitron", mode)],
            constraints={"export_config": dict(sizes)},
            dummy_input=None,
            config=search,
        )
    if opt.ModeloptStateManager.has_state_for_mode_type("prune", model=model):
        opt.ModeloptStateManager.remove_state(model)
    changes: dict[str, Any] = {_FIELDS.get(name, name): new for name, new in sizes.items()}
    if changes.pop("num_layers", None) is not None:
        changes["pattern"] = kept_pattern(model.hybrid_layer_pattern)
    changes |= {"name": _name(config), "title": f"{config.title}, pruned"}
    pruned = config.but(published_total=None, published_active=None, **changes)
    return pruned, model.state_dict()


def _name(config: Nemotron3Config) -> str:
    """ "<name>-pruned", and the mark of tiny models stays last: `train` reads it."""
    base = config.name.removesuffix(TINY_SUFFIX)
    return f"{base}-pruned{config.name[len(base) :]}"


def _granularity(config: Nemotron3Config, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coarsest steps in which modelopt's search space holds the sizes: it enumerates combinations."""

    def step(dimensions: Iterable[str]) -> int:
        pairs = [(size(config, d) or 0, sizes.get(d, 0)) for d in dimensions if size(config, d)]
        return math.gcd(*(n for pair in pairs for n in pair)) or 1

    return {option: step(dimensions) for option, dimensions in _DIVISORS.items()}


def kept_pattern(hybrid_layer_pattern: str) -> str:
    """The decoder's layers of Megatron's pattern, without pipeline cuts and MTP."""
    return hybrid_layer_pattern.partition("/")[0].replace("|", "")


def load(model: HybridModel, weights: Mapping[str, Any]) -> None:
    """Put pruned weights into a fresh model of the pruned config.

    Raises:
        RuntimeError: names or shapes differ, other than TE's empty state and an MTP block, which is new then.
    """
    ours = {name: value for name, value in weights.items() if not name.endswith("_extra_state")}
    missing, unexpected = model.load_state_dict(ours, strict=False)
    lost = [name for name in missing if not name.endswith("_extra_state") and not name.startswith("mtp.")]
    if lost or unexpected:
        raise RuntimeError(f"pruned weights do not fit: {lost} are missing, {unexpected} have no place")
