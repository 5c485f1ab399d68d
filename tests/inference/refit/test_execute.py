"""Refits between processes on gloo: bit for bit what the engines' loaders make of the whole tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.parts import added, checksum, name_of, parts_of, sum_sent
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.boundary_processes import NOTHING, run_apart
from tests.support.refit_model import built_and_refitted
from tests.support.refit_ranks import (
    TWO,
    Case,
    after_a_failure,
    another_replica,
    faulty,
    left,
    opposite,
    plan_of,
    random_cases,
    refitted,
    side_by_side,
    streamed,
    subset,
    twice,
    unwritten,
)

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
#: Two trainers that serve.
STREAM: Case = ("super-tiny", "tp=2,ep=2", "hf", "replicas=2", {"colocated": True, "buffer": 100_000})
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
    names = set(plan_of(QUICK[0]).names)
    for first, second, delta, two in ranks:
        assert first[3] is None
        assert set(second[3]) == {name for name in names if name.startswith("mtp.")}
        assert names - set(delta[3]) == {"backbone.norm_f.weight"}
        assert names - set(two[3]) == set(TWO)
    # Each server gets one vector, then its parts of two matrices, and proves all tensors it holds.
    assert [rank[2][1] for rank in ranks] == [0, 0, 256, 256]
    config = get("super-tiny")
    heads, hidden = config.num_attention_heads * config.kv_channels, config.hidden_size
    assert [rank[3][1] for rank in ranks] == [0, 0, *([2 * (heads * hidden + 2 * hidden * hidden) // 2] * 2)]


def test_trainers_that_send_nothing_do_not_hide_what_is_unchanged() -> None:
    ranks = run_distributed(subset, 3, ("super-tiny", "pp=2", "vllm", "tp=1", {"only": "mtp.*"}))
    for rank in ranks:
        (_, first, number), (_, second, _), (_, third, _) = rank
        assert first is None and len(second) == number and len(third) == number - 1
    # The empty delta moves nothing, the last one a vector of BF16.
    assert [received for received, *_ in ranks[2]][1:] == [0, 2 * get("super-tiny").hidden_size]


def test_opposite_differences_of_two_replicas_do_not_cancel_out() -> None:
    case: Case = ("super-tiny", "tp=2", "vllm", "replicas=2", {"only": "backbone.norm_f.weight"})
    for said in run_distributed(opposite, 4, case):
        assert "1 tensors differ from the trainer's, first backbone.norm_f.weight of rank 2" in said


def test_a_check_names_what_an_engine_has_not_written() -> None:
    """As vLLM 0.22's reload leaves every `mixer.D` (prime-rl pull request 2714)."""
    layers = Counter(get("super-tiny").pattern)
    kinds = {"mixer.D": "M", "mixer.A": "M", "mixer.dt_bias": "M", "mixer.fc1_latent_proj.weight": "E"}
    for right, *said in run_distributed(unwritten, 4, QUICK[0], tuple(kinds)):
        assert right == "0 0 True"
        for kind, text in zip(kinds, said, strict=True):
            name = "mixer.A_log" if kind == "mixer.A" else kind
            number = layers[kinds[kind]] + (name.startswith("mixer.fc1"))  # MTP has one, too
            assert f"{number} tensors differ from the trainer's, first backbone.layers." in text
            assert f".{name} of rank 2: {number} {name}" in text


#: Layout of the trainers -> a tensor that two of them hold: of each TP rank's own; of both stages.
REPLICAS = {
    "dp=2": "backbone.layers.3.mixer.o_proj.weight",
    "tp=2": "backbone.norm_f.weight",
    "pp=2": "backbone.embeddings.weight",
    "tp=2,dp=2": "backbone.layers.0.mixer.in_proj.weight",
}


@pytest.mark.parametrize(
    "trainers", ["dp=2", *(pytest.param(n, marks=pytest.mark.full) for n in REPLICAS if n != "dp=2")]
)
def test_a_trainer_with_other_weights_is_named_before_anything_moves(trainers: str) -> None:
    """One bit in one of two replicas; of four ranks each two are replicas."""
    name, ranks = REPLICAS[trainers], 2 * trainers.count("=2")
    case: Case = ("super-tiny", trainers, "vllm", "tp=2", {})
    last = ranks - 1
    for said, untouched in run_distributed(another_replica, ranks + 2, case, name, last):
        assert untouched and f"{name} of trainers [{last}] are not those of trainers [{last // 3}]" in said


@pytest.mark.full
def test_a_refit_after_one_that_failed_and_a_rank_without_a_part() -> None:
    *ranks, other = run_distributed(after_a_failure, 5, QUICK[0])
    assert all("'model.norm_f.weight'" in first and second == "right" for first, second in ranks)
    assert all(said.startswith("ValueError: rank 4 neither sends nor receives") for said in other)


@pytest.mark.full
def test_two_refits_in_turn_and_one_that_fails() -> None:
    found = run_distributed(side_by_side, 4, [QUICK[0], ("nano-tiny", "pp=2", "sglang", "tp=2", {})])
    assert all("'model.norm_f.weight'" in first and second == "right" for first, second in found)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_random_layouts(seed: int) -> None:
    cases = random_cases(seed, 12)
    apart = [case for case in cases if not case[4]["colocated"]]
    run_distributed(refitted, 8, apart, "bfloat16", timeout=400)
    run_distributed(refitted, 4, [case for case in cases if case not in apart], "bfloat16", timeout=400)


def test_the_stream_has_whole_tensors() -> None:
    (names, right), (others, also_right) = run_distributed(streamed, 2, STREAM)
    assert right and also_right and names == others == sorted(plan_of(STREAM).names)


def test_a_stream_that_a_server_leaves_is_an_error_everywhere() -> None:
    other, said = run_apart(left, 2, STREAM, "leaves", wait=30, timeout=120)
    assert said == "left" and LOOK in other


@pytest.mark.full
def test_a_server_that_is_killed_in_a_stream_is_an_error_everywhere() -> None:
    other, said = run_apart(left, 2, STREAM, "killed", wait=30, timeout=120)
    assert said == NOTHING and LOOK in other and "are not to be used" in other


#: What a rank says that does not know the reason.
LOOK = "the log of the rank that failed or ended first has the reason"
QUICK_FAULTS = ("a server is killed while it unpacks", "a wrong byte")
WORDS = {
    "a wrong byte": ["differ from the trainer's", "backbone.layers.0.mixer.conv1d.weight of rank 3"],
    "a name is missing": [
        "target of rank 2",
        "parameters are missing, first 'model.norm_f.weight'",
        "untouched True",
    ],
    "an unknown name": ["unknown to the plan", "mixer.gate_proj.weight", "untouched True"],
    "another shape": ["target of rank 3", "model.norm_f.weight is [3]", "untouched True"],
    "a tensor of another layout": [
        "source of rank 1: backbone.embeddings.weight is [2048, 128], TP2 EP2 SP has [1024, 128]",
        "untouched True",
    ],
    "a tensor of bytes": ["source of rank 0: backbone.norm_f.weight is torch.uint8", "untouched True"],
    "a tensor with NaN": [
        "source of rank 1: backbone.norm_f.weight holds infinity or NaN: it would be served",
        "untouched True",
    ],
    "a trainer cannot read its tensors": ["rank 1: OSError: the disk has gone", "untouched True"],
    "a trainer cannot pack": ["moved step", "OSError: the disk has gone"],
    "a server cannot prove": ["rank 3: OSError: the disk has gone"],
    "the first trainer dies": ["waited while", "cure:", "are not to be used"],
    "a server is killed while it unpacks": ["moved step", "are not to be used"],
    "a server is killed before the proof": ["compared the checksums", "are not to be used"],
    "a trainer is killed while it packs": ["moved step", "are not to be used"],
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.full] if f not in QUICK_FAULTS else []) for f in WORDS],
)
def test_a_fault_is_an_error_everywhere(fault: str) -> None:
    said = run_apart(faulty, 4, QUICK[0], fault, wait=30, timeout=120)
    alive = [text for text in said if text != NOTHING]
    assert len(alive) == (3 if "dies" in fault or "killed" in fault else 4)
    assert all(text.startswith("RefitError after") for text in alive), said
    # One rank knows the reason; the others know it, too, or say where to look.
    words = [word for word in WORDS[fault] if "untouched" not in word]
    known = [all(word in text for word in words) for text in alive]
    assert any(known), said
    assert all(knows or LOOK in text for knows, text in zip(known, alive, strict=True)), said
    assert all("untouched True" in text for text in alive if "untouched True" in WORDS[fault])


def test_numbers_that_do_not_fit_fp16_are_refused() -> None:
    config = get("super-tiny")
    plan = make_plan(Training.of(config, ""), EngineLayout.of(config, "tp=1", dtype="float16"))
    part = next(
        part for t, _ in plan.outgoing(0) for part in parts_of(t) if name_of(part) == "lm_head.weight"
    )
    weight = torch.zeros(2048, config.hidden_size, dtype=torch.bfloat16)
    weight[3, 5] = -98304
    with pytest.raises(ValueError, match="lm_head.weight has 9.83e.04, FP16 ends at 65504: serve in BF16"):
        sum_sent(part, weight)
    weight[3, 5] = -torch.inf  # it is one on both sides
    sum_sent(part, weight)


@pytest.mark.parametrize(("dtype", "axis"), [(torch.bfloat16, 0), (torch.float32, 1)])
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


# --- models that Megatron built, against the Hugging Face export of the same model --------------------------

MODELS: list[tuple[str, dict[str, int], str, dict[str, int]]] = [
    ("super-tiny", {"tp": 2, "pp": 2}, "vllm", {"tp": 4}),
    ("super-tiny", {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}, "sglang", {"tp": 4, "dp": 2, "ep": 2}),
    ("nano-tiny", {"tp": 4, "ep": 2, "etp": 2}, "vllm", {"tp": 2, "pp": 2}),
    ("super-tiny", {"cp": 2, "tp": 2, "ep": 4}, "hf", {"replicas": 2}),
]


def test_a_model_that_megatron_built() -> None:
    found = run_distributed(built_and_refitted, 2, "super-tiny", {"tp": 2, "ep": 2}, "vllm", {"tp": 2})
    assert min(found) > 50


@pytest.mark.full
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models_that_megatron_built(case: Any) -> None:
    found = run_distributed(built_and_refitted, 4, *case)
    assert max(found) > 30
