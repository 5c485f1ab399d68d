"""Read Megatron's options out of YAML: configurations of Megatron's tests, and of Megatron-Bridge.

Megatron's functional and release tests keep a command line under `MODEL_ARGS`, option by option. Bridge has
sections of fields, in the `run_config.yaml` next to each checkpoint and in files of overrides;
`parser.options_of` turns them into the options of the same meaning. PyYAML is imported when a text is read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from megatron_nemotron3.launch.parser import is_default, options_of

_MODEL_ARGS, _MODEL, _RECIPE = "MODEL_ARGS", "model", "recipe"
_HEAD = re.compile(rf"^(?:{_MODEL_ARGS}|{_MODEL}|{_RECIPE}):\s*(?:#.*)?$", re.MULTILINE)
#: Sections of Bridge's configuration whose fields are options; of the same field in several, the last counts.
_SECTIONS = (_MODEL, "ddp", "train", "validation", "optimizer", "scheduler", "mixed_precision")


def is_yaml(text: str) -> bool:
    """Whether a text is YAML that `read` reads, rather than a script."""
    return _HEAD.search(text) is not None


def read(text: str) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the options in `text`, and remarks on how it was read.

    Raises:
        ValueError: it is not YAML, or a section is not what it should be.
    """
    import yaml

    try:
        # Words stay words: 1e-4, true and 08:00 are as the launcher of the tests passes them.
        plain = yaml.load(text, Loader=yaml.BaseLoader)
        if isinstance(plain, dict) and _MODEL_ARGS in plain:
            return _model_args(plain)
        return _bridge(yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError) as problem:
        line = str(problem).split("\n", 1)[0] or type(problem).__name__
        raise ValueError(f"the text looks like YAML, but cannot be read: {line}") from None


def _model_args(sections: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    given = sections[_MODEL_ARGS]
    if not isinstance(given, dict):
        raise ValueError(f"{_MODEL_ARGS} is a {type(given).__name__}: it must map options to values")
    found: dict[str, tuple[str, ...]] = {}
    for name, value in given.items():
        if not str(name).startswith("--") or isinstance(value, dict):
            raise ValueError(f"{_MODEL_ARGS}: {name} is not an option with a value")
        words = " ".join(map(str, value)) if isinstance(value, list) else str(value).strip()
        if words.startswith("[") and words.endswith("]"):
            words = words[1:-1]
        try:
            found[name] = () if words == "true" else tuple(shlex.split(words))
        except ValueError as problem:
            raise ValueError(f"{_MODEL_ARGS}: {name}: {problem} in {words!r}") from None
    others = [key for key in sections if re.fullmatch(rf"{_MODEL_ARGS}_\d+", str(key))]
    return found, [f"{key} (a later run of the same test) is not read" for key in others]


def _bridge(sections: object) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    named = sections.get(_RECIPE) if isinstance(sections, dict) and _MODEL not in sections else None
    if isinstance(named, dict) and "_target_" in named:
        raise ValueError(
            f"the model is in Megatron-Bridge's recipe {named['_target_']}: give the run_config.yaml that "
            "Bridge writes beside its checkpoints"
        )
    if not isinstance(sections, dict) or not isinstance(sections.get(_MODEL), dict):
        raise ValueError(f"the YAML has neither {_MODEL_ARGS} nor a section {_MODEL} of fields")
    fields: dict[str, Any] = {}
    for section in _SECTIONS:
        values = sections.get(section)
        if isinstance(values, dict):
            # A field that a later section leaves open keeps its value.
            fields |= {
                name: value for name, value in values.items() if value is not None or name not in fields
            }
    # A configuration has every field; a command line has few of their options.
    every = options_of(fields)
    found = {name: values for name, values in every.items() if not is_default(name, every)}
    notes = ["Megatron-Bridge's configuration: fields that no option of Megatron expresses are not compared"]
    data = sections.get("dataset")
    packing = None
    if isinstance(data, dict):  # by the present or the older name
        packing = data.get("offline_packing_specs") or data.get("packed_sequence_specs")
    if isinstance(packing, dict):
        size = packing.get("packed_sequence_size", "?")
        notes.append(
            f"its data set packs sequences to {size} tokens, which no option says and nothing here checks"
        )
    if sections.get("peft"):
        notes.append("it trains adapters (peft), which no option says and nothing here checks")
    precision = sections.get("mixed_precision")
    if isinstance(precision, str):
        notes.append(f"mixed_precision {precision} is a recipe of Bridge and is not compared")
    half = next((name for name in ("bf16", "fp16") if fields.get(name) is True), None)
    if half or (isinstance(precision, str) and precision.startswith("bf16")):
        found[f"--{half or 'bf16'}"] = ()
    return found, notes


def is_partial(options: Mapping[str, object], text: str) -> bool:
    """Whether a text changes some fields of a configuration and leaves the model to its recipe."""
    return is_yaml(text) and not {"--hidden-size", "--num-attention-heads"} & set(options)
