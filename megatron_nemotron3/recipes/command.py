"""`nemotron3 recipe`: list, print and copy the launch scripts. Standard library only."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.output import print_json
from megatron_nemotron3.common.options import add_command, argument, json_flag, option
from megatron_nemotron3.recipes.files import Recipe, chosen, copy


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options of `nemotron3 recipe`."""

    model: str | None = argument("nano, super, ultra, omni or cpu", "MODEL", default=None)
    name: str | None = argument("of the model, such as pretrain", "RECIPE", default=None)
    output: Path | None = option("where to write (a copy of the recipe, of those of MODEL, or of all)", "DIR")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 recipe`."""
    add_command(commands.add_parser("recipe"), RecipeOptions, recipe_command)


def recipe_command(options: RecipeOptions) -> int:
    """List, print or copy recipes.

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
        width = max(len(f"{recipe.model} {recipe.name}") for recipe in found)
        for recipe in found:
            print(f"{recipe.model + ' ' + recipe.name:<{width}}  {recipe.summary}")
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
