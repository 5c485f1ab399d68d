"""The precision file: upstream reads ours as meant, and what it would ignore is a named error here."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, precision_file
from megatron_nemotron3.precision import command, yaml_file
from megatron_nemotron3.precision.table import Structure
from megatron_nemotron3.precision.yaml_file import RECIPE_FIELDS, PrecisionFileError

CONFIGS = [models.get(name + size) for name in models.names() for size in ("", "-tiny")]
GOOD = yaml_file.render(models.SUPER)
MTP = '  mtp:\n    config: "bf16"\n    type: "glob"\n    pattern: "*mtp.*"\n    enabled: true\n'
QKV = 'pattern: "*.linear_qkv"'
REST = '  rest:\n    config: "bf16"\n    type: "glob"\n    pattern: "*"\n    enabled: true\n'
MATCHERS = GOOD[GOOD.index("matchers:") :]


def but(old: str, new: str) -> str:
    assert old in GOOD, old
    return GOOD.replace(old, new, 1)


#: Text of a file -> what its message must say. Megatron 0.19.2 takes most of these, or fails late.
BAD: dict[str, tuple[str, str]] = {
    "empty": ("# nothing yet\n", "empty, so not a mapping .*nemotron3 precision super --output FILE writes"),
    "a list": ("- configs\n- matchers\n", r"\['configs', 'matchers'\] is not a mapping"),
    "parts no mappings": ("configs: 1\nmatchers: [mtp]\n", r"configs: 1 is not .*\n.*matchers: \['mtp'\] is"),
    "two documents": ("a: 1\n---\nb: 2\n", "not YAML: expected a single document"),
    "not YAML": ("configs: {\n", "not YAML: "),
    "binary": ("\udcff\udcfe\0configs", "not YAML: "),
    "quotes forgotten": (but('"*mtp.*"', "*mtp.*"), "not YAML: .*put globs in quotes"),
    "a Python object": ("!!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "a date that is none": (but(QKV, "pattern: 2026-99-99"), "not YAML: month must be in 1..12"),
    "nested": ("[" * 5000, "nested too deeply"),
    "aliases": (
        "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nconfigs: *b\nmatchers: {}\n",
        r"configs: \[\[1, 1, 1, .*\.\.\.\] is not a mapping",
    ),
    "key no text": ("? [a]\n: b\n", "is not text, line 1"),
    "key twice": (but("  mamba_out:", "  latent:"), "key 'latent' is given twice, line"),
    "control characters": (GOOD + '  "a\\eb": 3\n', r"matchers\.'a\\x1bb': 3 is not a mapping"),
    "part misspelt": (but("matchers:", "matcher:"), "unknown key 'matcher'; did you mean 'matchers'"),
    "unknown part": (GOOD + "defaults: {}\n", "unknown key 'defaults'; known are configs, matchers"),
    "no matchers": (but(MATCHERS, ""), "no matchers"),
    "matchers none": (but(MATCHERS, "matchers: {}\n"), "the file would do nothing"),
    "all disabled": (but(MATCHERS, f"matchers:\n{MTP}".replace("true", "false")), "do nothing"),
    "a matcher empty": (GOOD + "  more:\n", "matchers.more: None is not a mapping"),
    "key of a matcher": (but("    enabled:", "    enable:"), "'enable'; did you mean 'enabled'"),
    "no enabled": (but("\n    enabled: true", ""), "matchers.mtp: no enabled: write enabled: true"),
    "enabled as text": (but("    enabled: true", "    enabled: 'on'"), "enabled: 'on': write enabled: true"),
    "another type": (but('type: "glob"', 'type: "regex"'), "'regex' is unknown: Megatron has only glob"),
    "no such config": (but('config: "bf16"', 'config: "bf61"'), "'bf61' is none .*did you mean 'bf16'"),
    "config no text": (but('config: "bf16"', "config: [bf16]"), r"\['bf16'\] is none of bf16, mxfp8"),
    "key of a config": (but("training_recipe", "trainig_recipe"), "did you mean 'training_recipe'"),
    "no type": (but("transformer_engine_config_type", "config_type"), "unknown key 'config_type'"),
    "another kind": (but("TEQuantizationParams", "QLinearParams"), "'QLinearParams' .*TEQuantizationParams"),
    "empty recipe": (but("training_recipe: {}", "training_recipe:"), "None is not a mapping: write {}"),
    "key of a recipe": (but("fp8_quantization", "fp8_quantisation"), "mean 'fp8_quantization_recipe'"),
    "no such format": (but('"mxfp8"}', '"mxfp4"}'), "'mxfp4' is unknown: use mxfp8.*did you mean 'mxfp8'"),
    "format no text": (but('"mxfp8"}', "8}"), "8 is unknown: use mxfp8"),
    "delayed": (but('"mxfp8"}', '"delayed"}'), "'delayed' is unknown: use mxfp8, tensorwise"),
    "fp4 as fp8": (but("{fp8_quantization", "{fp4_quantization"), "use nvfp4, custom"),
    "both": (
        but('"mxfp8"}', '"mxfp8", fp4_quantization_recipe: "nvfp4"}'),
        "mxfp8 and .*nvfp4: give one",
    ),
    "custom alone": (but('"mxfp8"}', '"custom"}'), "custom recipe needs custom_recipe_factory"),
    "not a switch": (but('"mxfp8"}', '"mxfp8", fp8_param: 1}'), "fp8_param: 1 is unknown: use true, false"),
    "a regular expression": (but(QKV, 'pattern: ".*(qkv|proj)$"'), r"no module name contains '\$', '\('"),
    "a bracket": (but("fc[12]", "fc[12"), "a bracket that is not closed"),
    "pattern empty": (but(QKV, 'pattern: ""'), 'is empty: "\\*" stands for all linears'),
    "pattern no text": (but(QKV, "pattern: [a]"), r"\['a'\] is not text"),
    "by number": (but(QKV, 'pattern: "decoder.layers.8[0-7].*"'), "number, .*--num-layers-at-end-in-bf16"),
    "matches nothing": (but(QKV, 'pattern: "*.linear_qvk"'), r"no linear .*did you mean '\*.*linear_qkv'"),
    "two kinds": (
        but("*mixer.out_proj", "*linear_fc2"),
        "2 kinds: experts .*shared_experts .*one matcher for each",
    ),
    "shadowed": (but(QKV, 'pattern: "*mtp.layers.0.*.linear_qkv"'), "has no effect: mtp comes first"),
    "mtp comes last": (but(MTP, "") + MTP, "attention_qkv: .*2 kinds: attention .*mtp"),
}


def upstream(path: Path) -> Any:
    from megatron.core.quantization.utils import load_quantization_recipe

    return load_quantization_recipe(str(path))


def parsed(text: str, config: models.Nemotron3Config = models.SUPER) -> yaml_file.PrecisionFile:
    return yaml_file.parse(yaml.safe_load(text), config)


def test_a_written_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    for _ in range(2):
        yaml_file.write_precision_file(models.SUPER, path)
    assert path.read_text() == GOOD
    with pytest.raises(FileExistsError, match="remove it first"):
        yaml_file.write_precision_file(models.NANO, path)
    assert path.read_text() == GOOD
    assert len(yaml_file.read(path, models.SUPER).matchers) == 5


def test_bad_files_are_named(tmp_path: Path) -> None:
    """The good text fails for what is done to it, and for nothing else."""
    path = tmp_path / "bad.yaml"
    for case, (text, message) in BAD.items():
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(PrecisionFileError) as caught:
            yaml_file.read(path, models.SUPER)
        assert re.search(message, str(caught.value)), (case, str(caught.value))
        assert str(caught.value).startswith(f"--te-precision-config-file {path}:\n  - "), case
        assert isinstance(caught.value, ValueError)


JUNK: tuple[Any, ...] = (None, 3, [], {}, "x", True, ["a", {}], {"b": 1}, float("nan"))


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from places(value, (*path, key))


def test_any_value_anywhere() -> None:
    """Junk in place of every value and beside it: taken as it is, or named; never another exception."""
    refused = 0
    whole = yaml.safe_load(GOOD)
    for path, junk, new_key in itertools.product(list(places(whole)), JUNK, (False, True)):
        content = copy.deepcopy(whole)
        holder = content
        for key in path[:-1]:
            holder = holder[key]
        if not path:
            content = junk
        else:
            holder[f"{path[-1]}x" if new_key else path[-1]] = junk
        try:
            yaml_file.parse(content, models.SUPER)
        except PrecisionFileError as error:
            refused += 1
            assert error.problems
        else:  # what was taken is a recipe or a switch with a meaning
            assert path[-1] in ("enabled", "training_recipe"), (path, junk, new_key)
    assert refused > 400


def test_all_problems_at_once() -> None:
    with pytest.raises(PrecisionFileError) as caught:
        parsed(GOOD.replace("\n    enabled: true", "").replace('"mxfp8"}', '"mxfp9"}'))
    assert len(caught.value.problems) == 6  # five matchers and a format
    with pytest.raises(PrecisionFileError) as caught:
        parsed(GOOD, models.NANO)  # no MTP and no latent experts
    assert len(caught.value.problems) == 2


def test_what_upstream_does_with_them(tmp_path: Path) -> None:
    """Why they are errors: Megatron takes these and leaves the modules as they were."""
    from megatron.core.quantization.utils import get_quant_config_or_none

    name = "decoder.layers.7.self_attention.linear_qkv"
    path = tmp_path / "file.yaml"
    path.write_text(GOOD)
    assert get_quant_config_or_none(name, upstream(path)).config_key == "bf16"
    silent = [BAD[case][0] for case in ("part misspelt", "matches nothing")]
    for text in (*silent, GOOD.replace("\n    enabled: true", "")):
        path.write_text(text)
        assert get_quant_config_or_none(name, upstream(path)) is None


def test_matchers_that_take_the_rest_or_nothing() -> None:
    out_proj = "decoder.layers.0.mixer.out_proj"
    file = parsed(GOOD + REST)
    assert file.format("decoder.layers.0.mixer.in_proj", "nvfp4") == "bf16"
    assert file.format(out_proj, "nvfp4") == "mxfp8"
    content = yaml.safe_load(GOOD)
    content["matchers"]["mamba_out"]["enabled"] = False
    assert yaml_file.parse(content, models.SUPER).format(out_proj, "nvfp4") == "nvfp4"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_upstreams_loader_resolves_the_same(config: models.Nemotron3Config, tmp_path: Path) -> None:
    """`load_quantization_recipe`, `get_quant_config_or_none` and `TEQuantizationParams` on every linear."""
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.utils import get_quant_config_or_none

    path = tmp_path / "file.yaml"
    yaml_file.write_precision_file(config, path)
    ours, theirs = yaml_file.read(path, config), upstream(path)
    for prefix in ("", "module.language_model."):
        for linear in Structure.of(config).linears():
            name, wanted = prefix + linear.name, linear.kind.recipe
            assert ours.format(name, "nvfp4") == yaml_file.PUBLISHED.format(name, "nvfp4") == wanted
            # In the BF16 tail nothing is overridden.
            assert ours.format(name, "bf16") == yaml_file.PUBLISHED.format(name, "bf16") == "bf16"
            found, matcher = get_quant_config_or_none(name, theirs), ours.matcher(name)
            assert (found and found.config_key) == (matcher and matcher.config)
            if found is None:
                assert wanted == "nvfp4"
                continue
            recipe = TEQuantizationParams.parse_from_config(found).training_recipe
            assert (recipe.fp8_quantization_recipe or recipe.fp4_quantization_recipe or "bf16") == wanted
            assert recipe.override_quantized_autocast and not recipe.override_nonquantized_autocast
            assert not (recipe.fp8_param or recipe.fp4_param)


def test_recipes_upstream_refuses_we_refuse() -> None:
    """Nothing that Megatron's parser of a recipe refuses is taken here: the bad ones are a superset."""
    from megatron.core.extensions.transformer_engine import TEQuantizationRecipe

    assert set(RECIPE_FIELDS) == TEQuantizationRecipe.get_config_keys()
    refused = 0
    for case in ("no such format", "delayed", "fp4 as fp8", "both", "custom alone", "key of a recipe"):
        configs = yaml.safe_load(BAD[case][0])["configs"]
        try:
            TEQuantizationRecipe.parse_from_config(configs["mxfp8"]["training_recipe"])
        except (ValueError, KeyError, TypeError):
            refused += 1
            with pytest.raises(PrecisionFileError):
                yaml_file.parse({"configs": configs, "matchers": {}})
    assert refused


def test_overrides_are_upstreams() -> None:
    """Whether a linear is quantized, as `_get_should_context_be_quantized_params` has it; both recipes."""
    from megatron.core.extensions.transformer_engine import (
        TEQuantizationParams,
        _get_should_context_be_quantized_params,
    )
    from megatron.core.quantization.quant_config import MatchContext, RecipeConfig

    fields: dict[str, dict[str, Any]] = {
        "bf16": {},
        "mxfp8": {"fp8_quantization_recipe": "mxfp8"},
        "nvfp4": {"fp4_quantization_recipe": "nvfp4"},
    }
    matcher = {"config": "c", "type": "glob", "pattern": "x", "enabled": True}
    switches = (True, False)
    for (fmt, field), over_quantized, over_bf16 in itertools.product(fields.items(), switches, switches):
        overrides = {
            "override_quantized_autocast": over_quantized,
            "override_nonquantized_autocast": over_bf16,
        }
        body = {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {**field, **overrides},
            "evaluation_recipe": {},
        }
        content = {"configs": {"c": body}, "matchers": {"m": matcher}}
        params = TEQuantizationParams.parse_from_config(
            RecipeConfig.from_config_dict(content).match(MatchContext("x", None))
        )
        file = yaml_file.parse(content)
        for training, ambient in itertools.product(switches, ("bf16", "nvfp4")):
            theirs = _get_should_context_be_quantized_params(params, training, ambient != "bf16")
            assert (file.format("x", ambient, training=training) != "bf16") == theirs
        assert not over_quantized or file.format("x", "nvfp4") == fmt
        assert not over_bf16 or file.format("x", "bf16") == fmt


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "nvfp4.yaml"
    launch = Launch.of("super", precision="nvfp4", backend="te", te_precision_config_file=str(path))
    assert "is not on this machine" in precision_file.check(launch)[0]
    assert "--te-precision-config-file" in command.write(models.SUPER, "nvfp4", path)
    assert path.read_text() == GOOD and precision_file.check(launch) == []
    with pytest.raises(ValueError, match="--precision mxfp8 needs no file"):
        command.write(models.SUPER, "mxfp8", tmp_path / "other.yaml")
