"""A tokenizer.json of others: what it may make of a text, and a trial in a child with limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.common.limits import limited

#: Bytes of the file (that of Nemotron 3 has 17 MB), and ids: 16 times the largest published vocabulary.
LIMIT, MOST_IDS = 256 << 20, 1 << 22
#: Characters that rules may make of one, and put before a text: a replacement for each of four bytes, say.
_GROWTH = 64
#: Escapes, classes (with one level of classes inside), groups, repetitions without an end, and the rest.
_PARTS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|\[(?:\\.|[^\]\\])*+\]|[^\]\\\[])*+\]|(?P<open>\((?:\?(?:[a-z-]*[:>]|<?[=!]))?)"
    r"|(?P<close>\))|(?P<repeat>[*+]|\{\d*,\})(?P<possessive>\+)?|.",
    re.DOTALL,
)
_SAMPLE = "Hello, it's 12,345 apples!\n\tα β 你好 😀 <|im_end|> "
#: Characters of patterns that are tried, each in a row of so many: the cost of a pattern may grow with it.
_TRIED, _ROW = 64, 4000


def require_bounded(file: Path) -> None:
    """Raise ValueError if a tokenizer.json may take more memory or time than its texts account for."""
    limited(lambda: _try(file), str(file))


def repeats_repeated(pattern: str) -> bool:
    """Whether a regular expression repeats a group that repeats something: it may go back without an end."""
    inside, closed = [False], False
    for part in _PARTS.finditer(pattern):
        if part["open"]:
            inside.append(False)
        elif part["close"]:
            closed = inside.pop() if len(inside) > 1 else False
            inside[-1] |= closed
            continue
        elif part["repeat"]:
            if closed and not part["possessive"]:
                return True
            inside[-1] = inside[-1] or not part["possessive"]
        closed = False
    return False


def _try(file: Path) -> None:
    """Compare what the file says with the limits, and encode and decode a text."""
    from tokenizers import Tokenizer

    data = read_outside(file, limit=LIMIT)
    try:
        content = json.loads(data)
        tokenizer = Tokenizer.from_buffer(data)
    except RecursionError:
        raise ValueError(f"{file}: not a tokenizer: it is nested too deeply") from None
    except MemoryError:
        raise
    except Exception as problem:  # the library raises nothing more specific
        raise ValueError(f"{file}: not a tokenizer: {problem}") from None
    ids = [*tokenizer.get_vocab().values(), *(one["id"] for one in content.get("added_tokens") or ())]
    if (last := max(ids, default=0)) >= MOST_IDS:
        raise ValueError(f"{file}: a token has the id {last:,}: ids below {MOST_IDS:,} are read")
    growth, tried = 1.0, dict.fromkeys("a0 !")
    for rule in _rules([content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]):
        pattern, prefix = rule.get("pattern"), rule.get("prepend")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        expression = str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""
        tried |= dict.fromkeys(expression)
        if repeats_repeated(expression):
            raise ValueError(
                f"{file}: the pattern {expression!r:.60} repeats a group that repeats something, which "
                "takes a time without bound: write it without one of the two"
            )
        if isinstance(new := rule.get("content"), str):
            growth *= max(1, len(new) / len(text) if text else 1 + len(new))
        growth += len(prefix) if isinstance(prefix, str) else 0
    if growth > _GROWTH:
        raise ValueError(f"{file}: its rules make {growth:.3g} characters of one, more than {_GROWTH}")
    rows = (one * _ROW for one in list(tried)[:_TRIED])
    tokenizer.decode(tokenizer.encode("\0".join((_SAMPLE, *rows))).ids)


def _rules(value: Any) -> Iterator[dict[str, Any]]:
    """Normalizers, pre-tokenizers and decoders with a type, also those of a sequence."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "type" in one:
                yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
