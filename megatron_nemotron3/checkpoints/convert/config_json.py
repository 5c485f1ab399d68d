"""Convert config.json of Hugging Face to `Nemotron3Config` and back.

config.json gives the layers either as a pattern string (`hybrid_override_pattern`, which inference engines
read) or as a list of block types (`layers_block_type`), whose names changed in transformers 5.13 (mamba ->
linear_attention, attention -> full_attention). Both forms are read. The string is written unless a reference
has only the list; transformers 5.15 refuses a file with both. Where experts differ by layer, every layer has
an entry in `block_configs` (module of that name).

Values that Megatron cannot build are refused (`config_keys`); keys that no reader of the family uses are kept
and named (`unread_note`). config.json contains nothing about training (MTP depths, loss factors, sequence
length): those fields come from `base`, or keep their defaults.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from megatron_nemotron3.checkpoints.convert.block_configs import (
    ARCHITECTURE,
    DERIVED,
    KEY,
    MODEL_TYPE,
    MTP_KEY,
    TOPK,
    WIDTH,
    blocks_of,
    flattened,
)
from megatron_nemotron3.checkpoints.convert.config_keys import (
    BLOCK_OF,
    BLOCKS,
    CLAMPS,
    DEFAULT_CLAMP,
    DENSE,
    FIELDS,
    FIXED,
    FREE,
    INFINITE,
    KNOWN,
    LAYERS,
    LIMITS,
    MOE,
    MTP_BLOCKS,
    MTP_KEYS,
    MTP_LAYERS,
    NO_CLAMP,
    NORMALIZED,
    OPTIONAL,
    OWN,
    OWN_FIELDS,
    QUANTIZATION,
    WRITTEN,
    WRITTEN_MOE,
    named_errors,
    positive_number,
    stated,
)
from megatron_nemotron3.common.files import printable
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import BUILT, FLOATS, unbuilt_fields
from megatron_nemotron3.models.tiny import tiny

#: Largest number of keys that a note names.
_SHOWN = 12


def read(data: Mapping[str, Any], *, name: str = "", base: Nemotron3Config | None = None) -> Nemotron3Config:
    """Return the model that a config.json describes, with the training fields of `base`, the same model.

    Without `base`, `OWN` says how MTP is trained; without both, there are as many MTP depths as MTP blocks.
    """
    name = name or (base.name if base else "model")
    with named_errors(name):
        values = _stated_model(data, base)
    config = Nemotron3Config(name=name, title=base.title if base else name, **values)
    if base is not None:
        check_same_model(config, base)
    return config


def _stated_model(data: Mapping[str, Any], base: Nemotron3Config | None) -> dict[str, Any]:
    """Return the fields of the configuration but for its name and title."""
    data, rows = flattened(data)
    _check_config_keys(data)
    pattern = _layer_pattern(data, LAYERS)
    if pattern is None:
        raise ValueError(
            f"config.json has none of {LAYERS[0]}, {', '.join(LAYERS[1])}, so its layers are unknown"
        )
    number = data.get("num_hidden_layers")
    if number is not None and number != len(pattern):
        raise ValueError(f"num_hidden_layers={number}, but the pattern {pattern!r} has {len(pattern)} layers")
    blocks = data.get(MTP_BLOCKS) or 0
    if type(blocks) is not int or blocks < 0:
        raise ValueError(f"{MTP_BLOCKS}={blocks!r} is not a number of MTP blocks: give 0 or more")
    # Without MTP blocks, transformers still writes the list; it has no meaning.
    mtp = _layer_pattern(data, MTP_LAYERS) if blocks else None
    if blocks and mtp is None:
        raise ValueError(
            f"{MTP_BLOCKS}={blocks}, but config.json has no {MTP_LAYERS[0]}, {MTP_LAYERS[1][0]}: "
            "the layers of an MTP block are unknown"
        )
    kinds = pattern + (mtp or "")
    values = {
        field: positive_number(data, keys, real=field in FLOATS, optional=field in OPTIONAL)
        for field, keys in _fields_of(kinds).items()
    }
    for field, built in BUILT.items() if "M" in kinds else ():
        if values[field] != built:
            raise ValueError(f"{FIELDS[field][0]}={values[field]}: Megatron builds Mamba-2 with {built} only")
    if "E" in kinds:
        for topk in sorted({values["moe_router_topk"], *(topk for _, topk in rows or ())}):
            _check_normalized(data.get(NORMALIZED), topk)
    if rows and set(rows) != {(values["moe_ffn_hidden_size"], values["moe_router_topk"])}:
        values["moe_layers"] = rows
    return {"pattern": pattern, "mtp_pattern": mtp, **values, **_training_fields(data, base, blocks)}


def write(
    config: Nemotron3Config, *, reference: Mapping[str, Any] | None = None, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Return the config.json of a model, to be written with `json.dump(…, allow_nan=False)`.

    Keys that do not describe the model (token ids, `auto_map`, longest position, …) are copied from
    `reference`, the config.json of the released model, or left out.
    """
    config.require_built()
    config.require_in_hf()
    tables = _fields_of(config.full_pattern)
    result: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM" if config.moe_layers is None else ARCHITECTURE],
        "dtype": dtype,
        "torch_dtype": dtype,  # the older name
        "num_hidden_layers": config.num_layers,
        **_layer_keys(LAYERS, config.pattern, reference),
        "intermediate_size": config.ffn_hidden_size,
        **{key: FIXED[key] for key in (*WRITTEN, *(WRITTEN_MOE if config.is_moe else ()))},
        **{keys[0]: getattr(config, field) for field, keys in tables.items()},
    }
    if config.is_moe:
        result[NORMALIZED] = config.moe_router_topk != 1
    if "M" in config.full_pattern:
        result[CLAMPS[-1]] = DEFAULT_CLAMP
    if config.has_mtp:
        assert config.mtp_pattern is not None
        result[MTP_BLOCKS] = config.mtp_num_blocks
        result |= _layer_keys(MTP_LAYERS, config.mtp_pattern, reference)
        result[OWN] = {field: getattr(config, field) for field in OWN_FIELDS}
    if config.moe_layers is not None:
        result |= {"model_type": MODEL_TYPE, **blocks_of(config)}
        del result[WIDTH], result[TOPK]  # readers would take them for those of all layers
    if reference is not None:
        check_same_model(read(reference, name=f"{config.name}, reference"), config)
        free = {"architectures", KEY, MTP_KEY, *CLAMPS, *LAYERS[1], *MTP_LAYERS[1]}
        free |= {FIELDS[field][0] for field in FREE}
        free |= set() if "-" in config.full_pattern else {"intermediate_size"}
        # The default is infinite and is left out: JSON has no infinity, and libraries write it differently.
        merged = {
            key: result[key] if key in result and key not in free else value
            for key, value in reference.items()
            if key not in LIMITS
        }
        result = merged | {key: value for key, value in result.items() if key not in merged}
    return result


def with_mtp(data: Mapping[str, Any], config: Nemotron3Config) -> dict[str, Any]:
    """Return a config.json with the MTP of `config` where it states another number of blocks."""
    if (data.get(MTP_BLOCKS) or len(data.get(MTP_KEY) or ()) and 1) == config.mtp_num_blocks:
        return dict(data)
    result = {key: value for key, value in data.items() if key not in MTP_KEYS}
    return result | {key: value for key, value in write(config).items() if key in MTP_KEYS}


def _layer_keys(
    keys: tuple[str, tuple[str, ...]], pattern: str, reference: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the layers as a pattern string, or as lists of block types if the reference has only those."""
    lists = [key for key in keys[1] if reference and reference.get(key) and not reference.get(keys[0])]
    return {key: [BLOCK_OF[kind] for kind in pattern] for key in lists} or {keys[0]: pattern}


def _fields_of(kinds: str) -> dict[str, tuple[str, ...]]:
    return {**FIELDS, **(DENSE if "-" in kinds else {}), **(MOE if "E" in kinds else {})}


def _check_config_keys(data: Mapping[str, Any]) -> None:
    if QUANTIZATION in data:
        raise ValueError(f"config.json has a {QUANTIZATION}: --dequantize reads its weights as BF16")
    for key, fixed in FIXED.items():
        if data.get(key) is not None and _normalized(data[key]) != fixed:
            raise ValueError(f"{key}={data[key]!r} cannot be built by Megatron, which has {fixed!r}")


def _normalized(value: Any) -> Any:
    """Return a value with lists as tuples, and infinity in any spelling as a float."""
    if isinstance(value, (list, tuple)):
        return tuple(_normalized(one) for one in value)
    if isinstance(value, Mapping) and set(value) == {"__float__"}:  # transformers 5
        with contextlib.suppress(TypeError, ValueError):
            return float(value["__float__"])
    if isinstance(value, (int, float)) and value >= INFINITE:
        return math.inf
    return value


def _check_normalized(stated: Any, topk: int) -> None:
    stated = True if stated is None else stated
    if stated != (topk != 1):
        if topk != 1:
            raise ValueError(f"{NORMALIZED}={stated!r} cannot be built by Megatron, which has True")
        raise ValueError(
            f"{NORMALIZED}={stated!r} divides the weight of the only expert by itself, which makes "
            f"it 1; Megatron keeps the score: with num_experts_per_tok=1 only {NORMALIZED}=False can be built"
        )


def unread_note(data: Mapping[str, Any]) -> str | None:
    """Return what to say of keys that no reader of the family uses, and that are kept as they are."""
    unread = sorted(set(data) - KNOWN - {KEY, MTP_KEY, DERIVED, QUANTIZATION})
    if not unread:
        return None
    more = f" and {len(unread) - _SHOWN:,} more" if len(unread) > _SHOWN else ""
    keys = ", ".join(map(printable, unread[:_SHOWN])) + more
    return f"config.json has {len(unread):,} keys that no reader of the family uses: {keys}"


def clamp_note(data: Mapping[str, Any]) -> str | None:
    """Return what to say of a config.json with which transformers computes or draws other time steps."""
    key, value = next(((k, data[k]) for k in CLAMPS if data.get(k) is not None), (CLAMPS[-1], None))
    clamp = DEFAULT_CLAMP if value is None else value
    if not isinstance(clamp, (int, float)):
        return None
    stated = f"{key}={clamp}" if value is not None else f"no {key}, whose default is {clamp}"
    if clamp <= NO_CLAMP:
        more = f"most heads of a new model of it would begin at time_step_floor: {DEFAULT_CLAMP} is usual"
    else:
        more = (
            "transformers without its pull request 48989 clamps dt there and computes other logits, Megatron "
            "and vLLM do not: set time_step_limit of its Mamba mixers to (0, inf)"
        )
    return f"config.json has {stated}: {more}"


def _layer_pattern(data: Mapping[str, Any], keys: tuple[str, tuple[str, ...]]) -> str | None:
    found = {}
    for key in (keys[0], *keys[1]):
        value = data.get(key)
        if value is None:
            continue
        if key != keys[0]:
            if not isinstance(value, list):
                raise ValueError(f"{key} is a {type(value).__name__}, expected a list of block types")
            for layer, block in enumerate(value):
                if not isinstance(block, str) or block not in BLOCKS:
                    raise ValueError(
                        f"{key}[{layer}] is {block!r}: known block types are {', '.join(BLOCKS)}"
                    )
            value = "".join(BLOCKS[block] for block in value)
        if not isinstance(value, str):
            raise ValueError(f"{key} is a {type(value).__name__}, expected a string")
        found[key] = value
    pattern: str | None = stated(found, found)
    return pattern


#: Training fields, which config.json does not contain.
_TRAINING = (
    *("seq_length", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
    *("published_total", "published_active", "source"),
)


def _training_fields(data: Mapping[str, Any], base: Nemotron3Config | None, blocks: int) -> dict[str, Any]:
    own = _own_fields(data.get(OWN), blocks)
    if base is None:
        return {"mtp_num_layers": blocks, "mtp_use_repeated_layer": blocks <= 1} | own
    if blocks != base.mtp_num_blocks:
        raise ValueError(f"{MTP_BLOCKS}={blocks}, but {base.name} has {base.mtp_num_blocks} MTP block(s)")
    repeat = ("mtp_num_layers", "mtp_use_repeated_layer")
    return {field: getattr(base, field) for field in (*_TRAINING, *repeat)}


def _own_fields(stated: Any, blocks: int) -> dict[str, Any]:
    """Return the content of `OWN`; fields that a later version may add are not read."""
    if stated is None or not blocks:
        return {}
    if not isinstance(stated, Mapping):
        raise ValueError(f"{OWN} is a {type(stated).__name__}, expected an object")
    found: dict[str, Any] = {field: stated[field] for field in OWN_FIELDS if field in stated}
    for field, value in found.items():
        if type(value) is not OWN_FIELDS[field] or not 0 <= value < 1 << 16:
            kind = OWN_FIELDS[field].__name__
            raise ValueError(f"{OWN}.{field}={value!r} is not a {kind} from 0 to 65,535")
    depths = found.get("mtp_num_layers", blocks)
    repeated = found.setdefault("mtp_use_repeated_layer", blocks == 1)
    if not depths or blocks != (1 if repeated else depths):
        raise ValueError(
            f"{OWN} says {depths} MTP depths, {'one block for all' if repeated else 'a block each'}, "
            f"but {MTP_BLOCKS}={blocks}: correct {OWN}.mtp_num_layers, or remove {OWN}"
        )
    return found


def check_same_model(config: Nemotron3Config, base: Nemotron3Config) -> None:
    """Check that `config` describes the model `base`."""
    fields = ["pattern", "mtp_pattern", "mtp_num_blocks", "moe_layers", *_fields_of(config.full_pattern)]
    free = FREE | (unbuilt_fields(config) & unbuilt_fields(base))
    differ = [f for f in fields if f not in free and getattr(config, f) != getattr(base, f)]
    if differ:
        numbers = ", ".join(f"{f}={getattr(config, f)!r} (expected {getattr(base, f)!r})" for f in differ)
        if config.hidden_size == tiny(base).hidden_size != base.hidden_size:
            numbers = f"it is the size of its smaller variant: add --tiny to --model {base.name}"
        raise ValueError(f"{config.name}: it is not the model {base.name}: {numbers}")
