"""What would end a run on GPUs before its first step is refused; each expectation is Megatron's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnBackend

from megatron_nemotron3.launch import gpu_start
from megatron_nemotron3.launch.gpu_start import ATTENTION_VARIABLES, require_attention_variables

TRAINING = ["--micro-batch-size", "1"]
PLAIN = [*TRAINING, "--use-distributed-optimizer", "--no-gradient-accumulation-fusion"]


@pytest.mark.parametrize("backend", [backend.name for backend in AttnBackend])
@pytest.mark.parametrize("name", ATTENTION_VARIABLES)
@pytest.mark.parametrize("value", ["0", "1"])
def test_attention_variables(backend: str, name: str, value: str) -> None:
    module: Any = SimpleNamespace(
        config=SimpleNamespace(attention_backend=AttnBackend[backend], flash_attention_version=None)
    )
    given, words = {name: value}, [] if backend == "auto" else ["--attention-backend", backend]
    with patch.dict(os.environ):
        for variable in ATTENTION_VARIABLES:
            os.environ.pop(variable, None)
        os.environ[name] = value
        try:
            LanguageModule._set_attention_backend(module)
        except AssertionError:
            expected = (
                f"{name}={value} contradicts --attention-backend {backend}, which Megatron refuses: unset"
            )
            with pytest.raises(ValueError, match=expected):
                require_attention_variables(words, given)
        else:
            require_attention_variables(words, given)


def test_variables_that_no_backend_has() -> None:
    environment = dict.fromkeys(ATTENTION_VARIABLES, "7")
    with pytest.raises(ValueError, match=r"NVTE_UNFUSED_ATTN=7 contradicts .* refuses: unset them$"):
        require_attention_variables([], environment)


@pytest.mark.full
def test_megatron_makes_the_dataset_helper() -> None:
    """Its call succeeds with the wheel, which has no Makefile."""
    call = "from megatron.core.datasets.utils import compile_helpers; compile_helpers()"
    environment = {**os.environ, "MAKEFLAGS": "-j2"}
    assert subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True).returncode
    gpu_start._skip_make(environment)
    done = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_dataset_helper_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is made as before, or its absence is said."""
    monkeypatch.setattr("megatron_nemotron3.launch.versions.importable", lambda: tmp_path)
    (tmp_path / "datasets").mkdir()
    with pytest.raises(ValueError, match="no Makefile for Megatron's dataset helper, and no compiled one"):
        gpu_start._skip_make({})
    (tmp_path / "datasets/Makefile").touch()
    environment = {}
    gpu_start._skip_make(environment)
    assert not environment
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"install it \(apt install make\)"):
        gpu_start._skip_make({})


def test_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither TransformerEngine nor Apex is in this environment."""
    pytest.importorskip("megatron.training")
    if any(gpu_start.first_missing(name) is None for name in ("transformer_engine", "apex")):
        pytest.skip("this environment has TransformerEngine or Apex")
    with pytest.raises(ValueError, match="needs fused_weight_gradient_mlp_cuda of Apex"):
        gpu_start.require_gpu_packages([*TRAINING, "--use-distributed-optimizer"], {}, 0)
    assert gpu_start.require_gpu_packages([*TRAINING, PLAIN[-1]], {}, 0) == []
    assert gpu_start.require_gpu_packages(["--of", "another script"], {}, 0) == []
    (note,) = gpu_start.require_gpu_packages(PLAIN, {}, 0)
    assert "cannot load the state of a distributed optimizer" in note
    stored: Any = (7, object())
    monkeypatch.setattr("megatron_nemotron3.launch.continued.loaded_state", lambda words: stored)
    with pytest.raises(ValueError, match=r"the checkpoint of step 7 has one.*--no-load-optim"):
        gpu_start.require_gpu_packages(PLAIN, {}, 0)
    assert gpu_start.require_gpu_packages(PLAIN, {}, 1) == [note]
    assert gpu_start.require_gpu_packages([*PLAIN, "--no-load-optim"], {}, 0) == [note]
