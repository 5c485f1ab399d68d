"""BF16 -> packed NVFP4 and FP8, in the layout of NVIDIA ModelOpt that vLLM, SGLang and TensorRT-LLM read.

A quantized weight X is several tensors, in this order:

    NVFP4  X.weight uint8 [out, in/2], X.weight_scale float8_e4m3fn [out, in/16], X.weight_scale_2 float32 []
    FP8    X.weight float8_e4m3fn [out, in], X.weight_scale float32 []
    both   X.input_scale float32 [], where activations are quantized, too

Weight scales follow from the weights (`numerics.nvfp4`, `numerics.fp8`). Scales of activations and of the KV
cache follow from running the model on data; they are never invented. What engines do without them decides
what is written:

    NVFP4  becomes W4A16_NVFP4: weights in 4 bits, activations in BF16. Written as NVFP4, vLLM would compute
           with memory nobody has filled (vllm#45212, vllm#54189).
    FP8    stays BF16: vLLM and SGLang take a missing input_scale for -3.4e38; TensorRT-LLM alone computes it.
    KV     is not mentioned: engines use BF16, or their own option.

`Quantized` is a view as those of `views`: it reads bands of the source when bands of it are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.convert import inventory
from megatron_nemotron3.convert.inventory import Tensor
from megatron_nemotron3.convert.plan import Slices, whole
from megatron_nemotron3.convert.quantized_recipes import BF16, BLOCK, FP8, NVFP4, formats, recipe_of
from megatron_nemotron3.convert.stored import Reads, SourceTensor
from megatron_nemotron3.convert.views import as_bits, as_tensor, bands
from megatron_nemotron3.models import Nemotron3Config

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Weight:
    """What a tensor of the model becomes."""

    tensor: Tensor
    #: "NVFP4", "W4A16_NVFP4", "FP8" as `quant_algo` has them; None: the tensor itself.
    algorithm: str | None
    #: Scales given from outside: what is behind X. -> value.
    given: Mapping[str, float] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """X of X.weight."""
        return self.tensor.name.removesuffix(".weight")

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors in the file, in order."""
        name, shape, dtype = self.tensor
        if self.algorithm is None:
            made = [self.tensor]
        elif self.algorithm == "FP8":
            made = [Tensor(name, shape, "float8_e4m3fn"), Tensor(f"{name}_scale", (), "float32")]
        else:
            rows, columns = shape
            made = [
                Tensor(name, (rows, columns // 2), "uint8"),
                Tensor(f"{name}_scale", (rows, columns // BLOCK), "float8_e4m3fn"),
                Tensor(f"{name}_scale_2", (), "float32"),
            ]
        return (*made, *(Tensor(f"{self.module}.{scale}", (), "float32") for scale in self.given))


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint becomes: every tensor of the model, in the order of the layers."""

    recipe: str
    weights: tuple[Weight, ...]
    #: The KV cache is FP8, with scales.
    kv_cache: bool
    #: The recipe has them in FP8; without activation scales they stay BF16.
    kept: tuple[str, ...] = ()
    #: Scales that were given and are of modules that are not quantized.
    unused: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint by name, in file order."""
        return {tensor.name: tensor for weight in self.weights for tensor in weight.outputs}

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(t.elements * ITEM_SIZE[t.dtype] for t in self.tensors.values())


def quantization(
    config: Nemotron3Config, recipe: str, scales: Mapping[str, float] | None = None, dtype: str = "bfloat16"
) -> Quantization:
    """What a model's checkpoint becomes by a recipe.

    Args:
        recipe: see `recipe_of`.
        scales: X.input_scale of quantized weights, and k_proj.k_scale, v_proj.v_scale of attention layers:
            all of a format or none of it. See `quantized_config.read_scales`.
        dtype: of the weights that stay.

    Raises:
        ValueError: no such recipe; scales that are no positive numbers, of no module of the model, or missing
            for some modules; or nothing is left to quantize without scales.
    """
    full, rules = recipe_of(config, recipe)
    by_name = formats(config, recipe)
    given = dict(scales or {})
    links = list(inventory.links(config, dtype=dtype))
    tensors = [tensor for link in links for tensor in link.hf]
    modules = {t.name.removesuffix(".weight") for t in tensors}
    for name, value in given.items():
        module, _, kind = name.rpartition(".")
        if module not in modules or kind not in ("input_scale", "k_scale", "v_scale"):
            raise ValueError(f"scale {name!r}: {config.name} has no such module")
        if not 0 < value < inf:
            raise ValueError(f"scale {name!r} is {value!r}, no positive number")
    wanted = {
        kind: [f"{n.removesuffix('.weight')}.input_scale" for n, k in by_name.items() if k == kind]
        for kind in (NVFP4, FP8)
    }
    attention = [f"backbone.layers.{i}.mixer." for i, kind in enumerate(config.pattern) if kind == "*"]
    wanted["KV cache"] = [f"{p}{x}_proj.{x}_scale" for p in attention for x in "kv"]
    if rules.weight_only:
        wanted[NVFP4] = []
    have = {kind: _all_or_none(kind, names, given) for kind, names in wanted.items()}
    algorithms = {
        NVFP4: "NVFP4" if have[NVFP4] else "W4A16_NVFP4",
        FP8: "FP8" if have[FP8] else None,
        BF16: None,
    }
    if not any(algorithms[kind] for kind in by_name.values()):
        raise ValueError(
            f"recipe {full!r} has FP8 weights only, and engines need a scale of each one's activations "
            f"({len(wanted[FP8])}, first {wanted[FP8][0]!r}): give --input-scales"
        )
    used = {n for kind, names in wanted.items() if have[kind] for n in names}
    weights = []
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        names = [f"{module}.{suffix}" for suffix in ("input_scale", "k_scale", "v_scale")]
        own = {n.rpartition(".")[2]: given[n] for n in names if n in used}
        weights.append(Weight(tensor, algorithms[by_name[tensor.name]], own))
    kept = tuple(n for n, kind in by_name.items() if kind == FP8 and not have[FP8])
    unused = tuple(name for name in given if name not in used)
    return Quantization(full, tuple(weights), have["KV cache"], kept, unused)


def _all_or_none(kind: str, names: list[str], given: Mapping[str, float]) -> bool:
    missing = [name for name in names if name not in given]
    if missing and len(missing) < len(names):
        raise ValueError(
            f"{kind}: {len(missing)} of {len(names)} scales are missing, first {missing[0]!r}. Calibration "
            "leaves out experts that saw no token: calibrate on more data, or give none of these scales"
        )
    return bool(names) and not missing


#: Elements quantized at once: their FP32 copies stay in a core's cache.
_SOME = 1 << 18
#: Bytes of a weight that is kept, so that its scales need no second read of the file.
_HELD = 24 << 20


class Quantized(Reads):
    """The tensors of a quantized checkpoint, made of a view of the unquantized one."""

    def __init__(self, source: Reads, plan: Quantization) -> None:
        """
        Args:
            source: has the tensors of the plan, in bfloat16, float16 or float32.

        Raises:
            CheckpointError: one of them is missing, or has another shape or type.
        """
        self.folder, self.files, self.plan, self._source = source.folder, source.files, plan, source
        self._from: dict[str, tuple[Weight, str]] = {}
        tensors: dict[str, SourceTensor] = {}
        for weight in plan.weights:
            name, shape, _ = weight.tensor
            found = source.tensors.get(name)
            if found is None or found.shape != shape:
                what = f"has shape {list(found.shape)}" if found else "is missing"
                raise CheckpointError(f"{source.folder}: {name} {what}, expected {list(shape)}")
            if weight.algorithm and found.dtype not in ("bfloat16", "float16", "float32"):
                raise CheckpointError(f"{source.folder}: {name} is {found.dtype}: it cannot be quantized")
            for output in weight.outputs:
                copied = weight.algorithm is None and output.name == name
                tensors[output.name] = found if copied else SourceTensor(output.dtype, output.shape)
                self._from[output.name] = (weight, output.name.removeprefix(weight.module + "."))
        self.tensors = tensors
        self._amax: dict[str, Any] = {}
        self._held: tuple[str, Any] = ("", None)

    def read(self, name: str, slices: Slices) -> numpy.ndarray[Any, Any]:
        weight, part = self._from[name]
        if part in weight.given:
            import numpy

            return numpy.array(weight.given[part], "f4").view("u4")
        if weight.algorithm is None:
            return self._source.read(name, slices)
        scale = self._scale(weight)
        if part == ("weight_scale" if weight.algorithm == "FP8" else "weight_scale_2"):
            return as_bits(scale)
        return self._pack(weight, part, slices, scale)

    def _scale(self, weight: Weight) -> Any:
        """The scale of a whole tensor; the first pass over its elements."""
        from megatron_nemotron3.precision.numerics import fp8, nvfp4

        name, shape, _ = weight.tensor
        make = fp8.tensor_scale if weight.algorithm == "FP8" else nvfp4.tensor_scale
        try:
            if name not in self._amax:
                pieces = bands(whole(shape), 1 << 22)
                self._amax[name] = max(nvfp4.amax(self._elements(name, some)) for some in pieces)
            return make(self._amax[name])
        except CheckpointError:
            raise
        except ValueError as problem:
            raise CheckpointError(f"{self.folder}: {name}: {problem}") from None

    def _pack(self, weight: Weight, part: str, slices: Slices, scale: Any) -> numpy.ndarray[Any, Any]:
        """Codes or block scales of a slice, whole blocks of columns at a time."""
        import torch

        from megatron_nemotron3.precision.numerics import fp8, nvfp4

        name, shape, _ = weight.tensor
        (top, bottom), (left, right) = slices
        # Columns of the source that one element of the result is made of, and whole blocks of them.
        each = 1 if weight.algorithm == "FP8" else 2 if part == "weight" else BLOCK
        first, last = left * each // BLOCK * BLOCK, min(-(-right * each // BLOCK) * BLOCK, shape[1])
        result = torch.empty((bottom - top, right - left), dtype=torch.uint8)
        step = max(1, _SOME // max(1, last - first))
        for start in range(top, bottom, step):
            stop = min(start + step, bottom)
            x = self._elements(name, ((start, stop), (first, last)))
            if weight.algorithm == "FP8":
                made = fp8.quantize(x, scale)
            elif part == "weight":
                made = nvfp4.quantize(x, scale)[0]
            else:
                made = nvfp4.block_scales(x, scale)
            skip = left - first // each
            result[start - top : stop - top] = made[:, skip : skip + right - left]
        return result.numpy()

    def _elements(self, name: str, slices: Slices) -> Any:
        """A slice of the source as a torch tensor; a weight that is small enough is read whole, once."""
        tensor = self._source.tensors[name]
        if prod(tensor.shape) * ITEM_SIZE[tensor.dtype] > _HELD:
            return as_tensor(self._source.read(name, slices), tensor.dtype)
        if self._held[0] != name:
            self._held = (name, as_tensor(self._source.read(name, whole(tensor.shape)), tensor.dtype))
        return self._held[1][tuple(slice(a, b) for a, b in slices)]
