"""Imports what ranks need, in the server that they are forked from (ranks.py). Together it takes seconds.

A rank does not look for garbage among it: that would take longer than a small run, and copy the memory.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from megatron_nemotron3 import lifetime

#: What these import is not named.
MODULES = [
    "megatron.training",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text",
    "megatron.bridge",
    "megatron_nemotron3.boost.heads",
    "megatron_nemotron3.build",
    "megatron_nemotron3.certify.world",
]

with lifetime.importing():
    for name in MODULES:
        with suppress(ImportError):  # megatron.bridge where it is not installed
            import_module(name)
