"""`nemotron3 recipe`: list, print and copy the launch scripts. Standard library only."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.output import add_json, print_json, table
from megatron_nemotron3.recipes.files import Recipe, chosen, copy


def register(commands: Any) -> None:
    """Add `nemotron3 recipe`."""
    command = commands.add_parser("recipe")
    command.add_argument("model", metavar="MODEL", nargs="?", help="nano, super, ultra, omni or cpu")
    command.add_argument("name", metavar="RECIPE", nargs="?", help="of the model, such as pretrain")
    command.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="where to write (a copy of the recipe, of those of MODEL, or of all)",
    )
    add_json(command)
    command.set_defaults(run=recipe_command)


def recipe_command(options: argparse.Namespace) -> int:
    """List, print or copy recipes.

    Args:
        options: those of `register`.

    Raises:
        ValueError: there is no such recipe, or another version's is in the folder.
        OSError: the folder cannot be written.
    """
    found = chosen(options.model, options.name)
    if options.output is not None:
        if options.output.exists() and not options.output.is_dir():
            raise ValueError(f"--output {options.output} is not a folder")
        return _copied(found, options.output, options.json)
    if options.json:
        print_json([_as_data(recipe) for recipe in found])
    elif options.name is not None:
        print(found[0].path.read_text(encoding="utf-8"), end="")
        again = f"nemotron3 recipe {options.model} {options.name} --output DIR"
        print(f"{again}: copies it with the files that it sources", file=sys.stderr)
    else:
        print(*table([(f"{recipe.model} {recipe.name}", recipe.summary) for recipe in found]), sep="\n")
    return 0


def _as_data(recipe: Recipe) -> dict[str, str]:
    return {
        "model": recipe.model,
        "recipe": recipe.name,
        "summary": recipe.summary,
        "path": str(recipe.path),
    }


def _copied(wanted: list[Recipe], folder: Path, as_json: bool) -> int:
    files = [str(folder / path) for path in copy(wanted, folder)]
    if as_json:
        print_json({"files": files})
    else:
        print("\n".join(files))
        recipe = wanted[0]
        start = folder / recipe.model / f"{recipe.name}.sh"
        print(f"\nbash {shlex.quote(str(start))}")
        print("The first lines name the variables; with DRY_RUN=1 it prints the command and starts nothing.")
    return 0
