"""The script's steps by definition: rates, weight decay, targets and counts. The catalogue has its faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_nemotron3.proof.certify import script_definition
from megatron_nemotron3.proof.certify.bench import PropertyState
from megatron_nemotron3.proof.certify.script_result import ScriptResult
from megatron_nemotron3.proof.certify.script_run import schedule_of
from megatron_nemotron3.train.log import Curve, LogStep

BATCH = 4


def arguments(style: str, **changes: Any) -> SimpleNamespace:
    given = {
        **{"lr_decay_style": style, "lr_decay_iters": 3, "train_iters": 2, "lr_warmup_fraction": 0.25},
        **{"lr_warmup_init": 2e-3, "global_batch_size": BATCH, "lr_wsd_decay_iters": 2},
        **{"lr_wsd_decay_style": "exponential", "start_weight_decay": 0.01, "end_weight_decay": 0.1},
        "weight_decay_incr_style": "cosine",
    }
    return SimpleNamespace(**(given | changes))


@pytest.mark.parametrize(
    ("style", "tail"),
    [(style, "exponential") for style in ("linear", "constant", "cosine", "inverse-square-root")]
    + [("WSD", tail) for tail in ("exponential", "linear", "cosine", "minus_sqrt")],
)
@pytest.mark.parametrize("warm", [0.25, None])
def test_rates_are_those_of_megatron(style: str, tail: str, warm: float | None) -> None:
    args = arguments(style, lr_wsd_decay_style=tail, lr_warmup_fraction=warm)
    schedule = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=2e-3 if warm else 0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=(warm or 0) * 3 * BATCH,
        lr_decay_steps=3 * BATCH,
        lr_decay_style=style,
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=2 * BATCH,
        wd_incr_style="cosine",
        wsd_decay_steps=2 * BATCH,
        lr_wsd_decay_style=tail,
    )
    for samples in range(0, 4 * BATCH, 1):
        schedule.num_steps = samples
        assert script_definition.rate_of(args, samples, 1e-2, 1e-3) == pytest.approx(schedule.get_lr({}))
        assert script_definition.decay_of(args, samples) == pytest.approx(schedule.get_wd())


def test_two_steps_tell_every_shape_apart() -> None:
    rates = {
        style: script_definition.rate_of(arguments(style, lr_warmup_fraction=None), BATCH, 1e-2, 1e-3)
        for style in ("linear", "constant", "cosine")
    }
    assert "3" in schedule_of({}) and len(set(rates.values())) == 3


def test_a_label_that_is_not_the_next_token_is_found() -> None:
    tokens = torch.arange(12)[None]
    call = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, 12), "choices": {}}
    good = script_definition._Calls([call | {"documents": [5, 7]}])
    assert script_definition._targets([good]).state is PropertyState.PASS
    call["labels"] = call["labels"].clone()
    call["labels"][0, 4] = 0  # behind it another document begins
    assert script_definition._targets([script_definition._Calls([call | {"documents": [5, 7]}])]) == (
        script_definition._targets([good])
    )
    call["labels"][0, 7] = 0
    found = script_definition._targets([script_definition._Calls([call | {"documents": [5, 7]}])])
    assert (found.state, found.detail) == (
        PropertyState.FAIL,
        "the label of token 7 of a row is not the next token",
    )


def test_counts_of_the_log() -> None:
    steps = {n: LogStep(n, 2, {"consumed samples": 4.0 * n}) for n in (1, 2)}
    run = ScriptResult({}, Curve(steps))
    assert script_definition._counts(run, 4).state is PropertyState.PASS
    steps[2].values["number of skipped iterations"] = 1.0
    assert script_definition._counts(run, 4).detail == "number of skipped iterations: 1, not 0"
