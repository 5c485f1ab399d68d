"""Reading quantized checkpoints of other programs, and damaged ones."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.quantized import (
    hf_quant_config,
    quantization,
    quantization_config,
)
from megatron_nemotron3.checkpoints.convert.quantized_views import Dequantized, Quantized
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.models import get
from tests.support.quantized_models import TINY, Memory, all_scales, random_model, written

SCALES = all_scales(get("super-tiny"), "nvfp4")


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
    plan = quantization(get(name), "nvfp4", all_scales(get(name), "nvfp4"))
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
    """Rename and rescale ModelOpt's tensors to the layout of compressed-tensors."""
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
    quantized = Quantized(Memory(random_model(config)), quantization(config, "nvfp4", SCALES))
    tensors = {n: quantized.read(n) for n in quantized.tensors}
    theirs = Dequantized(Memory(_compressed(tensors)))
    ours = Dequantized(Memory(tensors))
    assert theirs.tensors.keys() == ours.tensors.keys() and theirs.formats == ours.formats
    assert all("scale" in name for name in theirs.activation_scales)
    for name in ours.tensors:
        a, b = theirs.read(name).float(), ours.read(name).float()
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
    quantized = Quantized(Memory(random_model(config)), quantization(config, "nvfp4"))
    module = "backbone.layers.1.mixer.experts.0.up_proj"
    tensors = {
        f"{module}.{p}": quantized.read(f"{module}.{p}") for p in ("weight", "weight_scale", "weight_scale_2")
    }
    packed = _compressed(tensors)
    save_file({n.removeprefix(module + "."): t for n, t in packed.items()}, tmp_path / "in.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", COMPRESSED]
    command += [str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": site}, check=True)
    theirs = load_file(tmp_path / "out.safetensors")["weight"].float()
    ours = Dequantized(Memory(packed)).read(f"{module}.weight").float()
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
    ("nvfp4", "weight_scale", None, "weight_scale is missing"),
    ("nvfp4", "weight_scale", torch.ones(8, 3).to(torch.float8_e4m3fn), r"expected float8_e4m3fn \[8, 2\]"),
    (
        "nvfp4",
        "weight_scale",
        torch.full((8, 2), float("nan")).to(torch.float8_e4m3fn),
        "holds NaN or a negative",
    ),
    ("nvfp4", "weight_scale_2", None, "weight_scale_2 is missing"),
    ("nvfp4", "weight_scale_2", torch.ones(2), r"weight_scale_2 has shape \[2\]"),
    ("nvfp4", "weight_scale_2", torch.tensor(0.0), "is 0.0, expected a number above 0"),
    ("nvfp4", "weight", torch.zeros(8, 15, dtype=torch.uint8), "one for 16 of the 30 columns"),
    ("nvfp4", "weight", torch.ones(8, 32, dtype=torch.bfloat16), "its weight is not quantized"),
    ("compressed", "weight_global_scale", torch.tensor(0.0), "is 0.0, expected a number above 0"),
    ("compressed", "weight", torch.ones(8, 32), "are the same weight"),
    ("compressed", "weight_zero_point", torch.ones(8, 2), "this layout is not read"),
    ("fp8", "weight_scale", None, "weight_scale is missing"),
    ("fp8", "weight_scale", torch.ones(2, 2), "block scales are not read"),
    ("fp8", "weight_scale", torch.tensor([1.0, 2, 0, 1, 1, 1, 1, 1]), "holds a scale not above 0"),
    ("fp8", "weight", torch.full((8, 32), float("nan")).to(torch.float8_e4m3fn), "holds NaN"),
]


@pytest.mark.parametrize(
    ("kind", "part", "value", "message"), DAMAGE, ids=lambda v: v if isinstance(v, str) else ""
)
def test_damaged_weights_are_refused_by_name(kind: str, part: str, value: Any, message: str) -> None:
    tensors = _tensors(kind)
    assert Dequantized(Memory(tensors)).read(f"{X}.weight").shape == (8, 32)
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


def test_a_release_that_states_its_quantization_in_hf_quant_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the public Nano NVFP4: ModelOpt 0.29 wrote nothing into config.json. Values by the table of E2M1."""
    config = get("nano-tiny")
    plan = quantization(config, "nvfp4", all_scales(config, "nvfp4"))
    folder = written(tmp_path / "hf", Quantized(Memory(random_model(config)), plan))
    (folder / "config.json").write_text(json.dumps(config_json.write(config)))
    excluded = hf_quant_config(plan, "test")["quantization"]["exclude_modules"]
    stated = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": excluded,
        },
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))
    assert cli.main(["convert", "from-hf", str(folder), str(tmp_path / "no")]) == 2
    assert "its weights are quantized: --dequantize reads them as BF16" in capsys.readouterr().err
    assert cli.main(["check", str(folder)]) == 0
    assert cli.main(["convert", "from-hf", str(folder), str(tmp_path / "m"), "--dequantize"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.endswith(" --dequantize")
    assert cli.main(shlex.split(line.removeprefix("next         nemotron3 "))) == 0
    # Quantized weights of a reference say nothing of those that are written.
    words = ["convert", "to-hf", str(tmp_path / "m"), str(tmp_path / "back"), "--reference", str(folder)]
    assert cli.main(words) == 0
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    found = {k: v for file in (tmp_path / "back").glob("*.safetensors") for k, v in load_file(file).items()}
    module = "backbone.layers.1.mixer.experts.3.up_proj"
    codes = stored[f"{module}.weight"].long()
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.where(codes < 8, 1, -1) * table[codes % 8]
    scales = stored[f"{module}.weight_scale"].float() * stored[f"{module}.weight_scale_2"]
    assert found[f"{module}.weight"].equal((values * scales.repeat_interleave(16, 1)).bfloat16())
    # What it excludes and is packed, or what is packed and not stated at all, is an error of its own.
    stated["quantization"]["exclude_modules"].append(module)
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))
    capsys.readouterr()
    assert cli.main(["check", str(folder)]) == 2
    assert f"the configuration excludes '{module}' from quantization" in capsys.readouterr().err
    (folder / "hf_quant_config.json").unlink()
    words = ["convert", "from-hf", str(folder), str(tmp_path / "no"), "--dequantize"]
    assert cli.main(words) == 2
    assert "and there is no hf_quant_config.json" in capsys.readouterr().err
