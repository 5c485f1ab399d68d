"""A user's module: the stack of a model whose E layers differ, for `--spec tests.support.own_stack spec`."""

from __future__ import annotations

from megatron_nemotron3.models import get
from megatron_nemotron3.specs import stack_spec

#: Eight layers, four of them E, none like the next; each half of the model begins with another kind.
config = get("super-tiny").but(
    name="mine",
    pattern="MEEM*EME",
    vocab_size=128,
    seq_length=64,
    max_position_embeddings=64,
    num_moe_experts=8,
    moe_router_topk=3,
    moe_layers=((32, 2), (96, 5), (64, 3), (32, 4)),
)
spec = stack_spec("torch", config)
#: Weights of the same shapes, each token to other numbers of experts.
other = stack_spec("torch", config.but(moe_layers=((32, 2), (96, 4), (64, 3), (32, 4))))
#: `--spec` for `spec`.
WORDS = ("--spec", __name__, "spec")
