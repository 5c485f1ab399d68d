"""A short text of a checkpoint's model, for reports."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_nemotron3.common.options import resolve_device
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.inference.generate.command import load_engine, open_for_tokenizer
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.sampling import Sampling

#: As in `make demo`.
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=0)


def sample(folder: Path, prompt: str, new_tokens: int, tokenizer: Path | None = None) -> str:
    """Continue a prompt by at most `new_tokens`, always with the same random numbers."""
    found = find_checkpoint(folder)
    words = found.tokenizer(tokenizer)
    opened = open_for_tokenizer(found, words, None)
    ids = words.encode(prompt)
    room = opened.config.max_position_embeddings - len(ids)
    if not ids or room < 1:
        raise ValueError(f"a prompt of {len(ids):,} tokens: give 1 to {room + len(ids) - 1:,}")
    options = argparse.Namespace(device=resolve_device("auto"), dtype=None)
    how = GenerationOptions(min(new_tokens, room), SAMPLING, stop=words.stop)
    (row,) = generate(load_engine(opened, options, mtp=False), [ids], how).rows
    return words.decode(row.tokens)
