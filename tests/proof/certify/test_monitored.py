"""The monitors' first values in a layout against one process, from event files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.launch import Launch, flags
from megatron_nemotron3.proof.certify import proxy, script_stage
from megatron_nemotron3.proof.certify.bench import Bench, PropertyState
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.script_stage import events

SERIES = {"max_vio/layer_002": 1.5, "residual_rms/layer_001": 0.02, "monitor/dead_experts": 0.0}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    words = flags(Launch.of("nano", tp=2, dp=2, backend="te"))
    return Bench(
        proxy=proxy.make(LaunchRequest(flags=tuple(words), world_size=4), 8),
        flags=tuple(words),
        folder=tmp_path,
    )


def write(bench: Bench, run: str, scale: float = 1.0, *without: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(events(bench, run))) as writer:
        for tag, value in SERIES.items():
            if tag not in without:
                writer.add_scalar(tag, value * scale, 1)
                writer.add_scalar(tag, value * 7, 2)  # later steps are not compared
        writer.add_scalar("lm loss", 3.0 + scale, 1)  # not a monitor's


def test_equal_but_for_rounding_passes(bench: Bench) -> None:
    for number in range(3):
        write(bench, f"one-{number}", 1 + 1e-6 * number)
    write(bench, "layout", 1 + 1e-6)
    (one,) = script_stage.monitors(bench)
    assert one.state is PropertyState.PASS and one.difference is not None and 0 < one.difference < 1


def test_what_differs_is_named(bench: Bench) -> None:
    for number in range(3):
        write(bench, f"one-{number}", 1 + 1e-6 * number)
    write(bench, "layout", 1.01)
    (one,) = script_stage.monitors(bench)
    assert one.state is PropertyState.FAIL and one.detail in SERIES and one.where == str(bench.proxy.sizes[0])


def test_a_missing_series_fails(bench: Bench) -> None:
    for number in range(3):
        write(bench, f"one-{number}")
    write(bench, "layout", 1.0, "max_vio/layer_002")
    (one,) = script_stage.monitors(bench)
    assert one.state is PropertyState.FAIL and "max_vio/layer_002 is missing" in one.detail
