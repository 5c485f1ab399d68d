"""Record what SGLang's own loaders make of a packed refit's stream: writes engine_packed.json beside itself.

    pip install --no-deps sglang==0.5.23        # and what its import asks for; no kernels are needed
    python tests/golden/make_engine_packed.py [CASE ...]

Runs on a CPU, one process for each case. The engine reads the model's config.json and hf_quant_config.json,
builds its quantized model, and loads the stream before it rearranges weights for a kernel. Every parameter is
filled with bytes 0x7f before, so that those that the stream does not write are known.

Per case (model, recipe, whether scales of activations are given): the parameters by name with type, shape and
CRC-32 of the bytes, null where the stream has not written it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.quantized import (
    hf_quant_config,
    quantization,
    quantization_config,
)
from megatron_nemotron3.inference.refit.execute import Refit
from tests.golden.make_engine_parameters import crc, numbers
from tests.support.quantized_models import all_scales
from tests.support.refit_packed import packing_plan
from tests.support.refit_reference import trained

FILE = Path(__file__).with_name("engine_packed.json")
#: Model, recipe, and whether scales of activations are given.
CASES = (
    ("nano-tiny", "fp8", True),
    ("super-tiny", "fp8-blockwise", False),
    ("super-tiny", "nvfp4", True),
    ("nano-tiny", "nvfp4", False),
)


def key(case: tuple[str, str, bool]) -> str:
    """Name of a case."""
    return f"{case[0]} {case[1]}" + " scaled" * case[2]


def settings(plan: Any, scaled: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`quantization_config` of config.json, and hf_quant_config.json, which only ModelOpt's forms have."""
    config, recipe = plan.training.config, plan.serving.quantize
    if recipe.endswith("-blockwise"):
        plain = [n.removesuffix(".weight") for n in numbers(config) if n not in plan.serving.packed]
        blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return {"quant_method": "fp8", **blocks, "modules_to_not_convert": plain}, None
    quantized = quantization(config, recipe, all_scales(config, recipe) if scaled else None)
    found = hf_quant_config(quantized, "tests")
    return quantization_config(found), found


def record(case: tuple[str, str, bool]) -> dict[str, Any]:
    """What the engine's parameters hold after the stream."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.weight_utils import get_quant_config
    from sglang.srt.models.nemotron_h import NemotronHForCausalLM, logger
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    name, recipe, scaled = case
    plan = packing_plan((name, "", recipe, scaled, {}))
    config = plan.training.config

    def unknown(line: Any) -> bool:
        if "not found in params_dict" in line.getMessage():
            raise ValueError(line.getMessage())
        return True

    logger.addFilter(unknown)
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"
    with tempfile.TemporaryDirectory() as folder:
        in_config, own_file = settings(plan, scaled)
        written = config_json.write(config) | {"quantization_config": in_config}
        (Path(folder) / "config.json").write_text(json.dumps(written))
        if own_file is not None:
            (Path(folder) / "hf_quant_config.json").write_text(json.dumps(own_file))
        options = ServerArgs(
            model_path=folder,
            device="cpu",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            # NVFP4's experts are of Blackwell, or of this backend.
            moe_runner_backend="marlin" if "nvfp4" in recipe else "triton",
        )
        place = spawn_world_rank(options, tp_rank=0, pp_rank=0)
        publish(options, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=place, gpu_id=0))
        initialize_moe_config()
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(backend="gloo")
        initialize_dp_attention(options)
        torch.set_default_dtype(torch.bfloat16)
        how = ModelConfig(model_path=folder, dtype="bfloat16")
        fused = getattr(NemotronHForCausalLM, "packed_modules_mapping", {})
        quant = get_quant_config(
            how, LoadConfig(), fused, getattr(NemotronHForCausalLM, "remap_prefix", None)
        )
        if (mapper := getattr(NemotronHForCausalLM, "hf_to_sglang_mapper", None)) is not None:
            quant.apply_weight_name_mapper(mapper)
        model = NemotronHForCausalLM(config=how.hf_config, quant_config=quant)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.view(-1).view(torch.uint8).fill_(0x7F)
        model.load_weights(Refit(plan).stream(trained(config, plan.training.layout, 0, numbers(config))))
    found = {}
    for own, parameter in parameters.items():
        bits = parameter.detach().reshape(-1).view(torch.uint8)
        kind = str(parameter.dtype).removeprefix("torch.")
        found[own] = (
            kind,
            list(parameter.shape),
            None if bool((bits == 0x7F).all()) else crc(own, parameter.view(-1)),
        )
    return found


def main(only: list[str]) -> None:
    """Record every case, or only some; keep the others of the file, which is written after each."""
    known = json.loads(FILE.read_text())["cases"] if FILE.exists() else {}
    version = json.dumps(f"sglang {metadata.version('sglang')}")
    for case in (key(case) for case in CASES):
        if only and case not in only:
            continue
        command = [sys.executable, __file__, "--one", case]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        known[case] = json.loads(out.stdout.splitlines()[-1])
        print(f"{case}: {len(known[case])} parameters", flush=True)
        blocks = []
        for one, parameters in known.items():
            lines = (f"{json.dumps(name)}: {json.dumps(how)}" for name, how in parameters.items())
            blocks.append(f"{json.dumps(one)}: {{\n" + ",\n".join(lines) + "\n}")
        FILE.write_text(f'{{"version": {version}, "cases": {{\n' + ",\n".join(blocks) + "\n}}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(record(next(case for case in CASES if key(case) == sys.argv[2]))))
    else:
        main(sys.argv[1:])
