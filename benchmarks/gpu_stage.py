"""The stages of gpu.py: `gpu_stage.py NAME [--device cpu --small]` runs one of them and prints its rows.

gpu.py starts each in a process of its own, with a file for the rows. A row is written when it is known, so
that a stage that dies later leaves what it had measured. Standard output has rows only; what a stage or the
programs it starts print goes to standard error. Exit status: 0, 3 for a stage that cannot run here,
4 for a lack of memory, 1 for any other error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from common import ROOT, parser
from gpu import OUT_OF_MEMORY, SIDES, SKIPPED, STAGES, python_path
from gpu_setting import Setting, Skipped

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "mamba-ssm")
PACKAGES += ("causal-conv1d", "flash-attn")
#: Sides of the matrix product whose rate is measured, and bytes of the copy.
MATRIX, COPY = 8192, 4 * 2**30
#: Where tests marked gpu are.
GPU_TESTS = ("tests/gpu", "tests/inference/generate", "tests/precision/test_golden.py")
GPU_TESTS += ("tests/boundary/test_multimodule.py",)
#: Tests between two rows with the number of results.
EVERY = 20


def versions(setting: Setting) -> None:
    """The doctor's findings, and what the device reaches: rates that other figures are compared with."""
    words = [sys.executable, "-m", "megatron_nemotron3", "doctor", "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": python_path()}
    )
    print(done.stdout, done.stderr)
    for section, findings in json.loads(done.stdout).items():
        for finding in findings:
            setting.emit("doctor", section=section, **finding)
    setting.emit("rates", **rates(setting.device, setting.small))


def rates(device: str, small: bool) -> dict[str, float]:
    """TFLOP/s of a BF16 matrix product of random numbers, GB/s of a copy (read and written)."""
    import torch
    from nvfp4_model import seconds

    n, size = (256, 2**20) if small else (MATRIX, COPY)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(function: Callable[[], Any]) -> float:
        return min(seconds(function, device) for _ in range(10))

    return {
        "matmul_tflops": 2 * n**3 / best(lambda: a @ b) / 1e12,
        "copy_gbytes": 2 * size / best(lambda: target.copy_(source)) / 1e9,
    }


#: A line of `pytest -v`, with and without pytest-xdist.
_RESULT = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_WITH_WORKERS = rf"\[gw\d+\] +\[ *\d+%\] (?P<a>{_RESULT}) (?P<b>tests/.+)"
_TEST = re.compile(rf"^(?:{_WITH_WORKERS}|(?P<c>tests/.+?) (?P<d>{_RESULT})\b.*\[ *\d+%\])")


def pytest_words(small: bool) -> list[str]:
    """The command of the tests."""
    words = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    if small:
        return [*words, "tests/gpu/test_kernels.py"]
    workers = ["-n", "6"] if importlib.util.find_spec("xdist") is not None else []
    return [*words, *workers, *GPU_TESTS]


def tests(setting: Setting) -> None:
    """`pytest -m gpu`, with the numbers of results so far after every few tests."""
    process = subprocess.Popen(
        pytest_words(setting.small),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if match := _TEST.search(line):
            name, result = (match["b"] or match["c"]).strip(), match["a"] or match["d"]
            counts[result.lower()] = counts.get(result.lower(), 0) + 1
            if result in ("FAILED", "ERROR"):
                failed[name] = ""
            if sum(counts.values()) % EVERY == 0:
                setting.emit("tests", **counts, ended=False)
        elif match := re.match(r"(?:FAILED|ERROR) (tests/\S+.*?) - (.*)", line):
            failed[match[1]] = match[2]
    code = process.wait()
    setting.emit("tests", **counts, ended=True)
    for name, why in failed.items():
        setting.emit("failure", test=name, why=why)
    if failed or code not in (0, 5):
        raise RuntimeError(f"{len(failed)} tests failed, pytest ended with status {code}")
    if not setting.small and not counts.get("passed"):
        raise RuntimeError("no test passed: none ran")


def step(setting: Setting, width: str, side: str) -> None:
    from gpu_step import run

    run(setting, width, side)


def other(module: str, function: str) -> Callable[[Setting], None]:
    """A stage in a module of its own, which is imported when the stage runs."""

    def run(setting: Setting) -> None:
        getattr(importlib.import_module(module), function)(setting)

    return run


BODIES: dict[str, Callable[[Setting], None]] = {
    "versions": versions,
    "tests": tests,
    "nvfp4": other("gpu_nvfp4", "run"),
    "generate.plain": other("gpu_generate", "plain"),
    "generate.drafts": other("gpu_generate", "drafts"),
    "prefill": other("gpu_generate", "prefill"),
    "boundary": other("gpu_boundary", "run"),
    "plan": other("gpu_plan", "run"),
}


def body(name: str) -> Callable[[Setting], None]:
    """The function of a stage."""
    if name.startswith("step."):
        _, width, side = name.split(".")
        assert side in SIDES
        return lambda setting: step(setting, width, side)
    return BODIES[name]


def identify(device: str) -> int:
    """Print the device and the versions as JSON."""
    import torch

    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if importlib.util.find_spec(name.replace("-", "_")) is not None:
                found[name] = "sources"
    about: dict[str, Any] = {"device": "CPU", "versions": found}
    if device == "cuda":
        if not torch.cuda.is_available():
            said = "no CUDA device here: run this on a GPU, or rehearse it with --device cpu --small"
            print(said, file=sys.stderr)
            return 2
        found["CUDA"] = str(torch.version.cuda)
        properties = torch.cuda.get_device_properties(0)
        about["device"] = properties.name
        about["memory"] = properties.total_memory
        if shutil.which("nvidia-smi"):
            words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
            done = subprocess.run(words, capture_output=True, text=True)
            found["driver"] = done.stdout.strip() or "unknown"
    print(json.dumps(about))
    return 0


def run_stage(name: str, setting: Setting) -> int:
    """Run a stage; return its exit status."""
    try:
        body(name)(setting)
    except Skipped as missing:
        setting.write({"error": str(missing)})
        return SKIPPED
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        setting.write({"error": text[:300]})
        # torch's OutOfMemoryError, without an import of torch
        no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        return OUT_OF_MEMORY if no_memory else 1
    return 0


def main() -> int:
    options = parser(__doc__)
    options.add_argument("name", choices=["identify", *(stage.name for stage in STAGES)])
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--small", action="store_true")
    options.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.name == "identify":
        return identify(args.device)
    if args.rows is not None:
        from megatron_nemotron3.common.processes import end_with_parent

        end_with_parent(os.getppid())  # gpu.py may be killed
    setting = Setting(args.device, args.small, args.rows, args.results, output=sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):
        return run_stage(args.name, setting)


if __name__ == "__main__":
    sys.exit(main())
