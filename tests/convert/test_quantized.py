"""Packed checkpoints: which weights, which tensors, which bytes; written, read back, and damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.convert import config_json, inventory, to_hf
from megatron_nemotron3.convert.hf_folder import open_hf
from megatron_nemotron3.convert.plan import whole
from megatron_nemotron3.convert.quantized_config import (
    hf_quant_config,
    plain_config,
    quantization_config,
    read_scales,
)
from megatron_nemotron3.convert.quantized_export import Quantization, Quantized, quantization
from megatron_nemotron3.convert.quantized_import import Dequantized
from megatron_nemotron3.convert.quantized_recipes import RECIPES, formats
from megatron_nemotron3.convert.stored import Reads, SourceTensor
from megatron_nemotron3.convert.streams import write
from megatron_nemotron3.convert.views import as_bits, as_tensor
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.numerics import fp8, nvfp4

TINY = ("super-tiny", "ultra-tiny", "nano-tiny", "lightning-tiny")


class Memory(Reads):
    """Tensors in memory; counts what is read of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.folder, self.files = Path("memory"), {}
        self._data = {n: (str(t.dtype).removeprefix("torch."), as_bits(t)) for n, t in tensors.items()}
        self.tensors = {n: SourceTensor(kind, tuple(a.shape)) for n, (kind, a) in self._data.items()}
        self.reads: list[tuple[str, int]] = []

    def read(self, name: str, slices: Any) -> numpy.ndarray:
        result = self._data[name][1][tuple(slice(*s) for s in slices)].copy()
        self.reads.append((name, result.nbytes))
        return result


def _model(config: Nemotron3Config, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        t.name: (torch.randn(t.shape, generator=generator) * 0.05).to(
            torch.float32 if t.dtype == "float32" else dtype
        )
        for t in inventory.hf_tensors(config)
    }


def _scales(config: Nemotron3Config, recipe: str) -> dict[str, float]:
    """A number of its own for everything that can have one."""
    kinds = formats(config, recipe)
    skip = "nvfp4" if config.name.startswith("lightning") else ""
    names = [n.removesuffix("weight") + "input_scale" for n, k in kinds.items() if k not in ("bf16", skip)]
    for layer, kind in enumerate(config.pattern):
        if kind == "*":
            names += [f"backbone.layers.{layer}.mixer.{x}_proj.{x}_scale" for x in "kv"]
    return {name: (i + 1) / 1024 for i, name in enumerate(names)}


def _whole(source: Reads, name: str) -> torch.Tensor:
    tensor = source.tensors[name]
    return as_tensor(source.read(name, whole(tensor.shape)), tensor.dtype)


def _written(folder: Path, source: Reads) -> Path:
    folder.mkdir()
    for plan in to_hf.files(source.tensors, 1 << 20):
        write(plan, source, folder / plan.name, lambda n: None)
    index = to_hf.index(source.tensors, 1 << 20)
    if index:
        (folder / "model.safetensors.index.json").write_bytes(index)
    return folder


# -- which weights -----------------------------------------------------------------------------------


def test_the_super_and_ultra_recipes_are_the_table() -> None:
    for name in ("super", "ultra"):
        config = get(name)
        for weight, kind in formats(config, "nvfp4").items():
            expected = "bf16"
            if weight.startswith("backbone."):
                if ".mixer.experts." in weight:
                    expected = "nvfp4"
                elif ".shared_experts." in weight or weight.endswith(("in_proj.weight", "out_proj.weight")):
                    expected = "fp8"
            assert kind == expected, weight


def test_nano_excludes_what_the_released_file_lists() -> None:
    """hf_quant_config.json of NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4: the head, attention at 5, 12, 19, 26, 33
    and 42, the Mamba projections one layer before each, and every convolution."""
    attention = (5, 12, 19, 26, 33, 42)
    mamba = [i for i, kind in enumerate(get("nano").pattern) if kind == "M"]
    expected = {"lm_head"}
    expected |= {f"backbone.layers.{i}.mixer.{x}_proj" for i in attention for x in "qkvo"}
    expected |= {f"backbone.layers.{i - 1}.mixer.{x}_proj" for i in attention for x in ("in", "out")}
    expected |= {f"backbone.layers.{i}.mixer.conv1d" for i in mamba}
    plan = quantization(get("nano"), "nvfp4", _scales(get("nano"), "nvfp4"))
    details = hf_quant_config(plan, "test")["quantization"]
    assert set(details.pop("exclude_modules")) == expected and len(expected) == 60
    assert details == {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("model", "recipe", "gigabytes", "quantized"),
    [
        ("ultra", "nvfp4", 351.881, {"NVFP4": 49_152, "FP8": 192}),  # published: 352.3 GB
        ("lightning", "nvfp4", 21.544, {"W4A16_NVFP4": 5_935, "FP8": 46}),  # listing of the release: 21.58 GB
        ("super", "nvfp4", 79.010, {"NVFP4": 40_960, "FP8": 160}),
        ("nano", "nvfp4", 19.324, {"NVFP4": 5_968}),
        ("super", "fp8", 128.335, {"FP8": 41_120}),
        ("nano", "fp8", 32.664, {"FP8": 5_968}),
    ],
)
def test_sizes(model: str, recipe: str, gigabytes: float, quantized: dict[str, int]) -> None:
    config = get(model)
    plan = quantization(config, recipe, _scales(config, recipe))
    assert Counter(w.algorithm for w in plan.weights if w.algorithm) == quantized
    assert plan.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.0005)
    assert plan.kv_cache and not plan.kept and not plan.unused
    assert not any(w.algorithm for w in plan.weights if w.tensor.name.startswith("mtp."))


@pytest.mark.parametrize(
    ("model", "recipe"), [("nemotron-h-8b", "nvfp4"), ("ultra", "fp8"), ("super", "int4")]
)
def test_what_nobody_published_is_refused_by_name(model: str, recipe: str) -> None:
    with pytest.raises(ValueError, match=f"no published recipe '{recipe}' of {model} .* super-nvfp4, "):
        formats(get(model), recipe)


def test_another_models_recipe_can_be_taken_by_its_full_name() -> None:
    config = get("super-tiny")
    assert formats(config, "ultra-nvfp4") == formats(config, "nvfp4")
    assert set(formats(get("nemotron-h-8b"), "nano-fp8").values()) == {"fp8", "bf16"}


def test_columns_that_are_no_multiple_of_the_block_are_refused() -> None:
    config = get("super-tiny").but(moe_latent_size=24)
    with pytest.raises(
        ValueError, match="up_proj.weight has 24 columns, no multiple of the NVFP4 block of 16"
    ):
        formats(config, "nvfp4")


# -- scales of activations ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_without_scales_nothing_claims_to_have_some(name: str) -> None:
    config = get(name)
    plan = quantization(config, "nvfp4")
    assert {w.algorithm for w in plan.weights} == {None, "W4A16_NVFP4"}
    assert not any(t.endswith(("input_scale", "k_scale", "v_scale")) for t in plan.tensors)
    assert set(plan.kept) == {n for n, k in formats(config, "nvfp4").items() if k == "fp8"}
    details = hf_quant_config(plan, "test")["quantization"]
    assert details["quant_algo"] == "MIXED_PRECISION" and details["kv_cache_quant_algo"] is None
    assert {layer["quant_algo"] for layer in details["quantized_layers"].values()} == {"W4A16_NVFP4"}
    stated = quantization_config(hf_quant_config(plan, "test"))
    assert "kv_cache_scheme" not in stated and "input_activations" not in stated["config_groups"]["group_0"]


@pytest.mark.parametrize("recipe", [n for n, r in RECIPES.items() if set(r.formats.values()) == {"fp8"}])
def test_fp8_needs_scales(recipe: str) -> None:
    with pytest.raises(
        ValueError, match=r"engines need a scale .* \(\d+, first .*input_scale'\): give --input-s"
    ):
        quantization(get(recipe.split("-")[0] + "-tiny"), "fp8")


def test_scales_are_given_for_all_of_a_format_or_none() -> None:
    config = get("super-tiny")
    scales = _scales(config, "nvfp4")
    expert = next(n for n in scales if ".mixer.experts.3." in n)
    for dropped, count in ((expert, "NVFP4"), ("k_scale", "KV cache"), ("in_proj.input_scale", "FP8")):
        rest = {n: v for n, v in scales.items() if not n.endswith(dropped) or "layers.0." in n}
        if dropped == "k_scale":
            rest = {n: v for n, v in scales.items() if not n.endswith(dropped)}
        with pytest.raises(ValueError, match=f"(?i){count}: .* scales are missing, first"):
            quantization(config, "nvfp4", rest)
    fp8_only = {n: v for n, v in scales.items() if ".mixer.experts." not in n}
    plan = quantization(config, "nvfp4", fp8_only)
    assert {w.algorithm for w in plan.weights} == {None, "W4A16_NVFP4", "FP8"}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_no_positive_numbers_are_refused(value: float) -> None:
    scales = _scales(get("nano-tiny"), "nvfp4")
    name = next(iter(scales))
    with pytest.raises(ValueError, match="no positive number"):
        quantization(get("nano-tiny"), "nvfp4", scales | {name: value})


def test_scales_of_other_modules() -> None:
    config = get("super-tiny")
    scales = _scales(config, "nvfp4")
    plan = quantization(config, "nvfp4", scales | {"lm_head.input_scale": 1.0})
    assert plan.unused == ("lm_head.input_scale",)
    for name in ("backbone.layers.99.mixer.in_proj.input_scale", "lm_head.weight_scale", "x"):
        with pytest.raises(ValueError, match="super-tiny has no such module"):
            quantization(config, "nvfp4", scales | {name: 1.0})


def test_scales_are_read_from_json_a_safetensors_file_and_a_checkpoint(tmp_path: Path) -> None:
    config = get("nano-tiny")
    scales = _scales(config, "nvfp4")
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    save_file({n: torch.tensor(v) for n, v in scales.items()}, tmp_path / "scales.safetensors")
    quantized = Quantized(Memory(_model(config)), quantization(config, "nvfp4", scales))
    folder = _written(tmp_path / "checkpoint", quantized)
    for path in (tmp_path / "scales.json", tmp_path / "scales.safetensors", folder):
        assert read_scales(path) == scales


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds a list"),
        ('{"a.input_scale": "1"}', "expected a number"),
        ('{"a.input_scale": true}', "expected a number"),
        ('{"a.weight": 1}', "ends in input_scale, k_scale, v_scale"),
    ],
)
def test_scale_files_with_something_else_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "scales.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_scales(tmp_path / "scales.json")
    save_file({"a.weight": torch.ones(2)}, tmp_path / "no.safetensors")
    save_file({"a.input_scale": torch.ones(2)}, tmp_path / "two.safetensors")
    for name, found in (("no", "no tensor's name ends in"), ("two", r"float32 \[2\], expected one float32")):
        with pytest.raises(CheckpointError, match=found):
            read_scales(tmp_path / f"{name}.safetensors")


# -- the files ---------------------------------------------------------------------------------------


def _contract(plan: Quantization, stated: dict[str, Any], stored: Mapping[str, torch.Tensor]) -> None:
    """What vLLM's ModelOpt loaders allocate for a module (out, in), by the algorithm they find for it."""
    details = stated["quantization"]
    left = set(stored)
    for weight in plan.weights:
        module, shape = weight.module, weight.tensor.shape
        if "quantized_layers" in details:
            algorithm = details["quantized_layers"].get(module, {}).get("quant_algo")
        else:
            mtp = module.startswith("mtp.") and ".".join(module.split(".")[:3]) + "*"
            excluded = {module, mtp} & set(details["exclude_modules"])
            linear = weight.tensor.name.endswith(".weight") and module.endswith(("_proj", "lm_head"))
            algorithm = details["quant_algo"] if linear and not excluded else None
        scalar = ((), torch.float32)
        expected = {
            None: {},
            "FP8": {
                "weight": (shape, torch.float8_e4m3fn),
                "weight_scale": scalar,
                "input_scale": scalar,
            },
            "W4A16_NVFP4": {
                "weight": ((shape[0], shape[-1] // 2), torch.uint8),
                "weight_scale": ((shape[0], shape[-1] // 16), torch.float8_e4m3fn),
                "weight_scale_2": scalar,
            },
        }
        expected["NVFP4"] = expected["W4A16_NVFP4"] | {"input_scale": scalar}
        for part, (size, kind) in expected[algorithm].items():
            tensor = stored[f"{module}.{part}"]
            assert (tuple(tensor.shape), tensor.dtype) == (size, kind), f"{module}.{part}"
            left.discard(f"{module}.{part}")
        if algorithm is None:
            assert tuple(stored[weight.tensor.name].shape) == shape
            left.discard(weight.tensor.name)
    attention = {n for n in left if n.endswith(("k_proj.k_scale", "v_proj.v_scale"))}
    assert left == attention and bool(attention) == (details["kv_cache_quant_algo"] == "FP8")


@pytest.mark.parametrize("with_scales", [True, False])
@pytest.mark.parametrize("name", TINY)
def test_written_and_read_back(tmp_path: Path, name: str, with_scales: bool) -> None:
    config = get(name)
    model = _model(config)
    scales = _scales(config, "nvfp4") if with_scales else {}
    plan = quantization(config, "nvfp4", scales)
    folder = _written(tmp_path / "checkpoint", Quantized(Memory(model), plan))
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    assert sum(t.numel() * t.element_size() for t in stored.values()) == plan.nbytes
    stated = hf_quant_config(plan, "test 1")
    _contract(plan, stated, stored)
    for scale, value in scales.items():
        assert stored[scale] == value
    # The values are those of the numerics, and close to the model.
    source = Dequantized(open_hf(folder))
    assert set(source.left_behind) == set(scales)
    for about in (stated, quantization_config(stated)):
        source.check(about)
    inventory.check_hf(config, {n: t.shape for n, t in source.tensors.items()})
    for weight in plan.weights:
        values, original = _whole(source, weight.tensor.name), model[weight.tensor.name]
        if weight.algorithm is None:
            assert torch.equal(values, original) and values.dtype == original.dtype
        else:
            if weight.algorithm == "FP8":
                s = fp8.tensor_scale(fp8.amax(original))
                expected = fp8.dequantize(fp8.quantize(original, s), s)
            else:
                s = nvfp4.tensor_scale(nvfp4.amax(original))
                expected = nvfp4.dequantize(*nvfp4.quantize(original, s), s)
            assert torch.equal(values, expected) and values.dtype == torch.bfloat16
            error = ((values.float() - original.float()).norm() / original.float().norm()).item()
            assert error < (0.03 if weight.algorithm == "FP8" else 0.11)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_slice_is_the_slice_of_the_whole(data: st.DataObject) -> None:
    config = get("super-tiny")
    plan = quantization(config, "nvfp4", _SCALES)
    quantized = Quantized(_SOURCE, plan)
    name = data.draw(st.sampled_from([t for t in _PICK if t in quantized.tensors]))
    back = Dequantized(quantized)
    for source in (quantized, back):
        if name not in source.tensors:
            continue
        full = source.read(name, whole(source.tensors[name].shape))
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in full.shape]
        slices = tuple((a, b) for a, b in bounds)
        some = source.read(name, slices)
        assert some.dtype == full.dtype
        assert numpy.array_equal(some, full[tuple(slice(*s) for s in slices)])


_SCALES = _scales(get("super-tiny"), "nvfp4")
_SOURCE = Memory(_model(get("super-tiny")))
_PICK = [
    f"backbone.layers.1.mixer.experts.2.down_proj.{part}"
    for part in ("weight", "weight_scale", "weight_scale_2")
] + [f"backbone.layers.0.mixer.in_proj.{part}" for part in ("weight", "weight_scale", "input_scale")]


def test_float32_masters_can_be_quantized_directly() -> None:
    config = get("nano-tiny")
    model = _model(config, torch.float32)
    quantized = Quantized(Memory(model), quantization(config, "nvfp4"))
    name = "backbone.layers.1.mixer.experts.0.up_proj.weight"
    s = nvfp4.tensor_scale(nvfp4.amax(model[name]))
    assert torch.equal(_whole(quantized, name), nvfp4.quantize(model[name], s)[0])
    assert quantized.tensors["lm_head.weight"].dtype == "float32"


class Made(Reads):
    """One weight of any size, its elements made when they are read; remembers the largest read."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.folder, self.files, self.largest, self.total = Path("made"), {}, 0, 0
        self.tensors = {name: SourceTensor("bfloat16", shape)}

    def read(self, name: str, slices: Any) -> numpy.ndarray:
        (top, bottom), (left, right) = slices
        rows, columns = numpy.ogrid[top:bottom, left:right]
        result = ((rows * 31 + columns * 7) % 977 + 0x3A00).astype("u2")
        self.largest, self.total = max(self.largest, result.nbytes), self.total + result.nbytes
        return result


@pytest.mark.parametrize(
    ("shape", "algorithm", "largest", "passes"),
    [((5120, 2048), "NVFP4", 5120 * 2048 * 2, 1), ((6000, 8192), "FP8", 1 << 23, 2)],
)
def test_weights_are_read_in_bands_small_ones_once(shape, algorithm, largest, passes) -> None:
    name = "backbone.layers.1.mixer.experts.0.up_proj.weight"
    source = Made(name, shape)
    from megatron_nemotron3.convert.inventory import Tensor
    from megatron_nemotron3.convert.quantized_export import Weight

    weight = Weight(Tensor(name, shape, "bfloat16"), algorithm)
    quantized = Quantized(source, Quantization("super-nvfp4", (weight,), False))
    made = 0
    for plan in to_hf.files(quantized.tensors):
        from megatron_nemotron3.convert.streams import content

        made += sum(len(block) for block in content(plan, quantized))
        made -= len(plan.parts[0].head)
    assert made == sum(t.nbytes for t in quantized.tensors.values())
    assert source.largest <= largest and source.total == passes * prod(shape) * 2


def test_a_weight_with_nan_is_named() -> None:
    config = get("nano-tiny")
    model = _model(config)
    name = "backbone.layers.1.mixer.experts.5.down_proj.weight"
    model[name][3, 4] = float("nan")
    quantized = Quantized(Memory(model), quantization(config, "nvfp4"))
    with pytest.raises(CheckpointError, match=f"memory: {name}: the tensor holds infinity or NaN"):
        quantized.read(name, whole(quantized.tensors[name].shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("lm_head.weight"), "lm_head.weight is missing, expected"),
        (lambda m: m.update({"lm_head.weight": torch.ones(3, 4)}), r"has shape \[3, 4\], expected \["),
        (
            lambda m: m.update(
                {n: m[n].to(torch.float64) for n in m if n.endswith("experts.0.up_proj.weight")}
            ),
            "is float64: it cannot be quantized",
        ),
    ],
)
def test_a_source_that_is_not_the_model_is_refused(change, message: str) -> None:
    config = get("nano-tiny")
    model = _model(config)
    change(model)
    with pytest.raises(CheckpointError, match=message):
        Quantized(Memory(model), quantization(config, "nvfp4"))


# -- what other programs make and read ---------------------------------------------------------------


def test_config_json_is_read_without_what_it_says_of_quantization() -> None:
    config = get("super")
    plain = config_json.write(config)
    plan = quantization(get("super-tiny"), "nvfp4")
    data = plain | {"quantization_config": quantization_config(hf_quant_config(plan, "test"))}
    with pytest.raises(ValueError, match="quantization_config"):
        config_json.read(data, name="super", base=config)
    assert plain_config(data) == plain
    assert config_json.read(plain_config(data), name="super", base=config) == config


CONFIGS = """
import json, sys
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import process_layer_quant_config
stated, formats = json.load(sys.stdin)
mirrored = convert_hf_quant_config_format(stated)
layers = process_layer_quant_config(formats)
print(json.dumps([mirrored, layers]))
"""


@pytest.mark.parametrize("name", TINY)
def test_configurations_are_modelopts(name: str) -> None:
    site = os.environ.get("MODELOPT_SITE")
    if not site:
        pytest.skip("MODELOPT_SITE names no folder with nvidia-modelopt")
    plan = quantization(get(name), "nvfp4", _scales(get(name), "nvfp4"))
    stated = hf_quant_config(plan, "test")
    kinds: dict[str, Any] = {}
    for weight in plan.weights:
        if weight.algorithm:
            kinds[f"{weight.module}.quantization"] = weight.algorithm.lower()
            kinds[f"{weight.module}.awq_block_size"] = 16
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CONFIGS],
        input=json.dumps([stated, kinds]),
        env=os.environ | {"PYTHONPATH": site},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    mirrored, layers = json.loads(out.splitlines()[-1])
    assert quantization_config(stated) == mirrored
    details = stated["quantization"]
    assert details["quant_algo"] == layers["quant_algo"]
    assert details.get("quantized_layers", {}) == layers.get("quantized_layers", {})


def _compressed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ModelOpt's tensors of a model as compressed-tensors names and scales them."""
    result = dict(tensors)
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part == "weight_scale_2":
            result[f"{module}.weight_packed"] = result.pop(f"{module}.weight")
            result[f"{module}.weight_global_scale"] = 1 / result.pop(name).reshape(1)
        elif part == "input_scale" and f"{module}.weight_scale_2" in tensors:
            result[f"{module}.input_global_scale"] = 1 / result.pop(name)
        elif part == "weight_scale" and f"{module}.weight_scale_2" not in tensors:
            rows = tensors[f"{module}.weight"].shape[0]
            result[name] = tensors[name].to(torch.bfloat16).expand(rows, 1).contiguous()
    return result


def test_compressed_tensors_layouts_are_read() -> None:
    config = get("super-tiny")
    quantized = Quantized(Memory(_model(config)), quantization(config, "nvfp4", _SCALES))
    tensors = {n: _whole(quantized, n) for n in quantized.tensors}
    theirs = Dequantized(Memory(_compressed(tensors)))
    ours = Dequantized(Memory(tensors))
    assert theirs.tensors.keys() == ours.tensors.keys() and theirs.formats == ours.formats
    assert all("scale" in name for name in theirs.left_behind)
    for name in ours.tensors:
        a, b = _whole(theirs, name).float(), _whole(ours, name).float()
        # FP8 scales are bfloat16 here, and the reciprocal of a reciprocal may be off in the last bit.
        assert bool(((a - b).abs() <= 2**-7 * b.abs()).all()), name


COMPRESSED = """
import sys, torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4
from safetensors.torch import load_file, save_file
tensors = load_file(sys.argv[1])
scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
save_file({"weight": NVFP4PackedCompressor.decompress(tensors, scheme)["weight"].contiguous()}, sys.argv[2])
"""


def test_compressed_tensors_own_reader_agrees(tmp_path: Path) -> None:
    site = os.environ.get("COMPRESSED_TENSORS_SITE")
    if not site:
        pytest.skip("COMPRESSED_TENSORS_SITE names no folder with compressed-tensors")
    config = get("super-tiny")
    quantized = Quantized(Memory(_model(config)), quantization(config, "nvfp4"))
    module = "backbone.layers.1.mixer.experts.0.up_proj"
    tensors = {
        f"{module}.{p}": _whole(quantized, f"{module}.{p}")
        for p in ("weight", "weight_scale", "weight_scale_2")
    }
    packed = _compressed(tensors)
    save_file({n.removeprefix(module + "."): t for n, t in packed.items()}, tmp_path / "in.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", COMPRESSED]
    command += [str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": site}, check=True)
    theirs = load_file(tmp_path / "out.safetensors")["weight"].float()
    ours = _whole(Dequantized(Memory(packed)), f"{module}.weight").float()
    assert bool(((theirs - ours).abs() <= 2**-7 * ours.abs()).all())  # it multiplies in bfloat16


# -- damaged checkpoints -----------------------------------------------------------------------------

X = "backbone.layers.0.mixer.in_proj"


def _tensors(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "fp8":
        return {
            f"{X}.weight": torch.randn(8, 32).to(torch.float8_e4m3fn),
            f"{X}.weight_scale": torch.tensor(0.1),
        }
    parts = {"codes": "weight", "scale_2": "weight_scale_2"}
    if kind == "compressed":
        parts = {"codes": "weight_packed", "scale_2": "weight_global_scale"}
    return {
        f"{X}.{parts['codes']}": torch.randint(0, 256, (8, 16), dtype=torch.uint8),
        f"{X}.weight_scale": torch.rand(8, 2).to(torch.float8_e4m3fn),
        f"{X}.{parts['scale_2']}": torch.tensor(0.1),
    }


DAMAGE = [
    ("nvfp4", "weight_scale", None, "there is no .*weight_scale"),
    ("nvfp4", "weight_scale", torch.ones(8, 3).to(torch.float8_e4m3fn), r"expected float8_e4m3fn \[8, 2\]"),
    ("nvfp4", "weight_scale", torch.ones(8, 2), r"is float32 \[8, 2\]: expected float8_e4m3fn"),
    (
        "nvfp4",
        "weight_scale",
        torch.full((8, 2), float("nan")).to(torch.float8_e4m3fn),
        "holds NaN or a negative",
    ),
    ("nvfp4", "weight_scale", (-torch.ones(8, 2)).to(torch.float8_e4m3fn), "holds NaN or a negative"),
    ("nvfp4", "weight_scale_2", None, "weight_scale_2 is missing"),
    ("nvfp4", "weight_scale_2", torch.ones(2), r"weight_scale_2 has shape \[2\]"),
    ("nvfp4", "weight_scale_2", torch.tensor(0.0), "is 0.0, expected a number above 0"),
    ("nvfp4", "weight_scale_2", torch.tensor(float("nan")), "is nan, expected a number above 0"),
    ("nvfp4", "weight_scale_2", torch.tensor(1, dtype=torch.int32), "is int32"),
    ("nvfp4", "weight", torch.zeros(8, 15, dtype=torch.uint8), "one for 16 of the 30 columns"),
    ("nvfp4", "weight", torch.zeros(8, dtype=torch.uint8), r"uint8 \[8\], unknown"),
    ("nvfp4", "weight", torch.ones(8, 32, dtype=torch.bfloat16), "is a scale of no quantized weight"),
    ("compressed", "weight_global_scale", torch.tensor(0.0), "is 0.0, expected a number above 0"),
    ("compressed", "weight_global_scale", None, "weight_global_scale is missing"),
    ("compressed", "weight_packed", torch.ones(8, 16), r"float32 \[8, 16\], unknown"),
    ("compressed", "weight", torch.ones(8, 32), "are the same weight"),
    ("compressed", "weight_zero_point", torch.ones(8, 2), "this layout are not read"),
    ("fp8", "weight_scale", None, "there is no .*weight_scale"),
    ("fp8", "weight_scale", torch.ones(2, 2), "scales for blocks are not read"),
    ("fp8", "weight_scale", torch.tensor(float("inf")), "is inf, expected a number above 0"),
    ("fp8", "weight_scale", torch.tensor([1.0, 2, 0, 1, 1, 1, 1, 1]), "holds a scale not above 0"),
    ("fp8", "weight", torch.full((8, 32), float("nan")).to(torch.float8_e4m3fn), "holds NaN"),
    ("fp8", "weight_scale_2", torch.tensor(1.0), "is a scale of no quantized weight"),
    ("fp8", "pre_quant_scale", torch.ones(32), "this layout are not read"),
]


@pytest.mark.parametrize(
    ("kind", "part", "value", "message"), DAMAGE, ids=lambda v: v if isinstance(v, str) else ""
)
def test_damaged_weights_are_refused_by_name(kind: str, part: str, value: Any, message: str) -> None:
    tensors = _tensors(kind)
    assert _whole(Dequantized(Memory(tensors)), f"{X}.weight").shape == (8, 32)
    tensors.pop(f"{X}.{part}", None)
    if value is not None:
        tensors[f"{X}.{part}"] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        source = Dequantized(Memory(tensors))
        source.read(f"{X}.weight", ((0, 8), (0, 32)))
    assert X in str(caught.value)


def test_configurations_that_say_something_else_are_refused() -> None:
    source = Dequantized(Memory(_tensors("fp8")))
    fp4 = {
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {X: {"quant_algo": "NVFP4"}}}
    }
    other = {"quantized_layers": {X: {"quant_algo": "FP8"}, "lm_head": {"quant_algo": "FP8"}}}
    for stated, message in (
        (fp4, f"{X} is stored as fp8, the configuration lists NVFP4"),
        (other, "lm_head is stored as a plain weight, the configuration lists FP8"),
        ({"quantized_layers": {X: 3}}, "the configuration lists none"),
        ({"quant_algo": "FP8", "ignore": ["backbone.layers.0.*"]}, "excludes 'backbone.layers.0.\\*'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            source.check(stated)
    source.check({"quantized_layers": {X: {"quant_algo": "FP8"}}})
    source.check({"quant_algo": "FP8", "ignore": ["lm_head", 3]})


def test_importing_costs_the_standard_library() -> None:
    code = (
        "import sys; from megatron_nemotron3.convert import quantized_config, quantized_export, "
        "quantized_import, quantized_recipes; "
        "print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
