"""Plans of random layouts without processes: every byte arrives once, from a rank that has it."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3.cli import main
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.parts import pack, parts_of, serving_parameters, space_of, unpack
from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.inference.refit.shares import ENGINES, PARAMETERS
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.rules import RuleError
from megatron_nemotron3.models import get
from megatron_nemotron3.models.tensors import ROWS
from tests.support.engines import repeatable
from tests.support.refit_check import bound, check
from tests.support.refit_ranks import empty_parameters
from tests.support.refit_reference import loaded, trained, whole

MODELS = ("super-tiny", "nano-tiny", "nano-4b-tiny", "nemotron-h-8b-tiny", "puzzle-tiny")


@st.composite
def plans(draw) -> RefitPlan:
    config = get(draw(st.sampled_from(MODELS)))
    tp, cp, pp = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4, len(config.pattern)])),  # the last: a layer of one kind per stage
    )
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))) if config.is_moe else (1, 1)
    dp = math.lcm(ep * etp, tp * cp) // (tp * cp) * draw(st.sampled_from([1, 3]))
    vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    layout = ParallelLayout(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp)
    engine = draw(st.sampled_from(sorted(ENGINES)))
    sizes = {"replicas": draw(st.integers(1, 3)), "mtp": draw(st.booleans())}
    if engine != "hf":
        sizes |= {"tp": draw(st.sampled_from([1, 2, 4, 8])), "pp": draw(st.sampled_from([1, 2, 3]))}
        sizes["dp"] = draw(st.sampled_from([n for n in (1, 2) if engine == "vllm" or n <= sizes["tp"]]))
        wide = sizes["tp"] * (sizes["dp"] if engine == "vllm" else 1)
        sizes["ep"] = (
            draw(st.sampled_from(sorted({1, wide} if engine == "vllm" else {1, 2, wide} - {3})))
            if config.is_moe
            else 1
        )
        if wide % sizes["ep"]:
            sizes["ep"] = 1
        sizes["mtp"] = sizes["mtp"] and sizes["pp"] == 1
    sizes["mtp"] = sizes["mtp"] and config.has_mtp
    settings = {"buffer": draw(st.sampled_from([1 << 18, 1 << 28])), "colocated": draw(st.booleans())}
    return make_plan(
        Training(config=config, layout=layout),
        EngineLayout(config=config, engine=engine, **sizes),
        **settings,
    )


@repeatable(15)
@given(plans())
def test_every_byte_arrives_once(plan: RefitPlan) -> None:
    check(plan)
    load = plan.load()
    assert load.space <= plan.buffer
    assert bound(plan) <= load.sent
    parts = sum(t.bytes * len(t.pairs[0]) for t in plan.transfers)
    held = 0
    for rank in range(plan.serving.size):
        for shape, dtype in serving_parameters(plan, rank).values():
            held += math.prod(shape) * dtype.itemsize
    assert parts == load.total + load.copied == held  # no tiny vocabulary is padded


@repeatable(6)
@given(plans())
def test_random_plans_give_servers_what_the_engines_loaders_make(plan: RefitPlan) -> None:
    config, serving = plan.training.config, plan.serving
    hf = whole(config)
    layout = plan.training.layout
    sources = functools.cache(lambda rank: trained(config, layout, rank, hf))
    sizes = {name: getattr(serving, name) for name in ("tp", "pp", "dp", "ep")}
    for rank in {0, serving.size // 2, serving.size - 1}:
        target = empty_parameters(plan, rank)
        for transfer, sender in plan.incoming(rank):
            parts = parts_of(transfer)
            message = torch.empty(space_of(parts), dtype=torch.uint8)
            pack(message, parts, sources(sender))
            unpack(message, parts, target)
        expected = loaded(config, serving.engine, sizes, rank, hf)
        if not serving.drafts:
            expected = {n: t for n, t in expected.items() if not n.startswith(("draft.", "mtp."))}
        assert expected.keys() == target.keys()
        assert not [n for n, t in expected.items() if not torch.equal(t.to(target[n].dtype), target[n])]


def test_every_tensor_of_the_table_has_an_engines_name() -> None:
    names = {t.name.removeprefix("backbone.") for row in ROWS for t in row.hf}
    assert names - {"mixer.fc2_norm.weight"} == PARAMETERS.keys()  # engines lack it, and a plan is refused


def _moved(plan: RefitPlan) -> tuple:
    first = plan.transfers[0]
    cut = first.cuts[0]
    return (first._replace(cuts=(cut._replace(target=cut.target + 1), *first.cuts[1:])), *plan.transfers[1:])


def _other_sender(plan: RefitPlan) -> tuple:
    routed = next(i for i, t in enumerate(plan.transfers) if t.stacked)
    transfer = plan.transfers[routed]
    senders, _ = transfer.pairs
    world = plan.training.layout.world_size
    changed = transfer._replace(senders=((senders + 1) % world).astype("int32").tobytes())
    return (*plan.transfers[:routed], changed, *plan.transfers[routed + 1 :])


def _other_expert(plan: RefitPlan) -> tuple:
    routed = next(i for i, t in enumerate(plan.transfers) if t.stacked and t.place)
    changed = plan.transfers[routed]._replace(place=0)
    return (*plan.transfers[:routed], changed, *plan.transfers[routed + 1 :])


@pytest.mark.parametrize("hurt", [_moved, _other_sender, _other_expert])
def test_the_check_sees_a_wrong_plan(hurt) -> None:
    config = get("super-tiny")
    plan = make_plan(Training.of(config, "tp=2,ep=4"), EngineLayout.of(config, "tp=4"))
    check(plan)
    with pytest.raises(ValueError, match="once|hold|place|two ranks"):
        check(dataclasses.replace(plan, transfers=hurt(plan)))


def test_the_busiest_sender_of_a_large_plan_sends_the_least_possible() -> None:
    config = get("super")
    plan = make_plan(Training.of(config, "tp=2,ep=8,pp=4"), EngineLayout.of(config, "tp=8"))
    load = plan.load()
    assert load.sent <= 1.001 * bound(plan)
    assert plan.steps <= 1.1 * load.received / plan.buffer + 1


@pytest.mark.full
def test_2048_trainers_and_2048_servers() -> None:
    config = get("ultra")
    training = Training.of(config, "tp=8,ep=64,dp=256")
    plan = make_plan(training, EngineLayout.of(config, "tp=8,ep=8,replicas=256"))
    check(plan)
    load = plan.load()
    assert load.sent <= 1.01 * bound(plan)


def test_the_command_prints_the_plan(capsys) -> None:
    words = ["plan", "refit", "super", "--tiny", "--from", "tp=2,ep=8,pp=4", "--to", "tp=4"]
    assert main(words) == 0
    assert "32 ranks" in capsys.readouterr().out
    assert main([*words, "--delta", "mtp.*"]) == 0
    assert "busiest sender" in capsys.readouterr().out
    more = ["--from", "tp=2", "--to", "replicas=3", "--engine", "hf", "--colocated"]
    assert main(["plan", "refit", "super", "--tiny", *more]) == 0
    assert "3 ranks, 2 of them trainers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "tp=3", "--to", "tp=4"], "TP=3"),
        (["--from", "tp=2", "--to", ""], "--to '': give sizes, such as tp=8"),
        (["--from", "tp=2", "--to", "tp=1000000"], "'tp=1000000' is no size (below 1,000,000) of tp="),
        (["--from", "tp=2", "--to", "tp=3"], "cannot be divided by 3"),
        (["--from", "tp=2", "--to", "tp=4,ep=2"], "vLLM spreads experts over"),
        (["--from", "tp=2", "--to", "pp=2"], "mtp=0"),
        (["--from", "tp=2", "--to", "fp32_router=3"], "use fp32_router=0 or fp32_router=1"),
        (["--from", "tp=2,dp=2048", "--to", "tp=2"], "2,048 at most"),
        (["--from", "tp=2", "--to", "tp=2", "--delta", "nothing"], "no tensor"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(words: list[str], said: str, capsys) -> None:
    assert main(["plan", "refit", "super", "--tiny", *words]) == 2
    found = capsys.readouterr()
    assert said in found.err and not found.out


@pytest.mark.parametrize(("to", "said"), [("ep=2", "no experts to spread over ep=2"), ("mtp=1", "no MTP")])
def test_servers_of_a_model_without_experts_or_mtp_cannot_ask_for_them(to: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineLayout.of(get("nano-4b-tiny"), f"tp=2,{to}")


def test_a_buffer_below_a_row_is_refused() -> None:
    config = get("super-tiny")
    with pytest.raises(ValueError, match=r"less than one row of .* give \d+ bytes"):
        make_plan(Training.of(config, ""), EngineLayout.of(config, ""), buffer=64)


def test_other_models_and_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be refitted into"):
        make_plan(Training.of(get("super-tiny"), ""), EngineLayout.of(get("nano-tiny"), ""))
    with pytest.raises(RuleError, match="TP=16"):
        Training.of(get("super-tiny"), "tp=16")
    with pytest.raises(ValueError, match="one MTP block"):
        EngineLayout.of(get("super-tiny").but(mtp_use_repeated_layer=False, mtp_num_layers=2), "")
    with pytest.raises(ValueError, match="is not that of"):
        Training(config=get("super-tiny"), pattern="M|E")
