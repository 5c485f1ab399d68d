"""Divergences from stored top-k log-probabilities against their definition over k + 1 outcomes."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.post_training.distill.divergences import KINDS, terms
from megatron_nemotron3.post_training.distill.topk import most_probable, topk_divergence
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
    ids, log_p = most_probable(z, 4, 2.0, vocabulary=11)
    assert torch.equal(ids, z[:, :11].topk(4).indices)
    torch.testing.assert_close(log_p, outcomes(z[:, :11], ids, 2.0).float())


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_definition(kind: str) -> None:
    student, teacher = logits(3, 9).requires_grad_(), logits(3, 9, seed=1)
    ids, _ = most_probable(teacher, 3, 2.0)
    log_p = outcomes(teacher, ids, 2.0)
    values = topk_divergence(student, (ids, log_p), kind, 2.0)
    expected = terms(log_p, outcomes(student, ids, 2.0), kind).sum(-1)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda z: topk_divergence(z, (ids, log_p), kind, 2.0, vocabulary=9), (student,), atol=1e-8
    )


def test_fewer_tokens_are_at_most_the_whole() -> None:
    student, teacher = logits(40, 20), logits(40, 20, seed=1)
    found = [topk_divergence(student, most_probable(teacher, k)).mean().item() for k in (1, 4, 16, 20)]
    assert found == sorted(found) and found[0] < 0.9 * found[-1]


def parallel_differences(tp: int) -> list[float]:
    initialize(tp=tp)
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    found = []
    for vocabulary in (None, 13, 7):  # 8 entries on each rank
        whole, teacher = logits(6, 16), logits(6, 16, seed=1)
        real = slice(0, vocabulary)
        own, target = (z.chunk(tp, -1)[group.rank()].clone() for z in (whole, teacher))
        ids, log_p = most_probable(target, 5, 2.0, group, vocabulary=vocabulary)
        expected = outcomes(teacher[:, real], ids, 2.0)
        found += [float(not torch.equal(ids, teacher[:, real].topk(5).indices))]
        found += [(log_p - expected).abs().max().item() * 1e-7]
        for kind in KINDS:
            z = whole.clone().requires_grad_()
            values = terms(expected, outcomes(z[:, real], ids, 2.0), kind).sum(-1)
            values.sum().backward()
            own.requires_grad_().grad = None
            given = topk_divergence(own, (ids, expected), kind, 2.0, group, vocabulary=vocabulary)
            given.sum().backward()
            found += [(given - values).abs().max().item()]
            found += [(own.grad - z.grad.chunk(tp, -1)[group.rank()]).abs().max().item()]
    return found


def test_vocabulary_parallel() -> None:
    for found in run_distributed(parallel_differences, 2, 2):
        assert len(found) == 3 * (2 + 2 * len(KINDS)) and max(found) < 1e-12
