"""The scripts beside this file: which there are, what each of them needs, and copies that run elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_nemotron3.checkpoint.files import write_bytes
from megatron_nemotron3.common.options import hint

HERE = Path(__file__).resolve().parent
#: Starts any recipe on the nodes of a Slurm job; every copy has it.
SLURM = HERE / "slurm.sh"
#: A script that another one sources or starts, named from that one's folder.
_NEEDED = re.compile(r'(?:\$HERE|\$\(dirname "\$0"\)|&& pwd\))/([\w./]+\.(?:sh|py))"')


@dataclass(frozen=True)
class Recipe:
    """One script that a user starts."""

    #: A folder: a model, or cpu.
    model: str
    name: str

    @property
    def path(self) -> Path:
        """The script in the package."""
        return HERE / self.model / f"{self.name}.sh"

    @property
    def summary(self) -> str:
        """The first sentence of its header."""
        line = self.path.read_text(encoding="utf-8").splitlines()[1]
        return line.removeprefix("# ").split(". ")[0].rstrip(".")


def recipes() -> list[Recipe]:
    """Return every recipe, by model and name; what is only sourced is not one."""
    scripts = sorted(path for path in HERE.glob("*/*.sh") if _is_started(path))
    return [Recipe(path.parent.name, path.stem) for path in scripts]


def chosen(model: str | None, name: str | None) -> list[Recipe]:
    """Return the recipes of a model, or the one of a name; all if both are None. Case, - and _ do not matter.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    found = recipes()
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
            words = _NEEDED.findall(path.read_text(encoding="utf-8")) if path.suffix == ".sh" else []
            open_ += [(path.parent / word).resolve() for word in words]
    return found


def copy(wanted: Sequence[Recipe], folder: Path) -> list[Path]:
    """Copy recipes, all that they need, and slurm.sh; return the paths of the copies below `folder`.

    Files that a user starts are executable. A recipe is written after what it needs. A file that is there
    already and has the same content is left as it is.

    Raises:
        ValueError: a file in the folder has another content; nothing has been written.
        OSError: the folder cannot be written.
    """
    files = {SLURM}.union(*(needed(recipe.path) for recipe in wanted))
    last = {recipe.path for recipe in wanted}
    targets = {path: folder / path.relative_to(HERE) for path in sorted(files, key=lambda p: (p in last, p))}
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
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            write_bytes(target, path.read_bytes())
        if _is_started(path):
            target.chmod(target.stat().st_mode | 0o111)
    return [target.relative_to(folder) for target in targets.values()]


def _is_started(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"
