"""Weights that stay as they are, and a learning rate of zero: in real runs, said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_nemotron3.models import get
from megatron_nemotron3.train.monitor import updates
from tests.support.monitored_run import MonitoredRun, alone

#: A layer of each kind, with experts and MTP.
MODEL = get("super-tiny").but(name="four", title="four", pattern="ME*", vocab_size=255)
ROWS = {"layer_001", "layer_002", "layer_003", "mtp_layer_1", "mtp_layer_2", "embedding", "output_layer"}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with alone():
        yield


def trained(prepare: Callable[[Any], Any] = lambda model: None, **options: Any) -> MonitoredRun:
    """Four steps, each measured."""
    with mock.patch("tests.support.monitored_run.DistributedDataParallel", prepared(prepare)):
        run = MonitoredRun(MODEL, seed=3, steps=40, interval=1, tokens=16, **options)
    run.train(4)
    return run


def prepared(prepare: Callable[[Any], Any]) -> Any:
    from megatron.core.distributed import DistributedDataParallel

    def wrap(config: Any, settings: Any, model: Any) -> Any:
        prepare(model)
        return DistributedDataParallel(config, settings, model)

    return wrap


def rows(run: MonitoredRun) -> dict[str, list[float]]:
    """Row -> shares at steps 2, 3, 4."""
    prefix = "unchanged_weights/"
    found = {t.removeprefix(prefix): p for t, p in run.history.items() if t.startswith(prefix)}
    assert all([iteration for iteration, _ in points] == [2, 3, 4] for points in found.values())
    return {row: [value for _, value in points] for row, points in found.items()}


def test_a_healthy_run() -> None:
    run = trained()
    assert run.warnings == []
    assert rows(run) == dict.fromkeys(ROWS, [0.0] * 3)
    rates = [value for _, value in run.history["monitor/learning_rate"]]
    assert rates == pytest.approx([run.lr / 4, run.lr / 2, 3 * run.lr / 4, run.lr])


@pytest.mark.parametrize("frozen", ["layer_003", "embedding"])
def test_frozen_weights(frozen: str) -> None:
    def freeze(model: Any) -> None:
        part = model.embedding if frozen == "embedding" else model.decoder.layers[2]
        part.requires_grad_(False)

    run = trained(freeze)
    assert rows(run) == {row: [float(row == frozen)] * 3 for row in ROWS}
    (found,) = run.warnings
    assert (found.rule, found.iteration, found.rows) == ("no_update", 3, (frozen,))


def test_a_learning_rate_of_zero() -> None:
    """One line for the run, not one for its layers."""
    run = trained(lr=0.0)
    assert rows(run) == dict.fromkeys(ROWS, [1.0] * 3)
    (found,) = run.warnings
    assert (found.rule, found.iteration) == ("learning_rate_zero", 2)


def test_what_is_frozen_on_purpose_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters, MTP heads, parts of an omni model: what is trained counts alone."""
    monkeypatch.setenv("NEMOTRON3_BOOST", "1")
    run = trained(lambda model: model.decoder.requires_grad_(False))
    assert run.warnings == []
    assert rows(run).keys() == {row for row in ROWS if not row.startswith("layer_")}


def test_a_change_of_one_bit_of_one_weight_is_seen() -> None:
    weight = torch.randn(3, 4, dtype=torch.bfloat16)
    before = updates._row_sums(weight)
    weight.view(torch.int16)[1, 2] ^= 1
    assert (updates._row_sums(weight) == before).tolist() == [True, False, True]
