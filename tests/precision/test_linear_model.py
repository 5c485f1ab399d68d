"""Emulation in a whole model: who gets which format, and what must not change a bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_nemotron3.precision import install
from megatron_nemotron3.precision.census import census, formats_of_model
from megatron_nemotron3.precision.model_formats import Ambient, CensusError
from megatron_nemotron3.precision.settings import Emulation
from tests.support.emulation import FIELDS, Step, assert_same, built, seed, step
from tests.support.models import hybrid_config

pytestmark = pytest.mark.usefixtures("world")


def formats(model: Any) -> dict[str, str]:
    return {name: products.formats[0] for name, products in install.emulated(model)}


def test_modules_have_the_formats_of_the_census() -> None:
    model = built("nvfp4")
    found = formats(model)
    entries = census(model, formats_of_model(model, install.ambient_of(model.config, Emulation())))
    wanted = {e.name: e.effective for e in entries if e.kind.quantizable and e.effective != "bf16"}
    assert found == wanted
    assert {"nvfp4", "mxfp8"} == set(found.values())
    # The attention, the last layer (BF16 tail), latent projections and MTP are not among them.
    assert {name.split(".")[2] for name in found} == {"0", "1", "2"}


def test_a_whole_run_in_mxfp8_is_what_megatron_means_by_it() -> None:
    """Every linear outside the BF16 layers, all of MTP included, as in a config that asks TE for it."""
    model = built("mxfp8", quant_recipe=None)
    found = formats(model)
    asked = Ambient.of(
        hybrid_config(
            model.hybrid_layer_pattern.split("/")[0],
            **{name: value for name, value in FIELDS.items() if "in_bf16" in name or "layers_bf16" in name},
        )
    )
    asked = dataclasses.replace(asked, format="mxfp8", whole_mtp=True)
    entries = census(model, formats_of_model(model, asked))
    wanted = {e.name for e in entries if e.kind.quantizable and e.effective == "mxfp8"}
    assert set(found) == wanted and set(found.values()) == {"mxfp8"}
    assert "mtp.layers.0.eh_proj" in found and "decoder.layers.3.self_attention.linear_qkv" in found
    assert not any(name.startswith("decoder.layers.4.") for name in found)
    plain, emulated = step(built(None, quant_recipe=None)), step(model)
    assert not torch.equal(plain.loss, emulated.loss)
    # At 31 dB every gradient moves; those of routed tokens most, because a few choose another expert.
    away = sorted(
        float((gradient - plain.gradients[name]).norm() / plain.gradients[name].norm())
        for name, gradient in emulated.gradients.items()
        if plain.gradients[name].any()
    )
    assert away[0] > 0 and away[len(away) // 2] < 0.15 and away[-1] < 0.6


def test_every_layer_is_what_the_format_alone_means() -> None:
    found = formats(built("nvfp4,every_layer=1"))
    assert set(found.values()) == {"nvfp4"}
    plain = {e.name for e in census(built(None)) if e.kind.quantizable} - set(found)
    assert plain == {"mtp.layers.0.eh_proj"}


def test_nothing_is_emulated_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    model = built(None)
    assert not formats(model) and not any(hasattr(m, "finish_init") for m in model.modules())
    off = built("0")
    assert not formats(off)
    first, second = step(model), step(off)
    assert_same(first, second)
    assert first.saved == second.saved
    on = built("nvfp4")
    assert {n: p.shape for n, p in on.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert on.state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(step(on).loss, first.loss)
    assert "emulating nvfp4: linears of this rank: 2 mxfp8, 6 nvfp4" in capsys.readouterr().out


def test_saved_is_the_quantized_weight_more() -> None:
    """No copy of an activation outlives the forward; Q(W) of dgrad does, MXFP8's is made again."""
    plain, emulated = step(built(None)), built("nvfp4")
    weights = 0
    for name, _ in install.emulated(emulated):
        module = emulated.get_submodule(name)
        if module.products.formats[0] == "nvfp4":
            weights += 4 * sum(p.numel() for n, p in module.named_parameters() if n.startswith("weight"))
    # Experts: between FC1 and FC2 the plain path keeps nothing, this one the activation (docs/nvfp4.md).
    experts = 2 * 64 * 2 * 64 * 4
    scales = 4 * 1000
    assert plain.saved + weights < step(emulated).saved < plain.saved + weights + experts + scales


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    ],
)
def test_recomputation_changes_nothing(changes: dict[str, Any]) -> None:
    first = step(built("nvfp4"))
    second = step(built("nvfp4", **changes))
    assert_same(first, second)
    assert second.saved < first.saved


def test_a_seed_reproduces() -> None:
    first = step(built("nvfp4"))
    assert_same(step(built("nvfp4")), first)
    model = built("nvfp4")
    seed(4)
    other = step(model)
    assert torch.equal(other.loss, first.loss)  # no draws in forward
    name = "decoder.layers.0.mixer.in_proj.weight"
    assert not torch.equal(other.gradients[name], first.gradients[name])


def test_quantized_weights_serve_all_microbatches_of_a_step() -> None:
    model, anew = built("nvfp4"), built("nvfp4")
    for _, products in install.emulated(anew):
        products.reuse = False
    linear = model.decoder.layers[0].mixer.in_proj
    found: list[Step] = []
    wanted: list[Step] = []
    kept = []
    for iteration in range(2):
        for result, m in ((found, model), (wanted, anew)):
            seed(iteration)
            m.set_is_first_microbatch()
            for microbatch in range(2):
                result.append(step(m, seed=microbatch))
                if m is model:
                    kept.append(linear.products._kept[1].values)
            m.zero_grad()
            for p in m.parameters():  # as the distributed optimizer: no version counter sees it
                version = p._version
                p.data.view(-1).neg_()
                assert p._version == version
    assert kept[0] is kept[1] and kept[2] is kept[3] and not torch.equal(kept[1], kept[2])
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


def test_without_a_file_nothing_outlives_a_microbatch() -> None:
    """The schedule tells first microbatches only to models with one."""
    model = built("nvfp4,every_layer=1", quant_recipe=None)
    step(model)
    assert all(not p.reuse and p._kept is None for _, p in install.emulated(model))


def test_a_run_without_nvfp4_ends() -> None:
    model = built("nvfp4", num_layers_at_end_in_bf16=5)
    with pytest.raises(CensusError, match="none of the model's .* linears is nvfp4"):
        step(model)


def test_refused() -> None:
    with pytest.raises(ValueError, match="fp4='e2m1'.*leave --fp8-format and --fp4-format out"):
        install.ambient_of(hybrid_config("M", fp4="e2m1"), Emulation())
    kept = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 9, "num_layers_at_start_in_bf16": 0}
    with pytest.raises(ValueError, match="0 BF16 layers at the start and 9 at the end of 1"):
        install.ambient_of(hybrid_config("M", **kept), Emulation())
    with pytest.raises(
        ValueError, match="decoder layer 1, mixer.in_proj: .* is not divisible into nvfp4 blocks of 16"
    ):
        built("nvfp4", "M", mamba_num_heads=8, mamba_head_dim=16, first_last_layers_bf16=False)
