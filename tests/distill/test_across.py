"""A step taught by a teacher with another tokenizer is, in any layout, the step of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.certify.ranks import run_distributed
from megatron_nemotron3.certify.tensors import Tensors, gather
from megatron_nemotron3.certify.world import Run, initial_weights
from megatron_nemotron3.distill import across
from megatron_nemotron3.distill.settings import Distillation
from megatron_nemotron3.xtoken.align import Aligner
from megatron_nemotron3.xtoken.projection import Projection
from megatron_nemotron3.xtoken.tokens import Vocabulary
from tests.distill.runs import _loss
from tests.parallel.case import Case
from tests.parallel.layouts import PER_TOKEN, small
from tests.xtoken.reference import losses as reference
from tests.xtoken.tokenizers_of import train

_L = ParallelLayout
#: Both vocabularies are larger than their tokenizers; ids beyond them are no text.
SIZE = {"vocab_size": 512}
STUDENT = Case(config=small("super", "M*E").but(**SIZE)).at(_L(), PER_TOKEN, steps=1)
TEACHER = small("super", "M*EM").but(hidden_size=192, mtp_pattern=None, mtp_num_layers=0, **SIZE)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A folder with the teacher, both tokenizers and the projection; the student's weights."""
    folder = tmp_path_factory.mktemp("across")
    run_distributed(_write, 1, folder, children=True, apart=True)
    student = train(folder / "student", 380, digits=3)
    teacher = train(folder / "teacher" / "release" / "tokenizer", 340, digits=1, special=("<eos>",))
    Projection.build(Vocabulary(student), Vocabulary(teacher)).save(folder / "projection")
    return folder, initial_weights(STUDENT)


def _write(folder: Path) -> None:
    from megatron_nemotron3 import build_model
    from megatron_nemotron3.compression import memory

    model = build_model(TEACHER, precision="fp32", backend="torch", seed=5)
    with torch.no_grad():
        model.output_layer.weight *= 3  # a teacher that knows what it wants
    memory.save(model, TEACHER, folder / "teacher")


def _measured(case: Case, weights: Tensors, folder: Path, how: Distillation) -> Any:
    from megatron_nemotron3.distill.attach import distilling

    options = SimpleNamespace(tokenizer_model=str(folder / "student"))
    with mock.patch.object(across, "megatron_options", lambda: options), distilling(how):
        run = Run(case, weights)
        return run.forward_backward(0, whole_gradients=True), run.gradients()


def _defined(case: Case, weights: Tensors, folder: Path, how: Distillation) -> Any:
    """Both models whole on one process, and the losses of spans by the dense FP64 reference."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_nemotron3 import build_model
    from megatron_nemotron3.certify.batch import batches
    from megatron_nemotron3.certify.world import _mean_loss
    from megatron_nemotron3.layers.lora import load_base
    from megatron_nemotron3.monitor.hooks import unwrapped

    run = Run(case, weights)
    teacher = build_model(TEACHER, precision="fp32", backend="torch").eval()
    load_base(teacher, Path(how.teacher))
    aligner = Aligner(
        Vocabulary(folder / "student"), Vocabulary(folder / "teacher" / "release" / "tokenizer")
    )
    projection = Projection.load(folder / "projection")
    made: list[Tensor] = []
    unwrapped(run.chunks[0]).output_layer.register_forward_hook(
        lambda _m, _i, output: made.append(output[0] * 1)
    )

    def step(iterator: Any, model: Any) -> Any:
        batch, packed = next(iterator)
        entropy = model(
            *(batch["tokens"], batch["position_ids"], None),
            labels=batch["labels"],
            loss_mask=batch["model_mask"],
            packed_seq_params=packed,
        )
        apart = torch.zeros(batch["tokens"].shape, dtype=torch.float64)
        starts = [0] if packed is None else packed.cu_seqlens_q_padded[:-1].tolist()
        lengths = [apart.shape[1]] if packed is None else packed.cu_seqlens_q.diff().tolist()
        for start, length in zip(starts, lengths):  # each document alone
            here = slice(start, start + length)
            last = batch["labels"][:, here][:, -1:]
            tokens, alignment = aligner.batch(torch.cat([batch["tokens"][:, here], last], 1).tolist())
            with torch.no_grad():
                target = teacher(tokens, torch.arange(tokens.shape[1])[None].expand_as(tokens), None)
            logits = made[-1][here].transpose(0, 1).flatten(0, 1)
            spans = reference(
                *(logits, target.flatten(0, 1), alignment, projection, how.kind, how.temperature)
            )
            for i in range(alignment.spans):
                inside = alignment.student == i
                apart[:, here] = apart[:, here] + inside * spans[i] / inside.sum()
        taught = how.weight * how.temperature**2 * apart + (1 - how.weight) * entropy
        return taught, partial(_loss, batch["loss_mask"])

    for chunk in run.chunks:
        chunk.zero_grad_buffer()
        chunk.force_all_reduce = True
    reported = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches(case)(0),
        model=run.chunks[0],
        num_microbatches=run.microbatches,
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        decoder_seq_length=case.seq_length,
        forward_only=False,
        force_all_reduce=True,
    )
    return _mean_loss(reported), run.gradients()


@pytest.mark.full  # test_lesson.py has ranks and a teacher that is a table
@pytest.mark.parametrize(
    ("layout", "kind"),
    [(_L(tp=2), "p-kl"), (_L(tp=2), "h-kl"), (_L(dp=2, ep=2), "p-kl"), (_L(), "p-kl"), (_L(cp=2), "h-kl")],
    ids=str,
)
def test_a_step(given: tuple[Path, Tensors], layout: ParallelLayout, kind: str) -> None:
    _check(given, STUDENT, layout, kind)


@pytest.mark.full  # test_lesson.py has packs, without a model
@pytest.mark.parametrize("layout", [_L(), _L(cp=2), _L(tp=2, cp=2)], ids=str)
def test_packed(given: tuple[Path, Tensors], layout: ParallelLayout) -> None:
    """Documents with padding between them, and behind the last."""
    packed = STUDENT.at(_L(), documents=(13, 22, 9), padded=(16, 24, 16), mask="heads")
    _check(given, packed, layout, "p-kl")


def _check(given: tuple[Path, Tensors], case: Case, layout: ParallelLayout, kind: str) -> None:
    folder, weights = given
    how = Distillation(str(folder / "teacher"), kind, 2.0, 0.7, projection=str(folder / "projection"))
    ((expected_loss, pieces),) = run_distributed(_defined, 1, case, weights, folder, how, apart=True)
    expected = gather([pieces])
    ranks = run_distributed(_measured, layout.world_size, case.at(layout), weights, folder, how, apart=True)
    for loss, _ in ranks:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
    found = gather([pieces for _, pieces in ranks])
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=5e-5 * scale, msg=key)
