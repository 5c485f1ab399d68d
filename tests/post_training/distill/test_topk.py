"""Divergences from stored top-k log-probabilities against their definition over k + 1 outcomes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_nemotron3.post_training.distill.divergences import KINDS, divergence, terms
from megatron_nemotron3.post_training.distill.topk import (
    TeacherTokens,
    draw_quantiles,
    most_probable,
    topk_divergence,
)
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.post_training.distill.test_divergence import logits


def outcomes(z: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [n, k + 1] of the ids and of all others together."""
    p = (z / temperature).softmax(-1)
    chosen = p.gather(-1, ids)
    others = p.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([chosen, others], -1).log()


def test_the_most_probable() -> None:
    z = logits(5, 12)
    ids, log_p, _ = most_probable(z, 4, 2.0, vocabulary=11)
    assert torch.equal(ids, z[:, :11].topk(4).indices)
    torch.testing.assert_close(log_p, outcomes(z[:, :11], ids, 2.0).float())


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_definition(kind: str) -> None:
    student, teacher = logits(3, 9).requires_grad_(), logits(3, 9, seed=1)
    ids = most_probable(teacher, 3, 2.0).ids
    log_p = outcomes(teacher, ids, 2.0)
    values = topk_divergence(student, TeacherTokens(ids, log_p), kind, 2.0)
    expected = terms(log_p, outcomes(student, ids, 2.0), kind).sum(-1)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda z: topk_divergence(z, TeacherTokens(ids, log_p), kind, 2.0, vocabulary=9),
        (student,),
        atol=1e-8,
    )


def test_fewer_tokens_are_at_most_the_whole() -> None:
    student, teacher = logits(40, 20), logits(40, 20, seed=1)
    found = [topk_divergence(student, most_probable(teacher, k)).mean().item() for k in (1, 4, 16, 20)]
    assert found == sorted(found) and found[0] < 0.9 * found[-1]


def test_drawn_tokens_stand_for_the_rest() -> None:
    """Over all draws the mean of the divergence and of its gradient is that of the whole vocabulary."""
    drawn, cells = 4, 16  # quantiles [0, 1) in 64 cells, of which each token of the rest has some
    parts = torch.tensor([400.0, 300, 200, 1, 3, 7, 12, 20, 21], dtype=torch.float64)
    teacher, student = (parts / parts.sum()).log()[None], logits(1, 9).requires_grad_()
    whole = divergence(student, teacher)
    (expected,) = torch.autograd.grad(whole.sum(), student)
    offsets = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    quantiles = (torch.arange(drawn) + offsets[:, None]) / drawn
    target = most_probable(teacher.expand(cells, -1), 3, quantiles=quantiles)
    assert all(len(set(row)) > 1 for row in target[0][:, 3:].tolist())
    values = topk_divergence(student.expand(cells, -1), target)
    (gradient,) = torch.autograd.grad(values.mean(), student)
    torch.testing.assert_close(values.mean(), whole[0], rtol=1e-7, atol=0)  # stored in FP32
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
    without = TeacherTokens(target.ids[:, :3], torch.cat([target.log_p[:, :3], target.log_p[:, -1:]], 1))
    for kind in set(KINDS) - {"kl"}:  # no means over the teacher's tokens: the k + 1 outcomes
        given = topk_divergence(student.expand(cells, -1), target, kind)
        assert torch.equal(given, topk_divergence(student.expand(cells, -1), without, kind))


def test_quantiles() -> None:
    found = draw_quantiles(1000, 8, seed=3)
    assert torch.equal((found * 8).floor(), torch.arange(8.0).double().expand(1000, 8))
    assert torch.equal(found, draw_quantiles(1000, 8, seed=3))
    assert abs(float((found[:, 0] * 8).mean()) - 0.5) < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_peaked_logits(kind: str) -> None:
    """Where FP32 has no probability for the rest, its logarithm is still right."""
    student = torch.tensor([[300.0, -20, -30, -40, -50, -60]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1, 0, -1, -2, -3]])
    target = most_probable(teacher, 2)
    values = topk_divergence(student, target, kind)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    exact = student.detach().double().requires_grad_()
    log_q = exact.log_softmax(-1)
    rest = log_q[:, 2:].logsumexp(-1, keepdim=True)
    expected = terms(target[1].double(), torch.cat([log_q[:, :2], rest], 1), kind).sum(-1)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert math.isfinite(float(values)) and (kind != "kl" or values > 60)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)


def parallel_differences(tp: int) -> list[float]:
    initialize(tp=tp)
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    found = []
    for vocabulary in (None, 13, 7):  # 8 entries on each rank
        whole, teacher = logits(6, 16), logits(6, 16, seed=1)
        real = slice(0, vocabulary)
        own, target = (z.chunk(tp, -1)[group.rank()].clone() for z in (whole, teacher))
        ids, log_p, _ = most_probable(target, 5, 2.0, group, vocabulary=vocabulary)
        expected = outcomes(teacher[:, real], ids, 2.0)
        found += [float(not torch.equal(ids, teacher[:, real].topk(5).indices))]
        found += [(log_p - expected).abs().max().item() * 1e-7]
        quantiles = draw_quantiles(6, 3, seed=1)
        settings = {"vocabulary": vocabulary, "quantiles": quantiles}
        alone = most_probable(teacher, 3, 2.0, **settings)
        drawn = most_probable(target, 3, 2.0, group, **settings)
        found += [float(not torch.equal(drawn[0], alone[0])), (drawn[1] - alone[1]).abs().max().item() * 1e-6]
        z = whole.clone().requires_grad_()
        topk_divergence(z, alone, temperature=2.0, vocabulary=vocabulary).sum().backward()
        own.requires_grad_().grad = None
        topk_divergence(own, alone, "kl", 2.0, group, vocabulary=vocabulary).sum().backward()
        found += [(own.grad - z.grad.chunk(tp, -1)[group.rank()]).abs().max().item()]
        for kind in KINDS:
            z = whole.clone().requires_grad_()
            values = terms(expected, outcomes(z[:, real], ids, 2.0), kind).sum(-1)
            values.sum().backward()
            own.requires_grad_().grad = None
            given = topk_divergence(
                own, TeacherTokens(ids, expected), kind, 2.0, group, vocabulary=vocabulary
            )
            given.sum().backward()
            found += [(given - values).abs().max().item()]
            found += [(own.grad - z.grad.chunk(tp, -1)[group.rank()]).abs().max().item()]
    return found


def test_vocabulary_parallel() -> None:
    for found in run_distributed(parallel_differences, 2, 2):
        assert len(found) == 3 * (5 + 2 * len(KINDS)) and max(found) < 1e-12
