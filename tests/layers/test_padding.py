"""Padding changes nothing in the routers: counts, losses and gradients are those of the row without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_nemotron3.layers.padding import local_mask, padding_of_pack
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.models import FULL_RECOMPUTE, build_hybrid

#: Real tokens and length of the padded row: under TP 2 the second rank has 6 real tokens and 26 of padding.
REAL, ROW = 38, 64
PATTERN = "MEM*E/*E/*E"
DOCUMENTS = ([0, 5, 18], [0, 8, 24])


class _Packed:
    """What the functions read of PackedSeqParams."""

    def __init__(self, real: list[int], padded: list[int] | None) -> None:
        self.qkv_format = "thd"
        self.cu_seqlens_q = torch.tensor(real, dtype=torch.int32)
        self.cu_seqlens_q_padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)


class _Groups:
    """Groups of one tensor-parallel rank of two."""

    def __init__(self, tp: int, rank: int) -> None:
        self.tp, self.cp = _Group(tp, rank), _Group(1, 0)


class _Group:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_padding_of_a_pack(cp: int) -> None:
    """Against its definition, token by token; the row ends 8 tokens after the last document."""
    from megatron_nemotron3.layers.context_parallel import zigzag

    packed: Any = _Packed([0, 5, 18, 18], [0, 8, 24, 32])
    real = [i < 5 or 8 <= i < 21 for i in range(40)]
    borders = torch.tensor([0, 8, 24, 32, 40])
    for rank in range(cp):
        found = padding_of_pack(packed, 40 // cp, cp, rank, torch.device("cpu"))
        assert found is not None
        assert found[0].tolist() == [not real[i] for i in zigzag(borders, cp, rank)]
    for unknown in (None, _Packed([0, 8], None)):
        assert padding_of_pack(unknown, 8, 1, 0, torch.device("cpu")) is None


def test_masks_of_a_wrong_length_are_refused() -> None:
    groups: Any = _Groups(2, 1)
    hidden = torch.zeros(4, 1, 2)
    mask = torch.arange(8)[None] >= 5
    cut = local_mask(mask, None, hidden, True, groups)
    assert cut is not None and cut.tolist() == [[False, True, True, True]]
    assert local_mask(cut, None, hidden, True, groups) is cut
    with pytest.raises(ValueError, match=r"\[1, 7\] does not fit 8 tokens"):
        local_mask(mask[:, :7], None, hidden, True, groups)


def _step(model: Any, rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loads of every router and gradients of every parameter after one backward pass."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    routers = {name: m for name, m in model.named_modules() if isinstance(m, TopKRouter)}
    for router in routers.values():
        router.local_tokens_per_expert.zero_()
    model.zero_grad()
    try:
        loss = model(rows["tokens"], rows["positions"], None, **rows["named"])
        (loss * rows["named"]["loss_mask"]).sum().backward()
    finally:
        MTPLossLoggingHelper.tracker = {}
    loads = {f"{name} load": m.local_tokens_per_expert.clone() for name, m in routers.items()}
    return loads | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _row(length: int, named: dict[str, Any]) -> dict[str, Any]:
    tokens = torch.randint(1, 256, (1, REAL + 1), generator=torch.Generator().manual_seed(3))
    # Padding is token 0, which is also what Megatron's roll for MTP puts after the last token.
    fill = tokens.new_zeros(1, length - REAL)
    counted = torch.arange(length) < REAL
    return {
        "tokens": torch.cat([tokens[:, :-1], fill], dim=1),
        "positions": torch.arange(length)[None],
        "named": {
            "labels": torch.cat([tokens[:, 1:], fill], dim=1),
            "loss_mask": counted[None].float(),
            **named,
        },
    }


def _padded_and_alone(recompute: bool) -> tuple[list[dict[str, torch.Tensor]], int]:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    initialize(tp=world)
    torch.manual_seed(5)
    model = build_hybrid(
        PATTERN,
        _spec(),
        mtp_use_repeated_layer=True,
        moe_aux_loss_coeff=0.1,
        calculate_per_token_loss=True,
        **(FULL_RECOMPUTE if recompute else {}),
    )
    alone = _step(model, _row(REAL, {}))
    padding = (torch.arange(ROW) >= REAL)[None]
    masked = _step(model, _row(ROW, {"padding_mask": padding}))
    unmasked = _step(model, _row(ROW, {}))
    return [alone, masked, unmasked], world


def _spec() -> Any:
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    return nemotron3_torch_stack_spec


@pytest.mark.parametrize(
    ("tp", "recompute"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.full)]
)
def test_a_padded_row_trains_as_the_row_without_padding(tp: int, recompute: bool) -> None:
    """MTP twice, sequence parallelism, load-balancing loss, mean over tokens; without the mask all differ."""
    ranks = run_distributed(_padded_and_alone, tp, recompute)
    loads = [name for name in ranks[0][0][0] if name.endswith("load")]
    assert len(loads) == 3, "two routers of the decoder, one of MTP"
    for name in loads:
        alone, masked, unmasked = (sum(steps[i][name] for steps, _ in ranks) for i in range(3))
        visits = 2 if name.startswith("mtp") else 1
        assert alone.sum() == visits * 2 * REAL, name
        assert torch.equal(alone, masked), name
        assert not torch.equal(alone, unmasked), name
    for name in ranks[0][0][0]:
        if name in loads:
            continue
        parts = [[steps[i][name] for steps, _ in ranks] for i in range(3)]
        # Sequence parallelism: a rank has a part of the gradient of what all ranks hold alike.
        alike = any(part in name for part in ("norm.weight", "router", "layer_norm", "experts.linear_fc"))
        alike = tp > 1 and alike and "shared" not in name and "mixer.norm" not in name
        alone, masked, unmasked = (sum(p) if alike else torch.cat(p) for p in parts)
        torch.testing.assert_close(masked, alone, rtol=1e-4, atol=1e-5 * alone.abs().max().item(), msg=name)
        if "router" in name:
            assert (unmasked - alone).norm() > 1e-2 * alone.norm(), name


def _pack_and_alone() -> list[dict[str, torch.Tensor]]:
    """A pack of two padded documents: the borders give the mask, the caller passes none."""
    from megatron.core.packed_seq_params import PackedSeqParams

    initialize()
    model = build_hybrid("MEM*E", _spec())
    real, padded = (torch.tensor(borders, dtype=torch.int32) for borders in DOCUMENTS)
    tokens = torch.randint(1, 256, (1, 24), generator=torch.Generator().manual_seed(3))

    def row(first: int, last: int) -> dict[str, Any]:
        part = tokens[:, first:last]
        named = {"labels": part.roll(-1, 1), "loss_mask": torch.zeros(part.shape)}
        return {"tokens": part, "positions": torch.arange(last - first)[None], "named": named}

    whole = row(0, 24)
    whole["named"]["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=16,
        max_seqlen_kv=16,
        total_tokens=24,
    )
    return [_step(model, whole), _step(model, row(0, 5)), _step(model, row(8, 21))]


def test_borders_of_a_pack_are_enough() -> None:
    ((pack, first, second),) = run_distributed(_pack_and_alone, 1)
    for name in pack:
        if name.endswith("load"):
            assert torch.equal(pack[name], first[name] + second[name]), name
            assert pack[name].sum() == 2 * 18
