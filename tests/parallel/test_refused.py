"""The wrong numbers that rules about layouts prevent: what Megatron computes where it does not refuse.

Each is shown on one rank against several; the rule of that name is in `args/rules_*.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.world import Result
from tests.parallel.case import Case
from tests.parallel.layouts import CASES, PER_TOKEN
from tests.parallel.wrong import one_step, relative

CP2 = ParallelLayout(cp=2)


def runs(case: Case, other: Case | None = None) -> tuple[Result, Result]:
    """(one rank, CP 2) for one step."""
    return one_step(case, (other or case).at(CP2))


@pytest.mark.full
def test_masked_mean_loss_under_context_parallelism_is_a_mean_of_means() -> None:
    """masked-mean-cp: without --calculate-per-token-loss every rank divides by its own number of tokens."""
    one, two = runs(replace(CASES["nano"], mask="random"))
    assert relative(one, two) > 5e-2
    assert abs(one.losses[0] - two.losses[0]) < 1e-5  # the printed loss does not show it


@pytest.mark.full
def test_documents_cut_as_one_sequence_reach_mamba_in_the_wrong_order() -> None:
    """documents-cp: the script cuts the whole sequence in chunks, upstream's Mamba expects documents cut."""
    packed = replace(
        CASES["nano"],
        documents=(16, 32, 16),
        extra=("--moe-aux-loss-coeff", "0", PER_TOKEN),
        mask="none",
    )
    one, right = runs(packed)
    assert relative(one, right) < 1e-4
    whole = replace(packed, cut_whole=True)
    one, right = runs(packed, whole)
    assert relative(one, right) < 1e-4
    one, wrong = runs(packed, replace(whole, cut_known=False))
    assert abs(one.losses[0] - wrong.losses[0]) > 1e-3
