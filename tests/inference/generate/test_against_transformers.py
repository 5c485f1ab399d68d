"""Greedy continuations of transformers' NemotronHForCausalLM with its cache, on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import InMemory
from tests.support.engines import CONTEXT, MARGIN, routing_margin, tensors
from tests.support.model_mapping import stack_experts
from tests.support.parity import oracle, without_mtp

pytest.importorskip("transformers")

NEW = 200
#: Models with the same layer kinds as another one run only with `full`.
SEED = 4
FULL = pytest.mark.full


def theirs(model: Any, prompt: Tensor) -> tuple[list[int], float]:
    """New tokens, and the smallest gap between the largest and the second largest logit."""
    with torch.no_grad():
        out = model.generate(
            prompt,
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, prompt.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).min().item()


@pytest.mark.parametrize(
    "name", ["super", *(pytest.param(n, marks=FULL) for n in ("nano", "nano-4b", "nemotron-h-8b"))]
)
def test_greedy_continuations(name: str) -> None:
    config = without_mtp(get(f"{name}-tiny"))
    weights = tensors(config, SEED)
    prompt = torch.randint(config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(1))
    expected, gap = theirs(oracle(config, stack_experts(weights)), prompt)
    engine = Engine(read_weights(InMemory(weights, None), config), max_context=CONTEXT)  # type: ignore[arg-type]
    found = generate(engine, prompt.tolist(), GenerationOptions(NEW)).rows[0].tokens
    assert found == expected
    # The match is no accident: no token or expert was chosen by less than rounding, and the text varies.
    assert gap > 1e-4, f"two logits are {gap:.1e} apart: another seed"
    assert routing_margin(engine, torch.tensor([prompt[0].tolist() + found])) > MARGIN
    assert len(set(found)) > NEW / 3
