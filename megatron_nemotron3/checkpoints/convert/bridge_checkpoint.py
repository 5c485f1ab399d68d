"""Checkpoints of Megatron-Bridge for stock Megatron-LM and for `nemotron3 convert`.

Bridge saves what Megatron-LM saves, but for one thing: the model is described in `run_config.yaml` and the
progress in `train_state.pt`, not in the arguments of the common state. Megatron-LM takes a checkpoint without
arguments for one of a GPT model, and refuses it. `add_arguments` writes them, into a `common.pt` as
megatron-core up to 0.18 wrote it, which is read first and changes nothing for Bridge.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.megatron_args import args_of, config_of
from megatron_nemotron3.checkpoints.metadata import COMMON, read_metadata
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.common.files import atomic, read_outside

_LIMIT = 1 << 24  # bytes of run_config.yaml
#: Fields of a provider that Megatron-LM's arguments have under the same name, besides those of the model.
_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)


def add_arguments(folder: Path | str) -> Path:
    """Write the arguments of a Bridge checkpoint (`…/iter_0001000`) into its common.pt, and return that file.

    Raises:
        ValueError: the folder is no Bridge checkpoint, has a hostile object, or Megatron-LM cannot build its
            model.
    """
    import torch
    import yaml
    from megatron.core.dist_checkpointing import load_common_state_dict

    folder = Path(folder)
    require_trusted(folder)
    try:
        run = yaml.safe_load(read_outside(folder / "run_config.yaml", limit=_LIMIT))
        progress = torch.load(folder / "train_state.pt", map_location="cpu", weights_only=True)
        sections, training = run["model"], run["train"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: it is not a checkpoint of Megatron-Bridge: {error}") from error
    state = load_common_state_dict(folder)  # whole; our own reader leaves out tensors
    if "args" in state:
        raise ValueError(f"{folder}: it has arguments already")
    model = {**sections, **(sections.get("transformer") or {})}
    rows = read_metadata(folder).tensors["embedding.word_embeddings.weight"].shape[0]
    described = Namespace(**{"max_position_embeddings": model.get("seq_length"), **model})
    config = config_of(described, name=str(folder), vocab_size=model["vocab_size"])
    args = args_of(config, padded_vocab_size=rows, dtype=_dtype(model))
    vars(args).update({name: model.get(name) or 1 for name in _LAYOUT})
    vars(args).update(
        no_save_optim=not run["checkpoint"].get("save_optim", True),
        no_save_rng=not run["checkpoint"].get("save_rng", True),
        ckpt_fully_parallel_save=bool(run["checkpoint"].get("fully_parallel_save")),
        micro_batch_size=training.get("micro_batch_size"),
        global_batch_size=training.get("global_batch_size"),
        iteration=state["iteration"],
        consumed_train_samples=int(progress["consumed_train_samples"]),
        consumed_valid_samples=int(progress["consumed_valid_samples"]),
        skipped_train_samples=int(progress["skipped_train_samples"]),
    )
    with atomic(folder / COMMON) as partial:
        torch.save({**state, "args": args}, partial)
    return folder / COMMON


def _dtype(model: dict[str, Any]) -> str:
    return "bfloat16" if model.get("bf16") else "float16" if model.get("fp16") else "float32"
