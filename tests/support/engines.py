"""Engines of tiny models with random weights, texts without near ties in routing, and comparisons."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.inference.generate.attention import KVCache
from megatron_nemotron3.inference.generate.decode import DecodeState, read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.scan import MambaState
from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.checkpoint_pair import InMemory

#: For logits and states, which are of size 1; two summation orders differ by 2e-5.
ATOL = 1e-4
#: Between two summation orders, a selected and a rejected expert closer than this may be swapped.
MARGIN = 1e-5
NAMES = ("super", "nano", "nano-4b", "nemotron-h-8b", "lightning", "puzzle")
#: Three times the length of the short scan, one and a half times a chunk of the long one.
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
    """Random FP32 tensors under Hugging Face names; no factor is 0 or 1, so that a missing one shows."""
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
    """Random ids [rows, tokens] for which no expert is selected by a small margin."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(engine.config.vocab_size, (rows, tokens), generator=generator)
        if routing_margin(engine, ids) > MARGIN:
            return ids
    raise AssertionError("no text without near ties")


@torch.inference_mode()
def routing_margin(engine: Engine, ids: Tensor) -> float:
    """Smallest gap between the last selected and the best rejected expert over ids [b, s]."""
    run = engine.new_run(ids, engine.new_state(len(ids)), None, False)
    engine.model.decoder(engine.model.embed(ids).flatten(0, 1), run)
    margin = math.inf
    for routing in run.routings:
        best = routing.ranked.topk(routing.chosen.shape[-1] + 1, dim=-1).values
        margin = min(margin, (best[:, -2] - best[:, -1]).min().item())
    return margin


def repeatable(examples: int) -> Callable[[Any], Any]:
    """Hypothesis settings: the same examples every time."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def close(found: Tensor, expected: Tensor) -> None:
    """Compare within `ATOL`."""
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)


def assert_mtp_equal(found: MTP, expected: MTP) -> None:
    """Compare the states of all depths."""
    for mine, other in zip(found.depths, expected.depths, strict=True):
        assert_states_equal(mine, other)


def assert_states_equal(found: DecodeState, expected: DecodeState) -> None:
    """Every tensor of every layer, as far as rows have tokens."""
    assert found.lengths == expected.lengths
    assert found.layers.keys() == expected.layers.keys()
    for name, mine in found.layers.items():
        other = expected.layers[name]
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


#: Ends of the names of the last tensors of a layer.
_LAYER_ENDS = (
    "out_proj.weight",
    "o_proj.weight",
    "fc2_latent_proj.weight",
    "shared_experts.down_proj.weight",
)


def agreeing_tensors(config: Nemotron3Config, strength: float, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of a model whose MTP block often agrees with it, without training.

    The layers add little to the embedding, and eh_proj passes on the embedding of the newest token, as in a
    model that predicts from its last token alone.

    Args:
        strength: scale of the layers' updates; at 0 MTP always agrees.
    """
    d, result = config.hidden_size, tensors(config, seed)
    for name in result:
        if name.endswith(_LAYER_ENDS):
            result[name] *= strength
        elif name.endswith("eh_proj.weight"):
            noise = result[name] * 0.1 * strength
            result[name] = torch.cat((torch.eye(d), torch.zeros(d, d)), 1) + noise
        elif name.endswith(("norm.weight", "norm_f.weight", "enorm.weight", "final_layernorm.weight")):
            result[name] = torch.ones_like(result[name])
    # Of the size of the layers' updates.
    result["backbone.embeddings.weight"] = (
        torch.nn.functional.normalize(result["backbone.embeddings.weight"], dim=-1) * d**0.5
    )
    return result


@functools.cache
def agreeing(strength: float, seed: int = 0, **changes: int | str) -> Engine:
    """An engine with `agreeing_tensors` of "super-tiny", with changes."""
    config = get("super-tiny").but(**changes)
    made = agreeing_tensors(config, strength, seed)
    return Engine(read_weights(InMemory(made, Path()), config), max_context=CONTEXT)


def agreeing_small(strength: float, seed: int = 0) -> Engine:
    """The same with few layers and a vocabulary of 8."""
    return agreeing(
        strength, seed, pattern="M*E", hidden_size=32, vocab_size=8, num_moe_experts=4, moe_router_topk=2
    )
