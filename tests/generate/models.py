"""Tiny models with random weights under Hugging Face names, texts without near ties, and comparisons."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from megatron_nemotron3.convert import inventory
from megatron_nemotron3.generate.batch import ForwardBatch
from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.moe import MixtureOfExperts
from megatron_nemotron3.generate.state import KVCache, MambaState, State
from megatron_nemotron3.generate.weights import read_weights
from megatron_nemotron3.models import Nemotron3Config, get
from tests.convert.logits.pair import InMemory

#: Of logits and states, which are of size 1; two orders of the same sums are 2e-5 apart.
ATOL = 1e-4
#: A chosen and a rejected expert nearer than this may change places between two such orders.
MARGIN = 1e-5
NAMES = ("super", "nano", "nano-4b", "nemotron-h-8b", "lightning")
#: Three times the short scan, one and a half times a chunk of the long one.
ROWS, TOKENS = 2, 100
#: More than any test needs; the tiny models state 256.
CONTEXT = 1 << 20
#: End of a name -> (mean, standard deviation); other vectors are norms, matrices have 1 / sqrt(columns).
_SCALES = {
    "e_score_correction_bias": (0.0, 0.1),
    "dt_bias": (-3.0, 1.5),
    "A_log": (1.0, 1.0),
    "conv1d.weight": (0.0, 0.4),
    "conv1d.bias": (0.0, 0.4),
}


def tensors(config: Nemotron3Config, seed: int = 0) -> dict[str, Tensor]:
    """Random FP32 tensors in which every factor that could be missing shows."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for t in inventory.hf_tensors(config, dtype="float32"):
        usual = (1.0, 0.3) if len(t.shape) == 1 else (0.0, t.shape[-1] ** -0.5)
        mean, std = next((v for end, v in _SCALES.items() if t.name.endswith(end)), usual)
        result[t.name] = mean + std * torch.randn(t.shape, generator=generator)
    return result


def engine_of(config: Nemotron3Config, seed: int = 0) -> Engine:
    """An engine with `tensors`."""
    return Engine(read_weights(InMemory(tensors(config, seed), Path()), config), max_context=CONTEXT)


@functools.cache
def tiny(name: str) -> tuple[Engine, Tensor]:
    """A tiny model, and a text [ROWS, TOKENS] for it."""
    engine = engine_of(get(f"{name}-tiny"))
    return engine, text(engine, ROWS, TOKENS)


def text(engine: Engine, rows: int, tokens: int) -> Tensor:
    """Random ids [rows, tokens] over which no expert is chosen by a hair."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(engine.config.vocab_size, (rows, tokens), generator=generator)
        if routing_margin(engine, ids) > MARGIN:
            return ids
    raise AssertionError("no text without near ties")


@torch.inference_mode()
def routing_margin(engine: Engine, ids: Tensor) -> float:
    """Smallest gap between the last chosen and the best rejected expert over ids [b, s]."""
    state = engine.new_state(len(ids))
    batch = ForwardBatch(state.lengths, ids.shape[1], None, engine.device)
    x, margin = engine.weights.embedding[ids.flatten()], math.inf
    for layer, kept in zip(engine.weights.layers, state.layers, strict=True):
        if isinstance(layer, MixtureOfExperts):
            scores = (layer.norm(x) @ layer.router).sigmoid() + layer.bias
            best = scores.topk(layer.topk + 1, dim=-1).values
            margin = min(margin, (best[:, -2] - best[:, -1]).min().item())
        x, _ = layer(x, kept, batch)
    return margin


def assert_states_equal(found: State, expected: State) -> None:
    """Every tensor of every layer, as far as rows have tokens."""
    assert found.lengths == expected.lengths
    for mine, other in zip(found.layers, expected.layers, strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, MambaState):
            assert isinstance(other, MambaState)
            torch.testing.assert_close(mine.window, other.window, rtol=0, atol=ATOL)
            torch.testing.assert_close(mine.ssm, other.ssm, rtol=ATOL, atol=ATOL)
        elif isinstance(mine, KVCache):
            assert isinstance(other, KVCache)
            for row, n in enumerate(found.lengths):
                a, b = mine.cache[row, :, :, :n], other.cache[row, :, :, :n]
                torch.testing.assert_close(a, b, rtol=0, atol=ATOL)
