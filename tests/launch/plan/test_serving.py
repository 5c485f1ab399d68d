"""What a model costs where it generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.serving import (
    ServingUse,
    layer_seconds,
    layer_state_bytes,
    serving_bytes,
)
from megatron_nemotron3.launch.plan.timing import ASSUMED
from megatron_nemotron3.models import count, get

H100 = GPUS["h100"]


def test_memory_is_that_of_a_generating_engine() -> None:
    """Puzzle, tiny, in BF16: what layers keep of each sequence, beside the bytes of a release."""

    from megatron_nemotron3.inference.generate.decode import read_weights
    from megatron_nemotron3.inference.generate.engine import Engine
    from tests.support.checkpoint_pair import InMemory
    from tests.support.engines import tensors

    config = get("puzzle-tiny")
    stored = {name: value.bfloat16() for name, value in tensors(config).items()}
    kept = Engine(read_weights(InMemory(stored, Path()), config)).new_state(3, 64).nbytes
    serving = ServingUse(H100, sequences=3, context=64)
    assert serving_bytes(config, serving) - count(config).stored_bytes == kept
    assert 3 * sum(layer_state_bytes(config, kind, 64) for kind in config.pattern) == kept


def test_a_step_reads_what_it_needs_of_each_layer() -> None:
    """By hand: one sequence of Super reads its experts' weights; many read all experts."""
    config, rate = get("super"), H100.hbm * ASSUMED.memory
    expert, latent = 2 * 1024 * 2688, 2 * 1024 * 4096
    rest = 4096 + latent + 2 * 4096 * 5376 + 512 * 4096 + 512
    one = layer_seconds(config, "E", ServingUse(H100, 1, 8192))
    assert one == pytest.approx(2 * (22 * expert + rest) / rate, rel=1e-6)
    many = layer_seconds(config, "E", ServingUse(H100, 1000, 8192))
    products = 1000 * 2 * (22 * expert + rest - 512) / (H100.bf16 * ASSUMED.products["bf16"])
    assert many == pytest.approx(max(2 * (512 * expert + rest) / rate, products), rel=1e-6)
    weights = 2 * (4096 + 4096 * 128 * (32 + 2 * 2) + 32 * 128 * 4096)
    attention = layer_seconds(config, "*", ServingUse(H100, 1, 100_000))
    assert attention == pytest.approx((weights + 2 * 2 * 128 * 100_000 * 2) / rate, rel=1e-6)
