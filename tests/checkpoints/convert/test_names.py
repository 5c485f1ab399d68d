"""The table has exactly one row for every tensor that Megatron builds or writes, and no other rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints.convert import inventory, plan
from megatron_nemotron3.checkpoints.convert.keys import (
    NameLookup,
    non_weight_kind,
    plain_name,
    weight_of_master,
)
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models import names as catalog_names
from megatron_nemotron3.models.parameters import layer_tensors
from megatron_nemotron3.models.tensors import DIALECTS, ROWS, rows_of, symbol_sizes
from tests.support.convert_models import (
    DISTINCT,
    GOLDEN,
    PADDED,
    assemble,
    chunks,
    random_config,
    stored_parameters,
)
from tests.support.megatron_tensors import megatron_tensors
from tests.support.model_mapping import megatron_model, randomize, to_transformers
from tests.support.models import describe, golden_file
from tests.support.world import world_of_one

CATALOG = catalog_names()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with world_of_one():
        yield


def shapes(tensors: list[inventory.Tensor]) -> dict[str, tuple[int, ...]]:
    result = {tensor.name: tensor.shape for tensor in tensors}
    assert len(result) == len(tensors)
    return result


def is_what_megatron_builds(config: Nemotron3Config) -> None:
    model = megatron_model(config)
    checkpoint = {
        key: tuple(entry["global_shape"])
        for key, entry in describe(model)["checkpoint"].items()
        if non_weight_kind(key) is None
    }
    assert shapes(megatron_tensors(config)) == checkpoint
    parameters = {name: tuple(tensor.shape) for name, tensor in stored_parameters(model).items()}
    assert shapes(megatron_tensors(config, dialect="parameter")) == parameters


@pytest.mark.parametrize("name", CATALOG)
def test_tiny_catalog_models(name: str, world: None) -> None:
    is_what_megatron_builds(get(f"{name}-tiny"))


def test_a_model_whose_dimensions_all_differ(world: None) -> None:
    is_what_megatron_builds(DISTINCT)


@pytest.mark.parametrize("seed", range(4))
def test_random_models(seed: int, world: None) -> None:
    is_what_megatron_builds(random_config(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 40))
def test_more_random_models(seed: int, world: None) -> None:
    is_what_megatron_builds(random_config(seed))


@pytest.mark.parametrize("name", GOLDEN)
def test_stock_megatron_on_transformer_engine(name: str) -> None:
    stock: dict[str, Any] = json.loads(golden_file().read_text())[name]
    keys = {k: tuple(v["global_shape"]) for k, v in stock["checkpoint"].items() if v != "object"}
    assert {k for k, v in stock["checkpoint"].items() if v == "object"} == {
        k for k in stock["checkpoint"] if non_weight_kind(k) == "extra state"
    }
    assert shapes(megatron_tensors(GOLDEN[name], padded_vocab_size=PADDED)) == keys
    parameters = {k: tuple(v) for k, v in stock["parameters"].items()}
    bias = {k: v for k, v in keys.items() if k.endswith("expert_bias")}
    mine = megatron_tensors(GOLDEN[name], dialect="parameter", padded_vocab_size=PADDED)
    assert shapes(mine) == parameters | bias


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("config", [*(get(name) for name in CATALOG), DISTINCT], ids=lambda c: c.name)
def test_each_name_is_found_in_the_row_it_came_from(config: Nemotron3Config, dialect: str) -> None:
    lookup = NameLookup(config)
    for mapping in inventory.mappings(config, dialect=dialect):
        tensors = mapping.megatron
        # Of hundreds of experts, the first, the second and the last are enough.
        for number in sorted({0, min(1, len(tensors) - 1), len(tensors) - 1}):
            match = lookup.key(tensors[number].name)
            assert (match.row, match.prefix) == (mapping.row, mapping.prefix)
            assert match.spelling == mapping.spelling
            several = "{e}" in match.tensor.name
            assert match.expert == (number if several else None)


def test_the_hugging_face_side_is_what_the_parameter_counts_are_of() -> None:
    for config in (*(get(name) for name in CATALOG), DISTINCT):
        for layer, kind in enumerate(config.pattern):
            at = config.at(layer)
            table = symbol_sizes(at)
            mine = {(t.name, tuple(table[s] for s in t.shape)) for r in rows_of(config, kind) for t in r.hf}
            assert mine == {(t.name, t.shape) for t in layer_tensors(at, kind)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("decoder.layers.0.mixer.in_proj.weight.q", "0 rows"),
        ("decoder.layers.0.mlp.router.weight", "0 rows"),  # layer 0 is M
        ("decoder.layers.12.pre_mlp_layernorm.weight", "0 rows"),  # of 12 layers
        ("decoder.layers.01.pre_mlp_layernorm.weight", "0 rows"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight32", "expert 32 of a model with 32"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight07", "0 rows"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight{e}", "0 rows"),
        ("decoder.layers.1.pre_mlp_layernorm.weight\n", "0 rows"),
        ("mtp.layers.1.enorm.weight", "0 rows"),  # one physical block
        ("", "0 rows"),
    ],
)
def test_names_that_are_not_the_models_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NameLookup(get("super-tiny")).key(name)


def test_mtp_is_numbered_in_one_line_on_hugging_faces_side() -> None:
    """Names of MTP block 0 in the released checkpoints (transformers builds no MTP to compare with)."""
    released = {t.name for t in inventory.hf_tensors(get("super")) if t.name.startswith("mtp.")}
    assert len(released) == 1_040
    assert {name for name in released if ".mixer." not in name} == {
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.norm.weight",
        "mtp.layers.1.norm.weight",
        "mtp.layers.1.final_layernorm.weight",
    }
    assert "mtp.layers.0.mixer.q_proj.weight" in released
    assert "mtp.layers.1.mixer.experts.511.down_proj.weight" in released
    several = NameLookup(DISTINCT)  # two blocks of *EM-
    for megatron, hf in (
        ("mtp.layers.1.hnorm.weight", "mtp.layers.4."),
        ("mtp.layers.1.mtp_model_layer.layers.2.mixer.A_log", "mtp.layers.6."),
        ("mtp.layers.1.final_layernorm.weight", "mtp.layers.7."),
    ):
        assert several.key(megatron).prefix.hf == hf


def test_a_row_can_belong_to_two_kinds_and_the_pattern_decides() -> None:
    lookup, name = NameLookup(DISTINCT), "pre_mlp_layernorm.weight"
    dense, moe = lookup.key(f"decoder.layers.1.{name}"), lookup.key(f"decoder.layers.2.{name}")
    assert (dense.row.part, moe.row.part) == ("-", "E")


def test_keys_that_are_no_weights() -> None:
    assert non_weight_kind("decoder.layers.0.mixer.in_proj._extra_state/shard_0_1") == "extra state"
    assert non_weight_kind("common_state/shard_0_1") == "training state"
    assert non_weight_kind("decoder.layers.0.mixer.in_proj.weight_quantizer._amax") == "quantizer"
    assert non_weight_kind("chained_1.optimizer.state.exp_avg.output_layer.weight") == "optimizer"
    assert non_weight_kind("rng_state.(0, 0).0.torch_rng_state") == "training state"  # fsdp_dtensor
    assert non_weight_kind("decoder.layers.0.mixer.in_proj.weight.z") is None
    assert weight_of_master("optimizer.state.fp32_param.output_layer.weight") == "output_layer.weight"
    assert weight_of_master("chained_1.optimizer.state.param.output_layer.weight") == "output_layer.weight"
    assert weight_of_master("optimizer.state.exp_avg.output_layer.weight") is None


def test_wrappers_and_the_old_name_of_mtps_layers() -> None:
    assert plain_name("model.module.module.output_layer.weight") == "output_layer.weight"
    old = "module.mtp.layers.0.transformer_layer.layers.1.mlp.router.weight"
    assert plain_name(old) == "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight"
    assert NameLookup(get("super-tiny")).key(old).prefix.hf == "mtp.layers.1."


@pytest.mark.parametrize("name", ["nano", "super", "nemotron-h-8b"])
def test_values_against_the_mapping_of_the_parity_tests(name: str, world: None) -> None:
    """The table gives the same tensors as a mapping that was written from the modules of both models."""
    config = get(f"{name}-tiny")
    model = megatron_model(config)
    randomize(model, seed=3)
    parameters = stored_parameters(model)
    theirs = to_transformers({k: v for k, v in parameters.items() if not k.startswith("mtp.")}, config)
    for tensors, dialect in ((assemble(chunks(model)), "torch_dist"), (parameters, "parameter")):
        mine: dict[str, Any] = {}
        for mapping in inventory.mappings(config, dialect=dialect):
            to_hf = mapping.to_hf()
            made = plan.apply(to_hf, {t.name: tensors[t.name] for t in mapping.megatron})
            back = plan.apply(to_hf.inverse(), made)
            assert all(torch.equal(back[t.name], tensors[t.name]) for t in mapping.megatron)
            mine |= made
        mine = {k.replace("backbone.", "model."): v for k, v in mine.items() if not k.startswith("mtp.")}
        compared = 0
        for key, value in theirs.items():
            if key.endswith(("up_proj", "down_proj")):  # transformers stacks the experts in memory
                stem, _, which = key.rpartition(".")
                value_of = [mine.pop(f"{stem}.{e}.{which}.weight") for e in range(len(value))]
                assert torch.equal(torch.stack(value_of), value)
            else:
                assert torch.equal(mine.pop(key), value)
            compared += 1
        assert compared and not mine


def test_types_of_a_bfloat16_model(world: None) -> None:
    """Only the expert bias stays FP32 when Megatron makes a model BF16."""
    from megatron.core.transformer.module import Float16Module

    config = get("super-tiny")
    model = megatron_model(config, params_dtype=torch.bfloat16, bf16=True)
    wrapped = Float16Module(model.config, model)
    for router in (m for m in wrapped.modules() if hasattr(m, "_maintain_float32_expert_bias")):
        router._maintain_float32_expert_bias()  # what a forward pass does first
    stored = {name: str(t.dtype)[6:] for name, t in stored_parameters(wrapped.module).items()}
    assert stored == {t.name: t.dtype for t in megatron_tensors(config, dialect="parameter")}


def test_every_row_is_of_some_model() -> None:
    used = {id(mapping.row) for config in (DISTINCT, get("super")) for mapping in inventory.mappings(config)}
    assert used == {id(row) for row in ROWS}
