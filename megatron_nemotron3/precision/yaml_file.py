"""The file of `--te-precision-config-file`: written from the table, read strictly.

Megatron 0.19.2 silently ignores a matcher without `enabled: true`, a misspelt `matchers` and a glob that
matches nothing, and a recipe for a misspelt config fails only when the model is built. Here each of these is
an error.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import read_outside, write_text
from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.formats import BF16, MXFP8, NVFP4, name_of
from megatron_nemotron3.precision.table import LINEARS, Structure

#: Longest file that is read, in bytes; the recipe of Ultra has 4 kB.
_LIMIT = 1 << 20
FLAG = "--te-precision-config-file"
#: Body of the recipe for each format.
_BODIES = {
    BF16: "{}",
    MXFP8: '{fp8_quantization_recipe: "mxfp8"}',
    NVFP4: '{fp4_quantization_recipe: "nvfp4"}',
}
TYPE = "transformer_engine_config_type"
PARAMS = "TEQuantizationParams"

#: Allowed values of each field of Megatron's `TEQuantizationRecipe`; "" for free text.
_BOOL = (True, False)
RECIPE_FIELDS: dict[str, tuple[Any, ...] | str] = {
    "fp8_quantization_recipe": (MXFP8, "tensorwise", "blockwise", "custom"),
    "fp4_quantization_recipe": (NVFP4, "custom"),
    "custom_recipe_factory": "",
    "fp8_format": ("e4m3", "hybrid"),
    "override_quantized_autocast": _BOOL,
    "override_nonquantized_autocast": _BOOL,
    "tp_only_amax_red": _BOOL,
    "fp8_param": _BOOL,
    "fp4_param": _BOOL,
}
#: What globs on module names consist of, besides letters and digits.
_IN_GLOBS = "_.*?[]!-"
_MATCHER_FIELDS = ("config", "type", "pattern", "enabled")


class PrecisionFileError(ValueError):
    """All problems of a precision file, one per line in `problems`."""

    def __init__(self, where: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        # Megatron's `build_module` raises the class again with a longer message as its only argument.
        lines = (f"{where}:", *(f"  - {problem}" for problem in problems)) if problems else (where,)
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class FormatSetting:
    """How a recipe changes the format of a linear."""

    #: "bf16", or the name of the recipe: "mxfp8", "nvfp4", "fp8-tensorwise", …
    format: str
    #: Whether it replaces the format of a quantized layer, and that of a BF16 layer (the tail).
    over_quantized: bool = True
    over_bf16: bool = False

    def applied(self, ambient: str) -> str:
        return self.format if (self.over_bf16 if ambient == BF16 else self.over_quantized) else ambient


@dataclass(frozen=True)
class Matcher:
    """An enabled matcher: modules whose name matches the glob get the setting of `config`."""

    name: str
    pattern: str
    config: str


@dataclass(frozen=True)
class PrecisionFile:
    """A valid precision file: matchers in order; config -> its settings in training and in evaluation."""

    matchers: tuple[Matcher, ...]
    settings: Mapping[str, tuple[FormatSetting, FormatSetting]] = field(hash=False)

    def matcher(self, module: str) -> Matcher | None:
        """The first matcher that matches a module; later ones have no effect."""
        return next((m for m in self.matchers if fnmatch(module, m.pattern)), None)

    def format(self, module: str, ambient: str, *, training: bool = True) -> str:
        """Format of a module in a layer whose format is `ambient`."""
        matcher = self.matcher(module)
        if matcher is None:
            return ambient
        in_training, in_evaluation = self.settings[matcher.config]
        return (in_training if training else in_evaluation).applied(ambient)


NO_FILE = PrecisionFile((), {})
#: The published recipe for any model: `render` writes the matchers of the kinds that a model has.
PUBLISHED = PrecisionFile(
    tuple(Matcher(name, glob, kind.recipe) for kind in LINEARS for name, glob in kind.matchers),
    {fmt: (FormatSetting(fmt), FormatSetting(fmt)) for fmt in _BODIES},
)


def render(config: Nemotron3Config) -> str:
    """Text of the published recipe's file for a model: matchers for the kinds of linears that it has."""
    present = Structure.of(config).kinds()
    rows = [kind for kind in LINEARS if kind.matchers and kind.name in present]
    lines = [
        f"# NVFP4 recipe for {config.title}: what does not follow the layer's NVFP4.",
        f"# nemotron3 precision {config.name} --output FILE",
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


def write_precision_file(config: Nemotron3Config, path: str | Path) -> None:
    """Write `render(config)`.

    Raises:
        FileExistsError: a file with other text exists; one with the same text is kept.
    """
    path, text = Path(path), render(config)
    if path.exists() and read_outside(path, limit=_LIMIT) != text.encode():
        raise FileExistsError(f"{path} exists and differs from the recipe of {config.name}: remove it first")
    write_text(path, text)


def read(path: str | Path, config: Nemotron3Config | Structure | None = None) -> PrecisionFile:
    """Read a precision file, strictly; with `config`, a model that its globs must fit.

    Raises:
        ValueError: it is no regular file, or larger than 1 MiB.
        PrecisionFileError: the file is empty or not YAML; a key, format or config is unknown; a matcher lacks
            `enabled`; with `config` also: a glob matches nothing, or several kinds of linears.
        OSError: the file cannot be read.
    """
    import yaml

    where = f"{FLAG} {path}"
    text = read_outside(path, limit=_LIMIT)
    try:
        found = yaml.load(text.decode(), Loader=_strict_loader())
    except RecursionError:
        raise PrecisionFileError(where, ["not YAML that Megatron can read: nested too deeply"]) from None
    except (yaml.YAMLError, ValueError, OverflowError) as problem:  # also a date or number out of range
        line = " ".join(str(problem).split())
        raise PrecisionFileError(where, [f'not YAML: {line} (put globs in quotes: "*mtp.*")']) from None
    if found is None:
        name = config.name if isinstance(config, Nemotron3Config) else "NAME"
        cure = f"nemotron3 precision {name} --output FILE writes the published one"
        raise PrecisionFileError(where, [f"empty, so not a mapping with configs and matchers: {cure}"])
    return parse(found, config, where=where)


def parse(
    content: Any, config: Nemotron3Config | Structure | None = None, *, where: str = FLAG
) -> PrecisionFile:
    """As `read`, for the parsed content of the YAML."""
    problems: list[str] = []
    if not isinstance(content, Mapping):
        raise PrecisionFileError(where, [f"{_shown(content)} is not a mapping with configs and matchers"])
    _check_keys(problems, "", content, ("configs", "matchers"), required=("configs", "matchers"))
    configs = _as_mapping(problems, "configs", content.get("configs", {}))
    settings = {name: read_config(problems, _place("configs", name), body) for name, body in configs.items()}
    entries = _as_mapping(problems, "matchers", content.get("matchers", {}))
    matchers = (_read_matcher(problems, name, body, configs) for name, body in entries.items())
    file = PrecisionFile(tuple(matcher for matcher in matchers if matcher), settings)
    if not file.matchers and not problems:
        problems.append("no enabled matcher: the file would do nothing")
    if problems:
        raise PrecisionFileError(where, problems)
    if config is not None:
        require_fit(file, config if isinstance(config, Structure) else Structure.of(config), where)
    return file


def require_fit(file: PrecisionFile, structure: Structure, where: str) -> None:
    """Raise PrecisionFileError if a glob selects no linear of the whole model, or several kinds of linears.

    The glob `*` stands for all remaining linears and may select any.
    """
    won: dict[str, dict[str, list[str]]] = {matcher.name: {} for matcher in file.matchers}
    touched: dict[str, str] = {}  # matcher -> the first that won a linear which it matches, too
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
            present = structure.kinds()
            globs = [glob for kind in LINEARS if kind.name in present for glob in kind.modules]
            # A typo is in the last name.
            meant = hint(matcher.pattern.rpartition(".")[2], {g.rpartition(".")[2]: g for g in globs})
            problems.append(f"{at} matches no linear of this model, which has {', '.join(globs)}{meant}")
        elif len(kinds) > 1 and matcher.pattern != "*":
            examples = ", ".join(f"{kind} ({names[0]})" for kind, names in kinds.items())
            problems.append(f"{at} takes {len(kinds)} kinds: {examples}; write one matcher for each")
    if problems:
        raise PrecisionFileError(where, problems)


def read_config(problems: list[str], at: str, body: Any) -> tuple[FormatSetting, FormatSetting]:
    """Read an entry of `configs`: settings for training and for evaluation."""
    body = _as_mapping(problems, at, body)
    known = (TYPE, "training_recipe", "evaluation_recipe")
    _check_keys(problems, at, body, known, required=known[:2])
    if body.get(TYPE, PARAMS) != PARAMS:
        problems.append(f"{at}.{TYPE}: {_shown(body[TYPE])} is unknown: use {PARAMS}")
    training = _read_recipe(problems, f"{at}.training_recipe", body.get("training_recipe", {}))
    if "evaluation_recipe" not in body:
        return training, training
    return training, _read_recipe(problems, f"{at}.evaluation_recipe", body["evaluation_recipe"])


def _read_recipe(problems: list[str], at: str, body: Any) -> FormatSetting:
    body = _as_mapping(problems, at, body)
    _check_keys(problems, at, body, tuple(RECIPE_FIELDS))
    for key, value in body.items():
        allowed = RECIPE_FIELDS.get(key)
        if allowed == "":
            fits, wanted = isinstance(value, str), "a dotted name"
        elif allowed is None:
            continue  # an unknown field is reported above
        else:
            fits = any(value is a if isinstance(a, bool) else value == a for a in allowed)
            wanted = "use " + ", ".join(["true", "false"] if allowed is _BOOL else map(str, allowed))
        if not fits:
            problems.append(
                f"{at}.{key}: {_shown(value)} is unknown: {wanted}{hint(str(value), map(str, allowed))}"
            )
    fp8, fp4 = body.get("fp8_quantization_recipe"), body.get("fp4_quantization_recipe")
    if fp8 and fp4:
        problems.append(f"{at}: fp8_quantization_recipe={fp8} and fp4_quantization_recipe={fp4}: give one")
    if "custom" in (fp8, fp4) and not body.get("custom_recipe_factory"):
        problems.append(f"{at}: a custom recipe needs custom_recipe_factory")
    return FormatSetting(
        name_of(fp8 or fp4 or BF16),
        bool(body.get("override_quantized_autocast", True)),
        bool(body.get("override_nonquantized_autocast", False)),
    )


def _read_matcher(problems: list[str], name: str, body: Any, configs: Mapping[str, Any]) -> Matcher | None:
    """Read an entry of `matchers`; None if it is disabled or wrong."""
    at = _place("matchers", name)
    before = len(problems)
    body = _as_mapping(problems, at, body)
    _check_keys(problems, at, body, _MATCHER_FIELDS, required=_MATCHER_FIELDS[:3])
    enabled, pattern, config = body.get("enabled"), body.get("pattern"), body.get("config")
    if not isinstance(enabled, bool):
        found = "no enabled" if enabled is None else f"enabled: {_shown(enabled)}"
        problems.append(f"{at}: {found}: write enabled: true, or false (Megatron ignores it without)")
    if body.get("type", "glob") != "glob":
        problems.append(f"{at}.type: {_shown(body['type'])} is unknown: Megatron has only glob")
    if "config" in body and not (isinstance(config, str) and config in configs):
        problems.append(
            f"{at}.config: {_shown(config)} is none of {', '.join(map(str, configs)) or 'the configs'}"
            + hint(str(config), map(str, configs))
        )
    if "pattern" in body and not isinstance(pattern, str):
        problems.append(f"{at}.pattern: {_shown(pattern)} is not text")
    elif isinstance(pattern, str) and (mistake := _mistake_in_glob(pattern)):
        problems.append(f"{at}: pattern {_shown(pattern)} {mistake}")
    elif isinstance(pattern, str) and _by_number(pattern):
        problems.append(
            f"{at}: pattern {pattern!r} names a layer by number, which Megatron counts anew on every "
            "pipeline stage: use --num-layers-at-end-in-bf16"
        )
    if len(problems) > before or not enabled:
        return None
    return Matcher(str(name), str(pattern), str(config))


def _mistake_in_glob(pattern: str) -> str:
    """What is wrong with a glob alone; "" if nothing is."""
    if not pattern:
        return 'is empty: "*" stands for all linears'
    if foreign := sorted({c for c in pattern if not (c.isascii() and (c.isalnum() or c in _IN_GLOBS))}):
        what = ", ".join(map(repr, foreign))
        return f"is not a glob: no module name contains {what}; globs have *, ? and [seq]"
    if pattern.count("[") != pattern.count("]"):
        return "has a bracket that is not closed, which a glob takes literally"
    return ""


def _by_number(pattern: str) -> bool:
    """Whether a glob selects decoder layers by number."""
    head, layers, number = pattern.partition("layers.")
    return bool(layers) and "mtp" not in head and number[:1] in ("[", *"0123456789")


def _as_mapping(problems: list[str], at: str, value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping; else add a problem and return an empty one."""
    if isinstance(value, Mapping):
        return value
    problems.append(f"{at}: {_shown(value)} is not a mapping" + (": write {}" if value is None else ""))
    return {}


def _check_keys(
    problems: list[str], at: str, body: Mapping[str, Any], known: Sequence[str], required: Iterable[str] = ()
) -> None:
    """Add a problem for every unknown key of a mapping and every missing one."""
    prefix = f"{at}: " if at else ""
    for key in body:
        if key not in known:
            meant = hint(str(key), known) or f"; known are {', '.join(known)}"
            problems.append(f"{prefix}unknown key {key!r}{meant}")
    problems += [f"{prefix}no {key}" for key in required if key not in body]


def _place(section: str, name: str) -> str:
    return f"{section}.{name if name.isprintable() else ascii(name)}"


def _shown(value: Any) -> str:
    """A value of the file for a message, shortened: aliases can make a small file a huge value."""
    return reprlib.repr(value)


def _strict_loader() -> Any:
    """PyYAML's safe loader, made to refuse duplicate keys: of two the later would win without a message."""
    import yaml

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        loader.flatten_mapping(node)
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"key {key!r} is not text, line {key_node.start_mark.line + 1}")
            if key in found:
                raise yaml.YAMLError(f"key {key!r} is given twice, line {key_node.start_mark.line + 1}")
            found[key] = loader.construct_object(value_node, deep=True)
        return found

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Strict
