"""Which sizes a model can be pruned to, and the model that results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_nemotron3.models import Nemotron3Config, count, get, tiny
from megatron_nemotron3.post_training.compress.sizes import (
    DIMENSIONS,
    candidate_config,
    parse_numbers,
    parse_sizes,
)

DENSE, SUPER, PUZZLE = (tiny(get(name)) for name in ("nano-4b", "super", "puzzle"))
NO_MTP = SUPER.but(mtp_pattern=None, mtp_num_layers=0)


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (DENSE, {"mamba_state_dim": 8}, "mamba_state_dim cannot be pruned: choose from hidden_size"),
        (DENSE, {"hidden": 8}, "did you mean 'hidden_size'"),
        (DENSE, {"num_moe_experts": 2}, "nano-4b-tiny has no E layer"),
        (DENSE, {"hidden_size": 129}, "hidden_size=129: nano-4b-tiny has 128, give 1 to 128"),
        (DENSE, {"hidden_size": (96, 96)}, "give one number"),
        (DENSE, {"mamba_num_heads": 12}, "mamba_num_groups=8: give a multiple of 8"),
        (DENSE, {"num_query_groups": 1, "num_attention_heads": 8}, "have 4 query heads, give at most 4"),
        (SUPER, {"num_moe_experts": 5}, "less than moe_router_topk=6: give at least 6"),
        (PUZZLE, {"moe_ffn_hidden_size": 96}, "layer 1 of .* has 32, give 1 to that"),
        (SUPER, {"moe_ffn_hidden_size": (64, 96)}, "2 values for 5 E layers"),
        (DENSE, {"num_layers": 10}, "say which layers stay"),
    ],
)
def test_sizes_that_cannot_be(config: Nemotron3Config, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        candidate_config(config, sizes)


@pytest.mark.parametrize("layers", [[0, 0], [1, 0], [0, 12], [0]])
def test_layers_that_cannot_be(layers: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="give 2 different numbers below 12, in order"):
        candidate_config(DENSE, {"num_layers": 2}, layers)


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("config", [DENSE, SUPER], ids=lambda config: config.name)
def test_one_size_changes_one_number(config: Nemotron3Config, name: str) -> None:
    if getattr(config, name) is None:
        return
    new = max(1, getattr(config, name) // 2)
    layers = range(0, config.num_layers, 2) if name == "num_layers" else None
    pruned = candidate_config(config, {name: new}, layers)
    field = "pattern" if name == "num_layers" else name
    same = {one: getattr(config, one) for one in ("name", "title", field)}
    if name == "num_query_groups":  # the query heads of a group go with it
        assert pruned.num_attention_heads == config.num_attention_heads // 2
        same["num_attention_heads"] = config.num_attention_heads
    assert getattr(pruned, name) == new
    assert pruned.but(**same) == config
    assert name == "moe_router_topk" or count(pruned).stored < count(config).stored


def test_the_name_of_a_tiny_model_stays_tiny() -> None:
    assert candidate_config(SUPER, {}).name == "super-pruned-tiny"
    assert candidate_config(get("super"), {}).name == "super-pruned"
    several = " or ".join(f"model-{number}-tiny" for number in range(9))  # whose stored arguments are alike
    assert candidate_config(SUPER.but(name=several), {}).name == "model-0-pruned-tiny"


def test_experts_that_differ_by_layer() -> None:
    """A tuple is for the decoder's layers that stay; MTP keeps its experts."""
    layers = [layer for layer in range(12) if layer != SUPER.pattern.index("E")]
    pruned = candidate_config(SUPER, {"moe_ffn_hidden_size": (96, 64, 32, 96)}, layers)
    assert pruned.moe_layers == ((96, 6), (64, 6), (32, 6), (96, 6))
    assert (pruned.moe_ffn_hidden_size, pruned.mtp_pattern) == (96, "*E")
    again = candidate_config(pruned, {"moe_router_topk": 4})
    assert again.moe_layers == ((96, 4), (64, 4), (32, 4), (96, 4)) and again.moe_router_topk == 4
    alike = candidate_config(NO_MTP, {"moe_ffn_hidden_size": (64,) * 5})
    assert alike.moe_layers is None and alike.moe_ffn_hidden_size == 64


def test_words_of_sizes() -> None:
    assert parse_sizes(["hidden_size=96", "moe_router_topk=2,4"]) == {
        "hidden_size": 96,
        "moe_router_topk": (2, 4),
    }
    for words, said in (
        (["hidden_size"], "give NAME=N"),
        (["hidden_size=-1"], "give NAME=N"),
        (["hidden_size=96,"], "give NAME=N"),
        (["hidden=96"], "did you mean 'hidden_size'"),
        (["hidden_size=96", "hidden_size=64"], "given twice"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_sizes(words)


def test_a_size_has_a_limited_number_of_values() -> None:
    many = ",".join(map(str, range(1, 5000)))
    with pytest.raises(ValueError, match="--vary moe_ffn_hidden_size: 4,999 values: give at most 64"):
        parse_numbers([f"moe_ffn_hidden_size={many}"], "--vary", "")
