"""A checkpoint of one spec loaded into another; run by TE_PYTHON (test_te_stack.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.models import GOLDEN_LAYOUTS, GOLDEN_MODELS, build_hybrid

MODEL = "super_like"


def exchange(saved_by: list[str], loaded_by: list[str]) -> dict[str, int]:
    """Layouts -> number of tensors compared, for every pair of the golden layouts.

    Args:
        saved_by, loaded_by: module and attribute of a spec, as after `--spec`.

    Raises:
        AssertionError: a weight changed on the way.
        RuntimeError: Megatron refused to load, with strictness `raise_all`.
    """
    from megatron_nemotron3.proof.certify.tensors import gather

    compared = {}
    for a, (size_a, sizes_a) in GOLDEN_LAYOUTS.items():
        for b, (size_b, sizes_b) in GOLDEN_LAYOUTS.items():
            with tempfile.TemporaryDirectory() as folder:
                there = run_distributed(save, size_a, saved_by, sizes_a, Path(folder))
                here = run_distributed(load, size_b, loaded_by, sizes_b, Path(folder))
            kept, got = gather(there), gather(here)
            assert kept.keys() == got.keys(), sorted(kept.keys() ^ got.keys())
            for key in kept:
                assert kept[key].equal(got[key]), key
            compared[f"{a or 'one rank'} to {b or 'one rank'}"] = len(kept)
    return compared


def save(spec: list[str], sizes: dict[str, int], folder: Path) -> Any:
    """Build, give each weight a distinct value, save, and return the pieces."""
    import torch
    from megatron.core import dist_checkpointing

    from megatron_nemotron3.proof.certify.tensors import load as fill
    from megatron_nemotron3.proof.certify.tensors import pieces

    model = build(spec, sizes)
    whole = {
        key: torch.randn(shape, generator=torch.Generator().manual_seed(len(key) + sum(shape)))
        for key, shape, _, _ in pieces([model])
    }
    fill([model], whole)
    dist_checkpointing.save(state(model), str(folder))
    return pieces([model])


def load(spec: list[str], sizes: dict[str, int], folder: Path) -> Any:
    """Build, load strictly, and return the pieces."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from megatron_nemotron3.proof.certify.tensors import pieces

    model = build(spec, sizes)
    loaded = dist_checkpointing.load(state(model), str(folder), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(loaded, strict=True)
    return pieces([model])


def build(spec: list[str], sizes: dict[str, int]) -> Any:
    """The golden model on this rank."""
    from megatron.core.transformer.spec_utils import import_module

    initialize(**sizes)
    pattern, fields = GOLDEN_MODELS[MODEL]
    return build_hybrid(pattern, import_module(tuple(spec)), **fields)


def state(model: Any) -> dict[str, Any]:
    """The sharded state dict to save or load."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    result: dict[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": group})
    return result
