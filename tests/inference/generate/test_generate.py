"""Whole continuations: batches, stops, sampling, and checkpoints of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_nemotron3.inference.generate.decode import load
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.sampling import Sampling
from megatron_nemotron3.inference.generate.scan import MambaState
from tests.support.engines import CONTEXT, tensors, tiny
from tests.support.hf_folders import write_hf
from tests.support.naive_decoding import naive_continuation

LENGTHS = (5, 40, 1)


def prompts() -> list[list[int]]:
    _, ids = tiny("super")
    return [ids[i % 2, 10 : 10 + n].tolist() for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("super", None),
        ("nano-4b", Sampling(1.2, top_p=0.9, seed=9)),
        ("super", Sampling(1.0, top_k=30, top_p=0.6, seed=13)),
    ],
    ids=str,
)
def test_plain_decoding_is_naive_decoding(name: str, sampling: Sampling | None) -> None:
    """Prompts of unequal lengths with states, against full passes over each growing text without any."""
    engine, _ = tiny(name)
    found = generate(engine, prompts(), GenerationOptions(12, sampling or Sampling(), chunk=7)).rows
    for row, prompt in enumerate(prompts()):
        assert found[row].tokens == naive_continuation(engine, prompt, 12, sampling, row)


def test_every_row_may_stop_at_once() -> None:
    engine, _ = tiny("super")
    free = generate(engine, prompts(), GenerationOptions(1))
    found = generate(engine, prompts(), GenerationOptions(10, stop={row.tokens[0] for row in free.rows}))
    assert [len(row.tokens) for row in found.rows] == [1, 1, 1] and found.passes == 0
    assert found.tokens_per_second == 0


@pytest.mark.parametrize(
    "ids, new, message",
    [
        ([], 1, "no prompts"),
        (["hi"], 1, "prompt .hi. is a text: give token ids"),
        ([[1]], 0, "max_new_tokens=0"),
        ([[1] * 200, [1] * 250], 7, "row 1 would have 257 tokens, more than max_context=256"),
    ],
)
def test_what_is_refused(ids: list[list[int]], new: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Engine(tiny("super")[0].model), ids, GenerationOptions(new))


@pytest.mark.parametrize("draft", [0, 2])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.8, seed=5)], ids=str)
def test_log_probabilities_of_new_tokens(draft: int, sampling: Sampling) -> None:
    """Those of one pass over the whole text, at temperature 1; a row that stops early has no more."""
    engine, _ = tiny("super")
    first = generate(engine, prompts(), GenerationOptions(9, sampling, draft)).rows
    options = GenerationOptions(9, sampling, draft, stop={first[0].tokens[4]}, logprobs=True)
    found = generate(engine, prompts(), options).rows
    assert [row.tokens for row in found] == [row.tokens[: len(f.tokens)] for row, f in zip(first, found)]
    assert found[0].stopped and not first[0].logprobs
    for prompt, row in zip(prompts(), found, strict=True):
        ids = torch.tensor([[*prompt, *row.tokens]])
        logits = engine.forward(ids[:, :-1], engine.new_state()).logits
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, len(prompt) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, rtol=1e-5, atol=1e-5)


# --- checkpoints --------------------------------------------------------------------------------------


def test_bfloat16(tmp_path: Path) -> None:
    """Less precise, but the same model; states of Mamba-2 stay FP32, and single steps equal one pass.

    Without experts: choosing others by rounding is no error, but a large difference.
    """
    engine, ids = tiny("nano-4b")
    write_hf(tmp_path / "hf", engine.config, values=tensors(engine.config), dtype="float32")
    coarse = Engine(load(tmp_path / "hf", dtype=torch.bfloat16), max_context=CONTEXT)
    expected = engine.forward(ids, engine.new_state(2)).logits
    state = coarse.new_state(2)
    whole = coarse.forward(ids, coarse.new_state(2)).logits
    steps = [coarse.forward(ids[:, i : i + 1], state).logits for i in range(ids.shape[1])]
    assert whole.dtype == torch.float32 and coarse.dtype == torch.bfloat16
    together = torch.cat(steps, 1)
    for one, other in ((whole, expected), (together, whole)):
        assert (one.float() - other.float()).square().mean().sqrt() < 0.05 * expected.std()
    ssm = [layer.ssm for layer in state.layers.values() if isinstance(layer, MambaState)]
    assert ssm and all(s.dtype == torch.float32 for s in ssm)
