"""Counts to the last element, against figures that others published or read off released checkpoints."""

from __future__ import annotations

import pytest

from megatron_nemotron3.models import (
    LIGHTNING,
    NANO,
    NANO_4B,
    NANO_9B_V2,
    NANO_12B_V2,
    NEMOTRON_H_4B,
    NEMOTRON_H_8B,
    NEMOTRON_H_47B,
    NEMOTRON_H_56B,
    PUZZLE,
    SUPER,
    ULTRA,
    Nemotron3Config,
    count,
    stored_tensors,
)
from megatron_nemotron3.models.parameters import ACTIVE_CONVENTIONS


@pytest.mark.parametrize(
    ("config", "with_mtp", "without_mtp"),
    [
        (NANO, 31_577_940_288, 31_577_940_288),
        (SUPER, 123_611_033_088, 120_668_707_840),
        (ULTRA, 560_524_603_904, 549_308_993_536),
        (LIGHTNING, 32_913_266_240, 31_577_940_288),
        (PUZZLE, 78_295_670_272, 75_353_345_024),
        (NANO_4B, 3_973_556_832, 3_973_556_832),
        (NANO_9B_V2, 8_888_227_328, 8_888_227_328),
        (NANO_12B_V2, 12_310_001_152, 12_310_001_152),
        (NEMOTRON_H_4B, 4_489_223_040, 4_489_223_040),
        (NEMOTRON_H_8B, 8_100_852_736, 8_100_852_736),
        (NEMOTRON_H_47B, 46_791_554_816, 46_791_554_816),
        (NEMOTRON_H_56B, 56_324_350_464, 56_324_350_464),
    ],
    ids=lambda value: value.name if isinstance(value, Nemotron3Config) else None,
)
def test_stored_elements(config: Nemotron3Config, with_mtp: int, without_mtp: int) -> None:
    assert count(config).stored == with_mtp
    assert count(config, mtp=False).stored == without_mtp


@pytest.mark.parametrize(
    ("config", "tensors"),
    # The dense 4B: 263 names in a public inference engine's test of its config.json.
    [(NANO, 6_243), (LIGHTNING, 6_513), (SUPER, 42_683), (PUZZLE, 42_683), (ULTRA, 51_023), (NANO_4B, 263)],
    ids=lambda value: value.name if isinstance(value, Nemotron3Config) else None,
)
def test_stored_tensors(config: Nemotron3Config, tensors: int) -> None:
    assert stored_tensors(config) == tensors


def test_checkpoint_bytes_of_the_released_models() -> None:
    assert count(SUPER).stored_bytes == 247_222_108_160
    assert count(ULTRA).stored_bytes == 1_121_049_257_984
    assert count(LIGHTNING).stored_bytes == 65_826_538_624


def test_files_of_the_released_4b() -> None:
    """Their sizes are published in hundredths of a gigabyte, with two headers of a few kilobytes."""
    assert count(NEMOTRON_H_4B).stored_bytes / 1e9 == pytest.approx(4.99 + 3.98, abs=0.01)


def test_layers_of_different_experts_add_up_to_what_is_published() -> None:
    """75.3B and 9.3B: Super with other experts in each layer and a smaller Mamba state."""
    assert (
        SUPER.but(
            **{
                field: getattr(PUZZLE, field)
                for field in ("name", "title", "source", "published_total", "published_active")
            },
            mamba_state_dim=96,
            moe_layers=PUZZLE.moe_layers,
        )
        == PUZZLE
    )
    number = count(PUZZLE, mtp=False)
    assert (number.stored, number.active["with_embeddings"]) == (75_353_345_024, 9_337_076_736)
    # A row more or less changes the sum, so the table is counted by layer.
    rows = PUZZLE.expert_sizes
    widest = PUZZLE.but(moe_layers=((rows[0][0] + 1, rows[0][1] + 1), *rows[1:]))
    assert count(widest).stored - count(PUZZLE).stored == 2 * 512 * 1024
    assert count(widest).active["with_embeddings"] - number.active["with_embeddings"] == (
        2 * 1024 * ((rows[0][0] + 1) * (rows[0][1] + 1) - rows[0][0] * rows[0][1])
    )
    assert count(PUZZLE).mtp == count(SUPER).mtp


def test_expert_bias_is_stored_but_not_trained() -> None:
    for config, layers in ((NANO, 23), (LIGHTNING, 24), (SUPER, 41), (ULTRA, 49)):
        number = count(config)
        assert number.expert_bias == layers * (config.num_moe_experts or 0)
        assert number.trainable == number.stored - number.expert_bias
    assert count(SUPER, mtp=False).expert_bias == 40 * 512
    assert count(NANO_4B).expert_bias == 0


def test_separate_mtp_blocks_are_stored_separately() -> None:
    two = SUPER.but(mtp_use_repeated_layer=False)
    assert count(two).mtp == 2 * count(SUPER).mtp
    block = stored_tensors(SUPER) - stored_tensors(SUPER, mtp=False)
    assert stored_tensors(two) == stored_tensors(SUPER) + block
    assert count(two).active == count(SUPER).active


# (model, convention, published in billions, largest relative error): how well each convention reproduces it.
PUBLISHED_ACTIVE = [
    (NANO, "with_output_layer", 3.2, 0.009),
    (NANO, "with_embeddings", 3.6, 0.006),
    (SUPER, "with_embeddings", 12.7, 0.006),
    (ULTRA, "with_output_layer", 55.0, 0.001),
    (PUZZLE, "with_embeddings", 9.3, 0.005),
]


@pytest.mark.parametrize(("config", "convention", "billions", "error"), PUBLISHED_ACTIVE)
def test_published_active_parameters(
    config: Nemotron3Config, convention: str, billions: float, error: float
) -> None:
    active = count(config).active
    assert abs(active[convention] / (billions * 1e9) - 1) < error
    # No other convention is nearer, so the pairing is not arbitrary.
    assert convention == min(active, key=lambda name: abs(active[name] - billions * 1e9))


def test_active_conventions_widen() -> None:
    active = count(SUPER).active
    assert tuple(active) == ACTIVE_CONVENTIONS
    assert list(active.values()) == [11_696_475_136, 12_233_346_048, 12_770_216_960]
    # Without routed experts everything is active.
    assert count(NANO_4B).active["with_embeddings"] == count(NANO_4B).stored
    # MTP does not run when the next token is predicted.
    assert count(SUPER).active == count(SUPER, mtp=False).active
