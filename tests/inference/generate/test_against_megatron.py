"""Logits, states and MTP depths against Megatron's HybridModel without inference states, same weights."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.inference.generate.attention import KVCache
from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.scan import MambaState
from megatron_nemotron3.layers.ssd import ssd_reference
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import pair
from tests.support.engines import CONTEXT, NAMES, ROWS, TOKENS, close, text
from tests.support.parity import forward
from tests.support.references import causal_conv1d_reference


class Model:
    """A Megatron model, an engine with its weights, and Megatron's intermediate results for a text."""

    def __init__(self, name: str) -> None:
        self.config = get(f"{name}-tiny")
        with tempfile.TemporaryDirectory() as folder:
            made = pair(self.config, Path(folder), seed=5)
        self.model, self.engine = made.model, Engine(read_weights(made.hf, self.config), max_context=CONTEXT)
        self.ids = text(self.engine, ROWS, TOKENS)
        #: Layer -> outputs [s, b, …] of in_proj or linear_qkv.
        self.projected: dict[int, Tensor] = {}
        self.mtp: list[Tensor] = []
        hooks = list(self._hooks())
        with torch.no_grad():
            self.logits = forward(self.model, self.ids)
        for hook in hooks:
            hook.remove()

    def _hooks(self) -> Iterator[Any]:
        for i, (kind, layer) in enumerate(zip(self.config.pattern, self.model.decoder.layers, strict=True)):
            if kind in "M*":
                module = layer.mixer.in_proj if kind == "M" else layer.self_attention.linear_qkv

                def note(_m: Any, _a: Any, out: Any, i: int = i) -> None:
                    self.projected[i] = out[0].detach()

                yield module.register_forward_hook(note)
        if self.config.has_mtp:
            depths = 1 + self.config.mtp_num_layers
            # Hidden states [s, b, d] of the decoder and then of each depth, concatenated.
            yield self.model.mtp.register_forward_hook(lambda m, a, out: self.mtp.extend(out.chunk(depths)))


@pytest.fixture(scope="module")
def models(world: None) -> Any:
    """Function from a name to its `Model`, which is built once."""
    return functools.cache(Model)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_position(models: Any, name: str) -> None:
    m = models(name)
    state, found = m.engine.new_state(ROWS), []
    # One long pass, then token by token.
    for start, stop in ((0, 40), *((i, i + 1) for i in range(40, TOKENS))):
        found.append(m.engine.forward(m.ids[:, start:stop], state).logits)
    close(torch.cat(found, 1), m.logits)


@pytest.mark.parametrize("at", [1, 3, 64, TOKENS])
@pytest.mark.parametrize("single", [False, True], ids=["one pass", "steps"])
def test_states_of_a_text(models: Any, at: int, single: bool) -> None:
    """Each state tensor separately, computed from Megatron's projections and the plain recurrence."""
    m = models("super")
    c, state = m.config, m.engine.new_state(ROWS, capacity=2)
    for start in range(at) if single else (0,):
        m.engine.forward(m.ids[:, start : start + 1 if single else at], state)
    kinds = []
    for name, layer in state.layers.items():
        i = int(name.split(".")[2])
        if isinstance(layer, MambaState):
            inner, bc = c.mamba_inner_size, c.mamba_num_groups * c.mamba_state_dim
            mixer, projected = m.model.decoder.layers[i].mixer, m.projected[i].transpose(0, 1)[:, :at]
            _, xbc, dt = projected.split([inner, inner + 2 * bc, c.mamba_num_heads], -1)
            width = c.mamba_conv_kernel - 1
            window = torch.nn.functional.pad(xbc, (0, 0, width, 0))[:, -width:]
            close(layer.window, window)
            u = causal_conv1d_reference(xbc, mixer.conv1d_weight, mixer.conv1d_bias)
            x, B, C = u.split([inner, bc, bc], -1)
            _, ssm = ssd_reference(
                x.unflatten(-1, (c.mamba_num_heads, -1)).double(),
                torch.nn.functional.softplus(dt + mixer.dt_bias).double(),
                -mixer.A_log.exp().double(),
                B.unflatten(-1, (c.mamba_num_groups, -1)).double(),
                C.unflatten(-1, (c.mamba_num_groups, -1)).double(),
                return_final_state=True,
            )
            assert layer.ssm.dtype == torch.float32
            close(layer.ssm, ssm.float())
        elif isinstance(layer, KVCache):
            groups, queries = c.num_query_groups, c.num_attention_heads // c.num_query_groups
            qkv = m.projected[i][:at].unflatten(-1, (groups, queries + 2, c.kv_channels))
            expected = qkv[:, :, :, queries:].permute(1, 3, 2, 0, 4)  # [b, 2, groups, s, c]
            close(layer.cache[:, :, :, :at], expected)
        kinds.append(type(layer).__name__)
    assert kinds.count("MambaState") == c.pattern.count("M")
    assert kinds.count("KVCache") == c.pattern.count("*")


@pytest.mark.parametrize("name", ["super", "lightning", "puzzle"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_every_mtp_depth(models: Any, name: str, chunk: int) -> None:
    """Hidden states and logits of each depth, in chunks of any length, where the tokens are known."""
    m = models(name)
    depths = m.config.mtp_num_layers
    assert len(m.mtp) == 1 + depths and depths == 2
    hidden = m.engine.forward(m.ids, m.engine.new_state(ROWS)).hidden
    close(hidden, m.mtp[0].transpose(0, 1))
    mtp = MTP(m.engine, ROWS, capacity=1)
    for depth in range(1, depths + 1):
        count = TOKENS - depth
        outputs = [
            mtp.forward(depth, hidden[:, i : min(i + chunk, count)], m.ids[:, i + depth : i + depth + chunk])
            for i in range(0, count, chunk)
        ]
        hidden = torch.cat([out.hidden for out in outputs], 1)
        expected = m.mtp[depth].transpose(0, 1)[:, :count]
        close(hidden, expected)
        with torch.no_grad():
            logits = m.model.output_layer(expected, weight=None)[0]
        close(torch.cat([out.logits for out in outputs], 1), logits)
        assert mtp.depths[depth - 1].lengths == [count] * ROWS
