"""A NaN at which Megatron ends a run: on standard error with step, rank and weights."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine as rerun
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_nemotron3 import cli
from megatron_nemotron3.models import get
from megatron_nemotron3.train import processes
from megatron_nemotron3.train.monitor import not_finite
from megatron_nemotron3.train.progress import TrainProgress
from tests.support.monitored_run import MonitoredRun, alone

MODEL = get("super-tiny").but(name="three", title="three", pattern="ME*", vocab_size=255)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[MonitoredRun]:
    """A run at step 42 that tests its gradients, and knows no model that another test has built."""
    monkeypatch.setattr(not_finite, "_WRAPPERS", [])
    monkeypatch.setattr(not_finite, "megatron_options", lambda: SimpleNamespace(curr_iteration=41))
    checked = functools.partial(DistributedDataParallelConfig, check_for_nan_in_grad=True)
    monkeypatch.setattr("tests.support.monitored_run.DistributedDataParallelConfig", checked)
    with alone():
        yield MonitoredRun(MODEL, seed=3, steps=40, tokens=16)
    rerun.destroy_rerun_state_machine()


def hurt(run: MonitoredRun, layer: int, factor: float = math.nan) -> None:
    """The gradients behind a layer, and so of those before it, become NaN or large."""

    def scale(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        states.register_hook(lambda gradient: gradient * factor)

    decoder: Any = run.model.decoder
    decoder.layers[layer].register_forward_hook(scale)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if ": step 42, " in line]


def test_a_gradient(run: MonitoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    hurt(run, 1)
    with pytest.raises(RuntimeError, match="bucket #0"), not_finite.naming_not_finite():
        run.train(1)
    assert lines(capsys) == [
        "megatron_nemotron3: step 42, rank 0: NaN in the gradients of 76 of 162 weights, from "
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight back (bucket #0); the same command repeats "
        "the step, and --iterations-to-skip 42 leaves it out"
    ]


def test_gradients_that_are_too_large(run: MonitoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    hurt(run, 2, 1e25)
    with pytest.raises(RuntimeError, match="bucket #0"), not_finite.naming_not_finite():
        run.train(1)
    assert "step 42, rank 0: Inf in the norm of gradients that are finite (bucket #0); " in lines(capsys)[0]


def test_a_step_that_megatron_repeats_and_the_loss_after_it(
    run: MonitoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron logs the first, and does not test the first step of a process."""
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine = rerun.get_rerun_state_machine()
    machine.state = rerun.RerunState.INITIAL_RUN
    hurt(run, 0)
    with not_finite.naming_not_finite():
        run.train(1)
        assert lines(capsys) == []
        machine.first_iteration_complete = True
        loss = torch.tensor(math.nan)
        machine.validate_result(loss, torch.isnan, "found NaN in local forward loss calculation")
        (line,) = lines(capsys)
        end = r"; \d+ of 162 weights had it before: go on from a checkpoint without it"
        assert re.search(f"{end}$", line)
        machine.rerun_requested = False
        for weight in run.model.parameters():
            weight.data.nan_to_num_()
        machine.validate_result(loss, torch.isnan, "NaN in the local loss")
        (line,) = lines(capsys)
        assert (
            "NaN in the loss; the same command repeats the step, on this GPU only with --rerun-mode" in line
        )
        machine.rerun_requested = False
        machine.validate_result(torch.tensor(1.0), torch.isnan, "NaN in the local loss")
    assert lines(capsys) == []


#: A training script of two ranks, in which NaN comes from the last layer on rank 1 in the fourth micro-batch.
HURT = """
import os, runpy, sys
from torch.nn.modules.module import register_module_forward_hook
from megatron_nemotron3.layers.stack import Nemotron3Stack
from megatron_nemotron3.train.processes import ENTRY

calls = []

def hurt(module, inputs, output):
    if isinstance(module, Nemotron3Stack) and module.training and os.environ["RANK"] == "1":
        calls.append(module)
        if len(calls) >= 4:
            output.register_hook(lambda gradient: gradient * float("nan"))

register_module_forward_hook(hurt)
runpy.run_path(str(ENTRY), run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "more", "named"),
    [
        ("--dp", [], "step 4, rank 1: NaN in the gradients of "),
        ("--tp", [], "step 2, rank 1"),
        ("--dp", ["--rerun-mode", "disabled"], "step 4, rank 1: NaN in the gradients of "),
    ],
)
def test_one_rank_of_two(
    layout: str,
    more: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The command ends with one line that says where; what Megatron saved is a sound checkpoint."""
    (tmp_path / "hurt.py").write_text(HURT)
    command = functools.partial(processes.command, script=tmp_path / "hurt.py")
    monkeypatch.setattr(processes, "command", command)
    output = tmp_path / "run"
    words = ["train", "super", "--tiny", "--device", "cpu", "--output", str(output), layout, "2"]
    words += ["--max-bytes", "100000", "--seq-length", "32", "--micro-batch-size", "1"]
    words += ["--global-batch-size", "2", "--steps", "6", "--", "--eval-iters", "0", *more]
    assert cli.main(words) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("nemotron3 train: "))
    assert named in line and "from decoder.final_norm.weight back (bucket #0); the same command" in line
    if not more:
        assert f"step {int(named[5]) - 1} is saved (see " in line
        assert cli.main(["check", "--full", str(output)]) == 0


def test_the_end_of_train_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else the ranks say when they end."""
    progress = TrainProgress()
    for line in (
        "[before the start of training step] datetime: 2026-11-22 15:57:46.788281 \n",
        "megatron_nemotron3: step 7, rank 3: NaN in the loss; cure\n",
        "megatron_nemotron3: step 7, rank 1: NaN in the loss; cure\n",
        "[rank0]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:25482\n",
        "  exitcode  : -15 (pid: 13174)\n",
    ):
        progress.line(line)
    assert progress.cause(tmp_path, 1) == "step 7, rank 3, rank 1: NaN in the loss; cure"
    assert progress.on_disk(6, complete=False) == "step 6 is saved"
    assert capsys.readouterr().out == ""
