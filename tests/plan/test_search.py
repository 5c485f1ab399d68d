"""The search finds what trying everything finds; published launches are legal, fit, and are near its top."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatron_nemotron3.args import Launch, ParallelLayout, TrainingSchedule, published_layout, rules
from megatron_nemotron3.models import get
from megatron_nemotron3.plan.hardware import GPUS
from megatron_nemotron3.plan.search import (
    MICRO_BATCHES,
    VIRTUAL_STAGES,
    Question,
    candidate,
    layouts,
    legal,
    recomputations,
    remedies,
    search,
    worst_memory,
)

QUESTIONS = {
    "nano": Question(get("nano"), 16, GPUS["h100"], 8192, 64),
    "super": Question(get("super"), 32, GPUS["b200"], 8192, 96, "nvfp4"),
    "dense": Question(get("nano-4b"), 8, GPUS["h100"], 4096, 32, "mxfp8"),
    "long": Question(get("nano"), 64, GPUS["h200"], 131072, 16),
}
#: Public launches: GPU, GPUs, precision, dispatcher, micro batch.
LAUNCHES: dict[str, tuple[str, int, str, str, int]] = {
    "nano": ("h100", 3072, "bf16", "alltoall", 1),
    "super": ("gb200", 3072, "nvfp4", "hybridep", 1),
    "ultra": ("gb200", 6144, "nvfp4", "hybridep", 2),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_legal_is_what_the_rules_allow(name: str) -> None:
    question = QUESTIONS[name]
    schedule = TrainingSchedule(global_batch_size=question.global_batch_size, seq_length=question.seq_length)
    allowed = []
    for layout in layouts(question.config, question.gpus, question.seq_length, question.global_batch_size):
        violations = rules.check(
            Launch.of(
                question.config,
                layout,
                precision=question.precision,
                backend="te",
                schedule=schedule,
                te_precision_config_file="precision.yaml",
                compute_capability=question.gpu.capability,
                megatron_core=question.megatron_core,
            )
        )
        if not any(violation.severity == "error" for violation in violations):
            allowed.append(layout)
    assert legal(question) == allowed


@pytest.mark.parametrize("name", ["nano", "super"])
def test_best_is_what_trying_everything_finds(name: str) -> None:
    question = QUESTIONS[name]
    times: dict[ParallelLayout, float] = {}
    for layout in legal(question):
        share = question.global_batch_size // layout.dp
        for vpp, size in product(VIRTUAL_STAGES, MICRO_BATCHES):
            whole = vpp == 1 or (layout.pp > 1 and layout.pp * vpp <= question.config.num_layers)
            if not whole or share % size or (vpp > 1 and share // size % layout.pp):
                continue
            for recompute in recomputations(question.config):
                variant = replace(layout, vpp=vpp)
                if worst_memory(question, variant, size, recompute).total <= question.limit:
                    total = candidate(question, variant, size, recompute).step.total
                    times[layout] = min(total, times.get(layout, total))
                    break
    answer = search(question, best=7)
    assert [found.step.total for found in answer.best] == pytest.approx(sorted(times.values())[:7])
    assert answer.fitting == len(times)
    assert all(found.memory.total <= question.limit for found in answer.best)


@pytest.mark.full
@pytest.mark.parametrize("name", LAUNCHES)
def test_published_launches_are_feasible_and_near_the_top(name: str) -> None:
    gpu, gpus, precision, dispatcher, micro = LAUNCHES[name]
    config, layout = get(name), published_layout(get(name))
    assert layout is not None
    question = Question(config, gpus, GPUS[gpu], 8192, 3072, precision, dispatcher)
    # Ultra's launch offloads what experts keep; here it is computed again.
    tried = [candidate(question, layout, micro, choice) for choice in recomputations(config)]
    launched = next(found for found in tried if found.memory.total <= question.limit)
    answer = search(question, best=100_000)
    place = sum(other.tokens > launched.tokens for other in answer.best)
    # What the model says of them, not what was measured: docs/measurements.md.
    assert layout in legal(question) and place < len(answer.best) / 8


def test_bad_questions() -> None:
    with pytest.raises(ValueError, match="h100 has no FP4 units"):
        Question(get("super"), 8, GPUS["h100"], 8192, 8, "nvfp4")
    with pytest.raises(ValueError, match="gpus=0: give 1 or more"):
        Question(get("super"), 0, GPUS["h100"], 8192, 8)


def test_says_what_would_make_it_fit() -> None:
    question = Question(get("super"), 16, GPUS["h100"], 8192, 64)
    assert search(question).fitting == 0
    cures = remedies(question)
    assert cures
    more = int(cures[0].split()[0])
    assert "GPUs instead of 16" in cures[0]
    assert search(replace(question, gpus=more)).fitting > 0
    assert search(replace(question, gpus=more // 2)).fitting == 0


def test_nothing_divides() -> None:
    answer = search(Question(get("super"), 101, GPUS["h100"], 8192, 3))
    assert (answer.legal, answer.best, answer.smallest) == (0, (), None)


def _seconds(**changes: Any) -> float:
    layout = ParallelLayout(tp=2, ep=8, pp=4, dp=16)
    question = replace(QUESTIONS["nano"], gpus=128, global_batch_size=256, **changes)
    return candidate(question, layout, 1, recomputations(question.config)[0]).step.total


def test_time_goes_the_right_way() -> None:
    assert _seconds(gpu=GPUS["b200"]) < _seconds(gpu=GPUS["h200"]) <= _seconds()
    assert _seconds(gpu=GPUS["b200"], precision="mxfp8") < _seconds(gpu=GPUS["b200"])
    narrow = replace(GPUS["h100"], nvlink_domain=4)
    assert _seconds(gpu=narrow) > _seconds()
    assert _seconds(gpu=narrow, dispatcher="hybridep") < _seconds(gpu=narrow)
