"""Quantized checkpoints: which weights are quantized, their tensors, bytes and files."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_nemotron3.checkpoints.convert import inventory, to_hf
from megatron_nemotron3.checkpoints.convert.hf_folder import open_hf
from megatron_nemotron3.checkpoints.convert.plan import Slices, whole
from megatron_nemotron3.checkpoints.convert.quantized import (
    Quantization,
    formats,
    hf_quant_config,
    quantization,
    quantization_config,
    quantized_lines,
    read_scales,
)
from megatron_nemotron3.checkpoints.convert.quantized_views import Dequantized, Quantized
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource, raw
from megatron_nemotron3.checkpoints.convert.streams import OutputFile, write_parts
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.models import get
from megatron_nemotron3.precision.numerics import fp8, nvfp4
from megatron_nemotron3.precision.serving import RECIPES
from tests.support.quantized_models import Memory, all_scales, random_model, written

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
    plan = quantization(get("nano"), "nvfp4", all_scales(get("nano"), "nvfp4"))
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
    plan = quantization(config, recipe, all_scales(config, recipe))
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
        ValueError, match="up_proj.weight has 24 columns, not a multiple of the NVFP4 block of 16"
    ):
        formats(config, "nvfp4")


# -- scales of activations ---------------------------------------------------------------------------


def test_without_scales_nothing_claims_to_have_some() -> None:
    config = get("super-tiny")
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
    scales = all_scales(config, "nvfp4")
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


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_scales_that_are_no_positive_numbers_are_refused(value: float) -> None:
    scales = all_scales(get("nano-tiny"), "nvfp4")
    name = next(iter(scales))
    with pytest.raises(ValueError, match="not a positive number"):
        quantization(get("nano-tiny"), "nvfp4", scales | {name: value})


def test_scales_of_other_modules() -> None:
    config = get("super-tiny")
    scales = all_scales(config, "nvfp4")
    plan = quantization(config, "nvfp4", scales | {"lm_head.input_scale": 1.0})
    assert plan.unused == ("lm_head.input_scale",)
    for name in ("backbone.layers.99.mixer.in_proj.input_scale", "lm_head.weight_scale", "x"):
        with pytest.raises(ValueError, match="super-tiny has no such module"):
            quantization(config, "nvfp4", scales | {name: 1.0})


def test_scales_are_read_from_json_a_safetensors_file_and_a_checkpoint(tmp_path: Path) -> None:
    config = get("nano-tiny")
    scales = all_scales(config, "nvfp4")
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    save_file({n: torch.tensor(v) for n, v in scales.items()}, tmp_path / "scales.safetensors")
    quantized = Quantized(Memory(random_model(config)), quantization(config, "nvfp4", scales))
    folder = written(tmp_path / "checkpoint", quantized)
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
    for name, found in (
        ("no", "no tensor has a name that ends in"),
        ("two", r"float32 \[2\], expected one float32"),
    ):
        with pytest.raises(CheckpointError, match=found):
            read_scales(tmp_path / f"{name}.safetensors")


# -- the files ---------------------------------------------------------------------------------------


def _contract(plan: Quantization, stated: dict[str, Any], stored: Mapping[str, torch.Tensor]) -> None:
    """Return what vLLM's ModelOpt loaders allocate for a module (out, in) with an algorithm."""
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


@pytest.mark.parametrize(
    ("name", "recipe", "with_scales"),
    [
        ("super-tiny", "nvfp4", True),
        pytest.param("super-tiny", "nvfp4-mse", True, marks=pytest.mark.full),
        ("nano-tiny", "nvfp4", True),
        ("lightning-tiny", "nvfp4", True),
        ("super-tiny", "nvfp4", False),
    ],
)
def test_written_and_read_back(tmp_path: Path, name: str, recipe: str, with_scales: bool) -> None:
    config = get(name)
    model = random_model(config)
    scales = all_scales(config, recipe) if with_scales else {}
    plan = quantization(config, recipe, scales)
    folder = written(tmp_path / "checkpoint", Quantized(Memory(model), plan))
    assert ("NVFP4 scales by error" in "".join(quantized_lines(plan))) == any(w.search for w in plan.weights)
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
    assert set(source.activation_scales) == set(scales)
    for about in (stated, quantization_config(stated)):
        source.check(about)
    inventory.check_hf(config, {n: t.shape for n, t in source.tensors.items()})
    for weight in plan.weights:
        values, original = source.read(weight.tensor.name), model[weight.tensor.name]
        if weight.algorithm is None:
            assert torch.equal(values, original) and values.dtype == original.dtype
        else:
            if weight.algorithm == "FP8":
                amax = nvfp4.amax(original)
                if name == "lightning-tiny":  # all scales are tried of NVFP4 weights alone
                    amax = fp8.of_smaller_error(amax, fp8.squared_errors(original, amax), original.dtype)
                s = nvfp4.tensor_scale(amax, 448)
                expected = fp8.dequantize(fp8.quantize(original, s), s)
            else:
                amax = nvfp4.amax(original)
                s = nvfp4.tensor_scale(amax, nvfp4.LARGEST[weight.search])
                expected = nvfp4.dequantize(*nvfp4.quantize(original, amax, weight.search), s)
            assert torch.equal(values, expected) and values.dtype == torch.bfloat16
            error = ((values.float() - original.float()).norm() / original.float().norm()).item()
            assert error < (0.03 if weight.algorithm == "FP8" else 0.11)


@settings(max_examples=30)
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
        full = source.read(name)
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in full.shape]
        slices = tuple((a, b) for a, b in bounds)
        some = source.read(name, slices)
        assert some.dtype == full.dtype
        assert torch.equal(raw(some), raw(full)[tuple(slice(*s) for s in slices)])


_SCALES = all_scales(get("super-tiny"), "nvfp4")
_SOURCE = Memory(random_model(get("super-tiny")))
_PICK = [
    f"backbone.layers.1.mixer.experts.2.down_proj.{part}"
    for part in ("weight", "weight_scale", "weight_scale_2")
] + [f"backbone.layers.0.mixer.in_proj.{part}" for part in ("weight", "weight_scale", "input_scale")]


def test_float32_masters_can_be_quantized_directly() -> None:
    config = get("nano-tiny")
    model = random_model(config, torch.float32)
    quantized = Quantized(Memory(model), quantization(config, "nvfp4"))
    name = "backbone.layers.1.mixer.experts.0.up_proj.weight"
    assert torch.equal(quantized.read(name), nvfp4.quantize(model[name], nvfp4.amax(model[name]))[0])
    assert quantized.tensors["lm_head.weight"].dtype == "float32"


class Made(TensorSource):
    """One weight of any size, whose elements are made when read; records the largest read."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.folder, self.files, self.largest, self.total = Path("made"), {}, 0, 0
        self.tensors = {name: SourceTensor("bfloat16", shape)}

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        (top, bottom), (left, right) = slices or whole(self.tensors[name].shape)
        rows, columns = torch.arange(top, bottom)[:, None], torch.arange(left, right)
        result = ((rows * 31 + columns * 7) % 977 + 0x3A00).to(torch.int16).view(torch.bfloat16)
        self.largest, self.total = max(self.largest, result.nbytes), self.total + result.nbytes
        return result


@pytest.mark.parametrize(
    ("shape", "algorithm", "largest", "passes"),
    [((5120, 2048), "NVFP4", 5120 * 2048 * 2, 1), ((6000, 8192), "FP8", 1 << 23, 2)],
)
def test_weights_are_read_in_bands_small_ones_once(shape, algorithm, largest, passes) -> None:
    name = "backbone.layers.1.mixer.experts.0.up_proj.weight"
    source = Made(name, shape)
    from megatron_nemotron3.checkpoints.convert.inventory import Tensor
    from megatron_nemotron3.checkpoints.convert.quantized import Weight

    weight = Weight(Tensor(name, shape, "bfloat16"), algorithm)
    quantized = Quantized(source, Quantization("super-nvfp4", (weight,), False))
    made = 0
    for plan in to_hf.files(quantized.tensors):
        with OutputFile(io.BytesIO()) as out:
            made += write_parts(plan, quantized, out)["bytes"] - len(plan.parts[0].data)
    assert made == sum(t.nbytes for t in quantized.tensors.values())
    assert source.largest <= largest and source.total == passes * prod(shape) * 2


def test_a_weight_with_nan_is_named() -> None:
    config = get("nano-tiny")
    model = random_model(config)
    name = "backbone.layers.1.mixer.experts.5.down_proj.weight"
    model[name][3, 4] = float("nan")
    quantized = Quantized(Memory(model), quantization(config, "nvfp4"))
    with pytest.raises(CheckpointError, match=f"memory: {name}: the tensor holds infinity or NaN"):
        quantized.read(name)


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
    model = random_model(config)
    change(model)
    with pytest.raises(CheckpointError, match=message):
        Quantized(Memory(model), quantization(config, "nvfp4"))
