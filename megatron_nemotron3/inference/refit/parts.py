"""The parts of tensors that messages are made of: packing, unpacking, and their checksums.

A checksum adds up from its parts, so that both sides compute it on what they hold: the sum over all elements
of bits * R(i) * C(j) modulo 2**64, for an element in row i of the first axis and place j of the others in the
whole tensor; R and C are odd pseudo-random numbers. A changed element always shows, and swapped rows, columns
or experts do but for a chance of the order of 2**-60. It is a proof against mistakes, not an adversary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.inference.refit.layouts import Training
from megatron_nemotron3.inference.refit.plan import RefitPlan, TensorTransfer, aligned
from megatron_nemotron3.inference.refit.planner import tensors
from megatron_nemotron3.inference.refit.shares import serving_shares, training_shape

#: Elements per step, which bounds the memory of the integers.
_BLOCK = 1 << 20
_COLUMNS = 1 << 40
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: A part of one tensor: its transfer, and the expert's number (0 for other tensors).
Part = tuple[TensorTransfer, int]


class LazyTensors(dict[str, Tensor]):
    """Tensors, each made when it is first looked up."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._make(name)
        return self[name]


def parts_of(transfer: TensorTransfer) -> list[Part]:
    """The parts of a transfer, one for each expert."""
    return [(transfer, expert) for expert in range(transfer.first, transfer.last)]


def name_of(part: Part) -> str:
    """Hugging Face's name of the tensor."""
    return part[0].name.replace("{e}", str(part[1]))


def target_of(part: Part) -> str:
    """Name of the receiver's parameter."""
    return part[0].target.replace("{e}", str(part[1]))


def space_of(parts: list[Part]) -> int:
    """Bytes of a message."""
    return sum(aligned(part[0].piece) for part in parts)


def _sent_pieces(part: Part, tensor: Tensor) -> Iterator[Tensor]:
    """The cuts of a sender's tensor, as they are sent but for their type."""
    tensor = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    for cut in part[0].cuts:
        piece = tensor.narrow(part[0].axis, cut.source, cut.stop - cut.start)
        yield -piece.float().exp() if part[0].negated_exp else piece


def _held_pieces(part: Part, tensor: Tensor) -> Iterator[Tensor]:
    """The cuts in a receiver's parameter."""
    transfer, expert = part
    own = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    if transfer.stacked:
        own = own[transfer.place + expert - transfer.first]
    for cut in transfer.cuts:
        yield own.narrow(transfer.axis, cut.target, cut.stop - cut.start)


def pack(buffer: Tensor, parts: list[Part], source: Mapping[str, Tensor]) -> None:
    """Write parts of a sender's tensors into a message."""
    for part, elements in _split(buffer, parts):
        for piece in _sent_pieces(part, source[name_of(part)]):
            place, elements = elements[: piece.numel()], elements[piece.numel() :]
            place.view(piece.shape).copy_(piece)


def unpack(buffer: Tensor, parts: list[Part], target: Any) -> None:
    """Write the parts of a message into a receiver's parameters."""
    for part, elements in _split(buffer, parts):
        for piece in _held_pieces(part, target[target_of(part)]):
            place, elements = elements[: piece.numel()], elements[piece.numel() :]
            piece.copy_(place.view(piece.shape))


def _split(buffer: Tensor, parts: list[Part]) -> Iterator[tuple[Part, Tensor]]:
    """The parts of a message, each with its elements."""
    at = 0
    for part in parts:
        size = part[0].piece
        yield part, buffer[at : at + size].view(getattr(torch, part[0].dtype))
        at += aligned(size)


def sum_sent(part: Part, tensor: Tensor) -> int:
    """Checksum of a part, computed on the sender's tensor as it is sent."""
    dtype = getattr(torch, part[0].dtype)
    held = list(_sent_pieces(part, tensor))
    sent = [piece.to(dtype) for piece in held]
    if dtype == torch.float16:
        for before, after in zip(held, sent, strict=True):
            if (lost := after.isinf() & before.isfinite()).any():
                raise ValueError(
                    f"{name_of(part)} has {before[lost].abs().max():.4g}, FP16 ends at 65504: serve in BF16"
                )
    return _sum(part[0], sent)


def sum_held(part: Part, tensor: Tensor) -> int:
    """Checksum of a part, computed on the receiver's parameter."""
    return _sum(part[0], list(_held_pieces(part, tensor)))


def _sum(transfer: TensorTransfer, pieces: list[Tensor]) -> int:
    total = 0
    for cut, piece in zip(transfer.cuts, pieces, strict=True):
        total = added(total, checksum(piece, transfer.axis, cut.start))
    return total


def checksum(part: Tensor, axis: int = 0, start: int = 0) -> int:
    """Sum of a part of a tensor, from index `start` of `axis` on; the default is the whole tensor."""
    rows = part.detach().reshape(part.shape[0], -1).contiguous()
    columns = _factors(start if axis == 1 else 0, rows.shape[1], _COLUMNS, rows.device)
    first = start if axis == 0 else 0
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for begin in range(0, len(rows), step):
        bits = rows[begin : begin + step].view(_BITS[rows.element_size()]).long()
        total += ((bits * columns).sum(1) * _factors(first + begin, len(bits), 0, rows.device)).sum()
    return int(total)


def _factors(first: int, number: int, stream: int, device: torch.device) -> Tensor:
    """Odd numbers that belong to the indices from `first` on (SplitMix64)."""
    x = torch.arange(first, first + number, dtype=torch.int64, device=device) + (stream + 1)
    x = x * -7046029254386353131
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def added(one: int, other: int) -> int:
    """Sum of two checksums."""
    return (one + other + (1 << 63)) % (1 << 64) - (1 << 63)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def training_tensors(training: Training, rank: int, chunks: Sequence[Any]) -> dict[str, Tensor]:
    """What a training rank holds, by Hugging Face's names: q, k and v name one tensor of Megatron's.

    Args:
        rank: of the training ranks.
        chunks: its model chunks, one for each virtual stage, in Megatron's wrappers or without.

    Raises:
        ValueError: a parameter is not one of the model or is an adapter's, or there are other chunks.
    """
    if isinstance(chunks, torch.nn.Module):
        raise ValueError("chunks is one model: give a list, [model]")
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
            if ".adapter." in local:
                raise ValueError(f"{local}: LoRA adapters are not sent: merge them into the weights first")
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
            if not source[name].isfinite().all():
                return f"{name} holds infinity or NaN: it would be served"
    return None
