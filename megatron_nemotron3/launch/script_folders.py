"""The folders of a script that `nemotron3 run` starts: --save is locked and --load checked first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_nemotron3.checkpoints.folders import checkpoint_path, latest_iteration
from megatron_nemotron3.checkpoints.resume import before_start, require_trusted_start
from megatron_nemotron3.checkpoints.state import stored_state
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.parser import option_value
from megatron_nemotron3.common.switches import EMULATE, LOCK
from megatron_nemotron3.launch import continued, manifest
from megatron_nemotron3.precision import settings as emulation


@contextlib.contextmanager
def prepared(
    words: Sequence[str],
    rank: int,
    changes: Sequence[str],
    emulated: emulation.Emulation | None,
    teacher: manifest.Part | None = None,
) -> Iterator[None]:
    """Hold the folder of `--save` for the ranks of this run, and check that the run can go on.

    The folder of `--load` names its last complete checkpoint afterwards. Rank 0 also compares the schedule
    with the checkpoint's and the run with the one in the folder.
    """
    name = option_value(words, "--save")
    save = Path(name) if name and "://" not in name else None  # an object store has no lock
    with contextlib.ExitStack() as stack:
        key = lock.run_key()
        if save is not None:
            stack.enter_context(lock.held(save, key=key))
        for line in before_start(words, rank, key):
            print(f"megatron_nemotron3: {line}", flush=True)
        require_trusted_start(words)
        if rank == 0 and (problem := continued.refused(words)) is not None:
            raise ValueError(problem)
        # `nemotron3 train` has done it for its ranks.
        if rank == 0 and save is not None and LOCK not in os.environ:
            for line in update_manifest(save, words, changes, emulated, teacher):
                print(f"megatron_nemotron3: {line}", flush=True)
        yield


def update_manifest(
    save: Path,
    words: Sequence[str],
    changes: Sequence[str] = (),
    emulated: emulation.Emulation | None = None,
    teacher: manifest.Part | None = None,
) -> list[str]:
    """Compare a run with the one that the folder of `--save` holds, and record it; return lines to print."""
    found, step = manifest.RunManifest(manifest.folder_of(save)), latest_iteration(save)
    environment = {**os.environ, EMULATE: emulated.text() if emulated else ""}
    new = manifest.parts_of(words, environment, teacher=teacher)
    if step is not None:
        stored = stored_state(checkpoint_path(save, step))
        before = manifest.parts_of_checkpoint(stored.args) if stored else {}
        # With --use-checkpoint-args Megatron takes the model from the checkpoint.
        taken = ("model", "mtp") if "--use-checkpoint-args" in words else ()
        new |= {part: found.parts.get(part) or before.get(part, {}) for part in taken}
        found.require_same(new, step, changes, ("model", *manifest.CHANGES), before)
    return found.write(new, step)
