"""Open a checkpoint of any kind: its weights by plain name, its model, and what is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import adapters, config_json, inventory, omni_checkpoint
from megatron_nemotron3.checkpoints.convert.config_keys import OWN, QUANTIZATION, named_errors
from megatron_nemotron3.checkpoints.convert.hf_folder import (
    HF_QUANT_CONFIG,
    TAKEN_OUT,
    open_hf,
    other_files,
    read_config,
    table_names,
    without_prefix,
)
from megatron_nemotron3.checkpoints.convert.keys import (
    ADAPTER,
    master_keys,
    non_weight_kind,
    numbered_by_layer,
    plain_name,
)
from megatron_nemotron3.checkpoints.convert.megatron_args import config_of, require_experts, stored_pattern
from megatron_nemotron3.checkpoints.convert.mtp_from import PREFIX, with_mtp_from, without_mtp
from megatron_nemotron3.checkpoints.convert.omni_checkpoint import stored_omni
from megatron_nemotron3.checkpoints.convert.omni_config import TEXT, is_omni, text_part
from megatron_nemotron3.checkpoints.convert.omni_inventory import (
    ENCODERS,
    LANGUAGE,
    language_of,
    with_language,
)
from megatron_nemotron3.checkpoints.convert.opened import EMBEDDING, Checkpoint
from megatron_nemotron3.checkpoints.convert.origin import find_origin, tokenizer_folders, with_context
from megatron_nemotron3.checkpoints.convert.quantized_views import Dequantized
from megatron_nemotron3.checkpoints.convert.sources import FileSource, TensorSource
from megatron_nemotron3.checkpoints.convert.torch_dist import open_torch_dist, reorder_mamba
from megatron_nemotron3.checkpoints.convert.views import Selected
from megatron_nemotron3.checkpoints.folders import CHECKPOINTS, locate, locate_one
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_json
from megatron_nemotron3.checkpoints.pickles import Inert
from megatron_nemotron3.checkpoints.state import read_state, stored_arguments
from megatron_nemotron3.checkpoints.structure import CONFIG as METADATA
from megatron_nemotron3.checkpoints.structure import Verdict
from megatron_nemotron3.models import Nemotron3Config, identify, named
from megatron_nemotron3.models.lora import ARGUMENT, LoRASettings
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.models.tensors import hf_root

#: What a training writes next to its checkpoints, and the names of models that are taken from it.
_RUN, _NAME = "run.json", re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a checkpoint of any kind is opened."""

    #: Default: the model is read from the checkpoint.
    model: Nemotron3Config | OmniConfig | None = None
    #: Patterns of tensors that may be left out.
    allow_unused: Sequence[str] = ()
    #: Whether a model with encoders is opened, not refused.
    omni: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenMegatron(OpenOptions):
    """How a Megatron checkpoint is opened."""

    #: Default: that which the tracker names.
    iteration: int | None = None
    #: Default: of the model or the stored arguments.
    vocab_size: int | None = None
    #: Read the optimizer's FP32 masters instead of the weights.
    from_masters: bool = False
    #: Of LoRA adapters in it; default: from the stored arguments.
    alpha: float | None = None
    #: That on the folder, which is one checkpoint, if it has been checked.
    verdict: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class OpenHuggingFace(OpenOptions):
    """How a Hugging Face folder is opened."""

    dequantize: bool = False
    #: Default: as config.json says; 0: without MTP.
    mtp_num_layers: int | None = None
    #: Take MTP from there: a folder or file (`mtp_from`).
    mtp_from: Path | None = None


def open_checkpoint(folder: Path, **options: Any) -> Checkpoint:
    """Open a checkpoint of any kind, with options of both; those of the other kind have no effect."""
    hugging_face = locate(folder).kind == "hugging face"
    kinds = (OpenHuggingFace, OpenMegatron) if hugging_face else (OpenMegatron, OpenHuggingFace)
    own, other = ({field.name for field in dataclasses.fields(kind)} for kind in kinds)
    options = {name: value for name, value in options.items() if name in own or name not in other}
    return (open_hugging_face if hugging_face else open_megatron)(folder, **options)


def open_megatron(folder: Path, **options: Any) -> Checkpoint:
    """Open a Megatron checkpoint: that of a run, of the folder with the tracker, or of one iteration."""
    settings = OpenMegatron(**options)
    stated = settings.model if isinstance(settings.model, OmniConfig) else None
    model = settings.model.language if isinstance(settings.model, OmniConfig) else settings.model
    located = locate_one(folder, settings.iteration)
    if located.kind == "hugging face":
        raise ValueError(f"{folder}: it is a Hugging Face folder, not Megatron's")
    place = located.folder
    source, index = open_torch_dist(place, settings.verdict)
    fsdp = not (place / METADATA).exists()
    kind, state = "fsdp_dtensor" if fsdp else "torch_dist", {}
    try:
        state = read_state(index)
    except CheckpointError:
        if model is None:
            raise
    arguments = stored_arguments(state)
    config, guessed = _megatron_config(place, state, model, settings.vocab_size)
    origin = find_origin(place, located.run, arguments)
    config = with_context(config, origin) if model is None else config
    stored = arguments.get("hybrid_layer_pattern")
    if isinstance(stored, str) and "[" in stored:
        pattern = stored_pattern(os.fspath(place), arguments)
        if fsdp:
            raise ValueError(
                f"{place}: its layers are grouped ({pattern}), which is read from torch_dist checkpoints "
                "only: load it in Megatron and save it with --ckpt-format torch_dist"
            )
        names = numbered_by_layer(source.tensors, pattern)
        source = FileSource(
            place, {names[k]: t for k, t in source.tensors.items()}, source.files, source.opened
        )
    elif fsdp:
        source = reorder_mamba(source, config, state)
    keys, left_out = _weight_keys(source.tensors, settings.allow_unused)
    encoders = stored_omni(place, config, arguments, keys, stated)
    if encoders is not None and not settings.omni:
        raise CheckpointError(f"{place}: it is a model with encoders: {TAKEN_OUT}")
    if encoders is not None and kind != "torch_dist":
        raise CheckpointError(f"{place}: it is a model with encoders in {kind}: only torch_dist is read")
    if settings.from_masters:
        # Frozen encoders have no masters, and statistics of norms never have.
        masters = master_keys(source.tensors, optional=ENCODERS)
        # The expert bias is not a parameter: it has no master, and is stored in FP32.
        keys = {name: masters.get(name, key) for name, key in keys.items()}
        left_out["optimizer"] -= sum(name in masters for name in keys)
    first, weights = EMBEDDING if encoders is None else LANGUAGE + EMBEDDING, Selected(source, keys)
    padded = weights.tensors[first].shape[0] if first in keys else None
    if encoders is not None:
        mappings = omni_checkpoint.mappings_of(encoders, weights, padded)
    else:
        mappings = tuple(inventory.mappings_of(config, keys, padded_vocab_size=padded))
        inventory.check_types(place, {name: tensor.dtype for name, tensor in weights.tensors.items()})
    adapter, iteration = None, state.get("iteration")
    if left_out.pop(ADAPTER, 0):
        if encoders is not None:
            raise ValueError(f"{place}: it has LoRA adapters and encoders: not supported together")
        found = {plain_name(key): key for key in source.tensors if non_weight_kind(key) == ADAPTER}
        alpha = _stored_alpha(place, arguments) if settings.alpha is None else settings.alpha
        adapter = adapters.from_megatron(Selected(source, found), mappings, alpha)
        adapters.check_fits(adapter, {t.name: t.shape for mapping in mappings for t in mapping.hf})
    return Checkpoint(
        kind,
        place,
        config,
        weights,
        mappings,
        +left_out,
        iteration if type(iteration) is int else None,
        mtp_source="" if not config.has_mtp else f"--model {model.name}" if model else "the stored arguments",
        vocabulary_guessed=guessed,
        adapter=adapter,
        omni=encoders,
        origin=origin,
        tokenizers=tuple(tokenizer_folders(place, located.run, arguments)),
        unmatched=_unmatched(source.tensors, settings.allow_unused),
    ).with_float32()


def open_hugging_face(folder: Path, **options: Any) -> Checkpoint:
    """Open a Hugging Face checkpoint."""
    settings = OpenHuggingFace(**options)
    model = settings.model
    if locate(folder).kind != "hugging face":
        raise ValueError(f"{folder}: it is a Megatron checkpoint, not a Hugging Face folder")
    files = open_hf(folder)
    data = read_config(folder, omni=settings.omni)
    if is_omni(data):
        refused = {"--dequantize": settings.dequantize, "--mtp-num-layers 0": settings.mtp_num_layers == 0}
        for option, given in refused.items():
            if given:
                raise ValueError(f"{folder}: {option}: it is for language models, and this has encoders")
        with named_errors(os.fspath(folder)):
            text = dict(text_part(data))
        source: TensorSource = files
        if settings.mtp_from is not None:
            tuned, text = with_mtp_from(folder, language_of(files), text, settings.mtp_from)
            source = with_language(tuned, files)
            data = {**data, next(name for name in TEXT if data.get(name)): text}
        base = model.language if isinstance(model, OmniConfig) else model
        language, mtp_source = hf_model(folder, text, base, settings.mtp_num_layers)
        unused = [name for name in source.tensors if _matches_any(name, settings.allow_unused)]
        opened = omni_checkpoint.open_omni(folder, source, data, language, model, unused)
        unmatched = _unmatched(files.tensors, settings.allow_unused)
        return dataclasses.replace(
            opened, unmatched=unmatched, mtp_source=mtp_source, mtp_from=settings.mtp_from
        )
    if isinstance(model, OmniConfig):
        raise ValueError(f"{folder}: it is a language model, and --model {model.name} has encoders")
    source, left_out = without_prefix(files), Counter[str]()
    if QUANTIZATION in data:
        packed = Dequantized(source)
        packed.check(data[QUANTIZATION])
        if not settings.dequantize:
            raise ValueError(f"{folder}: its weights are quantized: --dequantize reads them as BF16")
        source = packed
        data = {key: value for key, value in data.items() if key != QUANTIZATION}
        left_out["activation scale"] = len(packed.activation_scales)
    elif settings.dequantize:
        raise ValueError(
            f"{folder}: --dequantize: its weights are not quantized: config.json has no {QUANTIZATION}, and "
            f"there is no {HF_QUANT_CONFIG}: copy one from where they were quantized, or drop --dequantize"
        )
    used = [name for name in source.tensors if not _matches_any(name, settings.allow_unused)]
    left_out["unused"] = len(source.tensors) - len(used)
    unmatched = _unmatched(source.tensors, settings.allow_unused)
    if settings.mtp_num_layers == 0:
        if settings.mtp_from is not None:
            raise ValueError("--mtp-from and --mtp-num-layers 0: give one of them")
        data, model = without_mtp(data), model and model.but(mtp_pattern=None, mtp_num_layers=0)
        left_out["MTP"] = sum(name.startswith(PREFIX) for name in used)
        used = [name for name in used if not name.startswith(PREFIX)]
    elif settings.mtp_from is not None:
        source, data = with_mtp_from(folder, Selected(source, {n: n for n in used}), data, settings.mtp_from)
        used = list(source.tensors)
    config, mtp_source = hf_model(folder, data, model, settings.mtp_num_layers)
    kept = table_names(folder, used, hf_root(config))
    lost = config.has_mtp and not any(name.startswith(PREFIX) for name in kept)
    others = other_files(folder, source.files) if lost else {}
    mtp = next((os.fspath(folder / name) for name, number in others.items() if number), "")
    inventory.check_hf(config, {new: source.tensors[old].shape for new, old in kept.items()}, mtp)
    inventory.check_types(folder, {name: source.tensors[name].dtype for name in used})
    mappings = tuple(inventory.mappings(config))
    return Checkpoint(
        "hugging face",
        folder,
        config,
        Selected(source, kept),
        mappings,
        +left_out,
        mtp_source=mtp_source,
        stated=data,
        mtp_from=settings.mtp_from,
        unmatched=unmatched,
    ).with_float32()


def hf_model(
    folder: Path, data: dict[str, Any], model: Nemotron3Config | None, depths: int | None
) -> tuple[Nemotron3Config, str]:
    """Return the model of a config.json, and what says how many depths its MTP has."""
    config = config_json.read(data, name=os.fspath(folder), base=model)
    found = (model,) if model else identify(config)
    blocks, own = config.mtp_num_blocks, data.get(OWN)
    config = named(config, found)
    if depths:
        if not config.has_mtp or depths < 1 or (blocks > 1 and depths != blocks):
            raise ValueError(f"--mtp-num-layers {depths}: {folder} has {blocks} MTP block(s)")
        return config.but(mtp_num_layers=depths, mtp_use_repeated_layer=blocks == 1), "--mtp-num-layers"
    if not config.has_mtp:
        return config, ""
    if model is not None:
        stated = own.get("mtp_num_layers", blocks) if own else blocks
        differs = own and stated != config.mtp_num_layers
        return config, f"--model {model.name}" + (f"; config.json says {stated}" if differs else "")
    if own:
        return config, f"{OWN} in config.json"
    trained = {(one.mtp_num_layers, one.mtp_use_repeated_layer) for one in found}
    if blocks == 1 and trained and all(repeated for _, repeated in trained):
        factors = {one.mtp_loss_scaling_factor for one in found}
        factor = factors.pop() if len(factors) == 1 else config.mtp_loss_scaling_factor
        depths = max(number for number, _ in trained)
        taken = config.but(mtp_num_layers=depths, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=factor)
        return taken, f"the catalog, for {config.name}; config.json does not say"
    return config, "the stored blocks; config.json does not say (--mtp-num-layers N)"


def _stored_alpha(folder: Path, arguments: Mapping[str, Any]) -> float:
    text = arguments.get(ARGUMENT)
    if not isinstance(text, str):
        raise ValueError(
            f"{folder}: it has LoRA adapters and does not say their alpha (Megatron-Bridge's run_config.yaml "
            "has it under peft): give --lora-alpha"
        )
    return LoRASettings.parse(text).alpha


def _weight_keys(tensors: Iterable[str], allow_unused: Sequence[str]) -> tuple[dict[str, str], Counter[str]]:
    """Map the plain names of weights to their keys, and count the keys that are not weights."""
    keys: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for key in tensors:
        other = "unused" if _matches_any(key, allow_unused) else non_weight_kind(key)
        if other is not None:
            left_out[other] += 1
        elif plain_name(key) in keys:
            raise ValueError(f"{keys[plain_name(key)]!r} and {key!r} are the same tensor")
        else:
            keys[plain_name(key)] = key
    return keys, left_out


def _unmatched(names: Iterable[str], patterns: Sequence[str]) -> tuple[str, ...]:
    found = list(names)
    return tuple(one for one in patterns if not any(fnmatchcase(name, one) for name in found))


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _megatron_config(
    folder: Path, state: dict[str, Any], model: Nemotron3Config | None, vocab_size: int | None
) -> tuple[Nemotron3Config, bool]:
    """Return the model, and whether its vocabulary size is a guess: a tokenizer's is not stored."""
    values = stored_arguments(state)
    if model is not None:
        require_experts(os.fspath(folder), values, model)
        return dataclasses.replace(model, vocab_size=vocab_size) if vocab_size else model, False
    if not isinstance(arguments := state.get("args"), Inert):
        raise ValueError(
            f"{folder}: the checkpoint stores no arguments, so its model is unknown: give --model"
        )
    padded = values.get("padded_vocab_size")
    guess = vocab_size is None and values.get("vocab_size") is None and type(padded) is int
    config = config_of(arguments, name=os.fspath(folder), vocab_size=padded if guess else vocab_size)
    found = identify(config)
    # Megatron's is the length of its sequences.
    lengths = [one.max_position_embeddings for one in (config, *found)]
    config = config.but(max_position_embeddings=max(lengths))
    stated = None if len(found) == 1 else _name_in_run(folder)
    if stated is not None and (not found or stated in {one.name for one in found}):
        return config.but(name=stated, title=stated), guess
    return named(config, found), guess


def _name_in_run(folder: Path) -> str | None:
    saves = folder.absolute().parent
    with contextlib.suppress(CheckpointError, KeyError, TypeError):
        run = read_json((saves.parent if saves.name == CHECKPOINTS else saves) / _RUN)
        name = run["parts"]["model"]["name"]
        if isinstance(name, str) and _NAME.fullmatch(name):
            return name
    return None
