"""The precision file: upstream reads ours as meant, and what it would ignore is a named error here."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, precision_file
from megatron_nemotron3.precision import command, yaml_file
from megatron_nemotron3.precision.table import Structure, bf16_tail
from megatron_nemotron3.precision.yaml_file import RECIPE_FIELDS, PrecisionFileError

CONFIGS = [models.get(name + size) for name in models.names() for size in ("", "-tiny")]

GOOD = yaml_file.render(models.SUPER)
MTP = '  mtp:\n    config: "bf16"\n    type: "glob"\n    pattern: "*mtp.*"\n    enabled: true\n'
QKV = 'pattern: "*.linear_qkv"'

#: What is done to the text -> what the message must say. Megatron 0.19.2 takes it, or fails late.
BAD: dict[str, tuple[str, str, str]] = {
    "matchers misspelt": ("matchers:", "matcher:", "unknown key 'matcher'; did you mean 'matchers'"),
    "configs misspelt": ("configs:", "config:", "unknown key 'config'; did you mean 'configs'"),
    "field misspelt": (
        "fp8_quantization_recipe",
        "fp8_quantisation_recipe",
        "mean 'fp8_quantization_recipe'",
    ),
    "recipe misspelt": ("    training_recipe: {}", "    training: {}", "configs.bf16: no training_recipe"),
    "type misspelt": ('type: "glob"', 'type: "regex"', "type: 'regex' is unknown: Megatron has only glob"),
    "type key misspelt": (QKV, 'patern: "*.linear_qkv"', "unknown key 'patern'; did you mean 'pattern'"),
    "unknown format": ('"mxfp8"}', '"mxfp9"}', "'mxfp9' is unknown: use mxfp8, .*did you mean 'mxfp8'"),
    "delayed": ('"mxfp8"}', '"delayed"}', "'delayed' is unknown: use mxfp8, tensorwise"),
    "fp4 as fp8": (
        'fp8_quantization_recipe: "mxfp8"',
        'fp4_quantization_recipe: "mxfp8"',
        "use nvfp4, custom",
    ),
    "both": ('"mxfp8"}', '"mxfp8", fp4_quantization_recipe: "nvfp4"}', "mxfp8 and .*nvfp4: give one"),
    "custom alone": ('"mxfp8"}', '"custom"}', "custom recipe needs custom_recipe_factory"),
    "no value": ('{fp8_quantization_recipe: "mxfp8"}', "{fp8_quantization_recipe: }", "None is unknown: use"),
    "not a switch": ('"mxfp8"}', '"mxfp8", fp8_param: 1}', "fp8_param: 1 is unknown: use true, false"),
    "params type": ('"TEQuantizationParams"', '"QLinearParams"', "'QLinearParams' is unknown"),
    "empty recipe": ("training_recipe: {}", "training_recipe:", "None is not a mapping: write {}"),
    "no enabled": ("\n    enabled: true", "", "matchers.mtp: no enabled: write enabled: true"),
    "enabled as text": ("    enabled: true", '    enabled: "yes"', "enabled: 'yes': write enabled: true"),
    "unknown config": ('config: "mxfp8"', 'config: "mxfp4"', "'mxfp4' is none of bf16, mxfp8; did you mean"),
    "matches nothing": (QKV, 'pattern: "*.linear_qvk"', "attention_qkv: pattern .*qvk' matches no linear"),
    "never quantized": (QKV, 'pattern: "*output_layer"', "'\\*output_layer' matches no linear"),
    "two kinds": (
        "*mixer.out_proj",
        "*linear_fc2",
        "2 kinds: experts .*shared_experts .*one matcher for each",
    ),
    "shared experts too": ("*mixer.out_proj", "*experts.linear_fc1", "2 kinds: experts .*shared_experts"),
    "shadowed": (QKV, 'pattern: "*mtp.layers.0.*.linear_qkv"', "has no effect: mtp comes first and takes"),
    "mtp comes last": (MTP, "", "attention_qkv: .*2 kinds: attention .*mtp"),
    "by number": (QKV, 'pattern: "decoder.layers.8[0-7].*"', "by number, .*--num-layers-at-end-in-bf16"),
    "all disabled": (
        GOOD[GOOD.index("matchers:") :],
        f"matchers:\n{MTP}".replace("true", "false"),
        "do nothing",
    ),
    "quotes forgotten": ('"*mtp.*"', "*mtp.*", "not YAML: .*put globs in quotes"),
    "key twice": ("  mamba_out:", "  latent:", "key 'latent' is given twice, line"),
    "pattern no text": (QKV, "pattern: 7", "7 is not text"),
}


def spoiled(old: str, new: str) -> str:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    return text + MTP if old == MTP else text


def upstream(path: Path) -> Any:
    from megatron.core.quantization.utils import load_quantization_recipe

    return load_quantization_recipe(str(path))


def test_good_is_good(tmp_path: Path) -> None:
    """The texts below fail for what is done to them, and for nothing else."""
    path = tmp_path / "file.yaml"
    yaml_file.write_precision_file(models.SUPER, path)
    assert path.read_text() == GOOD
    yaml_file.write_precision_file(models.SUPER, path)  # again: the same
    assert len(yaml_file.read(path, models.SUPER).matchers) == 5
    with pytest.raises(FileExistsError, match="remove it first"):
        yaml_file.write_precision_file(models.NANO, path)
    assert path.read_text() == GOOD


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(case: str, tmp_path: Path) -> None:
    old, new, message = BAD[case]
    path = tmp_path / "bad.yaml"
    path.write_text(spoiled(old, new))
    with pytest.raises(PrecisionFileError) as caught:
        yaml_file.read(path, models.SUPER)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(caught.value).startswith(f"--te-precision-config-file {path}:\n  - ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "text", ["", "[]", "just text", "configs: {}\nmatchers: 3\n", "configs: 1\nmatchers: {}\n"]
)
def test_other_contents(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(PrecisionFileError, match="not a mapping"):
        yaml_file.read(path)


JUNK: tuple[Any, ...] = (None, 3, [], {}, "x", True, ["a", {}], {"b": 1}, float("nan"))


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from places(value, (*path, key))


def test_any_value_anywhere() -> None:
    """Junk in place of every value and beside it: taken as it is, or named; never another exception."""
    import yaml

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


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    for text in ("? [a]\n: b\n", "3: b\n", "on: b\n"):
        path.write_text(text)
        with pytest.raises(PrecisionFileError, match="is not text, line 1"):
            yaml_file.read(path)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00configs")
    with pytest.raises(PrecisionFileError, match="not YAML"):
        yaml_file.read(path)


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("\n    enabled: true", "").replace('"mxfp8"}', '"mxfp9"}'))
    with pytest.raises(PrecisionFileError) as caught:
        yaml_file.read(path, models.SUPER)
    assert len(caught.value.problems) == 6  # five matchers and a format


def test_what_upstream_does_with_them(tmp_path: Path) -> None:
    """Why they are errors: Megatron takes these and leaves the modules as they were."""
    from megatron.core.quantization.utils import get_quant_config_or_none

    name = "decoder.layers.7.self_attention.linear_qkv"
    path = tmp_path / "file.yaml"
    path.write_text(GOOD)
    assert get_quant_config_or_none(name, upstream(path)).config_key == "bf16"
    for case in ("matchers misspelt", "matches nothing"):
        path.write_text(spoiled(*BAD[case][:2]))
        assert get_quant_config_or_none(name, upstream(path)) is None
    path.write_text(GOOD.replace("\n    enabled: true", ""))
    assert get_quant_config_or_none(name, upstream(path)) is None


def test_a_last_star_stands_for_the_rest() -> None:
    text = GOOD + '  rest:\n    config: "bf16"\n    type: "glob"\n    pattern: "*"\n    enabled: true\n'
    import yaml

    file = yaml_file.parse(yaml.safe_load(text), models.SUPER)
    assert file.format("decoder.layers.0.mixer.in_proj", "nvfp4") == "bf16"
    assert file.format("decoder.layers.0.mixer.out_proj", "nvfp4") == "mxfp8"


def test_a_disabled_matcher_is_none() -> None:
    import yaml

    content = yaml.safe_load(GOOD)
    content["matchers"]["mamba_out"]["enabled"] = False
    file = yaml_file.parse(content, models.SUPER)
    assert file.format("decoder.layers.0.mixer.out_proj", "nvfp4") == "nvfp4"


def test_a_file_for_another_model() -> None:
    """Nano has no MTP and no latent experts: Super's globs would match nothing."""
    import yaml

    with pytest.raises(PrecisionFileError) as caught:
        yaml_file.parse(yaml.safe_load(GOOD), models.NANO)
    assert len(caught.value.problems) == 2
    assert yaml_file.parse(yaml.safe_load(yaml_file.render(models.NANO)), models.NANO)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_upstreams_loader_resolves_the_same(config: models.Nemotron3Config, tmp_path: Path) -> None:
    """`load_quantization_recipe`, `get_quant_config_or_none` and `TEQuantizationParams` on every linear."""
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.utils import get_quant_config_or_none

    path = tmp_path / "file.yaml"
    yaml_file.write_precision_file(config, path)
    ours, theirs = yaml_file.read(path, config), upstream(path)
    table = {linear.name: linear.kind.format("nvfp4") for linear in Structure.of(config).linears()}
    for prefix in ("", "language_model.", "module.language_model."):
        for linear in Structure.of(config).linears():
            found = get_quant_config_or_none(prefix + linear.name, theirs)
            matcher = ours.matcher(prefix + linear.name)
            assert (found and found.config_key) == (matcher and matcher.config)
            if found is None:
                assert table[linear.name] == "nvfp4"
                continue
            recipe = TEQuantizationParams.parse_from_config(found).training_recipe
            fmt = recipe.fp8_quantization_recipe or recipe.fp4_quantization_recipe or "bf16"
            assert fmt == table[linear.name] == ours.format(prefix + linear.name, "nvfp4")
            # In the BF16 tail nothing is overridden.
            assert recipe.override_quantized_autocast and not recipe.override_nonquantized_autocast
            assert ours.format(prefix + linear.name, "bf16") == "bf16"
            assert not (recipe.fp8_param or recipe.fp4_param)


def test_our_fields_are_upstreams() -> None:
    from megatron.core.extensions.transformer_engine import TEQuantizationRecipe

    assert set(RECIPE_FIELDS) == TEQuantizationRecipe.get_config_keys()


@pytest.mark.parametrize("case", BAD)
def test_recipes_upstream_refuses_we_refuse(case: str, tmp_path: Path) -> None:
    """Nothing that Megatron's parser of a recipe refuses is taken here: the bad ones are a superset."""
    import yaml
    from megatron.core.extensions.transformer_engine import TEQuantizationRecipe

    try:
        configs = yaml.safe_load(spoiled(*BAD[case][:2])).get("configs", {})
    except yaml.YAMLError:
        return
    for body in configs.values():
        try:
            TEQuantizationRecipe.parse_from_config(body["training_recipe"])
        except (ValueError, KeyError, TypeError):
            with pytest.raises(PrecisionFileError):
                yaml_file.parse({"configs": configs, "matchers": {}})


OVERRIDES = [(quantized, plain) for quantized in (True, False) for plain in (True, False)]


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("ambient", ["bf16", "nvfp4"])
@pytest.mark.parametrize("overrides", OVERRIDES)
def test_overrides_are_upstreams(fmt: str, ambient: str, overrides: tuple[bool, bool]) -> None:
    """Whether a linear is quantized, as `_get_should_context_be_quantized_params` has it; both recipes."""
    from megatron.core.extensions.transformer_engine import (
        TEQuantizationParams,
        _get_should_context_be_quantized_params,
    )
    from megatron.core.quantization.quant_config import MatchContext, RecipeConfig

    field = {"bf16": {}, "mxfp8": {"fp8_quantization_recipe": "mxfp8"}}
    body = field.get(fmt, {"fp4_quantization_recipe": "nvfp4"}) | {
        "override_quantized_autocast": overrides[0],
        "override_nonquantized_autocast": overrides[1],
    }
    content = {
        "configs": {
            "c": {
                "transformer_engine_config_type": "TEQuantizationParams",
                "training_recipe": body,
                "evaluation_recipe": {},
            }
        },
        "matchers": {"m": {"config": "c", "type": "glob", "pattern": "x", "enabled": True}},
    }
    found = RecipeConfig.from_config_dict(content).match(MatchContext("x", None))
    params = TEQuantizationParams.parse_from_config(found)
    file = yaml_file.parse(content)
    for training in (True, False):
        theirs = _get_should_context_be_quantized_params(params, training, ambient != "bf16")
        assert (file.format("x", ambient, training=training) != "bf16") == theirs
    if overrides[ambient == "bf16"]:
        assert file.format("x", ambient) == fmt


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "nvfp4.yaml"
    launch = Launch.of("super", precision="nvfp4", backend="te", te_precision_config_file=str(path))
    assert "is not on this machine" in precision_file.check(launch)[0]
    assert "--te-precision-config-file" in command.run(models.SUPER, path=path)
    assert path.read_text() == GOOD and precision_file.check(launch) == []
    with pytest.raises(ValueError, match="--precision mxfp8 needs no file"):
        command.run(models.SUPER, "mxfp8", tmp_path / "other.yaml")
    path.write_text(spoiled(*BAD["no enabled"][:2]))
    with pytest.raises(PrecisionFileError, match="enabled"):
        precision_file.check(launch)


def test_tail_and_file_are_apart() -> None:
    """The file knows nothing of layers; the flags say where it ends."""
    assert "layers" not in "\n".join(ln for ln in GOOD.splitlines() if not ln.startswith("#"))
    assert bf16_tail(models.SUPER) == 14
