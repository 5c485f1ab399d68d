"""Intervals by Student's t: against printed tables, closed forms, earlier numbers, and by hand."""

from __future__ import annotations

import importlib
import json
import math
import runpy
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_nemotron3.common.output import interval, paired
from tests.support.programs import run_python

ROOT = Path(__file__).parent.parent.parent
#: t of 95 % two-sided, from the tables of any textbook.
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423, 120: 1.9799}


def spread(freedom: int, mean: float = 0.0) -> list[float]:
    """`freedom` + 1 values about a mean."""
    return [mean + number - freedom / 2 for number in range(freedom + 1)]


def error_of(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_of_the_tables(freedom: int) -> None:
    values = spread(freedom)
    assert interval(values).half_width / error_of(values) == pytest.approx(TABLE[freedom], abs=5e-5)


def test_closed_forms() -> None:
    """One degree of freedom is Cauchy's distribution, and two have an algebraic one."""
    for mean in (0.001, 0.1, 0.5, 1.0, 2.0, 4.3, 60.0, 1e6):
        t = mean / error_of(spread(1))
        assert interval(spread(1, mean)).p == pytest.approx(2 * math.atan(1 / t) / math.pi, rel=1e-12)
        t = mean / error_of(spread(2))
        assert interval(spread(2, mean)).p == pytest.approx(
            2 / (t * t + 2 + t * math.sqrt(t * t + 2)), rel=1e-12
        )
    assert interval(spread(3)).p == 1


def test_scipys_paired_test() -> None:
    from scipy import stats

    a, b = [3.1, 2.9, 3.4, 3.0, 3.3], [3.0, 2.7, 3.5, 2.8, 3.1]
    for level in (0.5, 0.9, 0.95, 0.999):
        found = paired(a, b, level)
        expected = stats.ttest_rel(a, b)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
        low, high = expected.confidence_interval(level)
        ends = found.mean - found.half_width, found.mean + found.half_width
        assert ends == pytest.approx((low, high), rel=1e-9)


def test_pairs_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), whatever the seeds have in common."""
    found = paired([101.0, -48.0, 1003.0], [100.0, -50.0, 1000.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert abs(found.mean) < found.half_width
    assert found.p == pytest.approx(0.0742, abs=5e-5)
    assert f"{found:+.2f}" == "+2.00 ± 2.48"


def test_values_without_an_interval() -> None:
    one = interval([0.5])
    assert (one.half_width, one.p) == (math.inf, 1.0)
    assert f"{one:+.1f}" == "+0.5 (n = 1)"
    same = interval([0.5, 0.5])
    assert (same.mean, same.half_width, same.p) == (0.5, 0.0, 0.0)
    assert interval([0.0, 0.0]).p == 1
    with pytest.raises(ValueError, match="3 and 2 values"):
        paired([1, 2, 3], [1, 2])
    for values in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite values"):
            interval(values)
    with pytest.raises(ValueError, match="level 1: use one between 0 and 1"):
        interval([1.0, 2.0], 1)


def test_the_ablation_calls_nothing_clear_that_three_seeds_do_not_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gaps of 0.29, 0.49 and 0.69 % are more than four standard errors from 0, and p is 0.05."""
    base = [3.7, 3.9, 4.0]
    gaps = {"recipe": (0.29, 0.49, 0.69), "every layer": (0.6, 0.9, 1.5)}
    runs = {name: [b * (1 + g / 100) for b, g in zip(base, of)] for name, of in gaps.items()}
    runpy.run_path(str(ROOT / "examples/nvfp4_ablation.py"))["report"]({"baseline": base, **runs})
    text = capsys.readouterr().out
    assert "| +0.49 ± 0.50 |" in text
    assert "Below 0.025, which is 0.05 for 2 comparisons: none." in text


def test_a_study_compares_with_its_first_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds that are in the file are not run; a line of other steps does not count."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    study = importlib.import_module("paired_studies")
    losses = {1: (5.0, 4.0), 2: (5.5, 4.6), 3: (5.2, 4.1)}
    file = tmp_path / "results.jsonl"
    key = {"study": "distill", "teacher_steps": 4, "steps": 2}
    lines = [
        {**key, "seed": seed, "results": {"plain": {"loss": a}, "taught": {"loss": b}}}
        for seed, (a, b) in losses.items()
    ]
    other = {**key, "steps": 9, "seed": 1, "results": {"plain": {"loss": 9.0}}}
    file.write_text("".join(json.dumps(line) + "\n" for line in (*lines, other)))
    lab = SimpleNamespace(teacher_steps=4, steps=2)
    results = study.run("distill", lab, range(1, 4), file)
    study.report("distill", results)
    assert "| taught | 4.2333 | -1.0000 ± 0.2484 | 0.0033 |" in capsys.readouterr().out
    study.report("distill", results, "taught")
    assert "| plain | 5.2333 | +1.0000 ± 0.2484 | 0.0033 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="distill has no arm 'x': use one of plain, taught"):
        study.report("distill", results, "x")


@pytest.mark.full
def test_the_studies_run_and_go_on_where_they_ended(tmp_path: Path) -> None:
    """Two seeds of each in a few steps: all arms are there, and a finished seed is read, not run again."""
    words = ["--teacher-steps", "3", "--steps", "2", "--output", str(tmp_path)]
    first = run_python(["examples/paired_studies.py", "--seeds", "1", *words], ROOT, timeout=1800)
    assert first.returncode == 0, first.stderr[-2000:]
    done = run_python(["examples/paired_studies.py", "--seeds", "2", *words], ROOT, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "seed 2: " in done.stdout and "seed 1: " not in done.stdout
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows if ", 2 seeds" in row[0]] == [
        "| distill, 2 seeds",
        "| stored, 2 seeds",
        "| prune, 2 seeds",
        *["| parts, 2 seeds"] * 2,
        *["| layers, 2 seeds"] * 2,
        "| experts, 2 seeds",
        *["| qad, 2 seeds"] * 2,
        *["| boost, 2 seeds"] * 5,
        *["| boost-losses, 2 seeds"] * 5,
    ]
    assert all(" ± " in row[2] for row in rows if len(row) == 4 and row[2].startswith(("+", "-")))
    losses = [json.loads(line)["results"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(losses) == 18
    assert all(0 <= number < 9 for one in losses for value in one.values() for number in value.values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "words", "arms"),
    [
        ("nvfp4_ablation", ["--only", "recipe", "every layer"], ["baseline", "recipe", "every layer"]),
        ("latent_moe_study", [], ["baseline", "eff", "acc"]),
    ],
)
def test_the_other_studies_do_so_too(tmp_path: Path, example: str, words: list[str], arms: list[str]) -> None:
    given = [f"examples/{example}.py", "--steps", "2", "--output", str(tmp_path), *words, "--seeds"]
    for seeds in "1", "2":
        done = run_python([*given, seeds], ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [f"| {arm}" for arm in arms]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [tuple(line[:3]) for line in lines] == [(arm, seed, 2) for seed in (1, 2) for arm in arms]
