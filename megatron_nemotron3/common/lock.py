"""Directory write lock: one run writes to a folder, and the lock ends with the processes of the run.

    with held(folder):
        ...

The lock is the kernel's (`flock`) on `folder/.nemotron3.lock`, so it also ends with `kill -9`. The file lists
the holders: one JSON line per process, first the one that took the lock. Processes of one run have one key
and share it: ranks hold the folder even if the command that started them is killed. filelock's `FileLock` has
no shared lock, and a forked child releases it; only where the file system has no `flock` its `SoftFileLock`
admits one process at a time, and the file alone lists the holders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_nemotron3.common.files import printable
from megatron_nemotron3.common.processes import alive
from megatron_nemotron3.common.switches import LOCK

NAME = ".nemotron3.lock"
#: Seconds to wait for the children of a killed holder, which end on their own.
PATIENCE = 15.0
#: Seconds to wait for `holder` in another process, which takes the lock for a moment.
_LOOK = 0.5
_LIMIT = 1 << 20
_LONGEST_COMMAND = 300
#: What file systems without locks answer.
_UNSUPPORTED = (
    *(errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EPERM),
)


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock."""

    host: str
    pid: int
    command: str
    #: Local time.
    since: str
    #: Of the run.
    key: str
    #: The machine's boot and the process's start in it, in 1/100 s, because process ids are reused.
    boot: str = ""
    start: int = 0

    def __str__(self) -> str:
        return printable(f"{self.pid} on {self.host} since {self.since}: {self.command}")

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended; False for one on another machine."""
        if self.host != socket.gethostname():
            return False
        if self.boot and (boot := _boot()) and boot != self.boot:
            return True
        start = _start(self.pid)
        return not alive(self.pid) or bool(self.start and start and start != self.start)


def run_key() -> str:
    """Return the key that the ranks of one run share, from the environment that started them."""
    if key := os.environ.get(LOCK):
        return key
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return uuid.uuid4().hex
    return ":".join(
        os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    )


@contextlib.contextmanager
def held(
    folder: Path,
    command: str | None = None,
    *,
    key: str | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = print,
) -> Iterator[str]:
    """Hold the lock of a folder, which is created; yield the key of the run.

    At the end the lock's file is removed, and the folder, too, if it was created here and is empty.

    Args:
        command: what to call this process in messages; None: its command line.
        key: of the run whose processes share the lock; None: a new one.
        patience: seconds to wait for the children of a killed holder.

    Raises:
        ValueError: another run holds the folder.
    """
    key = key or uuid.uuid4().hex
    command = shlex.join(["nemotron3", *sys.argv[1:]]) if command is None else command
    since, pid = time.strftime("%Y-%m-%d %H:%M:%S"), os.getpid()
    own = Holder(socket.gethostname(), pid, command[:_LONGEST_COMMAND], since, key, _boot(), _start(pid))
    created = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _taken(folder, own, patience, say)
        try:
            yield key
        finally:
            if os.getpid() == own.pid:  # a forked child shares the lock with its parent
                _release(folder / NAME, descriptor, own)
    finally:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def holder(folder: Path) -> Holder | None:
    """Return the holder of a folder's lock, or None. Changes nothing."""
    path = folder / NAME
    try:
        descriptor = _open(path, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    try:
        found = _records(descriptor)
        try:
            if _flock(descriptor, fcntl.LOCK_EX):
                return None
        except OSError as problem:  # no locks here, or none without the right to write
            if problem.errno not in (*_UNSUPPORTED, errno.EBADF):
                raise
            return next((record for record in found if not record.ended), None)
        living = (record for record in found if not record.ended)
        return next(living, found[0] if found else Holder("?", 0, "?", "?", ""))
    finally:
        os.close(descriptor)


def _taken(folder: Path, own: Holder, patience: float, say: Callable[[str], None]) -> int:
    """Take the lock, or join the run that holds it; return the descriptor that keeps it."""
    path, began, reported = folder / NAME, time.monotonic(), False
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            if _attempt(path, descriptor, own):
                return descriptor
            found = _records(descriptor)
        except OSError as problem:
            os.close(descriptor)
            if problem.errno in _UNSUPPORTED:
                return _taken_by_record(path, own, say)
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        os.close(descriptor)
        waited = time.monotonic() - began
        orphaned = bool(found) and found[0].ended
        if waited > (patience if orphaned else _LOOK):
            raise ValueError(_refusal(folder, found, orphaned))
        if orphaned and waited > _LOOK and not reported:
            reported = True
            say(f"{folder}: waiting for processes that a killed command left ({found[0]})")
        time.sleep(0.05)


def _attempt(path: Path, descriptor: int, own: Holder) -> bool:
    """Take the lock, or join the run that holds it, if that is possible now."""
    if _flock(descriptor, fcntl.LOCK_EX):
        # The last holder may have removed the file since it was opened.
        if not _is_file(path, descriptor):
            return False
        _write(descriptor, own, truncate=True)
    # The kernel releases the exclusive lock before it grants the shared one. In between another run may take
    # it, or another rank of this run, which empties the file.
    if not _flock(descriptor, fcntl.LOCK_SH):
        return False
    if not _is_file(path, descriptor) or _first_key(descriptor) != own.key:
        return False
    if own not in _records(descriptor):
        _write(descriptor, own)
    return True


def _taken_by_record(path: Path, own: Holder, say: Callable[[str], None]) -> int:
    """Like `_taken`, for file systems without locks."""
    from filelock import SoftFileLock, Timeout

    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    if _first_key(descriptor) == own.key:  # thousands of ranks need not wait for each other
        _write(descriptor, own)
        return descriptor
    os.close(descriptor)
    try:
        with SoftFileLock(f"{path}.take", timeout=PATIENCE), contextlib.ExitStack() as undo:
            descriptor = _open(path, os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, descriptor)
            living = [record for record in _records(descriptor) if not record.ended]
            if living and living[0].key != own.key:
                raise ValueError(
                    f"{_refusal(path.parent, living, False)}; the file system has no locks: if that process "
                    f"has ended, remove {path}"
                )
            _write(descriptor, own, truncate=not living)
            undo.pop_all()
    except Timeout:
        raise ValueError(f"{path}.take: a process that was killed left it: remove it") from None
    if not living:
        say(f"{path.parent}: the file system has no locks; {NAME} alone says that this run writes here")
    return descriptor


def _release(path: Path, descriptor: int, own: Holder) -> None:
    """Release the lock; remove its file if no other process shares it."""
    try:
        try:
            alone = _flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            alone = all(record.ended or record.pid == own.pid for record in _records(descriptor))
        if alone and _is_file(path, descriptor):
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)


def _refusal(folder: Path, found: list[Holder], orphaned: bool) -> str:
    if not found:
        return f"{folder} is in use by another process (wait for it, or choose another folder)"
    text = f"{folder} is in use by {found[0]}"
    if not orphaned:
        return f"{text} (wait for it, or choose another folder)"
    pids = ", ".join(map(str, _users(folder / NAME))) or "on this or another machine"
    return f"{text}; that process has ended, but one that it started has not (process {pids}): end it first"


def _users(path: Path) -> list[int]:
    """Ids of other processes that have a file open, as far as this user may see them."""
    import psutil

    found, target = [], os.path.realpath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(file.path == target for file in process.open_files()):
                found.append(process.pid)
    return sorted(found)


def _open(path: Path, flags: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{path}: it is no regular file: remove it")
    return os.open(path, flags | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _flock(descriptor: int, kind: int) -> bool:
    """Take a kernel lock without waiting; False if another process has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write(descriptor: int, own: Holder, *, truncate: bool = False) -> None:
    if truncate:
        os.ftruncate(descriptor, 0)
    os.write(descriptor, (json.dumps(asdict(own)) + "\n").encode())


def _first_key(descriptor: int) -> str | None:
    found = _records(descriptor)
    return found[0].key if found else None


def _records(descriptor: int) -> list[Holder]:
    """Read the processes in the file; malformed lines are left out."""
    found = []
    for line in os.pread(descriptor, _LIMIT, 0).splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            record = Holder(**json.loads(line))
            typed = all(type(getattr(record, f.name)).__name__ == f.type for f in fields(Holder))
            if typed and 0 <= record.pid < 1 << 31:
                found.append(record)
    return found


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _start(pid: int) -> int:
    """Start of a process in 1/100 s since boot; 0: unknown."""
    import psutil

    boot = psutil.boot_time()  # first: older versions keep it for what follows
    with contextlib.suppress(psutil.Error, OSError):
        return round(100 * (psutil.Process(pid).create_time() - boot))
    return 0
