"""TransformerEngine's variables: what each does to the recipe, in one line."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from megatron_nemotron3 import cli, models
from megatron_nemotron3.cli.doctor import recipe as doctor
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision.census import Ambient
from megatron_nemotron3.precision.deviations import recipe_in_force
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.precision.table import Structure
from megatron_nemotron3.precision.te_variables import VARIABLES, nvfp4_ingredients, remarks
from megatron_nemotron3.precision.yaml_file import NO_FILE

NAMES = {variable.name for variable in VARIABLES}
PYTHON = [v for v in VARIABLES if "FAST_MATH" not in v.name]  # the others are read by C++ code


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, EMULATE):
        monkeypatch.delenv(name, raising=False)


def test_those_that_are_known_to_change_a_run_are_in_the_table() -> None:
    assert {
        "NVTE_NVFP4_DISABLE_RHT",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        "NVTE_BACKWARD_OVERRIDE",
        "NVTE_NVFP4_4OVER6",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
        "NVTE_USE_FAST_MATH",
    } <= NAMES
    assert max(Counter(v.name for v in VARIABLES).values()) == 1


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_every_variable_is_one_line(variable, capsys: pytest.CaptureFixture[str]) -> None:
    """Set to what changes the recipe, to what does not, by an old TE, and under emulation."""
    switched_on = {"NVTE_NVFP4_4OVER6": "weights"}  # some have no effect without it
    for value in variable.changing:
        found = remarks(None, {**switched_on, variable.name: value})
        lines = [r.line() for r in found if r.name == variable.name]
        assert len(lines) == 1 and "\n" not in lines[0]
        assert lines[0].startswith(f"warning: {variable.name}={value}: ")
        assert [r.name for r in remarks(variable.formats, {variable.name: value})] == [variable.name]
        old = remarks(None, {variable.name: value}, (2, 2, 0))[0]
        assert not old.deviates and f"reads it from {variable.since[0]}.{variable.since[1]} on" in old.text
        emulated = remarks(None, {variable.name: value}, emulated=True)[0]
        assert not emulated.deviates and "does not change emulated linears" in emulated.text
        assert variable.switch in emulated.text
    for value in variable.neutral:
        assert remarks(None, {variable.name: value}) == []
    wrong = remarks(None, {variable.name: "yes"})[0]
    assert wrong.fails == variable.strict and not wrong.deviates
    assert remarks(("bf16",), {variable.name: variable.changing[0]}) == []


def test_combinations() -> None:
    def said(**environment: str) -> dict[str, str]:
        return {r.name: r.line() for r in remarks(["nvfp4"], environment)}

    alone = said(NVTE_NVFP4_4OVER6_ERR_MODE="MSE")
    assert alone == {
        "NVTE_NVFP4_4OVER6_ERR_MODE": "NVTE_NVFP4_4OVER6_ERR_MODE=MSE: no effect without NVTE_NVFP4_4OVER6"
    }
    assert (
        "raises on 4over6 activations with the random" in said(NVTE_NVFP4_4OVER6="all")["NVTE_NVFP4_4OVER6"]
    )
    both = said(NVTE_NVFP4_4OVER6="all", NVTE_NVFP4_DISABLE_RHT="1")
    assert "map to 4 or to 6" in both["NVTE_NVFP4_4OVER6"] and len(both) == 2
    assert "raises on it" in said(NVTE_BACKWARD_OVERRIDE="")["NVTE_BACKWARD_OVERRIDE"]
    assert "ignored" in said(NVTE_USE_FAST_MATH="")["NVTE_USE_FAST_MATH"]
    assert nvfp4_ingredients({"NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1"}).count("to nearest") == 1
    assert "no random" not in nvfp4_ingredients({"NVTE_NVFP4_DISABLE_RHT": "true"})  # TE reads only 1


def test_where_they_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    structure, ambient = Structure.of(models.SUPER), Ambient("nvfp4", 88, at_end=14)
    clean = "\n".join(recipe_in_force(structure, NO_FILE, ambient))
    assert "gradients rounded stochastically" in clean and "NVTE_" not in clean
    assert [f.level for f in doctor.findings()] == ["ok"]
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
    line = "warning: NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1: gradients are rounded to nearest; published: "
    run = "\n".join(recipe_in_force(structure, NO_FILE, ambient))
    assert line in run and "gradients rounded to nearest" in run
    assert "NVTE" not in "\n".join(recipe_in_force(structure, NO_FILE, Ambient("bf16", 88)))
    emulated = "\n".join(recipe_in_force(structure, NO_FILE, ambient, Emulation()))
    assert "does not change emulated linears; NEMOTRON3_EMULATE=nvfp4,sr=0 does" in emulated
    assert cli.main(["precision", "super"]) == 0 and line in capsys.readouterr().out
    assert cli.main(["precision", "super", "--format", "bf16"]) == 0
    assert "NVTE_" not in capsys.readouterr().out
    found = {f.subject: f for f in doctor.findings()}
    assert found["nvfp4"].level == "warning"
    assert found["NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1"].level == "warning"


@pytest.mark.parametrize(("value", "level"), [("nvfp4,sr=0", "ok"), ("nvfp5", "error"), ("0", None)])
def test_the_doctor_says_what_is_emulated(
    value: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EMULATE, value)
    assert {f.subject: f.level for f in doctor.findings()}.get(EMULATE) == level


def test_the_page_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "nvfp4.md").read_text()
    from megatron_nemotron3.precision.te_variables import markdown

    assert "\n".join(markdown()) in text


#: Run by TE_PYTHON with one variable set: what its recipes are, or that they cannot be made.
LIVE = """
import json
try:
    from transformer_engine.common import recipe as r
    recipes = r.NVFP4BlockScaling(), r.MXFP8BlockScaling(), r.Float8CurrentScaling(), r.Float8BlockScaling()
    print("RESULT", json.dumps([repr(recipe) for recipe in recipes]))
except (AssertionError, ValueError):  # pydantic makes the second of the first
    print("RESULT", json.dumps("raises"))
"""


@pytest.mark.te
@pytest.mark.parametrize("variable", PYTHON, ids=lambda v: v.name)
def test_live_te_does_what_the_table_says(variable, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.te import test_te_stack

    if not os.environ.get("TE_PYTHON"):
        pytest.skip("TE_PYTHON does not name the interpreter of an environment with TransformerEngine")
    default = test_te_stack.run_with_te(LIVE)
    for value in variable.changing:
        monkeypatch.setenv(variable.name, value)
        assert test_te_stack.run_with_te(LIVE) not in (default, "raises")
    for value in variable.neutral:
        monkeypatch.setenv(variable.name, value)
        assert test_te_stack.run_with_te(LIVE) == default
    monkeypatch.setenv(variable.name, "yes")
    assert test_te_stack.run_with_te(LIVE) == ("raises" if variable.strict else default)
