"""A guarded process: anything a reader does beyond reading its folder is reported.

Watched are, for each case: the exception (a ValueError is right, anything else is a finding), processor time,
memory, every file that is opened outside the folder, every file that is written or removed outside of it,
and everything by which code is run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Limits of a case: seconds of processor time, bytes.
SECONDS = 2.0
MEMORY = 300 << 20

ROOT = Path(__file__).resolve().parents[2]
_READABLE = tuple(
    dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, str(ROOT), "/proc", "/dev/null", "/usr/lib"))
)
_CODE = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.", "pickle.find_class",
    "code.__new__", "webbrowser.open", "ctypes.dlopen", "urllib.Request", "ftplib.", "smtplib.",
)  # fmt: skip
#: A lock names its host.
_HARMLESS = ("socket.gethostname",)
_PATHS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown")
_PATHS += ("os.truncate", "os.utime", "shutil.", "os.mkfifo", "os.mknod")
_IMPORTABLE = ("megatron_nemotron3", "tests", "numpy", "torch", "psutil", *sys.stdlib_module_names)


@dataclass(frozen=True)
class Violation:
    """What a case did that it must not."""

    case: int
    what: str


class _Caught(BaseException):
    """Not an Exception: readers that catch those must not hide it."""


def run(
    cases: Sequence[int], prepare: Callable[[int], Any], do: Callable[[int], Any], folder: Path
) -> list[Violation]:
    """`prepare(case)`, then `do(case)` under watch, for every case; in a new process behind one that died.

    Args:
        do: may read and write below `folder`, and must return or raise ValueError.
    """
    found: list[Violation] = []
    todo = list(cases)
    while todo:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(todo, prepare, do, folder, write)
        os.close(write)
        with open(read, "rb") as pipe:
            lines = [json.loads(line) for line in pipe.read().splitlines()]
        _, status = os.waitpid(pid, 0)
        began = [line["case"] for line in lines if "what" not in line]
        found += [Violation(line["case"], line["what"]) for line in lines if "what" in line]
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) == 0:
            return found
        if not began:
            raise RuntimeError(f"the guarded process ended before its first case: status {status}")
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        what = (
            f"more than {SECONDS:g} s" if number == signal.SIGPROF else f"the process died, status {status}"
        )
        if not found or found[-1].case != began[-1]:
            found.append(Violation(began[-1], what))
        todo = todo[todo.index(began[-1]) + 1 :]
    return found


def _child(
    cases: Sequence[int], prepare: Callable[[int], Any], do: Callable[[int], Any], folder: Path, write: int
) -> None:
    try:

        def tell(line: dict[str, Any]) -> None:
            os.write(write, (json.dumps(line) + "\n").encode())

        watch = _Watch(folder)
        used = int(
            next(s.split()[1] for s in Path("/proc/self/status").read_text().splitlines() if "VmData" in s)
        )
        resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for case in cases:
            tell({"case": case})
            what = None
            prepare(case)
            watch.caught.clear()
            watch.on = True
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    do(case)
            except ValueError:
                pass
            except _Caught:
                pass
            except BaseException as problem:
                last = traceback.extract_tb(problem.__traceback__)[-1]
                place = f"{Path(last.filename).name}, {last.name}"
                what = f"{type(problem).__name__}: {str(problem)[:200]} ({place})"
            watch.on = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            if watch.caught:
                what = watch.caught[0]
            if what is not None:
                tell({"case": case, "what": what})
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


class _Watch:
    """Looks at what this process does, while `on`; Python has no way to take it off again."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.caught: list[str] = []
        self._home = os.path.realpath(folder)
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        wrong = None
        if event == "open":
            path, _, flags = arguments
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
            if path is not None and not _inside(path, [self._home] if writes else [self._home, *_READABLE]):
                wrong = f"{'wrote' if writes else 'read'} {path!r:.200}"
        elif event == "import":
            if arguments[0].partition(".")[0] not in _IMPORTABLE:
                wrong = f"imported {arguments[0]}"
        elif (event.startswith(_CODE) and event not in _HARMLESS) or (
            event.startswith(_PATHS)
            and not all(
                _inside(a, [self._home]) for a in arguments if isinstance(a, (str, bytes, os.PathLike))
            )
        ):
            wrong = f"{event} {arguments!r:.200}"
        if wrong is not None:
            self.caught.append(wrong)
            raise _Caught(wrong)


def _inside(path: Any, roots: Sequence[str]) -> bool:
    if isinstance(path, int):
        return True
    real = os.path.realpath(os.fsdecode(path))
    return any(real == root or real.startswith(root + "/") for root in roots)
