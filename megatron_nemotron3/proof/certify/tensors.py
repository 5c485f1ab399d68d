"""A model's tensors as if there were one rank, under their checkpoint keys, whole.

`load` cuts them for this rank and `gather` puts the ranks' pieces together again, so runs of different
layouts compare key by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.hooks import unwrapped

#: Tensors of a whole model by checkpoint key.
Tensors = dict[str, Tensor]
#: (key, global shape, offset, this rank's part) of everything a rank holds.
Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


class RanksDiffer(RuntimeError):
    """Ranks that must hold one model, or report one number, do not."""


def unmatched(expected: Tensors, found: Tensors) -> str:
    """Say which is the first key that only one of two sets has; "" if none is."""
    odd = sorted(expected.keys() ^ found.keys())
    return f"{odd[0]} is {'missing' if odd[0] in expected else 'new'}" if odd else ""


def gather(ranks: Sequence[Pieces]) -> Tensors:
    """Put the ranks' pieces together. A rank holds nothing of an element where its piece is NaN."""
    whole: Tensors = {}
    seen: dict[str, Tensor] = {}
    for pieces in ranks:
        for key, shape, offset, part in pieces:
            if key not in whole:
                whole[key] = torch.zeros(shape, dtype=part.dtype)
                seen[key] = torch.zeros(shape, dtype=torch.bool)
            if tuple(whole[key].shape) != shape:
                raise RanksDiffer(f"{key}: ranks differ in its shape, {tuple(whole[key].shape)} and {shape}")
            place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape))
            old, known, here = whole[key][place], seen[key][place], ~part.isnan()
            difference = torch.where(known & here, (old - part).abs(), 0.0)
            if difference.any():
                raise RanksDiffer(f"{key}: ranks differ by {difference.max():.3g} in a shared part")
            whole[key][place] = torch.where(here, part, old)
            seen[key][place] = known | here
    if missing := [key for key, mask in seen.items() if not mask.all()]:
        raise RanksDiffer(f"no rank holds a number in all of {', '.join(missing)}")
    return whole


# What follows runs on the ranks.


def sharded(chunks: Sequence[Any]) -> list[Any]:
    """The ShardedTensors of a rank's model chunks, data as views of the parameters and buffers."""
    from megatron_nemotron3.checkpoints.convert import into_model

    return [tensor for chunk in chunks for tensor in into_model.sharded(unwrapped(chunk))]


def pieces(chunks: Sequence[Any]) -> Pieces:
    """Copies of everything this rank would save."""
    result: Pieces = []
    for t in sharded(chunks):
        part = t.data.detach().clone()
        part = part.reshape((1,) * t.prepend_axis_num + part.shape)
        result.append((t.key, tuple(t.global_shape), tuple(t.global_offset), part))
    return result


def load(chunks: Sequence[Any], weights: Tensors) -> None:
    """Copy this rank's part of the whole model's weights into it."""
    with torch.no_grad():
        for t in sharded(chunks):
            offset, local = t.global_offset, (1,) * t.prepend_axis_num + tuple(t.data.shape)
            part = weights[t.key][tuple(slice(o, o + n) for o, n in zip(offset, local))]
            t.data.copy_(part.reshape(t.data.shape))


def pieces_of(chunks: Sequence[Any], parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Pieces:
    """`pieces` with values, of any type, in place of parameters.

    A parameter keeps its data: with data of another type it would lose the hooks on its gradient.
    """
    places = [
        (module._parameters, name, p)
        for chunk in chunks
        for module in chunk.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]
    others = {id(p): _in_place_of(p, value) for p, value in zip(parameters, values, strict=True)}
    try:
        for held, name, p in places:
            held[name] = others.get(id(p), p)
        return pieces(chunks)
    finally:
        for held, name, p in places:
            held[name] = p


def _in_place_of(parameter: Tensor, value: Tensor) -> torch.nn.Parameter:
    """A parameter with another value and all that Megatron notes on it."""
    other = torch.nn.Parameter(value, requires_grad=False)
    other.__dict__.update(parameter.__dict__)
    return other


def without_biases(found: Pieces) -> Pieces:
    """Pieces of what has a gradient: all but expert biases."""
    return [piece for piece in found if not piece[0].endswith("expert_bias")]


def gradients(chunks: Sequence[Any]) -> Pieces:
    """Copies of the accumulated gradients, cut and named as the parameters are; zeros of frozen ones."""
    parameters = [p for chunk in chunks for p in unwrapped(chunk).parameters()]
    values = [p.main_grad.clone() if p.requires_grad else torch.zeros_like(p.data) for p in parameters]
    return without_biases(pieces_of(chunks, parameters, values))


def fsdp_weights(chunk: Any) -> Pieces:
    """Copies of the weights that the optimizer of Megatron-FSDP holds, and of all buffers."""
    return _assembled(chunk, lambda buffer, name, weight: weight)


def fsdp_gradients(chunk: Any) -> Pieces:
    """Copies of the gradients that the optimizer of Megatron-FSDP gets, cut and named as the weights are."""
    return without_biases(_assembled(chunk, lambda buffer, name, weight: buffer.dist_main_grad[name]))


def _assembled(chunk: Any, shard: Callable[[Any, str, Any], Any]) -> Pieces:
    """`pieces` of a model that Megatron-FSDP divides: `shard` gives this rank's part of each parameter."""
    buffer, fsdp = chunk.param_and_grad_buffer, chunk.module
    whole = {}
    for name, weight in buffer.optimizer_named_parameters:
        group = buffer.parameter_groups[buffer.param_to_param_group[weight.orig_param]]
        ranks = group.main_grad_buffer.data_parallel_group
        parts = [torch.empty(0)] * ranks.size()
        local = shard(buffer, name, weight).to_local().detach().flatten()
        torch.distributed.all_gather_object(parts, local, group=ranks)
        whole[name] = torch.cat(parts).view(weight.orig_param.shape)
    fsdp._replace_param_with_raw_if_needed()
    fsdp.is_param_fsdp_distributed = True  # else its hook on state_dict replaces them again
    parameters = dict(unwrapped(chunk).named_parameters())
    try:
        return pieces_of([chunk], list(parameters.values()), [whole[name] for name in parameters])
    finally:
        fsdp.is_param_fsdp_distributed = False
        fsdp._replace_param_with_distributed_if_needed()
