"""The stages of the GPU measurements on a CPU, with tiny models. No figure is judged by its size."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu")


def rows_of(name: str, *words: str, **environment: str) -> list[dict[str, Any]]:
    """The rows that a stage prints, in a process forked with Megatron imported."""
    program = [str(BENCHMARKS / "gpu_stage.py"), name, "--device", "cpu", "--small", *words]
    done = run_python(program, Path.cwd(), timeout=300, **environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]  # standard output has nothing else


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    return [row["kind"] for row in rows]


def test_a_training_step() -> None:
    rows = rows_of("step.super.plain")
    assert kinds(rows) == ["model", "settings", "parity", "speed", "profile"]
    _, settings, parity, speed, profile = rows
    assert settings["text"].startswith("backend torch")
    assert all(len(sketch) == 61 and any(sketch) for sketch in parity["gradients"].values())
    assert {name.split(".")[3] for name in parity["gradients"] if "layers" in name} == {"norm", "mixer"}
    assert abs(speed["loss"] - 7.6) < 1.5 and min(speed["seconds"]) > 0  # 2,048 tokens: ln is 7.6
    assert speed["weights"] > 0 and speed["waits"] >= 0 and len(profile["operations"]) == 20


def test_generation_with_drafts() -> None:
    """MTP agrees with the model: drafts are accepted, and the text stays the same."""
    model, *rows = rows_of("generate.drafts")
    assert model["dtype"] == "bfloat16"
    assert [row["drafts"] for row in rows] == list(range(8))
    assert all(row["equal"] == row["new"] and row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["acceptance_length"] == 1.0 and rows[7]["acceptance_length"] > 3
    assert rows[0]["break_even"] == 1.0


def test_what_is_not_installed_is_skipped() -> None:
    """With the reason."""
    program = [str(BENCHMARKS / "gpu_stage.py"), "step.nano.te", "--device", "cpu", "--small"]
    done = run_python(program, Path.cwd(), timeout=300)
    assert done.returncode == 3, done.stderr[-2000:]
    assert "install" in json.loads(done.stdout.splitlines()[-1])["error"]


def test_without_a_gpu_nothing_begins(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = run_python([str(BENCHMARKS / "gpu.py"), "--results", str(path)], Path.cwd())
    assert done.returncode == 2 and not path.exists() and not done.stdout
    assert done.stderr.startswith("gpu.py: no CUDA device here") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("width", "backend"), [("nano", "torch"), ("super", "te")])
def test_the_plan_of_a_measured_step(gpu: Any, width: str, backend: str) -> None:
    """At full width: figures of the size that an H200 can have; none for an unknown device."""
    plan, model = importlib.import_module("gpu_plan"), importlib.import_module("gpu_model")
    speed = {"tokens": 8192, "held": 7, "seconds": [0.3, 0.1, 0.2]}
    h200 = plan.gpu_of("NVIDIA H200")
    row = plan.compared(model.stack(width), backend, speed, h200)
    flops = sum(model.flops_per_token(model.stack(width), 8192).values()) * 8192
    assert flops / h200.bf16 < row["planned_seconds"] < 1.0
    assert 2**30 < row["planned_bytes"] < h200.memory
    assert (row["bytes"], row["seconds"]) == (7, 0.2)
    assert plan.gpu_of("NVIDIA H100 80GB HBM3").name == "h100" and plan.gpu_of("CPU") is None
    assert plan.compared(model.stack(width), backend, speed, None)["planned_seconds"] is None


@pytest.mark.full
@pytest.mark.parametrize("name", ["generate.plain", "prefill", "boundary", "nvfp4", "versions", "tests"])
def test_other_stages(name: str) -> None:
    expected = {
        "generate.plain": {"model", "decode"},
        "prefill": {"model", "one pass", "prefill"},
        "boundary": {"pack", "align"},
        "nvfp4": {"model", "step", "linear"},
        "versions": {"doctor", "rates"},
        "tests": {"tests"},
    }
    assert set(kinds(rows_of(name))) == expected[name]
