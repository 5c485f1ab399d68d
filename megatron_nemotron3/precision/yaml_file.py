"""The file of `--te-precision-config-file`: written from the table, read strictly.

Megatron reads the file leniently (0.19.2). It silently ignores a matcher without `enabled: true`, a misspelt
`matchers` and a glob that matches nothing, and a recipe for a misspelt config fails only when the model is
built. Here each of these is an error with a message before anything starts. PyYAML is imported when a file is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.files import write_text
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.schema import (
    NO_FILE,
    PARAMS,
    TYPE,
    Matcher,
    PrecisionFile,
    PrecisionFileError,
    Setting,
    as_mapping,
    check_keys,
    read_config,
    read_matcher,
    strict_loader,
)
from megatron_nemotron3.precision.table import BF16, LINEARS, MXFP8, NVFP4, Structure

__all__ = [
    "FLAG",
    "NO_FILE",
    "Matcher",
    "PrecisionFile",
    "PrecisionFileError",
    "Setting",
    "parse",
    "read",
    "render",
    "write",
]

FLAG = "--te-precision-config-file"
#: Body of the recipe for each format.
_BODIES = {
    BF16: "{}",
    MXFP8: '{fp8_quantization_recipe: "mxfp8"}',
    NVFP4: '{fp4_quantization_recipe: "nvfp4"}',
}


def render(config: Nemotron3Config) -> str:
    """Text of the published recipe's file for a model: matchers for the rows of the table that it has."""
    present = Structure.of(config).kinds()
    rows = [kind for kind in LINEARS if kind.matchers and kind.name in present]
    lines = [
        f"# NVFP4 recipe for {config.title}: what does not follow the layer's NVFP4.",
        f"# nemotron3 precision {config.name} --yaml FILE",
        "configs:",
    ]
    for fmt in sorted({kind.recipe for kind in rows}):
        lines += [f"  {fmt}:", f'    {TYPE}: "{PARAMS}"', f"    training_recipe: {_BODIES[fmt]}"]
    lines += [
        "# The first that matches counts. Without `enabled: true` Megatron ignores a matcher.",
        "matchers:",
    ]
    for kind in rows:
        for name, glob in kind.matchers:
            lines += [f"  {name}:", f'    config: "{kind.recipe}"', '    type: "glob"']
            lines += [f'    pattern: "{glob}"', "    enabled: true"]
    return "\n".join(lines) + "\n"


def write(config: Nemotron3Config, path: str | Path) -> None:
    """Write `render(config)`.

    Raises:
        FileExistsError: a file with other text exists; one with the same text is kept.
    """
    path, text = Path(path), render(config)
    if path.exists() and path.read_text() != text:
        raise FileExistsError(f"{path} exists and differs from the recipe of {config.name}: remove it first")
    write_text(path, text)


def read(path: str | Path, config: Nemotron3Config | Structure | None = None) -> PrecisionFile:
    """Read a precision file, strictly.

    Args:
        path: the file.
        config: a model that the globs must fit; None to check the file alone.

    Raises:
        PrecisionFileError: the file is not YAML; a key, format or config is unknown; a matcher lacks
            `enabled`; with `config` also: a glob matches nothing, or several kinds of linears.
        OSError: the file cannot be read.
    """
    import yaml

    where = f"{FLAG} {path}"
    try:
        found = yaml.load(Path(path).read_text(), Loader=strict_loader())
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        line = " ".join(str(problem).split())
        raise PrecisionFileError(where, [f'not YAML: {line} (put globs in quotes: "*mtp.*")']) from None
    return parse(found, config, where=where)


def parse(
    content: Any, config: Nemotron3Config | Structure | None = None, *, where: str = FLAG
) -> PrecisionFile:
    """As `read`, for the parsed content of the YAML."""
    problems: list[str] = []
    if not isinstance(content, Mapping):
        raise PrecisionFileError(where, [f"{content!r} is not a mapping with configs and matchers"])
    check_keys(problems, "", content, ("configs", "matchers"), required=("configs", "matchers"))
    configs = as_mapping(problems, "configs", content.get("configs", {}))
    training: dict[str, Setting] = {}
    evaluation: dict[str, Setting] = {}
    for name, body in configs.items():
        if (settings := read_config(problems, f"configs.{name}", body)) is not None:
            training[name], evaluation[name] = settings
    matchers = [
        matcher
        for name, body in as_mapping(problems, "matchers", content.get("matchers", {})).items()
        if (matcher := read_matcher(problems, name, body, configs)) is not None
    ]
    file = PrecisionFile(tuple(matchers), training, evaluation)
    if not matchers and not problems:
        problems.append("no enabled matcher: the file would do nothing")
    if config is not None and not problems:
        problems += misfits(file, config if isinstance(config, Structure) else Structure.of(config))
    if problems:
        raise PrecisionFileError(where, problems)
    return file


def require_fit(file: PrecisionFile, structure: Structure, where: str) -> None:
    """Raise PrecisionFileError if the globs of a file do not fit a model."""
    if problems := misfits(file, structure):
        raise PrecisionFileError(where, problems)


def misfits(file: PrecisionFile, structure: Structure) -> list[str]:
    """Problems of globs that select no linear of the whole model, or linears of several rows of the table.

    The glob `*` stands for all remaining linears and may select any.
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
            problems.append(
                f"{at} has no effect: {touched[matcher.name]} comes first and takes all it matches"
            )
        elif not kinds:
            problems.append(f"{at} matches no linear of this model, which has {_module_globs(structure)}")
        elif len(kinds) > 1 and matcher.pattern != "*":
            examples = ", ".join(f"{kind} ({names[0]})" for kind, names in kinds.items())
            problems.append(f"{at} takes {len(kinds)} kinds: {examples}; write one matcher for each")
    return problems


def _module_globs(structure: Structure) -> str:
    present = structure.kinds()
    return ", ".join(glob for kind in LINEARS if kind.name in present for glob in kind.modules)
