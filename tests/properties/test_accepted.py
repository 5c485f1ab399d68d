"""Whatever the rules accept is built and trains one step, in any layout as on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import count
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.properties.step import Case, Outcome, train_step
from tests.properties.strategies import accepted, draw_many

#: Relative differences of loss and gradient norm that summing in another order may make.
TOLERANCE = {"fp32": (2e-4, 1e-3), "bf16": (5e-2, 2.5e-1)}
QUIET = settings(derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])


def steps(cases: list[Case]) -> list[Outcome]:
    """On every rank: the cases one after the other, Megatron's groups made anew for each."""
    outcomes = []
    for case in cases:
        try:
            outcomes.append(train_step(case))
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return outcomes


def on_one_rank(case: Case, vocabulary: int) -> Case:
    """The same training without a layout; a padded vocabulary stays padded."""
    return replace(case, layout=ParallelLayout(), config=case.config.but(vocab_size=vocabulary))


def differences(case: Case, made: tuple[Outcome, ...], one: Outcome) -> list[str]:
    """What ranks of the case's layout computed otherwise than one rank."""
    loss, norm = TOLERANCE[case.precision]
    found: list[tuple[str, float, float, float]] = []
    expected = count(case.config.but(vocab_size=one.vocabulary)).trainable
    found += [("parameters", rank.parameters, expected, 0.0) for rank in made]
    # Megatron weighs MTP by the tokens each context-parallel rank has left after shifting: at a few tokens
    # the ranks' shares differ visibly from those of one rank.
    weighed = not (case.layout.cp > 1 and case.config.has_mtp)
    for rank in made:
        if weighed:
            found.append(("grad_norm", rank.grad_norm, one.grad_norm, norm))
        found.append(("loss", rank.loss, one.loss, loss))
        if rank.mtp and weighed:
            assert one.mtp is not None
            found += [("mtp", a, b, loss) for a, b in zip(rank.mtp, one.mtp, strict=True)]
    return [
        f"{what} {value}, not {wanted}"
        for what, value, wanted, tolerance in found
        if not abs(value - wanted) <= tolerance * abs(wanted)
    ]


def check(cases: list[Case], ranks: int) -> None:
    made = list(zip(*run_distributed(steps, ranks, cases, timeout=60 + 5 * len(cases)), strict=True))
    alone = [on_one_rank(case, ranks[0].vocabulary) for case, ranks in zip(cases, made, strict=True)]
    ones = run_distributed(steps, 1, alone)[0]
    wrong = {
        str(case): found
        for case, outcomes, one in zip(cases, made, ones, strict=True)
        if (found := differences(case, outcomes, one))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (2, 6),
        pytest.param(2, 120, marks=pytest.mark.full),
        pytest.param(3, 40, marks=pytest.mark.full),
        pytest.param(4, 120, marks=pytest.mark.full),
        pytest.param(8, 30, marks=pytest.mark.full),
    ],
)
def test_any_layout_trains_as_one_rank(ranks: int, number: int) -> None:
    check(draw_many(accepted(ranks), number), ranks)


def any_model(number: int) -> None:
    """Inside one world: gloo keeps the threads of every world it made."""

    @settings(QUIET, max_examples=number)
    @given(accepted(1))
    def one_step(case: Case) -> None:
        (made,) = steps([case])
        assert made.vocabulary == case.config.vocab_size
        assert made.parameters == count(case.config).trainable
        assert 0 < made.loss < 50
        assert made.mtp is not None and len(made.mtp) == case.config.mtp_num_layers

    one_step()


@pytest.mark.parametrize("number", [15, pytest.param(300, marks=pytest.mark.full)])
def test_any_model_trains(number: int) -> None:
    run_distributed(any_model, 1, number)


@pytest.mark.full
def test_a_difference_is_noticed() -> None:
    """That layouts agree means something only if a model with one other number does not."""
    (case,) = draw_many(accepted(2).filter(lambda c: "E" in c.config.pattern and c.precision == "fp32"), 1)
    (made,) = zip(*run_distributed(steps, 2, [case]), strict=True)
    changes: dict[str, Any] = {"moe_router_topk_scaling_factor": 7.0}
    other = on_one_rank(case, made[0].vocabulary)
    (one,) = run_distributed(steps, 1, [replace(other, config=other.config.but(**changes))])[0]
    assert differences(case, made, one)
