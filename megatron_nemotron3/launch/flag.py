"""One command-line option, and three ways to write a list of options.

A layer pattern contains `*`, `|` and `/`. Unquoted, a shell expands the first and pipes at the second. The
form that is safe in a script, and that also stops if the flags are refused, is

    flags=$(nemotron3 flags super --schedule published --shell) || exit 1
    eval "ARGS=( $flags )"
    torchrun ... pretrain_hybrid.py "${ARGS[@]}"

`eval "set -- $flags"` works too. `pretrain_hybrid.py $flags` never does: the shell splits the words but
leaves the quotes in them. `eval "ARGS=( $(nemotron3 ...) )"` on one line works but loses the exit status.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: The order sections are printed in.
SECTIONS = (
    "architecture",
    "parallelism",
    "precision",
    "optimization",
    "data",
    "logging",
    "performance",
    "extra",
)


@dataclass(frozen=True)
class Flag:
    """An option of Megatron's parser, with its values as they are typed."""

    #: With its dashes: "--hidden-size".
    name: str
    #: Empty for a switch.
    values: tuple[str, ...] = ()
    #: One of `SECTIONS`.
    section: str = "extra"
    #: Where the value comes from: "config.hidden_size", "layout.tp", "family", ...
    origin: str = "extra"

    def __post_init__(self) -> None:
        if not self.name.startswith("--"):
            raise ValueError(f"{self.name!r} is not an option: it must start with '--'")
        if self.section not in SECTIONS:
            raise ValueError(f"{self.name}: section {self.section!r} is not one of {', '.join(SECTIONS)}")
        if broken := [word for word in (self.name, *self.values) if "\n" in word]:
            raise ValueError(
                f"{self.name}: {broken[0]!r} has a line break, but an option must fit on one line"
            )

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


def text(value: object) -> str:
    """Write a value so that Megatron's parser reads it back exactly: `repr` for floats, else `str`."""
    return repr(value) if isinstance(value, float) else str(value)


#: Megatron has some 900 options; a data path may name thousands of files.
MOST_WORDS = 20_000


def parse(words: Sequence[str]) -> list[Flag]:
    """Turn words of a command line into flags of section "extra".

    Args:
        words: such as `["--lr", "1e-3", "--bf16"]` or `["--lr=1e-3"]`.

    Raises:
        ValueError: a value before the first option, or too many words.
    """
    return list(_parsed(tuple(words)))


@lru_cache(maxsize=1024)  # a search for layouts asks for the same words again and again
def _parsed(words: tuple[str, ...]) -> tuple[Flag, ...]:
    flags: list[Flag] = []
    if len(words) > MOST_WORDS:
        raise ValueError(f"{len(words):,} words of options: a launch has at most {MOST_WORDS:,}")
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append(Flag(name, (value,) if equals else ()))
        elif flags:
            flags[-1] = Flag(flags[-1].name, (*flags[-1].values, word))
        else:
            raise ValueError(f"extra starts with {word!r}, which belongs to no option: give --option first")
    return tuple(flags)


def from_first_option(words: Sequence[str]) -> Sequence[str]:
    """Return a command line without what precedes its first option."""
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    return words[first:]


def values_by_name(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the options of a script's command line; a value of several lines becomes one line."""
    one_line = [word.replace("\n", " ") for word in words]
    return {flag.name: flag.values for flag in parse(from_first_option(one_line))}


def is_known(values: Iterable[str]) -> bool:
    """Whether no shell variable and no substitution is left in the values."""
    return not any("$" in value or "`" in value for value in values)


def repeated(flags: Sequence[Flag]) -> list[str]:
    """Return a sentence for each option that is given more than once with different values."""
    values: dict[str, set[tuple[str, ...]]] = {}
    for flag in flags:
        values.setdefault(flag.name, set()).add(flag.values)
    last = {flag.name: str(flag) for flag in flags}
    return [
        f"{name} is given {len(found)} times with different values: the last one counts, {last[name]}"
        for name, found in values.items()
        if len(found) > 1
    ]


def to_argv(flags: Iterable[Flag]) -> list[str]:
    """Return the words to pass to a process, unquoted: `["--hidden-size", "4096", ...]`."""
    return [word for flag in flags for word in (flag.name, *flag.values)]


def render(flags: Iterable[Flag], shell: bool = False) -> str:
    """Return text with one option per line.

    Args:
        flags: what `flags()` returned.
        shell: False: for reading, with a `# section` line before each section, nothing quoted.
            True: for `eval "ARGS=( ... )"` or `eval "set -- ..."`: every value quoted for a POSIX shell,
            lines joined by a backslash, no comments.
    """
    if shell:
        return " \\\n".join(" ".join((flag.name, *map(shlex.quote, flag.values))) for flag in flags)
    lines: list[str] = []
    section = None
    for flag in flags:
        if flag.section != section:
            section = flag.section
            lines.append(f"# {section}")
        lines.append(str(flag))
    return "\n".join(lines)


def exports(environment: Mapping[str, str]) -> str:
    """Return lines for `eval` in a POSIX shell that export variables; those that are set keep their value."""
    return "\n".join(
        f"export {name}=${{{name}:-{shlex.quote(value)}}}" for name, value in environment.items()
    )


def take_options(arguments: Iterable[str], names: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Take options with a value out of a command line: (the other arguments, the values of each name)."""
    found: dict[str, list[str]] = {name: [] for name in names}
    others, rest = [], iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in found:
            found[name].append(value if equals else next(rest, ""))
        else:
            others.append(argument)
    return others, found
