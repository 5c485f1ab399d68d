"""A step with gradient sync and scale, in layouts of the modules' own, equals that of one process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.boundary_processes import run_apart
from tests.support.boundary_steps import MICROBATCHES, PATTERN, Case, Outcome, single, steps


class Reference(NamedTuple):
    folder: str
    loss: float


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = str(tmp_path_factory.mktemp("single"))
    return Reference(folder, run_distributed(single, 1, folder, PATTERN)[0])


def check(reference: Reference, ranks: int, *cases: Case) -> list[list[Outcome]]:
    """Run the cases on the same ranks; losses and gradients equal those of the single process."""
    found = run_distributed(steps, ranks, list(cases), reference.folder)
    for i, case in enumerate(cases):
        language = Layout.parse(case.layouts[2])
        loss = sum(outcomes[i].loss for outcomes in found) / language.tp
        assert loss == pytest.approx(reference.loss, rel=1e-5), case
        assert max(outcomes[i].error for outcomes in found) < 1e-5, case
        names = {name for outcomes in found for name in outcomes[i].compared}
        assert any("modality" in name for name in names) == (case.frozen != ("vision", "audio")), case
        assert any("language" in name for name in names), case
    return [[outcomes[i] for outcomes in found] for i in range(len(cases))]


WIDE = ("dp=4", "dp=4", "tp=2,dp=2,sp")


def test_experts_and_context_ranks_on_shared_ranks(reference: Reference) -> None:
    """EP 4 with TP 2; then encoders whose context ranks share media, into CP 2 x TP 2 slices."""
    experts = Case(WIDE, ep=4)
    media = Case(("cp=4,share=media", "cp=2,dp=2,share=media", "tp=2,cp=2,sp"))
    check(reference, 4, experts, media)


@pytest.mark.full
def test_experts_across_data_lanes_on_ranks_of_their_own(reference: Reference) -> None:
    """EP 4 over four data lanes that two lanes of vision and one of audio feed."""
    across = Case(("dp=2", "offset=2", "dp=4,offset=3"), ep=4)
    check(reference, 7, across, across._replace(fed=False))


@pytest.mark.full
def test_stages_on_shared_ranks(reference: Reference) -> None:
    """Two stages and two data lanes; with a feed, or without one and with a frozen encoder."""
    staged = Case(("dp=4", "dp=4", "pp=2,dp=2"), pattern="M*|E")
    check(reference, 4, staged, staged._replace(fed=False, frozen=("audio",)))


@pytest.mark.full
def test_the_stock_schedule_on_ranks_of_their_own(reference: Reference) -> None:
    """A language model of two context ranks, of two data lanes, and of two stages."""
    context, lanes, stages = (
        Case(("dp=2", "offset=2", language), pattern="M*|E" if "pp" in language else PATTERN)
        for language in ("cp=2,offset=3", "dp=2,offset=3", "pp=2,offset=3")
    )
    check(reference, 5, context, lanes, lanes._replace(fed=False), stages, stages._replace(fed=False))


@pytest.mark.full
def test_frozen_encoders_on_shared_ranks(reference: Reference) -> None:
    """Bytes and exchanges of a step: both encoders trained, none, and one projector only."""
    trained, frozen, one, projector = (
        Case(WIDE, frozen=names)
        for names in ((), ("vision", "audio"), ("audio",), ("vision.encoders.tiny.inner", "audio"))
    )
    everything, nothing, vision, last = check(reference, 4, trained, frozen, one, projector)
    _check_traffic(everything, nothing, vision, last)
    # Both encoders' rows go in one batch of messages forward, and in one backward between the same ranks.
    forward = [outcome.exchanges for outcome in nothing]
    assert min(forward) >= 1 and max(forward) == MICROBATCHES
    for outcomes in (everything, vision, last):
        assert [outcome.exchanges for outcome in outcomes] == [2 * count for count in forward]


@pytest.mark.full
def test_frozen_encoders_on_ranks_of_their_own(reference: Reference) -> None:
    """As above; the ranks of a frozen encoder exchange forward only."""
    apart = ("dp=2", "offset=2", "dp=2,offset=3")
    trained, frozen, one, projector = (
        Case(apart, frozen=names)
        for names in ((), ("vision", "audio"), ("audio",), ("vision.encoders.tiny.inner", "audio"))
    )
    everything, nothing, vision, last = check(reference, 5, trained, frozen, one, projector)
    _check_traffic(everything, nothing, vision, last)
    assert sum(outcome.sent for outcome in vision) < sum(outcome.sent for outcome in everything)
    assert max(outcome.exchanges for outcome in nothing) <= MICROBATCHES
    assert [outcome.exchanges for outcome in vision][2] <= MICROBATCHES, "audio received gradients"


def _check_traffic(
    everything: list[Outcome], nothing: list[Outcome], vision: list[Outcome], last: list[Outcome]
) -> None:
    total, forward, some = (
        sum(outcome.sent for outcome in outcomes) for outcomes in (everything, nothing, vision)
    )
    assert forward > 0 and total == 2 * forward, "gradients are as many bytes as rows"
    assert forward < some <= total
    assert [outcome.sent for outcome in last] == [outcome.sent for outcome in vision]


@pytest.mark.parametrize(
    ("layouts", "pattern", "ranks"),
    [
        (("dp=2", "dp=2", "pp=2"), "M*|E", 2),
        pytest.param(("dp=2", "dp=2", "tp=2,sp"), "M*E", 2, marks=pytest.mark.full),
        pytest.param(("dp=2", "offset=2", "dp=2,offset=3"), "M*E", 5, marks=pytest.mark.full),
    ],
    ids=["colocated with PP", "colocated", "disjoint"],
)
def test_recompute(reference: Reference, layouts: tuple[str, str, str], pattern: str, ranks: int) -> None:
    """Encoders' and the language model's activations are computed twice, and the step is the same; with PP
    also after an evaluation, which gives the same losses."""
    plain = Case(layouts, pattern=pattern, evaluated="|" in pattern)
    passes = 1 + plain.evaluated
    without, again = check(reference, ranks, plain, plain._replace(recompute=True))
    for one, other in zip(without, again, strict=True):
        assert other.encoded == one.encoded + one.encoded // passes
        assert other.layers == one.layers + one.layers // passes
        assert other.sent == one.sent, "an exchange was repeated"


def _failed(case: Case, folder: str) -> str:
    try:
        return f"no error: {steps([case], folder)}"
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


@pytest.mark.parametrize(
    ("ranks", "layouts", "fed", "words"),
    [
        (3, ("tp=1", "offset=1", "offset=2"), False, "positions of input_ids are for vision, but there are"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (2, ("dp=2", "dp=2", "dp=2"), True, "rows, but the row counts of the batch say"),
                (3, ("tp=1", "offset=1", "offset=2"), True, "rows, but the row counts of the batch say"),
                (2, ("tp=1", "dp=2", "dp=2"), True, "give them the same ranks or none in common"),
                (2, ("offset=2", "dp=2", "dp=2"), True, "over sized with world size 2 and rank offset 2"),
                (3, ("dp=3", "dp=3", "dp=3"), True, "do not divide among 3 data lanes"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_an_error_everywhere(
    reference: Reference, ranks: int, layouts: tuple[str, str, str], fed: bool, words: str
) -> None:
    """More rows than positions, found by the encoder's rank or by the language model's; layouts that do not
    fit each other, the world or the samples."""
    case = Case(layouts, fed=fed, extra=2)
    found = run_apart(_failed, ranks, case, reference.folder, wait=30.0, timeout=90)
    assert any(words in said for said in found), found
    assert all("Error: " in said and (words in said or "failed or ended first" in said) for said in found)
