"""What `LossHooks` hands to Megatron: borders, mask and weights of every rank, computed without waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_nemotron3.layers.context_parallel import TokenPlaces, zigzag
from megatron_nemotron3.layers.mtp import LossHooks, PhysicalBorders
from tests.support.world import OneRank

DEPTHS = 3
#: (real, padded) tokens of each document, and padding behind the last.
PACKS = {
    "no padding": (((8, 8), (16, 16)), 0),
    "one document is padded": (((8, 8), (13, 16)), 0),
    "padding begins at the edge of a chunk": (((4, 8), (12, 16)), 0),
    "a document is all padding": (((8, 8), (0, 8), (8, 8)), 0),
    "the last document is shorter than MTP is deep": (((16, 16), (1, 8)), 0),
    "padding behind the last document": (((8, 8), (5, 8)), 16),
    "one document": (((32, 32),), 0),
}


class NoWait(TorchDispatchMode):
    """Refuse operators for which the host would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in {
            "aten::_local_scalar_dense",
            "aten::equal",
            "aten::nonzero",
            "aten::masked_select",
            "aten::repeat_interleave",
            "aten::bincount",
        }, func
        return func(*args, **(kwargs or {}))


class Model(torch.nn.Module):
    """What the hooks read of HybridModel."""

    def __init__(self, group: OneRank, per_token: bool) -> None:
        super().__init__()
        self.decoder, self.output_layer = torch.nn.Identity(), torch.nn.Identity()
        self.pg_collection = SimpleNamespace(cp=group)
        self.mtp_process = self.post_process = True
        self.config = SimpleNamespace(mtp_num_layers=DEPTHS, calculate_per_token_loss=per_token)

    def forward(
        self,
        input_ids: Any,
        labels: Any = None,
        *,
        loss_mask: Any = None,
        packed_seq_params: Any = None,
        compute_mtp_loss: bool = True,
    ) -> None:
        """Its signature is read."""


def pack(name: str) -> tuple[PackedSeqParams, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(borders, document of each token, its position, whether it is real) of a whole pack."""
    documents, tail = PACKS[name]
    real, padded = (torch.tensor((0, *sizes)).cumsum(0).int() for sizes in zip(*documents, strict=True))
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded
    )
    places = [(d, i, i < r) for d, (r, p) in enumerate(documents) for i in range(p)]
    places += [(len(documents), i, False) for i in range(tail)]
    document, position, counts = (torch.tensor(column) for column in zip(*places, strict=True))
    return params, document, position, counts


def shifted(mask: torch.Tensor, document: torch.Tensor, by: int) -> torch.Tensor:
    """Each token's mask from `by` tokens later in its document, else 0."""
    result = torch.zeros_like(mask)
    for i in range(len(mask) - by):
        if document[i + by] == document[i]:
            result[i] = mask[i + by]
    return result


@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "mean"])
@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("name", PACKS)
def test_every_token_weighs_as_on_one_rank(
    name: str, cp: int, labels: bool, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What upstream makes of the mask it gets, times our factors, is what it makes on one rank."""
    params, document, _, real = pack(name)
    ends = torch.cat([params.cu_seqlens_q_padded, torch.tensor([len(real)])]).unique()
    generator = torch.Generator().manual_seed(len(name))
    mask = (torch.rand(len(real), generator=generator) < 0.6).float()
    whole = mask * real
    first = 0 if labels else 1
    counts = [float(shifted(whole, document, first + k).sum()) for k in range(DEPTHS + 1)]
    held = [zigzag(ends, cp, rank) if cp > 1 else torch.arange(len(real)) for rank in range(cp)]
    given, hooks = handed_over(held, mask, params, labels, per_token, monkeypatch)
    passed = torch.zeros_like(whole)
    for index, kwargs in zip(held, given, strict=True):
        assert kwargs["packed_seq_params"].cu_seqlens_q is params.cu_seqlens_q_padded
        passed[index] = kwargs["loss_mask"][0]
    assert torch.allclose(passed, whole, rtol=0, atol=1e-8)
    for depth in range(1, DEPTHS + 1):
        wanted = whole_weights(whole, document, first + depth, counts, depth, per_token)
        # Upstream, on each rank.
        moved, origin = shifted(passed, document, first + depth), shifted(passed, document, first)
        for index, hook in zip(held, hooks, strict=True):
            own = moved[index] / moved[index].sum().clamp(min=1)
            logged = own.clone()
            if per_token:
                own = own * origin[index].sum()
            if cp > 1:
                own, logged = own * hook._gradient[depth - 1], logged * hook._logged[depth - 1]
            average = 1 if per_token else cp  # over ranks
            assert torch.allclose(own / average, wanted[index], rtol=1e-5, atol=1e-7)
            mean = moved[index] / max(counts[depth], 1)
            assert torch.allclose(logged / cp, mean, rtol=1e-5, atol=1e-7)


def whole_weights(
    mask: torch.Tensor, document: torch.Tensor, shift: int, counts: list[float], depth: int, per_token: bool
) -> torch.Tensor:
    """The weight of each token at a depth, as upstream computes it on one rank."""
    weights = shifted(mask, document, shift) / max(counts[depth], 1)
    return weights * counts[0] if per_token else weights


def handed_over(
    held: list[torch.Tensor],
    mask: torch.Tensor,
    params: PackedSeqParams,
    labels: bool,
    per_token: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[dict[str, Any]], list[LossHooks]]:
    """What each rank's model is called with, and its hooks. The ranks take turns: first all count."""
    counted: list[torch.Tensor] = []
    total: torch.Tensor | None = None

    def all_reduce(numbers: torch.Tensor, group: Any) -> None:
        counted.append(numbers.clone())
        if total is not None:
            numbers.copy_(total)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for _ in range(2):
        given, hooks = [], []
        for rank, index in enumerate(held):
            tokens = torch.ones(1, len(index), dtype=torch.int64)
            model, hook = Model(OneRank(len(held), rank), per_token), LossHooks()
            kwargs = {"loss_mask": mask[None, index], "packed_seq_params": params}
            with NoWait():
                _, kwargs = hook._begin(model, (tokens, tokens if labels else None), kwargs)
            given.append(kwargs)
            hooks.append(hook)
        assert len(counted) == (len(held) if len(held) > 1 else 0)
        total = torch.stack(counted).sum(0) if counted else None
        counted.clear()
    return given, hooks


def test_nothing_is_done_where_no_loss_is_computed() -> None:
    params = pack("one document")[0]
    tokens = torch.ones(1, 32, dtype=torch.int64)
    model = Model(OneRank(1, 0), True)
    assert LossHooks()._begin(model, (tokens,), {}) is None
    assert (
        LossHooks()._begin(model, (tokens,), {"packed_seq_params": params, "compute_mtp_loss": False}) is None
    )
    model.mtp_process = False
    assert LossHooks()._begin(model, (tokens,), {"packed_seq_params": params}) is None


def test_the_decoder_sees_the_borders_of_the_caller() -> None:
    params = pack("one document is padded")[0]
    model, hook = Model(OneRank(1, 0), True), LossHooks()
    seen: list[Any] = []
    model.decoder.forward = lambda packed_seq_params: seen.append(packed_seq_params)  # type: ignore[method-assign]
    _, kwargs = hook._begin(model, (torch.ones(1, 24, dtype=torch.int64),), {"packed_seq_params": params})
    model.decoder(packed_seq_params=kwargs["packed_seq_params"])
    assert seen == [params] and isinstance(kwargs["packed_seq_params"], PhysicalBorders)
    assert vars(params).get("caller") is None and params.cu_seqlens_q.tolist() == [0, 8, 21]


def test_logged_losses_are_corrected_by_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of earlier micro-batches stay."""
    monkeypatch.setitem(MTPLossLoggingHelper.tracker, "loss_values", torch.tensor([5.0, 6.0, 7.0]))
    model, hook = Model(OneRank(2, 0), True), LossHooks()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda numbers, group: numbers.mul_(2))
    hook._begin(model, (torch.ones(1, 16, dtype=torch.int64),), {})
    MTPLossLoggingHelper.tracker["loss_values"] += 1.0
    hook._logged = torch.tensor([2.0, 1.0, 0.5])
    hook._end(model, (), None)
    assert MTPLossLoggingHelper.tracker["loss_values"].tolist() == [7.0, 7.0, 7.5]


def test_places_wait_for_nothing() -> None:
    with NoWait():
        TokenPlaces.of(pack("one document is padded")[0], 12, 2, 1, torch.device("cpu"))
    with NoWait(), pytest.raises(AssertionError, match="aten::equal"):
        torch.equal(torch.ones(2), torch.ones(2))
