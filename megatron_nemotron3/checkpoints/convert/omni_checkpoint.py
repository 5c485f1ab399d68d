"""Open checkpoints of models with encoders: what describes them, their tensors, and their language part."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import inventory, omni_inventory
from megatron_nemotron3.checkpoints.convert.inventory import TensorMapping
from megatron_nemotron3.checkpoints.convert.omni_config import named_omni, omni_config, require_same
from megatron_nemotron3.checkpoints.convert.omni_inventory import ENCODERS, INTEGER, LANGUAGE
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import Selected
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import ARGUMENT, OmniConfig, omni_names, with_encoders


def open_omni(
    folder: Path,
    source: TensorSource,
    data: dict[str, Any],
    language: Nemotron3Config,
    model: Nemotron3Config | OmniConfig | None,
    unused: Iterable[str],
) -> Checkpoint:
    """Open a Hugging Face folder; `language` is its language model, and `model` the one that is expected."""
    if "quantization_config" in data:
        raise ValueError(f"{folder}: quantized weights of a model with encoders are not read")
    config = omni_config(data, name=os.fspath(folder), base=language)
    if isinstance(model, OmniConfig):
        require_same(config, model)
    left = set(unused)
    given = Selected(source, {name: name for name in source.tensors if name not in left})
    kept = omni_inventory.without_made(config, given)
    weights = Selected(source, {name: name for name in kept})
    found = tuple(omni_inventory.mappings(config.language, config, weights.tensors))
    expected = {tensor.name: tensor.shape for mapping in found for tensor in mapping.hf}
    omni_inventory.check(config, expected, {name: t.shape for name, t in weights.tensors.items()})
    check_types(folder, weights, (tensor for mapping in found for tensor in mapping.hf))
    left_out = Counter(unused=len(left), derived=len(given.tensors) - len(kept))
    opened = Checkpoint("hugging face", folder, config.language, weights, found, +left_out, omni=config)
    return replace(opened, stated=data).with_float32()


def stored_omni(
    folder: Path,
    language: Nemotron3Config,
    arguments: Mapping[str, Any],
    names: Iterable[str],
    given: OmniConfig | None = None,
) -> OmniConfig | None:
    """Return the model with encoders of a Megatron checkpoint; None if it holds a language model."""
    found = next((name for name in names if name.startswith(ENCODERS)), None)
    if given is not None:
        return given.but(language=language)
    text = arguments.get(ARGUMENT)
    if text is None and found is None:
        return None
    if not isinstance(text, str):
        raise ValueError(
            f"{folder}: it has {found!r}, which is an encoder's, and the stored arguments have no {ARGUMENT} "
            f"with the sizes of encoders: give --model {' or --model '.join(omni_names())}, or what it is"
        )
    try:
        return named_omni(with_encoders(language, text))
    except ValueError as problem:
        raise ValueError(f"{folder}: the stored {ARGUMENT}: {problem}") from None


def check_types(folder: Path, weights: TensorSource, tensors: Iterable[inventory.Tensor]) -> None:
    """Check that weights have types of weights, and integers theirs."""
    types = {}
    for tensor in tensors:
        stored = weights.tensors[tensor.name].dtype
        if tensor.dtype != INTEGER:
            types[tensor.name] = stored
        elif stored != tensor.dtype:
            raise ValueError(f"{folder}: {tensor.name} is {stored}, expected {tensor.dtype}")
    inventory.check_types(folder, types)


def mappings_of(
    config: OmniConfig, weights: TensorSource, padded_vocab_size: int | None
) -> tuple[TensorMapping, ...]:
    """Return the mappings of a Megatron checkpoint in its spelling. Errors as `inventory.mappings_of`."""
    language = [name.removeprefix(LANGUAGE) for name in weights.tensors if name.startswith(LANGUAGE)]
    others = {name: t.shape for name, t in weights.tensors.items() if not name.startswith(LANGUAGE)}
    constants = omni_inventory.constants_of(weights.tensors)
    encoders = list(omni_inventory.encoder_mappings(config, constants=constants))
    expected = {tensor.name: tensor.shape for mapping in encoders for tensor in mapping.megatron}
    omni_inventory.check(config, expected, others)
    own = inventory.mappings_of(config.language, language, padded_vocab_size=padded_vocab_size)
    found = (*omni_inventory.in_omni(own), *encoders)
    check_types(weights.folder, weights, (tensor for mapping in found for tensor in mapping.megatron))
    return found
