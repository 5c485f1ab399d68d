"""Read the Megatron options out of the text of an existing launch. Standard library only.

The text is one command (`torchrun … pretrain_hybrid.py --a 1 \\ …`), options alone, or a shell script that
collects options in arrays or quoted strings. Variables that the text assigns are replaced by their values;
others keep their `$` (`is_known`).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable

from megatron_nemotron3.args.flag import Flag, parse
from megatron_nemotron3.args.layout import ParallelLayout
from megatron_nemotron3.precision.settings import OPTION, VARIABLE, Emulation
from megatron_nemotron3.precision.settings import parse as parse_emulation

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)\+?=(?!\()(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ARRAY = re.compile(r"^\s*(?:local\s+)?\w+\+?=\(\s*")
_STRING = re.compile(r"\w+\+?=.*--", re.DOTALL)
#: Words that stand for options collected elsewhere in the script: "${MODEL_ARGS[@]}", $MODEL_ARGS, "$@".
_COLLECTED = re.compile(r"\$\{\w+\[[@*]\]\}|\$\{?\w*(ARGS|OPTS|OPTIONS|FLAGS)\w*\}?|\$[@*]")
_REDIRECTION = re.compile(r"[12&]?>")
#: Words that end a shell command.
_ENDS = (")", ";", "|", "&&", "||", "&")

#: Options of torchrun, which scripts often keep in an array of their own.
_LAUNCHER = re.compile(
    r"--(nproc[-_]per[-_]node|nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_]\w+|standalone|max[-_]restarts)$"
)

_EMULATION = re.compile(rf"(?<!\S)(?:export\s+)?(?:{OPTION}[=\s]\s*|{VARIABLE}=)([^\s\\]+)")
_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
_PATTERN, _DEPTHS = "--hybrid-layer-pattern", "--mtp-num-layers"
_OLD_PATTERN, _OLD_MTP = "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"


def read(text: str) -> list[Flag]:
    """Return the options in `text`, each once. The last of several counts, as for argparse.

    Raises:
        ValueError: the text has no option, or a quote that is not closed.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in _logical_lines(text):
        assigned = _ASSIGNMENT.match(line)
        if assigned and "--" not in assigned[2]:
            value = _shell_words(assigned[2])
            variables[assigned[1]] = (
                _variables_filled(value[0], variables) if len(value) == 1 else "$" + assigned[1]
            )
            continue
        words += [_variables_filled(word, variables) for word in _options_of_line(line)]
    found = {flag.name: flag.values for flag in parse(words) if not _LAUNCHER.match(flag.name)}
    if not found:
        raise ValueError(
            "no Megatron option in the text: paste the command as it was run, pretrain_hybrid.py --…"
        )
    _rename(found)
    return [Flag(name, values) for name, values in found.items()]


def renamed(text: str) -> list[str]:
    """Return a remark for each option that has another name in megatron-core 0.19."""
    old = {_OLD_PATTERN: _PATTERN, _OLD_MTP: f"the part of {_PATTERN} after the first /"}
    return [
        f"{name} is deprecated in megatron-core 0.19 and is compared as {new}"
        for name, new in old.items()
        if re.search(rf"(?<!\S){name}(?!\S)", text)
    ]


def _rename(options: dict[str, tuple[str, ...]]) -> None:
    """Turn layer-pattern options of older releases into `--hybrid-layer-pattern`, as the parser does."""
    if _PATTERN not in options and _OLD_PATTERN in options:
        options[_PATTERN] = options.pop(_OLD_PATTERN)
    depths = "".join(options.get(_DEPTHS, ()))
    if _OLD_MTP in options and _PATTERN in options and depths.isdecimal():
        mtp = options.pop(_OLD_MTP)
        options[_PATTERN] = ("/".join((*options[_PATTERN], *mtp * int(depths))),)


def emulation(text: str) -> Emulation | None:
    """What a command emulates, by the last option of our launcher or variable before it; None for nothing.

    Raises:
        ValueError: a value without meaning.
    """
    given = _EMULATION.findall(text)
    return parse_emulation(given[-1].strip("\"'")) if given and is_known(given[-1:]) else None


def is_known(values: Iterable[str]) -> bool:
    """Whether no shell variable is left in the values."""
    return not any("$" in value for value in values)


def layout_of(options: dict[str, tuple[str, ...]]) -> ParallelLayout | None:
    """Return the layout of a command line, with the smallest DP that its experts allow: no option gives DP.

    None if a size is not a positive number.
    """
    sizes: dict[str, int] = {}
    for field, name in _SIZES.items():
        value = (options.get(name) or ("",))[0]
        if not value and name not in options:
            continue
        if not (value.isascii() and value.isdecimal() and int(value)):
            return None
        sizes[field] = int(value)
    sizes.setdefault("etp", sizes.get("tp", 1) if "--num-experts" in options else 1)
    ranks, experts = sizes.get("tp", 1) * sizes.get("cp", 1), sizes["etp"] * sizes.get("ep", 1)
    dp = experts // math.gcd(ranks, experts)
    return ParallelLayout(**sizes, sp="--sequence-parallel" in options, dp=dp)


def _logical_lines(text: str) -> list[str]:
    """Join continued lines, and lines inside one quote."""
    lines: list[str] = []
    pending = ""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        pending = f"{pending} {line}" if pending else line
        try:
            _shell_words(pending)
        except ValueError:  # a quote is open
            continue
        lines.append(pending)
        pending = ""
    if pending:
        raise ValueError(f"a quote is not closed in {pending.strip()[:60]!r}")
    return lines


def _shell_words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def _options_of_line(line: str) -> list[str]:
    """Return the words of Megatron's options in one line of a script; none for a line of another command."""
    if array := _ARRAY.match(line):
        line = line[array.end() :]
    parts: list[str] = []
    for word in _shell_words(line):
        # A string that holds several options: MODEL_ARGS="--a 1 --b 2".
        parts += word.partition("=")[2].split() if _STRING.match(word) else [word]
    program = next((i for i, part in enumerate(parts) if part.endswith(".py")), None)
    if program is None:
        program = max((i + 1 for i, part in enumerate(parts) if part == "-m"), default=-1)
    parts = parts[program + 1 :]
    while parts and _COLLECTED.fullmatch(parts[0]):
        del parts[0]
    if not (parts and parts[0].startswith("--")):
        return []
    kept = []
    for part in parts:
        if part in _ENDS or _REDIRECTION.match(part):
            break
        if not _COLLECTED.fullmatch(part):
            kept.append(part.removesuffix(")") if "(" not in part else part)
    return kept


def _variables_filled(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name) or (match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, _VARIABLE.sub(value, word))
