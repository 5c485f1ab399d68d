"""What ranks of a gloo world do with NeMo-RL's import of a Hugging Face model. For `run_distributed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Before CPU mode: Bridge compiles a function when it is imported.
import megatron_nemotron3.bridge  # isort: skip

from tests.rl.frameworks import placeholder, skeleton, use


def community_import() -> Any:
    """NeMo-RL's module that imports models, without the packages around it."""
    folder = use("NEMO_RL_DIR")
    for name in ("nemo_rl", "nemo_rl.models", "nemo_rl.models.megatron"):
        skeleton(folder, name)
    placeholder("nemo_rl.models.policy", MegatronConfig=dict)
    from nemo_rl.models.megatron import community_import as module

    return module


def import_model(folder: Path, output: Path, spec: str, sizes: dict[str, int]) -> None:
    """NeMo-RL's conversion of the first start, with one of our stack specs."""
    config = {
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": sizes.get("ep", 1),
        "expert_tensor_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "pipeline_dtype": "bfloat16",
        "sequence_parallel": "tp" in sizes,
        "gradient_accumulation_fusion": False,
    }
    stack = getattr(megatron_nemotron3.bridge, spec)
    community_import().import_model_from_hf_name(str(folder), str(output), config, mamba_stack_spec=stack)
