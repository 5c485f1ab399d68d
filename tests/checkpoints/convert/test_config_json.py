"""Reading and writing config.json, compared with transformers and with published files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.config_json import read, unread_note, write
from megatron_nemotron3.checkpoints.convert.config_keys import BLOCKS, FIXED, IGNORED, OWN
from megatron_nemotron3.models import Nemotron3Config, get, identify, names
from tests.support.convert_models import DISTINCT, random_config
from tests.support.model_mapping import transformers_from

transformers = pytest.importorskip("transformers")

#: transformers cannot load dense layers before 5.8, and computes the scan wrongly before 5.15.1.
assert tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 15)

CATALOG = names()
MODEL_FIELDS = (
    *("pattern", "mtp_pattern", "mtp_num_blocks", "hidden_size", "vocab_size", "num_attention_heads"),
    *("num_query_groups", "kv_channels", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim"),
    *("mamba_num_groups", "mamba_conv_kernel", "mamba_chunk_size", "max_position_embeddings", "moe_layers"),
    *("layernorm_epsilon", "init_method_std"),
)
KIND_FIELDS = {
    "-": ["dense_ffn_hidden_size"],
    "E": [
        *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_latent_size"),
        *("moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor"),
    ],
}


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(data, allow_nan=False))
    return result


def same_model(a: Nemotron3Config, b: Nemotron3Config) -> None:
    kinds = set(a.pattern + (a.mtp_pattern or ""))
    for field in [*MODEL_FIELDS, *(f for kind in kinds for f in KIND_FIELDS.get(kind, ()))]:
        assert getattr(a, field) == getattr(b, field), field
    assert inventory.hf_tensors(a) == inventory.hf_tensors(b)


def stored_names(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Rename a transformers model's tensors as in checkpoint files: separate experts, prefix `backbone.`,
    or `model.` where experts differ by layer."""
    result = {}
    for name, tensor in model.state_dict().items():
        name = name if hasattr(model.config, "block_configs") else name.replace("model.", "backbone.", 1)
        if ".experts." in name:
            stem, _, which = name.rpartition(".")
            for e in range(tensor.shape[0]):
                result[f"{stem}.{e}.{which}.weight"] = tuple(tensor.shape[1:])
        else:
            result[name] = tuple(tensor.shape)
    return result


@pytest.mark.parametrize("config", [*map(get, CATALOG), DISTINCT], ids=lambda c: c.name)
def test_transformers_builds_the_same_model_from_what_we_write(config: Nemotron3Config) -> None:
    with torch.device("meta"):
        model = transformers_from(through_json(write(config)))
    mine = {t.name: t.shape for t in inventory.hf_tensors(config) if not t.name.startswith("mtp.")}
    assert stored_names(model) == mine
    theirs = model.config
    assert theirs.num_nextn_predict_layers == config.mtp_num_blocks
    assert theirs.hybrid_override_pattern == config.pattern
    if config.has_mtp:
        assert theirs.mtp_hybrid_override_pattern == config.mtp_pattern
    assert not config.is_moe or theirs.routed_scaling_factor == config.moe_router_topk_scaling_factor
    for number, kind in enumerate(config.pattern):
        if kind == "E":
            assert model.model.layers[number].mixer.gate.top_k == config.at(number).moe_router_topk


@pytest.mark.parametrize("name", CATALOG)
def test_what_transformers_writes_is_read(name: str) -> None:
    """transformers writes new block names, all defaults and its own notation of infinity, but no pattern."""
    config = get(name)
    if config.moe_layers:  # it writes its own model_type beside the blocks of another
        with pytest.raises(ValueError, match="block_configs and model_type 'nemotron_h': such layers are of"):
            read(json.loads(transformers.NemotronHConfig.from_dict(write(config)).to_json_string()))
        return
    theirs = transformers.NemotronHConfig.from_dict(through_json(write(config)))
    for text in (theirs.to_json_string(use_diff=True), theirs.to_json_string(use_diff=False)):
        data = json.loads(text)
        assert "hybrid_override_pattern" not in data and "linear_attention" in data["layers_block_type"]
        same_model(read(data), config)


def test_what_transformers_writes_is_loaded_by_auto_classes(tmp_path: Any) -> None:
    config = get("super-tiny")
    (tmp_path / "config.json").write_text(json.dumps(write(config)))
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "NemotronHConfig" and loaded.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "config", [*map(get, CATALOG), DISTINCT, *map(random_config, range(10))], ids=lambda c: c.name
)
def test_round_trip(config: Nemotron3Config) -> None:
    data = through_json(write(config))
    same_model(read(data, name=config.name), config)
    again = read(data, base=config)
    kinds = set(config.pattern + (config.mtp_pattern or ""))
    unused = [f for kind, fields in KIND_FIELDS.items() if kind not in kinds for f in fields]
    same = config.but(**dict.fromkeys(unused))  # a file holds no sizes of layers the model lacks
    assert again == same
    # Without dense layers Megatron's --ffn-hidden-size, which is written, has no meaning.
    assert write(again) == data | {"intermediate_size": same.ffn_hidden_size}
    assert "-" not in kinds or same.ffn_hidden_size == config.ffn_hidden_size


@pytest.mark.parametrize("config", [get("super"), get("nemotron-h-8b"), DISTINCT], ids=lambda c: c.name)
def test_either_dialect_alone_is_enough(config: Nemotron3Config) -> None:
    strings = write(config)
    old = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    new = old | {"M": "linear_attention", "*": "full_attention"}
    rest = {k: v for k, v in strings.items() if not k.endswith("hybrid_override_pattern")}
    dialects = []
    for kinds, key in ((old, "layers_block_type"), (new, "layers_block_type"), (new, "layer_types")):
        lists = {key: [kinds[kind] for kind in config.pattern]}
        if config.mtp_pattern:
            lists["mtp_layers_block_type"] = [kinds[kind] for kind in config.mtp_pattern]
        dialects.append(rest | lists)
    for data in dialects:
        assert read(data, base=config) == read(strings, base=config)
        # What the reference has is kept, and the other dialect is not added: transformers 5.15 refuses both.
        merged = write(config, reference=data)
        assert read(merged, base=config) == read(strings, base=config)
        assert not [key for key in merged if key.endswith("hybrid_override_pattern")]


def test_files_as_published_are_read() -> None:
    """Keys and values in public copies of the files of the released Nano and Nemotron-H 8B."""
    common = {
        "architectures": ["NemotronHForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "n_groups": 8,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "sliding_window": None,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": 131072,
        "initializer_range": 0.02,
        "chunk_size": 128,
    }
    nano = {
        **common,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": get("nano").pattern,
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
    }
    dense = {
        **common,
        "attention_head_dim": 128,
        "hidden_size": 4096,
        "hybrid_override_pattern": get("nemotron-h-8b").pattern,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
    }
    for name, data in (("nano", nano), ("nemotron-h-8b", dense)):
        config = get(name)
        same_model(read(data), config.but(init_method_std=0.02))
        # With it as reference its own fields stay.
        merged = write(config, reference=data)
        assert {k: v for k, v in data.items() if k != "time_step_limit"}.items() <= merged.items()
        aliases = {"head_dim", "dtype", "time_step_min"} | set(merged) & {"moe_latent_size"}
        assert set(merged) - set(data) == aliases - set(data)
        through_json(merged)
        same_model(read(merged), config.but(init_method_std=0.02))


def test_a_reference_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not the model super: pattern="):
        write(get("super"), reference=write(get("nano")))
    without = {k: v for k, v in write(get("super")).items() if "mtp" not in k and "nextn" not in k}
    with pytest.raises(
        ValueError, match=r"mtp_pattern=None \(expected '\*E'\), mtp_num_blocks=0 \(expected 1\)"
    ):
        write(get("super"), reference=without)


def test_token_ids_are_not_made_up() -> None:
    assert not [key for key in write(get("super")) if key.endswith("token_id")]


def test_mtp_is_counted_in_physical_blocks() -> None:
    super_, several = get("super"), DISTINCT
    assert super_.mtp_num_layers == 2 and write(super_)["num_nextn_predict_layers"] == 1
    assert several.mtp_num_layers == 2 and write(several)["num_nextn_predict_layers"] == 2
    assert (read(write(super_)).mtp_num_layers, read(write(super_)).mtp_num_blocks) == (2, 1)
    released = {key: value for key, value in write(super_).items() if key != OWN}
    assert (read(released).mtp_num_layers, read(released).mtp_num_blocks) == (1, 1)
    assert read(write(super_), base=super_).mtp_num_layers == 2
    assert read(write(several)).mtp_use_repeated_layer is False
    assert "num_nextn_predict_layers" not in write(get("nano"))


BASE = write(get("super-tiny"))
#: change (None: the key is taken out) -> what the message must say
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "config.json has no hidden_size"),
    ({"moe_latent_size": 0}, "moe_latent_size=0 is not a whole number above 0"),
    ({"hidden_size": 128.0}, "hidden_size=128.0 is not a whole number above 0"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor=nan is not a number above 0"),
    ({"attention_head_dim": 64}, "head_dim=32, attention_head_dim=64 contradict each other"),
    ({"rms_norm_eps": 1e-6}, "layer_norm_epsilon=1e-05, rms_norm_eps=1e-06 contradict"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06: Megatron builds Mamba-2 with 1e-05 only"),
    ({"conv_kernel": 3}, "conv_kernel=3: Megatron builds Mamba-2 with 4 only"),
    ({"time_step_limit": [0.0, 0.1]}, "time_step_limit=.* cannot be built by Megatron"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' cannot be built by Megatron, which has 'relu2'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"model_type": "mamba2"}, "model_type='mamba2'"),
    ({"quantization_config": {}}, "quantization_config"),
    ({"block_configs": [{"block_type": "moe"}]}, "model_type 'nemotron_h': .* of 'nemotron_h_puzzle'"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax' cannot be built by Megatron, which has 'sigmoid'"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ({"num_hidden_layers": 11}, "num_hidden_layers=11, but the pattern .* has 12 layers"),
    (
        {"layers_block_type": ["mamba", "moe", "mamba"]},
        r"hybrid_override_pattern='MEM.*', layers_block_type='MEM' contradict",
    ),
    (
        {"hybrid_override_pattern": "MEX", "num_hidden_layers": 3},
        "'X' at position 2",
    ),
    (
        {"hybrid_override_pattern": "M|E", "num_hidden_layers": 3},
        r"'\|' at position 1",
    ),
    ({"hybrid_override_pattern": None}, "its layers are unknown"),
    ({"layers_block_type": "mamba"}, "layers_block_type is a str, expected a list"),
    ({"layers_block_type": ["mamba", "mamba2"]}, r"layers_block_type\[1\] is 'mamba2': known block types"),
    ({"mtp_layers_block_type": ["attention"]}, r"mtp_hybrid_override_pattern='\*E', .*contradict"),
    (
        {"mtp_hybrid_override_pattern": None},
        "num_nextn_predict_layers=1, but config.json has no mtp_hybrid_override_pattern",
    ),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1 is not a number of MTP blocks"),
    ({"num_key_value_heads": 3}, "num_attention_heads=8 is not divisible by num_query_groups=3"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[", ".join(change) for change, _ in REFUSED])
def test_refused(change: dict[str, Any], message: str) -> None:
    read(BASE)
    data = {k: v for k, v in (BASE | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        read(data)


def test_a_file_that_is_not_the_model_it_is_said_to_be() -> None:
    with pytest.raises(ValueError, match=r"not the model nano: hidden_size=4096 \(expected 2688\)"):
        read(write(get("nano").but(hidden_size=4096)), base=get("nano"))
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers=0, but lightning has 1 MTP block"):
        read(write(get("nano")), base=get("lightning"))


def test_a_model_megatron_cannot_build_is_not_written() -> None:
    with pytest.raises(ValueError, match="conv_kernel=3"):
        write(get("nano").but(mamba_conv_kernel=3))


#: In files of the family (time_step_rank: Nemotron-H-56B-Base-8K) and of tools that saved them again.
UNREAD = {
    "time_step_rank": 256,
    "unsloth_version": "2025.11.3",
    "_attn_implementation_autoset": True,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pretraining_tp": 1,
    "router_aux_loss_coef": 0.001,
    "experts_implementation": "grouped_mm",
    "key_of_a_tool": {"a": [1]},
}


def test_keys_that_no_reader_uses_are_kept_and_named() -> None:
    """transformers computes the same with them; what is written with such a reference has them all."""
    short = get("super-tiny").but(pattern="M*E")
    plain = through_json(write(short))
    outputs = []
    for data in (plain, plain | UNREAD):
        torch.manual_seed(0)
        model = transformers_from({k: v for k, v in data.items() if k != "experts_implementation"})
        with torch.no_grad():
            outputs.append(model.eval()(torch.arange(16)[None]).logits)
    assert outputs[0].equal(outputs[1])
    assert read(plain | UNREAD) == read(plain) and unread_note(plain) is None
    assert UNREAD.items() <= write(short, reference=plain | UNREAD).items()
    (note,) = filter(None, [unread_note(plain | UNREAD)])
    assert note.startswith("config.json has 8 keys that no reader of the family uses: _attn_implementation")
    assert all(key in note for key in UNREAD)
    many = unread_note(dict.fromkeys(map(str, range(1000, 1040))))
    assert many is not None and many.endswith("1011 and 28 more")
    assert "\\x1b[2J\\n" in str(unread_note({"\x1b[2J\n": 1}))
    # The form of other models, with the values of this one.
    read(plain | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "use_qk_norm": False})


def test_every_key_has_one_meaning() -> None:
    assert not IGNORED & set(FIXED)
    assert set(BLOCKS.values()) == set("ME*-")


PUZZLE = get("puzzle-tiny")


def puzzle(**changes: Any) -> dict[str, Any]:
    return through_json(write(PUZZLE)) | changes


def with_blocks(change: dict[int, dict[str, Any]], key: str = "block_configs") -> dict[str, Any]:
    """The blocks of `PUZZLE` with some keys of some blocks changed; a value of None removes a key."""
    blocks = [dict(block) for block in puzzle()[key]]
    for number, values in change.items():
        merged = blocks[number] | values
        blocks[number] = {name: value for name, value in merged.items() if value is not None}
    return {key: blocks}


def test_blocks_of_the_released_model() -> None:
    """The last MoE layers of the released file, and Super's MTP block."""
    data = write(get("puzzle"))
    assert (data["model_type"], data["architectures"]) == (
        "nemotron_h_puzzle",
        ["NemotronHPuzzleForCausalLM"],
    )
    rest = {"n_routed_experts": 512, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024}
    assert data["block_configs"][-3:] == [
        {"block_type": "moe", "moe_intermediate_size": 1792, "num_experts_per_tok": 18, **rest},
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 2048, "num_experts_per_tok": 18, **rest},
    ]
    assert data["mtp_block_configs"] == [
        {"block_type": "attention"},
        {"block_type": "moe", "moe_intermediate_size": 2688, "num_experts_per_tok": 22, **rest},
    ]
    assert not {"moe_intermediate_size", "num_experts_per_tok"} & data.keys() and data["ssm_state_size"] == 96


def test_what_blocks_state_may_be_missing_outside_and_the_other_way() -> None:
    same = read(puzzle(), base=PUZZLE)
    rest = ("n_routed_experts", "moe_shared_expert_intermediate_size", "moe_latent_size")
    inside = {key: value for key, value in puzzle().items() if key not in rest}
    assert read(inside, base=PUZZLE) == same
    lists = with_blocks({n: dict.fromkeys(rest) for n in range(12)})
    lists |= with_blocks({n: dict.fromkeys(rest) for n in range(2)}, "mtp_block_configs")
    assert read(puzzle(**lists), base=PUZZLE) == same
    # The layers alone, as NVIDIA's class saves them; a state size in each block; names of transformers 5.13.
    no_pattern = {k: v for k, v in inside.items() if not k.endswith("hybrid_override_pattern")}
    del no_pattern["num_hidden_layers"], no_pattern["ssm_state_size"]
    sized = with_blocks({n: {"ssm_state_size": 16} for n, kind in enumerate(PUZZLE.pattern) if kind == "M"})
    no_pattern |= {"blockwise_members": ["moe_intermediate_size"], "num_hidden_layers": None, **sized}
    assert read(no_pattern, base=PUZZLE) == same
    new = {"mamba": "linear_attention", "attention": "full_attention"}
    renamed = {
        key: [
            block | {"block_type": new.get(block["block_type"], block["block_type"])}
            for block in puzzle()[key]
        ]
        for key in ("block_configs", "mtp_block_configs")
    }
    assert read(puzzle(**renamed), base=PUZZLE) == same
    # A block's numbers count, not those outside, which NVIDIA's class deletes.
    assert read(puzzle(num_experts_per_tok=7, moe_intermediate_size=7), base=PUZZLE) == same
    # With a reference its blocks are kept as they are.
    reference = puzzle(**lists)
    assert write(PUZZLE, reference=reference)["block_configs"] == reference["block_configs"]


def test_blocks_that_are_alike_are_an_ordinary_model() -> None:
    alike = get("super-tiny")
    data = puzzle(**with_blocks({n: {} for n in range(12)}))
    for block in data["block_configs"]:
        if block["block_type"] == "moe":
            block |= {"moe_intermediate_size": 96, "num_experts_per_tok": 6}
    assert read(data, base=alike) == alike and read(data).moe_layers is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_configs": []}, "without block_configs: the layers' experts are unknown"),
        ({"block_configs": "moe"}, "block_configs is a str, expected a list of blocks"),
        (
            with_blocks({3: {"block_type": "no_op"}}),
            r"block_configs\[3\] has block_type 'no_op': layers are one",
        ),
        ({"block_configs": [{"attention": {}, "ffn": {}}]}, r"block_configs\[0\] has block_type None"),
        (with_blocks({3: {"sliding_window": 4096}}), "sliding_window=4096 cannot be built"),
        (with_blocks({3: {"q_indexer_dim": 128}}), r"block_configs\[3\] has unknown keys: q_indexer_dim"),
        (
            with_blocks({1: {"n_routed_experts": 16}}),
            r"n_routed_experts is 16 in block_configs\[1\] and 32 in block_configs\[4\]: Megatron builds",
        ),
        (with_blocks({0: {"ssm_state_size": 32}}), r"ssm_state_size is 32 in .*\[0\] and 16 outside"),
        (
            {"n_routed_experts": 16},
            r"n_routed_experts is 32 in block_configs\[1\] and 16 outside of the blocks",
        ),
        (
            with_blocks({4: {"moe_latent_size": None}}) | {"moe_latent_size": None},
            r"block_configs\[4\] has no moe_latent_size, which block_configs\[1\] has",
        ),
        (with_blocks({4: {"num_experts_per_tok": None}}), r"block_configs\[4\]: config.json has no num_exp"),
        (
            with_blocks({4: {"num_experts_per_tok": 0}}),
            r"num_experts_per_tok=0 is not a whole number above 0",
        ),
        (with_blocks({4: {"num_experts_per_tok": 33}}), r"moe_layers\[1\]: 33 experts per token exceed"),
        (with_blocks({4: {"num_experts_per_tok": 1}}), "norm_topk_prob=True divides the weight of the only"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type=.* and block_configs .* contradict each other"),
        (
            {"mtp_hybrid_override_pattern": "E"},
            r"mtp_hybrid_override_pattern='E' and mtp_block_configs '\*E'",
        ),
        (
            {"mtp_block_configs": [{"block_type": "moe"}, *puzzle()["mtp_block_configs"]]},
            r"mtp_hybrid_override_pattern='\*E' and mtp_block_configs",
        ),
        (
            with_blocks({0: {"block_type": "moe", "num_experts_per_tok": 5}}, "mtp_block_configs")
            | {"mtp_hybrid_override_pattern": None, "moe_intermediate_size": 96},
            r"of an MTP block differ: \[\(96, 5\), \(96, 6\)\]",
        ),
    ],
)
def test_blocks_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(puzzle(**changes), base=PUZZLE)


def test_without_mtp() -> None:
    """The experts of MTP's layers are then of no layer, and no file states them."""
    alone = PUZZLE.but(mtp_pattern=None, mtp_num_layers=0)
    data = through_json(write(alone))
    assert "mtp_block_configs" not in data
    assert read(data, base=alone).moe_layers == PUZZLE.moe_layers
    assert [model.name for model in identify(read(data))] == ["puzzle-tiny"]
