"""adapter_config.json of peft: each field is understood and agrees with the tensors, or it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_json
from megatron_nemotron3.checkpoints.pickles import Refused, try_all
from megatron_nemotron3.models.lora import MAX_RANK

CONFIG = "adapter_config.json"
#: Fields that are compared or read, then those that say nothing about W + scale B A; "*_config" of methods
#: belong to `init_lora_weights`. Of all others only values that turn them off are known.
_KNOWN = {
    *("exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora"),
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
#: How A and B began, where the base keeps its weights. PiSSA, OLoRA, CorDA and LoftQ change it.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
#: All linears but the head, in `target_modules`.
ALL = "all-linear"
#: Larger alphas leave FP32.
_MOST_ALPHA = 1e9
_LAYER, _PARAMETER = re.compile(r".*\.layers\.(\d+)\."), re.compile(r"\.experts\.(up_proj|down_proj)$")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of an adapter of plain LoRA. Raises CheckpointError for anything else."""
    data = read_json(folder / CONFIG)
    for problem in _problems(data):
        raise CheckpointError(f"{folder / CONFIG}: {problem}")
    return data


def _problems(data: dict[str, Any]) -> Iterator[str]:
    if data.get("peft_type") != "LORA":
        yield f"peft_type {data.get('peft_type')!r:.40}: only LORA is converted"
    for key, value in data.items():
        off = value is None or value is False or value in ([], {}) or (key, value) == ("bias", "none")
        if key not in _KNOWN and not off:
            yield f"{key:.60} {value!r:.60}: only plain LoRA is converted"
    initial = data.get("init_lora_weights")
    if not any(type(initial) is type(one) and initial == one for one in _INITIAL):
        yield f"init_lora_weights {initial!r:.60}: the base has other weights: convert it by peft"
    if type(data.get("use_rslora")) not in (bool, type(None)):
        yield f"use_rslora {data['use_rslora']!r:.40} is neither true nor false"
    alpha: Any = data.get("lora_alpha")
    if type(alpha) not in (int, float) or not 0 < alpha <= _MOST_ALPHA:
        yield f"lora_alpha {alpha!r:.40} is not a number above 0, at most {_MOST_ALPHA:g}"
    pattern = data.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        yield f"rank_pattern {pattern!r:.40} is not an object of ranks"
    for rank in (data.get("r"), *pattern.values()):
        if type(rank) is not int or not 0 < rank <= MAX_RANK:
            yield f"the rank {rank!r:.40} (r or rank_pattern) is not a whole number from 1 to {MAX_RANK:,}"
    for key in ("target_modules", "exclude_modules", "target_parameters"):
        if not isinstance(data.get(key) or [], list if key == "target_parameters" else (list, str)):
            yield f"{key} {data[key]!r:.60} is not a list of names"
    layers = _layers(data)
    if not isinstance(layers, list) or not all(type(n) is int and n >= 0 for n in layers):
        yield f"layers_to_transform {layers!r:.60} is not a list of numbers"
    if layers and data.get("layers_pattern") not in (None, [], "layers", ["layers"]):
        yield f"layers_pattern {data['layers_pattern']!r:.60}: the layers of this family are in 'layers'"


def require_same(
    folder: Path, data: Mapping[str, Any], ranks: Mapping[str, int], names: Iterable[str]
) -> None:
    """Raise CheckpointError if the adapted matrices of a file are not those that its configuration names.

    Args:
        ranks: name of a module or parameter of transformers' model -> rank of its pair in the file.
        names: those that the model has and that can be adapted.
    """

    def compare() -> None:
        try:
            find()
        except re.error as problem:
            raise Refused(f"{problem.pattern!r:.60} is not a pattern: {problem.msg}") from None

    def find() -> None:
        pattern = data.get("rank_pattern") or {}
        for name, rank in sorted(ranks.items()):
            if not _selected(data, name):
                raise Refused(f"it has a pair of {name}, which its fields of modules and layers leave out")
            # As peft: the first pattern that matches the end of the name.
            found = (most for key, most in pattern.items() if re.match(rf"(.*\.)?({key})$", name))
            if rank != (stated := next(found, data["r"])):
                raise Refused(f"{name} has rank {stated}, and its pair in the file has rank {rank}")
        for name in sorted(names):
            if name not in ranks and data.get("target_modules") != ALL and _selected(data, name):
                raise Refused(f"it adapts {name}, of which the file has no pair")

    # Patterns of a file can take for ever.
    for problem in try_all([compare], 0, "its patterns cannot be compared").values():
        raise CheckpointError(f"{folder / CONFIG}: {problem}")


def _selected(data: Mapping[str, Any], name: str) -> bool:
    if _PARAMETER.search(name):
        return _matches(data.get("target_parameters"), name)
    layers, layer = _layers(data), _LAYER.match(name)
    if layers and (layer is None or int(layer[1]) not in layers):
        return False
    targets, excluded = data.get("target_modules"), data.get("exclude_modules")
    return (targets == ALL or _matches(targets, name)) and not _matches(excluded, name)


def _matches(given: Any, name: str) -> bool:
    """Whether peft finds a name in its list, by the last parts, or by its pattern."""
    if isinstance(given, str) and given:
        return re.fullmatch(given, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in given or ())


def _layers(data: Mapping[str, Any]) -> Any:
    given = data.get("layers_to_transform")
    return [] if given is None else [given] if type(given) is int else given
