"""The checkpoints that a script starts from, as `megatron.training.checkpointing` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.tensors import Tensors, load
from megatron_nemotron3.proof.certify.world import TrainingRun


def write_initial(case: TrainingCase, starts: Sequence[Tensors], folder: Path) -> None:
    """Write weights as checkpoints to start from (`--finetune`): FOLDER/0, FOLDER/1, …"""
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import _clean_metadata_for_serialization

    run = TrainingRun(case, None)
    metadata = metadata_of(run)
    for number, weights in enumerate(starts):
        load(run.chunks, weights)
        state = state_of(run, metadata, loading=False)
        del state["optimizer"]
        place = folder / str(number) / "release"
        place.mkdir(parents=True)
        with forked_results():
            dist_checkpointing.save(
                state, str(place), content_metadata=_clean_metadata_for_serialization(metadata)
            )
        (place.parent / "latest_checkpointed_iteration.txt").write_text("release")


def state_of(run: TrainingRun, metadata: dict[str, Any], loading: bool) -> dict[str, Any]:
    """What Megatron saves of a run, or would load into it: model, optimizer, progress."""
    from megatron.training.checkpointing import generate_state_dict

    optimizer = {"metadata": metadata, "is_loading": True} if loading else {"metadata": metadata}
    return generate_state_dict(
        run.args,
        [unwrapped(chunk) for chunk in run.chunks],
        run.optimizer,
        None,
        None,
        optim_sd_kwargs=optimizer,
        model_sd_kwargs={"metadata": metadata},
    )


def metadata_of(run: TrainingRun) -> dict[str, Any]:
    """What Megatron notes of how a checkpoint is divided."""
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    return _build_sharded_state_dict_metadata(run.args)
