"""Configuration files of a quantized checkpoint (hf_quant_config.json, config.json), and scale files.

Both configurations have ModelOpt's form, by which engines recognize the layout; `producer.written_by` names
the program that wrote the file. A single format for all layers is written as `quant_algo` with
`exclude_modules`. Several formats are MIXED_PRECISION with `quantized_layers`, which lists every quantized
module. Checkpoints whose activations stay BF16 always use the second form, because SGLang looks for
W4A16_NVFP4 there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.hf_folder import open_file, open_hf
from megatron_nemotron3.checkpoints.convert.quantized_recipes import BLOCK, SCALES, Quantization
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_json
from megatron_nemotron3.precision.serving import RECIPES

#: The ModelOpt release that defines this layout.
LAYOUT = "0.47.0"
#: Modules that engines build as quantizable layers; `exclude_modules` must list those that are not quantized.
_LAYERS = ("_proj", "lm_head", "conv1d", "fc1_latent_proj", "fc2_latent_proj")


def hf_quant_config(plan: Quantization, written_by: str) -> dict[str, Any]:
    """Return the content of hf_quant_config.json."""
    layers = {w.module: _layer_entry(w.algorithm) for w in plan.weights if w.algorithm}
    algorithms = {layer["quant_algo"] for layer in layers.values()}
    details: dict[str, Any]
    if len(algorithms) > 1 or "W4A16_NVFP4" in algorithms or RECIPES[plan.recipe].listed:
        details = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    else:
        (algorithm,) = algorithms
        details = {
            **_layer_entry(algorithm),
            "kv_cache_quant_algo": None,
            "exclude_modules": _excluded_modules(plan),
        }
    if plan.kv_cache:
        details["kv_cache_quant_algo"] = "FP8"
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
    modules: Iterable[str] = (
        ".".join(w.module.split(".")[:3]) + "*" if w.module.startswith("mtp.") else w.module
        for w in plan.weights
        if not w.algorithm and w.tensor.name.endswith(".weight")
    )
    return sorted({m for m in modules if m.endswith((*_LAYERS, "*"))})
