"""MTP runs where the caller of a forward asks for it (`mtp_kwargs`, as slime passes it), and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_nemotron3.models import get
from megatron_nemotron3.train.build import build_model, mtp_on_request

pytestmark = pytest.mark.usefixtures("world")
#: Without the routers' own loss, so that MTP's is the only one.
CONFIG = get("super-tiny").but(moe_aux_loss_coeff=0.0)
TOKENS = torch.arange(1, 33)[None]


def gradients(**keywords: Any) -> dict[str, float]:
    """Parameter -> largest gradient of the logits' sum, and of MTP's loss if there is one."""
    model = build_model(CONFIG, precision="fp32", backend="torch")
    mtp_on_request(model)
    # slime gives neither positions nor labels, and the mask of the tokens that count.
    logits = model(
        input_ids=TOKENS,
        position_ids=None,
        attention_mask=None,
        labels=None,
        loss_mask=torch.ones_like(TOKENS),
        **keywords,
    )
    assert logits.shape[:2] == TOKENS.shape
    (logits * 0).sum().backward()  # all that is left is MTP's
    assert model.mtp_process
    return {n: 0.0 if p.grad is None else float(p.grad.abs().max()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("keywords", [{}, {"mtp_kwargs": None}, {"mtp_kwargs": {}}], ids=str)
def test_not_asked_for(keywords: dict[str, Any]) -> None:
    assert set(gradients(**keywords).values()) == {0.0}


def test_asked_for() -> None:
    found = gradients(mtp_kwargs={"mtp_labels": TOKENS})
    assert all(value > 0 for name, value in found.items() if name.startswith("mtp.") and "proj" in name)
    assert found["embedding.word_embeddings.weight"] > 0


def test_other_labels_are_refused_and_nothing_is_left() -> None:
    model = build_model(CONFIG, precision="fp32", backend="torch")
    mtp_on_request(model)
    with pytest.raises(ValueError, match="mtp_labels is not the tensor input_ids"):
        model(input_ids=TOKENS, position_ids=None, attention_mask=None, mtp_kwargs={"mtp_labels": TOKENS + 1})
    assert model.mtp_process
