"""Bridge's `pretrain` trains our stack on a CPU, and its checkpoints and ours resume each other.

Opt-in: `make test-bridge`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.convert.bridge_checkpoint import add_arguments
from tests.support.checkpoint_runs import copy
from tests.support.distributed import run_distributed
from tests.support.engines import tensors
from tests.support.hf_folders import write_hf

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None,
        reason="Megatron-Bridge is not installed: make test-bridge",
    ),
]
#: Printed digits: sums in another order may move the last one.
REL = 3e-6
LAYOUTS = {"one rank": {}, "TP2": {"tp": 2}}


def bridges(folder: Path, save: str, load: str, sizes: dict[str, int], builder: bool = False) -> Any:
    from tests.bridge import training

    arguments = (folder / "hf", folder / save, folder / load, builder, sizes)
    world = 2 if sizes else 1
    # The last rank prints the losses.
    return run_distributed(training.bridges, world, *arguments, timeout=300, apart=True, children=True)[-1]


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(Folder with hf/ and Bridge's run in bridge/, sizes of the layout, that run's losses)."""
    from tests.bridge import training

    folder, sizes = tmp_path_factory.mktemp("bridge"), LAYOUTS[request.param]
    write_hf(folder / "hf", training.CONFIG, values=tensors(training.CONFIG), dtype="float32")
    return folder, sizes, bridges(folder, "bridge", "bridge", sizes)


def same(resumed: Any, whole: Any, averaged: bool = False) -> None:
    """Steps 3 and 4 of a resumed run are those of the uninterrupted one.

    Megatron-LM's second log line averages with the first (`averaged`); Bridge's does not.
    """
    assert sorted(resumed) == [3, 4]
    third, fourth = ([whole[step].loss, *whole[step].mtp] for step in (3, 4))
    if averaged:
        fourth = [(a + b) / 2 for a, b in zip(third, fourth)]
    assert [resumed[3].loss, *resumed[3].mtp] == pytest.approx(third, rel=REL)
    assert [resumed[4].loss, *resumed[4].mtp] == pytest.approx(fourth, rel=REL)


def test_trains(runs: Any) -> None:
    _, _, steps = runs
    assert sorted(steps) == [1, 2, 3, 4]
    assert all(len(step.mtp) == 2 for step in steps.values())
    assert steps[4].loss < steps[1].loss


def test_bridge_resumes_its_own(runs: Any) -> None:
    """Through run_config.yaml, which names our spec function."""
    folder, sizes, whole = runs
    copy(folder / "bridge", folder / "again", "iter_0000002")
    assert (
        "megatron_nemotron3.bridge.stack_spec" in (folder / "again/iter_0000002/run_config.yaml").read_text()
    )
    same(bridges(folder, "again", "again", sizes), whole)


def test_we_resume_bridges(runs: Any) -> None:
    from tests.bridge import training

    folder, sizes, whole = runs
    copy(folder / "bridge", folder / "to_ours", "iter_0000002")
    add_arguments(folder / "to_ours" / "iter_0000002")
    layout = ParallelLayout(**sizes)
    resumed = training.ours(layout, load=str(folder / "to_ours"), save=str(folder / "ours_after"))
    same(resumed, whole, averaged=True)


def test_bridge_resumes_ours(runs: Any) -> None:
    from tests.bridge import training

    folder, sizes, _ = runs
    layout = ParallelLayout(**sizes)
    whole = training.ours(layout, save=str(folder / "ours"))
    copy(folder / "ours", folder / "to_bridge", "iter_0000002")
    same(bridges(folder, "to_bridge", "to_bridge", sizes), whole)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is not None
    and importlib.metadata.version("megatron-bridge") == "0.6.2",
    reason="Bridge 0.6.2 reads seq_length of a TransformerConfig, which has none (mended on main)",
)
def test_the_config_and_builder_path_trains_the_same(runs: Any) -> None:
    folder, sizes, whole = runs
    steps = bridges(folder, "builder", "builder", sizes, builder=True)
    assert {step: values.loss for step, values in steps.items()} == {
        step: pytest.approx(values.loss, rel=REL) for step, values in whole.items()
    }
