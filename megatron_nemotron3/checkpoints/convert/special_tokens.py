"""The ids of a tokenizer's special tokens, for the config.json of a model that says none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_nemotron3.checkpoints.metadata import JSON_LIMIT

_ID = re.compile(r"[0-9]{1,9}")
_TOKENS = ("bos_token", "eos_token", "pad_token")
ID_KEYS = tuple(f"{one}_id" for one in _TOKENS)


def special_ids(files: Mapping[str, bytes], vocab_size: int) -> dict[str, int]:
    """Return bos_token_id, eos_token_id and pad_token_id as far as a tokenizer's files say them.

    What is damaged, and an id that the model has no row for, says nothing.
    """
    said = _object(files, "special_tokens_map.json") | _object(files, "tokenizer_config.json")
    named = {one: token.get("content") if isinstance(token, dict) else token for one, token in said.items()}
    tokens = {one: named[one] for one in _TOKENS if isinstance(named.get(one), str)}
    found = _ids(files, set(tokens.values())) if tokens else {}
    ids = {f"{one}_id": found.get(token) for one, token in tokens.items()}
    return {key: number for key, number in ids.items() if type(number) is int and 0 <= number < vocab_size}


def token_line(config: Mapping[str, Any]) -> str:
    """Say which ids of `special_ids` the config.json of a language model has."""
    ids = [f"{key} {config[key]}" for key in ID_KEYS if key in config]
    text = f"{', '.join(ids)}, as the tokenizer says" if ids else "none: no tokenizer says them"
    return f"token ids    {text}"


def _ids(files: Mapping[str, bytes], tokens: set[Any]) -> dict[Any, Any]:
    """Return the ids of tokens; what tokenizer.json says of added tokens goes before all else."""
    whole = _object(files, "tokenizer.json")
    model = whole.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    listed = vocabulary if isinstance(vocabulary, list) else []
    decoder = _object(files, "tokenizer_config.json").get("added_tokens_decoder")
    later = decoder.items() if isinstance(decoder, dict) else ()
    added = whole.get("added_tokens")
    sources: list[list[tuple[Any, Any]]] = [
        *(list(_object(files, name).items()) for name in ("vocab.json", "added_tokens.json")),
        [
            (one.get("content"), int(n))
            for n, one in later
            if isinstance(one, dict) and n.isdecimal() and len(n) < 10
        ],
        [(one[0], n) for n, one in enumerate(listed) if isinstance(one, list) and one],
        list(vocabulary.items()) if isinstance(vocabulary, dict) else [],
        [
            (one.get("content"), one.get("id"))
            for one in (added if isinstance(added, list) else [])
            if isinstance(one, dict)
        ],
    ]
    return {
        token: number
        for pairs in sources
        for token, number in pairs
        if isinstance(token, str) and token in tokens
    }


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one if there is none."""
    data = files.get(name, b"")
    try:
        found = json.loads(data) if len(data) <= JSON_LIMIT else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
