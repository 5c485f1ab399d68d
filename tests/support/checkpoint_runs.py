"""Small training runs through the launcher, and runs that die in the middle of a save."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

from megatron_nemotron3.common import lock
from megatron_nemotron3.common.ranks import Call, free_port, run_ranks
from megatron_nemotron3.launch import ParallelLayout, manifest
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.proof.certify.ranks import PRELOAD
from megatron_nemotron3.train import log, processes
from tests.support import distributed
from tests.support.short_run import mock_argv, short_schedule

#: Three layers, one of each kind, and MTP.
CONFIG = tiny(get("super")).but(pattern="ME*", vocab_size=255)
STEPS, EVERY = 6, 2


def argv(layout: ParallelLayout, *extra: str, **folders: str) -> list[str]:
    """Launcher arguments of a run of `STEPS` steps that saves every `EVERY` where `save` is given."""
    schedule = short_schedule(STEPS, seq_length=32, global_batch_size=2, save_interval=EVERY)
    words = mock_argv(CONFIG, layout, schedule, extra, **folders)
    return ["--device", "cpu", str(processes.ENTRY), *words]


def train(layout: ParallelLayout, *extra: str, **folders: str) -> tuple[log.Curve, str]:
    """(losses, everything printed) of a run that comes to its end."""
    output = distributed.run_launcher(argv(layout, *extra, **folders), layout.world_size, timeout=240)
    curve = log.Curve()
    for line in output.splitlines():
        curve.add(line)
    return curve, output


def die_while_saving(
    layout: ParallelLayout, folder: Path, event: int, limit: int | None, *extra: str
) -> list[str]:
    """Resume from `folder`, save into it, and die at rank 0's `event`-th file operation in there.

    Args:
        event: from 0; past the last one the run comes to its end.
        limit: None: SIGKILL before the operation. A number: the operation is done, and the process is
            killed by the kernel as it writes the byte of that number into any file.

    Returns: "event path" of the operations that were begun, the fatal one included.
    """
    journal = folder.parent / f"{folder.name}.journal"
    journal.write_text("")
    words = argv(layout, "--exit-interval", str(2 * EVERY), *extra, save=str(folder), load=str(folder))
    arguments = (words, str(folder), str(journal), event, limit)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with mock.patch.dict(os.environ, environment):
        call = Call(_launch_mortally, arguments)
    try:
        run_ranks(call, layout.world_size, timeout=240, preload=PRELOAD)
    except RuntimeError as death:
        # Another rank may be the first to report: it has lost its peer.
        signs = ("exit code -9", f"exit code -{signal.SIGXFSZ}", "gloo/transport/tcp")
        assert any(sign in str(death) for sign in signs), death
    finally:
        lines = journal.read_text().splitlines()
        for pid in (line.split()[1] for line in lines if line.startswith("session")):
            # The writer's helper processes outlive a killed parent; they are in the session it made.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)
    return [line for line in lines if not line.startswith("session")]


def _launch_mortally(words: list[str], folder: str, journal: str, fatal: int, limit: int | None) -> str:
    os.setsid()
    notes = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(notes, f"session {os.getpid()}\n".encode())
    if os.environ["RANK"] == "0":
        _arm(notes, folder, fatal, limit)
    return distributed.launch(words)


#: What the launcher writes before the script starts: no part of a save.
_BEFORE = (lock.NAME, manifest.NAME)


def _arm(notes: int, folder: str, fatal: int, limit: int | None) -> None:
    count = -1

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event not in ("open", "os.rename", "os.mkdir", "os.remove") or not _inside(args, folder):
            return
        if event == "open" and isinstance(args[2], int) and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return  # reading changes nothing
        target = args[1] if event == "os.rename" else args[0]
        if str(target) == folder or any(own in os.path.basename(str(target)) for own in _BEFORE):
            return
        count += 1
        os.write(notes, f"{event} {os.path.relpath(str(target), folder)}\n".encode())
        if count != fatal:
            return
        if limit is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    sys.addaudithook(hook)


def _inside(args: tuple[object, ...], folder: str) -> bool:
    return bool(args) and isinstance(args[0], (str, os.PathLike)) and str(args[0]).startswith(folder)


def copy(source: Path, target: Path, *names: str) -> Path:
    """Copy checkpoints of `source` with their times; the tracker names the last of `names`."""
    target.mkdir(parents=True)
    for name in names:
        shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(int(names[-1].split("_")[1])))
    return target
