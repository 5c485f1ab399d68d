"""Follow a launch script to the Megatron options that it passes.

Branches are followed where the script's own variables, their defaults (`${TP:-2}`) and the values given with
`--set` decide them. Where they do not, a branch that changes an option is an error with its line; one that
changes none does not matter. Options count where they are collected: in an array, a string or a command.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megatron_nemotron3.launch import shell
from megatron_nemotron3.launch.flag import Flag, from_first_option, parse
from megatron_nemotron3.launch.script_ranks import (
    launcher_options,
    ranks_of,
    sbatch_options,
    slurm_variables,
)
from megatron_nemotron3.launch.shell_conditions import evaluate, is_known, joined

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
#: Words that stand for options collected elsewhere in the script: "${MODEL_ARGS[@]}", $MODEL_ARGS, "$@".
_COLLECTED = re.compile(r"\$\{\w+\[[@*]\]\}|\$\{?\w*(ARGS|OPTS|OPTIONS|FLAGS)\w*\}?|\$[@*]")
_WHOLE_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_OPTION = re.compile(r"(?<!\S)--\w")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_READS = ("read", "mapfile", "readarray", "getopts", "unset")
#: Commands that may fail without an error; every other one is taken to succeed.
_TESTS = ("grep", "command", "which", "type", "diff", "cmp", "pgrep", "hash", "((")
#: Options of torchrun, which scripts often keep in an array of their own.
_LAUNCHER = re.compile(
    r"--(nproc[-_]per[-_]node|nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_]\w+|standalone|max[-_]restarts"
    r"|log[-_]dir|no[-_]python|local[-_]addr|role|redirects|tee|monitor[-_]interval)$"
)
#: Functions that call each other deeper than this are refused.
_DEEPEST = 20


@dataclass
class Script:
    """What a script passes to Megatron."""

    #: Each option once: the last of several counts, as for argparse.
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Which branches were followed, and what was not read.
    notes: list[str] = field(default_factory=list)
    #: Ranks that torchrun or srun starts; None if the script does not say.
    world_size: int | None = None


class _Ended(Exception):
    """The script exits, or a function returns."""


def follow(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """Return what a script passes to Megatron."""
    for name in variables or {}:
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise ValueError(f"--set {name}: the script has no such variable")
    job = sbatch_options(text)
    interpreter = _Interpreter(dict(variables or {}))
    interpreter.variables = slurm_variables(job) | interpreter.variables
    try:
        with contextlib.suppress(_Ended):
            interpreter.run(shell.parse(text))
    except RecursionError:
        raise ValueError("the script is nested too deep to be read") from None
    found = interpreter.result()
    found.world_size = ranks_of(job | interpreter.launcher, interpreter.variables.get("WORLD_SIZE", ""))
    return found


class _Interpreter:
    """The state of a script at one of its lines."""

    def __init__(self, fixed: dict[str, str]) -> None:
        #: Variables that keep the value of --set.
        self.fixed = fixed
        self.variables = dict(fixed)
        #: Variables that an undecided branch may have set -> why; `reasons` keeps those set again later.
        self.undecided: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        #: Variables that hold options, which count where they are assigned.
        self.collections: set[str] = set()
        self.functions: dict[str, shell.Function] = {}
        self.words: list[str] = []
        #: Options of torchrun and srun.
        self.launcher: dict[str, tuple[str, ...]] = {}
        self.notes: list[str] = []
        self.calls = 0

    def result(self) -> Script:
        found: dict[str, tuple[str, ...]] = {}
        self.launcher |= launcher_options(self.words)
        for flag in _without_launcher(self.words):
            found.pop(flag.name, None)
            found[flag.name] = flag.values
        for name, values in found.items():
            for variable in _names_in(values):
                if reason := self.reasons.get(variable):
                    remedy = self._remedy(_names_in([reason]) or [variable])
                    raise ValueError(f"{name} uses {variable}, and {reason}{remedy}")
        return Script(found, list(dict.fromkeys(self.notes)))

    def run(self, nodes: Iterable[shell.Node]) -> None:
        for node in nodes:
            self._run_one(node)

    def _run_one(self, node: shell.Node) -> None:
        match node:
            case shell.Simple():
                self._run_simple(node)
            case shell.Chain():
                self._run_chain(node)
            case shell.Branch():
                self._run_branch(node)
            case shell.ShellCase():
                self._run_case(node)
            case shell.Loop():
                values = [self._filled(word) for word in node.values]
                if node.variable and len(values) == 1 and is_known(values):
                    self._assign(node.variable, "=", node.values[0])
                    self.run(node.body)
                else:
                    self._undecided([node], f"line {node.line} repeats what sets it: {_short(node.head)}")
            case shell.Function():
                self.functions[node.name] = node
            case shell.ShellGroup():
                self.run(node.body)

    # -- branches ------------------------------------------------------------------------------------------

    def _run_branch(self, node: shell.Branch) -> None:
        for number, (condition, body) in enumerate(node.clauses):
            holds: bool | None = True
            for part in condition:
                holds = self._truth(part)
            if holds is None:
                rest = [step for _, bodies in node.clauses[number:] for step in bodies]
                self._undecided(rest, self._reason(node.line, "if " + _text_of(condition)))
                return
            if holds:
                self._remark(node.line, "if " + _text_of(node.clauses[0][0]), number == 0, body)
                self.run(body)
                return
        self._remark(node.line, "if " + _text_of(node.clauses[0][0]), False, node.clauses[0][1])

    def _run_case(self, node: shell.ShellCase) -> None:
        head, subject = f"case {node.word}", self._filled(node.word)
        for number, (patterns, body) in enumerate(node.clauses):
            shown = [self._filled(pattern) for pattern in patterns]
            if not is_known((subject, *shown)):
                rest = [step for _, bodies in node.clauses[number:] for step in bodies]
                self._undecided(rest, self._reason(node.line, head))
                return
            if any(fnmatchcase(subject, pattern) for pattern in shown):
                if _matters(body):
                    other = "".join(
                        f"; --set {name}=VALUE for another" for name in _names_in([node.word])[:1]
                    )
                    self.notes.append(f"line {node.line}: {head} is {subject}{other}")
                self.run(body)
                return

    def _remark(self, line: int, head: str, holds: bool, body: Sequence[shell.Node]) -> None:
        """Say which way an `if` went, if another way would change something."""
        if _matters(body):
            self.notes.append(f"line {line}: {_short(head)} is taken as {'true' if holds else 'false'}")

    def _run_chain(self, node: shell.Chain) -> None:
        holds = self._truth(node.parts[0])
        self._run_one(node.parts[0])
        for operator, part in zip(node.operators, node.parts[1:], strict=True):
            if operator == "|":
                self._run_one(part)
                continue
            wanted = operator == "&&"
            if holds is None:
                self._undecided([part], self._reason(node.line, _text_of(node.parts[:1])))
            elif holds is wanted:
                self._run_one(part)
                holds = self._truth(part)

    def _truth(self, node: shell.Node) -> bool | None:
        """Whether a command succeeds; None if that is unknown."""
        if isinstance(node, shell.Chain):
            holds = self._truth(node.parts[0])
            for operator, part in zip(node.operators, node.parts[1:], strict=True):
                other = self._truth(part)
                holds = other if operator == "|" else joined(operator, holds, other)
            return holds if holds is None or not node.negated else not holds
        if not isinstance(node, shell.Simple):
            return None
        first = node.words[0]
        if first in ("[", "[[", "test"):
            return evaluate(node.words[1 : None if first == "test" else -1], self._filled)
        return first == "true" or (None if first.startswith(_TESTS) else first != "false")

    def _undecided(self, nodes: Iterable[shell.Node], reason: str) -> None:
        """Mark what commands that may or may not run would set."""
        for node in _simple_commands(nodes):
            names = [word for word in node.words if _ASSIGNMENT.fullmatch(word)]
            branch = _Interpreter(self.fixed)
            branch.collections = self.collections
            branch._run_simple(node, follow_calls=False)
            if found := _without_launcher(branch.words):
                raise ValueError(
                    f"{found[0].name} (line {node.line}): {reason}{self._remedy(_names_in([reason]))}"
                )
            for name in (word.split("=")[0].rstrip("+") for word in names):
                if name not in self.fixed:
                    self.undecided[name] = self.reasons[name] = reason
            called = self.functions.get(node.words[0])
            if called:
                self._entered(called)
                self._undecided(called.body, reason)
                self.calls -= 1

    def _reason(self, line: int, head: str) -> str:
        return f"line {line} cannot be decided: {_short(head)}"

    def _remedy(self, names: Sequence[str]) -> str:
        options = " ".join(f"--set {name}=VALUE" for name in dict.fromkeys(names))
        return f"; give {options}" if options else "; give the command as it was run"

    # -- commands ------------------------------------------------------------------------------------------

    def _run_simple(self, node: shell.Simple, follow_calls: bool = True) -> None:
        words = list(node.words)
        declared = words[0] in _DECLARES
        assigned = [match for word in words[declared:] if (match := _ASSIGNMENT.fullmatch(word))]
        if declared or len(assigned) == len(words):
            for match in assigned:
                self._assign(match[1], match[2], match[3])
            return
        while _ASSIGNMENT.fullmatch(words[0]):  # variables of this command alone
            del words[0]
        first = words[0]
        if first in _READS:
            for name in words[1:]:
                if name not in self.fixed:
                    self.variables.pop(name, None)
        elif first in ("source", "."):
            self.notes.append(f"line {node.line}: {_short(' '.join(words))} is not read")
        elif first == "exit" and follow_calls:
            if words[1:2] not in ([], ["0"]) and not self.words:
                raise ValueError(
                    f"line {node.line}: with these variables the script ends with {' '.join(words)}"
                )
            raise _Ended
        elif first == "return" and follow_calls:
            raise _Ended
        elif first == "eval":
            self.run(shell.parse(" ".join(map(_unquoted, words[1:]))))
        elif first in self.functions and follow_calls:
            self._entered(self.functions[first])
            try:
                self.run(self.functions[first].body)
            except _Ended:
                if any(step.words[0] == "exit" for step in _simple_commands(self.functions[first].body)):
                    raise
            self.calls -= 1
        else:
            self.words += self._options_of(words)

    def _entered(self, function: shell.Function) -> None:
        self.calls += 1
        if self.calls > _DEEPEST:
            raise ValueError(f"line {function.line}: functions call each other more than {_DEEPEST} deep")

    def _assign(self, name: str, operator: str, raw: str) -> None:
        if raw.startswith("("):
            words = [token.text for token in shell.tokens(raw[1:-1]) if token.is_word]
            self.collections.add(name)
            self.words += self._options_of(words)
            return
        value = _unquoted(raw)
        if _OPTION.search(value):
            self.collections.add(name)
            self.words += self._options_of(value.split())
            return
        if name in self.fixed:
            return
        self.undecided.pop(name, None)
        self.collections.discard(name)
        before = self.variables.get(name, "") if operator == "+=" else ""
        self.variables[name] = before + self._filled(raw)

    def _options_of(self, words: Sequence[str]) -> list[str]:
        """Return the words of Megatron's options in one command; none for a command of another kind."""
        unquoted = [_unquoted(word) for word in words]
        kept = [(word, self._filled_text(word)) for word in unquoted if not self._is_collected(word)]
        program = next((i for i, (_, word) in enumerate(kept) if word.endswith(".py")), None)
        if program is None:
            program = max((i + 1 for i, (word, _) in enumerate(kept) if word == "-m"), default=-1)
        values = [word for _, word in kept[program + 1 :]]
        self.launcher |= launcher_options([word for _, word in kept[: program + 1]])
        if program >= 0:
            values = list(from_first_option(values))
        return values if values and values[0].startswith("--") else []

    def _is_collected(self, word: str) -> bool:
        whole = _WHOLE_VARIABLE.fullmatch(word)
        return bool(_COLLECTED.fullmatch(word)) or (whole is not None and whole[1] in self.collections)

    # -- words ---------------------------------------------------------------------------------------------

    def _filled(self, raw: str) -> str:
        return self._filled_text(_unquoted(raw))

    def _filled_text(self, word: str) -> str:
        """Replace variables whose values are known, and take the defaults of those that are not set."""

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            if name in self.undecided:
                return f"${{{name}}}"
            found = self.variables.get(name)
            if found is None:
                return match[2] if match[2] is not None else match[0]
            return found or match[2] or ""

        return _VARIABLE.sub(value, _VARIABLE.sub(value, word))


def _without_launcher(words: Sequence[str]) -> list[Flag]:
    return [flag for flag in parse(words) if not _LAUNCHER.match(flag.name)]


def _names_in(values: Iterable[str]) -> list[str]:
    return [match[1] or match[3] for value in values for match in _VARIABLE.finditer(value)]


def _unquoted(raw: str) -> str:
    try:
        return " ".join(shlex.split(re.sub(r"\\\r?\n", " ", raw)))
    except ValueError:  # inside a substitution
        return raw


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 70 else text[:69] + "…"


def _text_of(nodes: Sequence[shell.Node]) -> str:
    return "; ".join(" ".join(node.words) for node in _simple_commands(nodes)) or "…"


def _simple_commands(nodes: Iterable[shell.Node]) -> Iterable[shell.Simple]:
    """Return every command in a tree, whether it would run or not; without the bodies of functions."""
    for node in nodes:
        match node:
            case shell.Simple():
                yield node
            case shell.Chain():
                yield from _simple_commands(node.parts)
            case shell.Branch():
                for condition, body in node.clauses:
                    yield from _simple_commands((*condition, *body))
            case shell.ShellCase():
                for _, body in node.clauses:
                    yield from _simple_commands(body)
            case shell.Loop() | shell.ShellGroup():
                yield from _simple_commands(node.body)


def _matters(nodes: Iterable[shell.Node]) -> bool:
    """Whether commands can change an option: they assign something or pass one."""
    return any(
        _ASSIGNMENT.fullmatch(word) or word.startswith("--")
        for node in _simple_commands(nodes)
        if node.words[0] not in ("echo", "printf")
        for word in node.words
    )
