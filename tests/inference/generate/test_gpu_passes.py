"""What decoding does on a GPU, without a GPU: grouped products, and passes without a wait of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # noqa: F401  (imports of Triton's modules make tensors)

from megatron_nemotron3.inference.generate import batch, experts
from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.sampling import Sampling, accept, draw, probabilities
from megatron_nemotron3.inference.generate.scan import _token_ranges
from megatron_nemotron3.layers.grouped import squared_relu_experts
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import InMemory
from tests.support.engines import tensors
from tests.support.fake_cuda import DEVICE, Device, fake_cuda


def test_grouped_products_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes with counts that stay there, against the product of each expert."""
    config = get("super-tiny")
    made = {name: t.bfloat16() for name, t in tensors(config).items()}
    layer = next(iter(read_weights(InMemory(made, Path()), config).experts.values()))
    generator = torch.Generator().manual_seed(0)
    expert = torch.randint(layer.count, (60,), generator=generator)
    expert[expert == 1] = 0  # one expert without tokens
    rows = torch.randn(60, layer.inner, generator=generator).bfloat16()
    weight = torch.rand(60, generator=generator)
    found = layer._grouped_products(rows, weight, expert)
    counts = torch.bincount(expert, minlength=layer.count).tolist()
    wanted = squared_relu_experts(rows, weight, *layer.each, counts)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())


@pytest.mark.parametrize("gathered", [True, False])
def test_the_host_waits_for_no_pass(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device that is not there, with rows of different lengths: prefill, drafts, rollback."""
    monkeypatch.setattr(experts, "GATHERED_ELEMENTS", 2**28 if gathered else 0)
    sampling = Sampling(1.0, top_k=50, top_p=0.95)
    with on_fake_device() as (engine, device):
        with device.unwatched():
            state, mtp = engine.new_state(2), MTP(engine, 2, 3)
            numbers = torch.zeros(2, 7, dtype=torch.float64, device=DEVICE)
        read = engine.prefill([[1, 2, 3, 4, 5], list(range(40))], state, chunk=36, on_chunk=mtp.append)
        newest = read.logits.argmax(-1)
        q: list[torch.Tensor] = []

        def choose(logits: torch.Tensor) -> torch.Tensor:
            q.append(probabilities(logits, sampling))
            return draw(q[-1], numbers[:, len(q) - 1])

        drafted = mtp.draft(newest, choose)
        tokens = torch.cat((newest.unsqueeze(1), drafted), 1)
        out = engine.forward(tokens, state, counts=[4, 3], rollback=True)
        limits = batch.on_device([3, 2], DEVICE)
        p = probabilities(out.logits, sampling)
        accept(p, torch.stack(q, 1), drafted, limits, numbers[:, 3:6], numbers[:, -1])
        assert out.rollback is not None
        state.truncate([1, 3], out.rollback)
        mtp.append(tokens[:, :3], out.hidden[:, :3], [1, 3])
        engine.forward(newest.unsqueeze(1), state)


@contextlib.contextmanager
def on_fake_device() -> Iterator[tuple[Engine, Device]]:
    """An engine in BF16 on a CUDA device that is not there."""
    made = {name: t.bfloat16() for name, t in tensors(get("super-tiny")).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "packs", lambda dtype: False)
        weights = read_weights(InMemory(made, Path()), get("super-tiny"))
    _token_ranges.cache_clear()  # copied to the device once a process
    try:
        with torch.inference_mode(), fake_cuda(torch.nn.Module) as (_, device):
            with device.unwatched():
                engine = Engine(on_device(weights, device))
            yield engine, device
    finally:
        _token_ranges.cache_clear()


def on_device(value: Any, device: Device) -> Any:
    """Put the tensors of an engine's weights on the device, in place."""
    if isinstance(value, torch.Tensor):
        return device.like(value)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(x, device) for x in value)
    if isinstance(value, torch.device):
        return torch.device(DEVICE)
    if isinstance(value, dict):
        return {name: on_device(x, device) for name, x in value.items()}
    if type(value).__module__.startswith("megatron_nemotron3.inference.generate"):
        for name, held in vars(value).items():
            object.__setattr__(value, name, on_device(held, device))
    return value
