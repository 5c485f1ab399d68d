"""Weights that stay as they are, a learning rate of zero and wrong inputs: in real runs, said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_nemotron3.layers.context_parallel import zigzag
from megatron_nemotron3.models import get
from megatron_nemotron3.train.monitor import updates, watched
from tests.support.monitored_run import MonitoredRun, alone

#: A layer of each kind, with experts and MTP.
MODEL = get("super-tiny").but(name="four", title="four", pattern="ME*", vocab_size=255)
#: What a data set returns in each step, [b, s + 1].
BATCH = torch.arange(34).reshape(2, 17)
#: Sums of rows on ranks without tokens.
NO_ROWS = [-1.0, 0.0, 0.0, 0.0]
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


def with_inputs(change: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]) -> MonitoredRun:
    """A run whose model gets other inputs than its data set returned."""

    def hand_over(module: Any, inputs: Any, kwargs: Any) -> Any:
        changed = change(inputs[0], kwargs["labels"])
        tokens = changed.pop("tokens", inputs[0])
        return (tokens, *inputs[1:]), kwargs | changed

    return trained(lambda model: model.register_forward_pre_hook(hand_over, with_kwargs=True))


@pytest.mark.parametrize(
    ("change", "rule", "iteration", "words"),
    [
        (lambda tokens, labels: {"labels": tokens}, "wrong_labels", 1, "are the token itself"),
        (lambda tokens, labels: {"labels": labels.roll(-1, -1)}, "wrong_labels", 1, "after the next one"),
        (
            lambda tokens, labels: {
                "tokens": tokens[:1].expand_as(tokens),
                "labels": labels[:1].expand_as(labels),
            },
            "equal_rows",
            2,
            "all rows of a step are the same",
        ),
        (
            lambda tokens, labels: {"loss_mask": torch.zeros_like(labels, dtype=torch.float32)},
            "few_loss_tokens",
            2,
            "no token of the step counts",
        ),
        (
            lambda tokens, labels: {"loss_mask": (torch.arange(16) == 3).expand_as(labels).float()},
            "few_loss_tokens",
            2,
            "only 6.2 % of the tokens of a step count",
        ),
        (
            lambda tokens, labels: {"tokens": BATCH[:, :-1], "labels": BATCH[:, 1:]},
            "equal_rows",
            3,
            "are those of the measurement before",
        ),
    ],
)
def test_wrong_inputs(change: Any, rule: str, iteration: int, words: str) -> None:
    (found,) = with_inputs(change).warnings
    assert (found.rule, found.iteration) == (rule, iteration) and words in found.message


def test_weights_of_tokens_are_no_short_mask() -> None:
    """A mean over conversations gives each token the weight 1 / length."""
    run = with_inputs(
        lambda tokens, labels: {"loss_mask": torch.full_like(labels, 0.01, dtype=torch.float32)}
    )
    assert run.warnings == [] and [v for _, v in run.history["monitor/loss_share"]] == [1.0] * 4


def test_inputs_that_are_right_in_any_layout() -> None:
    """Documents in rows, padded and cut over context-parallel ranks, few tokens counted; tokens all alike."""
    chance = torch.Generator().manual_seed(5)
    for multiple, ranks in ((1, 1), (4, 2), (8, 4), (16, 8)):
        rows, borders = [], [0]
        for length in torch.randint(2, 40, (60,), generator=chance).tolist():
            padded = -(-length // multiple) * multiple
            rows.append(torch.full((padded,), 7).index_copy(0, torch.arange(length), draw(length, chance)))
            borders.append(borders[-1] + padded)
        tokens = torch.cat(rows)[None]
        mask = (torch.rand(tokens.shape, generator=chance) < 0.3).float()
        for labels, ahead in ((tokens.roll(-1, -1), 1.0), (tokens, 0.0), (tokens.roll(-2, -1), 2.0)):
            parts = [(tokens, labels, mask)]
            if ranks > 1:
                cuts = [zigzag(torch.tensor(borders), ranks, rank) for rank in range(ranks)]
                parts = [tuple(whole[:, here] for whole in parts[0]) for here in cuts]
            counts = sum(torch.stack(watched._labels(*part)) for part in parts)
            found = watched._of_inputs([*counts.tolist(), *NO_ROWS])["labels_ahead"]
            # Parts of few tokens may hide a wrong label, but never show one that is right.
            assert found == (ahead if ranks == 1 or not ahead else found) and (ahead != 1 or found == 1)
    alike = torch.zeros(1, 50, dtype=torch.long)
    counts = watched._labels(alike, alike, torch.ones(1, 50))
    found = watched._of_inputs([*map(float, counts), *NO_ROWS])
    assert found == {"labels_ahead": 1.0, "equal_rows": 0.0}
    assert [float(n) for n in watched._labels(None, alike, torch.ones(1, 50))] == [0.0] * 4


def draw(length: int, chance: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 250, (length,), generator=chance)
