"""The Megatron options that a launch script passes: bash runs it, and commands are recorded, not run.

Bash computes variables, loops, functions, and conditions on files of this machine; `jail` confines it. A
variable that is not set is empty, as in bash; where only a value depends on it, the value shows its name
(`--load $CKPT`). `recorded.sh` defines what commands do: nothing, successfully; their output is their name.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_nemotron3.common.files import printable
from megatron_nemotron3.launch import jail
from megatron_nemotron3.launch.script_ranks import launcher_options, ranks_of, sbatch_options, slurm_variables
from megatron_nemotron3.launch.script_record import REPORTED, RecordedCommand, ScriptRun, read

_USED = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*|[1-9])")
#: Names in arithmetic have no $.
_ARITHMETIC, _NAME = re.compile(r"\(\((.*?)\)\)", re.DOTALL), re.compile(r"(?<![\w$])[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"(?<![\w$-])([A-Za-z_]\w*)(?:\[[^]\n]*\])?\+?=")
#: Variables for which the script says what holds if they are not set.
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w*|[1-9]):?[-=+?]")
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
#: The script's own name: what runs is a copy.
_SOURCE = re.compile(r"\$\{BASH_SOURCE(?:\[0\])?\}|\$BASH_SOURCE\b")
#: The folder of a program, where a command begins or a variable names one: bash would look there for it.
_FOLDER = re.compile(
    r"((?:^|[;&|({`]|\b(?:do|then|else|exec|env|nohup|time)\b|\b\w*(?:PY|TORCH|LAUNCH|EXE|CMD)\w*=)"
    r"[ \t]*[\"']?)"
    r"(?:[~\w./-]|\$\w+|\$\{\w+\})*/"
    r"(?=(?:torchrun|python[\d.]*|srun|mpirun|mpiexec|env|nohup|numactl|bash|sh)(?![\w./-]))",
    re.MULTILINE,
)
#: A search path for one command.
_SEARCHED = re.compile(r"(?<![\w$])PATH=[^\s;&|]+[ \t]+(?=[\w$\"'])")
#: A value that a person is to fill in, with what may stand behind it: `CHECKPOINT=<PATH> (e.g., /model)`.
_PLACEHOLDER = re.compile(
    r"^([ \t]*(?:export[ \t]+)?\w+=)(<[^<>\r\n|&;()$`\"]+>)([^\s;&|()\"\\]*)"
    r"(?:[ \t]*(?:\\[ \t]*\r?\n[ \t]*)?\([^()\r\n]*\))?[ \t]*(?=\r?$|#)",
    re.MULTILINE,
)
#: A test of a file.
_FILE_TEST = re.compile(r"((?:\[|\btest|&&|\|\|)[ \t]+(?:![ \t]+)?)-[defrs](?=[ \t])")
_UNBOUND = re.compile(r"(\w+): unbound variable")
_ERROR = re.compile(r"\S*launch\.sh: (?:line (\d+): )?(.+)")
#: Commands of which neither success nor output says anything about the launch.
_HARMLESS = (
    "mkdir",
    "rm",
    "ls",
    "chmod",
    "touch",
    "ln",
    "cp",
    "mv",
    "tee",
    "sleep",
    "date",
    "clear",
    "module",
)
#: Programs that start ranks.
_STARTERS = ("srun", "mpirun", "mpiexec", "salloc")
#: So many variables without a value are tried one by one.
_MOST_TRIED = 16
#: So much of a printed line is looked at.
_LONGEST = 400
#: Seconds of each trial with names for values, and of all runs of a script after the first.
_TRIAL, _ALL = 3, 5
#: What a script prints that misses an argument.
_ARGUMENT = re.compile(r"(?<![\w-])--[a-z][\w-]+|\bargument\b")
#: A script that reads its arguments one by one: a name in place of one would change more than a value.
_READS_ARGUMENTS = re.compile(r"\bshift\b|\bgetopts\b|\$[#@*]|\$\{[#@*]")


@dataclass(frozen=True)
class LaunchSource:
    """A launch as text, and how it is read."""

    #: A script, a command, options alone, or YAML.
    text: str
    #: Values that hold whatever a script assigns; "1" is its first argument.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: The script's own path, for what lies next to it.
    path: str = "launch.sh"
    #: Whether a script is run also where the system cannot confine it (`jail`).
    trusted: bool = False


@dataclass(frozen=True)
class Script:
    """What a script passes to Megatron."""

    #: Each option once: the last of several counts, as for argparse.
    options: dict[str, tuple[str, ...]]
    #: What was not run or not set, and what else the script starts.
    notes: list[str]
    #: Ranks that torchrun or srun starts; None if the script does not say.
    world_size: int | None = None
    #: Variables of this package in the environment of the training processes.
    environment: Mapping[str, str] = field(default_factory=dict)


def follow(source: LaunchSource) -> Script:
    """Return what a script, a command or a list of options passes to Megatron.

    Raises:
        ValueError: the script starts no training, or it cannot be run here.
    """
    text, given = source.text, source.variables
    for name in given:
        if not name.isdecimal() and not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise ValueError(f"--set {name}: the script has no such variable")
    job, words = sbatch_options(text), _plain_words(text)
    if words is None:
        run = _run_shown(source, slurm_variables(job))
    else:
        run = ScriptRun(calls=[RecordedCommand(1, tuple(words))] if words else [])
    notes = [*run.notes, *_notes(run)]
    if run.launches:
        launch = run.launches[0]
        if any(call.flags != launch.flags for call in run.launches):
            notes.append(
                f"{len(run.launches)} commands are trainings: read is the first, of line {launch.line}"
            )
    else:
        _require_options(run)
        notes.append(f"no command is a training: read are the options in {', '.join(run.variables)}")
        launch = RecordedCommand(1, tuple(word for words in run.variables.values() for word in words))
    options: dict[str, tuple[str, ...]] = {}
    for flag in launch.flags:
        options.pop(flag.name, None)
        options[flag.name] = flag.values
    for starter in (call for call in run.calls if call.words[0] in _STARTERS and call.line == launch.line):
        job |= launcher_options([word for word in starter.words if "\n" not in word])
    job |= launcher_options(launch.words[: launch.program + 1])
    world = ranks_of(job, given.get("WORLD_SIZE", launch.variables.get("WORLD_SIZE", "")))
    return Script(options, notes, world, launch.variables)


def _plain_words(text: str) -> list[str] | None:
    """Return the words of a text that is one command with nothing to compute; None for a script."""
    if re.search(r"[$`;&<>(){}~]|^\s*[A-Za-z_]\w*=", text):
        return None
    words: list[str] = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            found = shlex.split(line, comments=True)
        except ValueError:  # bash says what is wrong
            return None
        # Options may stand on lines of their own, as `nemotron3 flags` prints them.
        further = words and found and (not found[0].startswith("--") or any(w.endswith(".py") for w in words))
        if "|" in found or further:
            return None
        words += found
    return words


def _run_shown(source: LaunchSource, job: Mapping[str, str]) -> ScriptRun:
    """Run a script; variables that are not set show their names where only values depend on them."""
    run = _run(source, job)
    end = time.monotonic() + _ALL
    for _ in range(_MOST_TRIED):  # set -u: bash names one after the other
        unbound = [match[1] for match in map(_UNBOUND.search, run.errors) if match]
        if run.launches or not unbound or unbound[-1] in job:
            break
        job = {**job, unbound[-1]: f"${unbound[-1]}"}
        run = _run(source, job, end - time.monotonic())
    placeholders = [found[2] for found in _PLACEHOLDER.finditer(source.text)]
    if not run.launches and placeholders:  # to bash, < and > are redirections
        source = replace(source, text=_PLACEHOLDER.sub(r'\1"\2\3"', source.text))
        run = _run(source, job, end - time.monotonic())
        run.notes.append(f"placeholders count as values: {printable(', '.join(dict.fromkeys(placeholders)))}")
    if not run.launches and (run.exceeded or (run.end and run.end[1])):
        exists = replace(source, text=_FILE_TEST.sub(r"\1-n", source.text))
        if (other := _run(exists, job, end - time.monotonic())).launches:
            ending = f"ends with status {run.end[1]} in line {run.end[0]}" if run.end else run.exceeded
            other.notes.append(f"the script {ending}; it is read as if every file that it tests existed")
            source, run = exists, other
    unset = run.launches[0].unset if run.launches else ()
    text = _COMMENT.sub("", source.text)
    known = {*_DEFAULTED.findall(text), *source.variables}
    if _READS_ARGUMENTS.search(text):
        known |= set("123456789")
    names = [name for name in _used(text) if (name in unset or name.isdecimal()) and name not in known]
    if not run.launches or not names or run.exceeded:
        return run
    shown, first = dict(job), run
    for tried in (names, *([name] for name in names[:_MOST_TRIED])):
        values = {**shown, **{name: f"${name}" for name in tried}}
        trial = _run(source, values, min(_TRIAL, end - time.monotonic()))
        added = set(values) - set(job)
        if not trial.exceeded and trial.commands(added) == first.commands(added):
            shown, run = values, trial
        if tried == names == [name for name in names if name in shown]:
            break
    run.notes, run.errors = first.notes, first.errors
    if empty := [name for name in names if name not in shown and name in unset]:
        run.notes.append(f"not set, so empty: {', '.join(empty)}; --set {empty[0]}=VALUE gives a value")
    return run


def _used(text: str) -> list[str]:
    """Return the names of variables and arguments that a script uses."""
    counted = [name for inner in _ARITHMETIC.findall(text) for name in _NAME.findall(inner)]
    return list(dict.fromkeys([*_USED.findall(text), *counted]))


def _run(source: LaunchSource, others: Mapping[str, str], seconds: float = jail.SECONDS) -> ScriptRun:
    """Run a script with the variables of --set and with others, which the script may assign."""
    values = {**others, **source.variables}
    last = max((int(name) for name in values if name.isdecimal()), default=0)
    arguments = [values.pop(str(place), "") for place in range(1, last + 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, before = folder / "launch.sh", folder / "recorded.sh"
        text = _SEARCHED.sub("", _FOLDER.sub(r"\1", source.text.replace("\r\n", "\n")))
        script.write_text(_SOURCE.sub("$0", text), encoding="utf-8")
        before.write_text(_prepared(source), encoding="utf-8")
        environment = {"PATH": "/nowhere", "HOME": str(Path.home()), **values, "BASH_ENV": str(before)}
        words = [str(script), *arguments]
        try:
            limit = max(min(seconds, jail.SECONDS), 0.1)
            run = ScriptRun(jail.run(words, environment, folder, trusted=source.trusted, seconds=limit))
        except jail.JailError as problem:
            raise ValueError(
                f"{problem}: install libseccomp2 (2.5, for Linux 5.5), pass --trust-script if the script may "
                "run on this machine, or give the command alone, without variables"
            ) from None
        read((folder / "record").read_bytes().decode(errors="replace"), run)
        printed = (folder / "printed").read_text(errors="replace").splitlines()
    # Without the lines of set -x, and the text that bash shows after a syntax error.
    lines = [line[:_LONGEST] for line in printed if not re.match(r"\+|\S*launch\.sh: line \d+: `", line)]
    for match in filter(None, map(_ERROR.match, lines)):
        run.errors.append(printable(f"line {match[1]}: {match[2]}" if match[1] else match[2]))
    run.printed = printable(_ERROR.sub(r"\2", lines[-1])) if lines else ""
    if "alloc: cannot allocate" in run.printed:  # bash says so and ends
        run.exceeded = f"takes more than {jail.MEMORY >> 22} MiB of memory in one process"
    return run


def _prepared(source: LaunchSource) -> str:
    """Return what runs before the script, for the names of this one."""
    text = _COMMENT.sub("", source.text)
    assigned = dict.fromkeys(_ASSIGNED.findall(text))
    names = {
        "@USED@": [name for name in _used(text) if not name.isdecimal() and name not in assigned],
        "@ASSIGNED@": assigned,
        "@REPORTED@": REPORTED,
        "@PATH@": [shlex.quote(source.path)],
        "@FIXED@": [f"{k}={shlex.quote(v)}" for k, v in source.variables.items() if not k.isdecimal()],
    }
    prepared = Path(__file__).with_name("recorded.sh").read_text()
    for place, words in names.items():
        prepared = prepared.replace(place, " ".join(words))
    return prepared


def _notes(run: ScriptRun) -> list[str]:
    """Return what the reader of a script should know of how it was run."""
    found = [f"the script {run.exceeded} and was ended"] if run.exceeded else []
    others = [call for call in run.calls if not call.flags and call.words[0] not in _STARTERS]
    for call in sorted(others, key=lambda call: (call.line, call.words[0])):
        name = call.words[0]
        if name.rpartition("/")[2] not in _HARMLESS:
            unknown = ", with unknown output" if name in run.outputs else ""
            found.append(printable(f"line {call.line}: {name} is not run and counts as successful{unknown}"))
    return list(dict.fromkeys([*found, *(f"bash: {error}" for error in run.errors)]))


def _require_options(run: ScriptRun) -> None:
    """Raise if a script without a training has no variables with options either."""
    if run.exceeded:
        raise ValueError(f"the script {run.exceeded} before a training")
    line, status, unset = run.end or (0, 0, ())
    if status:
        why = f": {run.printed}" if run.printed else ""
        named = [name for name in unset if re.search(rf"\b{name}\b", run.printed)]
        if not named and (argument := _ARGUMENT.search(run.printed)):
            named = ["1"] if argument[0] == "argument" else [f"1={argument[0]} --set 2"]
        named = named or list(unset[:4])
        cure = "; give " + " ".join(f"--set {name}=VALUE" for name in named) if named else ""
        raise ValueError(f"line {line}: the script ends with status {status} before a training{why}{cure}")
    if not run.variables:
        if run.errors:
            raise ValueError(run.errors[-1])
        empty = f" (not set: {', '.join(unset)})" if unset else ""
        raise ValueError(
            f"no Megatron option in the text{empty}: paste the command as it was run, pretrain_hybrid.py --…"
        )
