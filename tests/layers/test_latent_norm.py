"""Normalized LatentMoE (`--moe-use-norm-before-up-proj`): an RMSNorm between experts and `fc2_latent_proj`.

Megatron-core 0.19 has no such option, so the layer is tested with a config that has the attribute; where the
imported Megatron has the option, upstream's own layer and training in parallel layouts are compared as well.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_layer as upstream
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import config_json, from_hf, inventory, plan
from megatron_nemotron3.inference.generate.decode import Decode
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.refit import EngineLayout, Training, make_plan
from megatron_nemotron3.launch import Launch, ParallelLayout, flags, to_argv
from megatron_nemotron3.layers.linear import DuplicatedLinear
from megatron_nemotron3.layers.norm import NormBuilder
from megatron_nemotron3.models import get, parameters
from megatron_nemotron3.models.definition import Definition
from tests.layers.test_modules import assert_close, assert_same, moe_layer, per_sequence, run_layer
from tests.parallel.case import Case
from tests.parallel.compare import check
from tests.parallel.layouts import small
from tests.support.model_mapping import megatron_model, randomize

PLAIN = get("super-tiny").but(pattern="ME*", vocab_size=256)
MODEL = PLAIN.but(moe_use_norm_before_up_proj=True)
IN_MEGATRON = "moe_use_norm_before_up_proj" in {field.name for field in fields(TransformerConfig)}


@pytest.fixture(scope="module")
def model(world: None) -> Any:
    result = megatron_model(MODEL, moe_aux_loss_coeff=0.0)
    randomize(result, seed=3)
    return result.train()


def test_the_layer_is_its_definition(model: Any) -> None:
    """Values and gradients of the input and of every parameter."""
    layer = model.decoder.layers[1]
    x = torch.randn(12, 2, MODEL.hidden_size, generator=torch.Generator().manual_seed(4)).requires_grad_()
    inputs = [x, *layer.parameters()]
    assert layer.mlp.fc2_norm.weight.shape == (MODEL.moe_latent_size,)
    assert_same(run_layer(layer, x), per_sequence(lambda row: moe_layer(layer, row), x), inputs)
    without = megatron_model(PLAIN).decoder.layers[1].mlp
    assert not hasattr(without, "fc2_norm")


def test_tensors_and_counts(model: Any) -> None:
    """Every parameter of Megatron's model has its row, in Megatron's order."""
    names = [name for name, _ in model.named_parameters() if name.startswith("decoder.layers.1.")]
    places = [i for i, name in enumerate(names) if re.search("fc1_latent|fc2_norm|fc2_latent", name)]
    assert names[places[1]] == "decoder.layers.1.mlp.fc2_norm.weight" and len(places) == 3
    assert (
        parameters.count(MODEL).stored - parameters.count(PLAIN).stored == 2 * MODEL.moe_latent_size
    )  # one E is MTP's
    assert sum(p.numel() for p in model.parameters()) == parameters.count(MODEL).trainable
    keys = set(from_hf.extra_state_keys(MODEL)) - set(from_hf.extra_state_keys(PLAIN))
    assert len(keys) == 2 and all(".mlp.fc2_norm._extra_state" in key for key in keys)


def converted(model: Any) -> dict[str, Tensor]:
    """The weights by the names that the definition reads."""
    state, found = model.state_dict(), {}
    for mapping in inventory.mappings(MODEL, dialect="parameter"):
        found |= plan.apply(mapping.to_hf(), {t.name: state[t.name] for t in mapping.megatron})
    return found


@torch.no_grad()
def test_the_definition_and_generation_compute_it(model: Any) -> None:
    weights = converted(model)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
    logits = model.eval()(tokens, torch.arange(12).expand(2, -1), None)
    model.train()
    definition = Definition(MODEL, weights.__getitem__)(tokens).logits[0]
    assert_close(definition, logits)
    engine = Engine(Decode(MODEL, weights.__getitem__, torch.float32), max_context=12)
    state = engine.new_state(2)
    parts = [engine.forward(tokens[:, a:b], state).logits for a, b in ((0, 10), (10, 11), (11, 12))]
    assert_close(torch.cat(parts, 1), logits)
    plain = Definition(PLAIN, weights.__getitem__)(tokens).logits[0]
    assert (plain - definition).abs().max() > 0.1


def test_what_lacks_the_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="no model of Hugging Face or of an engine"):
        config_json.write(MODEL)
    said = "no model of Hugging Face" if IN_MEGATRON else "megatron-core 0.19 has no --moe-use-norm-before-up"
    with pytest.raises(ValueError, match=said):
        make_plan(Training(config=MODEL), EngineLayout(config=MODEL))
    with pytest.raises(ValueError, match="moe_use_norm_before_up_proj needs moe_latent_size"):
        MODEL.but(moe_latent_size=None)


def test_flags() -> None:
    launch = Launch.of(MODEL, ParallelLayout(), megatron_core="0.20", backend="torch", precision="fp32")
    assert "--moe-use-norm-before-up-proj" in {flag.name for flag in flags(launch)}


def test_an_existing_command_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is compared with the options of 0.20; the checkpoint's arguments would name the norm, too."""
    launch = Launch.of(MODEL, ParallelLayout(), megatron_core="0.20", backend="torch", precision="fp32")
    script = tmp_path / "launch.sh"
    script.write_text("torchrun pretrain_hybrid.py " + shlex.join(to_argv(flags(launch))) + "\n")
    assert cli.main(["explain", "--argv", str(script), "--full"]) == 0
    assert "--moe-use-norm-before-up-proj" in capsys.readouterr().out


class _Linear(DuplicatedLinear):
    """With the signature that upstream calls TE's linear with."""

    def __init__(self, *sizes: int, config: Any, init_method: Any, name: Any, **_: Any) -> None:
        super().__init__(*sizes, config=config, init_method=init_method, name=name)


@pytest.mark.skipif(not IN_MEGATRON, reason="this megatron-core has no --moe-use-norm-before-up-proj")
def test_upstreams_layer_computes_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's layer builds TE's modules; torch's of the same names stand in for them."""
    monkeypatch.setattr(upstream, "HAVE_TE", True)
    monkeypatch.setattr(upstream, "TELinear", _Linear)
    monkeypatch.setattr(upstream, "TENorm", NormBuilder)
    ours = model.decoder.layers[1].mlp
    theirs = upstream.MoELayer(ours.config, ours.submodules, layer_number=2)
    assert {name for name, _ in theirs.named_parameters()} == {name for name, _ in ours.named_parameters()}
    theirs.load_state_dict(ours.state_dict())
    theirs.train()
    x = torch.randn(12, 2, MODEL.hidden_size, generator=torch.Generator().manual_seed(5)).requires_grad_()
    found, expected = ours(x)[0], theirs(x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.skipif(not IN_MEGATRON, reason="this megatron-core has no --moe-use-norm-before-up-proj")
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2, pp=2)], ids=str)
def test_layouts_equal_one_process(layout: ParallelLayout) -> None:
    one = Case(config=small("super", "MEM*EME*").but(moe_use_norm_before_up_proj=True))
    check(one, one.at(layout))
