"""What a command line sets, where each value comes from, and where it differs from the published recipe."""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from megatron_nemotron3.launch import command_line, data_check
from megatron_nemotron3.launch.continued import refused
from megatron_nemotron3.launch.flag import SECTIONS, Flag, is_known, parse, text, to_argv
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.parser import default, foreign, listed, unknown
from megatron_nemotron3.launch.pasted import launch_of, sections, violated
from megatron_nemotron3.launch.phases import phase
from megatron_nemotron3.launch.reference import (
    LAUNCHES,
    NOT_PASSED,
    SCRIPT,
    VERSION,
    WHY,
    PublishedOption,
    has_launch,
    reference,
    shown,
)
from megatron_nemotron3.launch.rule import Violation
from megatron_nemotron3.launch.rules import check
from megatron_nemotron3.launch.schedule import TrainingSchedule
from megatron_nemotron3.launch.script import LaunchSource
from megatron_nemotron3.launch.stored_model import MergedOptions, merged_options
from megatron_nemotron3.launch.yaml_launch import is_partial
from megatron_nemotron3.models import Nemotron3Config, get, names
from megatron_nemotron3.models.pattern import MTP_SEPARATOR, without_layout
from megatron_nemotron3.models.stack_specs import stored_experts
from megatron_nemotron3.precision.settings import OPTION, Emulation

#: Every origin a setting can have.
ORIGINS = (
    *("model", "family", "layout", "precision", "schedule", "data", "backend", "default", "user"),
    *("checkpoint", "gpu"),
)
WORLD_SIZE = "world size"

_ORIGIN_OF = {"config": "model", "distributed_optimizer": "default", "extra": "user"}
_FILE = "--te-precision-config-file"


@dataclass(frozen=True, kw_only=True)
class ExplainedOption:
    """One option: its value, where the value comes from, and what was published."""

    #: With its dashes. "world size" is the only one that is not an option.
    name: str
    #: As typed; "on" for a switch. If the option is not passed: Megatron's default, or "not passed".
    value: str
    section: str
    #: One of `ORIGINS`; "default" is Megatron's where `passed` is False.
    origin: str
    #: What it is set by: "config.hidden_size", "layout.tp"; "command line" for arguments of the user's own.
    field: str
    passed: bool = True
    #: "not passed" if the published run did not pass it; None if no source states it.
    published: str | None = None
    source: str = ""
    #: Whether another value describes another model.
    of_model: bool = False
    #: Why another value may matter, if a source says so.
    why: str = ""

    @property
    def differs(self) -> bool:
        """Whether the published value is known and different."""
        if self.published is None or not is_known((self.value,)):
            return False
        return not _SAME.get(self.name, _same_words)(self.value, self.published)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything `nemotron3 explain` prints."""

    config: Nemotron3Config
    #: The published launch it is compared with, in one line; "" if only the model is known.
    launch: str
    settings: tuple[ExplainedOption, ...]
    #: Violated rules: warnings, and for a pasted command also errors.
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = ()
    #: NAME=value of the variables that the public launch exports. Nothing is compared with them.
    environment: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[ExplainedOption, ...]:
        """Settings that differ from the published ones; those of the model come first."""
        found = [setting for setting in self.settings if setting.differs]
        return tuple(sorted(found, key=lambda s: (not s.of_model, SECTIONS.index(s.section))))  # stable

    def describe(self) -> dict[str, Any]:
        """The content of `--json`."""
        return {
            "model": self.config.name,
            "title": self.config.title,
            "compared_with": self.launch or None,
            "settings": [vars(setting) | {"differs": setting.differs} for setting in self.settings],
            "violations": [vars(violation) for violation in self.violations],
            "notes": list(self.notes),
            "published_environment": list(self.environment),
        }


def explain(launch: Launch, name: str = "published") -> Explanation:
    """What `flags(launch)` passes, setting by setting.

    Args:
        name: of the phase to compare with, one of `phases.PHASES`; "published" is pre-training.

    Raises:
        RuleError: as `flags`.
        ValueError: the model has no such phase.
    """
    config, layout, emitted = launch.config, launch.layout, flags(launch)
    known, place, chosen = reference(config, name), sections(config), phase(config, name)
    of_phase = to_argv(parse(chosen.options))
    settings = [
        _setting(flag, known, place, _setting_origin(flag, launch.schedule, of_phase)) for flag in emitted
    ]
    public = chosen.layout if has_launch(config, name) else None
    world = ExplainedOption(
        name=WORLD_SIZE,
        value=str(layout.world_size),
        section="parallelism",
        origin="layout",
        field="tp * cp * dp * pp",
        published=str(public.world_size) if public else None,
        source=SCRIPT if public else "",
    )
    settings += _missing_settings(emitted, known)
    notes = [launch.tuned.variables] if launch.tuned else []
    violations = [*check(launch), *data_check.violations(to_argv(emitted))]
    return _explanation(config, name, [world, *settings], violations, notes)


def explain_command(
    config: Nemotron3Config, source: str | LaunchSource, name: str = "published"
) -> Explanation:
    """Explain an existing launch (`command_line.read_launch`), compared with `config`.

    Every value in it is the user's, unless it equals the catalog's value for the model.
    """
    return _explain_pasted(config, _Pasted.of(source), name)


def explain_nearest(source: str | LaunchSource, name: str = "published") -> Explanation:
    """Explain an existing launch, compared with the published model that it is nearest to."""
    pasted = _Pasted.of(source)
    if not pasted.model.read or pasted.is_partial:
        raise ValueError(
            (pasted.model.note or "the YAML changes fields of a recipe that it does not name")
            + ": give the NAME of the model that it is"
        )
    count, distance = {}, {}
    for config in map(get, names()):
        settings = _pasted_settings(config, pasted, reference(config))
        differ = [setting for setting in settings if setting.differs and setting.of_model]
        count[config], distance[config] = len(differ), _distance(config, differ)
    nearest = min(count, key=lambda config: distance[config])
    found = _explain_pasted(nearest, pasted, name)
    note = f"nearest published model: {nearest.name}; options of the model that differ: {count[nearest]}"
    return replace(found, notes=(note, *found.notes))


def _distance(config: Nemotron3Config, differ: Sequence[ExplainedOption]) -> tuple[float, ...]:
    """How far a launch is from a model: kinds of layers, options it passes, order of layers, all options."""
    passed = [setting for setting in differ if setting.passed]
    other_kinds, order = False, 0.0
    for setting in passed:
        if setting.name == "--hybrid-layer-pattern":
            layers = without_layout(setting.value).partition(MTP_SEPARATOR)[0]
            other_kinds = set(layers) != set(config.pattern)
            order = 1 - SequenceMatcher(None, layers, config.pattern, autojunk=False).ratio()
    return (other_kinds, len(passed), order, len(differ))


@dataclass(frozen=True)
class _Pasted:
    """A launch, with the model that it trains."""

    emulate: Emulation | None
    model: MergedOptions
    notes: tuple[str, ...]
    #: Whether options that are missing say nothing about the model.
    is_partial: bool

    @classmethod
    def of(cls, source: str | LaunchSource) -> _Pasted:
        found = command_line.read_launch(source)
        text = source if isinstance(source, str) else source.text
        partial = is_partial({flag.name: flag for flag in found.flags}, text)
        return cls(found.emulate, merged_options(found.flags), tuple(found.notes), partial)


def _pasted_settings(
    config: Nemotron3Config, pasted: _Pasted, known: Mapping[str, PublishedOption]
) -> list[ExplainedOption]:
    place, model, settings = sections(config), pasted.model, []
    for flag in model.flags:
        setting, found = _setting(flag, known, place, "user"), known.get(flag.name)
        if flag.name in model.names:
            setting = replace(setting, origin="checkpoint" if model.read else "user")
            if not model.read:
                setting = replace(setting, published=None)
        elif found and found.origin in ("model", "family") and not setting.differs:
            setting = replace(setting, origin=found.origin)
        settings.append(setting)
    missing = [] if pasted.is_partial else _missing_settings(model.flags, known)
    return settings + [s for s in missing if model.read or s.name not in model.names]


def _explain_pasted(config: Nemotron3Config, pasted: _Pasted, name: str) -> Explanation:
    known, flags = reference(config, name), list(pasted.model.flags)
    settings = _pasted_settings(config, pasted, known)
    unresolved = [s.name for s in settings if not is_known((s.value,))]
    notes = [*pasted.notes, *([pasted.model.note] if pasted.model.note else [])]
    if unresolved:
        notes.append(f"not compared, because a shell variable is unresolved: {listed(unresolved)}")
    if own := foreign(flag.name for flag in flags if flag.name != OPTION):
        names = listed(unknown(own, VERSION))
        notes.append(f"not Megatron's, so they are a fork's own or mistyped: {names}")
        flags = [flag for flag in flags if flag.name not in own]
    if is_known(value for flag in flags for value in flag.values if flag.name == "--load"):
        notes += [note] if (note := refused(to_argv(flags))) else []
    launch = launch_of(config, flags, pasted.emulate)
    violations = [*(violated(launch) if launch else ()), *data_check.violations(to_argv(flags))]
    return _explanation(config, name, settings, violations, notes)


def with_megatron_defaults(explanation: Explanation) -> Explanation:
    """Add a row for every other option of the installed Megatron's parser, with its default."""
    version, actions = installed_options()
    named = {setting.name for setting in explanation.settings}
    set_already = {action.dest for action in actions if named & set(action.option_strings)}
    rest = [
        ExplainedOption(
            name=action.option_strings[0],
            value=NOT_PASSED if action.nargs == 0 else text(action.default),
            section="Megatron's own defaults",
            origin="default",
            field=f"megatron-core {version}: args.{action.dest}",
            passed=False,
        )
        for action in actions
        if action.dest not in set_already
    ]
    return replace(explanation, settings=(*explanation.settings, *rest))


def installed_options() -> tuple[str, list[argparse.Action]]:
    """Return (version, options) of the installed Megatron's parser. It imports torch, which takes seconds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
            version = importlib.import_module("megatron.core").__version__
            arguments = importlib.import_module("megatron.training.arguments")
    except ImportError as missing:
        raise ValueError(
            f"--all asks the installed Megatron for its defaults, but {missing}: "
            "pip install 'megatron-nemotron3[train]'"
        ) from None
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return version, [action for action in parser._actions if action.dest != "help"]


def _explanation(
    config: Nemotron3Config,
    name: str,
    settings: Sequence[ExplainedOption],
    violations: Sequence[Violation],
    notes: Sequence[str] = (),
) -> Explanation:
    launched, launch, chosen = has_launch(config, name), LAUNCHES.get(config.name), phase(config, name)
    compared: list[str] = []
    if launch and launched:
        compared = [f"pre-training on {launch.machines}", str(chosen.layout), launch.precision]
    elif launch:
        compared = [name, f"layout {chosen.layout or 'UNKNOWN'}", "precision UNKNOWN"]
    published_notes = launch.notes if launch and launched else (chosen.note,) if chosen.note else ()
    return Explanation(
        config=config,
        launch=", ".join(compared),
        settings=tuple(settings),
        violations=tuple(violations),
        notes=(*notes, *published_notes),
        environment=tuple(launch.environment) if launch and launched else (),
    )


def _setting_origin(flag: Flag, schedule: TrainingSchedule | None, of_phase: Sequence[str]) -> str:
    if flag.section == "extra" and flag.name in of_phase and set(flag.values) <= set(of_phase):
        return "schedule"
    if flag.origin.startswith("schedule.seq_length"):  # or else the config's
        return "schedule" if schedule and schedule.seq_length else "model"
    word = flag.origin.partition(".")[0]
    return _ORIGIN_OF.get(word, word)


def _setting(
    flag: Flag, known: Mapping[str, PublishedOption], place: Mapping[str, str], origin: str
) -> ExplainedOption:
    found, field, section = known.get(flag.name), flag.origin, place.get(flag.name, flag.section)
    if found is not None:
        field, section = found.field if field == "extra" else field, found.section
    elif origin == "user":
        field = "command line"
    setting = ExplainedOption(
        name=flag.name, value=shown(flag.values), section=section, origin=origin, field=field
    )
    return _with_published(setting, found)


def _missing_settings(passed: Sequence[Flag], known: Mapping[str, PublishedOption]) -> list[ExplainedOption]:
    """Return the published options that are not passed, with the value that Megatron then uses."""
    options = {flag.name: flag.values for flag in passed}
    settings = []
    for name, found in known.items():
        if name not in options and found.required and found.value != NOT_PASSED:
            value = default(name, options) or NOT_PASSED
            setting = ExplainedOption(
                name=name, value=value, section=found.section, origin="default", field=found.field
            )
            settings.append(_with_published(replace(setting, passed=False), found))
    return settings


def _with_published(setting: ExplainedOption, found: PublishedOption | None) -> ExplainedOption:
    if found is None:
        return setting
    why = WHY.get(setting.name, "")
    return replace(setting, published=found.value, source=found.source, of_model=found.of_model, why=why)


def _same_words(value: str, published: str) -> bool:
    """Equal as words, or as numbers: 1e-4 is 0.0001."""
    if value == published:
        return True
    try:
        return [float(word) for word in value.split()] == [float(word) for word in published.split()]
    except ValueError:
        return False


def _same_pattern(value: str, published: str) -> bool:
    """Compare patterns without pipeline cuts and groups, which do not change the model."""
    return without_layout(value) == without_layout(published)


def _same_experts(value: str, published: str) -> bool:
    """Compare two stacks by the experts of their layers; one of the user's own may have any."""
    theirs, ours = (stored_experts({"spec": words.split()}) for words in (value, published))
    return value != NOT_PASSED and theirs in (None, ours)


def _both_or_none(value: str, published: str) -> bool:
    """Compare whether a file is given; its name does not matter."""
    return (value == NOT_PASSED) == (published == NOT_PASSED)


_SAME: dict[str, Callable[[str, str], bool]] = {
    "--hybrid-layer-pattern": _same_pattern,
    "--spec": _same_experts,
    _FILE: _both_or_none,
}
