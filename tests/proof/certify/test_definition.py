"""One process is what the definition says, and a fault of every layout is named by its property."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_nemotron3.launch import Launch, flags
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.proof.certify import proxy
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState
from megatron_nemotron3.proof.certify.definition import definition
from megatron_nemotron3.proof.certify.large import LaunchRequest
from tests.proof.certify.catalogue import FAULTS
from tests.proof.certify.definition_faults import megatrons_z_loss

PER_TOKEN = "--calculate-per-token-loss"
#: Launches by model. The largest gradients are clipped; the balance weighs enough to be noticed.
LAUNCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "super": ("super", ("--clip-grad", "0.1", "--moe-aux-loss-coeff", "0.01")),
    "super packed": ("super", ("--sft", "--moe-aux-loss-coeff", "0.01")),
    "super by means": ("super", ("--moe-aux-loss-coeff", "0.01")),
    "nano": ("nano", ("--moe-aux-loss-coeff", "0.01")),
    "nano with the balance of a micro-batch": (
        "nano",
        ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01", PER_TOKEN),
    ),
    "nano with the balance of a global batch": (
        "nano",
        (
            *("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", "0.01"),
            *("--moe-z-loss-coeff", "0.001", PER_TOKEN),
        ),
    ),
    "dense": ("nemotron-h-8b", ()),
    "super with z-loss": ("super", ("--moe-z-loss-coeff", "0.001")),
}
PROPERTIES = {"logits", "losses", "gradients", "gradient norms", "optimizer"}
#: Those of models with experts, and of Super's MTP.
OF_EXPERTS, OF_MTP = {"router choices", "expert biases"}, {"losses of MTP"}


def found(name: str, folder: Path, fault: Callable[[], None] | None = None) -> dict[str, Finding]:
    """Findings of a launch by property: of a small model, or of a layer with all experts if that fails."""
    model, extra = LAUNCHES[name]
    words = flags(Launch.of(model, backend="te", extra=extra))
    if name == "super by means":
        two = Flag("--micro-batch-size", ("2",))
        words = [two if flag.name == two.name else flag for flag in words if flag.name != PER_TOKEN]
    given = tuple(words)
    bench = Bench(proxy=proxy.make(LaunchRequest(flags=given), 8), flags=given, folder=folder, fault=fault)
    passed_first = sorted(definition(bench), key=lambda finding: finding.state is PropertyState.FAIL)
    return {finding.name: finding for finding in passed_first}


@pytest.mark.parametrize(
    "name",
    [name if name == "super packed" else pytest.param(name, marks=pytest.mark.full) for name in LAUNCHES],
)
def test_one_process_is_what_is_defined(name: str, tmp_path: Path) -> None:
    findings = found(name, tmp_path)
    more = {"super": OF_EXPERTS | OF_MTP, "nano": OF_EXPERTS}.get(LAUNCHES[name][0], set())
    assert findings.keys() == PROPERTIES | more
    assert [finding for finding in findings.values() if finding.state is not PropertyState.PASS] == []


@pytest.mark.full
def test_megatron_counts_the_z_loss_once_per_depth(tmp_path: Path) -> None:
    """It means to divide that of a repeated MTP block by the depths, but divides only what it logs."""
    findings = found("super with z-loss", tmp_path, megatrons_z_loss)
    wrong = {
        finding.name: finding.detail for finding in findings.values() if finding.state is PropertyState.FAIL
    }
    assert wrong == {"gradients": "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight"}


@pytest.mark.parametrize(
    ("launch", "fault"),
    [
        ("dense", "norm gains decay"),
        pytest.param("nano", "expert bias in the wrong direction", marks=pytest.mark.full),
    ],
)
def test_a_fault_of_every_layout_is_named(launch: str, fault: str, tmp_path: Path) -> None:
    """In other models than those of the catalogue."""
    (what,) = FAULTS[fault].found_by
    findings = found(launch, tmp_path, FAULTS[fault].patch)
    assert findings[what].state is PropertyState.FAIL
    difference = findings[what].difference
    assert difference is not None and difference > 10
