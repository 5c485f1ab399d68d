"""NeMo-RL's policy worker on a rank of a gloo world, for `run_distributed`. It needs both mains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

# Before NeMo-RL, which imports megatron.bridge.
import megatron_nemotron3.bridge  # isort: skip

from tests.rl.frameworks import use

RECIPE = "examples/configs/recipes/llm/grpo-nemotron3-super-120BA12B-16n8g-megatron.yaml"


def policy(model: Path) -> dict[str, Any]:
    """NeMo-RL's recipe for Super with this model on one rank, and without what needs TransformerEngine."""
    checkout = use("NEMO_RL_DIR")
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    recipe = load_config(checkout / RECIPE)
    config: dict[str, Any] = OmegaConf.to_container(recipe, resolve=True)["policy"]
    config |= {"model_name": str(model)}
    megatron = config["megatron_cfg"]
    megatron |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "mtp_num_layers": 2,
        "moe_permute_fusion": False,
        "apply_rope_fusion": False,
        "train_iters": 10,
    }
    megatron["optimizer"]["use_precision_aware_optimizer"] = False
    megatron["checkpoint"]["async_save"] = False
    return config


def worker(model: Path) -> Any:
    """NeMo-RL's worker with our stack, as docs/bridge.md defines it, without Ray."""
    config = policy(model)
    import numpy as np
    import ray
    from nemo_rl.distributed.named_sharding import NamedSharding
    from nemo_rl.models.policy.workers import megatron_policy_worker
    from transformers import AutoTokenizer

    class Worker(megatron_policy_worker.MegatronPolicyWorkerImpl):
        _mamba_stack_spec = staticmethod(megatron_nemotron3.bridge.torch_stack_spec)

    names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    sharding = NamedSharding(np.zeros((1, 1, 1, 1), dtype=int), names)
    with (
        # The number of the GPU that Ray gives, NCCL, and a patch of TransformerEngine's source.
        mock.patch.object(ray, "get_gpu_ids", lambda: [0]),
        mock.patch.object(megatron_policy_worker, "setup_distributed"),
        mock.patch.object(megatron_policy_worker, "apply_transformer_engine_patch"),
    ):
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        return Worker(config, tokenizer, init_reference_model=False, worker_sharding_annotations=sharding)


class Wire:
    """The group of trainers and inference engines: what rank 0 sends, and an engine's end of it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, tensor: Any, src: int) -> None:
        """Send, on the trainers' side."""
        self.sent.append(tensor.clone())

    def received(self, info: dict[str, Any]) -> dict[str, Any]:
        """What NeMo-RL's consumer unpacks of it."""
        from nemo_rl.utils.packed_tensor import packed_broadcast_consumer

        found: dict[str, Any] = {}
        sent = iter(self.sent)
        group = mock.Mock(broadcast=lambda tensor, src: tensor.copy_(next(sent)))
        packed_broadcast_consumer(iter(info.items()), group, 0, lambda pairs: found.update(pairs))
        assert next(sent, None) is None
        return {name: value.clone() for name, value in found.items()}


def refit(model: Path) -> dict[str, Any]:
    """What an inference engine gets of this rank's worker: all weights by broadcast."""
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(model.parent / "cache")
    made = worker(model)
    inner = made.model
    while hasattr(inner, "module"):
        inner = inner.module
    info = made.prepare_refit_info()
    made.model_update_group = Wire()
    made.broadcast_weights_for_collective()
    return {
        "decoder": type(inner.decoder).__name__,
        "mtp": inner.config.mtp_num_layers,
        "weights": made.model_update_group.received(info),
    }
