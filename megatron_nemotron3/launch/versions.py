"""Which versions of megatron-core are supported; `parser` has their options.

Read from the wheel 0.19.2 and from main of 2026-08-22 (0.20.0, in development); docs/environment.md says what
was run on each.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

#: Supported minor versions, oldest first; the last one is upstream's main.
KNOWN = ("0.19", "0.20")
#: What flags are made for where no megatron-core is installed.
DEFAULT = "0.19"


@cache
def minor(version: str) -> str:
    """Return the minor version: "0.19.2" -> "0.19"; "main", and what is newer, is the last of `KNOWN`."""
    if version == "main":
        return KNOWN[-1]
    match = re.match(r"\d+\.\d+", version)
    if match is None:
        raise ValueError(f"megatron-core version {version!r}: give one of {', '.join(KNOWN)} or main")
    if _numbers(match[0]) > _numbers(KNOWN[-1]):
        return KNOWN[-1]
    if match[0] not in KNOWN:
        raise ValueError(
            f"megatron-core {version} is not supported: use 0.19 (pip install "
            "'megatron-core[training]==0.19.2') or main; checkpoints of older versions remain readable"
        )
    return match[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def installed() -> str | None:
    """Return the version of the megatron-core that Python would import; None if there is none."""
    if found := importable_version():
        return found
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def chosen(version: str | None = None) -> str:
    """Return the minor version to make flags for: the given one, else the installed one, else `DEFAULT`."""
    return minor(version or installed() or DEFAULT)


def require_supported() -> None:
    """Check the version of the megatron-core that Python imports; without one there is nothing to check.

    It is not imported for that: in CPU mode the import comes later, and without torch's compiler.

    Raises:
        ValueError: it is not supported.
    """
    if loaded := sys.modules.get("megatron.core"):
        minor(loaded.__version__)
    elif version := importable_version():
        minor(version)


def require_imported(checkout: Path) -> None:
    """Check that Python would import a megatron-core of the version of a Megatron-LM checkout."""
    core = importable()
    if core is None:
        return
    theirs, ours = (version_in(folder, 2) for folder in (checkout / "megatron/core", core))
    if theirs != ours:
        raise ValueError(
            f"{checkout} is megatron-core {theirs or '?'}, and Python would import {ours or '?'}: put the "
            f"checkout in front, PYTHONPATH={checkout}"
        )


def importable() -> Path | None:
    """The folder of the megatron-core that Python would import."""
    found = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    return Path(found.origin).parent if found and found.origin else None


def importable_version() -> str:
    """Return the version of the megatron-core that Python would import; "" if none says it."""
    core = importable()
    return version_in(core) if core else ""


def version_in(core: Path, parts: int = 3) -> str:
    """Return the first parts of the version of the megatron-core in a folder; "" if it does not say them."""
    try:
        text = (core / "package_info.py").read_text()
    except OSError:
        return ""
    found = re.findall(r"^(?:MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE)[:parts]
    return ".".join(found) if len(found) == parts else ""
