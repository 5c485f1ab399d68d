"""What ranks of a gloo world do with Megatron-Bridge; for `run_distributed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Before CPU mode: megatron.bridge compiles a function when it is imported.
import megatron_nemotron3.bridge  # noqa: F401  isort: skip
from megatron.bridge import AutoBridge


def set_layout(provider: Any, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Sizes of the layout, FP32 on a CPU."""
    import torch

    provider.tensor_model_parallel_size, provider.sequence_parallel = tp, tp > 1
    provider.pipeline_model_parallel_size, provider.expert_model_parallel_size = pp, ep
    provider.expert_tensor_parallel_size = 1
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16, provider.use_cpu_initialization = False, True
    if pp > 1:
        main, *mtp = provider.hybrid_layer_pattern.split("/")
        half = len(main) // pp
        provider.hybrid_layer_pattern = "/".join([main[:half] + "|" + main[half:], *mtp])


def imported(folder: Path, **sizes: int) -> tuple[Any, Any]:
    """(Bridge, this rank's model) of a Hugging Face folder."""
    from tests.support.distributed import initialize

    initialize(**sizes, **({"etp": 1} if "ep" in sizes else {}))
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider()
    set_layout(provider, **sizes)
    provider.finalize()
    models = provider.provide_distributed_model(wrap_with_ddp=False)
    return bridge, models


def round_trip(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Import and export: this rank's pieces, the exported tensors, logits, and what was built."""
    bridge, models = imported(folder, **sizes)
    from tests.parallel.tensors import pieces

    (model,) = models
    return {
        "pieces": pieces(models),
        "hf": {
            name: tensor.clone() for name, tensor in bridge.export_hf_weights(models, show_progress=False)
        },
        "decoder": type(model.decoder).__name__,
        "mtp": (model.config.mtp_num_layers, model.config.mtp_use_repeated_layer),
    }
