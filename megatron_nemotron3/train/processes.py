"""Start the training processes, follow their log, and pass on interrupts so that they save first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ENTRY = Path(__file__).parent / "pretrain_script.py"


def command(argv: Sequence[str], world_size: int, device: str) -> list[str]:
    """Return the command line: our launcher, under torchrun if there are several ranks."""
    start = [sys.executable]
    if world_size > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return [*start, "-m", "megatron_nemotron3.run", "--device", device, str(ENTRY), *argv]


def environment(world_size: int, device: str) -> dict[str, str]:
    """Return the caller's environment; on a CPU each rank gets its share of the cores."""
    result = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        result.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
        result.setdefault("PYTHONWARNINGS", "ignore")
    # The package may be in use from a checkout without being installed.
    here = str(Path(__file__).parent.parent.parent)
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [here, result.get("PYTHONPATH")]))
    return result


def follow(
    words: Sequence[str],
    env: dict[str, str],
    log: Path,
    on_line: Callable[[str], None],
    on_interrupt: Callable[[], None],
) -> int:
    """Run a command, append its output to `log`, call `on_line` for each line; return the exit status.

    The first interrupt (Ctrl-C or SIGTERM) asks the processes to save and leave (`--exit-signal-handler`),
    a second one kills them. They run in a session of their own, so the terminal's signal does not reach them.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            words,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        interrupts = 0

        def stop(signum: int, frame: object) -> None:
            nonlocal interrupts
            interrupts += 1
            on_interrupt()
            _signal_group(process.pid, signal.SIGTERM if interrupts == 1 else signal.SIGKILL)

        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_line(line)
            return process.wait()
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
