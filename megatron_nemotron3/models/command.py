"""How every command names a model: of the catalog, or a JSON file of one's own.

    {"base": "nano", "pattern": "MEM*EMEM*E", "num_moe_experts": 64}

Fields are those of `Nemotron3Config`. `base` names a catalog model, whose fields are taken where the file
gives none. Without it every field that has no default is needed. `nemotron3 show NAME --json` and
`Nemotron3Config.to_json` write such files.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import first_repeated, read_outside
from megatron_nemotron3.common.options import argument, flag, option
from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.models import catalog
from megatron_nemotron3.models.catalog import names
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.models.tiny import TINY_SUFFIX, tiny

SUFFIX = ".json"
#: No description of a model is longer, in bytes.
LONGEST = 1 << 20
#: Published figures of the base model, which do not hold for another one.
_FIGURES = ("published_total", "published_active", "source")
#: A model's name also names folders.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODEL = "catalog name, or FILE.json with a custom model"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """NAME or --model, and --tiny, for `chosen_model`."""

    name: str | None = argument(", ".join(names()), "NAME", default=None)
    model: str | None = option(f"{_MODEL}; in place of NAME", "MODEL")
    tiny: bool = flag("use the smaller variant of the model, for a CPU")


@dataclass(frozen=True, kw_only=True)
class StoredModelOptions:
    """--model and --tiny of commands that read a checkpoint, for `stored_model`."""

    model: str | None = option(f"{_MODEL} (default: as stored in the checkpoint)", "MODEL")
    tiny: bool = flag("use the smaller variant of the model, for a CPU")


def names_model(options: ModelOptions | argparse.Namespace) -> bool:
    """Whether the options name a model for `chosen_model`."""
    return options.name is not None or options.model is not None


def chosen_model(options: ModelOptions | argparse.Namespace) -> Nemotron3Config:
    """Return the model of NAME or --model, and --tiny."""
    if options.name is not None and options.model is not None:
        raise ValueError(f"NAME {options.name} and --model {options.model} both name a model: give one")
    if (text := options.name if options.model is None else options.model) is None:
        raise ValueError(f"give the NAME of a model ({', '.join(names())}), or --model FILE")
    return _sized(text, options.tiny)


def chosen_omni(options: ModelOptions | argparse.Namespace) -> OmniConfig | None:
    """Return the model with encoders of NAME and --tiny; None if NAME is none of them."""
    if options.name is None or options.model is not None:
        return None
    return get_omni(options.name + (TINY_SUFFIX if options.tiny else ""))


def stored_model(options: StoredModelOptions | argparse.Namespace) -> Nemotron3Config | None:
    """Return the model of --model and --tiny; None without them: the checkpoint then names its model."""
    if options.model is None:
        if options.tiny:
            raise ValueError("--tiny requires --model NAME")
        return None
    return _sized(options.model, options.tiny)


def _sized(text: str, small: bool) -> Nemotron3Config:
    config = model(text)
    return tiny(config) if small else config


def model(text: str) -> Nemotron3Config:
    """Return the model that a user names: the name of a catalog model, or a JSON file."""
    if not text.lower().endswith(SUFFIX):
        if Path(text).is_file() or text.lower().endswith(".py"):
            raise ValueError(
                f"{text}: give a name of the catalog or JSON (Nemotron3Config.to_json writes it)"
            )
        try:
            return catalog.get(text)
        except ValueError:
            if Path(text).is_dir():
                raise ValueError(
                    f"{text} is a folder: give a name of the catalog or JSON "
                    f"(nemotron3 show {text} prints its model)"
                ) from None
            raise
    file = Path(text)
    content = read_outside(file, limit=LONGEST)
    try:
        return _checked(from_json(content.decode("utf-8-sig"), file.stem))
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a text file: give JSON") from None
    except ValueError as problem:
        raise ValueError(f"{file}: {problem}") from None


def from_json(text: str, name: str = "own") -> Nemotron3Config:
    """Return the model that JSON text describes."""
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as problem:
        raise ValueError(f"line {problem.lineno}, column {problem.colno}: {problem.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply to be the description of a model") from None
    if not isinstance(data, dict):
        raise ValueError(f'give an object of fields such as {{"base": "nano"}}, not {type(data).__name__}')
    if "config" in data:
        return _shown(data)
    if "architectures" in data or "model_type" in data:
        raise ValueError(
            "it is the config.json of a Hugging Face folder: give Megatron's field names; "
            "nemotron3 show NAME --json prints an example"
        )
    base = data.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ValueError(f'"base" is {json.dumps(base)}: give the name of a model')
    _require_known(data)
    values: dict[str, Any] = {"name": name, **data}
    if base is None:
        return _complete({"title": values["name"], **values})
    start = catalog.get(base)
    if values["name"] != start.name:
        values = {
            "title": f"{values['name']}, from {start.title}",
            **dict.fromkeys(_FIGURES),
            "source": f"a file, from {start.name}",
            **values,
        }
    return start.but(**values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f'"{first_repeated(pairs)}" is given twice: drop one')
    return found


def _shown(data: dict[str, Any]) -> Nemotron3Config:
    """Read the output of `nemotron3 show --json`; its derived values must follow from the fields."""
    from megatron_nemotron3.models.show import describe

    fields_given = data.pop("config")
    if not isinstance(fields_given, dict):
        raise ValueError('"config" must be an object of fields')
    _require_known(fields_given)
    config = _complete({"name": "own", "title": fields_given.get("name", "own"), **fields_given})
    derived = describe(config)
    for name, value in data.items():
        if name not in derived or derived[name] != value:
            raise ValueError(
                f'"{name}" does not follow from "config": change the fields in "config", and drop "{name}"'
            )
    return config


def _require_known(data: dict[str, Any]) -> None:
    known = [field.name for field in fields(Nemotron3Config)]
    for name in data:
        if name in known:
            continue
        if isinstance(getattr(Nemotron3Config, name, None), property):
            raise ValueError(f'"{name}" follows from other fields: drop it')
        raise ValueError(f'unknown field "{name}"{hint(name, known)}')


def _complete(data: dict[str, Any]) -> Nemotron3Config:
    if missing := [f.name for f in fields(Nemotron3Config) if f.default is MISSING and f.name not in data]:
        raise ValueError(f'{", ".join(missing)} missing: give them, or a "base" that has them')
    return Nemotron3Config(**data)


def _checked(config: Nemotron3Config) -> Nemotron3Config:
    """Return the config if its name is free and Megatron can build it."""
    if not _NAME.fullmatch(config.name):
        raise ValueError(f"name {config.name!r} becomes a folder's: use letters, digits, dots, dashes and _")
    try:
        named = catalog.get(config.name)
    except ValueError:
        named = config
    if named != config:
        raise ValueError(
            f'name "{config.name}" is that of {named.title}, which this is not: rename the file, or give a '
            '"name" of its own'
        )
    config.require_built()
    return config
