"""What a run goes on from: the state of a checkpoint, and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_nemotron3.checkpoints.folders import checkpoint_path
from megatron_nemotron3.checkpoints.state import StoredState, stored_state
from megatron_nemotron3.launch import Launch, continued, flags, to_argv


def loadable_state(checkpoints: Path, step: int, launch: Launch) -> StoredState | None:
    """Return what a checkpoint states; raise ValueError if the launch cannot load its optimizer."""
    stored = stored_state(checkpoint_path(checkpoints, step))
    if stored is not None:
        continued.require_loadable_layout(step, stored, to_argv(flags(launch)))
    return stored


def last_step(launch: Launch) -> int | None:
    """Return the step after which training ends; None if it is not known."""
    found = continued.schedule_of_arguments(to_argv(flags(launch)))
    return None if found is None else found.train // (1 if found.unit == "iters" else found.batch)


def with_schedule(launch: Launch, own: Mapping[str, object], step: int, stored: StoredState | None) -> Launch:
    """Return the launch with the schedule on which a run goes on; print what changes."""
    saved = stored and continued.saved_schedule(step, stored.scheduler, stored.args)
    wanted = continued.schedule_of_arguments(to_argv(flags(launch)))
    if not saved or wanted is None:
        return launch
    continued.require_same_rates(saved, wanted)
    planned = [name for name in own if name in continued.OPTIONS]
    if not planned:
        words, lines = continued.continued(saved, wanted, keep=continued.KEEP in own)
    elif changed := continued.differences(saved, wanted):
        words = [continued.OVERRIDE]
        lines = [f"the schedule is the one given by {' '.join(planned)}: {continued.described(changed)}"]
    else:
        return launch
    for line in lines:
        print(line)
    # A switch that the user gave, too, would contradict the override.
    extra = [word for word in launch.extra if word != continued.KEEP]
    return replace(launch, extra=(*extra, *words))
