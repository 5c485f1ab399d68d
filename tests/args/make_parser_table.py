"""Write `args/parser_table.py` from the parser of the Megatron that Python imports.

    python tests/args/make_parser_table.py                                     # the installed megatron-core
    PYTHONPATH=$PWD:$MEGATRON_LM_DIR python tests/args/make_parser_table.py    # the version of a checkout

A run replaces the options of one version and keeps those of the others. The options that `pretrain_hybrid.py`
adds where nvidia-modelopt is installed are only in a checkout; without one they are kept, too.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import io
import textwrap
from collections.abc import Iterable
from pathlib import Path

from megatron_nemotron3.args import parser_table, versions

FILE = Path(parser_table.__file__)
#: More choices than this are not listed.
CHOICES = 16
#: Types that argparse calls, and the kind of the table; any other callable takes text.
TYPES = {int: "int", float: "float", bool: "bool"}


def parsed() -> tuple[str, dict[str, str], dict[str, str]]:
    """Return (minor version, name -> kind, the same for modelopt's options) of the importable Megatron."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        version = versions.minor(importlib.import_module("megatron.core").__version__)
        arguments = importlib.import_module("megatron.training.arguments")
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        arguments.add_megatron_arguments(parser)
        more = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.post_training.arguments").add_modelopt_args(more)
    return version, kinds(parser), kinds(more)


def kinds(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return name -> kind of every option of a parser."""
    return {
        option.removeprefix("--"): kind_of(action)
        for action in parser._actions
        for option in action.option_strings
    }


def kind_of(action: argparse.Action) -> str:
    """Return what an option takes, as `parser_table` writes it."""
    if action.nargs == 0:
        return "switch"
    text = TYPES.get(action.type, "text")  # type: ignore[arg-type]
    if action.choices is not None and len(list(action.choices)) <= CHOICES:  # signals depend on the platform
        names = (choice.name if isinstance(choice, enum.Enum) else str(choice) for choice in action.choices)
        text = "|".join(names)
    return text + (f" {action.nargs}" if action.nargs is not None else "")


def source(table: dict[str, dict[str, str]]) -> str:
    """Return the text of the module: kind -> names, per section."""
    head, _, _ = FILE.read_text(encoding="utf-8").partition("\n#: Section -> kind")
    lines = [
        head,
        "#: Section -> kind -> names without their dashes.",
        "TABLE: dict[str, dict[str, str]] = {",
    ]
    for section, names in table.items():
        lines.append(f'    "{section}": {{')
        by_kind: dict[str, list[str]] = {}
        for name, kind in sorted(names.items()):
            by_kind.setdefault(kind, []).append(name)
        for kind, found in sorted(by_kind.items()):
            lines += _entry(kind, found)
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def _entry(kind: str, names: Iterable[str]) -> list[str]:
    words, key = " ".join(names), " " * 8 + f'"{kind}": '
    if len(key) + len(words) < 105:
        return [f'{key}"{words}",']
    body = textwrap.wrap(words, 96, break_on_hyphens=False, break_long_words=False)
    return [
        f'{key}"""',
        *(f"{' ' * 12}{line}" for line in body),
        f'{" " * 12}""",',
    ]


def main() -> None:
    """Replace one version's options in the table."""
    version, ours, modelopt = parsed()
    per_version = {known: parser_table.options(known) for known in versions.KNOWN} | {version: ours}
    common = set.intersection(*(set(names.items()) for names in per_version.values()))
    table = {
        "all": dict(sorted(common)),
        **{known: dict(sorted(set(names.items()) - common)) for known, names in per_version.items()},
        parser_table.MODELOPT: modelopt or parser_table.section(parser_table.MODELOPT),
    }
    FILE.write_text(source(table), encoding="utf-8")
    print(f"{FILE}: {len(ours)} options of {version}")


if __name__ == "__main__":
    main()
