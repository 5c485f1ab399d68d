"""Evaluate the conditions of a shell script, `[ … ]`, as far as they are known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def is_known(values: Iterable[str]) -> bool:
    """Whether no shell variable and no substitution is left in the values."""
    return not any("$" in value or "`" in value for value in values)


def joined(operator: str, left: bool | None, right: bool | None) -> bool | None:
    """Return `left && right` or `left || right`, where None is unknown."""
    decisive = operator == "||"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive


def evaluate(words: Sequence[str], filled: Callable[[str], str]) -> bool | None:
    """Whether the words between `[` and `]` hold; None if that is unknown."""
    for sign, spellings in (("||", ("||", "-o")), ("&&", ("&&", "-a"))):
        for at, word in enumerate(words):
            if word in spellings:
                return joined(sign, evaluate(words[:at], filled), evaluate(words[at + 1 :], filled))
    if words[:1] == ("!",):
        inner = evaluate(words[1:], filled)
        return None if inner is None else not inner
    values = [filled(word) for word in words]
    if not is_known(values):
        return None
    match values:
        case [value] | ["-n", value]:
            return bool(value)
        case ["-z", value]:
            return not value
        case [left, "=" | "==" | "!=" as sign, right]:
            quoted = words[2][0] in "'\""
            same = left == right if quoted else fnmatchcase(left, right)
            return same == (sign != "!=")
        case [left, sign, right] if sign in _NUMBERS and left.isdecimal() and right.isdecimal():
            return _NUMBERS[sign](int(left), int(right))
    return None
