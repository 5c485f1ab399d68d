"""MTP's losses are read from Megatron's tracker and left as they are."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_nemotron3.train.monitor.attach import _mtp_losses


def test_losses_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.tensor([6.0, 8.0])
    tracker = {"loss_values": kept, "reduce_group": None, "avg_group": None}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", tracker)
    assert _mtp_losses(0.5) == {"mtp_1 loss": 3.0, "mtp_2 loss": 4.0}
    assert kept.tolist() == [6.0, 8.0]


def test_a_model_without_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    assert _mtp_losses(1.0) == {}
