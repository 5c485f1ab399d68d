"""The table has exactly one row for every tensor that Megatron builds or writes, and no other rows.

Also the `_extra_state` objects that Megatron loads, and the FP32 masters of an optimizer.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints.convert import inventory, plan
from megatron_nemotron3.checkpoints.convert.from_hf import EXTRA_STATE, MODULES, extra_state_keys
from megatron_nemotron3.checkpoints.convert.inventory import mappings
from megatron_nemotron3.checkpoints.convert.keys import (
    NameLookup,
    master_keys,
    non_weight_kind,
    plain_name,
    weight_of_master,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointIndex, DistTensor, read_metadata
from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingData, flags, to_argv
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.models import names as catalog_names
from megatron_nemotron3.models.parameters import prefixes
from megatron_nemotron3.models.tensors import DIALECTS, ROWS
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.train import processes
from tests.support import distributed
from tests.support.checkpoint_reading import read_rows
from tests.support.checkpoint_runs import CONFIG
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
from tests.support.short_run import short_schedule

CATALOG = catalog_names()


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


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 40))])
def test_random_models(seed: int, world: None) -> None:
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
@pytest.mark.parametrize("config", [get("super"), get("puzzle"), DISTINCT], ids=lambda c: c.name)
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("decoder.layers.0.mixer.in_proj.weight.q", "0 rows"),
        ("decoder.layers.0.mlp.router.weight", "0 rows"),  # layer 0 is M
        ("decoder.layers.12.pre_mlp_layernorm.weight", "0 rows"),  # of 12 layers
        ("decoder.layers.1.mlp.experts.linear_fc1.weight32", "expert 32 of a model with 32"),
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


@pytest.mark.parametrize("name", ["super", "nemotron-h-8b"])
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
    models = (DISTINCT, get("super"), get("super").but(moe_use_norm_before_up_proj=True))
    used = {id(mapping.row) for config in models for mapping in inventory.mappings(config)}
    assert used == {id(row) for row in ROWS}


STOCK: dict[str, Any] = json.loads(golden_file().read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_the_modules_are_those_of_stock_te(name: str) -> None:
    """The golden file lists each object once, without its shards."""
    stock = [key for key, entry in STOCK[name]["checkpoint"].items() if entry == "object"]
    mine = [key.partition("/")[0] for key in extra_state_keys(GOLDEN[name])]
    assert set(mine) == set(stock)
    experts = GOLDEN[name].num_moe_experts or 0
    for key in stock:
        assert mine.count(key) == (experts if ".experts.experts." in key else 1), key


def asked_for(config: Nemotron3Config, layout: ParallelLayout) -> list[str]:
    """Return the keys of the objects that Megatron loads on this rank."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    from megatron_nemotron3 import build_model

    if layout.world_size > 1:
        initialize(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    model = build_model(config, layout=layout, backend="torch")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [v.unique_key for v in nested_values(state) if isinstance(v, ShardedObject)]


MODELS = [DISTINCT, tiny(get("nemotron-h-8b")), random_config(0)]


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.name)
def test_the_keys_are_those_our_torch_spec_asks_for(config: Nemotron3Config, world: None) -> None:
    keys = list(extra_state_keys(config))
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(asked_for(config, ParallelLayout()))


OTHERS = (ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, etp=2))


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tp=2, ep=2), *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)],
    ids=str,
)
def test_the_keys_do_not_depend_on_the_layout(layout: ParallelLayout) -> None:
    ranks = run_distributed(asked_for, layout.world_size, DISTINCT, layout)
    assert len(ranks) == 2
    assert {key for rank in ranks for key in rank} == set(extra_state_keys(DISTINCT))


def test_every_part_has_its_modules_and_every_module_has_a_weight() -> None:
    config = DISTINCT.but(pattern="ME*-")
    assert {prefix.part for prefix in prefixes(config)} == set(MODULES)
    weights = {t.name for mapping in mappings(config) for t in mapping.megatron}
    for key in extra_state_keys(config):
        module = key.partition("._extra_state")[0]
        assert any(re.match(re.escape(module) + r"\.(weight|bias)", name) for name in weights), key
        assert non_weight_kind(key) == "extra state"


def test_what_is_stored_is_what_megatron_loads() -> None:
    stored = EXTRA_STATE
    assert torch.load(io.BytesIO(stored), weights_only=True) == [None]
    assert len(stored) < 1300  # Ultra has 50,000 of them


BF16, FP32 = (DistTensor(kind, (4, 2), ()) for kind in ("bfloat16", "float32"))
RESHARD = ("--dist-ckpt-optim-fully-reshardable",)
#: Layout, whether the optimizer is distributed, further options -> what is before the master's key.
RUNS = {
    "plain": (ParallelLayout(), False, (), "optimizer.state.fp32_param."),
    "plain ep2": (ParallelLayout(dp=2, ep=2), False, (), "optimizer.state.fp32_param."),
    "reshardable": (ParallelLayout(), True, RESHARD, "optimizer.state.param."),
    "reshardable ep2": (ParallelLayout(dp=2, ep=2), True, RESHARD, "optimizer.state.param."),
}


def saved(folder: Path, layout: ParallelLayout, sharded: bool, *extra: str) -> CheckpointIndex:
    """The checkpoint of a BF16 run of two steps."""
    schedule = short_schedule(2, seq_length=32, global_batch_size=2, save_interval=2)
    data = TrainingData(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=255, save=str(folder))
    chosen = flags(
        Launch.of(
            CONFIG,
            layout,
            precision="bf16",
            backend="torch",
            schedule=schedule,
            data=data,
            extra=extra,
            distributed_optimizer=sharded,
        )
    )
    argv = ["--device", "cpu", str(processes.ENTRY), *to_argv(chosen)]
    distributed.run_launcher(argv, layout.world_size, timeout=240)
    return read_metadata(folder / "iter_0000002")


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_runs(run: str, tmp_path: Path) -> None:
    """Every weight except the expert bias has a master and equals the rounded master."""
    layout, sharded, extra, prefix = RUNS[run]
    index = saved(tmp_path, layout, sharded, *extra)
    found = master_keys(index.tensors)
    keys = [key for key in index.tensors if non_weight_kind(key) is None]
    assert set(found) == {plain_name(key) for key in keys if not key.endswith("expert_bias")}
    for weight, master in found.items():
        assert master == prefix + weight
        stored, exact = read_rows(index, weight), read_rows(index, master)
        assert exact.dtype == torch.float32 and torch.equal(exact.bfloat16(), stored)
    assert any(not torch.equal(read_rows(index, m), read_rows(index, w).float()) for w, m in found.items())


@pytest.mark.full
def test_buckets_have_no_names(tmp_path: Path) -> None:
    index = saved(tmp_path, ParallelLayout(), True)
    weights = [key for key in index.tensors if non_weight_kind(key) is None]
    parameters = [key for key in weights if not key.endswith("expert_bias")]
    with pytest.raises(
        ValueError, match="in 1 bucket.*save again with --dist-ckpt-optim-fully-resh"
    ) as error:
        master_keys(index.tensors)
    assert str(error.value).startswith(f"{len(parameters)} of {len(weights)} weights have no FP32 master")


def test_prefixes() -> None:
    weights = {"a.weight": BF16, "module.b.weight": BF16, "a.expert_bias": FP32}
    found = {
        "chained_0.optimizer.state.fp32_param.a.weight": FP32,
        "optimizer.state.param.module.b.weight": FP32,
        "optimizer.state.exp_avg.a.weight": FP32,
    }
    assert master_keys(weights | found) == {
        "a.weight": "chained_0.optimizer.state.fp32_param.a.weight",
        "b.weight": "optimizer.state.param.module.b.weight",
    }


def test_modules_of_a_mimo_model() -> None:
    """Each module has an optimizer of its own; a frozen one has none, and its weights are read."""
    language, frozen = "language_model.a.weight", "modality_submodules.vision.b.weight"
    tensors = {language: BF16, frozen: BF16}
    tensors |= {f"mimo.language.chained_0.optimizer.state.{k}.{language}": FP32 for k in ("param", "exp_avg")}
    expected = {language: f"mimo.language.chained_0.optimizer.state.param.{language}"}
    assert master_keys(tensors, optional="modality_submodules.") == expected
    with pytest.raises(ValueError, match=f"1 of 2 weights .*first '{frozen}'"):
        master_keys(tensors)
    wrapped = "modality_submodules.vision.module.module.b.weight"
    assert plain_name(wrapped) == frozen and non_weight_kind(f"mimo.vision.optimizer.state.step.{frozen}")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({}, "1 of 2 weights .*first 'a.weight': .*no optimizer state with names"),
        ({"optimizer.state.exp_avg.a.weight": FP32}, "only some of the weights.*fully-reshardable"),
        (
            {"chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(x).bucket_idx_0.param": FP32},
            "in 1 bucket",
        ),
        ({"optimizer.state.param.a.weight": BF16}, "is bfloat16"),
        ({"optimizer.state.param.a.weight": DistTensor("float32", (8,), ())}, r"\[8\].*has shape \[4, 2\]"),
        ({f"optimizer.state.{kind}.a.weight": FP32 for kind in ("param", "fp32_param")}, "the same weight"),
        (
            {f"optimizer.state.param.{name}.weight": FP32 for name in "ac"},
            "1 of 2 FP32 masters belong to no weight.*c.weight",
        ),
    ],
)
def test_refusals(others: dict[str, DistTensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        master_keys({"a.weight": BF16, "a.expert_bias": FP32, **others})
