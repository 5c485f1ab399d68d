"""What the monitors report on one process, against a direct computation; and that they change nothing."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch

from megatron_nemotron3.models.series import KINDS
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.train import log
from tests.support.models import FULL_RECOMPUTE, SIZES
from tests.support.monitored_step import MICRO_BATCHES, Run, run

EXPERTS, TOPK = SIZES["num_moe_experts"], SIZES["moe_router_topk"]
#: Row -> (captured module, which visits of a micro-batch: start and stride).
ROWS = {
    **{f"layer_{n:03d}": (f"decoder {n}", 0, 1) for n in range(1, 7)},
    **{f"mtp_{d}_layer_{n}": (f"mtp {n}", d - 1, 2) for d in (1, 2) for n in (1, 2)},
}
MOE_ROWS = {"layer_002", "layer_005", "layer_006", "mtp_1_layer_2", "mtp_2_layer_2"}


@functools.cache
def trained(monitor: str | None = "1", **options: Any) -> Run:
    """`monitored_step.run` in a world of one."""
    result: Run = run_distributed(partial(run, monitor, **options), 1)[0]
    return result


def visits(result: Run, step: int, row: str, what: str = "") -> list[torch.Tensor]:
    """What the row's module returned in this step, one entry per micro-batch."""
    name, start, stride = ROWS[row]
    return result.seen[step][name + what][start::stride]


def loads(result: Run, step: int, row: str) -> list[list[int]]:
    """Tokens of each expert, one list per micro-batch, counted one by one."""
    counted = []
    for routing_map in visits(result, step, row, " router"):
        count = [0] * EXPERTS
        for _token, expert in routing_map.nonzero().tolist():
            count[expert] += 1
        assert sum(count) == len(routing_map) * TOPK
        counted.append(count)
    assert len(counted) == MICRO_BATCHES
    return counted


def max_vio(load: list[int]) -> float:
    return max(load) / (sum(load) / len(load))


def total(counts: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts)]


def rms(tensors: list[torch.Tensor]) -> float:
    everything = torch.cat([t.reshape(-1) for t in tensors]).double()
    return float(everything.square().mean().sqrt())


def reported(result: Run, iteration: int) -> dict[str, dict[str, float]]:
    """kind -> row -> value."""
    found: dict[str, dict[str, float]] = {}
    for tag, value in result.tensorboard.scalars[iteration].items():
        kind, _, row = tag.partition("/")
        found.setdefault(kind, {})[row] = value
    return found


@pytest.mark.parametrize("step", [0, 1])
def test_values_by_definition(step: int) -> None:
    # Two tokens a sequence: some experts get none, and their weights no gradient.
    result = trained(capture=True, tokens=2)
    values = reported(result, step + 1)
    assert set(values) == {*KINDS, "monitor"}.difference(() if step else ("unchanged_weights",))
    for row in MOE_ROWS:
        micro = loads(result, step, row)
        each = [max_vio(load) for load in micro]
        assert values["max_vio"][row] == pytest.approx(max_vio(total(micro)), rel=1e-6)
        assert values["max_vio_micro_mean"][row] == pytest.approx(sum(each) / len(each), rel=1e-6)
        assert values["max_vio_micro_worst"][row] == pytest.approx(max(each), rel=1e-6)
        assert 1 <= values["max_vio"][row] <= EXPERTS / TOPK
        latent = visits(result, step, row, " latent")
        assert values["latent_rms"][row] == pytest.approx(rms(latent), rel=1e-5)
    assert set(values["max_vio"]) == set(values["latent_rms"]) == MOE_ROWS
    for row in ROWS:
        assert values["residual_rms"][row] == pytest.approx(rms(visits(result, step, row)), rel=1e-5)
    assert set(values["residual_rms"]) == set(ROWS)

    both = [loads(result, step, f"mtp_{depth}_layer_2") for depth in (1, 2)]
    dead = {row: total(loads(result, step, row)).count(0) for row in MOE_ROWS if row.startswith("layer")}
    dead["mtp_layer_2"] = total([*both[0], *both[1]]).count(0)
    assert values["dead_experts"] == dead
    assert sum(dead.values()) > 0, "the case is meant to have some"
    assert values["monitor"]["dead_experts"] == sum(dead.values())


def test_weights_by_definition() -> None:
    """Zero gradients and expert biases, after the last step; repeated MTP layers are one set of weights."""
    result = trained(capture=True, tokens=2)
    values = reported(result, 2)
    layers = {f"layer_{n:03d}": f"decoder.layers.{n - 1}." for n in range(1, 7)}
    layers |= {f"mtp_layer_{n}": f"mtp.layers.0.mtp_model_layer.layers.{n - 1}." for n in (1, 2)}
    zeros = elements = 0
    for row, prefix in layers.items():
        gradients = [g for name, g in result.gradients.items() if name.startswith(prefix)]
        zero, size = sum(int((g == 0).sum()) for g in gradients), sum(g.numel() for g in gradients)
        assert values["zero_gradients"][row] == pytest.approx(zero / size, abs=1e-7)
        zeros, elements = zeros + zero, elements + size
    assert set(values["zero_gradients"]) == set(layers)
    assert zeros > 0 and values["monitor"]["zero_gradients"] == pytest.approx(zeros / elements, abs=1e-7)
    spread = {
        row: float(bias.max() - bias.min())
        for row, prefix in layers.items()
        for name, bias in result.bias.items()
        if name.startswith(prefix)
    }
    assert values["expert_bias_spread"] == pytest.approx(spread, rel=1e-6)
    assert max(spread.values()) > 0
    for row, prefix in layers.items():
        for name, bias in result.bias.items():
            if name.startswith(prefix):
                assert values["expert_bias_mean"][row] == pytest.approx(float(bias.mean()), abs=1e-9)


def test_log_line_and_aggregates() -> None:
    result = trained(capture=True, tokens=2)
    for step, line in enumerate(result.lines):
        values = reported(result, step + 1)
        # The parser that `nemotron3 train` reads Megatron's log with.
        shown = log.parse(f"iteration {step + 1}/ 2 | lm loss: 1.0 |{line}")
        assert isinstance(shown, log.LogStep)
        worst = max(values["max_vio"].values())
        assert shown.values["worst MaxVio"] == pytest.approx(worst, abs=5e-3)
        micro = max(values["max_vio_micro_worst"].values())
        assert shown.values["in a micro-batch"] == pytest.approx(micro, abs=5e-3)
        assert shown.values["dead experts"] == sum(values["dead_experts"].values())
        ratio = values["residual_rms"]["layer_006"] / values["residual_rms"]["layer_001"]
        assert shown.values["residual RMS last/first"] == pytest.approx(ratio, rel=5e-3)
        share = 100 * values["monitor"]["zero_gradients"]
        assert shown.values["zero gradients"] == pytest.approx(share, abs=1e-3)
        assert len(line) < 200
    assert result.wandb.scalars == result.tensorboard.scalars


def test_the_warnings_see_the_losses_of_the_mtp_depths() -> None:
    """A copy: what Megatron reduces and logs afterwards is untouched."""
    result = trained()
    assert result.mtp == trained("0").mtp and len(result.mtp_watched) == 2
    for step, (kept, watched) in enumerate(zip(result.mtp, result.mtp_watched)):
        assert watched == pytest.approx(kept, rel=1e-6)
        assert all(4 < loss < 8 for loss in kept), step  # log 256 = 5.5


def test_interval() -> None:
    """The first step, then every third; dead over the interval is dead in all of its steps."""
    result = trained("3", capture=True, tokens=1, steps=6)
    assert sorted(result.tensorboard.scalars) == [1, 3, 6]
    assert [bool(line) for line in result.lines] == [True, False, True, False, False, True]
    for iteration, steps in ((1, [0]), (3, [1, 2]), (6, [3, 4, 5])):
        values = reported(result, iteration)
        for row in ("layer_002", "layer_005"):
            counts = [load for step in steps for load in loads(result, step, row)]
            assert values["dead_experts_interval"][row] == total(counts).count(0)
            assert values["max_vio_interval"][row] == pytest.approx(max_vio(total(counts)), rel=1e-6)
            assert values["monitor"]["interval_tokens"] == sum(total(counts)) / TOPK
            assert values["dead_experts"][row] == total(loads(result, steps[-1], row)).count(0)
    one, six = reported(result, 1), reported(result, 6)
    assert six["monitor"]["dead_experts_interval"] < six["monitor"]["dead_experts"]
    assert one["dead_experts_interval"] == one["dead_experts"]


def test_the_main_loss_and_what_routers_are_judged_by() -> None:
    result = trained()
    for step in (0, 1):
        values = reported(result, step + 1)["monitor"]
        losses = result.losses[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        assert values["lm_loss"] == pytest.approx(float(sum(losses)) / MICRO_BATCHES, rel=1e-6)
        assert values["loss_tokens"] == MICRO_BATCHES * 2 * 16
        assert (values["experts"], values["top_k"]) == (EXPERTS, TOPK)
        assert values["bias_update_rate"] == pytest.approx(1e-3)


def test_evaluation_does_not_count() -> None:
    plain, with_evaluation = trained(), trained(evaluate=True)
    assert plain.tensorboard.scalars == with_evaluation.tensorboard.scalars


def test_the_distributed_optimizer_shows_the_same() -> None:
    ours, plain = trained(distributed_optimizer=True).tensorboard.scalars, trained().tensorboard.scalars
    assert ours.keys() == plain.keys()
    for iteration in ours:
        assert ours[iteration] == pytest.approx(plain[iteration], rel=1e-5, abs=1e-7)


def test_nothing_else_changes() -> None:
    """Loss and gradients to the bit, with monitors at every step and without any."""
    watched, plain = trained("1"), trained("0")
    assert plain.lines == ["", ""] and plain.tensorboard.scalars == {}
    assert watched.tensorboard.scalars
    assert all(torch.equal(a, b) for a, b in zip(watched.losses, plain.losses, strict=True))
    assert watched.gradients.keys() == plain.gradients.keys()
    assert all(torch.equal(watched.gradients[name], g) for name, g in plain.gradients.items())
    assert all(torch.equal(watched.bias[name], b) for name, b in plain.bias.items())


@pytest.mark.parametrize(
    "how", [FULL_RECOMPUTE, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}]
)
def test_recomputed_forwards_do_not_count_twice(how: dict[str, Any]) -> None:
    again: Run = run_distributed(partial(run, "1", **how), 1)[0]
    plain = trained().tensorboard.scalars
    assert again.tensorboard.scalars.keys() == plain.keys()
    for iteration, values in plain.items():
        assert again.tensorboard.scalars[iteration] == pytest.approx(values, rel=1e-5, abs=1e-7)


def test_off_by_default_where_nobody_reports() -> None:
    """A model in somebody's own loop: no Megatron options were parsed, so there is no log interval."""
    assert trained(None).lines == ["", ""]
