"""Whether the globs of a precision file fit a model: each must win linears of one kind."""

from __future__ import annotations

from fnmatch import fnmatch

from megatron_nemotron3.precision.schema import PrecisionFile, PrecisionFileError
from megatron_nemotron3.precision.table import LINEARS, Structure


def require_fit(file: PrecisionFile, structure: Structure, where: str) -> None:
    """Raise PrecisionFileError if the file's globs do not fit the model."""
    if problems := misfits(file, structure):
        raise PrecisionFileError(where, problems)


def misfits(file: PrecisionFile, structure: Structure) -> list[str]:
    """Globs that win no module of the whole model, or modules of several rows of the table.

    A last matcher `*` stands for all the rest and may win any.
    """
    won: dict[str, dict[str, list[str]]] = {matcher.name: {} for matcher in file.matchers}
    touched: dict[str, str] = {}
    for linear in structure.linears():
        winner = file.matcher(linear.name)
        if winner is None:
            continue
        won[winner.name].setdefault(linear.kind.name, []).append(linear.name)
        for matcher in file.matchers:
            if fnmatch(linear.name, matcher.pattern):
                touched.setdefault(matcher.name, winner.name)
    problems = []
    for matcher in file.matchers:
        at, kinds = f"matchers.{matcher.name}: pattern {matcher.pattern!r}", won[matcher.name]
        if not kinds and matcher.name in touched:
            problems.append(f"{at} never counts: {touched[matcher.name]} before it takes all it matches")
        elif not kinds:
            problems.append(f"{at} matches no linear of this model, which has {_globs(structure)}")
        elif len(kinds) > 1 and matcher.pattern != "*":
            examples = ", ".join(f"{kind} ({names[0]})" for kind, names in kinds.items())
            problems.append(f"{at} takes {len(kinds)} kinds: {examples}; write one matcher for each")
    return problems


def _globs(structure: Structure) -> str:
    present = structure.kinds()
    return ", ".join(glob for kind in LINEARS if kind.name in present for glob in kind.modules)
