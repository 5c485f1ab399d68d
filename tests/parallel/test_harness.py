"""The comparison notices what goes wrong in practice. Each case breaks one mark that Megatron goes by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.compare import farthest, nudged, reference, tolerances, weights
from megatron_nemotron3.proof.certify.tensors import RanksDiffer, gather
from megatron_nemotron3.proof.certify.world import train, train_each
from tests.parallel.compare import against
from tests.parallel.layouts import CASES


def forget_sequence_parallel_norms(chunks: Sequence[Any]) -> None:
    """Norm gains see a part of the tokens on each rank; unmarked, their gradients are not summed."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("layer_norm_weight"):
                parameter.sequence_parallel = False


def forget_latent_projections(chunks: Sequence[Any]) -> None:
    """The same for the latent projections, which every tensor-parallel rank holds whole."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "latent_proj" in name:
                parameter.sequence_parallel = False


def sum_experts_over_all(chunks: Sequence[Any]) -> None:
    """Gradients of experts summed over ranks that hold other experts."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts.linear" in name:
                parameter.allreduce = True


@pytest.mark.parametrize(
    ("sabotage", "layout", "error", "message"),
    [
        (forget_sequence_parallel_norms, ParallelLayout(tp=2), RanksDiffer, "ranks differ"),
        pytest.param(
            forget_latent_projections,
            ParallelLayout(tp=2),
            RanksDiffer,
            "ranks differ",
            marks=pytest.mark.full,
        ),
        (sum_experts_over_all, ParallelLayout(dp=2, ep=2), AssertionError, "gradients differ"),
    ],
)
def test_broken_marks_are_noticed(
    sabotage: Any, layout: ParallelLayout, error: type[Exception], message: str
) -> None:
    case = CASES["super"]
    with pytest.raises(error, match=message):
        against(case, reference(case), train(case.at(layout, sabotage=sabotage), weights(case)))


def test_tolerance_is_rounding() -> None:
    """What passes is far below what a wrong sum makes; and a run nudged once more passes."""
    case = CASES["super"]
    base, (gradients, after) = reference(case), tolerances(case)
    for allowed, found in ((gradients, base.gradients), (after, base.weights)):
        for key, tolerance in allowed.items():
            assert 0 <= tolerance <= 1e-3 * found[key].abs().max(), key
    against(case, base, train(case, nudged(weights(case), seed=99)))


def test_runs_of_one_process_are_those_of_several() -> None:
    """The second run in a process is what it is alone, so no state of the first is left."""
    case = CASES["super"]
    other = nudged(weights(case), seed=0)
    _, second = train_each(case, [weights(case), other])
    alone = train(case, other)
    assert second.losses == alone.losses and second.norms == alone.norms
    assert all(second.weights[key].equal(value) for key, value in alone.weights.items())


def test_a_tensor_of_one_model_only_is_a_difference() -> None:
    one, both = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for expected, found in ((one, both), (both, one)):
        distance = farthest("weights", expected, found, expected)
        assert distance.share == float("inf") and distance.key == "b"


def test_gather_puts_pieces_together() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    left, right = ("w", (2, 3), (0, 0), whole[:, :2]), ("w", (2, 3), (0, 2), whole[:, 2:])
    assert gather([[left], [right]])["w"].equal(whole)
    with pytest.raises(RanksDiffer, match="no rank holds"):
        gather([[left]])
    with pytest.raises(RanksDiffer, match="ranks differ by 1"):
        gather([[left, right], [("w", (2, 3), (0, 0), whole[:, :2] + 1)]])
