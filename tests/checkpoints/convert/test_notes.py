"""What conversion, check and verify say of values that were lost before: the FP32 expert bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import structure
from megatron_nemotron3.checkpoints.convert import from_hf, inventory, job
from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
from megatron_nemotron3.checkpoints.convert.hf_folder import open_hf
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.models import get
from tests.support.engines import agreeing_tensors
from tests.support.hf_folders import read_hf, write_hf

Capture = pytest.CaptureFixture[str]
CONFIG = get("nano-tiny").but(pattern="ME*E", num_moe_experts=32)
BIASES = [f"backbone.layers.{layer}.mixer.gate.e_score_correction_bias" for layer in (1, 3)]
#: 32 biases near 60 with spread 0.05: BF16 has steps of 0.25 there, so all become 60.
BIAS = 60 + (torch.arange(32) - 15.5) / 31 * 0.05
FP16_VALUES = len(set(BIAS.half().tolist()))


def folder(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = agreeing_tensors(CONFIG, 0.05, seed=3)
    values |= {name: BIAS.clone() for name in BIASES}
    values[BIASES[1]] = BIAS + 60 * torch.linspace(0, 1, 32)
    values = {name: v.to(dtype if name in BIASES else v.dtype) for name, v in values.items()}
    write_hf(path, CONFIG, values=values, dtype="float32")
    return values


def run(capsys: Capture, *words: object) -> str:
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "number", "cast"),
    [(torch.bfloat16, 1, ()), (torch.float16, FP16_VALUES, ("--dtype", "bfloat16"))],
)
def test_a_rounded_bias_is_named_and_written_in_fp32(
    dtype: torch.dtype, number: int, cast: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    assert number == len(set(BIAS.to(dtype).tolist()))
    values = folder(tmp_path / "hf", dtype)
    name = str(dtype).removeprefix("torch.")
    line = f"expert bias  {name} instead of float32 in 2 of 2 tensors: {number} distinct of 32 values in "
    out = run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m", *cast)
    assert line + BIASES[0] in out and out.count("expert bias") == 1
    assert line + BIASES[0] in run(capsys, "check", tmp_path / "hf")
    made = open_megatron(tmp_path / "m")
    assert not made.narrow
    for layer, hf in zip((1, 3), BIASES, strict=True):
        bias = f"decoder.layers.{layer}.mlp.router.expert_bias"
        assert made.weights.tensors[bias].dtype == "float32"
        found = made.weights.read(bias)
        assert found.equal(values[hf].float())
    run(capsys, "convert", "to-hf", tmp_path / "m", tmp_path / "back", *cast)
    back = read_hf(tmp_path / "back")
    assert all(back[hf].dtype == torch.float32 and back[hf].equal(values[hf].float()) for hf in BIASES)
    assert back["lm_head.weight"].dtype == (torch.bfloat16 if cast else torch.float32)
    if not cast:  # the same values; the narrow side is named
        assert line in run(capsys, "convert", "verify", tmp_path / "hf", tmp_path / "m")


def test_a_narrow_bias_in_megatrons_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """As a converter that casts everything writes it: 60 for all, in every layer."""
    values = folder(tmp_path / "hf", torch.float32)
    write_hf(tmp_path / "cast", CONFIG, values=values | {n: values[n].bfloat16() for n in BIASES})
    view = Converted(open_hf(tmp_path / "cast"), inventory.mappings(CONFIG), to_hf=False)
    plan = from_hf.plan(view, CONFIG, padded_vocab_size=CONFIG.vocab_size, dtype="float32")
    job.run(job.Job(tmp_path / "m", view, plan.files, plan.small, plan.index))
    line = "expert bias  bfloat16 instead of float32 in 2 of 2 tensors: 1 distinct of 32 values in decoder"
    parsed: list[Path] = []
    monkeypatch.setattr(
        structure, "read_metadata", lambda place: parsed.append(place) or read_metadata(place)
    )
    assert line in run(capsys, "check", tmp_path / "m")
    assert parsed == [tmp_path / "m/release"]  # once: the index of a large model takes seconds
    assert line in run(capsys, "convert", "to-hf", tmp_path / "m", tmp_path / "back", "--dtype", "bfloat16")
    assert read_hf(tmp_path / "back")[BIASES[0]].equal(torch.full((32,), 60.0))
    assert cli.main(["convert", "verify", str(tmp_path / "hf"), str(tmp_path / "m")]) == 1
    out = capsys.readouterr().out
    assert line in out and "31 of 32" not in out and f"differs      {BIASES[0]}: 32 of 32 elements" in out


def test_a_bias_of_zeros_is_named(tmp_path: Path, capsys: Capture) -> None:
    values = agreeing_tensors(CONFIG, 0.05, seed=3)
    values[BIASES[0]] = torch.zeros(32)
    values[BIASES[1]] = BIAS
    write_hf(tmp_path / "hf", CONFIG, values=values, dtype="float32")
    line = f"expert bias  all zeros in 1 of 2 tensors, first {BIASES[0]}: never updated, or lost"
    assert line in run(capsys, "convert", "from-hf", tmp_path / "hf", tmp_path / "m")
    assert line in run(capsys, "check", tmp_path / "hf")
    line = line.replace(BIASES[0], "decoder.layers.1.mlp.router.expert_bias")
    assert line in run(capsys, "check", tmp_path / "m")
    save_file(values | {BIASES[0]: BIAS.clone()}, tmp_path / "hf/model.safetensors")
    assert "expert bias" not in run(capsys, "check", tmp_path / "hf")


def test_verify_counts_the_values_of_the_narrower_side(tmp_path: Path, capsys: Capture) -> None:
    values = folder(tmp_path / "wide", torch.float32)
    name = "backbone.layers.0.mixer.dt_bias"
    values[name] = 60 + torch.arange(len(values[name])) / 1000
    save_file(values, tmp_path / "wide/model.safetensors")
    write_hf(tmp_path / "narrow", CONFIG, values=values | {name: values[name].bfloat16()}, dtype="float32")
    assert cli.main(["convert", "verify", str(tmp_path / "wide"), str(tmp_path / "narrow")]) == 1
    out = capsys.readouterr().out
    few = len(set(load_file(tmp_path / "narrow/model.safetensors")[name].tolist()))
    assert (
        f"narrower     b has 1 tensors in fewer bits: {name} is bfloat16 for float32, with {few} distinct "
        f"values for {len(values[name])}" in out
    )
