"""Make the plan of a refit.

Parts that few ranks hold get their senders first, each receiver the sender with the least bytes so far; what
every rank of a stage holds levels out the rest. A step has layers of all stages, so that none waits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy

from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.plan import ALIGNMENT, RefitPlan, TensorTransfer, aligned
from megatron_nemotron3.inference.refit.shares import (
    PARAMETERS,
    AxisCut,
    EngineParameter,
    Role,
    Shares,
    Stored,
    TensorShare,
    axis_of,
    cuts,
    hf_shape,
    serving_shares,
    stored_of,
    training_shares,
)
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.tensors import Row, hf_root, rows_of

_Ranks = Any  # numpy int32 [ranks]
#: Default for the largest buffer of a step.
BUFFER = 256 << 20
#: A step's buffer is filled with at least this many parts, so that little of it stays empty.
FILLING = 4
#: Number of steps that a part may still join.
OPEN = 16


@dataclass(frozen=True)
class HeldTensor:
    """One tensor (or one of each expert) and how the receivers hold it.

    stages: pipeline ranks of the senders, and stages of the receivers. stored: the tensor of a packed weight
    that this is; None: it is as the model has it.
    """

    training: Training
    serving: EngineLayout
    prefix: Prefix
    row: Row
    index: int
    parameter: EngineParameter | None
    stages: tuple[tuple[int, ...], tuple[int, ...]]
    stored: Stored | None = None

    @property
    def weight(self) -> str:
        """Hugging Face's name of the model's tensor, with {e} for the expert."""
        return self.prefix.hf + self.row.hf[self.index].name

    @property
    def tensor(self) -> str:
        """Name of the tensor that the receivers hold."""
        return self.weight if self.stored is None else self.stored.name(self.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.stored is not None:
            return self.stored.shape
        return hf_shape(self.row, self.index, self.prefix.config)

    @property
    def role(self) -> Role:
        return "whole" if self.parameter is None else self.parameter.role

    @property
    def axis(self) -> int:
        return axis_of(self.row) if self.stored is None or self.stored.columns else 0

    @property
    def target(self) -> str:
        if self.parameter is None:
            return self.tensor
        root = hf_root(self.serving.config) + "."
        return self.serving.rules.parameter_name(self.parameter, self.prefix.hf or root)

    @property
    def experts(self) -> int:
        """Number of tensors of this name."""
        return self.training.config.num_moe_experts or 1 if self.row.routed else 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Ranks over which each side cuts the tensor."""
        layout = self.training.layout
        return (layout.etp if self.row.routed else layout.tp), self.serving.group_size(self.role)

    def training_shares(self) -> tuple[Shares, ...]:
        """Shares of the model's tensor by training rank."""
        config, vocabulary = self.prefix.config, self.training.vocabulary
        return training_shares(self.row, config, self.sizes[0], vocabulary)[self.index]

    def shares(self) -> tuple[tuple[Shares, ...], tuple[Shares, ...]]:
        """Shares of both sides by rank of the group that cuts the tensor."""
        ranks, receiving = self.sizes
        have = self.training_shares()
        if self.parameter is None:
            every = ((TensorShare(0, (*self.shape, 1)[self.axis], 0),),)
            if self.stored is not None and self.axis:
                have = self.stored.cut(have, ranks, self.tensor)
            return have if self.stored is None or self.stored.columns else every, every
        return have, serving_shares(self.row, self.prefix.config, receiving)[0][self.index]

    @property
    def dtype(self) -> str:
        """Type in which it is sent, that of the receiver's parameter."""
        if self.stored is not None:
            return self.stored.dtype
        router = self.serving.fp32_router and self.row.hf[self.index].name == "mixer.gate.weight"
        return "float32" if self.row.float32 or self.negated_exp or router else self.serving.dtype

    @property
    def negated_exp(self) -> bool:
        return self.parameter is not None and self.parameter.negated_exp


def tensors(training: Training, serving: EngineLayout) -> Iterator[HeldTensor]:
    """Yield every tensor that the receivers hold, in the order of the layers."""
    config = training.config
    for prefix in prefixes(config):
        decoder = prefix.megatron.startswith("decoder.")
        layer = int(prefix.megatron.split(".")[2]) if decoder else None
        if not decoder and prefix.part != "model" and not serving.drafts:
            continue
        for row in rows_of(config, prefix.part):
            for index, named in enumerate(row.hf):
                parameter = None
                if serving.engine != "hf":
                    parameter = PARAMETERS[named.name.removeprefix(hf_root(config) + ".")]
                stages = (
                    training.stages_of(prefix.part, layer, named.name),
                    serving.stages_of(prefix.part, layer, named.name),
                )
                held = HeldTensor(training, serving, prefix, row, index, parameter, stages)
                weight = serving.packed.get(held.tensor.replace("{e}", "0"))
                if weight is None:
                    yield held
                    continue
                for stored in stored_of(weight):
                    yield dataclasses.replace(held, stored=stored)


@dataclass
class _Part:
    """A transfer, in which order it is sent, and who may send it."""

    order: tuple[float, int, int]
    transfer: TensorTransfer
    candidates: _Ranks


def make_plan(
    training: Training,
    serving: EngineLayout,
    *,
    buffer: int = BUFFER,
    colocated: bool = False,
    only: str | None = None,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> RefitPlan:
    """Plan a refit.

    Args:
        buffer: most bytes that a rank sends, and most that it receives, in a step.
        colocated: training rank r and serving rank r are one process, which copies what it has itself.
        only: pattern of names ("mtp.*") to which the plan is restricted.
        report: called with the number of transfers that have a step, and that of all.

    Raises:
        ValueError: the layouts are of different models, a side cannot hold the model, the buffer is less
            than a row of a tensor, no name fits the pattern, or engines lack a part of the model.
    """
    if training.config != serving.config:
        raise ValueError(f"{training.config.name} cannot be refitted into {serving.config.name}")
    training.config.require_in_hf()
    if buffer < 1:
        raise ValueError(f"buffer={buffer}: give a positive number of bytes")
    parts = list(_parts(training, serving, only))
    if not parts:
        raise ValueError(f"no tensor of {training.config.name} has a name like {only!r}")
    loads = numpy.zeros(training.layout.world_size, "int64")
    for part in sorted(parts, key=lambda p: (len(p.candidates), -p.transfer.bytes)):
        senders = _chosen_senders(part, loads, colocated)
        part.transfer = part.transfer._replace(senders=senders.tobytes())
    transfers = _in_steps(parts, training, serving, buffer, colocated, report)
    return RefitPlan(training, serving, buffer, colocated, transfers)


def _parts(training: Training, serving: EngineLayout, only: str | None) -> Iterator[_Part]:
    everything = list(tensors(training, serving))
    found = [held for held in everything if only is None or fnmatchcase(held.tensor, only)]
    layers: dict[int, dict[Prefix, int]] = {}
    for held in everything:
        own = layers.setdefault(held.stages[0][0], {})
        own.setdefault(held.prefix, len(own))
    ranks: dict[Any, _Ranks] = {}
    for tensor, held in enumerate(found):
        before: Counter[tuple[str, tuple[int, int]]] = Counter()
        own = layers[held.stages[0][0]]
        place = (own[held.prefix] + 0.5) / len(own)
        for first, last, local, sender, receiver, parts in _pairs(held):
            keys = (held.row, held.stages[0], *sender), (held.role, held.stages[1], *receiver)
            if keys[0] not in ranks:
                ranks[keys[0]] = numpy.array(training.holders(*keys[0]), "int32")
            if keys[1] not in ranks:
                ranks[keys[1]] = numpy.array(serving.holders(*keys[1]), "int32")
            transfer = TensorTransfer(
                held.tensor,
                first,
                last,
                held.axis,
                parts,
                prod(held.shape[: held.axis] + held.shape[held.axis + 1 :]),
                held.dtype,
                held.target,
                held.parameter is not None and held.parameter.stacked,
                local,
                held.negated_exp,
                ranks[keys[1]].tobytes(),
                b"",
            )
            wave = max(before["from", sender], before["to", receiver])
            before["from", sender] = before["to", receiver] = wave + 1
            yield _Part((place, tensor, wave), transfer, ranks[keys[0]])


def _pairs(
    held: HeldTensor,
) -> Iterator[tuple[int, int, int, tuple[int, int], tuple[int, int], tuple[AxisCut, ...]]]:
    """Yield (first expert, one past the last, first one's place, sender, receiver, cuts)."""
    have, want = held.shares()
    experts = held.experts
    sender_experts = experts // held.training.layout.ep if held.row.routed else 1
    receiver_experts = (
        experts // held.serving.ep if held.row.routed and held.parameter is not None else experts
    )
    matched = [(i, j, found) for i, a in enumerate(have) for j, b in enumerate(want) if (found := cuts(a, b))]
    first = 0
    while first < experts:
        last = min((first // each + 1) * each for each in (sender_experts, receiver_experts))
        for i, j, found in matched:
            sender, receiver = (i, first // sender_experts), (j, first // receiver_experts)
            yield first, last, first % receiver_experts, sender, receiver, found
        first = last


def spread(loads: Any, number: int, size: int) -> Any:
    """How many of `number` equal parts each sender sends for the smallest largest load."""
    ordered = numpy.sort(loads)
    levels = (numpy.cumsum(ordered) + number * size) / numpy.arange(1, len(ordered) + 1)
    used = int((levels[:-1] > ordered[1:]).sum())  # senders above this one have more than the level already
    counts = numpy.maximum((levels[used] - loads) // size, 0).astype("int64")
    left = number - int(counts.sum())
    counts[numpy.argsort(loads + counts * size, kind="stable")[:left]] += 1
    return counts


def _chosen_senders(part: _Part, loads: Any, colocated: bool) -> _Ranks:
    _, receivers = part.transfer.pairs
    senders = numpy.full(len(receivers), -1, "int32")
    if colocated:
        own = numpy.isin(receivers, part.candidates)
        senders[own] = receivers[own]
    left = senders < 0
    if number := int(left.sum()):
        size = part.transfer.bytes
        counts = spread(loads[part.candidates], number, size)
        senders[left] = numpy.repeat(part.candidates, counts)
        loads[part.candidates] += counts * size
    return senders


def _in_steps(
    parts: list[_Part],
    training: Training,
    serving: EngineLayout,
    buffer: int,
    colocated: bool,
    report: Callable[[int, int], object],
) -> tuple[TensorTransfer, ...]:
    chunks: list[tuple[Any, ...]] = []
    for part in parts:
        travels = part.transfer.between(colocated)
        senders, receivers = (ranks[travels] for ranks in part.transfer.pairs)
        # Senders and receivers are numbered on: they have buffers of their own.
        both = senders, training.layout.world_size + receivers.astype("int64")
        ranks, counts = numpy.unique(numpy.concatenate(both), return_counts=True)
        most = max(1, int(counts.max(initial=1)))
        cut = _chunks(part.transfer, buffer // most, buffer // most // FILLING, most)
        for number, transfer in enumerate(cut):
            chunks.append(((*part.order, number), len(chunks), transfer, ranks, counts))
    open_steps: list[tuple[int, Any]] = []
    found, size = [], training.layout.world_size + serving.size
    for _, _, transfer, ranks, counts in sorted(chunks, key=lambda chunk: chunk[:2]):
        added = counts * transfer.space
        fits = (one for one in open_steps if not (one[1][ranks] + added > buffer).any())
        if (place := next(fits, None)) is None:
            place = (open_steps[-1][0] + 1 if open_steps else 0), numpy.zeros(size, "int64")
            open_steps = [*open_steps[1 - OPEN :], place]
        step, space = place
        space[ranks] += added
        found.append(transfer._replace(step=step))
        report(len(found), len(chunks))
    return tuple(sorted(found, key=lambda transfer: transfer.step))


def _chunks(transfer: TensorTransfer, most: int, space: int, copies: int) -> Iterator[TensorTransfer]:
    """Cut a transfer into parts of at most `space` bytes; parts of one row may have `most`."""
    if transfer.space <= space:
        yield transfer
        return
    each = transfer.space // (transfer.last - transfer.first)
    if number := space // each:
        for first in range(transfer.first, transfer.last, number):
            last = min(first + number, transfer.last)
            yield transfer._replace(first=first, last=last, place=transfer.place + first - transfer.first)
        return
    row = transfer.piece // sum(cut.stop - cut.start for cut in transfer.cuts)
    length = (space - space % ALIGNMENT) // row
    if length == 0 and aligned(row) <= most:
        length = 1
    if length == 0:
        need = aligned(row) * copies
        raise ValueError(
            f"a buffer of {most * copies:,} bytes is less than one row of {transfer.name} for each of the "
            f"{copies} receivers of a sender: give {need:,} bytes or more"
        )
    for expert in range(transfer.last - transfer.first):
        one = transfer._replace(
            first=transfer.first + expert, last=transfer.first + expert + 1, place=transfer.place + expert
        )
        for cut in transfer.cuts:
            for start in range(cut.start, cut.stop, length):
                stop, by = min(start + length, cut.stop), start - cut.start
                yield one._replace(cuts=(AxisCut(start, stop, cut.source + by, cut.target + by),))
