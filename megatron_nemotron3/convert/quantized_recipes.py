"""Which weights of a released inference checkpoint are quantized, and to what: one table for each.

These are checkpoints to serve, made from a trained model; the precision a model is trained in is another
table. Only published choices are here: what is not known has no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_nemotron3.convert import inventory
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.numerics import NVFP4_BLOCK as BLOCK

NVFP4, FP8, BF16 = "nvfp4", "fp8", "bf16"
#: Classes of weights that recipes know; everything else stays as it is in every recipe, all of MTP included.
CLASSES: dict[str, tuple[str, ...]] = {
    "routed experts": ("mixer.experts.{e}.up_proj.weight", "mixer.experts.{e}.down_proj.weight"),
    "shared experts": ("mixer.shared_experts.up_proj.weight", "mixer.shared_experts.down_proj.weight"),
    "Mamba projections": ("mixer.in_proj.weight", "mixer.out_proj.weight"),
    "output head": ("lm_head.weight",),
}
_CLASS = {name: title for title, names in CLASSES.items() for name in names}


@dataclass(frozen=True)
class Recipe:
    """Which weights of a released inference checkpoint have which format."""

    formats: Mapping[str, str]
    source: str
    #: The Mamba layer in front of each attention layer stays BF16.
    spare_before_attention: bool = False
    #: NVFP4 weights with BF16 activations, also where activation scales are at hand.
    weight_only: bool = False
    #: Layers are listed one by one (MIXED_PRECISION) although they may have one format.
    listed: bool = False


_LATENT_NVFP4 = {"routed experts": NVFP4, "shared experts": FP8, "Mamba projections": FP8}
_ALL_NVFP4 = dict.fromkeys(("routed experts", "shared experts", "Mamba projections"), NVFP4)
_ALL_FP8 = dict.fromkeys(_ALL_NVFP4, FP8)
#: By model and format. A model that is not here has no published recipe: take another one's by its full name.
RECIPES: dict[str, Recipe] = {
    "super-nvfp4": Recipe(
        _LATENT_NVFP4,
        "ModelOpt 0.47, NVIDIA-Nemotron-3-Super-120B-A12B-BF16/ptq/nvfp4-max-calib. The released file came "
        "from a search layer by layer: some of these FP8 layers are BF16 there, and a few others FP8",
        listed=True,
    ),
    "ultra-nvfp4": Recipe(
        _LATENT_NVFP4,
        "ModelOpt 0.47, NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16/ptq/nvfp4-4o6. Its weight scales were chosen "
        "for least error, not by the largest magnitude",
        listed=True,
    ),
    "nano-nvfp4": Recipe(
        _ALL_NVFP4,
        "exclude_modules of the released NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
        spare_before_attention=True,
    ),
    "lightning-nvfp4": Recipe(
        {
            "routed experts": NVFP4,
            "shared experts": NVFP4,
            "output head": NVFP4,
            "Mamba projections": FP8,
        },
        "ModelOpt 0.47, NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16/ptq/w4a16_nvfp4_4o6. Its weight scales "
        "were chosen for least error",
        weight_only=True,
        listed=True,
    ),
    "super-fp8": Recipe(_ALL_FP8, "NVIDIA's documentation of Nemotron 3 Super, quantization, FP8 checkpoint"),
    "nano-fp8": Recipe(
        _ALL_FP8,
        "the cards of checkpoints made like the released Nano FP8, after the Nano report, section 4",
        spare_before_attention=True,
    ),
}


def recipe_of(config: Nemotron3Config, name: str) -> tuple[str, Recipe]:
    """The recipe "nvfp4" or "fp8" of a model (its tiny sister has the same), or one by its full name.

    Raises:
        ValueError: there is none; the message lists those that are.
    """
    full = name if name in RECIPES else f"{config.name.removesuffix('-tiny')}-{name}"
    if full not in RECIPES:
        raise ValueError(
            f"no published recipe {name!r} of {config.name} is known: give one by its full name, of "
            + ", ".join(RECIPES)
        )
    return full, RECIPES[full]


def formats(config: Nemotron3Config, recipe: str) -> dict[str, str]:
    """Every tensor of the model's Hugging Face checkpoint -> "nvfp4", "fp8" or "bf16" (it stays as it is).

    Args:
        recipe: see `recipe_of`.

    Raises:
        ValueError: no such recipe, or the columns of a weight are no multiple of the NVFP4 block.
    """
    rules = recipe_of(config, recipe)[1]
    result = {}
    previous, feeding = "", set()
    for layer, kind in enumerate(config.pattern):
        if kind == "*" and previous == "M":
            feeding.add(f"backbone.layers.{layer - 1}.")
        previous = kind
    for link in inventory.links(config):
        title = _CLASS.get(link.row.hf[0].name) if not link.place.hf.startswith("mtp.") else None
        spared = rules.spare_before_attention and link.place.hf in feeding
        kind = rules.formats.get(title or "", BF16) if not spared else BF16
        for tensor in link.hf:
            if kind == NVFP4 and tensor.shape[-1] % BLOCK:
                raise ValueError(
                    f"{tensor.name} has {tensor.shape[-1]} columns, no multiple of the NVFP4 block of "
                    f"{BLOCK}: {config.name} cannot have recipe {recipe!r}"
                )
            result[tensor.name] = kind
    return result
