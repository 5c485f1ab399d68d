"""A step taught by a teacher with another tokenizer is, in any layout, the step of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.post_training.xtoken.align import Aligner
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import initial_weights
from megatron_nemotron3.train.teacher.projection import Projection
from megatron_nemotron3.train.teacher.settings import Distillation
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary
from tests.parallel.case import Case
from tests.parallel.layouts import PER_TOKEN, small
from tests.post_training.distill.runs import Apart, compare, defined, measured
from tests.post_training.xtoken.reference import losses as reference
from tests.post_training.xtoken.tokenizers_of import train

_L = ParallelLayout
#: Both vocabularies are larger than their tokenizers; ids beyond them are no text.
SIZE = {"vocab_size": 512}
STUDENT = Case(config=small("super", "M*EM").but(**SIZE)).at(_L(), PER_TOKEN, steps=1)
TEACHER = small("super", "M*EM").but(hidden_size=192, mtp_pattern=None, mtp_num_layers=0, **SIZE)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A folder with two teachers, all tokenizers and projections; the student's weights."""
    folder = tmp_path_factory.mktemp("across")
    run_distributed(_write, 1, folder, apart=True)
    student = ByteVocabulary(train(folder / "student", 380, digits=3))
    for name, file, size in (("teacher", "projection", 340), ("other", "projection-other", 320)):
        tokenizer = train(folder / name / "release" / "tokenizer", size, digits=1, special=("<eos>",))
        Projection.build(student, ByteVocabulary(tokenizer)).save(folder / file)
    return folder, initial_weights(STUDENT)


def _write(folder: Path) -> None:
    from megatron_nemotron3 import build_model
    from megatron_nemotron3.post_training import compress

    for seed, name in enumerate(("teacher", "other")):
        model = build_model(TEACHER, precision="fp32", backend="torch", seed=5 + seed)
        with torch.no_grad():
            model.output_layer.weight *= 3  # a teacher that knows what it wants
        compress.save(model, TEACHER, folder / name)


def _apart(folder: Path, how: Distillation) -> Apart:
    """The losses of spans by the dense FP64 reference, each document alone."""
    from megatron_nemotron3 import build_model
    from megatron_nemotron3.checkpoints.convert.into_model import load_base

    teacher = build_model(TEACHER, precision="fp32", backend="torch").eval()
    load_base(teacher, Path(how.teacher))
    aligner = Aligner(
        ByteVocabulary(folder / "student"), ByteVocabulary(Path(how.teacher) / "release" / "tokenizer")
    )
    projection = Projection.load(Path(how.projection))

    def apart(batch: dict[str, Tensor], packed: Any, logits: Tensor) -> Tensor:
        found = torch.zeros(batch["tokens"].shape, dtype=torch.float64)
        starts = [0] if packed is None else packed.cu_seqlens_q_padded[:-1].tolist()
        lengths = [found.shape[1]] if packed is None else packed.cu_seqlens_q.diff().tolist()
        for start, length in zip(starts, lengths):
            text = batch["tokens"][:, start : start + length]
            if packed is not None:  # the label behind the last token; a plain row is cut anywhere
                text = torch.cat([text, batch["labels"][:, start + length - 1 : start + length]], 1)
            here = slice(start, start + text.shape[1] - 1)
            tokens, alignment = aligner.batch(text.tolist())
            with torch.no_grad():
                target = teacher(tokens, torch.arange(tokens.shape[1])[None].expand_as(tokens), None)
            ours = logits[:, here].flatten(0, 1)
            spans = reference(*(ours, target.flatten(0, 1), alignment, projection, how.kind, how.temperature))
            for i in range(alignment.spans):
                inside = alignment.student == i
                found[:, here] = found[:, here] + inside * spans[i] / inside.sum()
        return found

    return apart


#: Layout and kind.
ROWS: dict[str, tuple[ParallelLayout, str]] = {
    "one process": (_L(), "p-kl"),
    "EP2 DP2": (_L(dp=2, ep=2), "p-kl"),
    "PP2 VPP2 CP2": (_L(pp=2, vpp=2, cp=2), "p-kl"),
    "PP2 TP2 SP, H-KL": (_L(pp=2, tp=2), "h-kl"),
}


@pytest.mark.full  # test_signal.py has ranks and a teacher that is a table
@pytest.mark.parametrize("name", ROWS)
def test_a_step(given: tuple[Path, Tensors], name: str) -> None:
    layout, kind = ROWS[name]
    _check(given, STUDENT, layout, _how(given[0], kind))


@pytest.mark.full  # test_signal.py has packs, without a model
@pytest.mark.parametrize("layout", [_L(tp=2, cp=2), _L(pp=2, dp=2), _L(cp=2, dp=2)], ids=str)
def test_packed(given: tuple[Path, Tensors], layout: ParallelLayout) -> None:
    """Documents with padding between them, and behind the last."""
    packed = STUDENT.at(_L(), documents=(13, 22, 9), padded=(16, 24, 16), mask="heads")
    _check(given, packed, layout, _how(given[0], "p-kl"))


@pytest.mark.full
def test_several_teachers(given: tuple[Path, Tensors]) -> None:
    """Each with its own projection, loss, temperature and weight; the rest is cross-entropy."""
    folder, _ = given
    other = Distillation(str(folder / "other"), "h-kl", 1.0, 0.3, str(folder / "projection-other"))
    _check(given, STUDENT, _L(pp=2), replace(_how(folder, "p-kl"), weight=0.5), other)


def _how(folder: Path, kind: str) -> Distillation:
    return Distillation(str(folder / "teacher"), kind, 2.0, 0.7, str(folder / "projection"))


def _check(given: tuple[Path, Tensors], case: Case, layout: ParallelLayout, *taught: Distillation) -> None:
    folder, weights = given
    expected = defined(case, weights, *taught, apart_from=partial(_apart, folder))
    found = measured(case.at(layout), weights, *taught, tokenizer=str(folder / "student"))
    compare(found, expected, loss=1e-5, gradients=5e-5)
