"""The catalog's names, the config's refusals, the tiny models and the cost of importing them."""

from __future__ import annotations

import pytest

from megatron_nemotron3.models import (
    PUZZLE,
    SUPER,
    count,
    get,
    names,
    tiny,
)


def test_every_catalog_model_is_listed_once_and_has_a_source() -> None:
    assert len(set(names())) == len(names()) == 12
    for name in names():
        config = get(name)
        assert config.name == name and config.source


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("super", "super"),
        ("Super", "super"),
        ("nemotron-3-super", "super"),
        ("Nemotron 3 Super 120B-A12B", "super"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "super"),
        ("nemotron_3_nano_4b", "nano-4b"),
        ("Nemotron 3.5 Lightning", "lightning"),
        ("nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-BF16", "puzzle"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nano-9b-v2"),
        ("nemotron-3-ultra-tiny", "ultra-tiny"),
    ],
)
def test_get_accepts_the_names_people_use(text: str, name: str) -> None:
    assert get(text).name == name


def test_get_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=f"known are {', '.join(names())}; did you mean 'super'"):
        get("supra")
    with pytest.raises(ValueError, match="unknown model 'llama-3'"):
        get("llama-3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "MEQ"}, "'Q' at position 2"),
        ({"pattern": "ME|M"}, "'|' at position 2"),
        ({"pattern": "M-"}, "dense_ffn_hidden_size is missing"),
        ({"num_moe_experts": None}, "num_moe_experts is missing"),
        ({"moe_router_topk": 600}, "moe_router_topk=600 exceeds num_moe_experts=512"),
        ({"mtp_num_layers": 0}, "contradict each other"),
        ({"mtp_pattern": None}, "contradict each other"),
        ({"mamba_num_groups": 6}, "mamba_num_heads=128 is not divisible by mamba_num_groups=6"),
        ({"num_query_groups": 3}, "num_attention_heads=32 is not divisible by num_query_groups=3"),
    ],
)
def test_config_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SUPER.but(**change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_layers": PUZZLE.moe_layers[:-1]}, "moe_layers has 39 rows, but pattern has 40 E layers"),
        ({"pattern": "MEM*"}, "moe_layers has 40 rows, but pattern has 1 E layers: give one for each"),
        ({"moe_layers": "1280/4"}, "moe_layers='1280/4': give a pair"),
        ({"moe_layers": ((1280, 4),) * 39 + ((1280, True),)}, "moe_layers[39]=(1280, True): give two"),
        ({"moe_layers": ((0, 4),) * 40}, "moe_layers[0]=(0, 4): give two positive integers"),
        (
            {"moe_layers": ((1280, 513),) * 40},
            "moe_layers[0]: 513 experts per token exceed num_moe_experts=512",
        ),
    ],
)
def test_rows_of_experts_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        PUZZLE.but(**change)
    assert message in str(error.value) and str(error.value).startswith("puzzle: ")


def test_experts_of_each_layer() -> None:
    """The tenth MoE layer is the first of another width; MTP and the layers without experts keep Super's."""
    assert PUZZLE.moe_layers is not None and PUZZLE.expert_sizes == PUZZLE.moe_layers
    moe = [layer for layer, kind in enumerate(PUZZLE.pattern) if kind == "E"]
    for row, layer in zip(PUZZLE.moe_layers, moe, strict=True):
        at = PUZZLE.at(layer)
        assert (at.moe_ffn_hidden_size, at.moe_router_topk) == row and at.moe_layers is None
        assert at == PUZZLE.but(moe_ffn_hidden_size=row[0], moe_router_topk=row[1], moe_layers=None)
    assert PUZZLE.pattern[20:22] == "ME" and PUZZLE.at(21).moe_ffn_hidden_size == 1280
    assert PUZZLE.at(0) is PUZZLE and SUPER.at(1) is SUPER and SUPER.expert_sizes == ((2688, 22),) * 40
    assert (PUZZLE.moe_ffn_hidden_size, PUZZLE.moe_router_topk) == (2688, 22)
    for layer in (-1, 88):
        with pytest.raises(IndexError, match=f"88 layers, so none has number {layer}"):
            PUZZLE.at(layer)
    # Lists, as JSON has them, make an equal model.
    assert PUZZLE.but(moe_layers=[list(row) for row in PUZZLE.moe_layers]) == PUZZLE
    assert hash(PUZZLE) != hash(SUPER.but(name="puzzle"))


@pytest.mark.parametrize("name", names())
def test_tiny_keeps_every_feature(name: str) -> None:
    big = get(name)
    small = tiny(big)
    assert small.name == f"{name}-tiny"
    assert set(small.pattern) == set(big.pattern) and 10 <= small.num_layers <= 12
    assert small.pattern.count("*") >= 2
    assert (small.mtp_pattern, small.mtp_num_layers) == (big.mtp_pattern, big.mtp_num_layers)
    assert small.mtp_use_repeated_layer == big.mtp_use_repeated_layer
    assert small.moe_router_topk_scaling_factor == big.moe_router_topk_scaling_factor
    if big.moe_latent_size:
        assert small.moe_latent_size and small.hidden_size // small.moe_latent_size == 4
    assert small.kv_channels != small.hidden_size // small.num_attention_heads
    assert small.seq_length > small.mamba_chunk_size == big.mamba_chunk_size
    assert 2e6 < count(small).stored < 5e6


@pytest.mark.parametrize("name", names())
def test_tiny_splits(name: str) -> None:
    small = tiny(get(name))
    assert small.num_query_groups % 2 == 0
    for tp in (2, 4):
        heads = small.num_attention_heads, small.mamba_num_heads, small.mamba_num_groups
        assert all(number % tp == 0 for number in (*heads, small.vocab_size, small.ffn_hidden_size))
    if small.is_moe:
        assert small.num_moe_experts is not None and small.num_moe_experts % 16 == 0
