"""Write a tiny checkpoint with whatever megatron-core is imported; see README.md. Never run by the tests.

    PYTHONPATH=CORE:REPOSITORY python write.py FOLDER [--format F] [--modules te|local|ours] [--singleton] …

The model is stock Megatron's own hybrid model with its own stack specification, the state goes through its
own `sharded_state_dict` and `dist_checkpointing.save`. Only the elements are ours: `values` in values.py.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.golden.checkpoints.values import LAYERS, SIZES, VOCABULARY, part


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=("torch_dist", "fsdp_dtensor"), default="torch_dist")
    parser.add_argument("--modules", choices=("te", "local", "ours"), default="te")
    parser.add_argument("--singleton", action="store_true", help="metadata singleton_local_shards")
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--tp", type=int, default=1, help="TP and EP; start one process for each RANK")
    parser.add_argument("--dp", type=int, default=1, help="data parallel")
    args = parser.parse_args()
    without_cuda()
    import torch

    with tempfile.TemporaryDirectory() as own:
        store = os.environ.get("STORE", f"{own}/store")
        rank = int(os.environ.get("RANK", 0))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=args.tp * args.dp
        )
        write(args)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def without_cuda() -> None:
    """What building and saving ask of CUDA means the CPU from here on.

    Not `cpu_mode`, which also patches parts of the one megatron-core version it is for.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles for a device
    import megatron.core.extensions.transformer_engine  # noqa: F401 (looks at CUDA as it is imported)
    from megatron.core.tensor_parallel import random

    from megatron_nemotron3.cpu import torch_names

    for target, name, value in torch_names.table():
        setattr(target, name, value)
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()


def write(args: argparse.Namespace) -> None:
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = {**SIZES, **layout(args)}
    parallel_state.initialize_model_parallel(**layout(args))
    model_parallel_cuda_manual_seed(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    arguments = argparse.Namespace(hybrid_layer_pattern=args.layers, **sizes)
    content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 1}
    {"torch_dist": torch_dist, "fsdp_dtensor": fsdp_dtensor}[args.format](args, content)
    print(megatron.core.__version__, sorted(path.name for path in args.folder.rglob("*")))


def layout(args: argparse.Namespace) -> dict[str, int]:
    """TP is EP, so that both occur with two ranks."""
    return {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": args.tp,
        "expert_tensor_parallel_size": 1,
    }


def torch_dist(args: argparse.Namespace, content: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {
        "singleton_local_shards": args.singleton,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content["model"] = build(args).sharded_state_dict(metadata=metadata)
    apply_factories(content["model"])
    for tensor in nested_values(content["model"]):
        if isinstance(tensor, ShardedTensor):
            shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
            whole = part(tensor.key, tuple(tensor.global_shape), tuple(tensor.global_offset), shape)
            tensor.data = typed(tensor.key, whole).reshape(tensor.local_shape)
            tensor.dtype = tensor.data.dtype
    dist_checkpointing.save(content, str(args.folder))


def fsdp_dtensor(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Megatron-FSDP's state of a model with the values of torch_dist keys, and torch's own save."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )
    from megatron.core.transformer.fsdp_dtensor_checkpoint import (
        handle_experts_in_state_dict,
        handle_fp8_extra_state_case,
    )

    from megatron_nemotron3.proof.certify.tensors import sharded

    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    model = build(args)
    with torch.no_grad():
        for tensor in sharded([model]):
            shape = (1,) * tensor.prepend_axis_num + tuple(tensor.data.shape)
            mine = part(tensor.key, tuple(tensor.global_shape), tuple(tensor.global_offset), shape)
            tensor.data.copy_(torch.from_numpy(mine).reshape(tensor.data.shape))
    # As megatron.training.checkpointing does it.
    state = FullyShardedDataParallel(model.config, settings, model).state_dict_for_save_checkpoint()
    handle_fp8_extra_state_case(state)
    content["model"] = handle_experts_in_state_dict(state, SIZES["num_moe_experts"])
    preprocess_state_dict_for_uneven_dtensor(content)
    writer = torch.distributed.checkpoint.FileSystemWriter(args.folder)
    torch.distributed.checkpoint.save(state_dict=content, storage_writer=writer)


def typed(key: str, array: Any) -> Any:
    """What a BF16 run stores."""
    import torch

    return torch.from_numpy(array).to(torch.float32 if key.endswith("expert_bias") else torch.bfloat16)


def build(args: argparse.Namespace) -> Any:
    """This version's own model."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    main, _, mtp = args.layers.partition("/")
    sizes = {
        **SIZES,
        "num_layers": len(main) - main.count("[") - main.count("]"),
        "activation_func": squared_relu,
        "mtp_num_layers": 1 if mtp else None,
        "mtp_use_repeated_layer": bool(mtp),
        "is_hybrid_model": True,
        "moe_grouped_gemm": args.modules != "local",
        "sequence_parallel": args.tp > 1,
        **layout(args),
    }
    config = TransformerConfig(**{name: value for name, value in sizes.items() if name in known})
    common = {"vocab_size": VOCABULARY, "max_sequence_length": 64}
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        if args.modules == "ours":
            from megatron_nemotron3.specs import nemotron3_torch_stack_spec as spec
        elif args.modules == "local":
            spec = local(spec)
        return HybridModel(config, spec, hybrid_layer_pattern=args.layers, **common)
    except ImportError:  # up to 0.17
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
        from megatron.core.models.mamba.mamba_model import MambaModel

        spec = spec if args.modules == "te" else local(spec)
        return MambaModel(config, spec, hybrid_override_pattern=args.layers, **common)


def local(spec: Any) -> Any:
    """The stack specification with torch modules in place of TransformerEngine's: norms stand apart."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = copy.deepcopy(spec)
    mamba, attention, mlp, moe = (
        getattr(spec.submodules, f"{kind}_layer").submodules for kind in ("mamba", "attention", "mlp", "moe")
    )
    mamba.norm = attention.input_layernorm = mlp.pre_mlp_layernorm = moe.pre_mlp_layernorm = WrappedTorchNorm
    mixer, dense = mamba.mixer.submodules, mlp.mlp.submodules
    mixer.in_proj, mixer.out_proj = ColumnParallelLinear, RowParallelLinear
    dense.linear_fc1, dense.linear_fc2 = ColumnParallelLinear, RowParallelLinear
    inner = attention.self_attention.submodules
    inner.linear_qkv, inner.linear_proj = ColumnParallelLinear, RowParallelLinear
    inner.core_attention = DotProductAttention
    moe.mlp = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
    return spec


if __name__ == "__main__":
    main()
