"""The checkpoints that a script starts from, as `megatron.training.checkpointing` makes them, and those that
it writes: by our own reader, and on their way to Hugging Face and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.config_json import check_same_model
from megatron_nemotron3.checkpoints.convert.conversion import (
    FromHfOptions,
    ToHfOptions,
    convert_from_hf,
    convert_to_hf,
)
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.torch_dist import open_torch_dist
from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.certify.bench import Finding, failed
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.compare import equal
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


_EXPORT = "Hugging Face export"
#: Weights with a row for each token.
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def read(folder: Path) -> Tensors:
    """Read all tensors of a torch_dist checkpoint, by checkpoint key, the optimizer's among them."""
    return _tensors(open_torch_dist(folder)[0])


def _tensors(source: TensorSource) -> Tensors:
    return {name: source.read(name).clone() for name in source.tensors}


def round_trip(
    checkpoint: Path, padded_vocab_size: int, folder: Path, config: Nemotron3Config
) -> Iterator[Finding]:
    """Yield whether a checkpoint comes back from Hugging Face's form as it was, of the model `config`.

    The names and shapes of both sides are those of the inventory, or the conversion refuses.
    """
    exported, back = folder / "hf", folder / "megatron"
    folder.mkdir()
    try:
        with (folder / "log").open("w") as log, redirect_stdout(log):
            convert_to_hf(checkpoint, exported, ToHfOptions(workers=1, vocab_size=config.vocab_size))
            check_same_model(open_checkpoint(exported).config.but(name="config.json"), config)
            options = FromHfOptions(make_vocab_size_divisible_by=padded_vocab_size, workers=1)
            convert_from_hf(exported, back, options)
            before, after = (_tensors(open_checkpoint(one).weights) for one in (checkpoint, back))
    except (ValueError, OSError) as problem:
        yield failed(_EXPORT, detail=str(problem).splitlines()[0])
        return
    for tensors in (before, after):
        tensors |= {key: tensors[key][: config.vocab_size] for key in _VOCABULARY if key in tensors}
    yield equal(_EXPORT, before, after, detail=f"{len(before)} tensors, to the bit")
