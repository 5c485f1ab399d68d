"""Megatron-Bridge's LoRA on a model of our spec computes what our own adapters compute.

Opt-in: `make test-bridge`.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.bridge.marks import MARKS

pytestmark = MARKS
#: Bridge's class knows these; ours also the routed experts' and the latent projections.
SHARED = ["*shared_experts.linear_fc1", "*shared_experts.linear_fc2"]
DENSE = ["linear_qkv", "linear_proj", "in_proj", "out_proj", *SHARED]
EVERY = ["linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2", "fc1_latent_proj"]


def logits_and_gradients(tp: int, kind: str) -> tuple[Any, dict[str, Any]]:
    """(logits, norms of the adapters' gradients) with weights that only their keys and places decide."""
    import megatron_nemotron3.bridge as ours  # isort: skip
    import torch
    from megatron.bridge.peft.lora import LoRA as BridgeLoRA
    from megatron.core import parallel_state

    from megatron_nemotron3.models.lora import LoRASettings, adding_lora
    from megatron_nemotron3.proof.certify.ranks import initialize
    from megatron_nemotron3.proof.certify.tensors import sharded
    from megatron_nemotron3.train.build import build_model

    initialize(tp=tp, **({"etp": 1} if tp > 1 else {}))
    targets = DENSE if "dense" in kind else EVERY
    own = LoRASettings(tuple(targets), dim=4, alpha=8) if kind.startswith("own") else None
    layout = {"tp": tp, "etp": 1} if tp > 1 else {}
    with adding_lora(own):
        model = build_model("super", tiny=True, precision="fp32", backend="torch", **layout)
    if own is None:
        peft = (BridgeLoRA if kind == "bridge dense" else ours.LoRA)(target_modules=targets, dim=4, alpha=8)
        # Without TransformerEngine Bridge compares with None; with it, ours are none of its classes.
        with mock.patch("megatron.bridge.peft.utils.HAVE_TE", False):
            model = peft(model)
    # The same values by key and place of an element in the whole model, whoever holds it.
    with torch.no_grad():
        for t in sharded([model]):
            place: Any = 0.0
            for i, n in enumerate(t.data.shape):
                index = torch.arange(n) + t.global_offset[t.prepend_axis_num + i]
                place = place + (index * (7.0, 1.3, 0.7)[i]).reshape([-1] + [1] * (t.data.dim() - i - 1))
            first = sum(t.global_offset[: t.prepend_axis_num]) + sum(map(ord, t.key))
            t.data.copy_(torch.sin(place + first) * 0.1 + (1.0 if t.key.endswith("norm.weight") else 0.0))
    tokens = torch.arange(32)[None] % 500
    output = model(tokens, torch.arange(32)[None], None)
    shares = [torch.empty_like(output) for _ in range(tp)]
    torch.distributed.all_gather(
        shares, output.detach(), group=parallel_state.get_tensor_model_parallel_group()
    )
    logits = torch.cat(shares, -1)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".adapter." in name for name in trained)
    norms = {name: float(gradient.double().norm()) for name, gradient in trained.items()}
    return logits.double().flatten()[:4096].tolist(), norms


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "every"])
def test_bridge_computes_what_our_adapters_compute(tp: int, kind: str) -> None:
    (expected, ours), *_ = run_distributed(logits_and_gradients, 1, 1, f"own {kind}", apart=True)
    (found, theirs), *_ = run_distributed(logits_and_gradients, tp, tp, f"bridge {kind}", apart=True)
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-5
    if tp == 1:
        assert ours.keys() == theirs.keys()
        for name, norm in ours.items():
            assert math.isclose(norm, theirs[name], rel_tol=1e-4, abs_tol=1e-7), name
