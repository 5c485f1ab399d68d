"""Write bridge_performance.json: the settings of Megatron-Bridge's pre-training recipes for this family.

    PYTHONPATH=MEGATRON_LM:. BRIDGE_PYTHON tests/golden/make_bridge_performance.py --bridge BRIDGE

BRIDGE is a checkout of Megatron-Bridge, MEGATRON_LM a folder that has `megatron` of the Megatron-LM that goes
with it, BRIDGE_PYTHON an interpreter with Bridge's dependencies (`make test-bridge` makes one). No GPU,
TransformerEngine or network is needed. Every recipe function is called and then finalized with Bridge's own
`runtime_config_update`, so that the file has the values that would train. Recorded is what differs from the
defaults of Megatron's dataclasses; what all recipes of a model share is recorded once.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_nemotron3 import models
from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.cpu.bridge_imports import allow_missing_te

#: Hugging Face repositories whose config.json the recipes read.
REPOSITORIES = {
    "nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "super": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "ultra": "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
}
#: Words in the names of recipe functions, and the models they are for.
MODELS = {
    "nemotron_3_5_lightning": "lightning",
    "nemotron_3_nano": "nano",
    "nemotron_3_super": "super",
    "nemotron_3_ultra": "ultra",
    "nemotronh_56b": "nemotron-h-56b",
}
#: Modules of Bridge's library with a recipe that no performance recipe replaces.
LIBRARY = ("nemotron_3_ultra",)
PRECISIONS = {"bf16": "bf16", "fp8cs": "fp8-tensorwise", "fp8mx": "mxfp8", "nvfp4": "nvfp4"}
_NAME = re.compile(r"([a-z]\w+)_pretrain_(\d+)gpu_(\w+?)_(bf16|fp8cs|fp8mx|nvfp4)(_fsdp)?_config")
_KERNELS = (
    *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
    *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
)


class _FusedAdam:
    """What Megatron looks for in TransformerEngine's optimizer: names of its arguments."""

    def __init__(
        self,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        raise NotImplementedError


def write_configs(cache: Path) -> None:
    """Write config.json of the models into a folder that looks like huggingface_hub's cache."""
    for name, repository in REPOSITORIES.items():
        folder = cache / ("models--" + repository.replace("/", "--"))
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0" * 40)
        (snapshot / "config.json").write_text(json.dumps(config_json.write(models.get(name))))


def import_recipes(bridge: Path) -> list[ModuleType]:
    """Import the recipe modules of this family, without Bridge's other models, whose packages are missing."""
    source = bridge / "src" / "megatron" / "bridge"
    sys.path.insert(0, str(bridge / "src"))
    allow_missing_te()
    import megatron.bridge

    if not str(megatron.bridge.__file__).startswith(str(source)):
        sys.exit(f"{megatron.bridge.__file__} is imported instead of {source}")
    for name in ("recipes", "perf_recipes"):  # their __init__ imports every model
        package = ModuleType(f"megatron.bridge.{name}")
        package.__path__ = [str(source / name)]
        sys.modules[package.__name__] = package
    names = ["megatron.bridge.perf_recipes.nemotronh"]
    names += [f"megatron.bridge.recipes.nemotronh.h100.{name}" for name in LIBRARY]
    return [__import__(name, fromlist=["_"]) for name in names]


def pretend_hardware() -> None:
    """Answer what Bridge and Megatron ask about the GPU and TransformerEngine when they check a config."""
    import torch
    from megatron.bridge.training import comm_overlap, config
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    for name in ("", ".pytorch", ".pytorch.optimizers"):
        sys.modules[f"transformer_engine{name}"] = ModuleType(f"transformer_engine{name}")
    vars(sys.modules["transformer_engine.pytorch.optimizers"])["FusedAdam"] = _FusedAdam
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.") and "is_te_min_version" in vars(module):
            vars(module)["is_te_min_version"] = lambda *_, **__: True
    vars(comm_overlap)["HAVE_TE"] = True
    vars(config)["validate_flex_dispatcher_backend"] = lambda *_: None
    vars(torch.cuda)["get_device_capability"] = lambda *_: (10, 0)
    for kernel in _KERNELS:
        vars(moe_utils)[kernel] = object()
    for kernel in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        vars(rope_utils)[kernel] = object()


def recipes(modules: list[ModuleType]) -> Iterator[tuple[str, dict[str, Any], Callable[[], Any]]]:
    """Name, description and function of each recipe; the first module has performance recipes."""
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            found = _NAME.fullmatch(name)
            if found is None or (module is not modules[0] and function.__module__ != module.__name__):
                continue
            model, gpus, gpu, precision, fsdp = found.groups()
            about = {
                "model": MODELS[model],
                "gpus": int(gpus),
                "gpu": gpu,
                "precision": PRECISIONS[precision],
                "fsdp": fsdp is not None,
                "module": function.__module__.removeprefix("megatron.bridge."),
            }
            yield name, about, function


def plain(value: Any) -> Any:
    """A value as JSON can hold it; functions by name."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return getattr(value, "__name__", str(value))


def changed(config: Any, base: type) -> dict[str, Any]:
    """Return the fields of a Megatron dataclass whose values are not its defaults.

    Functions of the initialization are left out: another field has their standard deviation.
    """
    found = {}
    for field in dataclasses.fields(base):
        if field.name.endswith("init_method"):
            continue
        value = plain(getattr(config, field.name))
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.name[0] != "_" and value != plain(default):
            found[field.name] = value
    return found


def settings(config: Any) -> dict[str, dict[str, Any]]:
    """What a finalized `ConfigContainer` sets, by part."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    train, checkpoint = config.train, config.checkpoint
    return {
        "transformer": changed(config.model, TransformerConfig),
        "ddp": changed(config.ddp, DistributedDataParallelConfig),
        "optimizer": changed(config.optimizer, OptimizerConfig),
        "train": {
            name: getattr(train, name)
            for name in ("micro_batch_size", "global_batch_size", "manual_gc", "manual_gc_interval")
        }
        | {"seq_length": config.model.seq_length, "te_rng_tracker": config.rng.te_rng_tracker},
        "checkpoint": {
            name: plain(getattr(checkpoint, name))
            for name in ("ckpt_format", "async_save", "fully_parallel_save", "ckpt_assume_constant_structure")
        },
        "distributed": {
            "high_priority_stream_groups": plain(config.dist.high_priority_stream_groups),
            "distributed_timeout_minutes": config.dist.distributed_timeout_minutes,
        },
        "environment": {name: str(value) for name, value in sorted(config.env_vars.items())},
    }


def shared(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what all these settings have in common, and take it out of them."""
    result: dict[str, dict[str, Any]] = {}
    for part in found[0]:
        rows = [settings[part] for settings in found]
        result[part] = {
            name: value for name, value in rows[0].items() if all(row.get(name) == value for row in rows[1:])
        }
        for row in rows:
            for name in result[part]:
                del row[name]
    return result


def commit(folder: Path) -> str:
    """Return the commit of a checkout, or "UNKNOWN"."""
    words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "UNKNOWN"


def main() -> None:
    """Write the file beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bridge", type=Path, required=True, help="a checkout of Megatron-Bridge")
    parser.add_argument("--bridge-commit", help="where the checkout is not a git repository")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("bridge_performance.json"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as cache:
        write_configs(Path(cache))
        os.environ.update(HF_HUB_CACHE=cache, HF_HUB_OFFLINE="1", RANK="0", CUDA_VISIBLE_DEVICES="")
        modules = import_recipes(options.bridge)
        logging.disable(logging.WARNING)
        pretend_hardware()
        import megatron.core
        from megatron.bridge.training.config import runtime_config_update

        before = dict(os.environ)
        found: dict[str, dict[str, Any]] = {}
        refused: dict[str, str] = {}
        for name, about, function in recipes(modules):
            os.environ["WORLD_SIZE"] = str(about["gpus"])
            config = function()
            try:
                runtime_config_update(config)
                found[name] = about | {"settings": settings(config)}
            except AssertionError as error:  # Bridge refuses its own recipe
                refused[name] = str(error)
            os.environ.clear()
            os.environ.update(before)
    common = {
        model: shared([row["settings"] for row in found.values() if row["model"] == model])
        for model in dict.fromkeys(row["model"] for row in found.values())
    }
    data = {
        "source": {
            "Megatron-Bridge": options.bridge_commit or commit(options.bridge),
            "megatron-core": megatron.core.__version__,
        },
        "common": common,
        "refused": refused,
        "recipes": found,
    }
    options.output.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
