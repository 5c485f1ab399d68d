"""The table against what was published, against Megatron's names, and what is made from it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, ParallelLayout, flags
from megatron_nemotron3.models.parameters import layer_tensors
from megatron_nemotron3.precision import command
from megatron_nemotron3.precision.model_formats import ModelFormats
from megatron_nemotron3.precision.table import (
    KINDS,
    PRECISIONS,
    Structure,
    bf16_tail,
    is_published,
    kind_named,
    kind_of,
    tail,
    tail_of_depth,
)
from tests.docs.pages import published_recipe
from tests.support.recipe_table import expected

CONFIGS = [models.get(name + size) for name in models.names() for size in ("", "-tiny")]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"

#: Super report, table 3 (Ultra: the same with a tail of 16), by Megatron's module names in an early layer.
PUBLISHED = {
    "decoder.layers.0.mixer.in_proj": "nvfp4",
    "decoder.layers.0.mixer.out_proj": "mxfp8",
    "decoder.layers.1.mlp.experts.linear_fc1": "nvfp4",
    "decoder.layers.1.mlp.experts.linear_fc2": "nvfp4",
    "decoder.layers.1.mlp.shared_experts.linear_fc1": "nvfp4",
    "decoder.layers.1.mlp.shared_experts.linear_fc2": "nvfp4",
    "decoder.layers.1.mlp.fc1_latent_proj": "bf16",
    "decoder.layers.1.mlp.fc2_latent_proj": "bf16",
    "decoder.layers.7.self_attention.linear_qkv": "bf16",
    "decoder.layers.7.self_attention.linear_proj": "bf16",
    "mtp.layers.0.eh_proj": "bf16",
    "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv": "bf16",
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.linear_fc1": "bf16",
}


@pytest.mark.parametrize(("config", "number"), [(models.SUPER, 14), (models.ULTRA, 16)])
def test_the_published_table(config: models.Nemotron3Config, number: int) -> None:
    found = expected(config, "nvfp4")
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    assert is_published(config) and bf16_tail(config) == number
    formats: dict[int, set[str]] = {}
    for name, fmt in found.items():
        if name.startswith("decoder."):
            formats.setdefault(int(name.split(".")[2]), set()).add(fmt)
    assert sorted(formats) == list(range(config.num_layers))  # every layer has a linear
    first = config.num_layers - number
    assert all(formats[i] == {"bf16"} for i in range(first, config.num_layers))
    body = {i: formats[i] - {"bf16"} for i in range(first)}
    wanted: dict[str, set[str]] = {"M": {"nvfp4", "mxfp8"}, "E": {"nvfp4"}, "*": set()}
    assert body == {i: wanted[config.pattern[i]] for i in range(first)}
    assert published_recipe(config) in PAGE.read_text()


def test_nothing_else_claims_to_be_published() -> None:
    assert [config.name for config in CONFIGS if is_published(config)] == ["super", "ultra"]
    assert "none published" in tail(models.NANO).source
    for name in ("", "own"):  # as deep as Ultra
        assert tail(models.ULTRA.but(name=name)).end == 17
    assert tail_of_depth(108).end == tail(models.ULTRA).end == 16
    assert all(kind.source and kind.why for kind in KINDS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_formats_of_a_run_are_the_tables(precision: str) -> None:
    """Linear by linear: MTP, the layers that stay BF16, and the kinds that NVFP4's file names."""
    for config in CONFIGS:
        formats = ModelFormats.of(config, precision)
        assert {linear.name: has for linear, _, has in formats.linears()} == expected(config, precision)
        assert formats.deviations() == []


def test_every_name_has_exactly_one_row() -> None:
    """Outside MTP the rows do not overlap; inside it MTP's comes first of the linears."""
    never = {
        "output_layer": "output_layer",
        "embedding.word_embeddings": "embedding",
        "decoder.layers.1.mlp.router": "router",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.router": "router",
        "decoder.layers.0.mixer.conv1d": "convolution",
    }
    for prefix in ("", "module.module.", "language_model."):
        for config in CONFIGS:
            for linear in Structure.of(config).linears():
                rows = [k for k in KINDS if any(fnmatchcase(prefix + linear.name, g) for g in k.modules)]
                assert rows[0] is kind_of(prefix + linear.name) is linear.kind
                assert len(rows) == 1 or rows[0].name == "mtp" and linear.name.startswith("mtp.")
        for name, row in never.items():
            kind = kind_of(prefix + name)
            assert kind is not None and kind.name == row and not kind.quantizable
        assert kind_of(prefix + "decoder.layers.0.mixer.norm") is None


def test_every_matrix_of_a_layer_is_in_a_row() -> None:
    for config in CONFIGS:
        for symbol in set(config.pattern):
            for tensor in layer_tensors(config, symbol):
                kind = kind_named(tensor.linear)
                assert (kind is not None) == (len(tensor.shape) > 1), tensor.name
                assert kind is None or kind.layer == symbol


def test_the_command_prints_it() -> None:
    text = command.render(models.SUPER)
    assert "mixer.out_proj" in text and "mxfp8" in text and "in NVFP4 up to 40 %" in text
    assert "none at the start, 14 at the end" in text and "all linears of layers 74-87" in text
    assert "linears: 145 bf16, 34 mxfp8, 166 nvfp4" in text  # tests/precision/test_census.py, by hand
    assert "No source says" not in text and "No source says" in command.render(models.NANO)
    assert "nvfp4" not in "".join(command.render(models.NANO, "bf16").splitlines()[3:])
    with pytest.raises(
        ValueError, match="fp16.*nvfp4, mxfp8, fp8-tensorwise, fp8-blockwise, fp8-delayed, bf16"
    ):
        command.render(models.SUPER, "fp16")


def test_flags_come_from_it() -> None:
    """Start count 0, the tail, router padding; and from there into Megatron's config (tests/launch)."""
    for config in (models.SUPER, models.ULTRA):
        file = {"precision": "nvfp4", "te_precision_config_file": "file.yaml"}
        emitted = flags(Launch.of(config, ParallelLayout(), **file))
        ours = {flag.name: flag.values for flag in emitted if flag.section == "precision"}
        assert ours == {
            "--bf16": (),
            "--fp4-format": ("e2m1",),
            "--fp4-recipe": ("nvfp4",),
            "--first-last-layers-bf16": (),
            "--num-layers-at-start-in-bf16": ("0",),
            "--num-layers-at-end-in-bf16": (str(tail(config).end),),
            "--moe-router-padding-for-quantization": (),
            "--te-precision-config-file": ("file.yaml",),
            "--moe-router-dtype": ("fp32",),
        }
        emulated = flags(Launch.of(config, backend="torch", emulate=True, **file))
        fewer = {flag.name: flag.values for flag in emulated if flag.section == "precision"}
        gone = {"--fp4-format", "--fp4-recipe", "--moe-router-padding-for-quantization"}
        assert fewer == {name: values for name, values in ours.items() if name not in gone}
