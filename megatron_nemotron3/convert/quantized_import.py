"""Packed NVFP4 and FP8 -> BF16: a quantized checkpoint read as if it were a plain one.

Which weights are quantized, and how, is seen from the tensors; what the configuration files say is only
compared. Read are, with value = element * (block scale *) scale:

    ModelOpt NVFP4            X.weight uint8, X.weight_scale, X.weight_scale_2
    ModelOpt FP8              X.weight float8_e4m3fn, X.weight_scale of one element or of one for each row
    compressed-tensors NVFP4  X.weight_packed uint8, X.weight_scale, X.weight_global_scale (the reciprocal of
                              ModelOpt's weight_scale_2)
    compressed-tensors FP8    as ModelOpt's, scales [out, 1]

Products are rounded once to BF16. The result is not the model that was quantized, but what engines compute
with. Scales of activations and of the KV cache are left behind, listed in `left_behind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.convert.plan import Slices
from megatron_nemotron3.convert.quantized_config import scalar
from megatron_nemotron3.convert.quantized_recipes import BLOCK, FP8, NVFP4
from megatron_nemotron3.convert.stored import Reads, SourceTensor
from megatron_nemotron3.convert.views import as_bits, as_tensor

if TYPE_CHECKING:
    import numpy

#: What is behind X. of tensors that say nothing of the weights.
_LEFT = ("input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")
#: The same of tensors without which the weights cannot be had back, in layouts that are not read.
_FOREIGN = (
    *("weight_zero_point", "weight_g_idx", "weight_scale_inv", "pre_quant_scale", "weight_shape"),
    *("svdquant_lora_a", "svdquant_lora_b", "qweight", "qzeros", "scales"),
)
_SCALE_TYPES = ("float32", "bfloat16")


class _Packed(NamedTuple):
    """A quantized weight: its format, and the tensors behind it."""

    format: str
    elements: str
    scale: str
    #: NVFP4 only.
    scale_2: str = ""

    @property
    def reciprocal(self) -> bool:
        """Whether `scale_2` divides."""
        return self.scale_2.endswith(".weight_global_scale")


class Dequantized(Reads):
    """The tensors of a checkpoint, quantized weights as bfloat16 [out, in]."""

    def __init__(self, source: Reads) -> None:
        """
        Raises:
            CheckpointError: a weight without its scales, scales without their weight, scales of other shapes
                or types, or a layout that is not read; the message names the tensor.
        """
        self.folder, self.files, self._source = source.folder, source.files, source
        #: Module -> "nvfp4" or "fp8".
        self.formats: dict[str, str] = {}
        #: Scales of activations and of the KV cache.
        self.left_behind: tuple[str, ...] = ()
        self._packed: dict[str, _Packed] = {}
        self._scales: dict[str, float] = {}
        used: set[str] = set()
        for name, tensor in source.tensors.items():
            module, _, part = name.rpartition(".")
            if part in _FOREIGN:
                raise CheckpointError(f"{self.folder}: {name}: weights in this layout are not read")
            kind = {"uint8": NVFP4, "float8_e4m3fn": FP8}.get(tensor.dtype)
            if part == "weight_packed" or (part == "weight" and kind):
                packed = self._found(module, part, kind)
                self._packed[f"{module}.weight"], self.formats[module] = packed, packed.format
                used |= {packed.elements, packed.scale, packed.scale_2}
        rest = [name for name in source.tensors if name not in used]
        self.left_behind = tuple(name for name in rest if name.rpartition(".")[2] in _LEFT)
        tensors: dict[str, SourceTensor] = {}
        for name, tensor in source.tensors.items():
            part = name.rpartition(".")[2]
            if name not in used and part in ("weight_scale", "weight_scale_2", "weight_global_scale"):
                raise CheckpointError(f"{self.folder}: {name} is a scale of no quantized weight")
            weight = f"{name.rpartition('.')[0]}.weight"
            if weight in self._packed and name == self._packed[weight].elements:
                if weight != name and weight in source.tensors:
                    raise CheckpointError(f"{self.folder}: {name} and {weight} are the same weight")
                rows, columns = tensor.shape
                columns *= 2 if self._packed[weight].format == NVFP4 else 1
                tensors[weight] = SourceTensor("bfloat16", (rows, columns))
            elif name not in used and part not in _LEFT:
                tensors[name] = tensor
        self.tensors = tensors

    def read(self, name: str, slices: Slices) -> numpy.ndarray[Any, Any]:
        """The raw bits of a slice.

        Raises:
            CheckpointError: besides what the source raises, a scale that is NaN, infinite or negative, or a
                scale of a whole tensor that is zero.
        """
        if name not in self._packed:
            return self._source.read(name, slices)
        packed = self._packed[name]
        return (self._fp8 if packed.format == FP8 else self._nvfp4)(packed, slices)

    def check(self, stated: Any) -> None:
        """Compare with hf_quant_config.json, or with `quantization_config` of config.json.

        Raises:
            CheckpointError: a module that is listed as quantized and is not, or the other way round, or in
                another format, or the file has not the form of such a file. What it does not say by module is
                not compared.
        """
        details = stated.get("quantization", stated) if isinstance(stated, Mapping) else stated
        if not isinstance(details, Mapping):
            raise CheckpointError(
                f"{self.folder}: what the configuration says of quantization is {details!r:.60}, no object"
            )
        for name in ("exclude_modules", "ignore"):
            if not isinstance(details.get(name) or [], list):
                raise CheckpointError(
                    f"{self.folder}: {name} in what the configuration says of quantization is no list"
                )
        layers, method = details.get("quantized_layers"), details.get("quant_method", "modelopt")
        if isinstance(layers, Mapping):
            for module in {*layers, *self.formats}:
                entry = layers.get(module)
                algorithm = str(entry.get("quant_algo")).upper() if isinstance(entry, Mapping) else "none"
                expected = NVFP4 if "NVFP4" in algorithm else FP8 if "FP8" in algorithm else None
                if expected != self.formats.get(module):
                    raise CheckpointError(
                        f"{self.folder}: {module} is stored as {self.formats.get(module, 'a plain weight')}, "
                        f"the configuration lists {algorithm}"
                    )
        elif method == "modelopt":
            excluded = details.get("exclude_modules", details.get("ignore")) or []
            for module in self.formats:
                rule = next((r for r in excluded if isinstance(r, str) and fnmatchcase(module, r)), None)
                if rule is not None:
                    raise CheckpointError(
                        f"{self.folder}: {module} is stored as {self.formats[module]}, the configuration "
                        f"excludes {rule!r} from quantization"
                    )

    def _found(self, module: str, part: str, kind: str | None) -> _Packed:
        """The tensors of a quantized weight, with shapes and types that belong together."""
        tensors = self._source.tensors
        elements, scale = f"{module}.{part}", f"{module}.weight_scale"
        shape, dtype = tensors[elements].shape, tensors[elements].dtype
        if len(shape) != 2 or not all(shape) or (part == "weight_packed" and kind != NVFP4):
            raise CheckpointError(f"{self.folder}: {elements} is {dtype} {list(shape)}, unknown")
        if scale not in tensors:
            raise CheckpointError(f"{self.folder}: {elements} is {dtype}, and there is no {scale}")
        found, (rows, columns) = tensors[scale], shape
        if kind == FP8:
            if found.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)) or found.dtype not in _SCALE_TYPES:
                raise CheckpointError(
                    f"{self.folder}: {scale} is {found.dtype} {list(found.shape)}: expected one float32, or "
                    f"one for each of {rows} rows (scales for blocks are not read)"
                )
            return _Packed(FP8, elements, scale)
        columns *= 2
        if found != SourceTensor("float8_e4m3fn", (rows, columns // BLOCK), found.blocks) or columns % BLOCK:
            raise CheckpointError(
                f"{self.folder}: {scale} is {found.dtype} {list(found.shape)}: expected float8_e4m3fn "
                f"{[rows, columns // BLOCK]}, one for {BLOCK} of the {columns} columns"
            )
        scale_2 = f"{module}." + ("weight_scale_2" if part == "weight" else "weight_global_scale")
        if scale_2 not in tensors or prod(tensors[scale_2].shape) != 1:
            what = f"has shape {list(tensors[scale_2].shape)}" if scale_2 in tensors else "is missing"
            raise CheckpointError(f"{self.folder}: {scale_2} {what}, expected one float32")
        return _Packed(NVFP4, elements, scale, scale_2)

    def _scale(self, name: str) -> float:
        if name not in self._scales:
            self._scales[name] = scalar(self._source, name)
        return self._scales[name]

    def _nvfp4(self, packed: _Packed, slices: Slices) -> numpy.ndarray[Any, Any]:
        import torch

        from megatron_nemotron3.precision.numerics import nvfp4

        rows, (left, right) = slices
        first, last = left // BLOCK, -(-right // BLOCK)  # blocks
        codes = self._source.read(packed.elements, (rows, (first * BLOCK // 2, last * BLOCK // 2)))
        bits = self._source.read(packed.scale, (rows, (first, last)))
        if (bits >= 0x7F).any():  # NaN, and whatever is negative
            raise CheckpointError(f"{self.folder}: {packed.scale} holds NaN or a negative scale")
        scale = torch.tensor(self._scale(packed.scale_2))
        if packed.reciprocal:
            scale = torch.ones(()) / scale
        shift = left - first * BLOCK
        values = nvfp4.dequantize(torch.from_numpy(codes), torch.from_numpy(bits), scale)
        return as_bits(values[:, shift : shift + right - left])

    def _fp8(self, packed: _Packed, slices: Slices) -> numpy.ndarray[Any, Any]:
        import torch

        from megatron_nemotron3.precision.numerics import fp8

        bits = self._source.read(packed.elements, slices)
        if ((bits & 0x7F) == 0x7F).any():
            raise CheckpointError(f"{self.folder}: {packed.elements} holds NaN")
        found = self._source.tensors[packed.scale]
        if prod(found.shape) == 1:
            scale = torch.tensor(self._scale(packed.scale))
        else:
            some = (slices[0], *((0, n) for n in found.shape[1:]))
            scale = as_tensor(self._source.read(packed.scale, some), found.dtype).float().reshape(-1, 1)
            if not bool(((scale > 0) & torch.isfinite(scale)).all()):
                raise CheckpointError(f"{self.folder}: {packed.scale} holds a scale not above 0")
        return as_bits(fp8.dequantize(torch.from_numpy(bits), scale))
