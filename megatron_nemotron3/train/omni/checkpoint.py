"""Checkpoints of Omni models that describe themselves. Needs Megatron."""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of, common_state
from megatron_nemotron3.checkpoints.folders import RELEASE, write_tracker
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.omni.model import without_wrappers


def save(
    model: BoundaryMimoModel, config: OmniConfig, folder: Path, groups: dict[str, ProcessGroupCollection]
) -> None:
    """Write FOLDER/release (torch_dist): weights, and the arguments from which the model is known again.

    Megatron's `--load` reads it in any layout; `nemotron3 convert to-hf` and `generate` take it as it is.
    """
    target = folder / RELEASE
    target.mkdir(parents=True)
    args = args_of(config.language, padded_vocab_size=config.language.vocab_size, dtype="float32")
    args.omni_encoders = config.encoders_json()
    state = common_state(args)
    metadata = state.pop("content_metadata")
    described = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": groups["language"].dp_cp})
    state["model"] = without_wrappers(described, model)
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    write_tracker(folder, RELEASE)


def load(model: BoundaryMimoModel, folder: Path) -> None:
    """Load the weights of a checkpoint of `save` into a model of any layout."""
    state = {"model": without_wrappers(model.sharded_state_dict(), model)}
    # Integrity is of saving: the replicas of an encoder with tensor parallelism call themselves the main one.
    loaded = dist_checkpointing.load(state, str(folder / RELEASE), validate_access_integrity=False)
    model.load_state_dict(loaded["model"], strict=False)
