"""A distilled step in any layout is the step of one process: loss and all gradients."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_nemotron3 import cli
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.post_training.distill.teacher import PipelineMessages
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import initial_weights
from megatron_nemotron3.train.teacher import check
from megatron_nemotron3.train.teacher.settings import Distillation
from tests.parallel.case import Case
from tests.post_training.distill.runs import (
    STUDENT,
    compare,
    defined,
    measured,
    same_vocabulary,
    write_logits,
    write_teacher,
)

_L = ParallelLayout
#: Documents with padding between them and behind the last; their places divide by 2 * CP.
PACKED: dict[str, Any] = {"documents": (13, 22, 9), "padded": (16, 24, 16)}
TWO: dict[str, Any] = {"micro_batch_size": 2}
HOW: dict[str, Any] = {"kind": "kl", "temperature": 2.0, "weight": 0.7}

#: Name -> layout, changes of the case and of `HOW`, in the short suite.
ROWS: dict[str, tuple[ParallelLayout, dict[str, Any], dict[str, Any], bool]] = {
    "one process": (_L(), {}, {}, False),
    "TP2 SP, reverse KL": (_L(tp=2), {}, {"kind": "reverse-kl", "weight": 1.0}, False),
    "TP2 SP, total variation": (_L(tp=2), {}, {"kind": "tv"}, False),
    "TP2 SP, JS": (_L(tp=2), {}, {"kind": "js", "temperature": 1.0}, False),
    "PP2 VPP2, packed": (_L(pp=2, vpp=2), PACKED, {}, False),
    "EP2 DP2": (_L(dp=2, ep=2), {}, {}, False),
    "CP2, packed": (_L(cp=2), PACKED, {}, False),  # in the short suite with stored logits
    "TP2 SP PP2": (_L(tp=2, pp=2), {}, {}, True),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher") / "checkpoints"
    write_teacher(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return initial_weights(STUDENT)


@pytest.fixture(scope="module")
def by_definition(teacher: str, weights: Tensors) -> Callable[..., tuple[float, Tensors]]:
    @functools.cache
    def of(how: Distillation, **changes: Any) -> tuple[float, Tensors]:
        return defined(replace(STUDENT, **changes), weights, how, apart_from=same_vocabulary)

    return of


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if row[-1] else pytest.mark.full) for n, row in ROWS.items()]
)
def test_a_step(
    teacher: str, weights: Tensors, by_definition: Callable[..., tuple[float, Tensors]], name: str
) -> None:
    layout, changes, other, _ = ROWS[name]
    how = Distillation(teacher, **{**HOW, **other})
    expected_loss, expected = by_definition(how, **changes)
    case: Case = replace(STUDENT, **changes).at(layout)
    found = measured(case, weights, how)
    compare(found, (expected_loss, expected))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param(_L(cp=2), PACKED, id="CP2, packed"),
        pytest.param(_L(pp=2, dp=2), TWO, id="PP2 DP2", marks=pytest.mark.full),
        pytest.param(_L(cp=2, tp=2), {}, id="CP2 TP2 SP", marks=pytest.mark.full),
    ],
)
def test_stored_logits_of_all_tokens(
    teacher: str,
    weights: Tensors,
    by_definition: Callable[..., tuple[float, Tensors]],
    layout: ParallelLayout,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    """They are the teacher, in any layout; rows are read in another order than they were written in."""
    how, case = Distillation(teacher, **HOW), replace(STUDENT, **changes)
    write_logits(replace(case, micro_batch_size=1), teacher, str(tmp_path), HOW["temperature"])
    found = measured(case.at(layout), weights, replace(how, teacher=str(tmp_path)))
    compare(found, by_definition(how, **changes))


def test_a_hugging_face_teacher(
    teacher: str, weights: Tensors, by_definition: Callable[..., tuple[float, Tensors]], tmp_path: Path
) -> None:
    """Each rank reads its parts of the folder; MTP is in it, too."""
    folder = str(tmp_path / "hf")
    assert cli.main(["convert", "to-hf", teacher, folder]) == 0
    how = Distillation(teacher, **HOW)
    compare(
        measured(STUDENT.at(_L(tp=2)), weights, replace(how, teacher=folder)),
        by_definition(how),
    )


def test_a_row_that_is_not_stored(teacher: str, weights: Tensors, tmp_path: Path) -> None:
    write_logits(replace(STUDENT, seed=8), teacher, str(tmp_path), 1.0)
    with pytest.raises(RuntimeError, match="has no logits of a row of this run"):
        measured(STUDENT, weights, Distillation(str(tmp_path)))


@pytest.mark.parametrize(
    ("words", "world", "said"),
    [
        ("--vocab-size 77", 1, "different vocabularies (128 and 77 tokens)"),
        ("--expert-model-parallel-size 3", 3, "is not divisible by EP=3"),
        ("--pipeline-model-parallel-size 16", 16, "has 8 layers for 16 pipeline stages"),
    ],
)
def test_a_checkpoint_that_does_not_fit(teacher: str, words: str, world: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as problem:
        check.check((Distillation(teacher),), words.split(), world)
    assert "\n" not in str(problem.value)


def _send_many(messages: int) -> int:
    pipe = PipelineMessages(dist.group.WORLD)
    for number in range(messages):
        if dist.get_rank() == 0:
            pipe.send(torch.full((3,), number), 1)
        else:
            assert pipe.receive(torch.empty(3, dtype=torch.int64), 0).tolist() == [number] * 3
    dist.barrier()
    return len(pipe._sending)


def test_what_has_arrived_is_released() -> None:
    assert run_distributed(_send_many, 2, 100) == [16, 0]
