"""`nemotron3 certify`: prove a launch on a CPU, and write what was proven."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import lock
from megatron_nemotron3.common.options import add_option, add_options, json_flag, option
from megatron_nemotron3.common.output import Bar, result, say
from megatron_nemotron3.launch.command import add_launch, add_published, add_set
from megatron_nemotron3.models.command import ModelOptions
from megatron_nemotron3.proof.certify import certificate
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, failed, last_line
from megatron_nemotron3.proof.certify.large import LaunchRequest, checkout, checkout_in, read
from megatron_nemotron3.proof.certify.proof import STAGES, UPGRADE, Stage, prove
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch, make, proxy_lines

#: Worlds that `--ranks` may name.
RANKS = (2, 4, 8, 16, 32)
#: GiB of one rank with the process that it forks to save, and of this process with the server of the ranks
#: (docs/measurements.md).
RANK_GIB, OWN_GIB = 0.5, 0.8
_GIB = 2**30
#: Times that one process runs at the same time: from its weights, and from nudged ones (`compare.NUDGES`).
AT_ONCE = 3
#: Characters of a finding on the console.
_LONG = 400
#: Exit status of --check for a certificate that other versions made.
OTHER_VERSIONS = 3
_WORD = {PropertyState.PASS: "pass", PropertyState.FAIL: "FAIL", PropertyState.UNTESTED: "-"}


_option = partial(option, group="proof")


@dataclass(frozen=True, kw_only=True)
class ProofOptions:
    """Options of `nemotron3 certify`, but for those of a launch."""

    ranks: int = _option("maximum number of ranks of a test (default 8)", "N", default=8, choices=RANKS)
    gpus: int | None = _option("number of GPUs of the whole job, if LAUNCH does not state it", "N")
    output: Path = _option("output folder (default: the current one)", "DIR", default=Path())
    against: Path | None = _option(
        "checkout of another Megatron-LM to compare with; nothing is proven", "DIR"
    )
    check: Path | None = _option("certificate to compare with LAUNCH; nothing is run", "CERTIFICATE")


def register(commands: Any) -> None:
    """Add `nemotron3 certify`."""
    command = commands.add_parser("certify")
    add_options(command, ModelOptions)
    for action in command._actions:
        if action.dest == "name":
            action.metavar = "LAUNCH"
            action.help = f"script or YAML file, - for stdin, or a model: {action.help}"
    add_set(command, "LAUNCH")
    add_options(command, ProofOptions)
    add_option(command, "json", json_flag(), bool)
    add_launch(command, precision="bf16")
    add_published(command)
    command.set_defaults(run=lambda options: certify(options, command))


def certify(options: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    """Prove a launch, or compare two versions of Megatron by it. Exit status 0 if nothing failed, else 1."""
    request = read(options, command)
    normalised = certificate.normalised(request)
    against = options.against and checkout_in(options.against, f"--against {options.against}")
    if options.check is not None:
        if against:
            raise ValueError("--check runs nothing: drop --against")
        return _check(options, normalised)
    for package in ("torch", "megatron"):  # what the ranks compute with
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    proxy = make(request, options.ranks)
    source, folder = checkout(), options.output
    _require_memory(max(AT_ONCE, *(sizes.layout.world_size for sizes in proxy.sizes)))
    document = certificate.UPGRADE_JSON if against else certificate.JSON
    _require_folder(folder, document)
    if against:
        from megatron_nemotron3.proof.certify.upgrade import require_importable

        require_importable(against)
    begun = time.monotonic()
    with (
        result(options.json),
        lock.held(folder, say=say),
        _quiet(),
        tempfile.TemporaryDirectory(prefix="nemotron3-certify-") as work,
    ):
        for line in _introduction(request, proxy):
            say(line)
        _start_server(Path(work) / "ranks.log")
        bench = Bench(
            proxy=proxy,
            flags=request.flags,
            folder=Path(work),
            emulate=request.emulate,
            gpu=options.gpu,
            checkout=source,
            against=against,
        )
        findings = list(_shown(bench, UPGRADE if against else STAGES))
        data = certificate.make(
            title=request.title,
            command=normalised,
            proxy=proxy,
            findings=findings,
            checkout=source,
            seconds=time.monotonic() - begun,
        )
        if against:
            data["against"] = certificate.revision(against)
        page = certificate.write(folder, data)
        say(
            f"\n{_verdict(findings)}, {data['seconds']:.0f} s: {folder / document}, {page}",
            certificate=folder / document,
            **data,
        )
    return 0 if data["passed"] else 1


def _check(options: argparse.Namespace, command: dict[str, list[str]]) -> int:
    """Exit status 0, 1 for another command or a certificate that failed, else 3 for other versions."""
    data = certificate.read(options.check)
    if "against" in data:
        raise ValueError(f"{options.check} compares two versions of Megatron: give a certificate")
    differing = certificate.differences(data["command"], command)
    now = certificate.versions(checkout())
    versions = [
        f"{name}: certified with {data['versions'].get(name, 'none')}, now {now.get(name, 'none')}"
        for name in sorted(data["versions"].keys() | now.keys())
        if data["versions"].get(name) != now.get(name)
    ]
    belongs = not differing
    with result(options.json):
        owner = "of this command" if belongs else "of another command"
        say(
            f"{options.check}: {owner}, {'passed' if data['passed'] else 'FAILED'}, {data['date']}",
            belongs=belongs,
            passed=data["passed"],
            date=data["date"],
            differences=differing,
            versions=versions,
        )
        for line in (*differing, *versions):
            say(f"  {line}")
    if not (belongs and data["passed"]):
        return 1
    return OTHER_VERSIONS if versions else 0


def _introduction(request: LaunchRequest, proxy: ProxyLaunch) -> Iterator[str]:
    yield f"{request.title}: {proxy.large}"
    yield from (f"note: {note}" for note in request.notes)
    yield from proxy_lines(proxy)
    yield ""


def _shown(bench: Bench, stages: Sequence[Stage]) -> Iterator[Finding]:
    with _Progress(stages, bench) as progress:
        for stage in stages:
            progress.begin(stage)
            found = list(_finished(stage, bench))
            with progress.paused():
                for line in _lines(found):
                    say(line)
            yield from found


def _finished(stage: Stage, bench: Bench) -> Iterator[Finding]:
    """Yield what a stage finds; if it breaks, that is a failure, and the other stages go on."""
    try:
        yield from prove(bench, (stage,))
    except Exception as problem:
        detail = f"not finished, a defect of this command: {type(problem).__name__}: {last_line(problem)}"
        yield failed(stage.title, detail=detail)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each property: what failed, each time; otherwise the largest share of a tolerance."""
    by_name: dict[str, list[Finding]] = {}
    for one in findings:
        by_name.setdefault(one.name, []).append(one)
    for found in by_name.values():
        failures = [one for one in found if one.state is PropertyState.FAIL]
        if failures:
            yield from (_line(one) for one in failures)
            continue
        warned = [one for one in found if one.detail.startswith("warning:")]
        tried = [one for one in found if one.state is PropertyState.PASS and one not in warned]
        if tried:
            worst = max(tried, key=lambda one: one.difference or 0.0)
            yield _line(worst) + (f" (and {len(tried) - 1} more)" if len(tried) > 1 else "")
        yield from (_line(one) for one in found if one in warned or one.state is PropertyState.UNTESTED)


def _line(one: Finding) -> str:
    numbers = f"{one.difference:.2g} of {one.tolerance:.4g}  " if one.difference and one.tolerance else ""
    detail = ": ".join(part for part in (one.where, one.detail) if part)
    detail = detail if len(detail) <= _LONG else f"{detail[:_LONG]}… (whole on the page)"
    return f"{_WORD[one.state]:<5} {one.name:<30}  {numbers}{detail}".rstrip()


def _verdict(findings: Sequence[Finding]) -> str:
    failures = len({one.name for one in findings if one.state is PropertyState.FAIL})
    if failures:
        return f"FAILED: {failures} propert{'y' if failures == 1 else 'ies'}"
    return f"passed: {len({one.name for one in findings if one.state is PropertyState.PASS})} properties"


class _Progress:
    """A bar over the stages that moves by the clock inside a stage: nothing is heard from the ranks there."""

    def __init__(self, stages: Sequence[Stage], bench: Bench) -> None:
        self._seconds = {id(stage): stage.seconds(bench) for stage in stages}
        self._total = sum(self._seconds.values())
        self._before = self._current = 0.0
        self._started = self._begun = time.monotonic()
        self._title = ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._bar = Bar("certify", "%", 100)

    def __enter__(self) -> _Progress:
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._lock:
            self._bar.close()

    def begin(self, stage: Stage) -> None:
        with self._lock:
            self._before += self._current
            self._current, self._title = self._seconds[id(stage)], stage.title
            self._begun = time.monotonic()
            self._show()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock, self._bar.paused():
            yield

    def _show(self) -> None:
        # A busy machine takes as much longer for this stage as it took for those before it.
        slow = (self._begun - self._started) / self._before if self._before else 1.0
        inside = min((time.monotonic() - self._begun) / max(slow, 1e-6), 0.95 * self._current)
        self._bar.to(int(100 * (self._before + inside) / self._total), note=self._title)

    def _tick(self) -> None:
        while not self._ended.wait(1):
            with self._lock:
                if not self._ended.is_set():
                    self._show()


def _start_server(log: Path) -> None:
    """Start the process that ranks are forked from, so that what they print goes to a file."""
    from megatron_nemotron3.common.ranks import start_server
    from megatron_nemotron3.proof.certify.ranks import PRELOAD

    with log.open("w") as file:
        try:
            start_server(file, PRELOAD)
        except OSError as problem:  # its socket lies there, and a socket's path has at most 107 characters
            raise ValueError(
                f"no process can be started in {tempfile.gettempdir()} (TMPDIR): {problem}"
            ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print no warnings of torch and Megatron, which this process imports to compare what ranks computed."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _require_folder(folder: Path, document: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is not a folder")
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as problem:
        raise ValueError(f"--output {folder}: no file can be made in {parent}: {problem.strerror}") from None
    if (folder / document).exists():
        certificate.read(folder / document)


def _require_memory(ranks: int) -> None:
    free, needed = available(), OWN_GIB + ranks * RANK_GIB
    if free < needed:
        raise ValueError(
            f"{ranks} ranks take about {needed:.1f} GiB ({RANK_GIB} each), and {free:.1f} GiB are free: give "
            "fewer --ranks"
        )


def available() -> float:
    """Return the GiB that new processes can take."""
    import psutil

    return psutil.virtual_memory().available / _GIB
