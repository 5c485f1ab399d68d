"""Refits of models that Megatron built, against the Hugging Face export of the same model."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.refit_model import built_and_refitted

CASES: list[tuple[str, dict[str, int], str, dict[str, int]]] = [
    ("super-tiny", {"tp": 2, "pp": 2}, "vllm", {"tp": 4}),
    ("super-tiny", {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}, "sglang", {"tp": 4, "dp": 2, "ep": 2}),
    ("nano-tiny", {"tp": 4, "ep": 2, "etp": 2}, "vllm", {"tp": 2, "pp": 2}),
    ("super-tiny", {"cp": 2, "tp": 2, "ep": 4}, "hf", {"replicas": 2}),
]


def test_a_model_of_two_tensor_ranks() -> None:
    found = run_distributed(built_and_refitted, 2, "super-tiny", {"tp": 2, "ep": 2}, "vllm", {"tp": 2})
    assert min(found) > 50


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_of_four_ranks(case: Any) -> None:
    found = run_distributed(built_and_refitted, 4, *case)
    assert max(found) > 30
