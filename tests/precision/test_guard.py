"""Formats that linears would not compute in are refused; what is not the published recipe is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_nemotron3 import cli, models, run
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.model_formats import Ambient, CensusError, ModelFormats
from megatron_nemotron3.precision.settings import (
    OPTION,
    Emulation,
    Logging,
    logging_precision,
    parse_emulation,
)
from megatron_nemotron3.precision.table import Structure, expected
from megatron_nemotron3.precision.yaml_file import NO_FILE, PrecisionFile, PrecisionFileError
from megatron_nemotron3.train import processes
from tests.support.emulation import built, quant_recipe, step
from tests.support.world import world_of_one

TINY = models.tiny(models.get("super"))
ONE_MATCHER = """\
configs:
  mxfp8:
    transformer_engine_config_type: "TEQuantizationParams"
    training_recipe: {fp8_quantization_recipe: "mxfp8"}
matchers:
  mamba_out: {config: "mxfp8", type: "glob", pattern: "*mixer.out_proj", enabled: true}
"""


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


# -- a stack that would ignore what is asked for -------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ("--te-precision-config-file", {"quant_recipe": True}),
        ("--fp4-format", {"fp4": "e2m1"}),
        ("--fp8-format", {"fp8": "e4m3", "fp8_recipe": "tensorwise"}),
        ("--fp4-format and --te-precision-config-file", {"quant_recipe": True, "fp4": "e2m1"}),
    ],
)
def test_the_torch_stack_refuses_what_it_would_ignore(asked: str, changes: dict[str, Any]) -> None:
    """Megatron's own builder with our spec, and no launcher of ours: the run ends when the stack is built."""
    if "quant_recipe" in changes:
        changes = {**changes, "quant_recipe": quant_recipe()}
    with pytest.raises(CensusError, match=f"^{asked} would have no effect.*{EMULATE}=nvfp4"):
        built(None, "M", mtp_use_repeated_layer=False, **changes)


@pytest.mark.usefixtures("world")
def test_what_is_not_ignored_is_built(tmp_path: Path) -> None:
    built("nvfp4", "M", mtp_use_repeated_layer=False)
    with logging_precision(Logging(1, str(tmp_path))):  # the file says how a plain run is measured
        built(None, "M", mtp_use_repeated_layer=False, num_layers_at_end_in_bf16=0)


def test_emulation_of_a_stack_without_torch_linears_is_refused() -> None:
    from types import SimpleNamespace

    import torch

    from megatron_nemotron3.precision.census import require_followed

    linear = torch.nn.Linear(2, 2)
    foreign: Any = SimpleNamespace(modules=lambda: [linear], layers=[linear], config=None)
    with pytest.raises(CensusError, match="NEMOTRON3_EMULATE emulates linears of the torch backend"):
        require_followed(foreign, emulate=True, measured=False)


@pytest.mark.usefixtures("world")
def test_a_script_reads_its_file_strictly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Megatron takes a matcher without `enabled` and ignores it; the stack reads the script's file again."""
    from types import SimpleNamespace

    from megatron_nemotron3.precision import census

    file = tmp_path / "precision.yaml"
    file.write_text(yaml_file.render(TINY).replace("    enabled: true\n", "", 1))
    options = SimpleNamespace(te_precision_config_file=str(file))
    monkeypatch.setattr(census, "megatron_options", lambda: options)
    with pytest.raises(PrecisionFileError, match="no enabled: write enabled: true"):
        built("nvfp4", "M", mtp_use_repeated_layer=False)


SPEC = ["--spec", "megatron_nemotron3.specs", "nemotron3_torch_stack_spec"]
TE_SPEC = ["--spec", "megatron_nemotron3.specs", "nemotron3_te_stack_spec"]


@pytest.mark.parametrize(
    ("arguments", "emulate", "message"),
    [
        (
            [*SPEC, "--te-precision-config-file", "FILE"],
            False,
            "--te-precision-config-file would have no effect",
        ),
        (
            [*SPEC, "--te-precision-config-file=FILE"],
            False,
            "--te-precision-config-file would have no effect",
        ),
        ([*SPEC, "--fp4-format", "e2m1"], False, "--fp4-format would have no effect"),
        ([*SPEC, "--fp8-format", "e4m3"], False, "--fp8-format would have no effect"),
        (TE_SPEC, True, "--spec names nemotron3_te_stack_spec"),
        ([*SPEC, "--te-precision-config-file", "FILE"], True, None),
        (SPEC, False, None),
    ],
)
def test_the_launcher_refuses_before_it_starts(
    arguments: list[str],
    emulate: bool,
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "precision.yaml"
    yaml_file.write_precision_file(TINY, file)
    words = [word.replace("FILE", str(file)) for word in arguments]
    if message is None:
        run.verify_formats(words, *run.requested_spec(words), emulate=emulate, measured=False)
        return
    with pytest.raises(SystemExit) as stopped:
        run.verify_formats(words, *run.requested_spec(words), emulate=emulate, measured=False)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--te-precision-config-file", "FILE"], ["--", "--te-precision-config-file", "FILE"]]
)
def test_train_refuses_a_file_without_emulation(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml_file.write_precision_file(TINY, tmp_path / "precision.yaml")
    words = [word.replace("FILE", "precision.yaml") for word in words]
    assert cli.main(["train", "super", "--tiny", "--device", "cpu", "--backend", "torch", *words]) == 2
    assert "no effect" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["precision.yaml"]


# -- emulation that travels with the command -----------------------------------------------------------------


def test_the_launcher_takes_emulation_from_anywhere() -> None:
    for words in (
        [OPTION, "nvfp4,sr=0", "script.py", "--lr", "1"],
        ["script.py", "--lr", "1", OPTION, "nvfp4,sr=0"],
        ["script.py", f"{OPTION}=nvfp4,sr=0", "--lr", "1"],
        [f"{OPTION}=nvfp4", "script.py", "--lr", "1", OPTION, "nvfp4,sr=0"],
    ):
        found = run.split_arguments(words)
        assert (found.script, found.arguments, found.emulate) == ("script.py", ["--lr", "1"], "nvfp4,sr=0")
    assert run.split_arguments(["script.py"]).emulate is None


def test_words_after_the_script_are_its_own() -> None:
    """Also those that look like the launcher's or are none of it, and what argparse treats specially."""
    own = ["-h", "--device", "cuda", "--", "--mo", "--unknown=1", "-x", "a b"]
    for before in (["--device=CPU"], ["--device", "cpu", "--"]):
        found = run.split_arguments([*before, "script.py", *own])
        assert (found.device, found.script, found.arguments) == ("cpu", "script.py", own)


@pytest.mark.parametrize("value", ["", "nvfp5", "nvfp4,rht"])
def test_a_bad_value_of_the_option(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('started')")
    with pytest.raises(SystemExit) as stopped:
        run.main([str(script), f"{OPTION}={value}"])
    assert stopped.value.code == 2 and EMULATE in capsys.readouterr().err


def emitted(*words: str) -> str:
    """What the shell puts in place of $(nemotron3 flags …)."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_nemotron3", "flags", "super", "--tiny", "--shell", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("keep", [True, False])
def test_the_emitted_command_emulates_by_itself(keep: bool, tmp_path: Path) -> None:
    """Copied from stdout alone, the command emulates; without the option, it is refused."""
    import shlex

    yaml_file.write_precision_file(TINY, tmp_path / "precision.yaml")
    out = emitted(
        *(
            "--precision",
            "nvfp4",
            "--emulate",
            "--backend",
            "torch",
            "--steps",
            "1",
            "--lr",
            "1e-3",
            "--seq-length",
            "64",
        ),
        *("--te-precision-config-file", str(tmp_path / "precision.yaml"), "--micro-batch-size", "1"),
        *("--global-batch-size", "1", "--", "--mock-data", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", "200", "--eval-iters", "0", "--distributed-backend", "gloo"),
        *("--use-cpu-initialization", "--num-workers", "0"),
    )
    words = shlex.split(out.replace("\\\n", " "))
    assert words[-2:] == [OPTION, "nvfp4"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_nemotron3", "run", "--device", "cpu", str(processes.ENTRY)]
        + (words if keep else words[:-2]),
        cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if k != EMULATE}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if keep:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "megatron_nemotron3: emulating nvfp4: linears of this rank: 4 mxfp8, 20 nvfp4" in done.stdout
        assert "linears of the whole model: " in done.stdout and "as published" in done.stdout
    else:
        assert done.returncode == 2 and "would have no effect" in done.stderr


# -- what is not the published recipe ------------------------------------------------------------------------


def found(text: str | None, name: str = "super", **ambient: int) -> list[str]:
    config = models.get(name)
    file = NO_FILE if text is None else yaml_file.parse(yaml.safe_load(text), config)
    around = Ambient("nvfp4", config.num_layers, **{"at_end": 14, **ambient})
    return [str(d) for d in ModelFormats(Structure.of(config), file, around).deviations()]


def test_the_published_file_has_no_deviation() -> None:
    for name in ("nano", "super", "ultra"):
        config = models.get(name)
        tail = {"nano": 8, "super": 14, "ultra": 16}[name]
        assert found(yaml_file.render(config), name, at_end=tail) == []


def test_a_partial_file_is_compared_by_kind() -> None:
    """Numbers by hand: Super has 2 x 8 attention linears before its tail, a latent pair in each E layer."""
    config = models.SUPER
    body = config.pattern[: config.num_layers - 14]
    said = "linears in nvfp4, published bf16 (no matcher names them)"
    assert sorted(found(ONE_MATCHER)) == [
        f"attention: {2 * body.count('*')} of {2 * config.pattern.count('*')} {said}",
        f"latent: {2 * body.count('E')} of {2 * config.pattern.count('E')} {said}",
        f"mtp: 8 of 9 {said}",
    ]


def test_no_file_and_no_tail() -> None:
    said = found(None, at_end=0)
    assert [line.split(":")[0] for line in said] == ["mamba_out", "latent", "attention", "mtp", "BF16 layers"]
    assert "BF16 layers: 0 at the start and 0 at the end of 88, published 0 and 14" in said


def test_what_a_matcher_asks_for_is_no_warning() -> None:
    text = ONE_MATCHER.replace(
        "  mxfp8:\n",
        "  nvfp4: {transformer_engine_config_type: TEQuantizationParams, "
        "training_recipe: {fp4_quantization_recipe: nvfp4}}\n  mxfp8:\n",
    ) + (
        '  latent: {config: "nvfp4", type: "glob", pattern: "*decoder.*.fc[12]_latent_proj", enabled: true}\n'
    )
    file = yaml_file.parse(yaml.safe_load(text), models.SUPER)
    listed = ModelFormats(Structure.of(models.SUPER), file, Ambient("nvfp4", 88, at_end=14)).deviations()
    lines = {d.line() for d in listed}
    asked = [line for line in lines if "latent" in line]
    assert len(asked) == 1 and asked[0].startswith("not the published recipe: latent: ")
    assert asked[0].endswith("as matcher latent says")
    assert all(line.startswith("warning: ") for line in lines if "latent" not in line)


def test_formats_agree_with_the_table() -> None:
    """Linear by linear: no deviation means the table's format, in every model and with its tail."""
    for name in ("nano", "super", "ultra"):
        config = models.get(name)
        file = yaml_file.parse(yaml.safe_load(yaml_file.render(config)), config)
        table = expected(config, "nvfp4")
        tail = {"nano": 8, "super": 14, "ultra": 16}[name]
        ambient = Ambient("nvfp4", config.num_layers, at_end=tail)
        for linear, _, has in ModelFormats(Structure.of(config), file, ambient).linears():
            assert has == table[linear.name]


@pytest.mark.usefixtures("world")
def test_a_run_says_which_recipe_is_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.quantization.quant_config import RecipeConfig

    partial = RecipeConfig.from_config_dict(yaml.safe_load(ONE_MATCHER))
    step(built("nvfp4,sr=0", quant_recipe=partial))
    said = capsys.readouterr().out.splitlines()
    text = "\n".join(line for line in said if line.startswith("megatron_nemotron3: "))
    assert "warning: not the published recipe: attention: 2 of 2 linears in nvfp4, published bf16" in text
    assert "warning: not the published recipe: mtp: " in text
    assert "warning: not the published recipe: latent: " in text
    assert "not the published recipe: gradients rounded to nearest, as NEMOTRON3_EMULATE sr=0 says" in text


def test_flags_and_precision_list_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "partial.yaml"
    file.write_text(ONE_MATCHER)
    words = ["super", "--te-precision-config-file", str(file)]
    assert cli.main(["flags", *words, "--precision", "nvfp4", "--backend", "te"]) == 0
    warned = capsys.readouterr()
    assert warned.err.count("warning: not the published recipe: ") == 3
    assert "not the published" not in warned.out
    assert cli.main(["precision", *words]) == 0
    assert capsys.readouterr().out.count("warning: not the published recipe: ") == 3
    file.write_text(yaml_file.render(models.SUPER))
    assert cli.main(["precision", *words]) == 0
    assert "166 nvfp4, as published" in capsys.readouterr().out


# -- nothing left to quantize --------------------------------------------------------------------------------


def test_all_matmuls_off_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "nvfp4,fprop=0,dgrad=0,wgrad=0"
    with pytest.raises(ValueError, match=f"{EMULATE}='{text}': fprop=0, dgrad=0 and wgrad=0 leave no matmul"):
        parse_emulation(text)
    with pytest.raises(ValueError, match="leave no matmul to quantize"):
        Emulation(fprop=False, dgrad=False, wgrad=False)
    for one in ("fprop", "dgrad", "wgrad"):
        kept = ",".join(f"{name}=0" for name in ("fprop", "dgrad", "wgrad") if name != one)
        assert parse_emulation(f"nvfp4,{kept}") is not None
    monkeypatch.setenv(EMULATE, text)
    words = ["super", "--tiny", "--precision", "nvfp4", "--emulate", "--backend", "torch"]
    assert cli.main(["flags", *words, "--te-precision-config-file", "f.yaml"]) == 2
    assert "leave no matmul" in capsys.readouterr().err


def test_an_empty_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that takes all linears: `test_bad_files`. Here: BF16 layers everywhere."""
    file = tmp_path / "precision.yaml"
    yaml_file.write_precision_file(models.SUPER, file)
    words = ["super", "--precision", "nvfp4", "--backend", "te", "--te-precision-config-file", str(file)]
    assert cli.main(["flags", *words, "--", "--num-layers-at-end-in-bf16", "88"]) == 2
    assert "none of the model's 345 linears is nvfp4" in capsys.readouterr().err


def test_no_file_is_a_file_without_matchers() -> None:
    assert isinstance(NO_FILE, PrecisionFile) and not NO_FILE.matchers
