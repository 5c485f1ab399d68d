"""The tensors of a rank by the names of a plan: a trainer's model chunks, and an engine's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.inference.refit.layouts import Training
from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.inference.refit.planner import tensors
from megatron_nemotron3.inference.refit.shares import serving_shares, training_shape

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def training_tensors(training: Training, rank: int, chunks: Sequence[Any]) -> dict[str, Tensor]:
    """What a training rank holds, by Hugging Face's names: q, k and v name one tensor of Megatron's.

    Args:
        rank: of the training ranks.
        chunks: its model chunks, one for each virtual stage, in Megatron's wrappers or without.

    Raises:
        ValueError: a parameter is not one of the model, or there is another number of chunks.
    """
    layout, experts = training.layout, training.config.num_moe_experts or 0
    if len(chunks) != layout.vpp:
        raise ValueError(f"{len(chunks)} model chunks given, VPP={layout.vpp} has {layout.vpp}")
    size = layout.tp * layout.cp * layout.dp
    pp_rank, ep_rank = rank // size, rank % size // layout.etp % layout.ep
    lookup, found = NameLookup(training.config), {}
    for number, chunk in enumerate(chunks):
        stage = number * layout.pp + pp_rank
        offset = training.stages.index(stage) if stage in training.stages else 0
        for local, tensor in _weights(unwrapped(chunk)):
            if layer := _LAYER.match(local):  # Megatron numbers the layers of a stage from 0
                local = f"decoder.layers.{int(layer[1]) + offset}.{local[layer.end() :]}"
            match = lookup.key(local)
            expert = "" if match.expert is None else str(ep_rank * (experts // layout.ep) + match.expert)
            for hf in match.row.hf:
                found[match.prefix.hf + hf.name.replace("{e}", expert)] = tensor
    return found


def _weights(chunk: torch.nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from ((name, p.data) for name, p in chunk.named_parameters())
    # The only buffer that is a weight.
    yield from ((name, b) for name, b in chunk.named_buffers() if name.endswith("router.expert_bias"))


def serving_parameters(plan: RefitPlan, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and type of every parameter of a serving rank, as its engine creates them.

    Parameters of a vLLM or SGLang MTP model are below "draft.".
    """
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    serving = plan.serving
    for held in tensors(plan.training, serving):
        role, config = held.role, held.prefix.config
        size = held.sizes[1]
        if not any(
            rank in serving.holders(role, held.stages[1], index, block)
            for index in range(size)
            for block in range(serving.ep if role == "experts" else 1)
        ):
            continue
        dtype = getattr(torch, held.dtype)
        if held.parameter is None:
            for expert in range(held.experts):
                found[held.tensor.replace("{e}", str(expert))] = held.shape, dtype
            continue
        shape = serving_shares(held.row, config, size)[1]
        if held.parameter.stacked:
            shape = held.experts // serving.ep, *shape
        found[held.target] = shape, dtype
    return found


def check_target(plan: RefitPlan, rank: int, target: Mapping[str, Tensor]) -> str | None:
    """How a serving rank's parameters differ from those of the plan; None if they do not."""
    expected = serving_parameters(plan, rank)
    if missing := [name for name in expected if name not in target]:
        return f"{len(missing)} of {len(expected)} parameters are missing, first {missing[0]!r}"
    if unknown := [name for name in target if name not in expected]:
        return f"{len(unknown)} parameters are unknown to the plan, first {unknown[0]!r}"
    for name, (shape, dtype) in expected.items():
        if tuple(target[name].shape) != shape or target[name].dtype != dtype:
            own = f"{list(target[name].shape)} {target[name].dtype}"
            return f"{name} is {own}, {plan.serving} has {list(shape)} {dtype}"
    return None


def check_source(plan: RefitPlan, rank: int, source: Mapping[str, Tensor]) -> str | None:
    """What a training rank must send, but lacks or holds in another form; None if nothing.

    A tensor of another layout must not pass: its first rows would go under the names of other rows.
    """
    training = plan.training
    needed = {name for transfer, _ in plan.outgoing(rank) for name in transfer.names}
    for held in tensors(training, plan.serving):
        shape = training_shape(held.row, held.prefix.config, held.sizes[0], training.vocabulary)
        for expert in range(held.experts):
            if held.tensor.replace("{e}", str(expert)) not in needed:
                continue
            name = held.weight.replace("{e}", str(expert))
            if name not in source:
                return f"it is to send {name}, which it does not hold"
            own, dtype = tuple(source[name].shape), source[name].dtype
            if own != shape:
                return f"{name} is {list(own)}, {training} has {list(shape)}"
            if not dtype.is_floating_point or dtype.itemsize < 2:
                return f"{name} is {dtype}: give weights of 16 bits or more"
    return None
