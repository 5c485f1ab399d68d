"""The stored arguments are those that Megatron parses from our flags, and they give the model back."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.checkpoints.check import layout_of
from megatron_nemotron3.checkpoints.convert.megatron_args import (
    args_of,
    common_state,
    config_of,
    require_experts,
)
from megatron_nemotron3.checkpoints.metadata import CheckpointIndex, StoredObject
from megatron_nemotron3.checkpoints.state import common_state as stored_state
from megatron_nemotron3.checkpoints.write import COMMON_OBJECT, CONFIG_TEXT, object_archive
from megatron_nemotron3.launch import Flag, Launch, flags, smoke, to_argv
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.models.stack_specs import ARGUMENT
from tests.support.checkpoint_writer import index_bytes
from tests.support.convert_models import DISTINCT, GOLDEN, random_config
from tests.support.distributed import run_fresh

CATALOG = [get(name) for name in models.names()]
MODELS = [*CATALOG, *map(tiny, CATALOG), DISTINCT, *GOLDEN.values(), *map(random_config, range(12))]
_FIELDS = {field.name: field for field in dataclasses.fields(Nemotron3Config)}


def used(config: Nemotron3Config, name: str = "x") -> Nemotron3Config:
    """Return the model without titles and without fields of parts that it does not have."""
    plain: dict[str, Any] = dict.fromkeys(("published_total", "published_active", "source"))
    kinds = config.pattern + (config.mtp_pattern or "")
    drop = [] if config.has_mtp else ["mtp_use_repeated_layer", "mtp_loss_scaling_factor"]
    if "E" not in kinds:
        drop += [field for field in _FIELDS if field.startswith("moe_") or field == "num_moe_experts"]
    if "-" not in kinds:
        drop.append("dense_ffn_hidden_size")
    return config.but(name=name, title=name, **plain, **{field: _FIELDS[field].default for field in drop})


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.name)
def test_round_trip(config: Nemotron3Config) -> None:
    """Every field comes back; two models that are equal in them have the same tensors."""
    args = args_of(config, padded_vocab_size=config.vocab_size + 7)
    assert config_of(args, name="x") == used(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_through_a_checkpoint(dtype: str, tmp_path: Path) -> None:
    """Read both forms of the common state without importing the classes they name."""
    config = tiny(get("super"))
    args = args_of(config, padded_vocab_size=2048, dtype=dtype)
    index = release(tmp_path, args, common_pt=True)
    in_file = stored_state(CheckpointIndex(index.folder, {}, {}))
    in_object = stored_state(index)
    for state in (in_file, in_object):
        assert (state["iteration"], state["checkpoint_version"]) == (0, 3.0)
        assert config_of(state["args"], name="x") == used(config)
        assert layout_of(state) == "TP1 PP1 EP1"
        assert state["args"].field("bf16") == (dtype == "bfloat16")
        assert state["args"].field("fp16") == (dtype == "float16")


def release(folder: Path, args: Namespace, *, common_pt: bool) -> CheckpointIndex:
    """Write a folder with only the common state, as an object and, if `common_pt`, also as common.pt."""
    place = folder / "release"
    place.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    state = common_state(args)
    if common_pt:
        (place / "common.pt").write_bytes(object_archive(state))
    blob = object_archive([state])
    (place / "__0_0.distcp").write_bytes(blob)
    objects = {COMMON_OBJECT: StoredObject("__0_0.distcp", 0, len(blob))}
    (place / ".metadata").write_bytes(index_bytes({}, objects))
    (place / "metadata.json").write_text(CONFIG_TEXT)
    return CheckpointIndex(place, {}, objects)


#: What Megatron's parser cannot know or says otherwise, with the reason.
OTHERWISE = {
    "max_position_embeddings": "flags give the sequence length, which is enough to train",
    "hybrid_override_pattern": "for 0.16",
    "is_hybrid_model": "for 0.16",
    "mamba_chunk_size": "ours",
    "vocab_size": "of the tokenizer",
    "padded_vocab_size": "of the tokenizer",
    "no_save_optim": "nothing to load",
    "no_save_rng": "nothing to load",
}


def ours(config: Nemotron3Config, *extra: str) -> list[Flag]:
    """Return our flags for one rank, without a tokenizer."""
    schedule = dataclasses.replace(smoke(config), seq_length=config.seq_length)
    return flags(Launch.of(config, backend="torch", schedule=schedule, extra=extra))


def parse(jobs: list[list[str]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (arguments, TransformerConfig) that Megatron makes of each command line, in a new process."""
    import argparse
    import os
    import sys
    from unittest import mock

    from megatron.training import arguments, checkpointing
    from megatron.training.argument_utils import core_transformer_config_from_args

    from tests.launch.megatron_parser import plain

    os.environ.update(RANK="0", WORLD_SIZE="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    results = []
    for argv in jobs:
        sys.argv = ["pretrain_hybrid.py", *argv]
        with mock.patch.object(arguments, "add_megatron_arguments", lambda _: parser):
            args = arguments.parse_args()
        if args.use_checkpoint_args:  # as initialize_megatron does
            checkpointing.load_args_from_checkpoint(args)
        with mock.patch.object(arguments, "_print_args", lambda *_: None):
            arguments.validate_args(args)
        config = core_transformer_config_from_args(args)
        fields = {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
        results.append(({name: plain(value) for name, value in vars(args).items()}, fields))
    return results


def test_they_are_what_the_parser_makes_of_our_flags() -> None:
    configs = [*CATALOG, *map(tiny, CATALOG), DISTINCT]
    answers = run_fresh(parse, [to_argv(ours(config)) for config in configs], timeout=240)
    for config, (parsed, _) in zip(configs, answers):
        args = vars(args_of(config, padded_vocab_size=config.vocab_size))
        assert OTHERWISE.keys() <= args.keys()
        # Of a run our stack stores it when it is built; before that the name of the stack says it.
        assert (args.pop(ARGUMENT, None) is None) == (config.moe_layers is None)
        differ = {k: (v, parsed.get(k)) for k, v in args.items() if k not in OTHERWISE and parsed[k] != v}
        assert not differ, (config.name, differ)
        # A run's own checkpoint also gives the model, except for the longest position.
        found = config_of(Namespace(**parsed), name="x", vocab_size=config.vocab_size)
        assert found == used(config).but(max_position_embeddings=config.seq_length)


def test_use_checkpoint_args_builds_the_model(tmp_path: Path) -> None:
    """--use-checkpoint-args with a folder gives the TransformerConfig that our flags give."""
    configs = [tiny(get("super")), tiny(get("nemotron-h-8b")), DISTINCT]
    jobs = []
    for number, config in enumerate(configs):
        folder = tmp_path / str(number)
        folder.mkdir()
        args = args_of(config, padded_vocab_size=config.vocab_size)
        release(folder, args, common_pt=bool(number % 2))
        mine = ours(config, "--use-checkpoint-args", "--load", str(folder))
        jobs.append(to_argv(ours(config)))
        jobs.append(to_argv(f for f in mine if f.section != "architecture" or f.name in KEPT))
    answers = run_fresh(parse, jobs, timeout=240)
    for config, (args, built), (args_too, built_too) in zip(configs, answers[::2], answers[1::2]):
        differ = {k: (v, built_too[k]) for k, v in built.items() if built_too[k] != v}
        assert not differ, (config.name, differ)
        for name in ("hybrid_layer_pattern", "num_layers", "untie_embeddings_and_output_weights", "spec"):
            assert args[name] == args_too[name], (config.name, name)
        assert args_too["position_embedding_type"] == "none"
        assert args_too["padded_vocab_size"] == config.vocab_size


#: Architecture flags that --use-checkpoint-args does not take from a checkpoint: Megatron 0.19 says which.
KEPT = {
    "--spec",
    "--norm-epsilon",
    "--init-method-std",
    "--moe-router-bias-update-rate",
    "--moe-router-load-balancing-type",
    "--moe-aux-loss-coeff",
    "--mtp-loss-scaling-factor",
    "--calculate-per-token-loss",
    "--make-vocab-size-divisible-by",
}


NANO = tiny(get("nano"))
STORED = vars(args_of(NANO, padded_vocab_size=NANO.vocab_size))


def changed(**values: Any) -> Namespace:
    """Return stored arguments with changes; None removes an argument."""
    merged = {**STORED, **values}
    return Namespace(**{name: value for name, value in merged.items() if value is not None})


@pytest.mark.parametrize(
    "values",
    [
        {"hybrid_layer_pattern": "ME|M*|EM"},
        {"hybrid_layer_pattern": None, "hybrid_override_pattern": "MEM*EM"},
        {"hybrid_layer_pattern": "", "hybrid_override_pattern": "MEM*EM"},
    ],
    ids=str,
)
def test_patterns(values: dict[str, Any]) -> None:
    assert config_of(changed(**values)).pattern == "MEM*EM"


_OLDER = {"mtp_hybrid_override_pattern": "*E", "mtp_num_layers": 2}


@pytest.mark.parametrize(
    ("values", "repeated"),
    [
        ({"hybrid_layer_pattern": "ME|M*/*E/*E", "mtp_num_layers": 2}, True),
        ({"hybrid_layer_pattern": "MEM*/*E/*E", "mtp_num_layers": None}, False),
        ({"hybrid_layer_pattern": "MEM*", **_OLDER}, None),
        ({"hybrid_layer_pattern": None, "hybrid_override_pattern": "MEM*", **_OLDER}, True),
    ],
    ids=str,
)
def test_mtp(values: dict[str, Any], repeated: bool | None) -> None:
    config = config_of(changed(mtp_use_repeated_layer=repeated, mtp_loss_scaling_factor=0.3, **values))
    assert (config.pattern, config.mtp_pattern, config.mtp_num_layers) == ("MEM*", "*E", 2)
    assert config.mtp_num_blocks == (1 if repeated else 2)
    assert config.mtp_loss_scaling_factor == 0.3


PUZZLE = get("puzzle-tiny")


def test_experts_of_each_layer() -> None:
    """Stated by our stack or converter, or by the name of one of our stacks; by nothing else."""
    values = vars(args_of(PUZZLE, padded_vocab_size=2048))
    assert values[ARGUMENT] == "32:2 96:3 96:3 32:2 64:5"
    plain = {name: value for name, value in values.items() if name != ARGUMENT}
    rows = PUZZLE.moe_layers
    spec = ["megatron_nemotron3.specs", "nemotron3_puzzle_tiny_te_stack_spec"]
    assert config_of(Namespace(**plain, spec=spec)).moe_layers == rows
    assert config_of(Namespace(**plain)).moe_layers is None
    for stock in (
        ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        [spec[0], "nemotron3_te_stack_spec"],
    ):
        assert config_of(Namespace(**plain, spec=stock)).moe_layers is None
    with pytest.raises(
        ValueError, match=r"x: .*--spec \['mine', 'spec'\], a stack of one's own, .*--model NAME"
    ):
        config_of(Namespace(**plain, spec=["mine", "spec"]), name="x")
    # What the stack of one's own stored wins over its name.
    own = {**plain, "spec": ["mine", "spec"], ARGUMENT: values[ARGUMENT]}
    assert config_of(Namespace(**own)).moe_layers == rows
    assert config_of(Namespace(**own | {ARGUMENT: ""})).moe_layers is None
    for text in ("32:2 96", "32:2  96:3", "a:1", "0:1 1:1 1:1 1:1 1:1", "32:2 " + "9" * 40 + ":1"):
        with pytest.raises(ValueError, match="nemotron3_moe_layers .* is not of the form"):
            config_of(Namespace(**own | {ARGUMENT: text}))
    with pytest.raises(ValueError, match="moe_layers has 2 rows, but pattern has 5 E layers"):
        config_of(Namespace(**own | {ARGUMENT: "32:2 96:3"}))


def test_a_model_with_other_experts_than_the_checkpoint_states() -> None:
    values = vars(args_of(PUZZLE, padded_vocab_size=2048))
    require_experts("x", values, PUZZLE)
    require_experts("x", {}, get("super-tiny"))
    rows = PUZZLE.expert_sizes
    other = PUZZLE.but(moe_layers=((rows[0][0], rows[0][1] + 1), *rows[1:]))  # the same shapes
    for model in (other, get("super-tiny")):
        with pytest.raises(ValueError, match=f"x: --model {model.name}: its experts of each layer"):
            require_experts("x", values, model)


def test_what_megatron_makes_of_what_was_not_given() -> None:
    found = config_of(changed(mamba_num_heads=None, mamba_head_dim=16, mamba_num_groups=2))
    assert found.mamba_num_heads == 2 * NANO.hidden_size // 16
    found = config_of(changed(group_query_attention=False, num_query_groups=1))
    assert found.num_query_groups == NANO.num_attention_heads
    found = config_of(changed(moe_ffn_hidden_size=None, ffn_hidden_size=40))
    assert found.moe_ffn_hidden_size == 40
    assert config_of(changed(moe_aux_loss_coeff=[0.5])).moe_aux_loss_coeff == 0.5
    assert config_of(changed(moe_router_topk_scaling_factor=None)).moe_router_topk_scaling_factor == 1.0
    assert config_of(changed(layernorm_epsilon=None, norm_epsilon=1e-6)).layernorm_epsilon == 1e-6
    assert config_of(changed(num_experts=None, num_moe_experts=4, moe_router_topk=2)).num_moe_experts == 4
    with pytest.raises(ValueError, match=r"2 \* hidden_size=\d+ is not divisible by mamba_head_dim=7"):
        config_of(changed(mamba_num_heads=None, mamba_head_dim=7))


def test_vocabulary() -> None:
    assert config_of(changed(vocab_size=250, padded_vocab_size=256)).vocab_size == 250
    assert config_of(changed(vocab_size=None, padded_vocab_size=256), vocab_size=251).vocab_size == 251
    assert config_of(changed(vocab_size=252, padded_vocab_size=None), vocab_size=251).vocab_size == 251
    with pytest.raises(ValueError, match="only padded_vocab_size=256: give vocab_size"):
        config_of(changed(vocab_size=None, padded_vocab_size=256))
    with pytest.raises(ValueError, match="vocab_size=300 is more than padded_vocab_size=256"):
        config_of(changed(padded_vocab_size=256), vocab_size=300)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"swiglu": True}, r"swiglu=True \(gated MLPs\)"),
        ({"untie_embeddings_and_output_weights": False}, "an output layer that is the embedding"),
        ({"add_bias_linear": True, "add_qkv_bias": True}, r"add_bias_linear=True .*, add_qkv_bias=True"),
        ({"position_embedding_type": "rope"}, "position_embedding_type='rope'"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
        ({"moe_router_score_function": "softmax"}, "moe_router_score_function='softmax'"),
        ({"moe_router_enable_expert_bias": False}, "a router without expert bias"),
        (
            {"hybrid_layer_pattern": None, "hybrid_override_pattern": None},
            "and the names of tensors tell no layers of a hybrid model",
        ),
        ({"hybrid_layer_pattern": "MEX"}, "'X'"),
        ({"hybrid_layer_pattern": "ME/*E/E"}, "all depths must be equal"),
        ({"hybrid_layer_pattern": "M-", "ffn_hidden_size": None}, "no ffn_hidden_size"),
        ({"num_experts": None, "moe_router_topk": None}, "no num_experts, moe_router_topk"),
        ({"hidden_size": "64"}, "hidden_size='64' is not a whole number above 0"),
        ({"init_method_std": float("nan")}, "init_method_std=nan is not a number above 0"),
        ({"moe_aux_loss_coeff": [0.1, 0.2]}, r"moe_aux_loss_coeff=\[0.1, 0.2\]"),
        ({"num_query_groups": 3}, "num_query_groups=3"),
    ],
    ids=str,
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as problem:
        config_of(changed(**values), name="theirs")
    assert str(problem.value).startswith("theirs: ")


def test_refused_to_write() -> None:
    with pytest.raises(ValueError, match=r"padded_vocab_size=1 is less than vocab_size=\d+"):
        args_of(NANO, padded_vocab_size=1)
    with pytest.raises(ValueError, match="bfloat16, float16, float32, not in uint8"):
        args_of(NANO, padded_vocab_size=NANO.vocab_size, dtype="uint8")
    with pytest.raises(ValueError, match="mamba_conv_kernel=3: Megatron builds Mamba-2 with 4 only"):
        args_of(NANO.but(mamba_conv_kernel=3), padded_vocab_size=NANO.vocab_size)
