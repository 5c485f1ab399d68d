"""A command in a process that is killed at a chosen moment, forked from a server without threads."""

from __future__ import annotations

import os
import signal
from typing import Any

from megatron_nemotron3.common.ranks import server
from megatron_nemotron3.proof.certify.ranks import PRELOAD

#: Calls at which a command is killed; between two of them nothing changes on the disk.
STEPS = ("replace", "unlink", "fsync", "rmdir", "mkdir", "rename")


def killed_at(step: int, words: list[str]) -> int | None:
    """Run a command in a process that is killed before its call `step` of STEPS.

    Returns the number of calls if it ended before, else None.
    """
    process = server(PRELOAD).Process(target=_counted, args=(step, words))
    process.start()
    process.join()
    code = process.exitcode
    assert code is not None and (code == -signal.SIGKILL or 0 < code < 255), code
    return None if code < 0 else code


def _counted(step: int, words: list[str]) -> None:
    from megatron_nemotron3 import cli

    calls = 0
    for name in STEPS:
        real = getattr(os, name)

        def counted_call(*args: Any, real: Any = real, **options: Any) -> Any:
            nonlocal calls
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return real(*args, **options)

        setattr(os, name, counted_call)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    os._exit(calls if cli.main(words) == 0 else 255)
