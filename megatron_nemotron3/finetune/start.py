"""How a command of several steps starts: its schedule, and its folder, written whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_nemotron3.common.files import json_outside
from megatron_nemotron3.common.files import write_json
from megatron_nemotron3.common import lock
from megatron_nemotron3.models import Nemotron3Config

_LIMIT = 1 << 20


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError for an option that is given and not above 0."""
    for name in names:
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give more than 0")


def require_schedule(options: argparse.Namespace, config: Nemotron3Config) -> None:
    """Raise ValueError if --steps or --lr is missing and the model is no tiny one."""
    missing = [f"--{name}" for name in ("steps", "lr") if getattr(options, name) is None]
    if missing and "-tiny" not in config.name:
        raise ValueError(f"{config.title} has no default schedule: give {' and '.join(missing)}")


def own(config: Nemotron3Config) -> Nemotron3Config:
    """Return the model for a file, with a name of its own; that of a tiny one keeps its default schedule."""
    return config.but(name="own-tiny" if "-tiny" in config.name else "own")


def begin(
    output: Path, file: str, record: Mapping[str, object], work: str, write: Callable[[Path], None]
) -> None:
    """Write what the steps read, and a record of it. Where the same record is, nothing changes.

    Args:
        file: name of the record.
        work: what it is, in messages: "fine-tuning".
        write: writes into the folder that it is given, which becomes `output` when all is there.

    Raises:
        ValueError: the folder holds something else, or such a work with another record; another process
            begins it now; or as `write`.
        OSError: it cannot be written.
    """
    if _begun(output, file, record, work):
        return
    beside = output.with_name(f".{output.name}.part")
    temporary = beside / "new"
    with lock.held(beside):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            if _begun(output, file, record, work):  # by a process that has just ended
                return
            temporary.mkdir()
            write(temporary)
            write_json(temporary / file, record)
            if output.exists():
                output.rmdir()
            temporary.rename(output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):  # of a process that was killed
        beside.rmdir()


def _begun(output: Path, file: str, record: Mapping[str, object], work: str) -> bool:
    """Whether the folder holds this work; False for a new one. Raises ValueError for another."""
    if (output / file).exists():
        earlier = json_outside(output / file, limit=_LIMIT)
        if different := sorted(name for name in record if earlier.get(name) != record[name]):
            raise ValueError(
                f"{output} holds a {work} with another {', '.join(different)}: give another --output, or "
                "remove it"
            )
        return True
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is no {work}: give a new --output")
    return False
