"""A run killed during a save: the next run resumes from the last complete checkpoint.

Runs resume from the checkpoint of step 2, train to step 4, save, and die at the n-th file operation of that
save. Then a run without `--save` must start from 4 if the kill came after the checkpoint was complete, from
2 if before, and have the losses of a run that nobody killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.checkpoints.structure import check_integrity, check_structure
from megatron_nemotron3.checkpoints.trust import hostile_objects
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.train import log
from tests.support import checkpoint_runs as runs

ONE, TWO = ParallelLayout(), ParallelLayout(dp=2)
DISTRIBUTED = ("--use-distributed-optimizer",)
#: File operations of a save, in order; __1_0.distcp is the other rank's.
SAVE = [
    "os.mkdir iter_0000004",
    "os.mkdir iter_0000004",
    "open iter_0000004/__0_0.distcp",
    "open iter_0000004/.metadata.tmp",
    "os.rename iter_0000004/.metadata",
    "open iter_0000004/metadata.json",
    "open latest_checkpointed_iteration.txt",
]
#: Byte at which the kernel kills a writer; None: SIGKILL before the operation.
MOMENTS = [
    *((event, None) for event in range(len(SAVE))),
    *((event, 0) for event, what in enumerate(SAVE) if what.startswith("open")),
    *((2, limit) for limit in (1, 4096, 1_000_000, 10_000_000)),
    *((3, limit) for limit in (1, 50_000)),
]
#: Those of `make test`: half the weights are written; the tracker is opened, which empties it.
QUICK = [(2, 1_000_000)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, log.Curve]:
    """An uninterrupted run with checkpoints after 2, 4 and 6 steps."""
    folder = tmp_path_factory.mktemp("whole")
    curve, _ = runs.train(ONE, save=str(folder))
    assert sorted(curve.steps) == [1, 2, 3, 4, 5, 6]
    last = folder / "iter_0000006"
    torch.save({"step": torch.tensor(6, dtype=torch.int32)}, last / "train_state.pt")  # as Bridge does
    assert hostile_objects(last) == [] and any("rng_state" in name for name in read_metadata(last).objects)
    return folder, curve


def _resumes(folder: Path, layout: ParallelLayout, expected: int, whole: log.Curve, *extra: str) -> str:
    curve, output = runs.train(layout, *extra, load=str(folder))
    assert sorted(curve.steps) == list(range(expected + 1, runs.STEPS + 1)), output[-2000:]
    for step in (expected + 1, expected + 2):
        assert curve.steps[step].loss == pytest.approx(whole.steps[step].loss, rel=3e-6)
    return output


@pytest.mark.parametrize(
    ("event", "limit"),
    [m if m in QUICK else pytest.param(*m, marks=pytest.mark.full) for m in MOMENTS],
    ids=lambda value: str(value),
)
def test_resumes_after_a_kill(
    event: int, limit: int | None, whole: tuple[Path, log.Curve], tmp_path: Path
) -> None:
    folder = runs.copy(whole[0], tmp_path / "run", "iter_0000002")
    done = runs.die_while_saving(ONE, folder, event, limit)
    # A killed writer starts no other file, unless the file it was to die in is shorter than the limit.
    assert done == SAVE[: event + 1]
    complete = 4 if event == len(SAVE) - 1 else 2
    assert (check_structure(folder / "iter_0000004").state == "complete") == (complete == 4)
    output = _resumes(folder, ONE, complete, whole[1])
    named = folders.latest_iteration(folder)
    assert named == complete and (f"it now names {complete}" in output) == (complete == 4)
    path = folders.checkpoint_path(folder, complete)
    assert not check_integrity(path, check_structure(path).index).problems


@pytest.mark.full
@pytest.mark.parametrize(("event", "limit"), [(2, 1_000_000), (4, None), (6, 0), (6, None)], ids=str)
def test_two_ranks(event: int, limit: int | None, tmp_path: Path) -> None:
    """Each rank writes its own file and waits for the other before it reads the tracker."""
    curve, _ = runs.train(TWO, *DISTRIBUTED, save=str(tmp_path / "whole"))
    folder = runs.copy(tmp_path / "whole", tmp_path / "run", "iter_0000002")
    assert runs.die_while_saving(TWO, folder, event, limit, *DISTRIBUTED)
    output = _resumes(folder, TWO, 4 if event == 6 else 2, curve, *DISTRIBUTED)
    assert output.count("it now names 4") == (event == 6)


@pytest.mark.full
def test_an_asynchronous_save(whole: tuple[Path, log.Curve], tmp_path: Path) -> None:
    """An async save: another process writes the files; the training process finishes it some steps later."""
    folder = runs.copy(whole[0], tmp_path / "run", "iter_0000002")
    runs.die_while_saving(ONE, folder, 2, None, "--async-save", "--use-persistent-ckpt-worker")
    output = _resumes(folder, ONE, folders.latest_iteration(folder) or 0, whole[1])
    assert "Traceback" not in output
