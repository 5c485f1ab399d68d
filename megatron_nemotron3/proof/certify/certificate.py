"""The certificate of a launch: what was proven of which command, by which versions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_nemotron3
from megatron_nemotron3.common.files import atomic_group, json_outside, read_outside, write_bytes, write_text
from megatron_nemotron3.launch import parser
from megatron_nemotron3.launch import versions as core
from megatron_nemotron3.proof.certify import options as table
from megatron_nemotron3.proof.certify.bench import Finding, PropertyState
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch

SCHEMA = 1
JSON, PAGE = "certificate.json", "certificate.md"
#: Of a comparison with another Megatron.
UPGRADE_JSON, UPGRADE_PAGE = "upgrade.json", "upgrade.md"
#: Options whose value is a file that decides what is computed: its content counts, not its name.
FILES = ("--te-precision-config-file", "--fp8-recipe-file", "--quant-recipe-file")
#: Keys of a normalised command that are no options.
WORLD, EMULATED, ADAPTERS, HEADS = "ranks", "emulated", "adapters", "heads alone"
_LIMIT = 16 << 20
_FIELDS = ("schema", "command", "hash", "title", "model", "layout", "findings", "versions", "date", "passed")


def normalised(request: LaunchRequest) -> dict[str, list[str]]:
    """Return what decides a launch's numbers: option -> values, sorted, without data, paths and logs."""
    found: dict[str, list[str]] = {}
    for flag in request.flags:
        if table.group(flag.name).treatment is table.Treatment.DROPPED:
            continue
        if flag.name in FILES:
            found[flag.name] = [_content(word) for word in flag.values]
            continue
        known = parser.argument(flag.name, "0.19")
        found[flag.name] = [_number(word, known.type if known else "text") for word in flag.values]
    for name, value in (
        (WORLD, request.world_size),
        (EMULATED, request.emulate and request.emulate.text()),
        (ADAPTERS, request.lora),
        (HEADS, request.boost),
    ):
        if value is not None:
            found[name] = [str(value)]
    return dict(sorted(found.items()))


def _number(word: str, kind: str) -> str:
    """Return a value in one form: 1e-4 and 0.0001 are equal."""
    try:
        return repr(float(word)) if kind == "float" else str(int(word)) if kind == "int" else word
    except ValueError:
        return word


def _content(path: str) -> str:
    try:
        return "sha256:" + hashlib.sha256(read_outside(path, limit=_LIMIT)).hexdigest()
    except (OSError, ValueError):
        return "not on this machine"


def hash_of(command: Mapping[str, Sequence[str]]) -> str:
    """Return the hash of a normalised command."""
    text = json.dumps(command, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def versions(checkout: Path | None) -> dict[str, str]:
    """Return the versions of what computed, and the revision of a checkout of Megatron-LM."""
    found = {"megatron-nemotron3": megatron_nemotron3.__version__}
    for package in ("megatron-core", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    if checkout is not None:
        found["Megatron-LM"] = revision(checkout)
    return found


def revision(checkout: Path) -> str:
    """Return the version of a checkout and its commit, read without git."""
    version = core.version_in(checkout / "megatron/core")
    try:
        git = checkout / ".git"
        if git.is_file():
            git = Path(git.read_text().partition("gitdir:")[2].strip())
        head = (git / "HEAD").read_text().strip()
        if head.startswith("ref: "):
            head = (git / head[5:]).read_text().strip()
    except OSError:
        return version
    return f"{version}, commit {head[:12]}"


def make(
    *,
    title: str,
    command: Mapping[str, list[str]],
    proxy: ProxyLaunch,
    findings: Sequence[Finding],
    checkout: Path | None,
    seconds: float,
) -> dict[str, Any]:
    """Return a certificate as data for `json.dumps`."""
    model, small, batch = proxy.model, proxy.config, proxy.case
    failures = [one for one in findings if one.state is PropertyState.FAIL]
    return {
        "schema": SCHEMA,
        "title": title,
        "passed": not failures,
        "hash": hash_of(command),
        "command": dict(command),
        "model": {
            "pattern": model.full_pattern,
            "hidden_size": model.hidden_size,
            "experts": model.num_moe_experts,
        },
        "layout": str(proxy.large),
        "twin": {  # the proxy launch: the name of schema 1, which stored certificates have
            "pattern": small.full_pattern,
            "hidden_size": small.hidden_size,
            "experts": small.num_moe_experts,
            "layouts": [str(sizes) for sizes in proxy.sizes],
            "sequence": batch.seq_length,
            "documents": batch.documents and list(batch.documents),
            "options": {name: treatment.value for name, treatment in proxy.treatments.items()},
            "remarks": [[one.treatment.value, one.what, one.instead, *one.options] for one in proxy.remarks],
        },
        "findings": [
            {
                "property": one.name,
                "state": one.state.value,
                "where": one.where,
                "difference": _finite(one.difference),
                "tolerance": one.tolerance,
                "detail": one.detail,
            }
            for one in findings
        ],
        "versions": versions(checkout),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "gpu": False,
        },
        "seconds": round(seconds, 1),
    }


def _finite(value: float | None) -> float | str | None:
    return value if value is None or abs(value) < float("inf") else repr(value)


def write(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write a certificate, or a comparison, as JSON and as a page, both or none; return the page."""
    names = (UPGRADE_PAGE, UPGRADE_JSON) if "against" in data else (PAGE, JSON)
    with atomic_group(*(folder / name for name in names)) as (page, document):
        write_text(page, render(data))
        write_bytes(document, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    return folder / names[0]


def read(path: Path) -> dict[str, Any]:
    """Read a certificate; raise ValueError for a file that is none."""
    try:
        data = json_outside(path, limit=_LIMIT)
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is no certificate: it is not JSON") from None
    if not isinstance(data, dict) or (missing := [name for name in _FIELDS if name not in data]):
        which = f"no {missing[0]}" if isinstance(data, dict) else "not an object"
        raise ValueError(f"{path} is no certificate: {which}")
    if data["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema {data['schema']}, this version reads {SCHEMA}")
    command, kinds = data["command"], {"versions": dict, "date": str, "passed": bool}
    if wrong := [name for name, kind in kinds.items() if not isinstance(data[name], kind)]:
        raise ValueError(f"{path} is no certificate: {wrong[0]} is {data[wrong[0]]!r:.60}")
    if not isinstance(command, dict) or hash_of(command) != data["hash"]:
        raise ValueError(f"{path}: the hash is not that of its command: the file was changed")
    return data


def differences(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each option that differs between two normalised commands."""

    def shown(command: Mapping[str, Sequence[str]], name: str) -> str:
        return " ".join(command[name]) or "on" if name in command else "not passed"

    names = sorted(before.keys() | now.keys())
    return [
        f"{name}: certified {shown(before, name)}, now {shown(now, name)}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def render(data: Mapping[str, Any]) -> str:
    """Return the one-page Markdown of a certificate."""
    return "\n".join([*_head(data), *_table(data), *_rest(data)]) + "\n"


def _head(data: Mapping[str, Any]) -> list[str]:
    proxy = data["twin"]
    return [
        f"# {'Upgrade' if 'against' in data else 'Certificate'}: {_cell(data['title'])}",
        "",
        *_summary(data),
        "",
        "| | |",
        "|-|-|",
        f"| command | `{data['hash']}` |",
        f"| date | {data['date']}, {data['seconds']:.0f} s |",
        f"| versions | {', '.join(f'{name} {version}' for name, version in data['versions'].items())} |",
        *([f"| compared with | {_cell(data['against'])} |"] if "against" in data else []),
        f"| model | `{_cell(data['model']['pattern'])}`, hidden size {data['model']['hidden_size']} |",
        f"| layout | {data['layout']} |",
        f"| proxy | `{_cell(proxy['pattern'])}`, hidden size {proxy['hidden_size']}, "
        f"experts {proxy['experts'] or 0} |",
        f"| its layouts | {'; '.join(proxy['layouts'])} |",
        "",
    ]


def _summary(data: Mapping[str, Any]) -> list[str]:
    """What was proved on what, what was replaced, and what is not proved."""
    model, proxy, command = data["model"], data["twin"], data["command"]
    sizes = [("layers", _layers(proxy["pattern"]), _layers(model["pattern"]))]
    sizes += [("hidden size", proxy["hidden_size"], model["hidden_size"])]
    sizes += [("experts", proxy["experts"], model["experts"])] * bool(model["experts"])
    sizes += [("tokens in a sequence", proxy["sequence"], *command.get("--seq-length", ["?"]))]
    small = ", ".join(f"{name} {own} of {large}" for name, own, large in sizes)
    ranks = f" on {_cell(command[WORLD][0])} GPUs" if WORLD in command else ""

    def names(state: PropertyState, *others: str) -> list[str]:
        found = [one for one in data["findings"] if one["state"] == state.value]
        named = [
            f"{one['property']} ({one['where']})" if one["property"] in others else one["property"]
            for one in found
        ]
        return list(dict.fromkeys(named))

    wrong = names(PropertyState.FAIL)
    proved = [name for name in names(PropertyState.PASS) if name not in wrong]
    unproved = names(PropertyState.UNTESTED, *proved)
    if "against" in data:
        before, after = data["versions"]["megatron-core"], data["against"]
        lines = [
            f"**Differs** from {before} to {after}: {', '.join(wrong) or 'nothing'}.",
            f"**Same**: {', '.join(proved)}, on a proxy in FP32 ({small}), in "
            f"{'; '.join(['one process', *proxy['layouts']])} in place of {data['layout']}{ranks}.",
            f"**Not compared**: {', '.join(unproved) or 'nothing else'}.",
        ]
        return "\n\n".join(map(_cell, lines)).split("\n")
    replaced = [one[1] for one in proxy["remarks"] if one[0] == table.Treatment.REPLACED.value]
    lines = [f"**FAILED** ({len(wrong)} of the properties): {', '.join(wrong)}."] if wrong else []
    lines += [
        f"**{'Passed' if wrong else 'Proved'}** ({len(proved)} of the properties) on a proxy in FP32 "
        f"({small}), in "
        f"{'; '.join(proxy['layouts'])} in place of {data['layout']}{ranks}, against one process and its "
        "definition.",
        f"**Replaced**: {', '.join(replaced) or 'nothing'}.",
        f"**Not proved**: {', '.join(unproved) or 'nothing else'}.",
    ]
    return "\n\n".join(map(_cell, lines)).split("\n")


def _layers(pattern: str) -> int:
    """Number of layers of a pattern, without its borders and MTP."""
    return len(pattern.partition("/")[0].replace("|", ""))


def _table(data: Mapping[str, Any]) -> list[str]:
    lines = ["| property | result | largest difference | tolerance | where | |", "|-|-|-|-|-|-|"]
    for one in data["findings"]:
        if one["state"] == PropertyState.UNTESTED.value:
            continue
        numbers = [_figure(one["difference"]), _figure(one["tolerance"])]
        state = "**FAIL**" if one["state"] == PropertyState.FAIL.value else "pass"
        cells = [one["property"], state, *numbers, one["where"], one["detail"]]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return lines


def _rest(data: Mapping[str, Any]) -> list[str]:
    untested = [one for one in data["findings"] if one["state"] == PropertyState.UNTESTED.value]
    lines = ["", "## Not testable here", ""]
    lines += [f"- {_cell(one['property'])}: {_cell(one['detail'])}" for one in untested] or ["Nothing."]
    lines += ["", "## The command", "", "Without data, paths and logs:", "", "```text"]
    lines += [" ".join((name, *words)) for name, words in data["command"].items()]
    return [*lines, "```"]


def _figure(value: float | str | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
