"""Define a model of your own in this family: its flags, its parameter count, and the model."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

import megatron_nemotron3 as n3
from megatron_nemotron3.launch import Launch, flags
from megatron_nemotron3.models import count, get, tiny

# Twice the experts at a quarter of the width ("acc" of LatentMoE), one more attention layer, no MTP.
own = tiny(get("super")).but(
    name="mine",
    title="My hybrid",
    pattern="MEM*EM*EME",
    num_moe_experts=64,
    moe_router_topk=12,
    moe_latent_size=32,
    mtp_pattern=None,
    mtp_num_layers=0,
)
print(f"{own.title}: {count(own).trainable:,} parameters")
print(*flags(Launch.of(own, precision="fp32", backend="torch"))[:2], sep="\n")

with n3.cpu_mode():
    model = n3.build_model(own, precision="fp32", backend="torch")
assert sum(p.numel() for p in model.parameters()) == count(own).trainable
