"""What `recorded.sh` says of a launch script that bash ran: its commands, variables and end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_nemotron3.common.switches import BOOST, EMULATE, LORA
from megatron_nemotron3.launch import parser, versions
from megatron_nemotron3.launch.flag import Flag, from_first_option, parse

#: Variables in a command's environment that say something about the launch.
REPORTED = (EMULATE, LORA, BOOST, "WORLD_SIZE")


@dataclass(frozen=True)
class RecordedCommand:
    """A command."""

    line: int
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Variables that the script uses and that are not set.
    unset: tuple[str, ...] = ()

    @cached_property
    def program(self) -> int:
        """Place of the Python file or of the module after -m; -1 if there is none."""
        for place, word in enumerate(self.words):
            if word.endswith(".py"):
                return place
        return max((place + 1 for place, word in enumerate(self.words) if word == "-m"), default=-1)

    @cached_property
    def variables(self) -> dict[str, str]:
        """The environment with what `env NAME=VALUE …` adds."""
        added = (word.partition("=") for word in self.words[: max(self.program, 0)])
        return {**self.environment, **{name: value for name, _, value in added if name in REPORTED}}

    @cached_property
    def flags(self) -> list[Flag]:
        """Megatron's options; none if it is another kind of command."""
        words = self.words[self.program + 1 :]
        if self.program >= 0:
            words = tuple(from_first_option(words))
        return parse(words) if words and words[0].startswith("--") else []

    @cached_property
    def known(self) -> int:
        """The number of its options that Megatron has."""
        names = {flag.name for flag in self.flags}
        return sum(any(parser.argument(name, version) for version in versions.KNOWN) for name in names)


@dataclass
class ScriptRun:
    """What bash did with a script, and how it ended."""

    #: The limit that it exceeded, as the end of "the script …".
    exceeded: str = ""
    calls: list[RecordedCommand] = field(default_factory=list)
    #: Words of variables that hold options, by name.
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Commands whose output the script reads.
    outputs: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    #: Line, status and unset variables at the end; None if it was ended.
    end: tuple[int, int, tuple[str, ...]] | None = None
    errors: list[str] = field(default_factory=list)
    #: The last line that it printed.
    printed: str = ""

    @cached_property
    def launches(self) -> list[RecordedCommand]:
        """The commands with most of Megatron's options."""
        most = max((call.known for call in self.calls), default=0)
        found = [call for call in self.calls if call.flags and call.known == most]
        return sorted(found, key=lambda call: call.line)

    def commands(self, shown: Iterable[str]) -> list[tuple[str, ...]]:
        """The words of every command, without the names of variables that stand for their values."""
        names = "|".join(sorted(map(re.escape, shown), key=len, reverse=True))
        cut = re.compile(rf"\$(?:{names})" if names else "(?!)")
        words = ((cut.sub("", word) for word in call.words) for call in self.calls)
        return sorted(tuple(filter(None, each)) for each in words)


def _records(record: str) -> Iterator[tuple[str, list[str]]]:
    """Yield process and words of each record of `recorded.sh`; processes write alternately."""
    parts, waiting = record.split("\0"), dict[str, list[str]]()
    for process, word in zip(parts[::2], parts[1::2], strict=False):
        words = waiting.setdefault(process, [])
        words.append(word)
        if words[0].isdecimal() and len(words) > int(words[0]):
            yield process, waiting.pop(process)[1:]


def read(record: str, run: ScriptRun) -> None:
    """Add a record of `recorded.sh` to what is known of a run."""
    unset, values = dict[str, list[str]](), dict[str, dict[str, str]]()
    for process, words in _records(record):
        match words:
            case ["unset", name]:
                unset.setdefault(process, []).append(name)
            case ["value", name, value]:
                values.setdefault(process, {})[name] = value
            case ["call", line, _, *_]:
                environment, missing = values.pop(process, {}), tuple(unset.pop(process, ()))
                call = RecordedCommand(_number(line), tuple(words[2:]), environment, missing)
                if run.calls and call.words[0].startswith("--"):  # options on a line of their own
                    before = run.calls.pop()
                    if before.program >= 0:
                        run.notes.append(
                            f"line {line}: the line before does not continue, so bash ends the command"
                        )
                    call = replace(before, words=before.words + call.words)
                run.calls.append(call)
            case ["output", name]:
                run.outputs.add(name)
            case ["variable", name, *held]:
                run.variables[name] = tuple(held)
            case ["exit", line, status]:
                run.end = _number(line), _number(status), tuple(unset.pop(process, ()))


def _number(word: str) -> int:
    return int(word) if word.isascii() and word.isdecimal() else 0  # the script wrote to the record
