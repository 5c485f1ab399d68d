"""A training that goes on in its folder: is it the same run, and on which schedule?"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_nemotron3.checkpoints.state import StoredState
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.launch import Launch, continued, flags, manifest, to_argv


class Identity:
    """Compare a launch with the run of its folder, and record what changes."""

    def __init__(
        self,
        output: Path,
        step: int | None,
        stored: StoredState | None,
        allowed: Collection[str],
        contents: Mapping[str, bytes],
        teacher: manifest.Part | None = None,
    ) -> None:
        self.manifest, self.step, self.allowed = manifest.RunManifest(output), step, allowed
        self._given = contents, teacher
        self.before = manifest.parts_of_checkpoint(stored.args) if stored else {}

    def _parts(self, launch: Launch) -> manifest.Parts:
        environment = {name: value for name, value in os.environ.items() if name != EMULATE}
        if launch.emulate:
            environment[EMULATE] = launch.emulate.text()
        return manifest.parts_of(to_argv(flags(launch)), environment, launch.config.name, *self._given)

    def require(self, launch: Launch, *names: str) -> None:
        if self.step is not None:
            self.manifest.require_same(self._parts(launch), self.step, self.allowed, names, self.before)

    def record(self, launch: Launch, command: str) -> None:
        for line in self.manifest.write(self._parts(launch), self.step, command):
            print(line)


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
