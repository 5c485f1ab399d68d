"""Refits between processes on gloo: bit for bit what the engines' loaders make of the whole tensors."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3.certify.ranks import run_distributed
from megatron_nemotron3.refit.checksum import added, checksum
from tests.support.boundary_processes import NOTHING, run_apart
from tests.support.refit_ranks import Case, faulty, plan_of, refitted, streamed, twice

#: Two trainers, two servers; a small buffer makes many steps.
QUICK: list[Case] = [
    ("super-tiny", "tp=2,ep=2", "vllm", "tp=2", {"buffer": 200_000}),
    ("super-tiny", "pp=2", "vllm", "tp=2,ep=2", {}),
    ("super-tiny", "tp=2,etp=2,dp=1", "sglang", "tp=2,dp=2,ep=2", {}),
]
#: The same size; only `make test-full` runs them.
MORE: list[Case] = [
    ("nano-4b-tiny", "tp=2", "sglang", "pp=2", {}),
    ("puzzle-tiny", "dp=2,ep=2", "vllm", "dp=2,mtp=0", {}),
]
#: Four trainers, four servers, or the same four.
FULL: list[Case] = [
    ("super-tiny", "tp=2,pp=2,vpp=2", "vllm", "tp=4", {"buffer": 300_000}),
    ("super-tiny", "tp=2,pp=2", "sglang", "tp=4,dp=2,ep=2", {}),
    ("nano-tiny", "tp=4,ep=2,etp=2", "vllm", "tp=2,pp=2", {}),
    ("nano-tiny", "pp=2,dp=2,ep=2", "vllm", "tp=2,dp=2,ep=4,mtp=0", {}),
    ("super-tiny", "cp=2,dp=2,ep=4", "vllm", "replicas=4", {}),
    ("nemotron-h-8b-tiny", "tp=2,pp=2", "sglang", "tp=2,pp=2", {}),
    ("puzzle-tiny", "tp=2,ep=4,dp=2", "sglang", "tp=4,ep=4", {}),
]
COLOCATED: list[Case] = [(*case[:4], {**case[4], "colocated": True}) for case in FULL]


def test_two_trainers_and_two_servers() -> None:
    sent = run_distributed(refitted, 4, QUICK, "bfloat16")
    assert all(sum(by_rank) > 0 for by_rank in zip(*sent, strict=True))


@pytest.mark.full
def test_more_of_two_and_two() -> None:
    run_distributed(refitted, 4, MORE, "bfloat16")


@pytest.mark.full
def test_masters_are_rounded_on_the_way() -> None:
    run_distributed(refitted, 4, QUICK[:1], "float32")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_four_trainers_and_four_servers(dtype: str) -> None:
    run_distributed(refitted, 8, FULL, dtype)


def test_trainers_that_serve_copy_what_they_have() -> None:
    cases: list[Case] = [(*case[:4], {"colocated": True}) for case in QUICK[1:]]
    sent = run_distributed(refitted, 2, cases, "bfloat16")
    for case, *by_rank in zip(cases, *sent, strict=True):
        apart = plan_of((*case[:4], {}))
        assert sum(by_rank) < apart.load().total


@pytest.mark.full
def test_four_trainers_that_serve() -> None:
    run_distributed(refitted, 4, COLOCATED, "bfloat16")


def test_a_frozen_mtp_is_reported_and_a_delta_sends_what_changed() -> None:
    ranks = run_distributed(twice, 4, QUICK[0])
    for first, second, delta, _ in ranks:
        assert first[3] is None
        assert second[3] and all(name.startswith("mtp.") for name in second[3])
        assert len(delta[3]) == delta[2] - 1 and "backbone.norm_f.weight" not in delta[3]
    # Each server gets one vector, and proves all tensors it holds.
    assert [rank[2][1] for rank in ranks] == [0, 0, 256, 256]
    assert all(rank[3] > 100 for rank in ranks[2:])


def test_the_stream_has_whole_tensors() -> None:
    case: Case = ("super-tiny", "tp=2,ep=2", "hf", "replicas=2", {"colocated": True, "buffer": 100_000})
    (names, right), (others, also_right) = run_distributed(streamed, 2, case)
    assert right and also_right and names == others == sorted(plan_of(case).names)


QUICK_FAULTS = ("a server dies", "a wrong byte")
WORDS = {
    "a wrong byte": ["differ from the trainer's", "backbone.layers.0.mixer.conv1d.weight"],
    "a name is missing": [
        "target of rank 2",
        "parameters are missing, first 'model.norm_f.weight'",
        "untouched True",
    ],
    "an unknown name": ["unknown to the plan", "mixer.gate_proj.weight", "untouched True"],
    "another shape": ["target of rank 3", "model.norm_f.weight is [3]", "untouched True"],
    "a server dies": ["rank 3 ended", "cure:", "are not to be used"],
    "the first trainer dies": ["rank 0 ended", "cure:"],
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.full] if f not in QUICK_FAULTS else []) for f in WORDS],
)
def test_a_fault_is_one_named_error_everywhere(fault: str) -> None:
    said = run_apart(faulty, 4, QUICK[0], fault, wait=30, timeout=120)
    alive = [text for text in said if text != NOTHING]
    assert len(alive) == (3 if "dies" in fault else 4)
    for text in alive:
        assert text.startswith("RefitError after"), said
        assert all(word in text for word in WORDS[fault] if "untouched" not in word), text
    assert len({text.partition(": ")[2] for text in alive}) == 1, said
    assert all("untouched True" in text for text in alive if "untouched True" in WORDS[fault])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [0, 1])
def test_checksums_of_parts_add_up_and_notice_places(dtype: torch.dtype, axis: int) -> None:
    tensor = torch.randn(12, 10).to(dtype)
    whole = checksum(tensor)
    parts = [(0, 3), (3, 4), (4, tensor.shape[axis])]
    total = 0
    for start, stop in parts:
        total = added(total, checksum(tensor.narrow(axis, start, stop - start), axis, start))
    assert total == whole
    assert checksum(tensor.flip(axis)) != whole
    swapped = tensor.clone()
    swapped[[0, 5]] = swapped[[5, 0]]
    assert checksum(swapped) != whole
    bits = tensor.clone()
    bits.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[3, 3] ^= 1
    assert checksum(bits) != whole
