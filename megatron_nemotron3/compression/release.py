"""A model of this process -> a checkpoint to start from, as `nemotron3 convert from-hf` writes them."""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_nemotron3.checkpoint.folders import RELEASE, write_tracker
from megatron_nemotron3.convert.megatron_args import args_of, common_state
from megatron_nemotron3.models import Nemotron3Config


def save(model: HybridModel, config: Nemotron3Config, folder: Path) -> None:
    """Write FOLDER/release (torch_dist): for `--load` in any layout, and for `nemotron3 convert to-hf`.

    Args:
        model: HybridModel of `config`, whole in this process; of a `distillation_model` the student is saved.
        folder: new; the tracker in it is written last.

    Raises:
        FileExistsError: there is a checkpoint already.
    """
    target = folder / RELEASE
    target.mkdir(parents=True)
    groups = parallel_state.get_data_parallel_group(with_context_parallel=True)
    weight = model.embedding.word_embeddings.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    state = common_state(args_of(config, padded_vocab_size=weight.shape[0], dtype=dtype))
    metadata = state.pop("content_metadata")
    state["model"] = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": groups})
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    write_tracker(folder, RELEASE)
