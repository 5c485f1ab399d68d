"""The alpha-beta model of benchmarks/boundary_model.py: its arithmetic, checked by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # it imports its neighbor `common`

from benchmarks import boundary_model as model

NVLINK, NICS, ONE_NIC = model.NETWORKS
FAN_IN = model.Case({"tp": 1, "dp": 4}, {"tp": 4, "dp": 1})
ROWS = [2048] * 4
V = 4 * 2048 * 5376


def test_stock_by_hand() -> None:
    """Four leaders to one over the network, then a broadcast inside a node; back, one to four."""
    alpha = 8.4 + 9.6
    broadcast = 2 * (8.4 + 3.4) + (V + 24) / 300e3
    there = 2 * 4 * alpha + (V + 4 * 24) / 50e3 + broadcast
    back = 2 * 4 * alpha + (V + 4 * 24) / 50e3
    assert model.stock_time(FAN_IN, ROWS, NICS) == pytest.approx(there + back)


def test_plan_by_hand() -> None:
    """A quarter to each receiver, one message a rank; then three quarters in three steps."""
    plan = model.forward_plan(FAN_IN, ROWS)
    message = 8.4 + 9.6 + V / 4 / 50e3
    gather = 8.4 + 3 * 3.4 + V * 3 / 4 / 300e3
    assert model.there_and_back(plan, NICS, model.Rules()) == pytest.approx(2 * message + gather)
    # The four senders share one NIC.
    shared = 8.4 + 9.6 + V / 50e3
    assert model.there_and_back(plan, ONE_NIC, model.Rules()) == pytest.approx(2 * shared + gather)


def test_latencies_add_up_or_overlap() -> None:
    messages = [(0, 8, 100.0), (0, 9, 100.0), (1, 8, 100.0)]
    assert NICS.messages(messages) == pytest.approx(2 * (8.4 + 9.6) + 200 / 50e3)
    assert NICS.messages(messages, concurrent=True) == pytest.approx(8.4 + 9.6 + 200 / 50e3)
    assert NVLINK.messages([]) == 0.0


def test_the_crossover_is_a_size_or_never() -> None:
    rules = model.Rules()
    assert model.crossover(FAN_IN, NICS, rules, 8) == "never"
    wide = model.Case({"tp": 1, "dp": 8}, {"tp": 8, "cp": 4, "dp": 1}, sliced=True)
    assert model.crossover(wide, NICS, rules, 16).endswith(" MB")
    assert model.crossover(wide, NICS, model.Rules(concurrent=True), 8) == "never"


@pytest.mark.parametrize("ragged", [False, True])
def test_v_is_per_lane_of_the_language_model(ragged: bool) -> None:
    case = model.Case({"tp": 1, "dp": 8}, {"tp": 1, "dp": 4})
    rows = case.rows(44e6, ragged)
    assert sum(rows) * 5376 == pytest.approx(4 * 44e6, rel=1e-3)
    assert (len(set(rows)) > 1) == ragged


def test_every_line_says_that_it_is_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["boundary_model.py", "--quick"])
    model.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert all("model" in line or set(line) <= set("|-:") for line in lines)
    assert len(lines) == 3 * 5 + 6
