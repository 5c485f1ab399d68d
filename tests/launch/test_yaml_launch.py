"""YAML configurations of Megatron's tests and of Megatron-Bridge say what the same command line says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from megatron_nemotron3 import cli, models
from megatron_nemotron3.launch import Launch, flags, published_layout
from megatron_nemotron3.launch.command_line import read_launch
from megatron_nemotron3.launch.explain import explain_command, explain_nearest
from megatron_nemotron3.launch.flag import Flag

ROOT = os.environ.get("MEGATRON_LM_DIR")
BRIDGE = Path(__file__).parents[1] / "golden" / "bridge_run_config.yaml"


def model_args(found: list[Flag]) -> str:
    """Options as Megatron's tests keep them."""

    def value(flag: Flag) -> object:
        return " ".join(flag.values) if len(flag.values) == 1 else f"[{' '.join(flag.values)}]"

    options = {flag.name: value(flag) if flag.values else True for flag in found}
    return "ENV_VARS:\n  A: 1\n" + yaml.safe_dump({"MODEL_ARGS": options, "METRICS": ["lm loss"]})


@pytest.mark.parametrize("name", ["super", "puzzle", "nano-4b"])
def test_a_models_options_in_yaml(name: str) -> None:
    """Each published model is found again, with nothing of the model different."""
    config = models.get(name)
    emitted = flags(Launch.of(config, published_layout(config), backend="te"))
    text = model_args(emitted)
    assert {flag.name: flag.values for flag in read_launch(text).flags} == {
        flag.name: flag.values for flag in emitted
    }
    found = explain_nearest(text)
    assert found.config is config
    assert found.notes[0] == f"nearest published model: {name}; options of the model that differ: 0"
    assert [s.name for s in found.differences if s.of_model] == []


def test_values_are_those_of_the_launcher() -> None:
    text = """
MODEL_ARGS:
  --lr: 1e-4
  --split: 949,50,1
  --bf16: true
  --spec: "[a.module a_spec]"
  --cuda-graph-modules: [attn mamba]
  --data-path: ${DATA_PATH}/text
  --exit-duration: 08:30
  --hybrid-override-pattern: ME*
MODEL_ARGS_2:
  --lr: 9
"""
    launch = read_launch(text)
    found, notes = launch.flags, launch.notes
    assert {flag.name: flag.values for flag in found} == {
        "--lr": ("1e-4",),
        "--split": ("949,50,1",),
        "--bf16": (),
        "--spec": ("a.module", "a_spec"),
        "--cuda-graph-modules": ("attn", "mamba"),
        "--data-path": ("${DATA_PATH}/text",),
        "--exit-duration": ("08:30",),
        "--hybrid-layer-pattern": ("ME*",),
    }
    assert notes[0].startswith("--hybrid-override-pattern is deprecated")
    assert notes[1] == "MODEL_ARGS_2 (a later run of the same test) is not read"


def test_bridges_configuration_of_super() -> None:
    """Recorded from Bridge's provider (tests/golden/README.md)."""
    found = explain_nearest(BRIDGE.read_text())
    assert found.config is models.SUPER
    assert [s.name for s in found.differences if s.of_model] == []
    settings = {setting.name: setting for setting in found.settings}
    assert settings["--expert-model-parallel-size"].value == "64" and "--fp8-recipe" not in settings
    assert not [v for v in found.violations if v.severity == "error"]
    for field, value, option in (
        ("num_moe_experts", 256, "--num-experts"),
        ("add_bias_linear", True, "--disable-bias-linear"),
        ("layernorm_epsilon", 1e-6, "--norm-epsilon"),
        ("share_embeddings_and_output_weights", True, "--untie-embeddings-and-output-weights"),
        ("gated_linear_unit", True, "--swiglu"),
        ("activation_func", {"_target_": "torch.nn.functional.silu"}, "--squared-relu"),
        ("mtp_use_repeated_layer", False, "--mtp-use-repeated-layer"),
    ):
        changed = yaml.safe_load(BRIDGE.read_text())
        changed["model"][field] = value
        explained = explain_command(models.SUPER, yaml.safe_dump(changed))
        assert [s.name for s in explained.differences if s.of_model] == [option], field


def test_sections_of_bridge() -> None:
    text = """
model:
  seq_length: 4096
train: {global_batch_size: 512, micro_batch_size: 2}
optimizer: {lr: 0.0003}
ddp: {grad_reduce_in_fp32: false, use_distributed_optimizer: true}
mixed_precision: bf16_mixed
"""
    launch = read_launch(text)
    found, notes = launch.flags, launch.notes
    assert {flag.name: flag.values for flag in found} == {
        "--seq-length": ("4096",),
        "--global-batch-size": ("512",),
        "--micro-batch-size": ("2",),
        "--lr": ("0.0003",),
        "--grad-reduce-in-bf16": (),
        "--use-distributed-optimizer": (),
        "--bf16": (),
    }
    assert "mixed_precision bf16_mixed is a recipe of Bridge" in notes[1]
    # What an override leaves to its recipe is not missing.
    explained = explain_command(models.SUPER, text)
    assert {s.name for s in explained.differences} == {
        *("--seq-length", "--global-batch-size", "--micro-batch-size", "--lr"),
    }
    with pytest.raises(ValueError, match="give the NAME of the model"):
        explain_nearest(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL_ARGS:\n  - a\n", "MODEL_ARGS is a list"),
        ("MODEL_ARGS:\n  lr: 1\n", "lr is not an option"),
        ("MODEL_ARGS:\n  --a: {b: c}\n", "--a is not an option with a value"),
        ('MODEL_ARGS:\n  --a: "it\'s"\n', "No closing quotation"),
        ("MODEL_ARGS:\n  --a: [\n", "cannot be read"),
        ("MODEL_ARGS:\n", "MODEL_ARGS is a str"),
        ("model:\n  - 1\n", "neither MODEL_ARGS nor a section model"),
        ("model:\n  x: !!python/object:os.system {}\n", "cannot be read"),
        ("model:\n  nothing: 1\n", "no Megatron option in the text"),
        ("model:\n  a: " + "[" * 5000, "cannot be read"),
        ("recipe:\n  _target_: a.super_config\n", "recipe a.super_config: give the run_config.yaml"),
    ],
)
def test_bad_yaml(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert cli.main(["explain", "super", "--argv", str(file)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and printed.err.count("\n") == 1
    assert cli.main(["explain", "super", "--argv", str(BRIDGE), "--set", "A=1"]) == 2
    assert "the text is YAML" in capsys.readouterr().err


@pytest.mark.skipif(not ROOT, reason="MEGATRON_LM_DIR names no Megatron-LM checkout")
def test_megatrons_own_release_test() -> None:
    """NVIDIA's release test of Super differs from the published model in one option."""
    folder = Path(ROOT or "") / "tests/functional_tests/test_cases/nemotron"
    text = (folder / "nemotron3_super_release_gb200/model_config.yaml").read_text()
    found = explain_nearest(text)
    assert found.config is models.SUPER
    assert [s.name for s in found.differences if s.of_model] == ["--mtp-use-repeated-layer"]
