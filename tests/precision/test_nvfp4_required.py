"""The launcher ends a run that was told `--fp4-format` and computes without NVFP4."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stderr, suppress
from typing import Any

import pytest

from megatron_nemotron3 import run
from megatron_nemotron3.precision import install
from megatron_nemotron3.precision.census import census, recipe_of, structure_of
from megatron_nemotron3.precision.model_formats import Ambient, ModelFormats
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed

from .test_census_upstream import FP4, listening, tiny_super

ASKED = ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]


def first_forward(arguments: list[str], hear: bool, **overrides: Any) -> tuple[int | None, str]:
    """(exit code or None, what was said) of the first forward of a run that was given `arguments`."""
    run.verify_quantized(arguments)
    with ExitStack() as stack:
        if hear:
            stack.enter_context(listening())
        model = tiny_super(**{**FP4, "num_layers_at_end_in_bf16": 1, **overrides})
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                model(None, None, None)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
        except Exception:  # nothing was given to multiply: the launcher let it pass
            return None, said.getvalue()
    raise AssertionError("a forward of nothing")


def looks() -> dict[str, tuple[int | None, str]]:
    initialize()
    return {
        "good": first_forward(ASKED, True),
        "nobody listens": first_forward(ASKED, False),
        "all tail": first_forward(["--fp4-format=e2m1"], True, num_layers_at_end_in_bf16=500),
        "dropped": first_forward(ASKED, True, fp4=None),
        "not asked": first_forward(["--bf16"], False),
        "other recipe": first_forward(["--fp4-format", "e2m1", "--fp4-recipe", "custom"], False),
    }


def test_at_the_first_forward() -> None:
    found = run_distributed(looks, 1)[0]
    assert {name for name, (code, _) in found.items() if code is None} == {
        "good",
        "not asked",
        "other recipe",
    }
    assert {found[name] for name in ("good", "not asked", "other recipe")} == {(None, "")}
    for name, message in (
        ("nobody listens", "6 of 6 nvfp4 linears of this rank cannot compute it"),
        ("all tail", "none of the model's 27 linears is nvfp4 (27 bf16)"),
        ("dropped", "the layers' format is bf16: pass --fp4-format e2m1"),
    ):
        code, said = found[name]
        assert (
            code == 2 and message in said and said.startswith("megatron_nemotron3.run: nvfp4 was asked for")
        )


def announced() -> tuple[str, str, list[str]]:
    """What a stack on FP4 hardware prints at its first forward, and the census with it."""
    import io
    from contextlib import redirect_stdout

    initialize()
    with listening():
        model = tiny_super(**FP4, num_layers_at_end_in_bf16=1)
        install._check_at_first_forward(model.decoder, None, None)
        said = io.StringIO()
        with redirect_stdout(said), suppress(Exception):  # nothing was given to multiply
            model(None, None, None)
        in_force = ModelFormats(structure_of(model), recipe_of(model.config), Ambient.of(model.config))
        mamba_out = [entry.effective for entry in census(model) if entry.kind.name == "mamba_out"]
        return said.getvalue(), "\n".join(in_force.in_force()), mamba_out


def test_a_stack_on_fp4_hardware_says_what_is_in_force() -> None:
    run_said, census_said, mamba_out = run_distributed(announced, 1)[0]
    for said in (run_said, census_said):
        assert "linears of the whole model: 19 bf16, 2 mxfp8, 6 nvfp4, as published" in said
    assert mamba_out == ["mxfp8"] * 2


#: Run by TE_PYTHON: stock TE linears hear of their formats; where the tail is everything, the run ends.
LIVE = f"""
import json, logging, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
import yaml
from megatron_nemotron3.proof.certify import ranks
from tests.support import models
from megatron_nemotron3.models import SUPER
from megatron_nemotron3.precision import yaml_file

def take(tail):
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron_nemotron3 import run

    ranks.initialize()
    pattern, fields = models.GOLDEN_MODELS["super_like"]
    recipe = RecipeConfig.from_config_dict(yaml.safe_load(yaml_file.render(SUPER)))
    run.verify_quantized({ASKED!r})
    model = models.build_hybrid(
        pattern, hybrid_stack_spec, quant_recipe=recipe, num_layers_at_end_in_bf16=tail, **fields, **{FP4!r}
    )
    try:
        model(None, None, None)
    except SystemExit as end:
        return end.code
    except Exception:
        return "passed"

print("RESULT", json.dumps([ranks.run_distributed(take, 1, tail)[0] for tail in (1, 500)]))
"""


@pytest.mark.te
def test_live_te_modules() -> None:
    from tests.te import test_te_stack

    if not test_te_stack.os.environ.get("TE_PYTHON"):
        pytest.skip("TE_PYTHON does not name the interpreter of an environment with TransformerEngine")
    assert test_te_stack.run_with_te(LIVE) == ["passed", 2]
