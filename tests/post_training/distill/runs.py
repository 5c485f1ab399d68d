"""A student and its teacher in any layout, and the same on one process by definition. Runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify import world
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors, gather
from megatron_nemotron3.proof.certify.world import TrainingRun
from megatron_nemotron3.train.teacher.settings import Distillation
from tests.parallel.case import Case
from tests.parallel.layouts import CASES, PER_TOKEN, small

#: MTP, latent experts; the loss is a mean over the tokens of the global batch.
STUDENT = CASES["super"].at(ParallelLayout(), PER_TOKEN, steps=1)
#: Wider, with another pattern, and experts at full width; MTP is in its checkpoint and must not run.
TEACHER = small("super", "M*EMEM*E").but(hidden_size=192, moe_latent_size=None)

#: Loss of a token, and all gradients.
Step = tuple[float, Tensors]
#: Divergence [b, s] of a batch, its pack, and the student's logits [b, s, v].
Apart = Callable[[dict[str, Tensor], Any, Tensor], Tensor]


def compare(found: Step, expected: Step, *, loss: float = 2e-6, gradients: float = 2e-5) -> None:
    """Loss and all gradients; tolerances are relative, to the largest entry of a gradient."""
    assert found[0] == pytest.approx(expected[0], rel=loss)
    assert set(found[1]) == set(expected[1])
    for key, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=gradients * scale, msg=key)


def write_teacher(folder: str) -> None:
    """FOLDER/release with random weights of `TEACHER`."""
    run_distributed(_write, 1, folder, apart=True)


def _write(folder: str) -> None:
    from megatron_nemotron3 import build_model
    from megatron_nemotron3.post_training import compress

    model = build_model(TEACHER, precision="fp32", backend="torch", seed=5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # gains are 1 and A, D alike, so a wrong cut would not show
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            elif "output_layer" in name:
                parameter *= 3  # a teacher that knows what it wants
    compress.save(model, TEACHER, Path(folder))


def measured(case: Case, weights: Tensors, *taught: Distillation, tokenizer: str = "") -> Step:
    """Loss of a token and all gradients of the first step, with the teachers in the run.

    Args:
        tokenizer: the student's, for teachers with others.
    """
    ranks = run_distributed(_measured, case.layout.world_size, case, weights, taught, tokenizer, apart=True)
    assert len({loss for loss, _ in ranks}) == 1
    return ranks[0][0], gather([pieces for _, pieces in ranks])


def _measured(case: Case, weights: Tensors, taught: Sequence[Distillation], tokenizer: str) -> Any:
    from megatron_nemotron3.post_training.distill import across
    from megatron_nemotron3.post_training.distill.attach import distilling

    options = SimpleNamespace(tokenizer_model=tokenizer)
    given = mock.patch.object(across, "megatron_options", lambda: options) if tokenizer else nullcontext()
    with distilling(*taught), given:
        run = TrainingRun(case, weights)
    loss = run.forward_backward(0, whole_gradients=True)
    return loss, run.gradients()


def defined(
    case: Case, weights: Tensors, *taught: Distillation, apart_from: Callable[[Distillation], Apart]
) -> Step:
    """The same on one process: all models whole, and the loss as it is written down.

    Args:
        apart_from: builds a teacher and returns its divergence by definition.
    """
    ((loss, pieces),) = run_distributed(_defined, 1, case, weights, taught, apart_from, apart=True)
    return loss, gather([pieces])


def same_vocabulary(how: Distillation) -> Apart:
    """A teacher with the student's tokens."""
    from tests.post_training.distill.reference import reference

    teacher = whole_teacher(how.teacher)

    def apart(batch: dict[str, Tensor], packed: Any, logits: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed)
        return reference(logits, target, how.kind, how.temperature)

    return apart


def _defined(case: Case, weights: Tensors, taught: Sequence[Distillation], apart_from: Any) -> Any:
    from megatron_nemotron3.common.hooks import unwrapped

    run = TrainingRun(case, weights)
    teachers = [(how, apart_from(how)) for how in taught]
    made: list[Tensor] = []
    student = unwrapped(run.chunks[0])
    student.output_layer.register_forward_hook(lambda _m, _i, output: made.append(output[0].clone()))

    def step(_labels: bool, iterator: Any, model: Any) -> Any:
        batch, packed = next(iterator)
        entropy = model(
            *(batch["tokens"], batch["position_ids"], None),
            labels=batch["labels"],
            loss_mask=batch["model_mask"],
            packed_seq_params=packed,
        )
        logits = made[-1].transpose(0, 1)
        tokens = (1 - sum(how.weight for how in taught)) * entropy
        for how, apart in teachers:
            tokens = tokens + how.weight * how.temperature**2 * apart(batch, packed, logits)
        return tokens, partial(world._loss, batch["loss_mask"])

    with mock.patch.object(world, "_forward_step", step):
        loss = run.forward_backward(0, whole_gradients=True)
    return loss, run.gradients()


def write_logits(case: Case, teacher: str, folder: str, temperature: float) -> None:
    """Store the log-probabilities of all tokens for the rows of the first step."""
    run_distributed(_write_logits, 1, case, teacher, folder, temperature, apart=True)


def _write_logits(case: Case, teacher: str, folder: str, temperature: float) -> None:
    from megatron_nemotron3.layers.context_parallel import cu_seqlens
    from megatron_nemotron3.post_training.distill.stored import key_of, write_part
    from megatron_nemotron3.post_training.distill.topk import most_probable
    from megatron_nemotron3.proof.certify.world import batches
    from megatron_nemotron3.train.teacher.settings import LogitsManifest
    from megatron_nemotron3.train.teacher.vocabulary import Vocabulary

    words = case.config.vocab_size
    model = whole_teacher(teacher)
    manifest = LogitsManifest(words, 0, temperature, case.seq_length, 2, 4, teacher, Vocabulary(words), {})
    manifest.write(Path(folder))
    rows = []
    for batch, packed in batches(case)(0):
        with torch.no_grad():
            logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed)
        for labels, one in zip(batch["labels"], logits, strict=True):
            ids, log_p, _ = most_probable(one, words, temperature)
            borders = None if packed is None else cu_seqlens(packed)
            rows.append((key_of(labels, borders), ids.int().numpy(), log_p.numpy()))
    for part in manifest.parts():
        write_part(Path(folder), manifest, part, rows[part.start : part.stop])


def whole_teacher(folder: str) -> Any:
    """The teacher on this process."""
    from megatron_nemotron3 import build_model
    from megatron_nemotron3.checkpoints.convert.into_model import load_base

    model = build_model(TEACHER.but(mtp_pattern=None, mtp_num_layers=0), precision="fp32", backend="torch")
    load_base(model, Path(folder))
    return model.eval()
