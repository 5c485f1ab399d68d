"""`nemotron3 recipe`: list, print and copy the launch scripts of `recipes/`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import write_bytes
from megatron_nemotron3.common.options import add_command, argument, json_flag, option
from megatron_nemotron3.common.output import print_json, table
from megatron_nemotron3.common.parser import hint


def _folder() -> Path:
    package = Path(__file__).resolve().parent.parent
    inside = package / "recipes"
    return inside if (inside / "slurm.sh").is_file() else package.parent / "recipes"


#: The scripts: a wheel has them in the package, a checkout at its top.
SCRIPTS = _folder()
#: Starts any recipe on the nodes of a Slurm job; every copy has it.
SLURM = SCRIPTS / "slurm.sh"
#: A script that another one sources or starts, named from that one's folder.
_NEEDED = re.compile(r'(?:\$HERE|\$\(dirname "\$0"\)|&& pwd\))/([\w./]+\.(?:sh|py))"')


@dataclass(frozen=True)
class RecipeScript:
    """One script that a user starts."""

    #: A folder: a model, or cpu.
    model: str
    name: str

    @property
    def path(self) -> Path:
        """The script."""
        return SCRIPTS / self.model / f"{self.name}.sh"

    @property
    def summary(self) -> str:
        """The first sentence of its header."""
        line = self.path.read_text(encoding="utf-8").splitlines()[1]
        return line.removeprefix("# ").split(". ")[0].rstrip(".")


def recipes() -> list[RecipeScript]:
    """Return every recipe, by model and name; what is only sourced is not one."""
    scripts = sorted(path for path in SCRIPTS.glob("*/*.sh") if _is_started(path))
    return [RecipeScript(path.parent.name, path.stem) for path in scripts]


def chosen(model: str | None, name: str | None) -> list[RecipeScript]:
    """Return the recipes of a model, or the one of a name; all if both are None. Any case, _ for -."""
    found = recipes()
    if not found:
        raise ValueError(f"{SCRIPTS} has no recipes: install the wheel, or the package from a whole checkout")
    if model is not None:
        models = list(dict.fromkeys(recipe.model for recipe in found))
        found = [recipe for recipe in found if recipe.model == model.lower()]
        if not found:
            raise ValueError(f"no recipe of {model!r}: give one of {', '.join(models)}{hint(model, models)}")
    if name is not None:
        names = [recipe.name for recipe in found]
        found = [recipe for recipe in found if recipe.name == name.lower().replace("-", "_")]
        if not found:
            raise ValueError(
                f"{model} has no recipe {name!r}: give one of {', '.join(names)}{hint(name, names)}"
            )
    return found


def needed(script: Path) -> set[Path]:
    """Return a script and all that it sources or starts, directly or through another script."""
    found, open_ = set(), [script]
    while open_:
        path = open_.pop()
        if path not in found:
            found.add(path)
            names = _NEEDED.findall(path.read_text(encoding="utf-8")) if path.suffix == ".sh" else []
            open_ += [(path.parent / name).resolve() for name in names]
    return found


def copy(wanted: Sequence[RecipeScript], folder: Path) -> list[Path]:
    """Copy recipes, all that they need, and slurm.sh; return the paths of the copies below `folder`.

    Files that a user starts are executable. A recipe is written after what it needs. An existing file with
    the same content stays unchanged.
    """
    files = {SLURM}.union(*(needed(recipe.path) for recipe in wanted))
    last = {recipe.path for recipe in wanted}
    targets = {
        path: folder / path.relative_to(SCRIPTS) for path in sorted(files, key=lambda p: (p in last, p))
    }
    different = [
        str(target)
        for path, target in targets.items()
        if target.exists() and (target.is_dir() or target.read_bytes() != path.read_bytes())
    ]
    if different:
        raise ValueError(
            f"{', '.join(different)}: exists and is not this version's file; nothing was copied: "
            "move it away or give another --output"
        )
    new = [target for target in targets.values() if not target.exists()]
    try:
        for path, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if target in new:
                write_bytes(target, path.read_bytes())
            if _is_started(path):
                target.chmod(target.stat().st_mode | 0o111)
    except BaseException:  # a recipe without what it sources is none
        for target in new:
            target.unlink(missing_ok=True)
        raise
    return [target.relative_to(folder) for target in targets.values()]


def _is_started(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options of `nemotron3 recipe`."""

    model: str | None = argument("nano, super, ultra, omni or cpu", "MODEL", default=None)
    name: str | None = argument("recipe of the model, such as pretrain", "RECIPE", default=None)
    output: Path | None = option("output folder, for a copy of the selected recipes", "DIR")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 recipe`."""
    add_command(commands.add_parser("recipe"), RecipeOptions, recipe_command)


def recipe_command(options: RecipeOptions) -> int:
    """List, print or copy recipes."""
    found = chosen(options.model, options.name)
    if options.output is not None:
        if options.output.exists() and not options.output.is_dir():
            raise ValueError(f"--output {options.output} is not a folder")
        return _copied(found, options.output, options.json)
    if options.json:
        print_json(
            [
                {"model": one.model, "recipe": one.name, "summary": one.summary, "path": one.path}
                for one in found
            ]
        )
    elif options.name is not None:
        print(found[0].path.read_text(encoding="utf-8"), end="")
        again = f"nemotron3 recipe {options.model} {options.name} --output DIR"
        print(f"{again}: copies it with the files that it sources", file=sys.stderr)
    else:
        print("\n".join(table([(f"{one.model} {one.name}", one.summary) for one in found])))
    return 0


def _copied(wanted: list[RecipeScript], folder: Path, as_json: bool) -> int:
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
