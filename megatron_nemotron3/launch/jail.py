"""Run bash so that a script can compute and nothing else: write no file, start no program, open no socket.

A seccomp filter (Linux 5.5, libseccomp 2.5) is on the bash process and all its forks: system calls that are
not in `_ALLOWED` fail. Opening a file for writing returns file descriptor 0, which is /dev/null: so a
redirection does not stop the command that has it. Every fork waits for the caller (`_Forks`), who counts
processes, time and memory, and ends the whole group.

As a script, `python -I -S jail.py RECORD SOCKET TRUSTED PATHS BASH ARGUMENTS`, this file becomes that bash.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

#: Limits of all processes together: seconds, bytes in memory, processes. Launch scripts take a tenth of them.
SECONDS, MEMORY, PROCESSES = 5, 768 << 20, 64
#: Seconds for the Python that becomes bash.
_START = 30
#: Descriptor of the record: scripts use small ones, and 200 for locks.
RECORD = 251
_LIBRARY = "libseccomp.so.2"
#: Where the linker looks for libraries.
_PATHS = "LD_LIBRARY_PATH"
#: Characters of what a Python that does not start says.
_SAID = 300
#: Results of a filtered call; the errno is added to the second.
_PASS, _FAIL, _ASK = 0x7FFF0000, 0x00050000, 0x7FC00000
_EQUAL, _GREATER, _MASKED = 4, 6, 7
_EPERM, _ENOSYS = 1, 38
#: SECCOMP_IOCTL_NOTIF_RECV and _SEND, size of what is received, and SECCOMP_USER_NOTIF_FLAG_CONTINUE.
_RECEIVE, _SEND, _NOTIFICATION, _CONTINUE = 0xC0502100, 0xC0182101, 80, 1
_WRITES = (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC)
#: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC.
_FCNTL = (0, 1, 2, 3, 4, 1030)
#: CLONE_VM and the namespaces of clone(2).
_CLONE = 0x7E020100
#: What bash itself needs. Kernels and C libraries differ in which of these they use.
_ALLOWED = """
access faccessat faccessat2 stat lstat fstat fstat64 newfstatat statx readlink readlinkat getcwd chdir fchdir
read pread64 readv write writev lseek dup dup2 dup3 pipe pipe2 select pselect6 poll ppoll getdents64
brk mmap munmap mprotect mremap madvise rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend sigaltstack
wait4 waitid exit exit_group restart_syscall futex set_tid_address set_robust_list rseq arch_prctl
getpid getppid getpgrp getpgid getsid gettid getuid geteuid getgid getegid getgroups getresuid getresgid
uname sysinfo umask times getrusage getrlimit clock_gettime gettimeofday time getrandom sched_getaffinity
nanosleep clock_nanosleep
"""


class _ArgumentTest(ctypes.Structure):
    """`struct scmp_arg_cmp`: argument `argument` is compared with `first`, or masked by it with `second`."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class JailError(Exception):
    """Bash cannot be run in this way here."""


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    trusted: bool = False,
    seconds: float | None = None,
) -> str:
    """Run bash; "" if it ended by itself, else the limit that it exceeded.

    Args:
        arguments: of bash.
        environment: all variables that bash gets.
        folder: gets a file "printed" with what bash prints, and a file "record", which bash can append to as
            descriptor `RECORD`.
        trusted: start bash without the filter if there is none here.
        seconds: limit of time (SECONDS).

    Raises:
        JailError: no bash, or no filter.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise JailError("there is no bash on this machine")
    with (
        (folder / "printed").open("wb") as printed,
        (folder / "record").open("ab") as recorded,
        contextlib.closing(_Forks()) as forks,
    ):
        descriptors = [recorded.fileno(), forks.theirs.fileno()]
        # Python may find its library by the caller's variable, which bash does not get.
        paths = {name: os.environ[name] for name in (_PATHS,) if name in os.environ}
        own = [__file__, *map(str, descriptors), str(int(trusted)), environment.get(_PATHS, ""), bash]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", *own, *arguments],
            env={**environment, **paths},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=descriptors,
            start_new_session=True,
        )
        forks.theirs.close()
        try:
            exceeded = _watch(process, forks, seconds or SECONDS)
        except BaseException:
            _end(process)
            raise
        if exceeded:
            _end(process)
        if process.returncode == -signal.SIGUSR2:  # bash sends no signals
            raise JailError((folder / "printed").read_text(errors="replace").strip())
        forks.wait(0)
        if not forks.begun:
            raise JailError(f"Python did not start within {_START} s")
        if not trusted and forks.filter is None:
            said = (folder / "printed").read_text(errors="replace").strip() or "are all descriptors in use?"
            raise JailError(f"no filter of system calls arrived ({said[:_SAID]})")
    return exceeded


class _Forks:
    """Forks of the filtered processes, which wait until they are allowed (seccomp_unotify(2))."""

    def __init__(self) -> None:
        #: The child sends the descriptor of its filter when bash begins.
        self.ours, self.theirs = socket.socketpair()
        self.filter: int | None = None
        self.begun = False

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        if self.filter is not None:
            os.close(self.filter)

    def wait(self, seconds: float) -> int | None:
        """Wait for a fork at most so long; return its number, None if there is none."""
        if self.filter is None:
            if select.select([self.ours], [], [], seconds)[0]:
                self.begun = True
                _, descriptors, _, _ = socket.recv_fds(self.ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
                if not descriptors:  # trusted, and no filter, or it has ended before
                    time.sleep(seconds)
                self.filter = next(iter(descriptors), None)
            return None
        poll = select.poll()
        poll.register(self.filter, select.POLLIN)
        if not any(event & select.POLLIN for _, event in poll.poll(1000 * seconds)):
            return None
        notification = bytearray(_NOTIFICATION)
        with contextlib.suppress(OSError):  # the process ended meanwhile, or a signal interrupted the call
            fcntl.ioctl(self.filter, _RECEIVE, notification)
            return int.from_bytes(notification[:8], sys.byteorder)
        return None

    def allow(self, number: int) -> None:
        """Let a fork happen."""
        assert self.filter is not None
        with contextlib.suppress(FileNotFoundError):  # as above
            fcntl.ioctl(self.filter, _SEND, struct.pack("=QqiI", number, 0, 0, _CONTINUE))


def _watch(process: subprocess.Popen[bytes], forks: _Forks, seconds: float) -> str:
    """Wait for the end of a process and of all that it started; return the limit that they exceed before."""
    deadline, begun = time.monotonic() + _START, False
    most = looked = empty = 0.0  # possible processes, time of the last count, counts of none in a row
    while (now := time.monotonic()) < deadline:
        fork = forks.wait(0.02)
        if forks.begun and not begun:
            deadline, begun = now + seconds, True
        most += fork is not None
        if fork is None or most > PROCESSES or now > looked + 0.02:
            process.poll()
            members = list(islice(_group(process.pid), PROCESSES + 1))
            empty = 0 if members else empty + 1
            if empty == 2:  # one look can miss a process that begins while its parent ends
                process.wait()
                return ""
            if len(members) + (fork is not None) > PROCESSES:
                return f"starts more than {PROCESSES} processes"
            if sum(members) > MEMORY:
                return f"takes more than {MEMORY >> 20:,} MiB of memory"
            most, looked = len(members) + (fork is not None), now
        if fork is not None:
            forks.allow(fork)
    return f"takes more than {SECONDS} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while next(_group(process.pid), None) is not None:
        time.sleep(0.05)


def _group(group: int) -> Iterator[int]:
    """Bytes in memory of every process of a group that runs; others are passed over quickly."""
    import psutil

    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(pid) == group and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                yield process.memory_info().rss


def _become_bash(
    record: int, caller: socket.socket, bash: str, arguments: Sequence[str], trusted: bool
) -> None:
    """Replace this process by bash, with limits and the filter."""
    with contextlib.suppress(AttributeError):  # Linux: PR_SET_PDEATHSIG, for a caller that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for kind, limit in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY // 4),
        (resource.RLIMIT_FSIZE, MEMORY // 64),
        (resource.RLIMIT_CORE, 0),
    ):
        # The hard limit is lower, or the system knows no such limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))
    if record != RECORD:
        os.dup2(record, RECORD)
        os.close(record)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    program = os.open(bash, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _filter(program, caller)
    except (OSError, AttributeError) as problem:
        if not trusted:
            print(f"no filter of system calls ({problem})", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGUSR2)
        os.execv(bash, ["bash", *arguments])
    os.execve(program, ["bash", *arguments], os.environ)  # execveat, which bash itself never calls


def _filter(program: int, caller: socket.socket) -> None:
    """Load the filter and send it to the caller; OSError or AttributeError if that fails."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 5):
        raise OSError(_ENOSYS, "Linux is older than 5.5")
    library: Any = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL | _ENOSYS)))

    def rule(result: int, call: str, *comparison: int) -> None:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:  # not on this architecture
            return
        compared = (_ArgumentTest * 1)(_ArgumentTest(*comparison))
        status = library.seccomp_rule_add_array(
            context, ctypes.c_uint32(result), number, bool(comparison), compared
        )
        if status:
            raise OSError(-status, f"{_LIBRARY} rejects a rule for {call}")

    for call in _ALLOWED.split():
        rule(_PASS, call)
    for call in ("execve", "kill", "socket"):  # bash says "Operation not permitted"
        rule(_FAIL | _EPERM, call)
    for call, flags in (("open", 1), ("openat", 2)):
        rule(_PASS, call, flags, _MASKED, sum(_WRITES), 0)
        for bit in _WRITES:
            rule(_FAIL | 0, call, flags, _MASKED, bit, bit)
    rule(_PASS, "execveat", 0, _EQUAL, program)
    for command in _FCNTL:
        rule(_PASS, "fcntl", 1, _EQUAL, command)
    rule(_PASS, "close", 0, _GREATER, 0)
    rule(_FAIL | 0, "close", 0, _EQUAL, 0)
    rule(_ASK, "fork")
    rule(_ASK, "clone", 0, _MASKED, _CLONE, 0)
    rule(_PASS, "sendmsg", 0, _EQUAL, caller.fileno())  # no socket is left when bash begins
    rule(_PASS, "prlimit64", 2, _EQUAL, 0)  # asks for a limit, sets none
    if status := library.seccomp_load(context):
        raise OSError(-status, "the kernel rejects the filter")
    socket.send_fds(caller, [b"f"], [library.seccomp_notify_fd(context)])


if __name__ == "__main__":
    # Above the descriptors that bash and scripts use.
    _caller = socket.socket(fileno=fcntl.fcntl(int(sys.argv[2]), fcntl.F_DUPFD_CLOEXEC, RECORD + 1))
    os.close(int(sys.argv[2]))
    os.environ.pop(_PATHS, None)
    os.environ |= {_PATHS: sys.argv[4]} if sys.argv[4] else {}
    _become_bash(int(sys.argv[1]), _caller, sys.argv[5], sys.argv[6:], sys.argv[3] == "1")
