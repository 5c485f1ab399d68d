"""The scripts of benchmarks/ run and print their tables. No figure is judged by its size."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import run_python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: Files that are run; the others are imported by them.
SCRIPTS = sorted(p.name for p in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in p.read_text())


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in a process forked with Megatron imported."""
    return run_python([str(BENCHMARKS / script), *arguments], Path.cwd(), timeout=900, **environment)


def tables(output: str) -> list[list[list[str]]]:
    """The Markdown tables of an output: their rows, the header first, the rule left out."""
    found: list[list[list[str]]] = [[]]
    for line in output.splitlines():
        if re.fullmatch(r"\|[-:|]+\|", line):
            continue
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_a_step_against_its_limit() -> None:
    """Products and attention are a part of the step, and so are those with the products of the scan."""
    done = run("train_step.py", "--limit", "--lengths", "64", "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    ((header, row),) = tables(done.stdout)
    found = dict(zip(header, map(number, row), strict=True))
    step, limit, scan = found["step, CPU ms"], found["limit"], found["products of the scan"]
    assert found["tokens"] == 64 and limit > 0 and scan > 0
    assert found["step / limit"] == pytest.approx(step / limit, rel=0.1)
    assert 1 < found["step / (limit + scan)"] < step / limit


def test_every_script_is_known() -> None:
    assert {"convert.py", "generate.py", "train_step.py", "gpu.py", "gpu_pack.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


@dataclass(frozen=True)
class Case:
    script: str
    options: tuple[str, ...]
    #: Of the table, header included. Empty: any that has rows.
    first_column: tuple[str, ...]
    #: A column of figures above zero.
    figures: str


ONE_LENGTH = ("--lengths", "64", "--repetitions", "1")
PASSES = tuple(f"pass over {n}" for n in (1, 2, 3, 4, 8))
STEPS = tuple(f"step with {n} drafts" for n in (0, 1, 2, 3, 5, 7))
SMALL = {
    "published runs": Case("plan_error.py", (), (), "tokens/s/GPU"),
}
LARGER = {
    "drafts": Case("generate.py", ("--small", "--passes", "0"), ("what", *PASSES, *STEPS), "of one token"),
    "nvfp4": Case("nvfp4.py", ("--quick",), ("model", "super-tiny"), "plain ms"),
    "whole model": Case("train_step.py", ONE_LENGTH, ("tokens", "64"), "HF tok/s"),
    "monitor": Case(
        "monitor.py", ("--lengths", "512", "--repetitions", "1"), ("tokens", "512"), "between ms"
    ),
    "generate": Case(
        "generate.py",
        ("--context", "16", "--new", "8", "--rounds", "1"),
        ("side", "transformers", "plain"),
        "tokens/s",
    ),
    "nvfp4 of a GPU": Case("nvfp4.py", ("--small",), ("quantizer", "plain", "torch", "compiled"), "ratio"),
    "rows of a GPU": Case("boundary_rows.py", (), ("pieces", "1", "16", "256"), "unpack GB/s"),
    "refit": Case("refit_plan.py", (), ("model", "super", "super", "ultra"), "steps"),
    "convert": Case(
        "convert.py",
        ("--quick", "--gigabytes", "0.06", "--workers", "2"),
        (
            *("side", "cp hf", "cp megatron", "from-hf, 1 worker", "to-hf, 1 worker"),
            *("from-hf, 2 workers", "to-hf, 2 workers", "save_pretrained"),
        ),
        "warm MB/s",
    ),
    "plans": Case("convert_shapes.py", ("--models", "nano"), ("model", "nano", "nano"), "RSS MiB"),
}


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(name, marks=pytest.mark.full) for name in LARGER)])
def test_table_is_printed(case: str) -> None:
    expected = (SMALL | LARGER)[case]
    done = run(expected.script, *expected.options)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    header, *rows = tables(done.stdout)[0]
    assert rows and expected.figures in header
    if expected.first_column:
        assert (header[0], *(row[0] for row in rows)) == expected.first_column
    assert all(number(row[header.index(expected.figures)]) > 0 for row in rows)


@pytest.mark.full
def test_boundary_reaches_its_bound() -> None:
    # Not forked: its ranks send objects of its own classes, which pickle finds in a real `__main__` only.
    words = [sys.executable, str(BENCHMARKS / "boundary.py"), "--quick"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ((header, *rows),) = tables(done.stdout)
    assert len(rows) == 18  # both ways of nine cases
    for row in rows:
        found = dict(zip(header, row, strict=True))
        assert number(found["ours"]) == number(found["bound"]) and found["ours is"] == "ok"
