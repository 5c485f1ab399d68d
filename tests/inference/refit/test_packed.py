"""Weights that are packed on the way: to the bits of the packed converter, and in the plan's bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints.convert.quantized import quantization
from megatron_nemotron3.cli import main
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.refit_check import check
from tests.support.refit_packed import Packing, packed_stream, packing_plan, refused

QUICK: Packing = ("super-tiny", "tp=2,ep=2", "nvfp4", False, {"buffer": 100_000})
MORE: list[Packing] = [
    ("nano-tiny", "tp=2,etp=2,dp=1", "fp8-blockwise", False, {}),
    ("super-tiny", "tp=2,etp=2,dp=1", "nvfp4", True, {}),
    ("super-tiny", "tp=2,ep=2", "nvfp4-mse", True, {}),
    ("lightning-tiny", "tp=2", "nvfp4", True, {"buffer": 100_000}),
    ("nano-tiny", "pp=2", "fp8", True, {}),
    ("super-tiny", "tp=2,ep=2", "fp8-blockwise", False, {"buffer": 60_000}),
]
FOUR: list[Packing] = [
    ("super-tiny", "tp=2,pp=2", "nvfp4", True, {}),
    ("nano-tiny", "tp=4,ep=2,etp=2", "nvfp4", False, {}),
    ("ultra-tiny", "tp=4,ep=4", "super-fp8-blockwise", False, {}),
]


def test_a_stream_has_the_packed_converters_bits() -> None:
    assert min(number for _, number in run_distributed(packed_stream, 2, QUICK)) > 400


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_recipes(case: Packing) -> None:
    run_distributed(packed_stream, 2, case)


@pytest.mark.full
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_trainers(case: Packing) -> None:
    run_distributed(packed_stream, 4, case)


@pytest.mark.full
def test_masters_are_rounded_before_they_are_packed() -> None:
    run_distributed(packed_stream, 2, QUICK, "float32")


@pytest.mark.parametrize("case", [QUICK, *MORE, *FOUR], ids=str)
def test_every_packed_byte_arrives_once(case: Packing) -> None:
    plan = packing_plan(case)
    check(plan)
    if not case[2].endswith("-blockwise"):
        stored = quantization(plan.training.config, case[2], dict(plan.serving.input_scales)).nbytes
        load = plan.load()
        assert load.total + load.copied == stored * plan.serving.size


def test_the_plan_of_nanos_30_billion_has_the_bytes_of_its_packed_checkpoint() -> None:
    config = get("nano")
    plan = make_plan(
        Training.of(config, "tp=2,ep=8,pp=4"), EngineLayout(config=config, engine="hf", quantize="nvfp4")
    )
    assert plan.load().total == quantization(config, "nvfp4").nbytes


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.full)])
def test_what_no_format_holds_is_an_error_before_anything_moves(value: float) -> None:
    texts = run_distributed(refused, 2, QUICK, value)
    assert len({text.partition(": ")[2] for text in texts}) == 1
    assert all("experts.7.up_proj.weight" in text and "holds infinity or NaN" in text for text in texts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "tp=2", "--quantize", "nvfp4"], "use engine hf"),
        (["--to", "replicas=1", "--engine", "hf", "--quantize", "fp8"], "give --input-scales"),
        (["--to", "replicas=1", "--engine", "hf", "--quantize", "fp8-blockwise"], "whole blocks of 128"),
        (
            ["--to", "replicas=1", "--engine", "hf", "--quantize", "int4"],
            "are nvfp4, nvfp4-mse, fp8 (a refit packs fp8-blockwise",
        ),
        (
            ["--to", "replicas=1", "--engine", "hf", "--quantize", "fp8,4over6=1"],
            "super-fp8 has no NVFP4 weights",
        ),
        (
            ["--to", "tp=2", "--engine", "trtllm"],
            "engine 'trtllm' is none of vllm, sglang, hf: use hf, whole",
        ),
        (["--to", "replicas=1", "--engine", "hf", "--input-scales", "scales.json"], "give quantize"),
    ],
)
def test_what_cannot_be_packed_is_said_in_a_line(words, said, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scales.json").write_text(json.dumps({"backbone.layers.0.mixer.in_proj.input_scale": 1.0}))
    assert main(["plan", "refit", "super", "--tiny", "--from", "tp=2", *words]) == 2
    found = capsys.readouterr()
    assert said in found.err and not found.out


def test_the_page_names_every_figure_of_json(capsys) -> None:
    assert main(["plan", "refit", "super", "--tiny", "--from", "tp=2", "--to", "tp=1", "--json"]) == 0
    page = (Path(__file__).parents[3] / "docs" / "bridge.md").read_text()
    (sentence,) = (part for part in page.split("\n\n") if part.startswith("`--json` prints"))
    assert [key for key in json.loads(capsys.readouterr().out) if f"`{key}`" not in sentence] == []


def test_blocks_on_two_ranks_are_refused() -> None:
    config = get("super-tiny").but(moe_ffn_hidden_size=48)
    with pytest.raises(ValueError, match=r"2 ranks cut a weight of 48 columns inside a block"):
        make_plan(
            Training.of(config, "etp=2,tp=2"),
            EngineLayout(config=config, engine="hf", quantize="super-nvfp4"),
        )
