"""MTP's loss under context parallelism: each token weighs what it weighs on one rank, whatever is masked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_nemotron3.launch import ParallelLayout
from tests.parallel.case import Case
from tests.parallel.layouts import CASES, PER_TOKEN
from tests.parallel.test_packed import forget_hooks
from tests.parallel.wrong import one_step, relative

CP2 = ParallelLayout(cp=2)
SUPER = CASES["super"]
#: Rounding of a gradient is 2e-6 here, and Megatron's error above 5e-3.
ROUNDING = 2e-5
ROWS: dict[str, tuple[Case, ParallelLayout, bool]] = {
    "every token counts": (replace(SUPER, mask="none"), CP2, True),
    # Rank 1 has nothing that counts before the shift, and two targets of rank 0 after it.
    "a rank without a token": (replace(SUPER, mask="middle"), CP2, True),
    "a rank without a token, CP4": (replace(SUPER, mask="middle"), ParallelLayout(cp=4), True),
    # Megatron makes labels of the tokens, and shifts the mask once more.
    "no labels": (replace(SUPER, labels=False), CP2, True),
    "no labels, a rank without a token": (replace(SUPER, labels=False, mask="middle"), CP2, False),
    "no labels, no mask": (replace(SUPER, labels=False, mask="none", model_mask="absent"), CP2, True),
    "mean loss": (replace(SUPER, mask="none", without=(PER_TOKEN,)), CP2, True),
    "two sequences": (replace(SUPER, micro_batch_size=2), CP2, True),
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.full if full else ()) for row, (*_, full) in ROWS.items()]
)
def test_mtp_weighs_as_on_one_rank(row: str) -> None:
    case, layout, _ = ROWS[row]
    one, other = one_step(case, case.at(layout))
    assert relative(one, other) < ROUNDING
    assert other.mtp == [pytest.approx(one.mtp[0], rel=1e-5)]


@pytest.mark.full
@pytest.mark.parametrize(("mask", "least"), [("none", 5e-3), ("random", 2e-2)])
def test_megatron_alone_weighs_each_rank_by_its_own_tokens(mask: str, least: float) -> None:
    """What the hooks are for.

    Without a mask every rank keeps s / cp tokens; the shift takes k of them at depth k, all from rank 0,
    which has the end of the sequence. Its share weighs (s/2) / (s/2 - k) instead of s / (s - k). Here s = 64.
    """
    case = replace(SUPER, mask=mask)  # type: ignore[arg-type]
    one, two = one_step(case, replace(case, sabotage=forget_hooks).at(CP2))
    error = relative(one, two, "mtp.")
    assert error > least
    # All of it comes from MTP: the output layer, which the decoder shares with it, is off by less.
    assert relative(one, two, "output_layer") < error
