"""One record of one folder and one job: a JSON file that says what the folder is the work of.

`begin` writes the record together with everything else, so a folder with a record is whole. A job that goes
on compares its own record with that of the folder: `differences`, and `details` for their text.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import lock
from megatron_nemotron3.common.files import Unreadable, json_outside, printable, write_json

#: Longest record that is read, in bytes.
LIMIT = 64 << 20
#: Most values that `details` shows, and their longest text.
_SHOWN, _LONGEST = 4, 40

#: Name of a value -> its old and new value; None: absent.
Changed = dict[str, tuple[Any, Any]]


def read(path: Path, *, limit: int = LIMIT) -> dict[str, Any]:
    """Return a record.

    Raises:
        ValueError: it is not a JSON object.
        Unreadable, OSError: as `files.json_outside`.
    """
    try:
        found = json_outside(path, limit=limit)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: it is not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: it holds a {type(found).__name__}, not an object")
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, common: bool = False) -> Changed:
    """Return what differs between two parts; `common`: only of what both give."""
    names = [name for name in old if name in new] if common else list({**old, **new})
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def details(changed: Mapping[str, tuple[str | None, str | None]]) -> str:
    """Return the first few changes as text, and the number of the others."""
    shown = [
        f"{name.removeprefix('--')} {_short(old)} -> {_short(new)}"
        for name, (old, new) in list(changed.items())[:_SHOWN]
    ]
    more = [f"{len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return ", ".join([*shown, *more])


def _short(value: str | None) -> str:
    text = "not given" if value is None else value
    return printable(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...")


def _with_values(name: str, both: tuple[Any, Any]) -> str:
    """A changed value as text, but of a digest only its name."""
    if any(isinstance(one, str) and re.fullmatch("[0-9a-f]{32,}", one) for one in both):
        return name
    return f"{name} ({' -> '.join('none' if one in (None, '') else _short(str(one)) for one in both)})"


def begin(
    folder: Path, file: str, record: Mapping[str, Any], work: str, fill: Callable[[Path], None]
) -> None:
    """Write a folder, whole or not at all, with a record of it. Where the same record is, nothing changes."""
    if _begun(folder, file, record, work):
        return
    staging = folder.with_name(f".{folder.name}.part")
    temporary = staging / "new"
    with lock.held(staging):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            if _begun(folder, file, record, work):  # by a process that has just ended
                return
            temporary.mkdir()
            fill(temporary)
            write_json(temporary / file, record)
            if folder.exists():
                folder.rmdir()
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):  # of a process that was killed
        staging.rmdir()


def _begun(folder: Path, file: str, record: Mapping[str, Any], work: str) -> bool:
    """Whether the folder holds this work; False for a new folder. Raises ValueError for other work."""
    if (folder / file).exists():
        earlier = read(folder / file)
        changed = {name: both for name, both in differences(earlier, record).items() if name in record}
        if changed:
            different = ", ".join(sorted(map(_with_values, changed, changed.values())))
            raise ValueError(
                f"{folder} holds a {work} with another {different}: give another --output, or remove it"
            )
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no {work}: give a new --output")
    return False
