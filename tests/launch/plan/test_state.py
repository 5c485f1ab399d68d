"""Weights, gradients and optimizer in closed form equal those of models that Megatron built, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.launch.plan.state import RankState, state
from megatron_nemotron3.models import LoRASettings, count, get, names, tiny
from megatron_nemotron3.models.lora import LINEARS
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.world import TrainingRun
from tests.parallel.case import Case
from tests.support.exact_state import exact_state, parameters
from tests.support.launches import launch

CONFIG = tiny(get("super")).but(pattern="MEM*EME*")
DISTRIBUTED = ("--use-distributed-optimizer",)
LAYOUTS = [
    pytest.param(ParallelLayout(), (), "fp32", id="one-fp32", marks=pytest.mark.full),
    pytest.param(ParallelLayout(dp=2, ep=2), DISTRIBUTED, "bf16", id="ep2"),
    pytest.param(
        ParallelLayout(tp=2, dp=2, ep=2), DISTRIBUTED, "bf16", id="tp2-dp2-ep2", marks=pytest.mark.full
    ),
    pytest.param(
        ParallelLayout(pp=2, vpp=2, dp=2), DISTRIBUTED, "bf16", id="pp2-vpp2-dp2", marks=pytest.mark.full
    ),
]


def held(case: Case) -> tuple[dict[str, int], RankState]:
    """(coordinates, bytes) of this rank after a step."""
    from megatron.core import parallel_state as groups

    run = TrainingRun(case, None)
    run.step()
    weights = gradients = 0
    for chunk in run.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            gradients += buffer.grad_data.nbytes
            if buffer.param_data is not None:
                weights += buffer.param_data.nbytes
            else:
                weights += sum(p.nbytes for p in buffer.params)
        weights += sum(p.nbytes for p in chunk.parameters() if not p.requires_grad)
    at = {"pp_rank": groups.get_pipeline_model_parallel_rank()}
    at["dp_rank"] = groups.get_data_parallel_rank(with_context_parallel=True)
    at["edp_rank"] = groups.get_expert_data_parallel_rank()
    return at, RankState(weights, gradients, sum(_optimizer(run.optimizer)))


def _optimizer(optimizer: Any) -> list[int]:
    found = []
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, slots in inner.optimizer.state.items():
            found += [slots[name].nbytes for name in ("exp_avg", "exp_avg_sq")]
            if parameter.data_ptr() not in {p.data_ptr() for p in _trained(inner)}:
                found.append(parameter.nbytes)  # the optimizer's own copy
    return found


def _trained(inner: Any) -> list[Any]:
    groups = [getattr(inner, name, []) for name in ("model_fp32_groups", "fp32_from_fp32_groups")]
    return [p for group in groups for members in group for p in members]


@pytest.mark.parametrize(("layout", "extra", "precision"), LAYOUTS)
def test_equal_to_a_built_model_to_the_byte(
    layout: ParallelLayout, extra: tuple[str, ...], precision: str
) -> None:
    case = Case(config=CONFIG, layout=layout, extra=extra, precision=precision, steps=1, mask="none")
    distributed = "--use-distributed-optimizer" in case.argv()
    for at, found in run_distributed(held, layout.world_size, case, apart=True, timeout=200):
        what = launch(CONFIG, layout, precision=precision, distributed_optimizer=distributed)
        assert found == exact_state(what, **at), at


EVERY, SOME = "+".join(LINEARS), "*.layers.1.*.linear_fc1+*.layers.3.*.linear_qkv+mtp.*.eh_proj"
ADAPTED = [
    pytest.param(ParallelLayout(tp=2, ep=2), (EVERY,), id="tp2-ep2"),
    pytest.param(ParallelLayout(tp=2, etp=2), (EVERY, SOME), id="tp2-etp2", marks=pytest.mark.full),
    pytest.param(ParallelLayout(pp=2, vpp=2), (EVERY, SOME), id="pp2-vpp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "chosen"), ADAPTED)
def test_adapters_alone_are_trained_to_the_byte(layout: ParallelLayout, chosen: tuple[str, ...]) -> None:
    """Of every linear, and of single layers."""
    for targets in chosen:
        lora = f"dim=4,targets={targets}"
        case = Case(
            config=CONFIG, layout=layout, precision="bf16", steps=1, mask="none", lora=lora,
            sequences=layout.pp * layout.dp, without=("--use-distributed-optimizer",),
        )  # fmt: skip
        what = launch(CONFIG, layout, precision="bf16", distributed_optimizer=False)
        options = replace(CostOptions.of(what), lora=LoRASettings.parse(lora))
        for at, found in run_distributed(held, layout.world_size, case, apart=True, timeout=200):
            assert found == state(what, at["pp_rank"], options), at


def test_one_rank_holds_the_whole_model() -> None:
    for name in names():
        config = get(name)
        elements = sum(p.elements for p in parameters(launch(config), 0))
        assert elements == count(config).trainable
