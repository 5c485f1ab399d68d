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


@pytest.mark.full
def test_padded_packs_against_packs_without_padding() -> None:
    done = run("train_step.py", "--packed", "--lengths", "64", "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    ((_, row),) = tables(done.stdout)
    assert row[0] == "64" and all(number(cell) > 0 for cell in row[1:])


def test_parts_of_a_step() -> None:
    done = run("parts.py", "--lengths", "64", "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    ((header, *rows),) = tables(done.stdout)
    milliseconds = {row[0]: number(row[1]) for row in rows}
    assert header[1] == "64 tokens"
    assert {"scan", "convolution", "norms", "experts", "dense products", "attention"} < set(milliseconds)
    assert milliseconds["whole step"] >= milliseconds["scan"] > 0
    # Figures are printed without digits behind the point, so sums are off by a few ms.
    counted = sum(milliseconds[name] for name in ("dense products", "attention", "products of the experts"))
    assert milliseconds["limit"] == pytest.approx(counted, abs=4)
    assert milliseconds["experts"] >= milliseconds["products of the experts"] > 0
    whole, limit, scan = (milliseconds[name] for name in ("whole step", "limit", "products of the scan"))
    assert milliseconds["whole step / limit"] == pytest.approx(whole / limit, rel=0.1)
    assert 1 < milliseconds["whole step / (limit + products of the scan)"] < whole / limit and scan > 0


def test_every_script_is_known() -> None:
    assert {"memory.py", "ssd.py", "train_step.py", "gpu.py", "gpu_report.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


@dataclass(frozen=True)
class Case:
    script: str
    options: tuple[str, ...]
    #: Of the table, header included.
    first_column: tuple[str, ...]
    #: A column of figures above zero.
    figures: str


ONE_LENGTH = ("--lengths", "64", "--repetitions", "1")
SMALL = {
    "converter": Case(
        "convert.py",
        ("--quick", "--gigabytes", "0.06", "--workers", "1", "--without-transformers"),
        ("side", "cp hf", "cp megatron", "from-hf, 1 worker", "to-hf, 1 worker"),
        "warm MB/s",
    ),
}
LARGER = {
    "ours": Case("train_step.py", ("--ours-only", *ONE_LENGTH), ("tokens", "64"), "ours tok/s"),
    "nvfp4": Case("nvfp4.py", ("--quick",), ("model", "super-tiny"), "plain ms"),
    "whole model": Case("train_step.py", ONE_LENGTH, ("tokens", "64"), "HF tok/s"),
    "scan": Case(
        "ssd.py", ("--quick", "--repetitions", "1"), ("tokens", *3 * ["512"], *3 * ["2048"]), "tok/s"
    ),
    "memory": Case("memory.py", ("--quick",), ("kind", "M", "*", "E", "-"), "2048 MiB"),
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
    column = header.index("ours")
    for row in rows:
        assert number(row[column]) == number(row[header.index("bound")]) and "ok" in row
