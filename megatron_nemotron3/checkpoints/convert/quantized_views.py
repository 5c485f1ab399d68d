"""Lazy views that pack BF16 weights to NVFP4 or FP8, and that unpack them to BF16.

`Quantized` writes the layout of NVIDIA ModelOpt, which vLLM, SGLang and TensorRT-LLM read
(`quantized`). `Dequantized` reads a quantized checkpoint as if it were a BF16 checkpoint. The tensors
themselves determine which weights are quantized, and how; the configuration files are only compared. Formats
that are read, with value = element * (block scale *) scale:

    ModelOpt NVFP4            X.weight uint8, X.weight_scale, X.weight_scale_2
    ModelOpt FP8              X.weight float8_e4m3fn, X.weight_scale of one element or one per row
    compressed-tensors NVFP4  X.weight_packed uint8, X.weight_scale, X.weight_global_scale (the reciprocal of
                              ModelOpt's weight_scale_2)
    compressed-tensors FP8    as ModelOpt's, with scales [out, 1]

Products are rounded once to BF16. The result is not the model before quantization, but the weights that
engines compute with. Scales of activations and of the KV cache are not read; `activation_scales` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.config_keys import named_errors
from megatron_nemotron3.checkpoints.convert.plan import Slices, bands, whole
from megatron_nemotron3.checkpoints.convert.quantized import BLOCK, FP8, NVFP4, Quantization, Weight, scalar
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.precision.numerics import e4m3, fp8, nvfp4

#: Suffixes after "X." of tensors that do not concern weights.
_ACTIVATION_SCALES = ("input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")
#: Suffixes of tensors of other quantization layouts, which are not read.
_FOREIGN = (
    *("weight_zero_point", "weight_g_idx", "weight_scale_inv", "pre_quant_scale", "weight_shape"),
    *("svdquant_lora_a", "svdquant_lora_b", "qweight", "qzeros", "scales"),
)
_METHODS = ("modelopt", "compressed-tensors")
_SCALE_TYPES = ("float32", "bfloat16")


class _PackedWeight(NamedTuple):
    """A quantized weight: its format, and the names of its tensors."""

    format: str
    elements: str
    scale: str
    #: NVFP4 only.
    scale_2: str = ""

    @property
    def reciprocal(self) -> bool:
        """Whether `scale_2` is a divisor."""
        return self.scale_2.endswith(".weight_global_scale")


class Dequantized(TensorSource):
    """The tensors of a checkpoint, quantized weights as bfloat16 [out, in]."""

    def __init__(self, source: TensorSource) -> None:
        self.folder, self.files, self._source = source.folder, source.files, source
        #: Module -> "nvfp4" or "fp8".
        self.formats: dict[str, str] = {}
        #: Scales of activations and of the KV cache.
        self.activation_scales: tuple[str, ...] = ()
        self._packed: dict[str, _PackedWeight] = {}
        self._scales: dict[str, float] = {}
        with named_errors(self.folder, CheckpointError):
            self.tensors = self._find_tensors(source.tensors)

    def _find_tensors(self, stored: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
        by_elements: dict[str, str] = {}  # tensor of the elements -> name of the weight
        used: set[str] = set()
        for name, tensor in stored.items():
            module, _, part = name.rpartition(".")
            if part in _FOREIGN:
                raise ValueError(f"{name}: this layout is not read: convert the unquantized checkpoint")
            kind = {"uint8": NVFP4, "float8_e4m3fn": FP8}.get(tensor.dtype)
            if part == "weight_packed" or (part == "weight" and kind):
                packed = _packed_weight(stored, module, part, kind)
                by_elements[name] = f"{module}.weight"
                self._packed[by_elements[name]], self.formats[module] = packed, packed.format
                used |= {packed.scale, packed.scale_2}
        tensors: dict[str, SourceTensor] = {}
        activation_scales = []
        for name, tensor in stored.items():
            part = name.rpartition(".")[2]
            if name in by_elements:
                weight = by_elements[name]
                if weight != name and weight in stored:
                    raise ValueError(f"{name} and {weight} are the same weight")
                rows, columns = tensor.shape
                columns *= 2 if self._packed[weight].format == NVFP4 else 1
                tensors[weight] = SourceTensor("bfloat16", (rows, columns))
            elif name in used:
                continue
            elif part in ("weight_scale", "weight_scale_2", "weight_global_scale"):
                raise ValueError(f"{name} is a scale, but its weight is not quantized")
            elif part in _ACTIVATION_SCALES:
                activation_scales.append(name)
            else:
                tensors[name] = tensor
        self.activation_scales = tuple(activation_scales)
        return tensors

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if name not in self._packed:
            return self._source.read(name, slices)
        slices = whole(self.tensors[name].shape) if slices is None else slices
        packed = self._packed[name]
        return (self._unpack_fp8 if packed.format == FP8 else self._unpack_nvfp4)(packed, slices)

    def check(self, stated: Any) -> None:
        """Compare with hf_quant_config.json, or with `quantization_config` of config.json.

        Only what the configuration states per module is compared.
        """
        with named_errors(self.folder, CheckpointError):
            _check_stated(self.formats, stated)

    def _tensor_scale(self, name: str) -> float:
        if name not in self._scales:
            self._scales[name] = scalar(self._source, name)
        return self._scales[name]

    def _unpack_nvfp4(self, packed: _PackedWeight, slices: Slices) -> Tensor:
        rows, (left, right) = slices
        first, last = left // BLOCK, -(-right // BLOCK)  # blocks
        codes = self._source.read(packed.elements, (rows, (first * BLOCK // 2, last * BLOCK // 2)))
        bits = self._source.read(packed.scale, (rows, (first, last))).view(torch.uint8)
        if (bits >= 0x7F).any():  # NaN or negative
            raise CheckpointError(f"{self.folder}: {packed.scale} holds NaN or a negative scale")
        scale = torch.tensor(self._tensor_scale(packed.scale_2))
        if packed.reciprocal:
            scale = torch.ones(()) / scale
        shift = left - first * BLOCK
        return nvfp4.dequantize(codes, bits, scale)[:, shift : shift + right - left]

    def _unpack_fp8(self, packed: _PackedWeight, slices: Slices) -> Tensor:
        bits = self._source.read(packed.elements, slices).view(torch.uint8)
        if ((bits & 0x7F) == 0x7F).any():
            raise CheckpointError(f"{self.folder}: {packed.elements} holds NaN")
        found = self._source.tensors[packed.scale]
        if prod(found.shape) == 1:
            scale = torch.tensor(self._tensor_scale(packed.scale))
        else:
            some = (slices[0], *((0, n) for n in found.shape[1:]))
            scale = self._source.read(packed.scale, some).float().reshape(-1, 1)
            if not bool(((scale > 0) & torch.isfinite(scale)).all()):
                raise CheckpointError(f"{self.folder}: {packed.scale} holds a scale not above 0")
        return fp8.dequantize(bits, scale)


def _packed_weight(
    tensors: Mapping[str, SourceTensor], module: str, part: str, kind: str | None
) -> _PackedWeight:
    """Return the tensors of a quantized weight after checking their shapes and types."""
    elements, scale = f"{module}.{part}", f"{module}.weight_scale"
    shape, dtype = tensors[elements].shape, tensors[elements].dtype
    if len(shape) != 2 or not all(shape) or (part == "weight_packed" and kind != NVFP4):
        raise ValueError(f"{elements} is {dtype} {list(shape)}: expected a matrix of uint8 or float8_e4m3fn")
    if scale not in tensors:
        raise ValueError(f"{elements} is {dtype}, but {scale} is missing")
    found, (rows, columns) = tensors[scale], shape
    if kind == FP8:
        if found.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)) or found.dtype not in _SCALE_TYPES:
            raise ValueError(
                f"{scale} is {found.dtype} {list(found.shape)}: expected one float32, or "
                f"one for each of {rows} rows (block scales are not read)"
            )
        return _PackedWeight(FP8, elements, scale)
    columns *= 2
    if found != SourceTensor("float8_e4m3fn", (rows, columns // BLOCK), found.blocks) or columns % BLOCK:
        raise ValueError(
            f"{scale} is {found.dtype} {list(found.shape)}: expected float8_e4m3fn "
            f"{[rows, columns // BLOCK]}, one for {BLOCK} of the {columns} columns"
        )
    scale_2 = f"{module}." + ("weight_scale_2" if part == "weight" else "weight_global_scale")
    if scale_2 not in tensors or prod(tensors[scale_2].shape) != 1:
        what = f"has shape {list(tensors[scale_2].shape)}" if scale_2 in tensors else "is missing"
        raise ValueError(f"{scale_2} {what}, expected one float32")
    return _PackedWeight(NVFP4, elements, scale, scale_2)


def _check_stated(formats: Mapping[str, str], stated: Any) -> None:
    """Compare the formats of modules with a quantization configuration."""
    details = stated.get("quantization", stated) if isinstance(stated, Mapping) else stated
    if not isinstance(details, Mapping):
        raise ValueError(f"its quantization configuration is {details!r:.60}, not an object")
    for name in ("exclude_modules", "ignore"):
        if not isinstance(details.get(name) or [], list):
            raise ValueError(f"{name} in its quantization configuration is not a list")
    if not formats:
        raise ValueError(
            "it has a quantization configuration, but no weight is quantized: if the "
            "configuration is a leftover, remove it"
        )
    layers, method = details.get("quantized_layers"), details.get("quant_method", "modelopt")
    if method not in _METHODS:
        raise ValueError(
            f"its quantization method {method!r:.40} is not read; known are " + ", ".join(_METHODS)
        )
    stated = _stated_formats(details)
    for module, stored in formats.items():
        if stated and stored not in stated:
            raise ValueError(
                f"{module} is stored as {stored}, the configuration has only " + ", ".join(sorted(stated))
            )
    if isinstance(layers, Mapping):
        for module in dict.fromkeys((*layers, *formats)):
            entry = layers.get(module)
            algorithm = str(entry.get("quant_algo")).upper() if isinstance(entry, Mapping) else "none"
            expected = NVFP4 if "NVFP4" in algorithm else FP8 if "FP8" in algorithm else None
            if expected != formats.get(module):
                raise ValueError(
                    f"{module} is stored as {formats.get(module, 'a plain weight')}, "
                    f"the configuration lists {algorithm}"
                )
    elif method == "modelopt":
        excluded = details.get("exclude_modules", details.get("ignore")) or []
        for module in formats:
            rule = next((r for r in excluded if isinstance(r, str) and fnmatchcase(module, r)), None)
            if rule is not None:
                raise ValueError(
                    f"{module} is stored as {formats[module]}, the configuration "
                    f"excludes {rule!r} from quantization"
                )


def _stated_formats(details: Mapping[str, Any]) -> set[str]:
    """Return the formats of weights that a quantization configuration has; empty if it does not say."""
    groups = details.get("config_groups")
    weights = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    bits = {one.get("num_bits") for one in weights if isinstance(one, Mapping)}
    found = {format for number, format in ((4, NVFP4), (8, FP8)) if number in bits}
    algorithm = str(details.get("quant_algo", "")).upper()
    return found | {format for name, format in (("NVFP4", NVFP4), ("FP8", FP8)) if name in algorithm}


#: Elements quantized per step: their FP32 copies stay in the cache of a core.
_QUANTIZE_STEP = 1 << 18
#: Largest weight, in bytes, that is cached, so that its scales need no second read of the file.
_CACHE_BYTES = 24 << 20


class Quantized(TensorSource):
    """The tensors of a quantized checkpoint, made from an unquantized source."""

    def __init__(self, source: TensorSource, plan: Quantization) -> None:
        self.folder, self.files, self.plan, self._source = source.folder, source.files, plan, source
        self._origins: dict[str, tuple[Weight, str]] = {}
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
                self._origins[output.name] = (weight, output.name.removeprefix(weight.module + "."))
        self.tensors = tensors
        self._amax: dict[str, Any] = {}
        self._cached: tuple[str, Any] = ("", None)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        weight, part = self._origins[name]
        if part in weight.given:
            return torch.tensor(weight.given[part])
        if weight.algorithm is None:
            return self._source.read(name, slices)
        scale = self._weight_scale(weight)
        if part == ("weight_scale" if weight.algorithm == "FP8" else "weight_scale_2"):
            return scale
        slices = whole(self.tensors[name].shape) if slices is None else slices
        return self._pack(weight, part, slices, scale).view(self.tensors[name].torch_dtype)

    def _weight_scale(self, weight: Weight) -> Tensor:
        """Return the scale of a whole tensor; the first call reads all its elements."""
        name, shape, _ = weight.tensor
        limit = e4m3.MAX if weight.algorithm == "FP8" else nvfp4.LARGEST[weight.search]
        try:
            if name not in self._amax:
                pieces = [*bands(whole(shape), 1 << 22)]
                amax = max(nvfp4.amax(self._elements(name, some)) for some in pieces)
                if weight.search and weight.algorithm == "FP8":
                    errors = torch.stack([fp8.squared_errors(self._elements(name, p), amax) for p in pieces])
                    dtype = self._source.tensors[name].torch_dtype
                    amax = fp8.of_smaller_error(amax, errors.sum(0), dtype)
                self._amax[name] = amax
            return nvfp4.tensor_scale(self._amax[name], limit)
        except CheckpointError:
            raise
        except ValueError as problem:
            raise CheckpointError(f"{self.folder}: {name}: {problem}") from None

    def _pack(self, weight: Weight, part: str, slices: Slices, scale: Tensor) -> Tensor:
        """Return the codes or block scales of a slice; whole blocks of columns are quantized."""
        name, shape, _ = weight.tensor
        (top, bottom), (left, right) = slices
        # Source columns per element of the result, rounded to whole blocks.
        each = 1 if weight.algorithm == "FP8" else 2 if part == "weight" else BLOCK
        first, last = left * each // BLOCK * BLOCK, min(-(-right * each // BLOCK) * BLOCK, shape[1])
        result = torch.empty((bottom - top, right - left), dtype=torch.uint8)
        step = max(1, _QUANTIZE_STEP // max(1, last - first))
        for start in range(top, bottom, step):
            stop = min(start + step, bottom)
            x = self._elements(name, ((start, stop), (first, last)))
            if weight.algorithm == "FP8":
                made = fp8.quantize(x, scale)
            elif part == "weight":
                made = nvfp4.quantize(x, self._amax[name], weight.search)[0]
            else:
                made = nvfp4.block_scales(x, self._amax[name], weight.search)
            skip = left - first // each
            result[start - top : stop - top] = made[:, skip : skip + right - left]
        return result

    def _elements(self, name: str, slices: Slices) -> Tensor:
        """Read a slice of the source; a small weight is read whole, and cached."""
        if self._source.tensors[name].nbytes > _CACHE_BYTES:
            return self._source.read(name, slices)
        if self._cached[0] != name:
            self._cached = (name, self._source.read(name))
        return self._cached[1][tuple(slice(a, b) for a, b in slices)]
