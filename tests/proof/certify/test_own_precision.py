"""What holds to the bit in a launch's own precision, and the distributions of its initialization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.proof.certify import observer, own_precision
from megatron_nemotron3.proof.certify.bench import Finding, PropertyState
from megatron_nemotron3.proof.certify.initialization import Law, Laws, initialized, unlike
from megatron_nemotron3.proof.certify.script_result import ScriptResult
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.train.log import Curve
from tests.proof.certify.test_script import bench, failed
from tests.support import checkpoint_faults as faults

LAWS = Laws(deviation=0.02, embedding=0.02, layers=4)
FAIL = PropertyState.FAIL


def drawn() -> Tensors:
    """Tensors of a layer, drawn as Megatron draws them."""
    torch.manual_seed(0)
    layer = "decoder.layers.0.mixer"
    return {
        "embedding.word_embeddings.weight": 0.02 * torch.randn(512, 64),
        f"{layer}.in_proj.weight.z": (0.02 * torch.randn(64, 64)).bfloat16(),
        f"{layer}.out_proj.weight": 0.01 * torch.randn(64, 64),
        f"{layer}.A_log": torch.empty(64).uniform_(1, 16).log(),
        f"{layer}.dt_bias": torch.empty(64).uniform_(math.log(1e-3), math.log(0.1)).exp().expm1().log(),
        f"{layer}.conv1d.weight.x": torch.empty(64, 1, 4).uniform_(-0.5, 0.5),
        f"{layer}.D": torch.ones(64),
        f"{layer}.norm.weight": torch.ones(64),
        "decoder.layers.1.mlp.router.expert_bias": torch.zeros(16),
        "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": 0.02 * torch.randn(8, 32, 64),
        "decoder.layers.1.mlp.router.adapter": torch.ones(8),  # nothing is written for it
    }


def test_what_megatron_draws_is_right() -> None:
    (laws,), (rows,) = list(initialized(LAWS, drawn(), "")), list(unlike(drawn(), ""))
    assert (laws.state, laws.detail) == (PropertyState.PASS, "10 tensors")
    assert (rows.state, rows.detail) == (PropertyState.PASS, "4 matrices")


@pytest.mark.parametrize(
    "key, change",
    [
        ("out_proj.weight", lambda t: 2 * t),
        ("in_proj.weight.z", lambda t: t + 0.01),
        ("A_log", lambda t: t.clamp(max=math.log(4))),
        ("A_log", lambda t: t + 1),
        ("dt_bias", torch.zeros_like),
        ("conv1d.weight.x", lambda t: 2 * t),
        (".D", lambda t: t + 2.0**-7),
        ("norm.weight", torch.zeros_like),
        ("expert_bias", lambda t: t + 1e-3),
        ("linear_fc1.weight", lambda t: t.clamp(-0.01, 0.01)),
        ("word_embeddings.weight", lambda t: torch.cat([t[:256], 0 * t[256:]])),
    ],
)
def test_what_is_drawn_otherwise_is_named(key: str, change: Callable[[Any], Any]) -> None:
    tensors = {name: change(t) if name.endswith(key) else t for name, t in drawn().items()}
    (finding,) = initialized(LAWS, tensors, "")
    assert finding.state is FAIL and key in finding.detail


def test_a_kind_of_tensor_is_looked_at_over_all_layers() -> None:
    """Too few numbers in a layer to say that A lies below 2, and enough in sixteen."""
    narrow = {f"decoder.layers.{i}.mixer.A_log": torch.linspace(1, 2, 8).log() for i in range(16)}
    one = {key: t for key, t in narrow.items() if ".0." in key}
    assert [finding.state for finding in initialized(LAWS, one, "")] == [PropertyState.PASS]
    (finding,) = initialized(LAWS, narrow, "")
    assert finding.detail.startswith("decoder.layers.*.mixer.A_log: mean 1.5 of 128 numbers, not 8.5")


def test_normal_numbers_in_bf16_are_of_their_law() -> None:
    """As many as the experts of all layers have, though the widest are missing."""
    drawn = torch.empty(4_000_000, dtype=torch.bfloat16)
    drawn = drawn.normal_(0, 0.11, generator=torch.Generator().manual_seed(0)).double()
    law = Law(0.0, 0.11)
    assert float(drawn.std()) < 0.995 * law.deviation
    assert not law.against(drawn)
    assert law.against(0.98 * drawn).startswith("standard deviation")


def test_a_law_allows_rounding_and_nothing_more() -> None:
    assert not Law.uniform(-0.5, 0.5).against(torch.tensor([0.5, -0.5]).bfloat16().double())
    assert Law.uniform(1, 16).against(torch.tensor([16.5]))
    assert Law.constant(1).against(torch.tensor([1.0, 1.0 + 2.0**-20]))
    assert Law.constant(1).against(torch.tensor([torch.nan]))


@pytest.mark.parametrize(
    "alike",
    [
        lambda t: torch.cat([t[:4], t[:4]]),  # experts of two expert-parallel ranks
        lambda t: torch.cat([t[:, :16], t[:, :16]], dim=1),  # rows of two tensor-parallel ranks
        lambda t: torch.cat([t[..., :32], t[..., :32]], dim=2),  # columns of two
    ],
)
def test_parts_that_are_alike_are_named(alike: Callable[[Any], Any]) -> None:
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    (finding,) = unlike(drawn() | {key: alike(drawn()[key])}, "")
    assert finding.state is FAIL and finding.detail.startswith(f"{key}: ")


def test_random_states() -> None:
    """TP2 x DP2: parts draw apart, replicas alike."""

    def facts(streams: Callable[[int, int], dict[str, str]]) -> list[dict[str, Any]]:
        places = [(tp, dp) for dp in (0, 1) for tp in (0, 1)]
        zero = {"pp": 0, "cp": 0, "ep": 0, "etp": 0}
        return [{"ranks": {"tp": tp, "dp": dp} | zero, "streams": streams(tp, dp)} for tp, dp in places]

    def right(tp: int, dp: int) -> dict[str, str]:
        return {"default": "a", "model-parallel-rng": f"b{tp}", "expert-parallel-rng": "c"}

    assert own_precision.random_streams(facts(right), False, "").state is PropertyState.PASS
    alike = own_precision.random_streams(facts(lambda tp, dp: right(0, dp)), False, "")
    apart = own_precision.random_streams(
        facts(lambda tp, dp: right(tp, dp) | {"default": str(dp)}), False, ""
    )
    assert alike.detail == "model-parallel-rng: ranks of pp0 tp0 and pp0 tp1 draw the same numbers"
    assert apart.detail == "default: ranks of pp0 draw different numbers"
    own = facts(lambda tp, dp: {name: f"{text} {dp}" for name, text in right(tp, dp).items()})
    assert own_precision.random_streams(own, True, "").state is PropertyState.PASS


def test_formats_are_those_that_the_launch_asks_for() -> None:
    facts = [{"gradients": {"w": "float32"}, "biases": {"b": "float32"}, "routers": {"r": 1e-7}, "norms": {}}]

    def states(given: dict[str, tuple[str, ...]], **other: dict[str, Any]) -> list[bool]:
        found = own_precision.formats_of([facts[0] | other], given, "")
        return [finding.state is PropertyState.PASS for finding in found]

    wide: dict[str, tuple[str, ...]] = {"--moe-router-dtype": ("fp32",)}
    assert states(wide) == [True, True, True] and states({}) == [True, True]
    assert states(wide, gradients={"w": "bfloat16"}) == [False, True, True]
    assert states({"--grad-reduce-in-bf16": ()}) == [False, True]
    assert states(wide, biases={"b": "bfloat16"}, routers={"r": 1e-3}) == [True, False, False]
    assert states(wide, biases={}, routers={}) == [True]
    assert states({}, norms={"n": 2e-4}) == [True] * 3 and states({}, norms={"n": 2e-3}) == [
        True,
        True,
        False,
    ]


def _run(**of_step_2: Any) -> ScriptResult:
    master = torch.tensor([1.0, 1.0 + 2.0**-9])
    seen = {
        (1, observer.MODEL): {"w": master.bfloat16()},
        (1, observer.BEFORE + observer.WEIGHTS): {"w": master},
        (1, observer.WEIGHTS): {"w": master + 1},
        (2, observer.MODEL): {"w": of_step_2.get("model", (master + 1).bfloat16())},
        (1, "step"): {"w": torch.ones(2)},
        (2, "step"): {"w": torch.tensor([2.0, of_step_2.get("step", 2.0)])},
    }
    return ScriptResult(seen, Curve())


def test_masters_and_counters() -> None:
    def states(run: ScriptResult) -> list[bool]:
        found: list[Finding] = [*own_precision.masters(run, ""), *own_precision.counters(run, "")]
        return [finding.state is PropertyState.PASS for finding in found]

    assert states(_run()) == [True, True]
    assert states(_run(model=torch.tensor([2.0, 2.0 + 2.0**-6]).bfloat16())) == [False, True]
    assert states(_run(step=1.0)) == [True, False]


@pytest.mark.full
def test_a_launch_that_draws_resumes_to_the_bit(tmp_path: Path) -> None:
    """Dropout, and stochastic rounding by emulation; with Megatron's random states alone it does not."""
    words = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--bf16")
    good = bench(tmp_path / "good", ParallelLayout(dp=2, ep=2), *words, pattern="M*E")
    good = replace(good, emulate=Emulation())
    bad = replace(good, folder=tmp_path / "bad", fault=faults.stored_states_only)
    for tried in (good, bad):
        tried.folder.mkdir()
    (sizes,), findings = good.proxy.sizes, list(own_precision.own_precision(good))
    assert len(findings) == 15 and not failed(findings), findings
    assert {finding.where for finding in findings} == {f"{sizes}, BF16 and random numbers"}
    assert failed(own_precision.own_precision(bad)) == {
        *("gradients after resuming", "weights after resuming", "optimizer state after resuming")
    }
