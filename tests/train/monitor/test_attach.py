"""When monitors are on, when they are not, and what is said about it."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_nemotron3 import run as launcher
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.train.monitor import settings
from tests.support.distributed import run_launcher
from tests.support.models import build_hybrid


def build(pattern: str = "ME", monitor: str = "1", tracker: str = "", **overrides: Any) -> tuple[str, int]:
    """(class of the tracker, number of watched layers) with this model built."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_logging

    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    if not parallel_state.model_parallel_is_initialized():
        initialize()
    if tracker:
        moe_logging.set_moe_metrics_tracker(type(tracker, (moe_logging.MoEMetricsTracker,), {})())
    with settings.monitoring(int(monitor)):
        model = build_hybrid(pattern, nemotron3_torch_stack_spec, **overrides)
    found = moe_logging.get_moe_metrics_tracker()
    layers = len(found.monitor.layers) if hasattr(found, "monitor") else 0
    del model
    return type(found).__name__, layers


def differ_by_rank() -> str:
    import torch

    initialize()
    try:
        build(monitor=str(10 * torch.distributed.get_rank()))
    except RuntimeError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize(
    ("arguments", "found", "said"),
    [
        (("ME*/*E/*E",), ("MonitorTracker", 3 + 4), ""),  # two blocks of two
        (("M*-",), ("MoEMetricsTracker", 0), "NEMOTRON3_MONITOR has no effect: the model has no MoE layer"),
        (("ME", "1", "Theirs"), ("Theirs", 0), "a Theirs was set as metric tracker before"),
    ],
    ids=["on", "a model without experts", "somebody else's tracker stays"],
)
def test_what_is_attached(
    arguments: tuple[str, ...], found: tuple[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_distributed(build, 1, *arguments) == [found]
    assert said in capsys.readouterr().out


def test_ranks_that_differ_are_told_so() -> None:
    """Or the first report would hang. The rank that comes second says it, and its error ends the job."""
    messages = [message for message in run_distributed(differ_by_rank, 2) if message]
    assert len(messages) == 1
    assert re.match(r"NEMOTRON3_MONITOR is (0 on rank 0 and 10|10 on rank 1 and 0) on another", messages[0])


def two_models() -> list[list[str]]:
    """Names of the watched layers, with two models one after the other."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    initialize()
    names = []
    for pattern in ("MEE", "E"):
        with settings.monitoring(1):
            model = build_hybrid(pattern, nemotron3_torch_stack_spec)
        names.append([layer.name for layer in get_moe_metrics_tracker().monitor.layers])
        del model
        gc.collect()
    return names


def test_a_model_that_is_gone_is_forgotten() -> None:
    assert run_distributed(two_models, 1) == [[["layer_001", "layer_002", "layer_003"], ["layer_001"]]]


@pytest.mark.parametrize("text", ["x", "-1", "٣"])
def test_what_is_no_interval(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMOTRON3_MONITOR", text)
    with pytest.raises(ValueError, match="NEMOTRON3_MONITOR=.*0 for off"):
        settings._INTERVAL.read()


@pytest.mark.parametrize(("log_interval", "expected"), [(100, 100), (10, 10), (7, 14), (1, 10)])
def test_the_log_interval_is_the_default(
    log_interval: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a measurement that often is cheap; else the next line of the log that is far enough away."""
    options = mock.Mock(get_args=lambda: mock.Mock(log_interval=log_interval))
    monkeypatch.setitem(__import__("sys").modules, "megatron.training.global_vars", options)
    with settings.monitoring(None):
        assert settings.interval() == expected and not settings.requested()


def test_the_launcher_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option counts before the variable, which is read once."""
    words = ["--monitor", "12", "--device=cpu", "x.py", "--monitor", "y"]
    assert launcher.split_arguments(words)[:4] == ("cpu", 12, "x.py", ["--monitor", "y"])
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom megatron_nemotron3.train.monitor import settings\n"
        "found = settings.interval()\nos.environ['NEMOTRON3_MONITOR'] = '5'\n"
        "print(found, settings.interval())\n"
    )
    monkeypatch.setenv("NEMOTRON3_MONITOR", "3")
    for options, interval in ((["--monitor", "12"], 12), ([], 3)):
        assert f"{interval} {interval}\n" in run_launcher([*options, "--device", "cpu", str(script)], 1)
    for wrong, said in (
        (["--monitor=-1", "x.py"], "interval in iterations, or 0 for off"),
        (["--monitor", "often", "x.py"], "invalid int value: 'often'"),
    ):
        with pytest.raises(SystemExit) as end:
            launcher.split_arguments(wrong)
        assert end.value.code == 2
        assert said in capsys.readouterr().err
