"""Two versions of Megatron on one proxy: what differs is named, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.pickles import inert
from megatron_nemotron3.launch import versions
from megatron_nemotron3.proof.certify import certificate, upgrade
from megatron_nemotron3.proof.certify.bench import PropertyState
from megatron_nemotron3.proof.certify.tensors import Tensors

PASS, FAIL = PropertyState.PASS, PropertyState.FAIL
Capture = pytest.CaptureFixture[str]
ROUTER = "decoder.layers.{}.mlp.router.weight"


def tensors() -> Tensors:
    return {ROUTER.format(n): torch.ones(4, 4) for n in (1, 3, 5)} | {"output_layer.weight": torch.ones(8)}


def test_every_tensor_that_differs_is_named() -> None:
    after = tensors()
    for layer in (1, 5):
        after[ROUTER.format(layer)] = torch.full((4, 4), 1.5)
    allowed = {key: torch.tensor(1e-6) for key in after}
    found = upgrade.apart("gradients", tensors(), after, allowed, "TP2")
    assert (found.state, found.where, found.difference) == (FAIL, "TP2", pytest.approx(5e5))
    assert found.detail == (
        "differ: decoder.layers.[1 5].mlp.router.weight; by up to 0.5 of the largest element"
    )
    assert upgrade.apart("gradients", tensors(), tensors(), allowed, "").state is PASS


def test_what_one_version_does_not_have_is_named() -> None:
    after = tensors()
    after["decoder.layers.1.mlp.fc2_norm.weight"] = after.pop("output_layer.weight")
    after[ROUTER.format(3)] = torch.ones(8, 4)
    found = upgrade.apart("weights", tensors(), after, {key: torch.tensor(1.0) for key in tensors()}, "")
    assert found.state is FAIL
    for part in ("gone: output_layer.weight", "new: decoder.layers.1.mlp.fc2_norm", "[4, 4] became [8, 4]"):
        assert part in found.detail


def test_a_value_that_is_no_number_differs() -> None:
    after = tensors() | {"output_layer.weight": torch.full((8,), torch.nan)}
    found = upgrade.apart("weights", tensors(), after, {key: torch.tensor(1.0) for key in after}, "")
    assert (found.state, found.detail.split(";")[0]) == (FAIL, "differ: output_layer.weight")


def test_a_default_that_changed_is_a_warning() -> None:
    before = {"adam_eps": 1e-8, "load": "/a", "mode": inert("Mode")(1), "old": 1, "seed": 7}
    after = {"adam_eps": 1e-3, "load": "/b", "mode": inert("Mode")(1), "new": 1, "seed": 7}
    found = upgrade.arguments_of(before, after)
    assert (found.state, found.detail) == (
        PASS,
        "warning: adam_eps 1e-08 became 0.001 (3 compared, 1 new, 1 gone)",
    )


def test_what_is_no_checkout_is_refused(tmp_path: Path, capsys: Capture) -> None:
    command = ["certify", "super", "--against", str(tmp_path)]
    assert cli.main(command) == 2
    assert "is no checkout of Megatron-LM 0.19 or newer: no megatron/core" in capsys.readouterr().err
    assert not (tmp_path / certificate.UPGRADE_JSON).exists()


def test_a_checkout_that_does_not_import_is_refused(tmp_path: Path, capsys: Capture) -> None:
    core, out = tmp_path / "Megatron-LM/megatron/core", tmp_path / "out"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    (core / "__init__.py").write_text("import a_module_that_nobody_has\n")
    words = ["certify", "super", "--tp", "2", "--dp", "1", "--output", str(out)]
    assert cli.main([*words, "--against", str(tmp_path / "Megatron-LM")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "does not import here: ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in line
    assert not out.exists()


def test_a_comparison_is_no_certificate(tmp_path: Path, capsys: Capture) -> None:
    command = {"--num-layers": ["2"]}
    fields: dict[str, Any] = dict.fromkeys(("title", "model", "layout", "findings", "date", "passed"))
    fields |= {"versions": {}, "findings": [], "passed": True, "date": ""}
    data = fields | {"schema": 1, "command": command, "hash": certificate.hash_of(command), "against": "0.20"}
    (tmp_path / "upgrade.json").write_text(json.dumps(data))
    assert cli.main(["certify", "super", "--check", str(tmp_path / "upgrade.json")]) == 2
    assert "compares two versions of Megatron" in capsys.readouterr().err


@pytest.fixture
def other_megatron(tmp_path: Path) -> Path:
    """The installed Megatron again, with weight decay inside of Adam's gradients."""
    core = versions.importable()
    assert core is not None
    checkout = tmp_path / "Megatron-LM"
    shutil.copytree(
        core.parent, checkout / "megatron", ignore=shutil.ignore_patterns("__pycache__", "bridge")
    )
    path = checkout / "megatron/core/optimizer/optimizer_config.py"
    before, after = (f"decoupled_weight_decay: bool = {value}" for value in (True, False))
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    return checkout


@pytest.mark.full
def test_what_a_version_changed_is_found(other_megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    """Weight decay inside of Adam: the first gradients are equal, the weights and what follows are not."""
    launch = ["super", "--tp", "2", "--ep", "2", "--dp", "1", "--output", str(tmp_path / "out")]
    assert cli.main(["certify", *launch, "--against", str(other_megatron)]) == 1
    data = json.loads((tmp_path / "out" / certificate.UPGRADE_JSON).read_text())
    states: dict[str, set[str]] = {}
    for one in data["findings"]:
        states.setdefault(one["property"], set()).add(one["state"])
    for name in (
        "gradients of step 1",
        "tensors of the checkpoint",
        "weights loaded",
        "optimizer state loaded",
    ):
        assert states[name] == {"pass"}, name
    for name in ("weights after two steps", "gradients of step 2", "lm loss", "expert biases"):
        assert states[name] == {"fail"}, name
    page = (tmp_path / "out" / certificate.UPGRADE_PAGE).read_text()
    assert "**Differs** from 0.19.2 to 0.19.2" in page
