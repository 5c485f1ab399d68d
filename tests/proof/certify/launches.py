"""The launches of others in tests/golden/launches, and what certify says of each.

    python -m tests.proof.certify.launches

writes the texts beside them.
"""

from __future__ import annotations

from pathlib import Path

from megatron_nemotron3.launch import command_line
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch, make, proxy_lines

FOLDER = Path(__file__).parents[2] / "golden" / "launches"
FILES = {file.stem: file for file in sorted((*FOLDER.glob("*.sh"), *FOLDER.glob("*.yaml")))}
#: Version of megatron-core that the texts are about.
VERSION = "0.19"


def flags_of(name: str) -> list[Flag]:
    """Options of a launch."""
    return command_line.read_launch(FILES[name].read_text()).flags


def proxy_of(name: str) -> ProxyLaunch:
    """Its proxy on up to eight ranks."""
    found = command_line.read_launch(FILES[name].read_text())
    return make(LaunchRequest(flags=tuple(found.flags), world_size=found.world_size), 8, VERSION)


def text_of(name: str) -> str:
    """What certify prints of a launch before any work."""
    notes: list[str] = []
    try:
        notes = command_line.read_launch(FILES[name].read_text()).notes
        lines = proxy_lines(proxy_of(name))
    except ValueError as problem:
        lines = [f"refused: {problem}"]
    return "\n".join((*(f"note: {note}" for note in notes), *lines, ""))


if __name__ == "__main__":
    for known in FILES:
        (FOLDER / f"{known}.txt").write_text(text_of(known))
