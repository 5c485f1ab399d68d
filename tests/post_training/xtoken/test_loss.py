"""P-KL and H-KL against plain KL, a dense FP64 reference, and one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from megatron_nemotron3.post_training.xtoken.align import Aligner, Alignment
from megatron_nemotron3.post_training.xtoken.loss import RankGroups, SpanLoss, span_losses
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.train.teacher.projection import Projection
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary
from tests.post_training.xtoken.reference import losses as reference
from tests.post_training.xtoken.tokenizers_of import TEXT

#: A loss is a sum of some hundred terms in FP32.
ROUNDING = {"rtol": 2e-5, "atol": 1e-6}


def _case(student: Path, teacher: Path, padding: int = 0) -> tuple:
    """Projection, alignment of two rows, and random logits with `padding` more columns."""
    ours, theirs = ByteVocabulary(student), ByteVocabulary(teacher)
    ids = [ours.encode([text.encode()])[0] for text in (TEXT[0], TEXT[1])]
    length = min(24, *map(len, ids))
    _, alignment = Aligner(ours, theirs).batch([one[:length] for one in ids])
    torch.manual_seed(1)
    a = 3 * torch.randn(*alignment.student.shape, len(ours) + padding)
    b = 3 * torch.randn(*alignment.teacher.shape, len(theirs) + padding)
    return Projection.build(ours, theirs), alignment, a, b


@pytest.mark.parametrize("kind", ["p-kl", "h-kl"])
def test_identical_tokenizers_give_plain_kl(folders: dict[str, Path], kind: str) -> None:
    """Values and gradients; the projection is the identity, and every span is one token on each side."""
    projection, alignment, a, b = _case(folders["packs"], folders["packs"])
    assert alignment.spans == alignment.student.numel()
    a.requires_grad_()
    plain = a.detach().clone().requires_grad_()
    expected = kl_div(log_softmax(plain, -1), log_softmax(b, -1), log_target=True, reduction="none").sum(-1)
    found = span_losses(a, b, alignment, projection, SpanLoss(kind))
    torch.testing.assert_close(found, expected.flatten(), **ROUNDING)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(a.grad, plain.grad, **ROUNDING)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("p-kl", {"temperature": 2.0}),
        ("h-kl", {}),
        pytest.param("h-kl", {"threshold": 1.0, "temperature": 2.0}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    "pair", [("packs", "splits"), pytest.param(("packs", "sentence"), marks=pytest.mark.full)]
)
def test_equals_the_dense_reference(
    folders: dict[str, Path], pair: tuple[str, str], kind: str, options: dict
) -> None:
    projection, alignment, a, b = _case(folders[pair[0]], folders[pair[1]], padding=5)
    assert alignment.spans < max(alignment.student.numel(), alignment.teacher.numel())
    a.requires_grad_()
    exact = a.detach().double().requires_grad_()
    expected = reference(
        exact.flatten(0, 1), b.double().flatten(0, 1), alignment, projection, kind, **options
    )
    found = span_losses(a, b, alignment, projection, SpanLoss(kind, **options))
    torch.testing.assert_close(found.double(), expected, **ROUNDING)
    weights = torch.linspace(0.5, 1.5, len(found))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(a.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert not a.grad[..., projection.student_size :].any()


def _rank(case: tuple, kind: str, options: dict, size: int) -> tuple:
    """A rank's losses and gradient, with the vocabularies cut into equal, padded parts."""
    projection, alignment, a, b = case
    rank = torch.distributed.get_rank()
    mine, theirs = (_padded(one, size).chunk(size, -1)[rank].contiguous() for one in (a, b))
    mine.requires_grad_()
    found = span_losses(
        mine,
        theirs,
        alignment,
        projection,
        SpanLoss(kind, **options),
        RankGroups(torch.distributed.group.WORLD),
    )
    (found * torch.linspace(0.5, 1.5, len(found))).sum().backward()
    return found.detach(), mine.grad


def _padded(logits: torch.Tensor, size: int) -> torch.Tensor:
    """As Megatron pads: with four ranks the last one has no token of the vocabulary."""
    width = 128 * size
    more = -logits.shape[-1] % width
    return torch.nn.functional.pad(logits, (0, more), value=7.0)


@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (2, "p-kl", {"temperature": 2.0}),
        pytest.param(4, "h-kl", {}, marks=pytest.mark.full),
    ],
)
def test_a_divided_vocabulary(folders: dict[str, Path], size: int, kind: str, options: dict) -> None:
    case = _case(folders["packs"], folders["splits"])
    projection, alignment, a, b = case
    a.requires_grad_()
    expected = span_losses(a, b, alignment, projection, SpanLoss(kind, **options))
    (expected * torch.linspace(0.5, 1.5, len(expected))).sum().backward()
    ranks = run_distributed(_rank, size, (projection, alignment, a.detach(), b), kind, options, size)
    for losses, _ in ranks:
        torch.testing.assert_close(losses, expected.detach(), **ROUNDING)
    gradient = torch.cat([one for _, one in ranks], -1)
    torch.testing.assert_close(gradient[..., : a.shape[-1]], a.grad, rtol=1e-4, atol=1e-6)
    assert not gradient[..., a.shape[-1] :].any()


def test_numerals(folders: dict[str, Path]) -> None:
    """The paper's case: the student has "201" as one token, the teacher spells it with digits.

    A strict partition leaves the token out, and its loss on the others lowers the token's probability
    although it is the right one; so does H-KL, whose pair for "2" is the digit. P-KL raises it.
    """
    student, teacher = ByteVocabulary(folders["packs"]), ByteVocabulary(folders["splits"])
    number, digits = student.ids[b"201"], [teacher.ids[d] for d in (b"2", b"0", b"1")]
    projection = Projection.build(student, teacher)
    assert projection.tokens[number, :3].tolist() == digits and projection.weights[number, 0] > 0.9
    assert number not in projection.common()[0]
    alignment = Alignment(torch.tensor([0]), torch.tensor([0, 0, 0]), 1)
    teacher_logits = torch.zeros(3, len(teacher))
    teacher_logits[range(3), digits] = 12.0

    def pushed(kind: str, **options: float) -> float:
        logits = torch.zeros(1, len(student))
        logits[0, number] = 2.0
        logits.requires_grad_()
        span_losses(logits, teacher_logits, alignment, projection, SpanLoss(kind, **options)).sum().backward()
        return -logits.grad[0, number].item()

    assert pushed("h-kl", threshold=1.0) < 0
    assert pushed("h-kl") < 0
    assert pushed("p-kl") > 0


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    projection, alignment, a, b = _case(folders["packs"], folders["splits"])
    with pytest.raises(ValueError, match="the student has 300 logits, its tokenizer .* tokens"):
        span_losses(a[..., :300], b, alignment, projection)
    with pytest.raises(ValueError, match="the teacher's logits .* do not fit an alignment"):
        span_losses(a, b[:, 1:], alignment, projection)
    with pytest.raises(ValueError, match="give 'p-kl' or 'h-kl'"):
        SpanLoss("kl")
    with pytest.raises(ValueError, match="the teacher's positions do not cover"):
        Alignment(torch.tensor([0, 1]), torch.tensor([0, 0]), 2)


def test_a_batch_without_a_span_costs_nothing(folders: dict[str, Path]) -> None:
    projection, alignment, a, b = _case(folders["packs"], folders["splits"])
    nothing = Alignment(torch.full_like(alignment.student, -1), torch.full_like(alignment.teacher, -1), 0)
    found = span_losses(a.requires_grad_(), b, nothing, projection)
    found.sum().backward()
    assert found.shape == (0,) and not a.grad.any()
