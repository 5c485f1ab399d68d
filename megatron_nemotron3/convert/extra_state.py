"""The `_extra_state` objects TransformerEngine's modules ask a checkpoint for, and what to store in them.

Megatron's hybrid spec on TransformerEngine (TE) loads with one object for each TE module, which holds FP8
scaling state; without it the default strictness of a load fails. Routed experts have one each:

    decoder.layers.0.mixer.in_proj._extra_state/shard_0_1
    decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_3_8         expert 3 of 8

A converted checkpoint has no such state, so every object is the same: None, at which TE and Megatron's own
linears leave their state as it is. There are no objects for what is not a TE module: the embedding, the
router, Mamba's convolution and its gated norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megatron_nemotron3.checkpoint.write import object_archive
from megatron_nemotron3.convert.places import places
from megatron_nemotron3.models import Nemotron3Config

#: Part of the name table -> the TE modules in it. A norm that TE fuses into the linear behind it is none.
MODULES: dict[str, tuple[str, ...]] = {
    "model": ("decoder.final_norm", "output_layer"),
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "E": (
        "pre_mlp_layernorm",
        "mlp.fc1_latent_proj",
        "mlp.fc2_latent_proj",
        "mlp.experts.experts.linear_fc1",
        "mlp.experts.experts.linear_fc2",
        "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.linear_fc2",
    ),
    "-": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "mtp_in": ("enorm", "hnorm", "eh_proj"),
    "mtp_out": ("final_layernorm",),
}
_ROUTED = ".experts.experts."
_LATENT = "_latent_proj"


def extra_state_keys(config: Nemotron3Config) -> Iterator[str]:
    """Keys of the objects, in the order of the layers, whatever the layout that will load them.

    Only experts stored as one stack are meant (Megatron's metadata `singleton_local_shards` is false).
    """
    for place in places(config):
        for module in MODULES[place.part]:
            if _LATENT in module and not config.moe_latent_size:
                continue
            shards = config.num_moe_experts if _ROUTED in module else 1
            for shard in range(shards or 0):
                yield f"{place.megatron}{module}._extra_state/shard_{shard}_{shards}"


@cache
def extra_state_archive() -> bytes:
    """The bytes of each object: torch.save([None]); Megatron stores a list of what it gets."""
    return object_archive([None])
