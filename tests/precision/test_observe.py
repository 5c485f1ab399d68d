"""What a run writes is what went through its linears, and writing it changes nothing."""

from __future__ import annotations

import gc
import itertools
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.common.switches import LOG_PRECISION
from megatron_nemotron3.precision.install import emulate_stack
from megatron_nemotron3.precision.observe import Observed, PrecisionObserver
from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.recipe import MatmulRecipe, Spec
from megatron_nemotron3.precision.report import GRADIENT, ReportRow
from megatron_nemotron3.precision.settings import (
    Logging,
    logging_in_environment,
    logging_precision,
    parse_logging,
)
from megatron_nemotron3.precision.statistics import Sums, measure, numbers
from megatron_nemotron3.precision.table import tail_of_depth
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.emulation import assert_same, built, seed, step
from tests.support.precision_log import Run, Seen, train

from .test_linear import MXFP8, NVFP4

OUT_PROJ, SHARED_FC2 = "decoder.layers.0.mixer.out_proj", "decoder.layers.1.mlp.shared_experts.linear_fc2"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


#: Settings of runs -> keywords of `train`.
RUNS: dict[str, dict[str, Any]] = {
    "plain, watched": {"watch": (OUT_PROJ, SHARED_FC2), "evaluate": True},
    "emulated, watched": {"emulate": "nvfp4,sr=0", "watch": (OUT_PROJ, SHARED_FC2), "evaluate": True},
    "seven steps": {"interval": 3, "steps": 7, "microbatches": 1},
    "every layer": {"emulate": "nvfp4,every_layer=1", "microbatches": 1},
    "no file": {"microbatches": 1, "quant_recipe": None, "first_last_layers_bf16": False},
}
for emulate, interval, more in itertools.product((None, "nvfp4"), (None, 1), ({}, FULL)):
    RUNS[f"{emulate}, every {interval}, {len(more)}"] = {
        "emulate": emulate,
        "interval": interval,
        "steps": 2,
        **more,
    }


def train_all() -> dict[str, Run]:
    return {name: train(**keywords) for name, keywords in RUNS.items()}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """`RUNS` in a process of their own: Megatron's DDP is never freed."""
    found: dict[str, Run] = run_distributed(train_all, 1, apart=True)[0]
    return found


# -- the numbers ---------------------------------------------------------------------------------------------


def expected(tensors: list[Tensor], how: Spec) -> Any:
    """Numbers of an operand whose visits are quantized one by one."""
    total = Sums.zero(1, torch.device("cpu"))
    for tensor in tensors:
        x = tensor.flatten(0, -2).contiguous()
        total.add(measure(x, how, fake_quantize(x, how)))
    return numbers(total.sums[0].tolist(), float(total.amax))


def assert_row(row: ReportRow, wanted: Any, stochastic: bool = False) -> None:
    assert (row.elements, row.amax) == (wanted.elements, pytest.approx(wanted.amax, rel=1e-5))
    assert row.zeros == pytest.approx(wanted.zeros, rel=1e-5, abs=1e-9)
    if stochastic:  # other draws: small numbers go to zero or away from it, and the noise is larger
        assert wanted.sqnr_db - 4.5 < row.sqnr_db < wanted.sqnr_db - 1.5
        return
    assert row.flushed == pytest.approx(wanted.flushed, rel=1e-5, abs=1e-9)
    assert row.sqnr_db == pytest.approx(wanted.sqnr_db, abs=1e-3)


def assert_linear(
    found: dict[str, ReportRow], seen: Seen, how: MatmulRecipe, gradient: Tensor, stochastic: bool
) -> None:
    assert how.fprop and how.dgrad and how.wgrad and seen.weight is not None
    operands = {
        "fprop.x": (seen.x, how.fprop[0]),
        "fprop.weight": ([seen.weight], how.fprop[1]),
        "dgrad.dy": (seen.dy, how.dgrad[0]),
        "wgrad.dy": (seen.dy, how.wgrad[0]),
        "wgrad.x": (seen.x, how.wgrad[1]),
    }
    if not how.shares_weight:
        operands["dgrad.weight"] = ([seen.weight], how.dgrad[1])
    assert set(found) == {*operands, GRADIENT}
    for name, (tensors, spec) in operands.items():
        plain = Spec(spec.format, spec.axis, spec.tile, spec.hadamard)
        assert_row(found[name], expected(tensors, plain), spec.stochastic and stochastic)
    row = found[GRADIENT]
    assert row.elements == gradient.numel()
    assert row.zeros == pytest.approx(float((gradient == 0).double().mean()), rel=1e-5)
    assert row.amax == pytest.approx(float(gradient.abs().max()), rel=1e-5)
    assert row.flushed != row.flushed and row.sqnr_db != row.sqnr_db


@pytest.mark.parametrize("which", ["plain, watched", "emulated, watched"])
def test_what_is_written_is_what_was_multiplied(which: str, runs: dict[str, Run]) -> None:
    """Of two microbatches; X and dY by hooks of torch's, evaluation in between. Mamba's out_proj is MXFP8."""
    run, emulated = runs[which], which.startswith("emulated")
    for name, place, how in (
        (OUT_PROJ, ("layer_001", "mixer.out_proj"), MXFP8),
        (SHARED_FC2, ("layer_002", "mlp.shared_experts.linear_fc2"), NVFP4),
    ):
        rows = run.of(*place)
        assert len(run.seen[name].x) == len(run.seen[name].dy) == 2
        assert_linear(rows, run.seen[name], how, run.gradients[f"{name}.weight"], not emulated)
    formats = {(r.layer, r.module): r.format for r in run.rows}
    assert formats == {
        **{("layer_001", f"mixer.{n}"): f for n, f in (("in_proj", "nvfp4"), ("out_proj", "mxfp8"))},
        **{("layer_003", f"mixer.{n}"): f for n, f in (("in_proj", "nvfp4"), ("out_proj", "mxfp8"))},
        **{
            ("layer_002", f"mlp.{e}.linear_fc{i}"): "nvfp4"
            for e in ("experts", "shared_experts")
            for i in (1, 2)
        },
    }
    assert {r.used for r in run.rows} == {emulated}
    experts = run.of("layer_002", "mlp.experts.linear_fc1")
    assert experts["fprop.x"].elements == 2 * 64 * 2 * 32  # microbatches, tokens, top-k, latent width
    assert experts["fprop.weight"].elements == experts[GRADIENT].elements == 8 * 64 * 32
    for row in experts.values():
        assert 0 <= row.worst_expert < 8
        own = row.zeros if row.tensor == GRADIENT else row.flushed
        assert row.worst >= own
    assert {r.worst_expert for r in run.of("layer_001", "mixer.in_proj").values()} == {-1}


def test_the_gradient_of_an_expert(runs: dict[str, Run]) -> None:
    """Zeros of the eight experts together, and which is worst."""
    run = runs["emulated, watched"]
    row = run.of("layer_002", "mlp.experts.linear_fc2")[GRADIENT]
    parts = [run.gradients[f"decoder.layers.1.mlp.experts.linear_fc2.weight{e}"] for e in range(8)]
    shares = [float((part == 0).double().mean()) for part in parts]
    assert row.zeros == pytest.approx(sum(shares) / 8, rel=1e-5)
    assert row.worst == pytest.approx(max(shares), rel=1e-5) and row.worst_expert == shares.index(max(shares))
    assert row.amax == pytest.approx(max(float(part.abs().max()) for part in parts), rel=1e-5)


# -- what must not change ------------------------------------------------------------------------------------


@pytest.mark.parametrize("emulate", [None, "nvfp4"])
def test_measuring_changes_no_bit(emulate: str | None, runs: dict[str, Run]) -> None:
    """Losses and weights of two steps; and what recomputation repeats is measured once."""
    off, on, off_again, on_again = (
        runs[f"{emulate}, every {interval}, {options}"]
        for options in (0, len(FULL))
        for interval in (None, 1)
    )
    for without, measured in ((off, on), (off_again, on_again)):
        assert not without.rows and measured.rows
        assert all(map(torch.equal, without.losses, measured.losses))
        different = [n for n, p in without.parameters.items() if not torch.equal(p, measured.parameters[n])]
        assert not different
    assert len(on_again.rows) == len(on.rows)
    for row, other in zip(on.rows, on_again.rows, strict=True):
        assert (other.layer, other.module, other.elements) == (row.layer, row.module, row.elements)
        if row.iteration == 1 and row.tensor != GRADIENT:
            assert (other.zeros, other.flushed) == (row.zeros, row.flushed)


@pytest.mark.parametrize(
    "changes", [{}, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}]
)
def test_a_measured_expert_computes_as_ever(changes: dict[str, Any]) -> None:
    """Plain experts compute FC1 and FC2 at once, measured ones one by one: to the same bits."""
    run_distributed(compare_experts, 1, changes)


def compare_experts(changes: dict[str, Any]) -> None:
    initialize()
    plain = step(built(None, "E", mtp_use_repeated_layer=False, first_last_layers_bf16=False, **changes))
    with logging_precision(Logging(1, tempfile.mkdtemp())):
        model = built(None, "E", mtp_use_repeated_layer=False, num_layers_at_end_in_bf16=0, **changes)
    assert isinstance(model.decoder.layers[0].mlp.experts.linear_fc1.products, Observed)
    seed(3)
    assert_same(step(model), plain)
    assert model.decoder.layers[0].mlp.experts.linear_fc1.products.record.has("dgrad.dy")


# -- when and where ------------------------------------------------------------------------------------------


def test_first_step_and_multiples(runs: dict[str, Run]) -> None:
    assert sorted({row.iteration for row in runs["seven steps"].rows}) == [1, 3, 6]


def test_a_model_that_is_gone_leaves_optimizers_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    run_distributed(forget, 1)
    weight.grad = torch.ones(2)
    for _ in range(2):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]


def forget() -> None:
    initialize()
    with logging_precision(Logging(1, tempfile.mkdtemp())):
        built(None, "M", mtp_use_repeated_layer=False, num_layers_at_end_in_bf16=0)
    gc.collect()


def test_depths_that_share_a_block_are_one_row(runs: dict[str, Run]) -> None:
    run = runs["every layer"]
    row = run.of("mtp_layer_1", "self_attention.linear_qkv")["fprop.x"]
    assert row.elements == 2 * 64 * 64  # depths, tokens, width
    assert not any(row.module == "eh_proj" for row in run.rows)  # in no quantized layer
    assert run.of("layer_005", "mlp.experts.linear_fc2")  # every layer means the last one, too


def test_the_tail_of_a_plain_run_is_the_published_one(runs: dict[str, Run]) -> None:
    assert [tail_of_depth(layers).end for layers in (88, 108, 52, 10)] == [14, 16, 8, 2]
    found = {(row.layer, row.module, row.format) for row in runs["no file"].rows}
    assert {layer for layer, _, _ in found} == {"layer_001", "layer_002", "layer_003"}  # 1 of 5 stays BF16
    assert ("layer_003", "mixer.out_proj", "mxfp8") in found and len(found) == 8


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("x", "1.5", "-1", "00", "5:", ":here"):
        with pytest.raises(ValueError, match=f"{LOG_PRECISION}='{text}'.*100:runs/mine; 0 is off"):
            parse_logging(text)
    monkeypatch.setenv(LOG_PRECISION, "20:/data/a:b")
    chosen = logging_in_environment()
    assert chosen is not None and (chosen.interval, chosen.folder) == (20, "/data/a:b")
    assert parse_logging(chosen.text()) == chosen and parse_logging("0") is None
    linear = torch.nn.Linear(2, 2)
    foreign: Any = SimpleNamespace(modules=lambda: [linear], layers=[linear], config=None)
    message = "measures linears of the torch backend, and this stack has none"
    with logging_precision(chosen), pytest.raises(ValueError, match=message):
        emulate_stack(foreign)
    graphs: Any = SimpleNamespace(config=SimpleNamespace(cuda_graph_impl="local"))
    with pytest.raises(ValueError, match="--cuda-graph-impl local: a replayed graph hides the operands"):
        PrecisionObserver(graphs, chosen, used=False)
