"""Write the launches in this folder: the options that other people's launches pass, and nothing else of them.

    python tests/golden/launches/make.py NAME=CHECKOUT…

CHECKOUT is a checkout of a repository of `REPOSITORIES` at the version given there, NAME its key. The files
of `BRIDGE` are made by an interpreter with megatron-bridge 0.6.2, without network:

    BRIDGE_PYTHON tests/golden/launches/make.py bridge
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from megatron_nemotron3.launch import command_line
from megatron_nemotron3.launch.flag import Flag, render
from megatron_nemotron3.launch.script import LaunchSource

HERE = Path(__file__).parent
REPOSITORIES = {
    "megatron-0.19": "NVIDIA/Megatron-LM, tag core_v0.19.0",
    "megatron-main": "NVIDIA/Megatron-LM, main of 2026-08-22",
    "nemotron": "NVIDIA-NeMo/Nemotron, main of 2026-08-21",
}
_CASES = "tests/functional_tests/test_cases"
_MODELOPT = "examples/post_training/modelopt/conf/nvidia"
#: File here -> repository, and file there.
SOURCES = {
    "super-release": ("megatron-0.19", f"{_CASES}/nemotron/nemotron3_super_release_gb200/model_config.yaml"),
    "pico-distilled": (
        "megatron-0.19",
        f"{_CASES}/hybrid/hybrid_nemotron_v3_pico_7b_a1b_tp1_ep8_QAD_dgx_h100_1N8G/model_config.yaml",
    ),
    "super-modelopt": ("megatron-0.19", f"{_MODELOPT}/NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh"),
    "ultra-modelopt": ("megatron-0.19", f"{_MODELOPT}/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh"),
    "nemotron-5-rl": ("megatron-main", "examples/rl/model_configs/nemotron5p5_12b_H.sh"),
    "nano-rl": ("megatron-0.19", "examples/rl/model_configs/nemotron6_3b_moe.sh"),
    "mamba-example": ("megatron-0.19", "examples/mamba/train.sh"),
    "lightning-main": (
        "megatron-main",
        f"{_CASES}/nemotron/nemotron3_5_lightning_nightly_tp1_pp1_cp1_ep8_dgx_gb200/model_config.yaml",
    ),
    "super-release-main": (
        "megatron-main",
        f"{_CASES}/nemotron/nemotron3_super_release_gb200/model_config.yaml",
    ),
}
#: The same for YAML that names a recipe of Megatron-Bridge.
RECIPES = {
    "nemotron-super-sft": ("nemotron", "src/nemotron/recipes/super3/stage1_sft/config/default.yaml"),
    "nemotron-lightning": (
        "nemotron",
        "src/nemotron/recipes/lightning35/stage0_pretrain/config/default.yaml",
    ),
}
#: Variables that the scripts of reinforcement learning set by a file's name; these are of any other file.
_GRPO = {"CLAMP_EPS_LOWER": "0.2", "CLAMP_EPS_UPPER": "0.28", "ITERATIONS": "1", "KL_BETA": "0.0"}
_RL = {
    "MICRO_BATCH_SIZE": "1",
    "ENV_CONFIG": "x.yaml",
    **{f"GRPO_{name}": word for name, word in _GRPO.items()},
}
_LARGE = {"GRPO_GROUP_SIZE": "16", "GRPO_PROMPTS_PER_STEP": "32", "TRAINING_BATCH_SIZE": "512"}
_LITTLE = {"GRPO_GROUP_SIZE": "2", "GRPO_PROMPTS_PER_STEP": "16", "TRAINING_BATCH_SIZE": "32"}
SET = {
    "nano-rl": {**_RL, **_LITTLE, "MAX_INFERENCE_BS": "64", "MAX_SEQ_LENGTH": "1024"},
    "nemotron-5-rl": {**_RL, **_LARGE, "MAX_INFERENCE_BS": "64", "MAX_SEQ_LENGTH": "12000"},
}
#: File here -> module of Bridge's recipes, and function.
BRIDGE = {
    "bridge-super-pretrain": ("h100.nemotron_3_super", "_nemotron_3_super_pretrain_64gpu_h100_bf16_config"),
    "bridge-super-sft": ("h100.nemotron_3_super", "nemotron_3_super_sft_16gpu_h100_bf16_config"),
    "bridge-nano-pretrain": ("nemotron_3_nano", "nemotron_3_nano_pretrain_config"),
    "bridge-ultra-pretrain": ("nemotron_3_ultra", "nemotron_3_ultra_pretrain_config"),
}
#: Sections of run_config.yaml that say something about the training.
SECTIONS = ("model", "ddp", "train", "optimizer", "scheduler", "mixed_precision", "dataset", "peft")


def flags_of(file: Path, name: str) -> list[Flag]:
    """Options of a launch."""
    return command_line.read_launch(LaunchSource(file.read_text(), SET.get(name, {}))).flags


def write_words(checkouts: dict[str, Path]) -> None:
    """Write the launches of these repositories."""
    for name, (repository, path) in SOURCES.items():
        if repository in checkouts:
            head = [f"# {REPOSITORIES[repository]}: {path}", "# Options only; make.py writes this file."]
            options = render(flags_of(checkouts[repository] / path, name), shell=True)
            (HERE / f"{name}.sh").write_text("\n".join((*head, options, "")))


def write_recipes(checkouts: dict[str, Path]) -> None:
    """Write the sections of these files that say something about the training."""
    import yaml

    for name, (repository, path) in RECIPES.items():
        if repository in checkouts:
            sections = yaml.safe_load((checkouts[repository] / path).read_text())
            kept = {key: sections[key] for key in ("recipe", *SECTIONS) if sections.get(key)}
            head = f"# {REPOSITORIES[repository]}: {path}\n"
            (HERE / f"{name}.yaml").write_text(head + yaml.safe_dump(kept, sort_keys=True))


def write_bridge() -> None:
    """Write run_config.yaml of Bridge's recipes, without fields that are empty."""
    import yaml

    sys.path.insert(0, str(HERE.parent))
    recipes_of = importlib.import_module("make_bridge_performance")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(HF_HUB_CACHE=cache, HF_HUB_OFFLINE="1")
        recipes_of.write_configs(Path(cache))
        recipes_of.allow_missing_te()
        import megatron.bridge

        package = ModuleType("megatron.bridge.recipes")  # its __init__ imports every model
        package.__path__ = [str(Path(str(megatron.bridge.__file__)).parent / "recipes")]
        sys.modules[package.__name__] = package
        for name, (module, function) in BRIDGE.items():
            found = importlib.import_module(f"megatron.bridge.recipes.nemotronh.{module}")
            file = HERE / f"{name}.yaml"
            vars(found)[function]().to_yaml(str(file))
            sections = yaml.safe_load(file.read_text())
            kept = {key: _filled(sections[key]) for key in SECTIONS if sections.get(key)}
            head = f"# Megatron-Bridge 0.6.2: run_config.yaml of {module}.{function}, without empty fields.\n"
            file.write_text(head + yaml.safe_dump(kept, sort_keys=True))


def _filled(section: object) -> object:
    if not isinstance(section, dict):
        return section
    return {key: value for key, value in section.items() if value not in (None, "", [], {})}


if __name__ == "__main__":
    if sys.argv[1:] == ["bridge"]:
        write_bridge()
    else:
        given = {name: Path(path) for name, path in (word.split("=", 1) for word in sys.argv[1:])}
        write_words(given)
        write_recipes(given)
