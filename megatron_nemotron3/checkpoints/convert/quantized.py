"""The quantization plan of a model's inference checkpoint, by a recipe of `precision.serving`.

A quantized weight X is stored as several tensors, in this order:

    NVFP4  X.weight uint8 [out, in/2], X.weight_scale float8_e4m3fn [out, in/16], X.weight_scale_2 float32 []
    FP8    X.weight float8_e4m3fn [out, in], X.weight_scale float32 []
    both   X.input_scale float32 [], if activations are quantized as well

Weight scales follow from the weights. Scales of activations and of the KV cache require running the model on
data, and are never invented. Without them, the behavior of engines decides what is written:

    NVFP4  becomes W4A16_NVFP4: weights in 4 bits, activations in BF16. If it were written as NVFP4, vLLM
           would compute with uninitialized memory (vllm#45212, vllm#54189).
    FP8    stays BF16: vLLM and SGLang read a missing input_scale as -3.4e38; only TensorRT-LLM computes it.
    KV     is not mentioned: engines use BF16, or their own option.

hf_quant_config.json and config.json have ModelOpt's form, by which engines recognize the layout;
`producer.written_by` names the program that wrote the file. A single format for all layers is written as
`quant_algo` with `exclude_modules`. Several formats are MIXED_PRECISION with `quantized_layers`, which lists
every quantized module. Checkpoints whose activations stay BF16 always use the second form, because SGLang
looks for W4A16_NVFP4 there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.hf_folder import open_file, open_hf
from megatron_nemotron3.checkpoints.convert.inventory import Tensor
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError, read_json
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import hf_root
from megatron_nemotron3.precision.numerics import FOUR_OVER_SIX
from megatron_nemotron3.precision.numerics import NVFP4_BLOCK as BLOCK
from megatron_nemotron3.precision.serving import (
    BF16,
    CLASSES,
    FP8,
    NVFP4,
    named_recipe,
    recipe_of,
    unquantized_layers,
)

#: Suffixes after "X." of the scales of activations and of the KV cache.
SCALES = ("input_scale", "k_scale", "v_scale")
#: The ModelOpt release that defines this layout.
LAYOUT = "0.47.0"
#: Modules that engines build as quantizable layers; `exclude_modules` must list those that are not quantized.
_LAYERS = ("_proj", "lm_head", "conv1d", "fc1_latent_proj", "fc2_latent_proj")
_CLASS_OF = {name: title for title, names in CLASSES.items() for name in names}


def formats(config: Nemotron3Config, recipe: str) -> dict[str, str]:
    """Map every tensor of the model's Hugging Face checkpoint to "nvfp4", "fp8" or "bf16" (unchanged)."""
    full, rules = recipe_of(config, recipe)
    result = {}
    unchanged = {f"{hf_root(config)}.layers.{layer}." for layer in unquantized_layers(full, config.pattern)}
    for mapping in inventory.mappings(config):
        title = _CLASS_OF.get(mapping.row.hf[0].name) if not mapping.prefix.hf.startswith("mtp.") else None
        kind = BF16 if mapping.prefix.hf in unchanged else rules.formats.get(title or "", BF16)
        for tensor in mapping.hf:
            if kind == NVFP4 and tensor.shape[-1] % BLOCK:
                raise ValueError(
                    f"{tensor.name} has {tensor.shape[-1]} columns, not a multiple of the NVFP4 block of "
                    f"{BLOCK}: {config.name} cannot have recipe {recipe!r}"
                )
            result[tensor.name] = kind
    return result


@dataclass(frozen=True)
class Weight:
    """The quantized form of a tensor of the model."""

    tensor: Tensor
    #: "NVFP4", "W4A16_NVFP4" or "FP8", as in `quant_algo`; None: the tensor is copied.
    algorithm: str | None
    #: Given scales: suffix after "X." -> value.
    given: Mapping[str, float] = field(default_factory=dict)
    #: How scales are chosen by error: of the blocks of an NVFP4 weight, of an FP8 weight; "": they are not.
    search: str = ""

    @property
    def module(self) -> str:
        """X of X.weight."""
        return self.tensor.name.removesuffix(".weight")

    @property
    def outputs(self) -> tuple[Tensor, ...]:
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
    """The quantization plan of a checkpoint: every tensor of the model, in the order of the layers."""

    recipe: str
    weights: tuple[Weight, ...]
    #: Whether the KV cache is FP8, with scales.
    kv_cache: bool
    #: Weights that are FP8 in the recipe but stay BF16 for lack of activation scales.
    kept: tuple[str, ...] = ()
    #: Given scales of modules that are not quantized.
    unused: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name, in file order."""
        return {tensor.name: tensor for weight in self.weights for tensor in weight.outputs}

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return sum(t.elements * ITEM_SIZE[t.dtype] for t in self.tensors.values())


def quantization(
    config: Nemotron3Config, recipe: str, scales: Mapping[str, float] | None = None, dtype: str = "bfloat16"
) -> Quantization:
    """Plan the quantization of a model's checkpoint by a recipe."""
    full, rules = recipe_of(config, recipe)
    by_name = formats(config, recipe)
    given = dict(scales or {})
    tensors = inventory.hf_tensors(config, dtype=dtype)
    modules = {t.name.removesuffix(".weight") for t in tensors}
    for name, value in given.items():
        module, _, kind = name.rpartition(".")
        if module not in modules or kind not in SCALES:
            raise ValueError(f"scale {name!r}: {config.name} has no such module")
        if not 0 < value < math.inf:
            raise ValueError(f"scale {name!r} is {value!r}, not a positive number")
    wanted = {
        kind: [f"{n.removesuffix('.weight')}.input_scale" for n, k in by_name.items() if k == kind]
        for kind in (NVFP4, FP8)
    }
    attention = [f"{hf_root(config)}.layers.{i}.mixer." for i, k in enumerate(config.pattern) if k == "*"]
    wanted["KV cache"] = [f"{p}{x}_proj.{x}_scale" for p in attention for x in "kv"]
    if rules.weight_only:
        wanted[NVFP4] = []
    have = {kind: _all_or_none(kind, names, given) for kind, names in wanted.items()}
    algorithms = {NVFP4: "NVFP4" if have[NVFP4] else "W4A16_NVFP4", FP8: "FP8" if have[FP8] else None}
    if not any(algorithms.get(kind) for kind in by_name.values()):
        raise ValueError(
            f"recipe {full!r} has only FP8 weights, and engines need a scale for the activations of each "
            f"({len(wanted[FP8])}, first {wanted[FP8][0]!r}): give --input-scales"
        )
    used = {n for kind, names in wanted.items() if have[kind] for n in names}
    weights = []
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        own = {suffix: given[n] for suffix in SCALES if (n := f"{module}.{suffix}") in used}
        kind = by_name[tensor.name]
        search = rules.search if kind == NVFP4 or rules.search == FOUR_OVER_SIX else ""
        weights.append(Weight(tensor, algorithms.get(kind), own, search))
    kept = tuple(n for n, kind in by_name.items() if kind == FP8 and not have[FP8])
    unused = tuple(name for name in given if name not in used)
    return Quantization(full, tuple(weights), have["KV cache"], kept, unused)


def _all_or_none(kind: str, names: list[str], given: Mapping[str, float]) -> bool:
    missing = [name for name in names if name not in given]
    if missing and len(missing) < len(names):
        raise ValueError(
            f"{kind}: {len(missing)} of {len(names)} scales are missing, first {missing[0]!r}. Calibration "
            "leaves out experts that received no token: calibrate on more data, or give none of these scales"
        )
    return bool(names) and not missing


def hf_quant_config(plan: Quantization, written_by: str) -> dict[str, Any]:
    """Return the content of hf_quant_config.json."""
    layers = {w.module: _layer_entry(w.algorithm) for w in plan.weights if w.algorithm}
    algorithms = {layer["quant_algo"] for layer in layers.values()}
    modules: dict[str, Any]
    if len(algorithms) > 1 or "W4A16_NVFP4" in algorithms or named_recipe(plan.recipe)[1].listed:
        algorithm, modules = "MIXED_PRECISION", {"quantized_layers": layers}
    else:
        (algorithm,) = algorithms
        modules = {"exclude_modules": _excluded_modules(plan)}
    details = {**_layer_entry(algorithm), "kv_cache_quant_algo": "FP8" if plan.kv_cache else None, **modules}
    producer = {"name": "modelopt", "version": LAYOUT, "written_by": written_by}
    return {"producer": producer, "quantization": details}


def quantization_config(hf_quant: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config` of config.json, which repeats hf_quant_config.json in another form."""
    details = hf_quant["quantization"]
    result: dict[str, Any] = {"config_groups": {}}
    if "quantized_layers" in details:
        groups: dict[str, list[str]] = {}
        for module, layer in details["quantized_layers"].items():
            groups.setdefault(layer["quant_algo"], []).append(module)
        for number, (algorithm, modules) in enumerate(groups.items()):
            result["config_groups"][f"group_{number}"] = {
                **_config_group(algorithm),
                "targets": sorted(modules),
            }
        result["quantized_layers"] = details["quantized_layers"]
    else:
        result["config_groups"]["group_0"] = {**_config_group(details["quant_algo"]), "targets": ["Linear"]}
    result["ignore"] = details.get("exclude_modules", [])
    result["quant_algo"] = details["quant_algo"]
    if details["kv_cache_quant_algo"]:
        result["kv_cache_scheme"] = _float_format(8)
    return {**result, "producer": hf_quant["producer"], "quant_method": "modelopt"}


def read_scales(path: Path) -> dict[str, float]:
    """Read scales of activations and of the KV cache: X.input_scale, X.k_scale, X.v_scale -> value."""
    if path.suffix == ".json":
        data = read_json(path)
        for name, value in data.items():
            if type(value) not in (int, float) or name.rpartition(".")[2] not in SCALES:
                raise CheckpointError(
                    f"{path}: {name!r:.100} is {value!r:.40}: expected a number for a name that ends in "
                    + ", ".join(SCALES)
                )
        return {name: float(value) for name, value in data.items()}
    source = open_hf(path) if path.is_dir() else open_file(path)
    names = [name for name in source.tensors if name.rpartition(".")[2] in SCALES]
    result = {name: scalar(source, name) for name in names}
    if not result:
        raise CheckpointError(f"{path}: no tensor has a name that ends in {', '.join(SCALES)}")
    return result


def scalar(source: TensorSource, name: str) -> float:
    """Read a scale of one element."""
    tensor = source.tensors[name]
    if math.prod(tensor.shape) != 1 or tensor.dtype not in ("float32", "bfloat16"):
        raise CheckpointError(
            f"{source.folder}: {name} is {tensor.dtype} {list(tensor.shape)}, expected one float32"
        )
    value = float(source.read(name))
    if not 0 < value < math.inf:
        raise CheckpointError(f"{source.folder}: {name} is {value}, expected a number above 0")
    return value


def _layer_entry(algorithm: str) -> dict[str, Any]:
    return {"quant_algo": algorithm} | ({"group_size": BLOCK} if "NVFP4" in algorithm else {})


def _float_format(number: int) -> dict[str, Any]:
    return {"dynamic": False, "num_bits": number, "type": "float"}


def _config_group(algorithm: str) -> dict[str, Any]:
    if algorithm == "FP8":
        return {"input_activations": _float_format(8), "weights": _float_format(8)}
    packed = {**_float_format(4), "group_size": BLOCK}
    return {"weights": packed} | ({"input_activations": packed} if algorithm == "NVFP4" else {})


def _excluded_modules(plan: Quantization) -> list[str]:
    """List the layers that are not quantized; layers of MTP by their prefix."""
    modules = (
        ".".join(w.module.split(".")[:3]) + "*" if w.module.startswith("mtp.") else w.module
        for w in plan.weights
        if not w.algorithm and w.tensor.name.endswith(".weight")
    )
    return sorted({m for m in modules if m.endswith((*_LAYERS, "*"))})


def quantized_lines(plan: Quantization | None) -> Iterator[str]:
    """Say what is quantized, and what is not."""
    if plan is None:
        return
    kinds = Counter(weight.algorithm for weight in plan.weights if weight.algorithm)
    by_error = ", NVFP4 scales by error" if any(w.search for w in plan.weights) else ""
    counts = ", ".join(f"{n:,} weights {kind}" for kind, n in kinds.items())
    yield f"quantized    by {plan.recipe}: {counts}{by_error}"
    if plan.kept:
        yield (
            f"kept         {len(plan.kept):,} weights stay as they are: FP8 in the recipe, but no "
            f"--input-scales were given; first {plan.kept[0]}"
        )
    if plan.unused:
        yield f"unused       {len(plan.unused):,} of the given scales, first {plan.unused[0]}"
