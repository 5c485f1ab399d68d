"""Packed weights in a plan: which tensors a server gets in place of a weight, and how each follows its cut.

`nvfp4`, `fp8` and full names of recipes give what `nemotron3 convert to-hf --quantize` writes. A recipe that
ends in `-blockwise` (`fp8-blockwise`, `super-fp8-blockwise`) quantizes the weights that the recipe before the
suffix has in FP8, as DeepSeek's checkpoints have them:

    X.weight            float8_e4m3fn [out, in]
    X.weight_scale_inv  float32 [out / 128, in / 128], rounded up: amax / 448 of each block

Engines scale its activations as they come, so it needs no scales from data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_nemotron3.checkpoints.convert.inventory import Tensor, mappings
from megatron_nemotron3.checkpoints.convert.quantized import Weight, formats, quantization
from megatron_nemotron3.inference.refit.shares import Shares, TensorShare
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.serving import FP8

#: Ends the name of a recipe with a scale for BLOCK x BLOCK elements.
BLOCKWISE = "-blockwise"
BLOCK = 128


class Blockwise(Weight):
    """A weight with a scale for each block of BLOCK x BLOCK."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        name, shape, _ = self.tensor
        return Tensor(name, shape, "float8_e4m3fn"), Tensor(f"{name}_scale_inv", grid_of(self), "float32")


def grid_of(weight: Weight) -> tuple[int, int]:
    """Number of FP32 scales along the rows and the columns of a quantized weight."""
    if not isinstance(weight, Blockwise):
        return 1, 1
    rows, columns = weight.tensor.shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


class Stored(NamedTuple):
    """A tensor that is stored for a weight.

    suffix: follows the module's name. columns: of the weight, for each of its own; 0: it is of the whole
    weight, and every holder of a part of it sends it.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: str
    columns: int

    def name(self, weight: str) -> str:
        return f"{weight.removesuffix('.weight')}.{self.suffix}"

    def cut(self, shares: tuple[Shares, ...], ranks: int, name: str) -> tuple[Shares, ...]:
        """Shares of its columns, from those of the weight's columns."""
        if any(at % self.columns for one in shares for share in one for at in share):
            raise ValueError(
                f"{name}: {ranks} ranks cut a weight of {self.shape[1] * self.columns:,} columns inside a "
                f"block of {self.columns} that shares a scale: train it on fewer tensor ranks"
            )
        by = self.columns
        return tuple(
            tuple(TensorShare(s.start // by, s.stop // by, s.at // by) for s in one) for one in shares
        )


def packed(
    config: Nemotron3Config, recipe: str, scales: Mapping[str, float], dtype: str
) -> dict[str, Weight]:
    """Every tensor that is stored otherwise than in the model's own checkpoint, by its name there."""
    if recipe.endswith(BLOCKWISE):
        if scales:
            raise ValueError(f"{recipe} has no scales of activations: leave them out")
        kinds = formats(config, recipe.removesuffix(BLOCKWISE))
        tensors = (t for mapping in mappings(config, dtype=dtype) for t in mapping.hf)
        return {t.name: Blockwise(t, recipe) for t in tensors if kinds[t.name] == FP8}
    plan = quantization(config, recipe, scales, dtype)
    return {w.tensor.name: w for w in plan.weights if w.outputs != (w.tensor,)}


def stored_of(weight: Weight) -> list[Stored]:
    """The tensors that are stored for a weight."""
    found = []
    for name, shape, dtype in weight.outputs:
        whole = not shape or name.endswith("_scale_inv")
        columns = 0 if whole else weight.tensor.shape[-1] // shape[-1]
        found.append(Stored(name.removeprefix(weight.module + "."), shape, dtype, columns))
    return found
