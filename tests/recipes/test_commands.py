"""The command of every recipe: as the golden file has it, and as Megatron's own parser understands it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import published, published_layout
from megatron_nemotron3.launch.phases import PHASES, phase
from megatron_nemotron3.precision import yaml_file
from tests.launch.megatron_parser import ask
from tests.recipes.cases import CASES, GOLDEN, RECIPES, ROOT, Case, arguments, commands, golden_text

pytest.importorskip("megatron.training")
BY_NAME = {case.name: case for case in CASES}


#: Recipes of one model are those of the others, but for its numbers.
EACH = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.model == "super" else pytest.mark.full)
        for case in CASES
    ],
)


@cache
def printed(model: str) -> dict[str, list[str]]:
    """The commands of a model's recipes."""
    return commands([case for case in CASES if case.model == model])


@pytest.fixture
def args(case: Case, parsed: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What Megatron makes of a case's words."""
    answer = parsed(case.model)[case.name]
    assert "error" not in answer, answer.get("error")
    found: dict[str, Any] = answer["args"]
    return found


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A function from a model to what Megatron's parser and validation make of each of its recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    return cache(lambda model: _parsed(model, folder))


def _parsed(model: str, folder: Path) -> dict[str, Any]:
    jobs = []
    for case in (BY_NAME[name] for name in printed(model)):
        argv = arguments(printed(model)[case.name])
        if case.recipe == "nvfp4":  # a launch writes it; Megatron reads it
            place = argv.index("--te-precision-config-file") + 1
            argv[place] = str(folder / f"{case.model}.yaml")
            yaml_file.write_precision_file(models.get(case.model), argv[place])
        jobs.append({"argv": argv, "world_size": case.world_size, "patched": case.recipe != "debug_cpu"})
    return dict(zip(printed(model), ask(jobs), strict=True))


def test_every_recipe_has_a_case() -> None:
    scripts = {p for model in ("nano", "super", "ultra") for p in (RECIPES / model).glob("*.sh")}
    assert scripts == {case.script for case in CASES}
    assert {(c.model, c.phase) for c in CASES if c.phase != "none"} == {
        (model, name) for model in ("nano", "super", "ultra") for name in PHASES if _has(model, name)
    }


def _has(model: str, name: str) -> bool:
    try:
        phase(models.get(model), name)
    except ValueError:
        return False
    return True


@EACH
def test_golden(case: Case) -> None:
    """The whole command. After a change that is meant: python -m tests.recipes.regenerate"""
    assert golden_text(printed(case.model)[case.name]) == (GOLDEN / f"{case.name}.txt").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(BY_NAME)


@EACH
def test_megatron_accepts(case: Case, args: dict[str, Any]) -> None:
    model_ranks = (
        args["tensor_model_parallel_size"]
        * args["pipeline_model_parallel_size"]
        * args["context_parallel_size"]
    )
    assert model_ranks * args["data_parallel_size"] == case.world_size
    if case.recipe != "debug_cpu":
        assert args["save"] == args["load"] and args["save"].startswith("runs/")
        # What Megatron leaves of the words.
        assert args["async_save"] and args["async_strategy"] == "mcore"
    assert (args["pretrained_checkpoint"] == "/data/before") is (case.recipe != "debug_cpu")
    assert args["fp4"] == ("e2m1" if case.recipe == "nvfp4" else None)
    assert args["sft"] is (case.recipe == "sft")


@EACH
def test_the_published_numbers_arrive(case: Case, args: dict[str, Any]) -> None:
    config = models.get(case.model)
    if case.phase == "none":
        return
    if case.recipe == "pretrain":
        layout, schedule = published_layout(config), published(config)
        assert layout is not None and case.world_size == layout.world_size
        assert args["train_samples"] == schedule.train_samples
        assert args["micro_batch_size"] == schedule.micro_batch_size
    chosen = phase(config, case.phase)
    schedule = chosen.schedule
    assert args["seq_length"] == (schedule.seq_length or config.seq_length)
    assert args["lr"] == schedule.lr
    assert args["lr_decay_style"] == schedule.lr_decay_style or "LR_DECAY_STYLE" in case.variables
    if case.recipe == "proxy":  # as many sequences per GPU and step
        layout = published_layout(config)
        assert layout is not None
        assert args["global_batch_size"] * layout.world_size == 3072 * case.world_size
        assert args["num_experts"] % args["expert_model_parallel_size"] == 0
    elif schedule.global_batch_size is not None:
        assert args["global_batch_size"] == schedule.global_batch_size
    for length in ("train", "lr_warmup"):
        value = schedule.length(length)
        if value is not None and case.recipe != "proxy":
            assert args[f"{length}_{schedule.unit}"] == value
    if chosen.layout is not None and case.recipe != "proxy":
        sizes = (
            "tensor_model_parallel",
            "pipeline_model_parallel",
            "context_parallel",
            "expert_model_parallel",
        )
        assert [args[f"{name}_size"] for name in sizes] == [
            getattr(chosen.layout, short) for short in ("tp", "pp", "cp", "ep")
        ]


def _row(model: str, name: str) -> str:
    """A row of the table in docs/launching.md."""
    found = phase(models.get(model), name)
    schedule, layout = found.schedule, found.layout
    rate = f"{schedule.lr:g}" + (f" -> {schedule.min_lr:g}" if schedule.min_lr is not None else "")
    length, warmup = schedule.length("train"), schedule.length("lr_warmup")
    unit = "steps" if schedule.unit == "iters" else "samples"
    cells = (
        f"`{model}` `{name}`",
        f"{schedule.seq_length:,}",
        f"{schedule.global_batch_size:,}" if schedule.global_batch_size else "UNKNOWN",
        f"{length:,} {unit}" if length else "UNKNOWN",
        rate,
        schedule.lr_decay_style or "UNKNOWN",
        f"{warmup:,} {unit}" if warmup else "none",
        str(layout) if layout else "UNKNOWN",
    )
    return "| " + " | ".join(cells) + " |"


def test_the_documents_table_is_the_code() -> None:
    text = (ROOT / "docs" / "launching.md").read_text().splitlines()
    rows = [
        _row(model, name) for model in ("nano", "super", "ultra") for name in PHASES[1:] if _has(model, name)
    ]
    assert [line for line in text if line.startswith(("| `nano`", "| `super`", "| `ultra`"))] == rows


def test_recipes_are_short() -> None:
    for case in CASES:
        text = Path(case.script).read_text().splitlines()
        assert len(text) < 60
        assert max(map(len, text)) <= 120
