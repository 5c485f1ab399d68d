"""What ranks of a gloo world do with verl's Megatron engine; for `run_distributed`."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

# Before CPU mode: it compiles a function when it is imported.
import megatron.bridge  # noqa: F401

from tests.rl.frameworks import use

#: One row of a delta sync: (HF tensors, changed elements of each, their flat positions, their values).
Row = tuple[list[tuple[str, tuple[int, ...]]], list[int], Any, Any]


def engine(folder: Path, sizes: dict[str, int], options: dict[str, Any], mtp: bool = True) -> Any:
    """verl's engine of a Hugging Face folder, built as its workers build it, with `external_lib`."""
    from unittest import mock

    use("VERL_DIR")
    from verl.utils import megatron_utils
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.model import MtpConfig
    from verl.workers.engine.megatron import transformer_impl

    sys.modules.pop("megatron_nemotron3.bridge", None)
    model = HFModelConfig(
        path=str(folder),
        external_lib="megatron_nemotron3.bridge",
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
        mtp=MtpConfig(enable=mtp),
    )
    assert "megatron_nemotron3.bridge" in sys.modules
    names = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
    layout = {f"{name}_model_parallel_size": sizes.get(short, 1) for short, name in names.items()}
    config = McoreEngineConfig(
        **layout,
        expert_tensor_parallel_size=1,
        forward_only=True,
        override_transformer_config=options,
    )
    # verl knows no CPU platform: its device is the index of an accelerator, whose memory it logs.
    mock.patch.object(transformer_impl, "log_gpu_memory_usage").start()
    for module in (megatron_utils, transformer_impl):
        mock.patch.object(module, "get_device_id", lambda: "cpu").start()
    made = transformer_impl.MegatronEngineWithLMHead(model, config, McoreOptimizerConfig(lr=1e-6), None)
    made.initialize()
    return made


def sync(folder: Path, sizes: dict[str, int], pattern: str) -> dict[str, Any]:
    """Weights by verl's full sync and by its delta sync, before and after a change of every weight."""
    import torch

    made = engine(folder, sizes, {"hybrid_layer_pattern": pattern, "should_pad_vocab": True})
    (model,) = made.module
    before = exported(made)
    made.prime_delta_snapshots()
    for snapshot in made._delta_shard_snap.values():
        snapshot.fill_(-777.0)  # so that every element is a change
    everything = delta(made)
    change(model)
    sparse = delta(made)
    inner = model.module if hasattr(model, "module") else model
    return {
        "decoder": type(inner.decoder).__name__,
        "mtp": inner.config.mtp_num_layers,
        "before": before,
        "after": exported(made),
        "everything": everything,
        "sparse": sparse,
        "rank": torch.distributed.get_rank(),
    }


def without_mtp(folder: Path) -> set[str]:
    """What a full sync sends where `mtp.enable` is false."""
    return set(exported(engine(folder, {}, {}, mtp=False)))


def exported(made: Any) -> dict[str, Any]:
    """What a full sync sends to the rollout engine."""
    weights, _ = made.get_per_tensor_param()
    return {name: value.detach().clone() for name, value in weights}


def change(model: Any) -> None:
    """Move some elements of every weight; copies of a weight on other ranks move alike."""
    import torch

    stored = [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
    for name, value in (*model.named_parameters(), *stored):
        made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        places = torch.randint(value.numel(), (value.numel() // 8 + 1,), generator=made).unique()
        value.data.view(-1)[places] += 1.0


def delta(made: Any) -> list[tuple[Row, list[int] | None]]:
    """Rows of a sharded delta sync on this rank, each with the ranks whose entries are merged with it."""
    import torch

    rows = []
    entries, _ = made.get_per_tensor_param_delta_shard()
    for slots, _, counts, index, value, group in entries:
        together = None if group is None else torch.distributed.get_process_group_ranks(group)
        rows.append(((slots, counts.tolist(), index.clone(), value.clone()), together))
    return rows
