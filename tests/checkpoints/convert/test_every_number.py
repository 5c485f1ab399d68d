"""Every field of `Nemotron3Config` and every key of transformers' configuration, changed one at a time.

Megatron, built from our flags, and transformers, built from the config.json, must both follow the change and
agree with each other, or the change is refused. Nothing is set aside here but the clamp, not an epsilon.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints.convert.config_json import read, write
from megatron_nemotron3.checkpoints.convert.config_keys import FIXED
from megatron_nemotron3.launch import Launch, flags, to_argv
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.train.build import build_model
from tests.support import parity
from tests.support.model_mapping import randomize, to_transformers, transformers_from, unclamped
from tests.support.world import world_of_one

transformers = pytest.importorskip("transformers")

#: One layer of each kind, experts with a latent width, no MTP, which transformers does not build.
MODEL = parity.without_mtp(get("super-tiny")).but(
    name="every-number", pattern="M*E-", dense_ffn_hidden_size=48, num_moe_experts=8, moe_router_topk=2
)
TOKENS = 40

#: Field -> another value of it.
CHANGED: dict[str, Any] = {
    **{"name": "other", "title": "Other", "pattern": "ME*-M", "hidden_size": 96, "vocab_size": 768},
    **{"seq_length": 512, "max_position_embeddings": 999, "num_attention_heads": 12, "num_query_groups": 4},
    **{"kv_channels": 24, "mamba_num_heads": 24, "mamba_head_dim": 24, "mamba_state_dim": 24},
    **{"mamba_num_groups": 4, "mamba_conv_kernel": 3, "mamba_chunk_size": 32, "dense_ffn_hidden_size": 72},
    **{"num_moe_experts": 12, "moe_router_topk": 1, "moe_ffn_hidden_size": 40, "moe_latent_size": None},
    **{"moe_shared_expert_intermediate_size": 24, "moe_router_topk_scaling_factor": 1.75},
    "moe_use_norm_before_up_proj": True,
    **{"moe_aux_loss_coeff": 0.5, "moe_router_bias_update_rate": 0.5, "layernorm_epsilon": 1e-2},
    **{"mtp_pattern": "*E", "mtp_num_layers": 1, "mtp_use_repeated_layer": False},
    **{"mtp_loss_scaling_factor": 0.7, "init_method_std": 0.5},
    **{"published_total": "1B", "published_active": "1B", "source": "none", "moe_layers": ((40, 3),)},
}
#: What another field must have at the same time.
TOGETHER = {
    "mtp_pattern": {"mtp_num_layers": 1},
    "mtp_num_layers": {"mtp_pattern": "*E"},
    "mtp_use_repeated_layer": {"mtp_pattern": "*E", "mtp_num_layers": 2},
    "mtp_loss_scaling_factor": {"mtp_pattern": "*E", "mtp_num_layers": 1},
}
REFUSED_FIELDS = {"mamba_conv_kernel", "layernorm_epsilon", "moe_use_norm_before_up_proj"}
#: Fields that neither Megatron's options nor config.json contain.
DESCRIPTIONS = {"name", "title", "published_total", "published_active", "source"}
#: Fields that are only in config.json, and change no result.
ONLY_HF = {"max_position_embeddings", "mamba_chunk_size"}
#: Fields whose option belongs to the data set's tokenizer.
OF_THE_DATA = {"vocab_size"}
#: Fields that only training needs; config.json has no key for them.
ONLY_MEGATRON = {"seq_length", "moe_aux_loss_coeff", "moe_router_bias_update_rate"}


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with world_of_one():
        yield


def changed(field: str) -> Nemotron3Config:
    return MODEL.but(**{field: CHANGED[field], **TOGETHER.get(field, {})})


def argv(config: Nemotron3Config) -> list[str]:
    own = ("--spec", "mine", "spec") if config.moe_layers else ()  # no other option says what they are
    return to_argv(flags(Launch.of(config, precision="fp32", backend="torch", extra=own)))


def theirs_of(data: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Any:
    """transformers' model of a config.json as a file has it, with the weights of `weights` if given."""
    model = transformers_from(json.loads(json.dumps(data)) | {"dtype": "float32"}).float().eval()
    unclamped(model)
    if weights is not None:
        model.load_state_dict(weights, strict=True)
    return model


def both(config: Nemotron3Config, data: dict[str, Any], seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of Megatron built from the flags of `config`, and of transformers built from `data`."""
    ours = build_model(config, precision="fp32", backend="torch").eval()
    randomize(ours, seed)
    theirs = theirs_of(data, to_transformers(parity.weights_of(ours), config))
    ids = parity.text(config, 1, TOKENS, seed)
    with torch.no_grad():
        return parity.forward(ours, ids), theirs(ids).logits


def test_every_field_has_another_value() -> None:
    assert set(CHANGED) == {field.name for field in fields(Nemotron3Config)}
    assert all(getattr(MODEL, field) != value for field, value in CHANGED.items() if field not in TOGETHER)


@pytest.mark.parametrize("field", sorted(REFUSED_FIELDS))
def test_what_megatron_cannot_build_is_refused(field: str) -> None:
    for made in (argv, write):
        with pytest.raises(ValueError, match=f"{field}={CHANGED[field]}"):
            made(changed(field))


@pytest.mark.parametrize("field", sorted(set(CHANGED) - REFUSED_FIELDS))
def test_a_field_arrives_on_both_sides(field: str, world: None) -> None:
    alone = {"mtp_pattern", "mtp_num_layers"}  # either needs the other
    start = MODEL if field in alone else MODEL.but(**TOGETHER.get(field, {}))
    other = changed(field)
    assert (argv(other) != argv(start)) == (field not in DESCRIPTIONS | ONLY_HF | OF_THE_DATA)
    assert (write(other) != write(start)) == (field not in DESCRIPTIONS | ONLY_MEGATRON)
    if other.has_mtp:
        return
    ours, theirs = both(other, write(other))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=parity.LOGITS_ATOL)


#: Key of transformers' configuration -> another value; the others are changed by their type.
OTHER_VALUES: dict[str, Any] = {
    "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"],
    "mtp_layers_block_type": ["moe"],
    "time_step_limit": [0.0, 0.01],
    "time_step_floor": 0.05,
    "time_step_min": 0.05,
    "head_dim": 24,
    "num_key_value_heads": 4,
    "num_attention_heads": 12,
    "mamba_num_heads": 24,
    "n_groups": 4,
    "topk_group": 2,
    "num_experts_per_tok": 1,
    "hidden_size": 96,
    "mlp_hidden_act": "silu",
    "mamba_hidden_act": "gelu",
    "moe_latent_size": None,
    "sliding_window": 8,
    "attention_dropout": 0.5,
    "hidden_dropout": 0.5,
    "num_nextn_predict_layers": 1,
}
#: Keys of its base class that a model's file may contain, too.
BASE_KEYS = {"tie_word_embeddings": True, "chunk_size_feed_forward": 8, "output_attentions": True}


def keys() -> dict[str, Any]:
    """Each key that transformers declares for this family -> a value other than `MODEL`'s."""
    full = transformers.NemotronHConfig.from_dict(write(MODEL)).to_dict()
    found = dict(BASE_KEYS)
    for key in transformers.NemotronHConfig.__annotations__:
        value = full.get(key)
        if key in OTHER_VALUES:
            found[key] = OTHER_VALUES[key]
        elif isinstance(value, bool):
            found[key] = not value
        elif isinstance(value, (int, float)):
            found[key] = 2 * value if value else 1
        elif isinstance(value, str):
            found[key] = "bfloat16"
    return found


KEYS = keys()
#: One expert per token is refused where the file says that its weight is normalized.
REFUSED_KEYS = {*FIXED, "norm_topk_prob", "conv_kernel", "layer_norm_epsilon", "num_experts_per_tok"}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_is_refused_or_arrives_or_changes_nothing(key: str, world: None) -> None:
    """A key that is read as the same model must leave transformers' logits as they are, bit for bit."""
    full = transformers.NemotronHConfig.from_dict(write(MODEL)).to_dict()
    start = {k: v for k, v in full.items() if k in KEYS or k in write(MODEL)}
    data = start | {key: KEYS[key]}
    try:
        config = read(data, name=MODEL.name)
    except ValueError:
        assert key in REFUSED_KEYS
        return
    assert key not in REFUSED_KEYS
    ours, theirs = both(config if not config.has_mtp else parity.without_mtp(config), data)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=parity.LOGITS_ATOL)


def test_the_only_expert_keeps_its_score() -> None:
    """Megatron does not divide the only weight by itself, and only one value of config.json says so."""
    data = write(MODEL.but(moe_router_topk=1))
    assert data["norm_topk_prob"] is False and read(data).moe_router_topk == 1
    for wrong in ({**data, "norm_topk_prob": True}, {k: v for k, v in data.items() if k != "norm_topk_prob"}):
        with pytest.raises(ValueError, match="only norm_topk_prob=False can be built"):
            read(wrong)
    with pytest.raises(ValueError, match="norm_topk_prob=False cannot be built by Megatron, which has True"):
        read(write(MODEL) | {"norm_topk_prob": False})
