"""The search finds what trying everything finds; published launches are legal, fit, and are near its top."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule, published_layout, rules
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.search import (
    MICRO_BATCHES,
    VIRTUAL_STAGES,
    PlanRequest,
    candidate,
    layouts,
    legal,
    recomputations,
    remedies,
    search,
    worst_memory,
)
from megatron_nemotron3.models import get


def asked(name: str, seq_length: int, global_batch_size: int, precision: str = "bf16") -> Launch:
    schedule = TrainingSchedule(seq_length=seq_length, global_batch_size=global_batch_size)
    return Launch(config=get(name), precision=precision, backend="te", schedule=schedule)


QUESTIONS = {
    "nano": PlanRequest(asked("nano", 8192, 64), 16, GPUS["h100"]),
    "super": PlanRequest(asked("super", 8192, 96, "nvfp4"), 32, GPUS["b200"]),
    "dense": PlanRequest(asked("nano-4b", 4096, 32, "fp8-tensorwise"), 8, GPUS["h100"]),
    "long": PlanRequest(asked("nano", 131072, 16), 64, GPUS["h200"]),
}
#: Public launches: GPU, GPUs, precision, dispatcher, micro batch.
LAUNCHES: dict[str, tuple[str, int, str, str, int]] = {
    "nano": ("h100", 3072, "bf16", "alltoall", 1),
    "super": ("gb200", 3072, "nvfp4", "hybridep", 1),
    "ultra": ("gb200", 6144, "nvfp4", "hybridep", 2),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_legal_is_what_the_rules_allow(name: str) -> None:
    request = QUESTIONS[name]
    allowed = []
    for layout in layouts(request):
        violations = rules.check(request.at(layout))
        if not any(violation.severity == "error" for violation in violations):
            allowed.append(layout)
    assert legal(request) == allowed


@pytest.mark.parametrize("name", ["nano", pytest.param("super", marks=pytest.mark.full)])
def test_best_is_what_trying_everything_finds(name: str) -> None:
    request = QUESTIONS[name]
    times: dict[ParallelLayout, float] = {}
    for layout in legal(request):
        share = request.global_batch_size // layout.dp
        for vpp, size in product(VIRTUAL_STAGES, MICRO_BATCHES):
            whole = vpp == 1 or (layout.pp > 1 and layout.pp * vpp <= request.config.num_layers)
            if not whole or share % size or (vpp > 1 and share // size % layout.pp):
                continue
            for recompute in recomputations(request.config):
                variant = replace(layout, vpp=vpp)
                launch = request.at(variant, size, recompute)
                if worst_memory(launch).total <= request.limit:
                    total = candidate(request, launch).step.total
                    times[layout] = min(total, times.get(layout, total))
                    break
    result = search(request, best=7)
    assert [found.step.total for found in result.best] == pytest.approx(sorted(times.values())[:7])
    assert result.fitting == len(times)
    assert all(found.memory.total <= request.limit for found in result.best)


@pytest.mark.full
@pytest.mark.parametrize("name", LAUNCHES)
def test_published_launches_are_feasible_and_near_the_top(name: str) -> None:
    gpu, gpus, precision, dispatcher, micro = LAUNCHES[name]
    config, layout = get(name), published_layout(get(name))
    assert layout is not None
    request = PlanRequest(asked(name, 8192, 3072, precision), gpus, GPUS[gpu], dispatcher)
    # Ultra's launch offloads what experts keep; here it is computed again.
    launches = (request.at(layout, micro, choice) for choice in recomputations(config))
    tried = [candidate(request, launch) for launch in launches]
    launched = next(found for found in tried if found.memory.total <= request.limit)
    result = search(request, best=100_000)
    place = sum(other.tokens > launched.tokens for other in result.best)
    # What the model says of them, not what was measured: docs/measurements.md.
    assert layout in legal(request) and place < len(result.best) / 8


def test_says_what_would_make_it_fit() -> None:
    request = PlanRequest(asked("super", 8192, 64), 16, GPUS["h100"])
    assert search(request).fitting == 0
    cures = remedies(request)
    assert cures
    more = int(cures[0].split()[0])
    assert "GPUs instead of 16" in cures[0]
    assert search(replace(request, gpus=more)).fitting > 0
    assert search(replace(request, gpus=more // 2)).fitting == 0


def test_nothing_divides() -> None:
    result = search(PlanRequest(asked("super", 8192, 3), 101, GPUS["h100"]))
    assert (result.legal, result.best, result.smallest) == (0, (), None)
