"""Checks the GPU against torch's build and the needs of each precision.

CUDA is queried in a separate process, because it stays initialized for the life of a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_nemotron3.cli.doctor.finding import DoctorFinding
from megatron_nemotron3.precision.formats import EMULATED, FORMATS, Capability, runnable

_QUERY = """
import json, torch
found = {"built": torch.version.cuda, "architectures": []}
if torch.version.cuda:
    found["architectures"] = torch.cuda.get_arch_list()
found["available"] = torch.cuda.is_available()
if found["available"]:
    found["devices"] = [
        {
            "name": p.name,
            "capability": [p.major, p.minor],
            "gib": round(p.total_memory / 2**30, 1),
        }
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    try:
        a = torch.ones(64, 64, device="cuda")
        (a @ a).sum().item()
    except Exception as problem:
        found["problem"] = str(problem).splitlines()[0]
elif torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as problem:
        found["problem"] = str(problem).splitlines()[0].split(". ")[0]
print(json.dumps(found))
"""
#: Seconds for torch to answer.
TIMEOUT = 180
#: Precision -> (test of the compute capability, text).
PRECISIONS: dict[str, tuple[Callable[[Capability], bool], str]] = {
    "bf16": (lambda c: c >= (8, 0), "8.0"),
    **{fmt.name: (fmt.runs_on, fmt.needs) for fmt in FORMATS.values()},
}


def query_cuda() -> dict[str, Any]:
    """Query torch about CUDA on this machine."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _QUERY], capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as problem:
        raise RuntimeError(f"torch did not answer in {TIMEOUT} s") from problem
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no answer"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(found: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Findings from the result of `query_cuda`."""
    if not found["built"]:
        yield DoctorFinding("gpu", "warning", "torch was built without CUDA: CPU runs only")
        return
    if not found["available"]:
        why = found.get("problem", "no device")
        yield DoctorFinding(
            "gpu", "absent", f"torch for CUDA {found['built']} finds no usable GPU ({why}): CPU runs only"
        )
        return
    for device in found["devices"]:
        capability = tuple(device["capability"])
        name = f"{device['name']}, {device['gib']} GiB, compute capability {capability[0]}.{capability[1]}"
        if not _has_kernels_for(capability, found["architectures"]):
            yield DoctorFinding(
                "gpu",
                "error",
                f"{name}: torch has kernels for {', '.join(found['architectures'])} only",
                f"install a torch with sm_{capability[0]}{capability[1]} (this one: CUDA {found['built']})",
            )
        elif problem := found.get("problem"):
            yield DoctorFinding("gpu", "error", f"{name}: {problem}")
        else:
            yield DoctorFinding("gpu", "ok", name)
    major, minor = found["devices"][0]["capability"]
    first = (major, minor)
    for precision, (fits, needs) in PRECISIONS.items():
        if fits(first):
            yield DoctorFinding(precision, "ok", "trains on this GPU")
        else:
            cure = f"this GPU trains in {', '.join(runnable(first))}"
            if precision in EMULATED:
                cure += "; --emulate computes it on any device, slowly"
            yield DoctorFinding(precision, "absent", f"needs compute capability {needs}", cure)


def _has_kernels_for(capability: tuple[int, ...], architectures: list[str]) -> bool:
    """Whether a build has a binary (sm) for the same major version, or PTX, not newer than the GPU."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = "".join(c for c in digits if c.isdigit())
        major, minor = int(number[:-1]), int(number[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:
            return True
    return False


def findings() -> list[DoctorFinding]:
    """Findings about the GPU of this machine."""
    try:
        return list(judge(query_cuda()))
    except RuntimeError as problem:
        return [DoctorFinding("gpu", "error", str(problem))]
