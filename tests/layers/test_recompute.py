"""Megatron's --recompute-* options with our layers: the same values, fewer saved bytes.

One model with every layer kind and two MTP depths takes one training step with and without recomputation.
Last, what experts never hold: a tensor of [tokens, experts, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.model_mapping import megatron_model, randomize
from tests.support.parity import forward, relative_differences, text, without_mtp

#: "ME*-/*E/*E": the MoE and the attention are visited three times, the dense MLP once.
MODEL = get("super-tiny").but(pattern="ME*-", dense_ffn_hidden_size=256, vocab_size=256)
PLAIN = without_mtp(MODEL)
TOKENS, BATCH = 150, 2
#: Bytes of one FP32 number of every token.
ROW = TOKENS * BATCH * 4
#: Bytes a checkpoint itself saves beside its inputs: some scalars.
BOOKKEEPING = 100
#: Relative, of a gradient. What transformers' model moves by if its weights move by half a unit in the last
#: place (docs/measurements.md); one operation rounds otherwise, see `test_values_are_the_same_to_the_bit`.
RTOL = 1e-5


@dataclass(frozen=True)
class Step:
    """Results of one training step."""

    losses: Tensor  # [b, s]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]  # the routers' counts of tokens among them
    auxiliary: Tensor  # the load-balancing loss of every layer
    saved: int  # bytes autograd held after forward, parameters not counted


def held_bytes(model: torch.nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, int, int]:
    """Result of `run`, and over the storages it saves for backward: bytes in total and of the largest."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage  # alive, so that its address stays its own
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = run()
    sizes = [storage.nbytes() for storage in held.values()]
    return result, sum(sizes), max(sizes)


def step(model: Nemotron3Config, **changes: Any) -> Step:
    """One forward and backward of the same weights and tokens with these `TransformerConfig` fields."""
    get_moe_metrics_tracker().metrics.clear()
    MTPLossLoggingHelper.tracker = {}
    built = megatron_model(model, **changes).train()
    randomize(built, seed=3)
    ids = text(model, BATCH, TOKENS)
    losses, saved, _ = held_bytes(built, lambda: forward(built, ids[:, :-1], ids[:, 1:].contiguous()))
    losses.mean().backward()
    return Step(
        losses.detach(),
        {n: p.grad for n, p in built.named_parameters() if p.grad is not None},
        dict(built.named_buffers()),
        get_moe_metrics_tracker().metrics["seq_load_balancing_loss"].values,
        saved,
    )


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


def value(number: int | None) -> int:
    assert number is not None
    return number


#: Numbers of one token in a MoE layer between FC1 and FC2, and in its shared expert.
EXPERTS = value(MODEL.moe_router_topk) * value(MODEL.moe_ffn_hidden_size)
SHARED = value(MODEL.moe_shared_expert_intermediate_size)
#: Model, options, and bytes that must be gone: of tensors that only the recomputed part uses in backward.
CASES: dict[str, tuple[Nemotron3Config, dict[str, Any], int]] = {
    # Of a layer only the input stays: at least FC1's and the activation's output of every MoE layer go.
    "uniform 1": (PLAIN, full("uniform", 1), 2 * EXPERTS * ROW),
    "uniform 3": (PLAIN, full("uniform", 3), 2 * EXPERTS * ROW),
    "block 2": (PLAIN, full("block", 2), 2 * EXPERTS * ROW),
    "uniform 1 with MTP": (MODEL, full("uniform", 1), 3 * 2 * EXPERTS * ROW),
    # Upstream recomputes no MTP block by this method, and warns.
    "block 4 with MTP": (MODEL, full("block", 4), 2 * EXPERTS * ROW),
    "core_attn": (MODEL, selective("core_attn"), 3 * MODEL.num_attention_heads * ROW),  # the softmax's sums
    "mlp": (MODEL, selective("mlp"), 2 * 256 * ROW),
    "moe": (MODEL, selective("moe"), 3 * 2 * EXPERTS * ROW),
    "moe_act": (MODEL, selective("moe_act"), 3 * EXPERTS * ROW),
    "shared_experts": (MODEL, selective("shared_experts"), 3 * 2 * SHARED * ROW),
    "four at once": (
        MODEL,
        selective("core_attn", "mlp", "moe_act", "shared_experts"),
        (2 * 256 + 3 * 2 * SHARED) * ROW,
    ),
}


@pytest.fixture(scope="module")
def unchanged(world: None) -> dict[str, Step]:
    """Without recomputation, by model name."""
    return {"with MTP": step(MODEL), "without": step(PLAIN)}


def reference(steps: dict[str, Step], model: Nemotron3Config) -> Step:
    return steps["with MTP" if model.has_mtp else "without"]


@pytest.mark.parametrize("case", CASES)
def test_the_same_values_with_fewer_bytes(unchanged: dict[str, Step], case: str) -> None:
    model, options, gone = CASES[case]
    expected, found = reference(unchanged, model), step(model, **options)
    torch.testing.assert_close(found.losses, expected.losses, rtol=RTOL, atol=0)
    assert found.gradients.keys() == expected.gradients.keys()
    assert max(relative_differences(found.gradients, expected.gradients).values()) <= RTOL
    # Counted and logged once, although the routers ran twice.
    torch.testing.assert_close(found.auxiliary, expected.auxiliary, rtol=RTOL, atol=0)
    assert found.buffers.keys() == expected.buffers.keys()
    assert all(torch.equal(found.buffers[name], b) for name, b in expected.buffers.items())
    print(f"{case}: {expected.saved:,} bytes, {found.saved:,} with recomputation; at least {gone:,} less")
    assert found.saved <= expected.saved - gone + BOOKKEEPING


def test_values_are_the_same_to_the_bit(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences above come only from the order in which the router adds k scores.

    Upstream asks top-k for sorted scores only while gradients are recorded, which the first of two forward
    passes does not.
    """
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda *a, sorted=True, **k: topk(*a, **k))
    steps = {"with MTP": step(MODEL), "without": step(PLAIN)}
    for case, (model, options, _) in CASES.items():
        expected, found = reference(steps, model), step(model, **options)
        assert torch.equal(found.losses, expected.losses), case
        assert torch.equal(found.auxiliary, expected.auxiliary), case
        different = [n for n, g in expected.gradients.items() if not torch.equal(found.gradients[n], g)]
        assert not different, f"{case}: {different}"


# --- experts: nothing of [tokens, experts, width] -------------------------------------------------------


class LargestResult(TorchDispatchMode):
    """Bytes of the largest tensor any operation returned, forward or backward, views by their own size."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.what = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and (size := t.numel() * t.element_size()) > self.bytes:
                self.bytes, self.what = size, f"{func} {tuple(t.shape)} {t.dtype}"
        return result


@pytest.mark.parametrize("latent", [None, 24])
def test_no_dense_intermediate(world: None, latent: int | None) -> None:
    """512 experts, 22 chosen: what is allocated grows with routed tokens, and once with the routing map."""
    model = PLAIN.but(
        pattern="E",
        hidden_size=48,
        num_moe_experts=512,
        moe_router_topk=22,
        moe_ffn_hidden_size=32,
        moe_latent_size=latent,
        moe_shared_expert_intermediate_size=64,
    )
    layer = megatron_model(model).decoder.layers[0].train()
    tokens, width = 1024, max(32, latent or 48)
    routed = tokens * 22 * width * 8  # int64: upstream views the rows' indices over their width
    routing_map = tokens * 512 * 8  # int64 where upstream counts and sorts it
    weights = 512 * 32 * (latent or 48) * 4
    dense = tokens * 512 * width * 4
    limit = max(routed, routing_map, weights)
    assert dense > 10 * limit
    x = torch.randn(tokens // 2, 2, 48, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with LargestResult() as largest:
        out, total, saved = held_bytes(layer, lambda: layer(hidden_states=x, attention_mask=None)[0])
        out.sum().backward()
    print(f"largest {largest.bytes:,} ({largest.what}), saved {total:,}, of it {saved:,}; dense {dense:,}")
    assert largest.bytes <= limit
    assert saved <= max(routed, routing_map)
    # FC1's input, its output and FC2's input at routed width; the map's scores, choices and probabilities.
    assert total <= 3 * routed + 6 * routing_map < dense
