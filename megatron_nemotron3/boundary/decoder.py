"""This rank's part of the decoder input, [s_local, b, h], from its own text tokens and its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.boundary.align import (
    align,
    assemble,
    kinds_of_ids,
    kinds_of_runs,
    on_device,
    sum_of_slices,
)
from megatron_nemotron3.boundary.embed import lookup
from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.local import Local


def build(
    embedding: Any,
    local: Local,
    token_ids: Mapping[str, int],
    input_ids: Tensor,
    position_ids: Tensor | None,
    rows: Mapping[str, Tensor],
    known: Microbatch | None,
    documents: tuple[int, ...] = (),
) -> Tensor:
    """Look text up, and put everything in its place.

    Args:
        embedding: the language model's.
        local: this rank's place.
        token_ids: by modality, the id that marks its positions.
        input_ids: [b, s] of this rank's lane, whole.
        position_ids: [b, s], or [channels, b, s], or None.
        rows: by modality, [n, h]: those of this rank's positions if `known` has runs, else the lane's.
        known: what the feed says of the lane's samples.
        documents: `cu_seqlens_padded` of every sample, where the feed has none.

    Raises:
        ValueError: positions and rows do not fit together.
    """
    batch, length = input_ids.shape
    names, device = list(token_ids), input_ids.device
    runs = {name: known.runs_of(name) for name in names} if known is not None else {}
    told = {name: samples for name, samples in runs.items() if samples is not None}
    if told and len(told) == len(names):
        kinds = kinds_of_runs(told, length)
        _check(kinds, input_ids, token_ids)
    else:
        told = {}
        kinds = kinds_of_ids(input_ids, token_ids)
    cuts = known.documents if known is not None and known.documents else (documents,) * batch
    at = align(kinds, names, *local.owned(batch, length, cuts))
    parts = []
    for number, name in enumerate(names, 1):
        places, given = at.rows[name], rows.get(name)
        if given is None:
            if len(places):
                raise ValueError(
                    f"{len(places)} positions are for {name}: the model has no encoder of that name"
                )
            continue
        if name in at.picked and not told:
            _fit(name, int((kinds == number).sum()), given)
            given = sum_of_slices(given, local.groups).index_select(0, at.picked[name])
        _fit(name, len(places), given)
        parts.append((on_device(places, device), given))
    tokens = [on_device(where, device) for where in at.tokens]
    positions: Sequence[Tensor | None] = [None] * len(tokens)
    if position_ids is not None:
        # Multimodal rotary embedding has several channels: one is the position.
        channel = position_ids[0] if position_ids.dim() == 3 else position_ids
        positions = [channel.flatten().index_select(0, where) for where in tokens]
    own = local.tensor_rank if len(tokens) > 1 else 0
    text = lookup(embedding, [input_ids.flatten().index_select(0, where) for where in tokens], positions, own)
    return assemble(at, [(on_device(at.text, device), text), *parts])


def _check(kinds: Tensor, input_ids: Tensor, token_ids: Mapping[str, int]) -> None:
    """The feed and input_ids are of the same samples. On a GPU the device asserts it, so nobody waits."""
    if kinds.shape != input_ids.shape:
        raise ValueError(
            f"the feed describes {list(kinds.shape)} positions of this lane, input_ids has "
            f"{list(input_ids.shape)}: both must be of the same samples"
        )
    device = input_ids.device
    if device.type == "cpu" and not torch.equal(kinds, kinds_of_ids(input_ids, token_ids)):
        raise ValueError("the feed and input_ids mark other positions: both must be of the same samples")
    if device.type == "cuda":
        same = (on_device(kinds, device) == kinds_of_ids(input_ids, token_ids)).all()
        torch._assert_async(same, "the feed and input_ids mark other positions")


def _fit(name: str, positions: int, rows: Tensor) -> None:
    if positions != len(rows):
        raise ValueError(
            f"{positions} positions of input_ids are for {name}, but {len(rows)} rows are there: encoder "
            "input, input_ids and what the feed says must be of the same samples, and the communicator must "
            "know whether the language model is sequence parallel"
        )
