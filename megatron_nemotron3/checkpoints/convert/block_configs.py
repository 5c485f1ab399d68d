"""`block_configs`: the form of config.json that states sizes for each layer, as of Nemotron Puzzle.

    "model_type": "nemotron_h_puzzle",
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 1280, "num_experts_per_tok": 4, …}, …
    ],
    "mtp_block_configs": [{"block_type": "attention"}, {"block_type": "moe", …}]      of one MTP block

What a block states is not looked for outside. `flattened` turns this form into that of all other models, and
`blocks_of` writes it. Experts' width and number per token may differ by layer; anything else that differs has
no counterpart in Megatron and is refused.

Which keys a block of a released file repeats is known from programs that read them (vLLM, SGLang,
TensorRT-LLM, Megatron-Bridge): all keys of `_WRITTEN`, or the first two only. Both are read; all are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_nemotron3.checkpoints.convert.config_keys import (
    BLOCK_OF,
    BLOCKS,
    DENSE,
    FIXED,
    LAYERS,
    MOE,
    MTP_BLOCKS,
    MTP_LAYERS,
    OF_LAYERS,
    named_errors,
    positive_number,
)
from megatron_nemotron3.common.files import printable
from megatron_nemotron3.models import Nemotron3Config

MODEL_TYPE, ARCHITECTURE = "nemotron_h_puzzle", "NemotronHPuzzleForCausalLM"
KEY, MTP_KEY, _TYPE = "block_configs", "mtp_block_configs", "block_type"
#: What transformers adds when it saves such a configuration: the keys that some block has.
DERIVED = "blockwise_members"
WIDTH, TOPK = MOE["moe_ffn_hidden_size"][0], MOE["moe_router_topk"][0]
#: Keys of a block with experts -> field.
_WRITTEN = {
    WIDTH: "moe_ffn_hidden_size",
    TOPK: "moe_router_topk",
    "n_routed_experts": "num_moe_experts",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
}

Rows = tuple[tuple[int, int], ...]


def has_blocks(data: Mapping[str, Any]) -> bool:
    """Whether a config.json states the sizes of each layer."""
    return bool(data.get(KEY) or data.get(MTP_KEY)) or data.get("model_type") == MODEL_TYPE


def flattened(data: Mapping[str, Any]) -> tuple[dict[str, Any], Rows | None]:
    """Return a config.json in the form without blocks, and the experts of each E layer of the decoder.

    Keys of experts are then those of MTP's layers; without MTP the largest of the decoder's.
    """
    if not has_blocks(data):
        return dict(data), None
    if (kind := data.get("model_type", MODEL_TYPE)) != MODEL_TYPE:
        raise ValueError(
            f"config.json has {KEY} and model_type {kind!r:.40}: such layers are of {MODEL_TYPE!r}"
        )
    decoder, mtp = _blocks(data, KEY), _blocks(data, MTP_KEY)
    if not decoder:
        raise ValueError(f"model_type {MODEL_TYPE!r} without {KEY}: the layers' experts are unknown")
    result = {key: value for key, value in data.items() if key not in (KEY, MTP_KEY, DERIVED)}
    result["model_type"] = FIXED["model_type"]
    _set_layers(result, LAYERS, KEY, decoder)
    if mtp:
        _set_layers(result, MTP_LAYERS, MTP_KEY, mtp)
        if result.get(MTP_BLOCKS) is None:
            result[MTP_BLOCKS] = 1
    _set_common(result, decoder, mtp)
    rows = tuple(_experts(result, at, block) for at, block in _named(KEY, decoder) if _is_moe(block))
    of_mtp = {_experts(result, at, block) for at, block in _named(MTP_KEY, mtp) if _is_moe(block)}
    if len(of_mtp) > 1:
        raise ValueError(f"{MTP_KEY}: experts of the layers of an MTP block differ: {sorted(of_mtp)}")
    if of_mtp or (rows and (mtp or not data.get(MTP_BLOCKS))):
        result[WIDTH], result[TOPK] = next(iter(of_mtp), tuple(map(max, zip(*rows, strict=True))))
    return result, rows


def blocks_of(config: Nemotron3Config) -> dict[str, Any]:
    """Return the keys that state the layers of a model as blocks."""
    result = {KEY: [_written(kind, config.at(layer)) for layer, kind in enumerate(config.pattern)]}
    if config.mtp_pattern:
        result[MTP_KEY] = [_written(kind, config) for kind in config.mtp_pattern]
    return result


def _written(kind: str, at: Nemotron3Config) -> dict[str, Any]:
    block: dict[str, Any] = {_TYPE: BLOCK_OF[kind]}
    if kind == "E":
        block |= {key: value for key, field in _WRITTEN.items() if (value := getattr(at, field)) is not None}
    if kind == "-":
        block[DENSE["dense_ffn_hidden_size"][0]] = at.dense_ffn_hidden_size
    return block


def _is_moe(block: Mapping[str, Any]) -> bool:
    return bool(BLOCKS[block[_TYPE]] == "E")


def _named(key: str, blocks: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{key}[{number}]", block) for number, block in enumerate(blocks))


def _blocks(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the blocks of a key without the values that are null; each has a type and known keys."""
    stated = data.get(key) or []
    if not isinstance(stated, list):
        raise ValueError(f"{key} is a {type(stated).__name__}, expected a list of blocks")
    for number, block in enumerate(stated):
        kind = block.get(_TYPE) if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in BLOCKS:
            raise ValueError(
                f"{key}[{number}] has {_TYPE} {kind!r:.40}: layers are one of {', '.join(BLOCKS)}"
            )
        if unknown := sorted(set(block) - OF_LAYERS - {_TYPE}):
            raise ValueError(
                f"{key}[{number}] has unknown keys: {', '.join(map(printable, unknown))}: Megatron "
                "builds no such layer"
            )
    return [{k: v for k, v in block.items() if v is not None} for block in stated]


def _set_layers(
    result: dict[str, Any], keys: tuple[str, tuple[str, ...]], key: str, blocks: list[dict[str, Any]]
) -> None:
    """Put the layers outside as a pattern, in place of what is there, which must say the same."""
    pattern = "".join(BLOCKS[block[_TYPE]] for block in blocks)
    for other in (keys[0], *keys[1]):
        stated = text = result.pop(other, None)
        if isinstance(stated, list):
            text = "".join(BLOCKS.get(one, "?") if isinstance(one, str) else "?" for one in stated)
        if stated and text != pattern:
            raise ValueError(f"{other}={stated!r:.100} and {key} {pattern!r} contradict each other")
    result[keys[0]] = pattern


def _set_common(result: dict[str, Any], decoder: list[dict[str, Any]], mtp: list[dict[str, Any]]) -> None:
    """Put what blocks state outside of them, where it must be the same everywhere."""
    stated: dict[str, tuple[str, Any]] = {}
    blocks = [*_named(KEY, decoder), *_named(MTP_KEY, mtp)]
    for at, block in blocks:
        for key, value in block.items():
            if key in (_TYPE, WIDTH, TOPK):
                continue
            first, other = stated.setdefault(key, (at, value))
            if other != value or type(other) is not type(value):
                raise ValueError(
                    f"{key} is {other!r:.40} in {first} and {value!r:.40} in {at}: Megatron builds "
                    "the same in all layers"
                )
    for key, (first, value) in stated.items():
        if result.get(key) is not None and result[key] != value:
            raise ValueError(
                f"{key} is {value!r:.40} in {first} and {result[key]!r:.40} outside of the blocks"
            )
        kind = next(block[_TYPE] for at, block in blocks if at == first)
        lacking = next((at for at, b in blocks if b[_TYPE] == kind and key not in b), None)
        if lacking and key not in FIXED and result.get(key) is None:
            raise ValueError(f"{lacking} has no {key}, which {first} has")
        result[key] = value


def _experts(outside: Mapping[str, Any], at: str, block: Mapping[str, Any]) -> tuple[int, int]:
    with named_errors(at):
        width, topk = (positive_number({**outside, **block}, (key,)) for key in (WIDTH, TOPK))
    return width, topk
