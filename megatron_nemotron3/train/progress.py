"""The state of a training by its log: what is printed meanwhile, and why it stopped."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import sys
import tempfile
from pathlib import Path

from megatron_nemotron3.checkpoints.folders import free_bytes
from megatron_nemotron3.common.output import Bar, drawn_on
from megatron_nemotron3.train import log

_SAVING = re.compile(r"saving checkpoint at iteration +(\d+) ")
_SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+) ")
#: A line of a traceback that leads into a save.
_IN_SAVE = re.compile(r", in (save_checkpoint|maybe_finalize_async_\w+|write_preloaded_data)")
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|SystemExit)(?::|$)")
#: Where a traceback is, of which an assertion without a message is the last line.
_PLACE = re.compile(r'File "(?:.*/site-packages/)?(.+)", line (\d+), in ')
_ASSERTION = "AssertionError"
#: What torchrun says of any rank that failed; the reason is in the rank's own lines, or is a signal.
_OF_TORCHRUN = "ChildFailedError"
_ERRNO = re.compile(r"\[Errno (\d+)\]")
#: A line of this package, not torchrun's banner about its module.
_OURS = re.compile(r"megatron_nemotron3[.\w]*: ")
#: A line of `monitor.not_finite`, which each rank that finds something prints.
_NOT_FINITE = re.compile(r"megatron_nemotron3: (step \d+), (rank \d+)(: .*)")
_SIGNALLED = "exiting program after receiving SIGTERM"
#: What one of the checkpoint writer's threads met.
_WORKER = re.compile(r"Local worker \d+ encountered an error: (.*)")
_KILLED = re.compile(r"exitcode +: -(\d+) ")
#: What the other ranks say when one of them was killed.
_CONNECTION = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited")

_RESULTS = "the process that collects the results of Megatron's checkpoint writer ended: was it killed?"
#: What is wrong and what to do, by the number of the operating system's error.
_BY_NUMBER = {
    errno.ENOSPC: "the disk is full ({free:,.0f} MB are free): free disk space or choose another --output",
    errno.EDQUOT: "the disk quota is used up: free disk space or choose another --output",
    errno.EFBIG: "a file exceeds the limit on its size: raise `ulimit -f`, or choose an --output without one",
    errno.ENOENT: "a file or folder there is missing: let no other process move or remove it",
    errno.ENOTDIR: "a file is where a folder should be: move it away",
    errno.EPIPE: _RESULTS,
    errno.ECONNRESET: _RESULTS,
    errno.ECONNREFUSED: _RESULTS,
    errno.ENOMEM: "memory is used up: use a smaller model or fewer ranks",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "{what}: make the folder writable or choose another --output",
    ),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO), "{what}: check the disk, or the server it is on"),
}
#: The same, by what Megatron or torch prints.
_BY_TEXT = {
    "No space left on device": _BY_NUMBER[errno.ENOSPC],
    "results_queue should not be empty": "Megatron's checkpoint writer ended early: was it killed?",
    "EOFError": _RESULTS,
    "MemoryError": _BY_NUMBER[errno.ENOMEM],
    "Failed to validate global plan": "Megatron cannot save this model in this layout",
}


class TrainProgress:
    """Print one line per logged step, and keep what the message at the end needs."""

    def __init__(
        self,
        verbose: bool = False,
        begun: int = 0,
        total: int | None = None,
        seq_length: int = 0,
        *,
        averaged: bool = False,
    ) -> None:
        """`averaged`: the losses of the log are Megatron's means, as in models without experts."""
        self.verbose, self._averaged = verbose, averaged
        self._begun, self._planned, self._seq_length = begun, total, seq_length
        self._bar: Bar | None = None
        #: Interrupts so far.
        self.interrupts = 0
        #: The last step that was logged.
        self.last: int | None = None
        self.total: int | None = None
        #: Steps of the last save that was begun and of the last one that succeeded.
        self.saving: int | None = None
        self.saved: int | None = None
        #: Whether the first step has begun, and the last one has ended.
        self.training = False
        self.trained = False
        self.first_error = ""
        #: Rank -> step, rank and reason for which Megatron ends the run.
        self._not_finite: dict[str, tuple[str, ...]] = {}
        self._place = self._statement = ""
        self._number: int | None = None
        self._worker_error = ""
        #: Whether a rank received SIGTERM, on which all of them save and leave with status 0.
        self._signalled = False
        self._in_save = False
        self._killed_by: int | None = None
        self._live = drawn_on(sys.stdout) and not verbose
        self._printed = 0
        #: Lines of steps so far, and the step after which the sums of the next line begin.
        self._lines, self._summed_from = 0, begun
        self._evaluated: int | None = None

    @property
    def was_interrupted(self) -> bool:
        return self.interrupts > 0 or self._signalled

    @property
    def stopped_at_once(self) -> bool:
        """Whether an interrupt ended the ranks, instead of asking them to save and leave."""
        return self.interrupts > 1 or self.was_interrupted and (not self.training or self.finished)

    @property
    def finished(self) -> bool:
        """Whether the last step is saved: only evaluations may follow."""
        return self.trained and self.total is not None and self.saved == self.total

    def line(self, text: str) -> None:
        if self.verbose:
            print(text, end="", flush=True)
        self._follow(text)
        item = log.parse(text)
        if isinstance(item, log.LogStep):
            self.last, self.total, self.training = item.iteration, item.total, True
        if self.verbose:
            return
        if self._live and self.training and self._bar is None:
            self._bar = Bar("train", "step", self._planned, begun=self._begun, keep=True, stream=sys.stdout)
        if found := _NOT_FINITE.match(text):
            self._not_finite[found[2]] = found.groups()
        elif _OURS.match(text):
            self._say(text.removesuffix("\n"))
        elif isinstance(item, log.LogStep):
            self._step(item)
        elif isinstance(item, log.Validation) and item.which == "validation":
            self._validation(item)

    def _follow(self, text: str) -> None:
        if found := _SAVING.search(text):
            self.saving = int(found[1])
        elif found := _SAVED.search(text):
            self.saved = int(found[1])
        elif "[before the start of training step]" in text:
            self.training = True
        elif "[after training is done]" in text:
            self.trained = True
        elif _SIGNALLED in text:
            self._signalled = True
            if not self.interrupts:
                self._say("a training process received SIGTERM: all have saved, and leave")
        elif (found := _KILLED.search(text)) and self._killed_by in (None, signal.SIGTERM):
            self._killed_by = int(found[1])  # torchrun ends the other ranks by SIGTERM
        self._in_save = self._in_save or _IN_SAVE.search(text) is not None
        if self._number is None and (found := _ERRNO.search(text)):
            self._number = int(found[1])
        stripped = text.split("]: ", 1)[-1].strip()
        if not self._worker_error and (found := _WORKER.search(text)):
            self._worker_error = found[1][:300]
        if found := _PLACE.match(stripped):
            self._place = f"{found[1]}, line {found[2]}"
        elif stripped.startswith("assert"):
            self._statement = stripped
        if not self.first_error and _ERROR.match(stripped) and _OF_TORCHRUN not in stripped:
            where = f" in {self._place}: {self._statement}" if stripped == _ASSERTION else ""
            self.first_error = (stripped + where)[:300]
        for known in _BY_TEXT:
            if known in stripped and known not in self.first_error:
                self.first_error = stripped[:300]

    def _step(self, step: log.LogStep) -> None:
        # A terminal shows a bar; a file gets about twenty lines.
        mtp = " ".join(f"{loss:.3f}" for loss in step.mtp)
        mean = self._mean_of(step)
        last = step.iteration == step.total
        if self._bar is not None:
            tokens = step.values.get("global batch size", 0) * self._seq_length
            note = f"loss {step.loss:.3f}{mean}" + (f", MTP {mtp}" if mtp else "")
            note += f", {tokens / step.seconds:,.0f} tokens/s" if tokens and step.seconds else ""
            self._bar.to(step.iteration, step.total, note=note)
        elif last or step.iteration >= self._printed + step.total / 20 or step.iteration == 1:
            self._printed = step.iteration
            losses = f"loss {step.loss:.3f}{mean}" + (f"  MTP {mtp}" if mtp else "")
            print(f"step {step.iteration:5d}/{step.total}  {losses}  {step.seconds:.2f} s/step", flush=True)

    def _mean_of(self, step: log.LogStep) -> str:
        """The number of steps whose mean a loss is; "" for the loss of one step."""
        steps = step.iteration - self._summed_from
        # Megatron's sums do not begin again after the first line of a process.
        self._summed_from = step.iteration if self._lines else self._summed_from
        self._lines += 1
        return f" (mean of {steps} steps)" if self._averaged and steps > 1 else ""

    def _validation(self, item: log.Validation) -> None:
        if item.again and item.iteration == self._evaluated:
            # The training loop evaluates a last step that falls on the interval, and Megatron does it again.
            self._say(f"after training, on the next batches of the validation set: {item.loss:.3f}")
        else:
            self._say(f"step {item.iteration:5d}  validation loss {item.loss:.3f}")
        self._evaluated = item.iteration

    def _say(self, text: str) -> None:
        with self._bar.paused() if self._bar is not None else contextlib.nullcontext():
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def interrupted(self) -> bool:
        """Say what an interrupt does; return whether the ranks are to save and leave, or to stop at once."""
        self.interrupts += 1
        saves = self.interrupts == 1 and self.training
        if self.interrupts > 1:
            self._say("\nstopping at once")
        elif not self.training:
            self._say("\ninterrupted before the first step: stopping")
        else:
            what = (
                "waiting until the last step is saved" if self.trained else "finishing this step, then saving"
            )
            self._say(f"\ninterrupted: {what}; interrupt again to stop at once")
        return saves

    def on_disk(self, saved: int | None, complete: bool) -> str:
        where = "no checkpoint was saved" if saved is None else f"step {saved} is saved"
        last = self.last or 0
        if last > (saved or 0):
            first = (saved or 0) + 1
            where += f", and step {last} is" if first == last else f", and steps {first} to {last} are"
            where += " lost"
        elif self.training and not complete and not self.finished and not self._not_finite:
            where += ", and what was trained after it is lost"
        elif self.finished:
            where += ", which was the last"
        if self._not_finite:
            return where
        return where + ("; the same command " + ("starts again" if saved is None else "resumes from there"))

    def cause(self, checkpoints: Path, status: int, need: int = 0) -> str:
        if self._not_finite:
            step, _, reason = next(iter(self._not_finite.values()))
            return f"{step}, {', '.join(self._not_finite)}{reason}"
        saving = self._in_save or "CheckpointException" in self.first_error
        if saving and self._number is None:
            self._number = _unwritable(checkpoints, need)
        reason = self._reason(checkpoints, status)
        return f"saving a checkpoint in {checkpoints} failed: {reason}" if saving else reason

    def _reason(self, checkpoints: Path, status: int) -> str:
        known = _BY_NUMBER.get(self._number) if self._number is not None else None
        for text, meaning in _BY_TEXT.items():
            known = known or (meaning if text in self.first_error else None)
        if known is None and self._worker_error:
            return self._worker_error
        if known:
            return known.format(free=free_bytes(checkpoints) / 1e6, what=os.strerror(self._number or 0))
        by = self._killed_by or -min(status, 0)
        if by and (not self.first_error or _CONNECTION.search(self.first_error)):
            name = signal.Signals(by).name
            more = ": was the memory used up?" if by == signal.SIGKILL else ""
            return f"a training process was killed by {name}{more}"
        return self.first_error or f"training ended with status {status}"


def _unwritable(folder: Path, need: int) -> int | None:
    """The number of the error with which `need` bytes cannot be written to a file there; None: they can."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < need:
        return errno.EFBIG
    if free_bytes(folder) < need:
        return errno.ENOSPC
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * min(need, 1 << 20))
    except OSError as problem:
        return problem.errno
    return None
