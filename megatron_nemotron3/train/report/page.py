"""What is known of a run by its folder, and the page about it. Any part may be missing, as in a young run."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.checkpoints import folders
from megatron_nemotron3.checkpoints.structure import check_structure
from megatron_nemotron3.common import lock, plots
from megatron_nemotron3.common.output import size_text
from megatron_nemotron3.launch.manifest import NAME, Part, RunManifest
from megatron_nemotron3.models import Nemotron3Config, count, get
from megatron_nemotron3.precision import report as precision
from megatron_nemotron3.train import log
from megatron_nemotron3.train.monitor import alarms, events, watch

#: Series of the log line, and the tags that Megatron gives them in event files.
LOSS, RATE, NORM, TIME = "lm loss", log.RATE, "grad norm", log.MILLISECONDS
_TAGS = {RATE: "learning-rate", NORM: "grad-norm"}
#: In event files, of the validation split, and after training of the test split, too.
_VALIDATION = "lm loss validation"
_SEQUENCE, _STEPS = "--seq-length", "--train-iters"
Points = list[tuple[int, float]]
Rows = list[tuple[str, str]]


@dataclass
class Facts:
    """A run. What could not be read is in `notes`, and left out of the rest."""

    folder: Path
    manifest: RunManifest
    curve: log.Curve
    history: log.History = field(default_factory=dict)
    precision: list[precision.ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def config(self) -> Nemotron3Config | None:
        with contextlib.suppress(ValueError):
            return get(self._model.get("name", ""))
        return None

    @property
    def _model(self) -> Part:
        return self.manifest.parts.get("model", {})

    @property
    def title(self) -> str:
        if self.config is not None:
            return self.config.title
        return self._model.get("name") or self.folder.resolve().name

    @property
    def checkpoints(self) -> Path:
        inside = self.folder / folders.CHECKPOINTS
        return inside if inside.is_dir() else self.folder

    @property
    def total(self) -> int | None:
        """The number of steps of the run; None if neither its log nor its record has it."""
        if self.curve.steps:
            return self.curve.steps[max(self.curve.steps)].total
        given = self.manifest.parts.get("launch", {}).get(_STEPS, "")
        return int(given) if given.isdigit() else None

    @property
    def state(self) -> str:
        points, total = self.losses or self.points(RATE), self.total
        at = f"step {points[-1][0]}" if points else "before the first step"
        if points and total is not None:
            at += f" of {total}"
        if (writer := lock.holder(self.checkpoints)) is not None:
            return f"running, {at} ({writer})"
        if not points:
            return "no step was logged"
        if total is None:
            return f"logged up to {at}"
        return f"{'finished' if points[-1][0] >= total else 'stopped'} at {at}"

    @cached_property
    def series(self) -> log.History:
        """The numbers of the log; of the event files if there is no log."""
        return self.curve.history or self.history

    @property
    def losses(self) -> Points:
        """Training losses; NaN where the log has a step without one."""
        steps = self.curve.steps
        return [(i, steps[i].loss) for i in sorted(steps)] or self.points(LOSS)

    @property
    def validation(self) -> dict[int, float]:
        """Losses on held-out text by step."""
        return self.curve.validation or dict(self.history.get(_VALIDATION, []))

    def points(self, name: str) -> Points:
        return self.series.get(name, self.series.get(_TAGS.get(name, name), []))

    @property
    def tokens_per_second(self) -> Points:
        """Tokens of a global batch by the seconds of a step."""
        length = self.manifest.parts.get("launch", {}).get(_SEQUENCE, "")
        if not length.isdigit():
            return []
        sizes = dict(self.points("global batch size"))
        return [
            (i, sizes[i] * int(length) / (ms / 1e3)) for i, ms in self.points(TIME) if ms > 0 and i in sizes
        ]

    @property
    def warnings(self) -> list[str]:
        found = alarms.scan(self.history)
        zero = log.zero_rate(self.curve) and all(finding.rule != "learning_rate_zero" for finding in found)
        return ["the learning rate was 0 at every logged step"] * zero + [str(finding) for finding in found]

    def model_rows(self) -> Rows:
        rows = [("name", self._model["name"])] if "name" in self._model else []
        if self.config is not None:
            size = count(self.config)
            rows += [
                ("parameters", f"{size.trainable:,}"),
                *((f"active {name.replace('_', ' ')}", f"{n:,}") for name, n in size.active.items()),
                ("layers", f"{self.config.num_layers}: {self.config.pattern}"),
            ]
            if self.config.has_mtp:
                rows.append(("MTP depths", str(self.config.mtp_num_layers)))
        elif (pattern := self._model.get("--hybrid-layer-pattern")) is not None:
            rows.append(("layers", pattern))
        return rows

    def run_rows(self) -> Rows:
        content = self.manifest.content
        rows = [("folder", str(self.folder.resolve())), ("state", self.state)]
        rows += [(name, str(content[name])) for name in ("command", "begun") if name in content]
        rows += list(content.get("versions", {}).items())
        for change in content.get("changes", []):
            rows.append((f"changed at step {change['step']}", f"{change['part']}: {change['values']}"))
        return rows

    def loss_rows(self) -> Rows:
        rows = []
        if points := self.losses:
            rows.append(
                ("training loss", f"{points[0][1]:.3f} → {points[-1][1]:.3f} at step {points[-1][0]}")
            )
        depths = sorted(filter(log.MTP_LOSS.fullmatch, self.series))
        rows += [(f"MTP depth {k}", f"{self.series[tag][-1][1]:.3f}") for k, tag in enumerate(depths, 1)]
        held_out = "validation loss" if self.curve.validation else "held-out loss"
        for name, losses in ((held_out, self.validation), ("test loss", self.curve.test)):
            if losses:
                rows.append((name, f"{losses[max(losses)]:.3f} at step {max(losses)}"))
        if pace := [value for _, value in self.points(TIME)]:
            rows.append(("time of a step, median", f"{sorted(pace)[len(pace) // 2] / 1e3:.2f} s"))
        if rates := [value for _, value in self.tokens_per_second]:
            rows.append(("tokens/s, median", f"{sorted(rates)[len(rates) // 2]:,.0f}"))
        return rows

    def checkpoint_rows(self) -> Iterator[tuple[str, str, str]]:
        for iteration in reversed(folders.iterations(self.checkpoints)):
            path = folders.checkpoint_path(self.checkpoints, iteration)
            files = (file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield path.name, check_structure(path).state, size_text(sum(files))

    def options(self) -> dict[str, Rows]:
        return {name: sorted(part.items()) for name, part in self.manifest.parts.items() if part}


def gather(folder: Path) -> Facts:
    """Read a run's folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: " + ("it is not a folder" if folder.exists() else "it does not exist"))
    found = Facts(folder, RunManifest(folder), log.read(str(folder / log.FILE)))
    if any(folder.rglob(events.PATTERN)):
        try:
            found.history = events.read(events.find(folder))
            found.curve.correct(found.history)
        except ValueError as problem:
            found.notes.append(str(problem))
    if (folder / precision.FILE).exists():
        try:
            found.precision = precision.read(folder)
        except precision.ReportError as problem:
            found.notes.append(str(problem))
    if not (found.manifest.content or found.curve.steps or found.history):
        raise ValueError(
            f"{folder}: it has neither {NAME} nor train.log nor event files: give the folder of a run"
        )
    return found


class Picture(NamedTuple):
    """A picture as the address of an image."""

    title: str
    source: str


def training(facts: Facts) -> Iterator[Picture]:
    """Losses, learning rate, norm of the gradient, time and tokens."""
    if facts.points(LOSS):
        yield _picture("Losses", lambda axes: log.draw_losses(axes, facts.series, facts.validation))
    seconds = [(i, ms / 1e3) for i, ms in facts.points(TIME)]
    for title, unit, points in (
        ("Learning rate", "", facts.points(RATE)),
        ("Norm of the gradient", "before clipping", facts.points(NORM)),
        ("Time of a step", "seconds", seconds),
        ("Tokens per second", "tokens/s", facts.tokens_per_second),
    ):
        if points:
            yield _line(title, unit, points)


def monitors(facts: Facts) -> Iterator[Picture]:
    """One panel per monitored quantity, as `nemotron3 report monitors` draws them."""
    for kind, series in watch.panels_of(facts.history).items():
        title = watch.KINDS[kind].title
        yield _picture(title, lambda axes, k=kind, s=series: watch.draw_panel(axes, k, s))


def _line(title: str, unit: str, points: Points) -> Picture:
    def draw(axes: Any) -> None:
        log.draw(axes, {title: points}, unit)
        axes.set_ylim(bottom=0)

    return _picture(title, draw)


def _picture(title: str, draw: Any) -> Picture:
    def panel(_: Any, axes: Any) -> None:
        draw(axes)
        axes.set_title("")  # the page has it

    data = base64.b64encode(plots.svg(panel).encode()).decode()
    return Picture(title, f"data:image/svg+xml;base64,{data}")


def render(**values: Any) -> str:
    """Fill in the template `page.html`; `values` are the names in it, `facts` among them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(**values)
