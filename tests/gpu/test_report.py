"""Tables of the GPU measurements (benchmarks/gpu_report.py)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measurements.md"
VERSIONS = {"torch": "2.11.0", "driver": "580.159.04"}
MODEL = {
    "kind": "model",
    "title": "Nano",
    "pattern": "ME*",
    "experts": 64,
    "published_experts": 128,
    "topk": 6,
    "parameters": 10**9,
    "tokens": 8192,
    "flops_per_token": 9.894e9,
}


@pytest.fixture(scope="module")
def report() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu_report")


def parity(error: float = 0.0, one: float = 0.0) -> dict[str, Any]:
    """Sketches of three tensors, by so much unlike those of `parity()`; one of them by `one` more."""
    gradients = {name: [3.0 * (1 + error), 4.0] for name in ("a", "b", "c")}
    gradients["b"] = [3.0 * (1 + error), 4.0 + 5.0 * one]
    return {"kind": "parity", "tokens": 8, "loss": 2.0, "logits": [1.0 + error, 0.0], "gradients": gradients}


def speed(seconds: float) -> dict[str, Any]:
    numbers = {"peak": 2**31, "held": 2**30, "weights": 2**32, "waits": 3, "loss": 11.5}
    return {"kind": "speed", "tokens": 8192, "seconds": [seconds, seconds, 9.0], **numbers}


def results(report: Any, path: Path, small: bool = False) -> Any:
    found = report.Results(path)
    found.add(
        {
            "kind": "run",
            "device": "NVIDIA H200",
            "small": small,
            "commit": "abc",
            "command": "c",
            "versions": VERSIONS,
        }
    )
    return found


def stage(results: Any, name: str, *rows: dict[str, Any], status: str = "ok", error: str = "") -> None:
    results.add(
        {"kind": "stage", "stage": name, "status": status, "seconds": 7.0, "error": error, "rows": list(rows)}
    )


def cells(lines: list[str], begins: str) -> list[str]:
    (row,) = [line for line in lines if line.startswith(f"| {begins} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_steps(report: Any, tmp_path: Path) -> None:
    """Rates, MFU and ratios by hand; a side that computes something else is marked."""
    found = results(report, tmp_path / "r")
    stage(found, "versions", {"kind": "rates", "matmul_tflops": 791.52, "copy_gbytes": 4300.0})
    stage(found, "step.nano.hf", MODEL, parity(), speed(1.0))
    stage(found, "step.nano.mamba-ssm", MODEL, parity(0.01), speed(0.4096))
    stage(found, "step.nano.plain", MODEL, parity(0.01, one=0.3), speed(0.5))
    stage(found, "step.nano.te", MODEL, parity(), status="memory", error="OutOfMemoryError: much")
    lines = report.report(found)
    # 9.894 GFLOP a token, 20,000 tokens/s: 197.88 TFLOP/s, a fifth of 989.4 and a quarter of 791.52
    mamba = cells(lines, "torch backend with mamba-ssm's scan")
    assert mamba[1:9] == ["20,000", "409.6", "20.0", "25.0", "2", "1", "3", "11.5000"]
    assert mamba[9] == "1.0e-02" and mamba[11:] == ["agrees", "2.44", "-"]
    plain = cells(lines, "torch backend without mamba-ssm")
    assert plain[11] == "**differs**" and "(b)" in plain[10]
    te = cells(lines, "stock TransformerEngine spec")
    assert te[1:3] == ["-", "-"] and te[11] == "agrees"  # it died after the comparison
    assert cells(lines, "step.nano.te") == ["step.nano.te", "memory", "7", "OutOfMemoryError: much"]
    text = "\n".join(lines)
    assert "64 experts top-6 (published: 128; more do not fit)" in text
    assert all(word in text for word in ("NVIDIA H200", "driver 580.159.04", "commit abc", "`c`"))


def test_a_missing_or_broken_gradient_differs(report: Any) -> None:
    compare = importlib.import_module("gpu_compare")
    assert compare.agrees(0.01, 0.01, 0.1) and not compare.agrees(0.05, 0.01, 0.1)
    found = parity()
    del found["gradients"]["c"]
    assert compare.differences(found, parity())[1] == math.inf
    broken = parity()
    broken["gradients"]["a"] = [math.nan, 1.0]
    *numbers, name = compare.differences(broken, parity())
    assert name == "a" and not compare.agrees(*numbers)


def test_a_page_is_written_between_its_markers(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nafter\n")
    found = results(report, tmp_path / "r")
    stage(found, "boundary", {"kind": "pack", "pieces": 1, "bytes": 2**20, "pack": 3e12, "unpack": 2e12})
    for _ in range(2):
        assert report.main([str(found.path), "--page", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert "| 1 | 1.0 | 3,000 | 2,000 |" in text and text.count(report.BEGIN) == 1


def test_a_rehearsal_is_never_written(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    before = page.read_text()
    found = results(report, tmp_path / "r", small=True)
    stage(found, "step.nano.hf", MODEL, parity(), speed(1.0))
    assert report.main([str(found.path), "--page", str(page)]) == 0
    assert page.read_text() == before
    output = capsys.readouterr()
    assert output.out.startswith("A rehearsal with tiny models: no figure here is a measurement. ")
    assert "is left as it is" in output.err


def test_the_real_page_has_the_markers(report: Any) -> None:
    """And says that nothing has run, as long as there is nothing between them."""
    text = PAGE.read_text(encoding="utf-8")
    between = report.put(text, []).partition(report.BEGIN)[2]
    assert between.strip().startswith(report.END)
