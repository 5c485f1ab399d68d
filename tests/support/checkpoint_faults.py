"""Defects of saving and loading. Each is called on a rank before anything is built."""

from __future__ import annotations


def hang_in_the_last_rank() -> None:
    """The last rank never begins."""
    import os
    import time

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(1000)


def die_in_the_last_rank() -> None:
    """The last rank fails when training begins."""
    import os

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise OSError("no space left on a device")
