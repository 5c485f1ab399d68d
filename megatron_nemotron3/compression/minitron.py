"""Minitron pruning (arXiv 2407.14679, 2504.11409) of a hybrid through nvidia-modelopt.

    pruned, weights = prune(model, config, {"mamba_num_heads": 8, "hidden_size": 96}, calibrate)
    student = build_model(pruned, …)
    load(student, weights)

modelopt ranks widths by activations during `calibrate(model)`, keeps Mamba heads and query heads within their
groups, drops the layers whose input and output are most similar, and cuts the weights. The result is an
ordinary config and a state dict: they fit a fresh model, which Megatron trains and `nemotron3 convert`
exports.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_nemotron3.checkpoint.folders import RELEASE, write_tracker
from megatron_nemotron3.compression.plugin import load_plugin
from megatron_nemotron3.convert.megatron_args import args_of, common_state
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.pattern import MTP_SEPARATOR, without_layout
from megatron_nemotron3.models.tiny import TINY_SUFFIX

#: modelopt's name (Megatron's field) -> ours, where they differ.
_FIELDS = {"ffn_hidden_size": "dense_ffn_hidden_size"}
#: Dimension -> kinds of layers that have it; a model without such a layer cannot be pruned along it.
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
#: modelopt's granularity option -> the dimensions it applies to.
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
    """Refuse sizes that modelopt refuses with a worse message, or prunes to an inconsistent model.

    Raises:
        ValueError: modelopt does not prune the dimension, the model does not have it, the size is larger or
            splits a group, the MTP block, which modelopt does not change, has the same width, or the layers'
            experts differ.
    """
    if config.moe_layers is not None:
        raise ValueError(
            f"{config.name} has experts of its own in each layer (moe_layers), and modelopt prunes "
            "the experts of all layers to one size: prune a model whose layers are alike, such as super"
        )
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
                f"{dimension} is also a size of the MTP block {config.mtp_pattern!r}, which modelopt does "
                "not change: build the model without it, config.but(mtp_pattern=None, mtp_num_layers=0)"
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

    The model is cut in place and unusable afterwards (its router still counts the old experts): build a new
    one from the returned config and load the returned weights.

    Args:
        model: HybridModel of `config` on any spec of this package, one process, no wrapper. With TE layers
            it must be on a GPU.
        sizes: dimension of `DIMENSIONS` -> new size.
        calibrate: runs forward passes on calibration text; evaluation mode, no gradient.
        scores: a folder for modelopt's importance scores, which a second pruning of the same model reads
            instead of measuring again. None: they are not kept.

    Returns:
        Config and state dict of the pruned model.

    Raises:
        ImportError: modelopt is missing; the message has the pip line.
        ValueError: as `check`.
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
        # modelopt inserts the rank before the dot. It fails on a folder that exists without the file.
        search["checkpoint"] = os.path.join(scores, "rank.pth")
    on_cpu = next(model.parameters()).device.type == "cpu"
    with cpu_mode() if on_cpu else nullcontext():  # modelopt gathers scalars
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
    changes |= {"name": _pruned_name(config), "title": f"{config.title}, pruned"}
    pruned = config.but(published_total=None, published_active=None, **changes)
    return pruned, model.state_dict()


def _pruned_name(config: Nemotron3Config) -> str:
    """ "<name>-pruned"; the suffix of tiny models stays last, because `train` looks for it."""
    base = config.name.removesuffix(TINY_SUFFIX)
    return f"{base}-pruned{config.name[len(base) :]}"


def _granularity(config: Nemotron3Config, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coarsest steps that reach the sizes: modelopt enumerates its whole search space."""

    def step(dimensions: Iterable[str]) -> int:
        pairs = [(size(config, d) or 0, sizes.get(d, 0)) for d in dimensions if size(config, d)]
        return math.gcd(*(n for pair in pairs for n in pair)) or 1

    return {option: step(dimensions) for option, dimensions in _DIVISORS.items()}


def kept_pattern(hybrid_layer_pattern: str) -> str:
    """The decoder's layers of Megatron's pattern, without pipeline cuts, groups and MTP."""
    return without_layout(hybrid_layer_pattern.partition(MTP_SEPARATOR)[0])


def load(model: HybridModel, weights: Mapping[str, Any]) -> None:
    """Load pruned weights into a fresh model of the pruned config. An MTP block keeps its initial weights.

    Raises:
        RuntimeError: names or shapes differ, except for TE's empty state and an MTP block.
    """
    ours = {name: value for name, value in weights.items() if not name.endswith("_extra_state")}
    missing, unexpected = model.load_state_dict(ours, strict=False)
    lost = [name for name in missing if not name.endswith("_extra_state") and not name.startswith("mtp.")]
    if lost or unexpected:
        raise RuntimeError(f"pruned weights do not fit the model: missing {lost}, unexpected {unexpected}")


def save(model: HybridModel, config: Nemotron3Config, folder: Path) -> None:
    """Write FOLDER/release (torch_dist), as `nemotron3 convert from-hf` does.

    Megatron's `--load` reads it in any layout, `nemotron3 convert to-hf` exports it.

    Args:
        model: HybridModel of `config`, whole in this process; of a `distillation_model` the student is saved.
        folder: new; its tracker is written last.

    Raises:
        FileExistsError: the folder holds a release already.
    """
    target = folder / RELEASE
    target.mkdir(parents=True)
    groups = parallel_state.get_data_parallel_group(with_context_parallel=True)
    weight = model.embedding.word_embeddings.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    state = common_state(args_of(config, padded_vocab_size=weight.shape[0], dtype=dtype))
    metadata = state.pop("content_metadata")
    state["model"] = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": groups})
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    write_tracker(folder, RELEASE)
