"""A training loop of one's own around a model that `build_model` made: whose loss the gradient is of."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.models import get
from megatron_nemotron3.train.build import build_model

pytestmark = pytest.mark.usefixtures("world")
TOKENS = torch.arange(3, 68)[None]
POSITIONS = torch.arange(64)[None]


def gradient_of_nothing(auxiliary_losses: bool, scheduled: bool = False) -> float:
    """Largest element of the gradient of the caller's loss times zero."""
    model = build_model(
        get("super-tiny"), precision="fp32", backend="torch", auxiliary_losses=auxiliary_losses
    )
    if scheduled:
        model.config.finalize_model_grads_func = lambda *_: None
    for _ in range(2):
        loss = model(TOKENS[:, :-1], POSITIONS, None, labels=TOKENS[:, 1:].contiguous())
        (loss.mean() * 0).backward()
    return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)


def test_without_auxiliary_losses_the_gradient_is_of_the_own_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert gradient_of_nothing(auxiliary_losses=False) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("scheduled", [False, True])
def test_sums_over_tokens_are_said_once(scheduled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless something divides them by the tokens, as Megatron's schedules do."""
    assert gradient_of_nothing(auxiliary_losses=True, scheduled=scheduled) > 1
    said = capsys.readouterr().err.count("warning: without Megatron's schedule nothing divides the losses")
    assert said == (0 if scheduled else 1)
