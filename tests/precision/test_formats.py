"""The table of recipes: against Megatron's own, against the GPUs, and what each reader makes of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_nemotron3 import cli, models
from megatron_nemotron3.launch import Launch, check
from megatron_nemotron3.launch.plan.activations import PACKED
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.precision_file import formats_of
from megatron_nemotron3.precision import command as precision_command
from megatron_nemotron3.precision.formats import (
    BLOCKWISE,
    DEFAULT_RECIPES,
    FORMATS,
    TENSORWISE,
    either,
    name_of,
    runnable,
)
from megatron_nemotron3.precision.model_formats import Ambient, ModelFormats
from megatron_nemotron3.precision.table import PRECISIONS, bf16_layers
from megatron_nemotron3.precision.yaml_file import NO_FILE, PARAMS, RECIPE_FIELDS, TYPE, parse

HOPPER, BLACKWELL = (9, 0), (10, 0)
FP8 = tuple(name for name, fmt in FORMATS.items() if fmt.kind == "fp8")


def test_they_are_megatrons() -> None:
    enums = pytest.importorskip("megatron.core.enums")
    config = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    fp4 = {recipe.value for recipe in enums.Fp4Recipe} - {"custom"}
    fp8 = {recipe.value for recipe in enums.Fp8Recipe} - {"custom"}
    assert {fmt.recipe for fmt in FORMATS.values() if fmt.kind == "fp4"} == fp4
    assert {fmt.recipe for fmt in FORMATS.values() if fmt.kind == "fp8"} == fp8
    defaults = {kind: getattr(config, f"{kind}_recipe") for kind in DEFAULT_RECIPES}
    assert defaults == DEFAULT_RECIPES
    for recipe in enums.Fp8Recipe:
        assert name_of(recipe) == ("custom" if recipe.value == "custom" else name_of(recipe.value))


def test_blocks_are_those_megatron_pads_to() -> None:
    utils = pytest.importorskip("megatron.core.fp8_utils")
    fp4_utils = pytest.importorskip("megatron.core.fp4_utils")
    for fmt in FORMATS.values():
        if fmt.kind == "fp8":
            assert fmt.multiple == utils.get_fp8_align_size(fmt.recipe)
        else:
            assert fp4_utils.get_fp4_align_size(fmt.recipe) % fmt.multiple == 0


def test_what_a_gpu_runs() -> None:
    assert runnable(HOPPER) == ("fp8-tensorwise", "fp8-blockwise", "fp8-delayed", "bf16")
    assert runnable(BLACKWELL) == PRECISIONS
    assert runnable((8, 9)) == ("fp8-tensorwise", "fp8-delayed", "bf16")
    assert runnable((8, 0)) == ("bf16",)
    assert not {"mxfp8", "nvfp4"} & set(runnable((12, 0)))
    assert either(runnable((8, 9))) == "fp8-tensorwise, fp8-delayed or bf16" and either(["a"]) == "a"


def test_the_owner_of_an_h200_is_told_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cure = "fp8-tensorwise, fp8-blockwise, fp8-delayed or bf16"
    nvfp4 = {"precision": "nvfp4", "backend": "te", "te_precision_config_file": "x"}
    found = check(Launch.of("super", compute_capability=HOPPER, **nvfp4))
    assert f"use precision {cure}" in next(v.message for v in found if v.rule == "quantized-hardware")
    assert cli.main(["plan", "super", "--gpus", "64", "--gpu", "h200", "--precision", "nvfp4"])
    assert f"use --precision {cure}" in capsys.readouterr().err
    for precision in FP8[1:]:
        launch = Launch.of("super", precision=precision, backend="te", compute_capability=HOPPER)
        assert [v.rule for v in check(launch) if v.severity == "error"] == []
        assert GPUS["h200"].flops(precision) == GPUS["h200"].fp8
        assert 1 <= PACKED[precision] < PACKED["bf16"]
    assert cli.main(["plan", "nano", "--gpus", "16", "--gpu", "h200", "--precision", precision]) == 0
    assert f"--precision {precision} --backend te" in capsys.readouterr().out


def test_layers_that_stay_bf16() -> None:
    kept = {p: bf16_layers(models.SUPER, p) for p in PRECISIONS}
    assert {p: (k.start, k.end) for p, k in kept.items()} == {
        "nvfp4": (0, 14),
        "mxfp8": (0, 14),
        "fp8-tensorwise": (2, 2),
        "fp8-blockwise": (2, 2),
        "fp8-delayed": (0, 0),
        "bf16": (0, 0),
    }
    for precision in ("mxfp8", "fp8-blockwise"):  # in FP8 all of MTP, eh_proj too
        launch = Launch.of("super", precision=precision, backend="te")
        formats = formats_of(launch, NO_FILE)
        assert formats == ModelFormats.of(models.SUPER, precision)
        assert {has for linear, _, has in formats.linears() if linear.layer is None} == {precision}
    one = models.SUPER.but(pattern="M")
    assert all(bf16_layers(one, p).start + bf16_layers(one, p).end <= 1 for p in PRECISIONS)


@pytest.mark.parametrize(
    "name",
    ["nemotron-h-4b", "nemotron-h-8b", "nemotron-h-47b", "nemotron-h-56b", "nano-9b-v2", "nano-12b-v2"],
)
@pytest.mark.parametrize("precision", [TENSORWISE, BLOCKWISE])
def test_nemotron_h_has_the_fp8_recipe_of_its_report(
    name: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first and last four products stay BF16: two layers at each end, as in NVIDIA's recipes."""
    config = models.get(name)
    kept = [linear.layer for linear, _, has in ModelFormats.of(config, precision).linears() if has == "bf16"]
    assert Counter(kept) == dict.fromkeys((0, 1, config.num_layers - 2, config.num_layers - 1), 2)
    assert cli.main(["flags", name, "--precision", precision, "--backend", "te"]) == 0
    fmt, recipe = FORMATS[precision].elements, FORMATS[precision].recipe
    printed = " ".join(capsys.readouterr().out.split())
    for options in (
        f"--fp8-format {fmt} --fp8-recipe {recipe} ",
        "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2 ",
    ):
        assert options in printed
    said = "No source says" not in precision_command.render(config, precision)
    assert said == ((name, precision) in {("nemotron-h-56b", TENSORWISE), ("nano-12b-v2", BLOCKWISE)})


@pytest.mark.parametrize("name", FP8)
def test_a_config_and_a_file_say_it_by_one_name(name: str) -> None:
    fmt = FORMATS[name]
    config = SimpleNamespace(
        fp8=fmt.elements,
        fp4=None,
        fp8_recipe=fmt.recipe,
        num_layers=8,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=1,
        first_last_layers_bf16=fmt.bf16_layers,
    )
    ambient = Ambient.of(config)
    kept = (1, 1) if fmt.bf16_layers else (0, 0)
    assert ambient == Ambient.of_run(name, 8, *kept)
    assert ambient.of_layer(3) == ambient.of_mtp(None) == name
    assert ambient.of_layer(7) == ("bf16" if fmt.bf16_layers else name)
    if fmt.recipe in RECIPE_FIELDS["fp8_quantization_recipe"]:
        body = {TYPE: PARAMS, "training_recipe": {"fp8_quantization_recipe": fmt.recipe}}
        matcher = {"config": "a", "type": "glob", "pattern": "*", "enabled": True}
        file = parse({"configs": {"a": body}, "matchers": {"m": matcher}})
        assert file.format("decoder.layers.3.mixer.in_proj", "nvfp4") == name


def test_the_table_is_printed_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    for precision in PRECISIONS:
        assert cli.main(["precision", "nano", "--precision", precision]) == 0
        said = capsys.readouterr().out
        assert precision in said.splitlines()[0] + said.splitlines()[4]
        if precision in FORMATS:
            fmt = FORMATS[precision]
            assert f"compute capability {fmt.needs}" in said and f"--{fmt.kind}-recipe {fmt.recipe}" in said
