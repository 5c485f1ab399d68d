"""Findings of the doctor about broken packages, versions, GPUs and models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.cli import packages
from megatron_nemotron3.cli.doctor import emulation, judge, step_findings
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.train import build

GOOD = {"python": "3.12.1", "torch": "2.11.0", "megatron-core": "0.19.2", "triton": "3.6.0"}


def test_a_good_environment() -> None:
    assert not [finding for finding in packages.check(GOOD) if finding.level == "error"]
    assert {f.subject: f.level for f in packages.check(GOOD)}["mamba-ssm"] == "absent"


@pytest.mark.parametrize(
    ("change", "subject", "level", "word"),
    [
        ({"python": "3.11.9"}, "python", "error", "Python 3.12"),
        ({"python": "3.10.4", "megatron-core": None}, "python", "error", "Python 3.12"),
        ({"megatron-core": "0.18.2"}, "megatron-core", "error", "older than 0.19"),
        ({"triton": None}, "triton", "error", "pip install triton"),
        ({"torch": None}, "torch", "error", "not installed"),
        ({"torch": "2.7.1+cu126"}, "torch", "warning", "torch>=2.8"),
        ({"transformers": "5.3.0"}, "transformers", "warning", "wrong logits"),
        ({"transformers": "5.14.1"}, "transformers", "warning", "5.15.1"),
        ({"transformers": "5.15.1"}, "transformers", "ok", "5.15.1"),
        ({"transformers": "5.2.0"}, "transformers", "ok", "tested with"),
        ({"transformer-engine-core": "2.9.0"}, "transformer-engine", "error", "FileNotFoundError"),
        ({"transformer-engine": "2.6.0"}, "transformer-engine", "warning", "2.7"),
        ({"torch": "2.12.0+cu130"}, "torch", "ok", "(tested with 2.11.0)"),
    ],
)
def test_versions(change: dict[str, str | None], subject: str, level: str, word: str) -> None:
    have = {name: text for name, text in {**GOOD, **change}.items() if text is not None}
    found = [f for f in packages.check(have) if f.subject == subject]
    assert [f.level for f in found] == [level]
    assert word in found[0].message + found[0].cure


@pytest.mark.parametrize(
    ("error", "word"),
    [
        ("ImportError: a.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "another torch"),
        ("ImportError: libcudart.so.11.0: cannot open shared object file", "of CUDA 11"),
        ("OSError: libfoo.so.3: cannot open shared object file", "libfoo.so.3"),
        ("ImportError: /lib/libc.so.6: version `GLIBC_2.34' not found", "GLIBC_2.34"),
        ("ImportError: a.so: invalid ELF header", "processor"),
        ("RuntimeError: CUDA error: no kernel image is available for execution", "TORCH_CUDA_ARCH_LIST"),
        ("FileNotFoundError: Could not find shared object file for TE torch lib", "in part"),
        ("ModuleNotFoundError: No module named 'einops'", "einops is missing"),
        ("ImportError: cannot import name 'a' from 'b' (c.py)", "a of b"),
        ("Traceback\nKeyError: 'x'", "KeyError"),
        ("", "without a message"),
    ],
)
def test_what_a_loader_error_means(error: str, word: str) -> None:
    assert word in packages.meaning(error)


def test_real_imports_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {
        "fine": "",
        "broken": "raise ImportError('x.so: undefined symbol: _ZN1a')",
        "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "hanging": "import time; time.sleep(60)",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {
        name: packages.load(
            packages.Probe(name, name, name, "build it"), timeout=1 if name == "hanging" else 30
        )
        for name in (*bodies, "nowhere_to_be_found")
    }
    assert [f.level for f in found.values()] == ["ok", "error", "error", "error", "absent"]
    assert "another torch" in found["broken"].message and found["broken"].cure == "build it"
    assert "SIGSEGV" in found["crashing"].message and "1 s" in found["hanging"].message


def answer(capability: list[int], architectures: list[str]) -> dict[str, object]:
    device = {"name": "GPU", "capability": capability, "gib": 139.8}
    return {"built": "13.0", "architectures": architectures, "available": True, "devices": [device]}


@pytest.mark.parametrize(
    ("capability", "architectures", "level"),
    [
        ([9, 0], ["sm_80", "sm_90"], "ok"),
        ([8, 9], ["sm_80", "sm_90"], "ok"),  # binary code of 8.0 runs on 8.9
        ([10, 3], ["sm_80", "sm_90"], "error"),
        ([10, 3], ["sm_90", "compute_90"], "ok"),
        ([10, 3], ["sm_100"], "ok"),
        ([12, 1], ["sm_90a", "sm_100"], "error"),
        ([8, 0], ["sm_86"], "error"),
    ],
)
def test_gpus(capability: list[int], architectures: list[str], level: str) -> None:
    found = {f.subject: f for f in judge(answer(capability, architectures))}
    assert found["gpu"].level == level
    assert (found["nvfp4"].level == "ok") == (tuple(capability) in ((10, 0), (10, 3)))
    fp8 = tuple(capability) >= (8, 9)
    assert (found["fp8-tensorwise"].level, found["fp8-delayed"].level) == (
        ("ok",) * 2 if fp8 else ("absent",) * 2
    )
    if found["nvfp4"].level == "absent" and fp8:
        assert "this GPU trains in fp8-tensorwise" in found["nvfp4"].cure
    if level == "error":
        assert f"sm_{capability[0]}{capability[1]}" in found["gpu"].cure


@pytest.mark.parametrize(
    ("version", "warned"), [([2, 30, 5], True), ([2, 30, 4], False), ([2, 28, 9], False)]
)
def test_nccl(version: list[int], warned: bool) -> None:
    """All-to-alls of experts over SPCX: the finding names both ways around it."""
    found = {f.subject: f for f in judge({**answer([10, 0], ["sm_100"]), "nccl": version})}
    assert ("nccl" in found) == warned
    if warned:
        assert found["nccl"].level == "warning" and "NCCL_NET_PLUGIN=none" in found["nccl"].cure
        assert "hybridep" in found["nccl"].cure


def test_a_product_that_fails_does_not_hide_what_is_missing() -> None:
    """Without binary code for the GPU every product fails; the architectures say why."""
    failing = {"problem": "CUDA error: no kernel image is available for execution on the device"}
    missing = next(judge({**answer([10, 3], ["sm_90"]), **failing}))
    assert missing.level == "error" and "sm_103" in missing.cure
    other = next(judge({**answer([9, 0], ["sm_90"]), **failing}))
    assert other.level == "error" and "no kernel image" in other.message


def stepped() -> tuple[list[str], list[str]]:
    good = [f.message for f in step_findings("super") if f.level == "error"]
    builder = build.build

    def detached(*args, **kwargs):
        model = builder(*args, **kwargs)
        model.decoder.layers[3].self_attention.linear_proj.register_forward_hook(
            lambda _m, _i, output: (output[0].detach(), output[1])
        )
        model.decoder.layers[0].mixer.D.requires_grad_(False)
        return model

    build.build = detached  # type: ignore[assignment]
    return good, [f.subject for f in step_findings("super") if f.level == "error"]


def test_a_step_finds_parameters_without_gradient() -> None:
    good, bad = run_distributed(stepped, 1, apart=True)[0]
    assert good == []
    assert len(bad) == 3 and all("layers.3.self_attention" in name for name in bad)


@pytest.mark.parametrize(("value", "level"), [("nvfp4,sr=0", "ok"), ("nvfp5", "error"), ("0", None)])
def test_the_doctor_says_what_is_emulated(
    value: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EMULATE, value)
    assert {f.subject: f.level for f in emulation()}.get(EMULATE) == level


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PROBES", ())
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["packages", "imports", "gpu", "precision", "verdict"]
    assert cli.main(["doctor", "--step", "supper"]) == 2
    assert "did you mean 'super'" in capsys.readouterr().err
