"""MTP's losses are found under the name of any megatron-core, and left as Megatron needs them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_nemotron3.monitor.tracker import _mtp_losses


@pytest.mark.parametrize("name", ["loss_values", "values"])
def test_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.tensor([6.0, 8.0])
    tracker = {name: kept, "reduce_group": None, "avg_group": None}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", tracker)
    assert _mtp_losses(0.5) == {"mtp_1 loss": 3.0, "mtp_2 loss": 4.0}
    assert kept.tolist() == [6.0, 8.0]


def test_a_model_without_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    assert _mtp_losses(1.0) == {}
