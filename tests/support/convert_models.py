"""Configurations to test with, and what Megatron says of models built from them."""

from __future__ import annotations

import random
from typing import Any

from megatron_nemotron3.models import Nemotron3Config, get

#: Megatron's names of the parameters and of the one buffer that is stored.
Shapes = dict[str, tuple[int, ...]]

#: What tests/golden/stock_te_models.json was recorded from; its vocabulary of 255 was padded to 256.
GOLDEN = {
    name: Nemotron3Config(
        name=name,
        title=name,
        pattern=pattern,
        hidden_size=64,
        vocab_size=255,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        mamba_state_dim=16,
        mamba_num_groups=2,
        init_method_std=0.02,
        **fields,
    )
    for name, pattern, fields in (
        (
            "super_like",
            "MEM*E",
            {
                "num_moe_experts": 8,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 64,
                "moe_shared_expert_intermediate_size": 64,
                "moe_latent_size": 32,
                "moe_router_topk_scaling_factor": 1.0,
                "mtp_pattern": "*E",
                "mtp_num_layers": 2,
            },
        ),
        ("dense_hybrid", "M-M*-", {"dense_ffn_hidden_size": 128}),
    )
}
PADDED = 256

#: Every dimension of its own length, so that no two can be taken for each other.
DISTINCT = get("super-tiny").but(
    name="distinct",
    pattern="M-E*",
    hidden_size=88,
    vocab_size=509,
    num_attention_heads=12,
    num_query_groups=4,
    kv_channels=8,
    mamba_num_heads=20,
    mamba_head_dim=6,
    mamba_state_dim=14,
    mamba_num_groups=4,
    dense_ffn_hidden_size=72,
    num_moe_experts=8,
    moe_ffn_hidden_size=56,
    moe_shared_expert_intermediate_size=104,
    moe_latent_size=40,
    mtp_pattern="*EM-",
    mtp_num_layers=2,
    mtp_use_repeated_layer=False,
)


def random_config(seed: int) -> Nemotron3Config:
    """A small valid model; every option of the table occurs among some dozens of seeds."""
    pick = random.Random(seed)

    def layers(most: int) -> str:
        return "".join(pick.choices("ME*-", k=pick.randint(1, most)))

    groups, mamba_groups, mtp = pick.choice([1, 2, 4]), pick.choice([1, 2]), pick.random() < 0.5
    return get("nano-tiny").but(
        name=f"random{seed}",
        pattern="M" + layers(5),
        hidden_size=8 * pick.randint(2, 9),
        vocab_size=pick.randint(40, 90),
        num_attention_heads=groups * pick.randint(1, 3),
        num_query_groups=groups,
        kv_channels=4 * pick.randint(1, 4),
        mamba_num_heads=mamba_groups * pick.randint(1, 4),
        mamba_head_dim=4 * pick.randint(1, 4),
        mamba_state_dim=4 * pick.randint(1, 4),
        mamba_num_groups=mamba_groups,
        dense_ffn_hidden_size=8 * pick.randint(1, 9),
        num_moe_experts=pick.choice([2, 4, 12]),
        moe_router_topk=2,
        moe_ffn_hidden_size=8 * pick.randint(1, 9),
        moe_shared_expert_intermediate_size=8 * pick.randint(1, 9),
        moe_latent_size=pick.choice([None, 24]),
        mtp_pattern=layers(3) if mtp else None,
        mtp_num_layers=pick.randint(1, 3) if mtp else 0,
        mtp_use_repeated_layer=pick.random() < 0.5,
    )


def stored_parameters(model: Any) -> dict[str, Any]:
    """The tensors of a Megatron model on this rank: parameters, and the expert bias."""
    bias = {name: b for name, b in model.named_buffers() if name.endswith("expert_bias")}
    return {name: p.detach().clone() for name, p in (*model.named_parameters(), *bias.items())}


def chunks(model: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """(key, global shape, offset, data) of what this rank writes into a torch_dist folder."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [
        (v.key, tuple(v.global_shape), tuple(v.global_offset), v.data.detach().clone())
        for v in nested_values(state)
        if isinstance(v, ShardedTensor) and is_main_replica(v.replica_id)
    ]


def assemble(parts: list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]) -> dict[str, Any]:
    """The global tensors of a torch_dist folder, from the chunks of all ranks."""
    tensors: dict[str, Any] = {}
    for key, shape, offset, data in parts:
        whole = tensors.setdefault(key, data.new_full(shape, float("nan")))
        sizes = (1,) * (len(shape) - data.dim()) + tuple(data.shape)
        whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes))] = data.reshape(sizes)
    assert not any(bool(tensor.isnan().any()) for tensor in tensors.values())
    return tensors
