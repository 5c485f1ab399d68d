"""What ranks of a gloo world do with Megatron-Bridge; for `run_distributed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Before megatron.bridge, which it lets be imported without TransformerEngine.
import megatron_nemotron3.bridge  # isort: skip
from megatron.bridge import AutoBridge


def set_layout(provider: Any, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Sizes of the layout, FP32 on a CPU."""
    import torch

    provider.tensor_model_parallel_size, provider.sequence_parallel = tp, tp > 1
    provider.pipeline_model_parallel_size, provider.expert_model_parallel_size = pp, ep
    provider.expert_tensor_parallel_size, provider.should_pad_vocab = 1, True
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16, provider.use_cpu_initialization = False, True
    if pp > 1:
        main, *mtp = provider.hybrid_layer_pattern.split("/")
        half = len(main) // pp
        provider.hybrid_layer_pattern = "/".join([main[:half] + "|" + main[half:], *mtp])


def imported(folder: Path, **sizes: int) -> tuple[Any, Any]:
    """(Bridge, this rank's model) of a Hugging Face folder."""
    from megatron_nemotron3.proof.certify.ranks import initialize

    initialize(**sizes, **({"etp": 1} if "ep" in sizes else {}))
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider()
    set_layout(provider, **sizes)
    provider.finalize()
    models = provider.provide_distributed_model(wrap_with_ddp=False)
    return bridge, models


def built(folder: Path, sizes: dict[str, int]) -> Any:
    """This rank's pieces of the model that the config and its builder make, weights imported."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_nemotron3.proof.certify.ranks import initialize
    from megatron_nemotron3.proof.certify.tensors import pieces

    initialize(**sizes)
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider()
    set_layout(provider, **sizes)
    config = megatron_nemotron3.bridge.model_config(provider)
    hooks = config.pre_wrap_hooks  # they are functions, and not serialized
    config = type(config).from_dict(config.as_dict())
    assert config.transformer.activation_func is provider.activation_func
    config.pre_wrap_hooks = hooks
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    assert [type(model.decoder).__name__ for model in models] == ["Nemotron3Stack"]
    return pieces(models)


def round_trip(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Import and export: this rank's pieces, the exported tensors, logits, and what was built."""
    bridge, models = imported(folder, **sizes)
    from megatron_nemotron3.proof.certify.tensors import pieces

    (model,) = models
    return {
        "pieces": pieces(models),
        "hf": {
            name: tensor.clone() for name, tensor in bridge.export_hf_weights(models, show_progress=False)
        },
        "decoder": type(model.decoder).__name__,
        "mtp": (model.config.mtp_num_layers, model.config.mtp_use_repeated_layer),
    }


def imported_logits(folder: Path, config: Any) -> Any:
    """`logits` of the model that Bridge builds and imports."""
    _, (model,) = imported(folder)
    return logits(model, config)


def own_logits(weights: Any, config: Any) -> Any:
    """`logits` of our own build with these weights."""
    import megatron_nemotron3 as n3
    from megatron_nemotron3.proof.certify.tensors import load

    model = n3.build_model(config, precision="fp32", backend="torch")
    load([model], weights)
    return logits(model, config)


def logits(model: Any, config: Any) -> Any:
    """Logits of a fixed text, MTP's first: [depths * s, b, vocabulary]. The loss overwrites them later."""
    import torch

    seen: list[Any] = []
    model.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    ids = torch.randint(config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(1))
    model.eval()
    with torch.no_grad():
        model(ids, torch.arange(70).expand(2, -1), None, labels=ids)
    return torch.cat(seen)[..., : config.vocab_size]
