"""Products by weights in every layout, and which one a device gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_nemotron3.inference.generate import experts as linear
from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.experts import DecodeLinear
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import InMemory
from tests.support.engines import tensors

TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products(dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one row to many, also of parts of wider rows, against FP64."""
    if packed and not linear.packs(dtype):
        pytest.skip(f"this CPU does not pack {dtype}")
    monkeypatch.setattr(linear, "PACKED_ELEMENTS", 0)
    monkeypatch.setattr(linear, "packs", lambda dtype: packed)
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(90, 70, generator=made).to(dtype)
    product = DecodeLinear(weight)
    other = "transposed" if dtype == torch.float32 else "rows"
    assert product.layout == ("packed" if packed else other)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    for rows in (1, 2, 3, 7, 8, 9, 40, 600):
        x = torch.randn(rows, 100, generator=made).to(dtype)[:, 20:90]
        found = product(x)
        assert found.dtype == dtype
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol * 30)


def test_the_layout_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def layouts(capability: str) -> list[str]:
        linear.packs.cache_clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        small, large = torch.ones(64, 64), torch.ones(1024, 512)
        return [DecodeLinear(w.to(dtype)).layout for dtype in TYPES for w in (small, large)]

    can = [linear.packs(dtype) for dtype in TYPES]
    large, half = ("packed" if can[0] else "transposed"), ("packed" if can[1] else "rows")
    try:
        assert layouts(torch.backends.cpu.get_cpu_capability()) == ["transposed", large, half, half]
        assert layouts("AVX2") == ["transposed", "transposed", "rows", "rows"]
        monkeypatch.setattr(linear, "_pack", lambda weight: torch.ops.mkldnn.no_such_operation(weight))
        assert layouts("AVX512") == ["transposed", "transposed", "rows", "rows"]
    finally:
        linear.packs.cache_clear()


def test_logits_are_fp32_on_a_cpu() -> None:
    """Of a BF16 model too: its logits have 8 bits, so that many steps would have several best tokens."""
    config = get("super-tiny")
    made = tensors(config)
    weights = read_weights(InMemory(made, Path()), config, dtype=torch.bfloat16)
    assert weights.dtype == torch.bfloat16
    hidden = torch.randn(300, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = weights.logits(hidden)
    exact = hidden.double() @ made["lm_head.weight"].bfloat16().double().t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
    best = logits.topk(2, -1).values
    rounded = logits.bfloat16().topk(2, -1).values
    assert not (best[:, 0] == best[:, 1]).any() and (rounded[:, 0] == rounded[:, 1]).any()
