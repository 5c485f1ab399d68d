"""Every layout of docs/measurements.md trains on gloo, with our entry and with the stock script."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.train import log, processes
from tests.support.distributed import curve_of, trained
from tests.support.programs import run_python
from tests.support.short_run import mock_argv, short_schedule

ROOT = Path(__file__).parent.parent
CHECKOUT = os.environ.get("MEGATRON_LM_DIR")
STOCK = Path(CHECKOUT or "/nowhere") / "pretrain_hybrid.py"
SCRIPTS = [
    pytest.param(processes.ENTRY, id="ours"),
    pytest.param(
        STOCK,
        id="stock",
        marks=[
            pytest.mark.checkout,
            pytest.mark.skipif(not STOCK.is_file(), reason="MEGATRON_LM_DIR names no Megatron-LM checkout"),
        ],
    ),
]
LAYOUTS = {
    "one": (ParallelLayout(), ()),
    "tp2-sp": (ParallelLayout(tp=2), ()),
    "ep2-allgather": (ParallelLayout(dp=2, ep=2), ("--moe-token-dispatcher-type", "allgather")),
    "ep2-alltoall": (ParallelLayout(dp=2, ep=2), ("--moe-token-dispatcher-type", "alltoall")),
    # Upstream refuses it together with latent experts; on a CPU there is no stream to overlap on.
    "ep2-shared-expert-overlap": (ParallelLayout(dp=2, ep=2), ("--moe-shared-expert-overlap",)),
    "pp2": (ParallelLayout(pp=2), ()),
    "dp2-distributed-optimizer": (ParallelLayout(dp=2), ("--use-distributed-optimizer",)),
}
#: The others run nightly: tests/parallel compares layouts step by step.
QUICK = ("one", "dp2-distributed-optimizer")
SAME_WEIGHTS = {
    "dp2-distributed-optimizer": "one",
    "ep2-alltoall": "ep2-allgather",
    "ep2-shared-expert-overlap": "ep2-alltoall",
}
STEPS = 4
#: The smallest form with every part: M, E with latent, *, two shared MTP depths.
CONFIG = tiny(get("super")).but(pattern="MEM*EME*", vocab_size=255)


def _argv(layout: ParallelLayout, extra: tuple[str, ...], **data: object) -> list[str]:
    schedule = short_schedule(STEPS, eval_iters=1)
    # With Adam's epsilon of 1e-8 rounding noise of a zero gradient would move a weight by the learning rate.
    return mock_argv(CONFIG, layout, schedule, ("--adam-eps", "1e-4", *extra), **data)


def _train(script: Path, layout: ParallelLayout, argv: list[str]) -> log.Curve:
    if script == processes.ENTRY:
        return trained(argv, layout.world_size)
    # As a user starts it: the checkout's Megatron, not the one installed.
    words = processes.command(argv, layout.world_size, "cpu")
    words[words.index(str(processes.ENTRY))] = str(script)
    env = {**processes.environment(layout.world_size, "cpu"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return curve_of(done.stdout)


@functools.cache
def _run(script: Path, name: str) -> log.Curve:
    layout, extra = LAYOUTS[name]
    return _train(script, layout, _argv(layout, extra))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in LAYOUTS]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_trains(script: Path, name: str) -> None:
    """Some layouts start from the same weights; sums in another order may move the last printed digit."""
    curve = _run(script, name)
    assert sorted(curve.steps) == [1, 2, 3, 4]
    first, last = curve.steps[1], curve.steps[STEPS]
    # Before any step the model knows nothing: log 255 = 5.54, and 0.4 for logits of variance 0.8.
    assert all(5.4 < loss < 6.4 for loss in (first.loss, *first.mtp)) and len(first.mtp) == 2
    assert last.loss < first.loss - 0.2
    assert curve.validation and curve.test
    assert "worst MaxVio" in first.values  # the monitors are on, with either script
    if name in SAME_WEIGHTS:
        other = _run(script, SAME_WEIGHTS[name]).steps
        for number, step in curve.steps.items():
            assert step.loss == pytest.approx(other[number].loss, rel=3e-6)
            assert step.mtp == pytest.approx(other[number].mtp, rel=3e-6)


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_resuming_the_distributed_optimizer_changes_nothing(script: Path, tmp_path: Path) -> None:
    """Upstream cannot resume it with torch's Adam; the shim mends that (cpu/megatron.py)."""
    name, folder = "dp2-distributed-optimizer", str(tmp_path)
    layout, extra = LAYOUTS[name]
    _train(script, layout, _argv(layout, (*extra, "--exit-interval", "2"), save=folder))
    resumed = _train(script, layout, _argv(layout, extra, load=folder)).steps
    whole = _run(script, name).steps
    assert sorted(resumed) == [3, 4]
    for step in (3, 4):
        assert resumed[step].loss == pytest.approx(whole[step].loss, rel=3e-6)


@pytest.mark.parametrize(
    "script", [pytest.param(processes.ENTRY, id="ours", marks=pytest.mark.full), SCRIPTS[1]]
)
def test_emulated_nvfp4(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe reaches any script through the environment and the precision file, and trains."""
    from megatron_nemotron3.precision import yaml_file
    from megatron_nemotron3.precision.table import bf16_tail

    yaml_file.write_precision_file(CONFIG, tmp_path / "precision.yaml")
    tail = ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "0")
    tail += ("--num-layers-at-end-in-bf16", str(bf16_tail(CONFIG)))
    words = _argv(ParallelLayout(), (*tail, "--te-precision-config-file", str(tmp_path / "precision.yaml")))
    plain = _train(script, ParallelLayout(), _argv(ParallelLayout(), tail)).steps
    monkeypatch.setenv("NEMOTRON3_EMULATE", "nvfp4")
    emulated = _train(script, ParallelLayout(), words).steps
    assert emulated[1].loss != plain[1].loss
    assert emulated[1].loss == pytest.approx(plain[1].loss, rel=0.02)
    assert emulated[STEPS].loss < 0.6 * emulated[1].loss


def test_a_foreign_stack_stops_the_run(tmp_path: Path) -> None:
    """What Megatron builds is looked at: here a script that swaps our spec for upstream's stack class."""
    script = tmp_path / "swap.py"
    script.write_text(
        "import runpy, sys\n"
        "from megatron.core.models.hybrid.hybrid_block import HybridStack\n"
        "from megatron_nemotron3 import specs\n"
        "specs.nemotron3_torch_stack_spec.module = HybridStack\n"
        "import megatron.core.models.hybrid.hybrid_block as block\n"
        "from megatron_nemotron3.layers.norm import RMSNorm\n"
        "block.TENorm = RMSNorm\n"
        f"runpy.run_path({str(processes.ENTRY)!r}, run_name='__main__')\n"
    )
    words = ["-m", "megatron_nemotron3.run", "--device", "cpu", str(script), *_argv(ParallelLayout(), ())]
    done = run_python(words, tmp_path)
    assert done.returncode != 0
    assert "HybridStack" in done.stderr
    assert "lm loss" not in done.stdout


if __name__ == "__main__":  # the figures of docs/measurements.md
    for script_name in [processes.ENTRY, *([STOCK] if STOCK.is_file() else [])]:
        for layout_name in LAYOUTS:
            steps = _run(Path(script_name), layout_name).steps
            shown = " ".join(f"{steps[i].loss:.6f}" for i in sorted(steps))
            print(f"{Path(script_name).name:20} {layout_name:28} {shown}")
    sys.exit(0)
