"""Write `launch/options.json` from the parser of the Megatron that Python imports.

    python -m tests.launch.make_options                                     # the installed megatron-core
    PYTHONPATH=$PWD:$MEGATRON_LM_DIR python -m tests.launch.make_options    # the version of a checkout

A run replaces what one version's parser says and keeps the rest. The options that `pretrain_hybrid.py` adds
where nvidia-modelopt is installed are only in a checkout; without one they are kept, too. By hand come
"treatments", "effects", each option's "treatment" and "effect", which options have a "default" (its value is
the parser's), and rows with a "source", of options published later than the checkout. --check writes nothing
and fails where the file would change.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from typing import Any

from megatron_nemotron3.launch import installed_options, parser, versions
from megatron_nemotron3.launch.installed_options import Rows

MODELOPT = "nvidia-modelopt"
#: Columns that no parser knows.
BY_HAND = ("treatment", "effect")


def parsed() -> tuple[str, Rows, Rows]:
    """Return (minor version, name -> facts, the same for modelopt's options) of the importable Megatron."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        version = versions.minor(importlib.import_module("megatron.core").__version__)
        ours = installed_options.parsed()
        more = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.post_training.arguments").add_modelopt_args(more)
    return version, ours, installed_options.facts(more)


def stored(options: Rows, version: str) -> Rows:
    """Return the facts of one version, or of `MODELOPT`, that the file's options have."""
    return {
        name: {**_kind(row.get(version, row)), "section": row["section"], "default": row.get("default")}
        for name, row in options.items()
        if version in ((row["package"],) if "package" in row else row.get("versions", versions.KNOWN))
    }


def _kind(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("type", "choices", "nargs") if key in row}


def merged(options: Rows, found: dict[str, Rows]) -> Rows:
    """Return the file's options with what parsers say: version or `MODELOPT` -> facts.

    Section and default are those of the first version that has the option.
    """
    said = {where: found.get(where) or stored(options, where) for where in (*versions.KNOWN, MODELOPT)}
    later = {name: row for name, row in options.items() if "source" in row}
    for version in versions.KNOWN:
        said[version] = stored(later, version) | said[version]
    rows: Rows = {}
    for name in sorted(set().union(*said.values())):
        have = [version for version in versions.KNOWN if name in said[version]]
        first = said[have[0] if have else MODELOPT][name]
        row, by_hand = _kind(first), options.get(name, {})
        if not have:
            row["package"] = MODELOPT
        elif have != list(versions.KNOWN):
            row["versions"] = have
        other = {version: _kind(said[version][name]) for version in have[1:]}
        row |= {version: taken for version, taken in other.items() if taken != _kind(first)}
        row["section"] = first["section"]
        if "default" in by_hand:
            row["default"] = first["default"]
        if "default_with" in by_hand:
            row["default_with"] = by_hand["default_with"]
        if "source" in by_hand and not any(name in read for read in found.values()):
            row["source"] = by_hand["source"]
        rows[name] = row | {column: by_hand.get(column) for column in BY_HAND}
    return rows


def with_effect(kind: str) -> list[str]:
    """Return the options of megatron-core 0.19 that have an effect of this kind."""
    table, first = parser.table(), versions.KNOWN[0]
    return [
        name
        for name, row in table["options"].items()
        if table["effects"][row["effect"]]["effect"] == kind and first in row.get("versions", versions.KNOWN)
    ]


def text_of(table: dict[str, Rows]) -> str:
    """Return the file: one treatment and one option a line."""
    parts = []
    for part, rows in table.items():
        lines = (f"{json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in rows.items())
        parts.append(f"{json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Replace one version's options in the file.

    Raises:
        SystemExit: with --check, the file is another one; or an option has no treatment or effect.
    """
    old = parser.table()
    version, ours, modelopt = parsed()
    options = merged(old["options"], {version: ours, MODELOPT: modelopt})
    text = text_of({**old, "options": options})
    if "--check" in sys.argv:
        sys.exit(None if text == parser.FILE.read_text(encoding="utf-8") else "out of date: make_options")
    parser.FILE.write_text(text, encoding="utf-8")
    print(f"{parser.FILE}: {len(ours)} options of {version}")
    if missing := [name for name, row in options.items() if any(row[column] is None for column in BY_HAND)]:
        sys.exit(f"without {' or '.join(BY_HAND)}: {', '.join(missing)}")


if __name__ == "__main__":
    main()
