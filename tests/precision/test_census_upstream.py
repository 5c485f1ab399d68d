"""What Megatron itself hands to linears is what the census says; runs that would have no NVFP4 end."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_nemotron3 import models
from megatron_nemotron3.precision import install, yaml_file
from megatron_nemotron3.precision.census import Entry, census, formats_of_model, recipe_of, require_format
from megatron_nemotron3.precision.model_formats import Ambient, CensusError, ModelFormats
from megatron_nemotron3.precision.table import Structure
from megatron_nemotron3.precision.yaml_file import NO_FILE, PrecisionFileError
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.train import run_checks
from tests.support.models import GOLDEN_MODELS, build_hybrid

from .test_census import GOLDEN, content, counted

# -- upstream hands the file out -----------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[dict[int, str | None]]:
    """Torch linears with the hook of TE's: module -> the config upstream gave it last."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_nemotron3.layers.experts import GroupedLinear
    from megatron_nemotron3.layers.linear import DuplicatedLinear

    given: dict[int, str | None] = {}

    def finish_init(self: Any, quant_config: Any) -> None:
        given[id(self)] = quant_config.config_key if quant_config else None

    with ExitStack() as stack:
        for cls in (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear, GroupedLinear):
            stack.enter_context(mock.patch.object(cls, "finish_init", finish_init, create=True))
        yield given


def tiny_super(pattern: str = GOLDEN_MODELS["super_like"][0], **overrides: Any) -> Any:
    """The golden Super with its file in the config, as `--te-precision-config-file` puts it there.

    `fp4` is set behind the builder's back, which refuses it in E layers without TransformerEngine; so is the
    file where linears do not listen to it, which our stack refuses.
    """
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    fields, fp4 = GOLDEN_MODELS["super_like"][1], overrides.pop("fp4", None)
    values = {"quant_recipe": RecipeConfig.from_config_dict(content(models.SUPER)), **fields, **overrides}
    file = values["quant_recipe"]
    if not hasattr(ColumnParallelLinear, "finish_init"):
        values["quant_recipe"] = None
    model = build_hybrid(pattern, nemotron3_torch_stack_spec, **values)
    model.config.fp4, model.config.quant_recipe = fp4, file
    return model


#: As Megatron's config has it when `--fp4-format e2m1` was parsed.
FP4: dict[str, Any] = {"fp4": "e2m1", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0}


def compare_with_upstream() -> int:
    initialize()
    with listening() as given:
        model = tiny_super(**FP4, num_layers_at_end_in_bf16=1)
        entries = census(model)
        modules = dict(model.named_modules())
        assert entries == require_format(model, "nvfp4")
    file = recipe_of(model.config)
    checked = 0
    for entry in entries:
        if not entry.kind.quantizable:
            assert not entry.follows
            continue
        assert entry.follows
        config = given[id(modules[entry.name])]
        want = entry.ambient if config is None else file.settings[config][0].applied(entry.ambient)
        assert (entry.format, entry.effective) == (want, want), entry
        checked += 1
    assert counted(entries) == {"nvfp4": 6, "mxfp8": 2, "bf16": 19}
    return checked


def test_upstream_gives_every_linear_what_the_census_says() -> None:
    """`HybridModel.__init__` itself matches names; only the hook is ours."""
    assert run_distributed(compare_with_upstream, 1)[0] == len(GOLDEN["super_like"]["precision"])


@pytest.mark.parametrize("counts", [(0, 0), (1, 1), (0, 14), (2, 0), (0, 500), (44, 44)])
def test_layer_range_is_upstreams(counts: tuple[int, int]) -> None:
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = SimpleNamespace(
        fp4="e2m1",
        fp8=None,
        fp4_recipe="nvfp4",
        num_layers=88,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=counts[0],
        num_layers_at_end_in_bf16=counts[1],
    )
    ambient = Ambient.of(config)
    for layer in range(88):
        assert (ambient.of_layer(layer) == "bf16") == is_first_last_bf16_layer(config, layer)
    config.first_last_layers_bf16 = False
    assert Ambient.of(config).of_layer(87) == "nvfp4"


def mtp_formats() -> list[dict[str, str]]:
    initialize()
    model = tiny_super()
    plain = replace(formats_of_model(model), file=NO_FILE)
    ambients = (
        Ambient("nvfp4", 5),
        Ambient("nvfp4", 5, at_start=1),
        Ambient("nvfp4", 5, at_end=4),
        Ambient("mxfp8", 5, at_end=5, whole_mtp=True),
    )
    return [
        {e.name: e.format for e in census(model, replace(plain, ambient=ambient)) if e.kind.name == "mtp"}
        for ambient in ambients
    ]


def test_mtp_numbers_its_own_layers() -> None:
    """Unmatched, MTP is quantized by numbers of its own: why the file names it first."""
    plain, start, end, mxfp8 = run_distributed(mtp_formats, 1)[0]
    eh_proj, inner = "mtp.layers.0.eh_proj", "mtp.layers.0.mtp_model_layer.layers"
    assert {plain[eh_proj], start[eh_proj]} == {"bf16"}  # outside the FP4 layers
    assert {fmt for name, fmt in plain.items() if name != eh_proj} == {"nvfp4"}
    assert start[f"{inner}.0.self_attention.linear_qkv"] == "bf16"
    assert start[f"{inner}.1.mlp.experts.linear_fc1"] == "nvfp4"
    assert end[f"{inner}.0.self_attention.linear_qkv"] == "nvfp4"
    assert end[f"{inner}.1.mlp.experts.linear_fc1"] == "bf16"
    assert set(mxfp8.values()) == {"mxfp8"}


# -- runs that would have none -------------------------------------------------------------------------------

ASKED = ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]
#: Run -> what `require_format` and the launcher say at its first forward.
REFUSED = {
    "nobody listens": "6 of 6 nvfp4 linears of this rank cannot compute it, first decoder.layers.0.",
    "bf16": "the layers' format is bf16: pass --fp4-format e2m1",
    "all tail": "none of the model's 27 linears is nvfp4 (27 bf16): 0 layers at the start and 500",
    "all taken": "6 matchers of the precision file take the rest",
    "typo": "'*mixer.output_proj' matches no linear of this model",
}


def first_forward(model: Any, arguments: list[str]) -> tuple[int | None, str]:
    """(exit code or None, what was said) of the first forward of a run that was given `arguments`."""
    run_checks.verify_quantized(arguments)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            model(None, None, None)
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    except Exception:  # nothing was given to multiply: the launcher let it pass
        return None, said.getvalue()
    raise AssertionError("a forward of nothing")


def look_at_runs() -> tuple[dict[str, str], dict[str, tuple[int | None, str]]]:
    """What `require_format` and the launcher say to runs with and without NVFP4."""
    from megatron.core.quantization.quant_config import RecipeConfig

    initialize()
    star, typo = content(models.SUPER), content(models.SUPER)
    star["matchers"]["rest"] = {"config": "bf16", "type": "glob", "pattern": "*", "enabled": True}
    typo["matchers"]["mamba_out"]["pattern"] = "*mixer.output_proj"
    runs: dict[str, dict[str, Any]] = {
        "good": {},
        "no file": {"quant_recipe": None},
        "nobody listens": {},
        "bf16": {"fp4": None},
        "all tail": {"num_layers_at_end_in_bf16": 500},
        "all taken": {"quant_recipe": RecipeConfig.from_config_dict(star)},
        "typo": {"quant_recipe": RecipeConfig.from_config_dict(typo)},
    }
    refused: dict[str, str] = {}
    ended: dict[str, tuple[int | None, str]] = {}
    for name, overrides in runs.items():
        with nullcontext() if name == "nobody listens" else listening():
            model = tiny_super(**{**FP4, "num_layers_at_end_in_bf16": 1, **overrides})
            try:
                require_format(model, "nvfp4")
            except (CensusError, PrecisionFileError) as error:
                refused[name] = str(error)
            ended[name] = first_forward(model, ASKED)
    for name, arguments in (("not asked", ["--bf16"]), ("custom", [*ASKED[:-1], "custom"])):
        ended[name] = first_forward(tiny_super(**FP4, num_layers_at_end_in_bf16=1), arguments)
    return refused, ended


def test_a_run_that_asked_for_nvfp4_and_has_none_ends() -> None:
    refused, ended = run_distributed(look_at_runs, 1)[0]
    assert set(refused) == set(REFUSED)
    for name, (code, said) in ended.items():
        if name not in REFUSED:
            assert (code, said) == (None, ""), name
            continue
        assert code == 2 and REFUSED[name] in refused[name]
        assert said.startswith("megatron_nemotron3.run: ") and REFUSED[name] in said


def announced() -> tuple[str, list[str]]:
    """What a stack on FP4 hardware prints at its first forward, and formats of the census."""
    initialize()
    with listening():
        model = tiny_super(**FP4, num_layers_at_end_in_bf16=1)
        install._check_at_first_forward(model.decoder, None, None)
        said = io.StringIO()
        with redirect_stdout(said), suppress(Exception):  # nothing was given to multiply
            model(None, None, None)
        return said.getvalue(), [e.effective for e in census(model) if e.kind.name == "mamba_out"]


def test_a_stack_on_fp4_hardware_says_what_is_in_force() -> None:
    said, mamba_out = run_distributed(announced, 1)[0]
    assert "linears of the whole model: 19 bf16, 2 mxfp8, 6 nvfp4, as published" in said
    assert mamba_out == ["mxfp8"] * 2


def stages() -> tuple[dict[str, str], int]:
    """A stage whose layers are all tail and MTP is fine: the model is asked, not the rank."""
    initialize(pp=2)
    with listening():
        model = tiny_super("MEM|*E/*E/*E", **FP4, num_layers_at_end_in_bf16=2)
        entries = require_format(model, "nvfp4")
    return {e.name: e.format for e in entries if e.kind.quantizable}, counted(entries)["nvfp4"]


@pytest.mark.full
def test_pipeline_stages_number_layers_globally() -> None:
    """Names count from 0 on every stage, layers do not."""
    (first, nvfp4), (second, none) = run_distributed(stages, 2)
    assert (nvfp4, none) == (6, 0)
    assert "decoder.layers.0.self_attention.linear_qkv" in second and "mtp.layers.0.eh_proj" in second
    assert first["decoder.layers.0.mixer.out_proj"] == "mxfp8"
    assert set(second.values()) == {"bf16"}


def nested(pattern: str) -> list[Entry]:
    initialize()
    body = content(models.SUPER)
    body["matchers"]["mtp"]["pattern"] = pattern
    file = yaml_file.parse(body, replace(models.SUPER))
    outer = torch.nn.Module()
    outer.language_model = tiny_super()
    return census(outer, ModelFormats(Structure(""), file, Ambient("nvfp4", 5, at_end=1)))


def test_a_model_in_a_model() -> None:
    assert counted(run_distributed(nested, 1, "*mtp.*")[0]) == {"bf16": 27}
    with pytest.raises(CensusError, match=r"'mtp\.\*' matches only one of mtp.* start it with \*"):
        run_distributed(nested, 1, "mtp.*")


def test_a_matrix_nobody_knows() -> None:
    modules = [("decoder.layers.0.mixer.new_proj", torch.nn.Linear(2, 2))]
    with pytest.raises(CensusError, match=r"new_proj \(Linear\) holds a matrix, but no row"):
        census(modules, ModelFormats(Structure(""), NO_FILE, Ambient("nvfp4", 1)))
    with pytest.raises(CensusError, match="no HybridModel"):
        census(modules)


# -- live TransformerEngine, opt-in --------------------------------------------------------------------------

#: Run by TE_PYTHON: the golden Super from stock and our TE spec; census against what each module parsed.
LIVE = f"""
import json, logging, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
import yaml
from megatron_nemotron3.proof.certify import ranks
from tests.support import models
from megatron_nemotron3.models import SUPER
from megatron_nemotron3.precision import yaml_file

def take(module, name):
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron.core.transformer.spec_utils import import_module
    from megatron_nemotron3.precision.census import census, require_format

    ranks.initialize()
    pattern, fields = models.GOLDEN_MODELS["super_like"]
    recipe = RecipeConfig.from_config_dict(yaml.safe_load(yaml_file.render(SUPER)))
    model = models.build_hybrid(
        pattern, import_module((module, name)), quant_recipe=recipe, num_layers_at_end_in_bf16=1,
        **fields, **{FP4!r},
    )
    entries, modules, rows = require_format(model, "nvfp4"), dict(model.named_modules()), []
    for e in entries:
        params = getattr(modules[e.name], "te_quant_params", None)
        recipe = params and params.training_recipe
        parsed = recipe and (recipe.fp8_quantization_recipe or recipe.fp4_quantization_recipe or "bf16")
        rows.append([e.name, e.kind.quantizable, e.ambient, e.format, e.effective, parsed])
    return rows

specs = {{"stock": ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
         "te": ("megatron_nemotron3.specs", "nemotron3_te_stack_spec")}}
taken = {{who: ranks.run_distributed(take, 1, *spec)[0] for who, spec in specs.items()}}
print("RESULT", json.dumps(taken))
"""


@pytest.mark.te
def test_live_te_modules() -> None:
    from tests.te import test_te_stack

    if not test_te_stack.os.environ.get("TE_PYTHON"):
        pytest.skip("TE_PYTHON does not name the interpreter of an environment with TransformerEngine")
    for who, rows in test_te_stack.run_with_te(LIVE).items():
        linears = [row for row in rows if row[1]]
        assert {row[0] for row in linears} == set(GOLDEN["super_like"]["precision"]), who
        for name, _, ambient, fmt, effective, parsed in linears:
            assert effective == fmt == (parsed if parsed and ambient != "bf16" else ambient), (who, name)
        assert Counter(row[3] for row in linears) == {"nvfp4": 6, "mxfp8": 2, "bf16": 19}
