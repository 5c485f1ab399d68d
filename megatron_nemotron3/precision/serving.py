"""Recipes of released inference checkpoints: which weights of a trained model are quantized, and how.

The precision of training is another table (`table`). Only published choices are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_nemotron3.precision.numerics import ALL_SCALES, FOUR_OVER_SIX

if TYPE_CHECKING:
    from megatron_nemotron3.models import Nemotron3Config

NVFP4, FP8, BF16 = "nvfp4", "fp8", "bf16"
#: Classes of weights in recipes. All other weights, and all of MTP, stay as they are in every recipe.
CLASSES: dict[str, tuple[str, ...]] = {
    "routed experts": ("mixer.experts.{e}.up_proj.weight", "mixer.experts.{e}.down_proj.weight"),
    "shared experts": ("mixer.shared_experts.up_proj.weight", "mixer.shared_experts.down_proj.weight"),
    "Mamba projections": ("mixer.in_proj.weight", "mixer.out_proj.weight"),
    "output head": ("lm_head.weight",),
}


@dataclass(frozen=True)
class ServingRecipe:
    """The formats of the weights of a released inference checkpoint."""

    formats: Mapping[str, str]
    source: str
    #: The Mamba layer before each attention layer stays BF16.
    bf16_before_attention: bool = False
    #: NVFP4 weights with BF16 activations, even if activation scales are given.
    weight_only: bool = False
    #: How NVFP4 scales are chosen by error; in four-over-six 448 or 299 are the largest FP8 element likewise.
    search: str = ""
    #: Layers are listed individually (MIXED_PRECISION), even if all have one format.
    listed: bool = False


_LATENT_NVFP4 = {"routed experts": NVFP4, "shared experts": FP8, "Mamba projections": FP8}
_ALL_NVFP4 = dict.fromkeys(("routed experts", "shared experts", "Mamba projections"), NVFP4)
_ALL_FP8 = dict.fromkeys(_ALL_NVFP4, FP8)
#: Recipes by model and format. Models without a published recipe can use another model's by its full name.
RECIPES: dict[str, ServingRecipe] = {
    "super-nvfp4": ServingRecipe(
        _LATENT_NVFP4,
        "ModelOpt 0.47, NVIDIA-Nemotron-3-Super-120B-A12B-BF16/ptq/nvfp4-max-calib. The released file came "
        "from a search layer by layer: some of these FP8 layers are BF16 there, and a few others FP8",
        listed=True,
    ),
    "super-nvfp4-mse": ServingRecipe(
        _LATENT_NVFP4,
        "ModelOpt 0.47, NVIDIA-Nemotron-3-Super-120B-A12B-BF16/ptq/nvfp4-mse; FP8 scales are not searched",
        search=ALL_SCALES,
        listed=True,
    ),
    "ultra-nvfp4": ServingRecipe(
        _LATENT_NVFP4,
        "ModelOpt 0.47, NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16/ptq/nvfp4-4o6",
        search=FOUR_OVER_SIX,
        listed=True,
    ),
    "nano-nvfp4": ServingRecipe(
        _ALL_NVFP4,
        "exclude_modules of the released NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
        bf16_before_attention=True,
    ),
    "lightning-nvfp4": ServingRecipe(
        {"routed experts": NVFP4, "shared experts": NVFP4, "output head": NVFP4, "Mamba projections": FP8},
        "ModelOpt 0.47, NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16/ptq/w4a16_nvfp4_4o6",
        weight_only=True,
        search=FOUR_OVER_SIX,
        listed=True,
    ),
    "super-fp8": ServingRecipe(
        _ALL_FP8, "NVIDIA's documentation of Nemotron 3 Super, quantization, FP8 checkpoint"
    ),
    "nano-fp8": ServingRecipe(
        _ALL_FP8,
        "the cards of checkpoints made like the released Nano FP8, after the Nano report, section 4",
        bf16_before_attention=True,
    ),
}


def named_recipe(text: str) -> tuple[str, ServingRecipe]:
    """A recipe by its full name, which ",4over6=1" or ",4over6=0" may follow; that, if it changes something.

    Raises:
        ValueError: something else follows, or the recipe has no NVFP4 weights.
    """
    name, comma, switch = text.partition(",")
    found = RECIPES[name]
    if comma and switch not in ("4over6=0", "4over6=1"):
        raise ValueError(f"only ,4over6=1 or ,4over6=0 may follow {name}, not {comma}{switch}")
    if comma and (found.search == ALL_SCALES or NVFP4 not in found.formats.values()):
        what = "all scales to choose from" if found.search else "no NVFP4 weights to scale by four-over-six"
        raise ValueError(f"{name} has {what}: drop ,{switch}")
    made = replace(found, search=FOUR_OVER_SIX if switch == "4over6=1" else "") if comma else found
    return (name if made == found else text), made


def recipe_of(config: Nemotron3Config, text: str) -> tuple[str, ServingRecipe]:
    """`named_recipe`, or "nvfp4" or "fp8" of a model or its tiny form with what may follow."""
    name, own = text.partition(",")[0], f"{config.name.removesuffix('-tiny')}-"
    if (full := name if name in RECIPES else own + name) not in RECIPES:
        forms = ", ".join(known.removeprefix(own) for known in RECIPES if known.startswith(own)) or "none"
        raise ValueError(
            f"no published recipe {name!r} of {config.name} is known: its own are {forms} (a refit packs "
            f"fp8-blockwise, too), or use the full name of one of {', '.join(RECIPES)}"
        )
    return named_recipe(full + text.removeprefix(name))


#: Class -> kinds of linears (`table.LINEARS`) that can compute with packed weights while they train.
_KINDS = {
    "routed experts": {"experts"},
    "shared experts": {"shared_experts"},
    "Mamba projections": {"mamba_in", "mamba_out"},
}
#: Recipe -> kinds of linears whose weights it stores in NVFP4; recipes that training can follow.
PACKED_KINDS: dict[str, frozenset[str]] = {
    name: frozenset().union(*(_KINDS[title] for title in titles))
    for name, recipe in RECIPES.items()
    if (titles := {title for title, kind in recipe.formats.items() if kind == NVFP4}) <= set(_KINDS)
    and titles
}


def unquantized_layers(recipe: str, pattern: str) -> set[int]:
    """Decoder layers, from 0, whose weights stay as they are."""
    if not named_recipe(recipe)[1].bf16_before_attention:
        return set()
    return {layer for layer in range(len(pattern)) if pattern[layer : layer + 2] == "M*"}
