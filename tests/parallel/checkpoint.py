"""Checkpoints of a run in any layout, with the optimizer, as `megatron.training.checkpointing` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.checkpoints import metadata_of, state_of
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Pieces, Tensors, gather, pieces
from megatron_nemotron3.proof.certify.world import TrainingRun


def on_ranks(function: Any, case: TrainingCase, *args: Any) -> list[Tensors]:
    """Each of the results, put together from the ranks."""
    size = case.layout.world_size
    ranks = run_distributed(function, size, case, *args, timeout=300, apart=True)
    return [gather(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def optimizer_pieces(run: TrainingRun) -> Pieces:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = state_of(run, metadata_of(run), loading=False)["optimizer"]
    apply_factories(state)
    result: Pieces = []
    for t in nested_values(state):
        if isinstance(t, ShardedTensor):
            part = t.data.detach().clone().reshape((1,) * t.prepend_axis_num + tuple(t.data.shape))
            result.append((t.key, tuple(t.global_shape), tuple(t.global_offset), part))
    return result


def save(case: TrainingCase, weights: Tensors, folder: Path, steps: int) -> tuple[Pieces, Pieces]:
    """Train some steps, save, and tell what was saved."""
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import _clean_metadata_for_serialization

    run = TrainingRun(case, weights)
    for step in range(steps):
        run.forward_backward(step)
        run.step()
    metadata = metadata_of(run)
    dist_checkpointing.save(
        state_of(run, metadata, loading=False),
        str(folder),
        content_metadata=_clean_metadata_for_serialization(metadata),
    )
    return pieces(run.chunks), optimizer_pieces(run)


def load(case: TrainingCase, folder: Path, steps: int, optimizer: bool) -> tuple[Pieces, ...]:
    """Load into a fresh model and tell what is in it; with the optimizer train on, and tell the weights."""
    from megatron.core import dist_checkpointing

    run = TrainingRun(case, None)
    wanted = state_of(run, metadata_of(run), loading=True)
    if not optimizer:
        del wanted["optimizer"]
    state = dist_checkpointing.load(wanted, str(folder))
    for i, chunk in enumerate(run.chunks):
        unwrapped(chunk).load_state_dict(state["model" if len(run.chunks) == 1 else f"model{i}"], strict=True)
    loaded = pieces(run.chunks)
    if not optimizer:
        return (loaded,)
    run.optimizer.load_state_dict(state["optimizer"])
    moments = optimizer_pieces(run)
    for step in range(steps, case.steps):
        run.forward_backward(step)
        run.step()
    return loaded, moments, pieces(run.chunks)


def both(case: TrainingCase, weights: Tensors) -> tuple[Pieces, Pieces]:
    run = TrainingRun(case, weights)
    run.forward_backward(0)
    run.step()
    return pieces(run.chunks), optimizer_pieces(run)


def shifted_state(case: TrainingCase, weights: Tensors) -> set[str]:
    """Parameters of which the optimizer would save something else than it holds.

    In FP32 its copy of a parameter is the parameter, so what it would save can be checked.
    """
    ranks = run_distributed(both, case.layout.world_size, case, weights, timeout=300)
    wrong = set()
    for held, saved in ranks:
        parameters = {(key, offset): part for key, _, offset, part in held}
        for key, _, offset, part in saved:
            name = key.removeprefix("optimizer.state.param.")
            if name != key and not part.equal(parameters[name, offset]):
                wrong.add(name)
    return wrong
