"""Formats that linears would not compute in are refused; what is not the published recipe is said."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron_nemotron3 import cli, models, run
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision import census, yaml_file
from megatron_nemotron3.precision.model_formats import CensusError, ModelFormats
from megatron_nemotron3.precision.settings import OPTION, Logging, logging_precision
from megatron_nemotron3.precision.yaml_file import NO_FILE, PrecisionFileError
from megatron_nemotron3.train import processes
from tests.support.emulation import built, quant_recipe, step

TINY = models.tiny(models.get("super"))
ONE_MATCHER = """\
configs:
  mxfp8:
    transformer_engine_config_type: "TEQuantizationParams"
    training_recipe: {fp8_quantization_recipe: "mxfp8"}
matchers:
  mamba_out: {config: "mxfp8", type: "glob", pattern: "*mixer.out_proj", enabled: true}
"""


# -- a stack that would ignore what is asked for -------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_the_torch_stack_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    """Megatron's own builder with our spec, and no launcher of ours: the run ends when the stack is built."""
    asked: dict[str, dict[str, Any]] = {
        "--te-precision-config-file": {"quant_recipe": quant_recipe()},
        "--fp4-format": {"fp4": "e2m1"},
        "--fp8-format": {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
        "--fp4-format and --te-precision-config-file": {"quant_recipe": quant_recipe(), "fp4": "e2m1"},
    }
    for names, changes in asked.items():
        with pytest.raises(CensusError, match=f"^{names} would have no effect.*{EMULATE}=nvfp4"):
            built(None, "M", mtp_use_repeated_layer=False, **changes)
    built("nvfp4", "M", mtp_use_repeated_layer=False)
    with logging_precision(Logging(1, str(tmp_path))):  # the file says how a plain run is measured
        built(None, "M", mtp_use_repeated_layer=False, num_layers_at_end_in_bf16=0)


def test_emulation_of_a_stack_without_torch_linears_is_refused() -> None:
    linear = torch.nn.Linear(2, 2)
    foreign: Any = SimpleNamespace(modules=lambda: [linear], layers=[linear], config=None)
    with pytest.raises(CensusError, match="NEMOTRON3_EMULATE emulates linears of the torch backend"):
        census.require_followed(foreign, emulate=True, measured=False)


@pytest.mark.usefixtures("world")
def test_a_script_reads_its_file_strictly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Megatron takes a matcher without `enabled` and ignores it; the stack reads the script's file again."""
    file = tmp_path / "precision.yaml"
    file.write_text(yaml_file.render(TINY).replace("    enabled: true\n", "", 1))
    options = SimpleNamespace(te_precision_config_file=str(file))
    monkeypatch.setattr(census, "megatron_options", lambda: options)
    with pytest.raises(PrecisionFileError, match="no enabled: write enabled: true"):
        built("nvfp4", "M", mtp_use_repeated_layer=False)


SPEC = ["--spec", "megatron_nemotron3.specs", "nemotron3_torch_stack_spec"]
TE_SPEC = ["--spec", "megatron_nemotron3.specs", "nemotron3_te_stack_spec"]


def test_the_launcher_refuses_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "precision.yaml")
    yaml_file.write_precision_file(TINY, path)
    file = ["--te-precision-config-file", path]

    def verify(words: list[str], emulate: bool) -> None:
        run.verify_formats(words, *run.requested_spec(words), emulate=emulate, measured=False)

    for words, emulate, message in (
        ([*SPEC, *file], False, "--te-precision-config-file would have no effect"),
        ([*SPEC, "=".join(file)], False, "--te-precision-config-file would have no effect"),
        ([*SPEC, "--fp4-format", "e2m1"], False, "--fp4-format would have no effect"),
        ([*SPEC, "--fp8-format", "e4m3"], False, "--fp8-format would have no effect"),
        (TE_SPEC, True, "--spec names nemotron3_te_stack_spec"),
    ):
        with pytest.raises(SystemExit) as stopped:
            verify(words, emulate)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    verify([*SPEC, *file], True)
    verify(SPEC, False)


def test_train_refuses_a_file_without_emulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml_file.write_precision_file(TINY, tmp_path / "precision.yaml")
    train = ["train", "super", "--tiny", "--device", "cpu", "--backend", "torch"]
    for separator in ([], ["--"]):
        assert cli.main([*train, *separator, "--te-precision-config-file", "precision.yaml"]) == 2
        assert "no effect" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["precision.yaml"]


@pytest.mark.full
def test_the_emitted_command_emulates_by_itself(tmp_path: Path) -> None:
    """Copied from the stdout of `nemotron3 flags` alone; without the option, it is refused."""
    yaml_file.write_precision_file(TINY, tmp_path / "precision.yaml")
    words = ["--precision", "nvfp4", "--emulate", "--backend", "torch", "--steps", "1", "--lr", "1e-3"]
    words += ["--te-precision-config-file", str(tmp_path / "precision.yaml"), "--seq-length", "64"]
    words += ["--micro-batch-size", "1", "--global-batch-size", "1", "--", "--mock-data"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "200", "--eval-iters", "0"]
    words += ["--distributed-backend", "gloo", "--use-cpu-initialization", "--num-workers", "0"]
    program = [sys.executable, "-m", "megatron_nemotron3"]
    emitted = subprocess.run(
        [*program, "flags", "super", "--tiny", "--shell", *words], capture_output=True, text=True, check=True
    )
    words = shlex.split(emitted.stdout.replace("\\\n", " "))
    assert words[-2:] == [OPTION, "nvfp4"]
    for given in (words, words[:-2]):
        done = subprocess.run(
            [*program, "run", "--device", "cpu", str(processes.ENTRY), *given],
            cwd=tmp_path,
            env={**{k: v for k, v in os.environ.items() if k != EMULATE}, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if given == words:
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            assert "emulating nvfp4: linears of this rank: 4 mxfp8, 20 nvfp4" in done.stdout
            assert "linears of the whole model: " in done.stdout and "as published" in done.stdout
        else:
            assert done.returncode == 2 and "would have no effect" in done.stderr


# -- what is not the published recipe ------------------------------------------------------------------------


def found(text: str | None, at_end: int = 14) -> list[str]:
    """Lines on the deviations of Super with this file."""
    file = NO_FILE if text is None else yaml_file.parse(yaml.safe_load(text), models.SUPER)
    formats = ModelFormats.of(models.SUPER, "nvfp4", (0, at_end), file)
    return [deviation.line() for deviation in formats.deviations()]


def test_a_partial_file_is_compared_by_kind() -> None:
    """Numbers by hand: Super has 2 x 8 attention linears before its tail, a latent pair in each E layer."""
    body = models.SUPER.pattern[: models.SUPER.num_layers - 14]
    whole = models.SUPER.pattern
    said = "linears in nvfp4, published bf16 (no matcher names them)"
    wanted = [
        f"attention: {2 * body.count('*')} of {2 * whole.count('*')} {said}",
        f"latent: {2 * body.count('E')} of {2 * whole.count('E')} {said}",
        f"mtp: 8 of 9 {said}",
    ]
    assert sorted(found(ONE_MATCHER)) == [f"warning: not the published recipe: {line}" for line in wanted]
    assert found(yaml_file.render(models.SUPER)) == []


def test_no_file_and_no_tail() -> None:
    said = [line.partition("recipe: ")[2] for line in found(None, at_end=0)]
    assert [line.split(":")[0] for line in said] == ["mamba_out", "latent", "attention", "mtp", "BF16 layers"]
    assert said[-1] == "BF16 layers: 0 at the start and 0 at the end of 88, published 0 and 14"


def test_what_a_matcher_asks_for_is_no_warning() -> None:
    mxfp8 = ONE_MATCHER[ONE_MATCHER.index("  mxfp8:") : ONE_MATCHER.index("matchers:")]
    nvfp4 = mxfp8.replace("mxfp8", "nvfp4").replace("fp8_quant", "fp4_quant")
    latent = '  latent: {config: "nvfp4", type: "glob", pattern: "*decoder.*.fc?_latent_proj", enabled: true}'
    lines = found(ONE_MATCHER.replace(mxfp8, mxfp8 + nvfp4) + latent)
    asked = [line for line in lines if "latent" in line]
    assert len(asked) == 1 and asked[0].startswith("not the published recipe: latent: ")
    assert asked[0].endswith("as matcher latent says")
    assert all(line.startswith("warning: ") for line in lines if "latent" not in line)


@pytest.mark.usefixtures("world")
def test_a_run_says_which_recipe_is_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.quantization.quant_config import RecipeConfig

    partial = RecipeConfig.from_config_dict(yaml.safe_load(ONE_MATCHER))
    step(built("nvfp4,sr=0", quant_recipe=partial))
    said = capsys.readouterr().out
    warning = "megatron_nemotron3: warning: not the published recipe: "
    assert f"{warning}attention: 2 of 2 linears in nvfp4, published bf16" in said
    assert f"{warning}mtp: " in said and f"{warning}latent: " in said
    assert "not the published recipe: gradients rounded to nearest, as NEMOTRON3_EMULATE sr=0 says" in said


def test_flags_and_precision_list_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "partial.yaml"
    file.write_text(ONE_MATCHER)
    words = ["super", "--te-precision-config-file", str(file)]
    flags = ["flags", *words, "--precision", "nvfp4", "--backend", "te"]
    assert cli.main(flags) == 0
    warned = capsys.readouterr()
    assert warned.err.count("warning: not the published recipe: ") == 3
    assert "not the published" not in warned.out
    assert cli.main(["precision", *words]) == 0
    assert capsys.readouterr().out.count("warning: not the published recipe: ") == 3
    file.write_text(yaml_file.render(models.SUPER))
    assert cli.main(["precision", *words]) == 0
    assert "166 nvfp4, as published" in capsys.readouterr().out
    assert cli.main([*flags, "--", "--num-layers-at-end-in-bf16", "88"]) == 2
    assert "none of the model's 345 linears is nvfp4" in capsys.readouterr().err
