"""Vocabulary-parallel divergences against their definition."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_nemotron3.post_training.distill import divergences as module
from megatron_nemotron3.post_training.distill.divergences import KINDS, divergence
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.post_training.distill.reference import reference


def logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def by_definition(student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float) -> float:
    """The sum over tokens, from probabilities in plain Python."""
    total = 0.0
    for z_q, z_p in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = ([math.exp(z / temperature) for z in row] for row in (z_p, z_q))
        p, q = ([x / sum(row) for x in row] for row in (p, q))
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

        def kl(of: list[float], to: list[float]) -> float:
            return sum(a * math.log(a / b) for a, b in zip(of, to, strict=True))

        total += {
            "kl": kl(p, q),
            "reverse-kl": kl(q, p),
            "js": (kl(p, m) + kl(q, m)) / 2,
            "tv": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        }[kind]
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_definition(kind: str) -> None:
    student, teacher = logits(5, 7), logits(5, 7, seed=1)
    for temperature in (1.0, 2.5):
        given = reference(student, teacher, kind, temperature).sum().item()
        assert given == pytest.approx(by_definition(student, teacher, kind, temperature), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    student, teacher = logits(2, 3, 6).requires_grad_(), logits(2, 3, 6, seed=1)
    for vocabulary in (None, 5):
        assert torch.autograd.gradcheck(
            lambda z, v=vocabulary: divergence(z, teacher, kind, 2.0, vocabulary=v), (student,), atol=1e-8
        )


def of_rank(rank: int, tp: int, kind: str, temperature: float, vocabulary: int | None, dtype: torch.dtype):
    """This rank's part of the inputs, and of what the definition gives: values and gradient."""
    student, teacher = (logits(3, 4, 16, seed=s).to(dtype).double() for s in (0, 1))
    student.requires_grad_()
    values = reference(student, teacher, kind, temperature, vocabulary=vocabulary)
    weights = torch.arange(1.0, 13, dtype=torch.float64).view(3, 4)
    (values * weights).sum().backward()
    parts = (t.detach().chunk(tp, -1)[rank] for t in (student, teacher, student.grad))
    return *parts, values.detach(), weights


def parallel_differences(tp: int) -> dict[tuple, tuple[float, float]]:
    """Largest difference of values and gradients from the definition, for each case."""
    initialize(tp=tp)
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    found = {}
    for kind in KINDS:
        # 8 entries on each rank: 13 leave 5 to the second, 7 none at all.
        for temperature, vocabulary, dtype in (
            (1.0, None, torch.float64),
            (2.0, 13, torch.float64),
            (0.5, 7, torch.float64),
            (1.0, 13, torch.bfloat16),
        ):
            student, teacher, expected, values, weights = of_rank(
                group.rank(), tp, kind, temperature, vocabulary, dtype
            )
            local = student.to(dtype).requires_grad_()
            given = divergence(local, teacher.to(dtype), kind, temperature, group, vocabulary=vocabulary)
            (given * weights).sum().backward()
            found[kind, vocabulary, str(dtype)] = (
                (given - values).abs().max().item(),
                (local.grad.double() - expected).abs().max().item(),
            )
    return found


def test_vocabulary_parallel() -> None:
    """Both ranks have the definition's values and their part of its gradient, padding included."""
    for found in run_distributed(parallel_differences, 2, 2):
        assert len(found) == 4 * len(KINDS)
        for (kind, vocabulary, dtype), (value, gradient) in found.items():
            # BF16 logits are given exactly: values in FP32, gradients (up to 12) rounded twice to 8 bits.
            limits = (1e-13, 1e-12) if dtype == "torch.float64" else (5e-6, 12 * 2**-7)
            assert value <= limits[0], (kind, vocabulary, dtype)
            assert gradient <= limits[1], (kind, vocabulary, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for at_once in (2**22, 40):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        student = logits(7, 16).float().requires_grad_()
        values = divergence(student, logits(7, 16, seed=1).float(), kind)
        values.sum().backward()
        results.append((values.detach(), student.grad))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits(kind: str) -> None:
    """FP32 exponentials of such logits overflow; the definition in FP64 shifts them."""
    student = torch.tensor([[1e4, -1e4, 0.0], [3e4, 3e4, -3e4], [0.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[-1e4, 1e4, 0.0], [3e4, 3e4, -3e4], [2e4, -2e4, 1.0]])
    values = divergence(student, teacher, kind)
    values.sum().backward()
    exact = student.detach().double().requires_grad_()
    expected = reference(exact, teacher.double(), kind)
    expected.sum().backward()
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    # The gradient of reverse KL subtracts terms as large as the divergence, rounded to 24 bits.
    rounding = 2**-22 * expected.max().item()
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=1e-6, atol=1e-6 + rounding)
    assert values[1] == 0


def test_impossible_outcomes_of_the_teacher() -> None:
    """A logit of -inf is probability 0, which adds nothing to forward KL."""
    teacher = torch.tensor([[1.0, 2.0, -math.inf]])
    student = torch.tensor([[0.5, 0.1, 3.0]], requires_grad=True)
    value = divergence(student, teacher)
    value.sum().backward()
    p, q = teacher.softmax(-1), student.detach().softmax(-1)
    expected = (p[:, :2] * (p[:, :2] / q[:, :2]).log()).sum(-1)
    torch.testing.assert_close(value.detach(), expected)
    torch.testing.assert_close(student.grad, q - p)


def test_the_teacher_has_no_gradient_and_equal_models_no_divergence() -> None:
    student, teacher = logits(4, 9).requires_grad_(), logits(4, 9, seed=1).requires_grad_()
    divergence(student, teacher).sum().backward()
    assert teacher.grad is None
    for kind in KINDS:
        same = student.detach().clone().requires_grad_()
        values = divergence(same, student, kind)
        values.sum().backward()
        assert values.abs().max() <= 1e-15
        assert same.grad.abs().max() <= 1e-15


def test_in_place_work_on_the_logits_afterwards_is_harmless() -> None:
    """Megatron's cross-entropy overwrites FP32 logits after the divergence was computed from them."""
    student, teacher = logits(4, 9).float().requires_grad_(), logits(4, 9, seed=1).float()
    made = student * 1
    values = divergence(made, teacher)
    with torch.no_grad():
        made.exp_()
    values.sum().backward()
    torch.testing.assert_close(student.grad, student.detach().softmax(-1) - teacher.softmax(-1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "l2"}, "use one of kl, reverse-kl, tv, js"),
        ({"temperature": 0.0}, "give a positive number"),
        ({"temperature": math.nan}, "give a positive number"),
        ({"vocabulary": 10}, "the logits have 9 entries"),
        ({"teacher": logits(4, 8)}, r"\[4, 9\] and of the teacher \[4, 8\]"),
    ],
)
def test_refused(change: dict, said: str) -> None:
    given = {"student": logits(4, 9), "teacher": logits(4, 9, seed=1), **change}
    with pytest.raises(ValueError, match=said):
        divergence(**given)
