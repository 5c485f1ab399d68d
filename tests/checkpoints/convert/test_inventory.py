"""The inventory against published figures, and checkpoints that do not match their configuration."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.models import Nemotron3Config, count, get, names, stored_tensors
from megatron_nemotron3.models.tensors import DIALECTS
from tests.support.convert_models import DISTINCT
from tests.support.megatron_tensors import megatron_tensors

LIGHT = (
    "import sys; from megatron_nemotron3.checkpoints.convert import config_json, omni_config, transforms; "
    "print([m for m in ('torch', 'megatron.core', 'numpy', 'transformers') if m in sys.modules])"
)


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("nano", 6_243, 31_577_940_288),
        ("lightning", 6_513, 32_913_266_240),
        ("super", 42_683, 123_611_033_088),
        ("ultra", 51_023, 560_524_603_904),
    ],
)
def test_published_counts(name: str, tensors: int, elements: int) -> None:
    found = inventory.hf_tensors(get(name))
    assert len({t.name for t in found}) == len(found) == tensors
    assert sum(t.elements for t in found) == elements


@pytest.mark.parametrize(
    "config",
    [*(get(n) for n in names()), *(get(f"{n}-tiny") for n in names()), DISTINCT],
    ids=lambda c: c.name,
)
def test_both_sides_hold_what_the_parameter_counts_say(config: Nemotron3Config) -> None:
    for dialect in ("torch_dist", "parameter"):
        found = megatron_tensors(config, dialect=dialect)
        assert sum(t.elements for t in found) == count(config).stored
    hf = inventory.hf_tensors(config)
    assert len(hf) == stored_tensors(config)
    assert sum(t.elements for t in hf) == count(config).stored
    size = sum(t.elements * {"bfloat16": 2, "float32": 4}[t.dtype] for t in hf)
    assert size == count(config).stored_bytes


def test_padding_grows_the_two_tables_alone() -> None:
    plain = megatron_tensors(DISTINCT)
    padded = megatron_tensors(DISTINCT, padded_vocab_size=512)
    grown = {b.name: b.shape for a, b in zip(plain, padded) if a != b}
    assert grown == {"embedding.word_embeddings.weight": (512, 88), "output_layer.weight": (512, 88)}
    with pytest.raises(ValueError, match="padded_vocab_size=508 is less than vocab_size=509"):
        megatron_tensors(DISTINCT, padded_vocab_size=508)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_links_of_a_checkpoint_follow_its_spelling(dialect: str) -> None:
    mappings = list(inventory.mappings(DISTINCT, dialect=dialect))
    keys = [t.name for mapping in mappings for t in mapping.megatron]
    assert list(inventory.mappings_of(DISTINCT, reversed(keys))) == mappings
    assert list(inventory.mappings_of(DISTINCT, [f"model.module.{key}" for key in keys])) == mappings
    # A missing tensor has no spelling; it is named as in torch_dist.
    message = "2 tensors of distinct are missing, the first is 'decoder.final_norm.weight'"
    with pytest.raises(ValueError, match=message):
        list(inventory.mappings_of(DISTINCT, [keys[0], *keys[2:-1]]))
    with pytest.raises(ValueError, match="are the same tensor"):
        list(inventory.mappings_of(DISTINCT, [*keys, f"module.{keys[3]}"]))


def test_dialects_can_be_mixed_between_layers_but_not_within_a_tensor() -> None:
    keys = [t.name for t in megatron_tensors(DISTINCT)]
    mixed = [key.replace("0.mixer.in_proj.layer_norm_weight", "0.norm.weight") for key in keys]
    assert mixed != keys
    spellings = {mapping.spelling.dialect for mapping in inventory.mappings_of(DISTINCT, mixed)}
    assert spellings == {"torch_dist", "separate norm"}
    with pytest.raises(ValueError, match="are the same tensor"):
        list(inventory.mappings_of(DISTINCT, [*keys, "decoder.layers.0.norm.weight"]))


def test_a_configuration_that_promises_mtp_without_weights_is_refused() -> None:
    config = get("super")
    shapes = {t.name: t.shape for t in inventory.hf_tensors(config)}
    inventory.check_hf(config, shapes)
    without = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    with pytest.raises(
        ValueError, match=r"1040 of 42683 .* configuration has 1 MTP block\(s\) '\*E' whose weights"
    ):
        inventory.check_hf(config, without)
    keys = [t.name for t in megatron_tensors(config) if not t.name.startswith("mtp.")]
    with pytest.raises(ValueError, match="configuration has 1 MTP block"):
        list(inventory.mappings_of(config, keys))


def test_mtp_weights_that_the_configuration_does_not_promise_are_refused() -> None:
    shapes = {t.name: t.shape for t in inventory.hf_tensors(get("lightning"))}
    with pytest.raises(
        ValueError, match="270 tensors do not belong to the model, first 'mtp.layers.0.enorm.weight'"
    ):
        inventory.check_hf(get("nano"), shapes)


def test_missing_surplus_and_misshapen_tensors_are_counted_together() -> None:
    shapes = {t.name: t.shape for t in inventory.hf_tensors(DISTINCT)}
    del shapes["lm_head.weight"]
    shapes["lm_head.bias"] = (509,)
    shapes["backbone.norm_f.weight"] = (87,)
    with pytest.raises(
        ValueError,
        match=r"1 of \d+ tensors are missing, first 'lm_head.weight'; 1 tensors do not belong to the model, "
        r"first 'lm_head.bias'; 1 tensors have another shape, first 'backbone.norm_f.weight': "
        r"\[87\] instead of \[88\]",
    ):
        inventory.check_hf(DISTINCT, shapes)


def test_importing_costs_the_standard_library() -> None:
    out = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
