"""Attention of one context-parallel rank after another, without processes, against that of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_nemotron3.layers import attention
from megatron_nemotron3.layers.attention import TorchCoreAttention
from megatron_nemotron3.layers.context_parallel import gathered_positions, zigzag


def core(cp: int, rank: int) -> TorchCoreAttention:
    config: Any = SimpleNamespace(
        softmax_type="vanilla",
        window_size=None,
        kv_channels=16,
        attention_dropout=0.0,
        sequence_parallel=False,
    )
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: cp, rank=lambda: rank), tp=None)
    return TorchCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def run(module: TorchCoreAttention, parts: list[Tensor], borders: list[int], documents: bool) -> Tensor:
    """[s, b, h, c] -> [s, b, h * c]; `documents`: packed at the borders, b = 1 -> [s, h * c]."""
    if not documents:
        return module(*parts)
    ends = torch.tensor(borders, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    return module(*(t.squeeze(1) for t in parts), packed_seq_params=packed)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_values_and_gradients(groups: int, cp: int, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    borders = [0, 2 * cp, 2 * cp, 14 * cp, 24 * cp] if documents else [0, 24 * cp]
    s, b = borders[-1], 1 if documents else 2
    shapes = [(s, b, 4, 16), (s, b, groups, 16), (s, b, groups, 16)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wanted = run(core(1, 0), whole, borders, documents)
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad((wanted * weight).sum(), whole)

    every = gathered_positions(borders, cp)
    found, total = torch.empty_like(wanted), torch.zeros((), dtype=torch.float64)
    for rank in range(cp):
        own = zigzag(borders, cp, rank)
        rest = iter([t[every].squeeze(1) if documents else t[every] for t in whole[1:]])
        monkeypatch.setattr(
            attention, "gather_from_sequence_parallel_region", lambda t, group, rest=rest: next(rest)
        )
        y = run(core(cp, rank), [t[own] for t in whole], borders, documents)
        found[own] = y.detach()
        total = total + (y * weight[own]).sum()
    assert (found - wanted).abs().max() < 1e-12
    for one, other in zip(torch.autograd.grad(total, whole), gradients, strict=True):
        assert (one - other).abs().max() < 1e-12
