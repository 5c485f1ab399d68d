"""Render an explanation as text, grouped by section."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby

from megatron_nemotron3.launch.explain import ExplainedOption, Explanation
from megatron_nemotron3.launch.flag import SECTIONS
from megatron_nemotron3.launch.gpu_start import ATTENTION_VARIABLES
from megatron_nemotron3.launch.reference import NOT_PASSED

#: Width of a line; a longer value stays whole.
WIDTH = 110
_NAME, _VALUE, _ORIGIN = 41, 20, 10


def render(explanation: Explanation, full: bool = False) -> str:
    """Return differences, then warnings and notes.

    Args:
        full: begin with every setting, by section.
    """
    lines = [explanation.config.title, "=" * len(explanation.config.title)]
    lines.append(f"compared with: {explanation.launch or 'the model alone; no public launch is known'}")
    order = {section: number for number, section in enumerate(SECTIONS)}
    # Published options that are missing come further down, among the differences.
    shown = [setting for setting in explanation.settings if full and (setting.passed or not setting.differs)]
    shown.sort(key=lambda setting: order.get(setting.section, len(order)))
    for section, settings in groupby(shown, key=lambda setting: setting.section):
        title = "the user's own" if section == "extra" else section
        lines += ["", title, *(line for setting in settings for line in _setting_lines(setting))]
    lines += _all_difference_lines(explanation)
    if explanation.violations:
        lines += ["", "rules"]
        for violation in explanation.violations:
            lines += _wrapped_lines(str(violation), "  ", "    ")
    if explanation.notes:
        lines += ["", "notes"]
        for note in explanation.notes:
            lines += _wrapped_lines(note)
    if explanation.environment:
        lines += ["", "environment of the published launch"]
        lines += _wrapped_lines(" ".join(explanation.environment))
        if refused := [one for one in explanation.environment if one.startswith(ATTENTION_VARIABLES)]:
            lines += _wrapped_lines(f"leave out {' '.join(refused)}: Megatron sets it by --attention-backend")
    return "\n".join(lines)


def _setting_lines(setting: ExplainedOption) -> Iterator[str]:
    mark = "*" if setting.differs else " "
    long = len(setting.value) > _VALUE
    value = "" if long else setting.value
    tail = f"  published: {setting.published}" if setting.differs else ""
    head = f"{mark} {setting.name:<{_NAME}} {value:<{_VALUE}} {setting.origin:<{_ORIGIN}} {setting.field}"
    if long:  # a pattern or a path stays whole, so that it can be copied
        yield head.rstrip()
        yield f"      {setting.value}"
        if tail:
            yield f"      {tail.strip()}"
    else:
        yield (head + tail).rstrip()


def _all_difference_lines(explanation: Explanation) -> Iterator[str]:
    differences = explanation.differences
    recipe = [setting for setting in differences if not setting.of_model]
    groups = (
        ("differs from the model", [setting for setting in differences if setting.of_model]),
        ("differs from the published recipe", [setting for setting in recipe if setting.passed]),
        ("published, but not passed", [setting for setting in recipe if not setting.passed]),
    )
    if not differences:
        yield ""
        yield "nothing differs from " + ("the published recipe" if explanation.launch else "the model")
    for title, settings in groups:
        if settings:
            yield ""
            yield title
        for setting in settings:
            yield from _difference_lines(setting)
    if sources := dict.fromkeys(setting.source for setting in differences):
        yield ""
        yield from _wrapped_lines(f"published in: {'; '.join(sources)}", "", "  ")


def _difference_lines(setting: ExplainedOption) -> Iterator[str]:
    where = setting.field if setting.of_model else "published"
    default = "" if setting.passed or setting.value == NOT_PASSED else " (not passed: Megatron's default)"
    if max(len(setting.value), len(setting.published or "")) > _VALUE:  # a pattern: one above the other
        width = max(len("here"), len(where))
        yield f"  {setting.name}"
        yield f"      {'here':<{width}} {setting.value}{default}"
        yield f"      {where:<{width}} {setting.published}"
    else:
        yield f"  {setting.name:<{_NAME}} {setting.value:<{_VALUE}} {where} {setting.published}{default}"
    if setting.why:
        yield from _wrapped_lines(setting.why, "      ", "      ")


def _wrapped_lines(line: str, first: str = "  ", rest: str = "  ") -> list[str]:
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
