"""Memory of a long prefill: activations grow with the chunk, KV caches with the text, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_nemotron3.inference.generate.attention import KVCache
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.models import get
from tests.support.engines import engine_of

CHUNK = 256
#: Every layer kind, with little attention: its time grows with the square of the text.
CONFIG = get("super-tiny").but(
    name="long",
    pattern="ME*M",
    hidden_size=32,
    vocab_size=64,
    num_attention_heads=1,
    num_query_groups=1,
    kv_channels=8,
    mamba_num_heads=2,
    mamba_num_groups=1,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    moe_latent_size=8,
    mtp_pattern=None,
    mtp_num_layers=0,
)


class Largest(TorchDispatchMode):
    """Elements of the largest floating-point tensor that an operation creates, without views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            made = [
                t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()
            ]
            self.elements = max([self.elements, *made])
        return out


def prefill(engine: Engine, tokens: int) -> tuple[int, int, int]:
    """Elements of the largest tensor, bytes of KV caches, bytes of the other states."""
    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(7))
    state = engine.new_state(capacity=tokens)
    with Largest() as largest:
        engine.prefill(ids, state, chunk=CHUNK)
    kv = sum(k.cache.nbytes for k in state.layers.values() if isinstance(k, KVCache))
    assert state.lengths == [tokens]
    return largest.elements, kv, state.nbytes - kv


@pytest.mark.parametrize("chunks", [32, pytest.param(256, marks=pytest.mark.full)])
def test_what_grows_with_the_text(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 and 65,536 tokens; the time of attention grows with the square."""
    monkeypatch.setattr("megatron_nemotron3.inference.generate.batch.MASK_ELEMENTS", 1)
    engine, tokens = engine_of(CONFIG), chunks * CHUNK
    small, kv, states = prefill(engine, 8 * CHUNK)
    large, kv_large, states_large = prefill(engine, tokens)
    # Only the vector behind the masks grows with the text: one number per token.
    assert large <= max(small, tokens + CHUNK)
    assert kv_large == chunks // 8 * kv
    assert states_large == states
