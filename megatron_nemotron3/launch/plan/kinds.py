"""Layers as strings where E layers differ (`Nemotron3Config.moe_layers`), so that equal ones can be counted.

A layer's symbol is its letter of the pattern, except for such E layers, which have a character for each width
and number of experts per token. Other kinds ("embedding", "mtp_in") are their own symbols, and MTP's E is
"E".
"""

from __future__ import annotations

from functools import lru_cache

from megatron_nemotron3.models import Nemotron3Config

#: Characters from here on stand for E layers: this plus the first decoder layer of that kind.
_FIRST = 0xE000


@lru_cache(maxsize=256)
def symbols(config: Nemotron3Config) -> str:
    """The symbol of each decoder layer."""
    if config.moe_layers is None:
        return config.pattern
    first: dict[Nemotron3Config, int] = {}
    found = ""
    for layer, letter in enumerate(config.pattern):
        number = first.setdefault(config.at(layer), layer)
        found += chr(_FIRST + number) if letter == "E" else letter
    return found


def letter(symbol: str) -> str:
    """The letter of the pattern, or the kind itself if it is no layer of the decoder."""
    return "E" if len(symbol) == 1 and ord(symbol) >= _FIRST else symbol


@lru_cache(maxsize=4096)
def expert_configs(config: Nemotron3Config, pattern: str) -> tuple[Nemotron3Config, ...]:
    """The different configs of the E layers among these symbols."""
    return tuple(dict.fromkeys(resolve(config, symbol)[0] for symbol in pattern if letter(symbol) == "E"))


@lru_cache(maxsize=65536)
def expert_layers(pattern: str) -> int:
    """Number of E layers among these symbols."""
    return sum(letter(symbol) == "E" for symbol in pattern)


def resolve(config: Nemotron3Config, symbol: str) -> tuple[Nemotron3Config, str]:
    """(config of the layers of a symbol, their letter)."""
    if letter(symbol) == symbol:
        return config, symbol
    return config.at(ord(symbol) - _FIRST), "E"
