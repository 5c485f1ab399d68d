"""What each side reads: spellings of keys, dtypes, experts, routing, and transformers' functions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.logits import hugging_face
from megatron_nemotron3.checkpoints.convert.logits.compare import LogitsCheckOptions, check_logits
from megatron_nemotron3.checkpoints.convert.logits.megatron_names import MegatronReader
from megatron_nemotron3.checkpoints.convert.logits.reader import (
    BAND_ELEMENTS,
    StoredDefinition,
    TensorReader,
)
from megatron_nemotron3.checkpoints.convert.logits.report import Selection, agree
from megatron_nemotron3.models import get
from megatron_nemotron3.models.definition import Definition
from tests.support.checkpoint_pair import InMemory, Pair, pair
from tests.support.convert_models import stored_parameters
from tests.support.world import world_of_one

pytest.importorskip("transformers")

CONFIG = get("super-tiny").but(
    name="sides", pattern="M-*E", vocab_size=300, dense_ffn_hidden_size=128, moe_router_topk=2
)
QUIET = LogitsCheckOptions(140, echo=lambda line: None)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with world_of_one():
        yield pair(CONFIG, tmp_path_factory.mktemp("hf"), seed=4)


def figures(right: Pair, megatron: dict[str, Tensor], tokens: int = 140) -> list[float]:
    source = InMemory(megatron, right.hf.folder)
    report = check_logits(source, right.hf, right.config, LogitsCheckOptions(tokens, echo=lambda line: None))
    assert report.passed, report.problems
    return [layer.difference for layer in report.layers] + [logits.difference for logits in report.logits]


#: Another spelling of some keys: (part of the key, its replacement).
SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "wrapped": [("decoder.", "model.module.decoder."), ("embedding.", "model.module.embedding.")],
    "separate norms": [
        ("mixer.in_proj.layer_norm_weight", "norm.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ],
    "older names": [
        ("mtp_model_layer", "transformer_layer"),
        ("decoder.final_norm", "decoder.final_layernorm"),
    ],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings(right: Pair, spelling: str) -> None:
    renamed = {}
    for name, tensor in right.megatron.content.items():
        for old, new in SPELLINGS[spelling]:
            name = (
                new + name.removeprefix(old) if name.startswith(old) else name.replace("." + old, "." + new)
            )
        renamed[name] = tensor
    assert renamed.keys() != right.megatron.content.keys()
    assert figures(right, renamed) == figures(right, right.megatron.content)


def test_parameters_instead_of_torch_dist_keys(right: Pair) -> None:
    """Legacy folders contain packed in_proj and conv1d, and one tensor per expert."""
    parameters = stored_parameters(right.model)
    assert "decoder.layers.0.mixer.in_proj.weight" in parameters
    figures(right, parameters)


def test_experts_one_by_one(right: Pair) -> None:
    tensors = {}
    for key, tensor in right.megatron.content.items():
        head, stacked, tail = key.partition("experts.experts.")
        if stacked:
            linear = tail.removesuffix(".weight")
            name = head + "experts.local_experts.{}.{}.weight"
            tensors |= {name.format(e, linear): part for e, part in enumerate(tensor)}
        else:
            tensors[key] = tensor
    assert figures(right, tensors) == figures(right, right.megatron.content)


def test_bfloat16(right: Pair) -> None:
    """As released: everything except the expert bias."""

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        keep = ("expert_bias", "e_score_correction_bias")
        return {n: t if n.endswith(keep) else t.bfloat16() for n, t in tensors.items()}

    megatron, hf = (InMemory(rounded(s.content), s.folder) for s in (right.megatron, right.hf))
    assert check_logits(megatron, hf, right.config, QUIET).passed
    # Comparing rounded with unrounded weights must fail.
    assert not check_logits(right.megatron, hf, right.config, QUIET).passed


def test_only_chosen_experts_are_read(right: Pair) -> None:
    sources = [InMemory(s.content, s.folder) for s in (right.megatron, right.hf)]
    report = check_logits(*sources, right.config, LogitsCheckOptions(3, echo=lambda line: None))
    read = {name for name in sources[1].read_names if "layers.3.mixer.experts." in name and "up" in name}
    (layer,) = (layer for layer in report.layers if layer.name.startswith("decoder.layers.3 "))
    assert 2 <= len(read) == layer.experts <= 6 < CONFIG.num_moe_experts
    assert report.experts == 2 * CONFIG.num_moe_experts  # the decoder's layer and MTP's
    everything = set(right.hf.content) - {n for n in right.hf.content if ".experts." in n}
    assert everything <= sources[1].read_names
    shared = {n for n in right.megatron.content if "_extra_state" not in n}
    assert shared == sources[0].read_names


def test_installed_kernels_are_not_used(right: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers uses mamba-ssm and causal-conv1d if they are installed, but their kernels need a GPU."""
    modeling, _ = hugging_face.transformers_model()
    for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):

        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no GPU")

        function = getattr(modeling, name)
        monkeypatch.setattr(modeling, name, functools.wraps(function)(kernel))
    installed = modeling.mamba2_chunk_scan
    figures(right, right.megatron.content)
    assert modeling.mamba2_chunk_scan is installed  # as it was


@pytest.mark.parametrize(("version", "right_one"), [("5.14.1", False), ("5.15.1", True)])
def test_old_transformers_is_refused(version: str, right_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    if right_one:
        hugging_face.transformers_model()
        return
    with pytest.raises(ImportError, match=rf"transformers {version} .*pip install 'transformers>=5\.15\.1'"):
        hugging_face.transformers_model()


# --- routing ----------------------------------------------------------------------------------------------


def selection(*scores: float, topk: int = 2) -> Selection:
    row = torch.tensor([scores])
    return Selection(row, row.topk(topk).indices)


def test_a_model_with_near_ties_passes(right: Pair) -> None:
    """Two experts share a row of the router: rounding decides which of them is selected last."""
    megatron, hf = dict(right.megatron.content), dict(right.hf.content)
    sides = (
        (megatron, "decoder.layers.3.mlp.router.{}", "expert_bias", 0),
        (hf, "backbone.layers.3.mixer.gate.{}", "e_score_correction_bias", 1),
    )
    for tensors, prefix, bias, preferred in sides:
        for name in (prefix.format("weight"), prefix.format(bias)):
            tensors[name] = tensors[name].clone()
            tensors[name][1] = tensors[name][0]
        tensors[prefix.format(bias)][preferred] += 1e-6
    sources = [InMemory(t, right.hf.folder) for t in (megatron, hf)]
    report = check_logits(*sources, right.config, QUIET)
    (layer,) = (layer for layer in report.layers if layer.name.startswith("decoder.layers.3 "))
    assert layer.ties > 0 and layer.others == 0 and layer.scores == pytest.approx(1e-6, rel=0.5)
    assert report.passed, report.problems


def test_other_choices_stay() -> None:
    experts, agreement = agree(selection(0.9, 0.5, 0.4, 0.1), selection(0.9, 0.4, 0.5, 0.1))
    assert sorted(experts[0].tolist()) == [0, 1]
    assert (agreement.ties, agreement.others) == (0, 1)


def test_other_numbers_of_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 experts per token, Hugging Face's has 1"):
        agree(selection(0.9, 0.5, 0.4), selection(0.9, 0.5, 0.4, topk=1))


# --- reader -----------------------------------------------------------------------------------------------


def test_bands_are_small_and_complete(tmp_path: Path) -> None:
    table = torch.randn(2 * BAND_ELEMENTS // 1000 + 7, 1000)
    weights = TensorReader("test", InMemory({"w": table}, tmp_path))
    bands = list(weights.bands("w"))
    assert len(bands) == 3 and all(band.numel() <= BAND_ELEMENTS for band in bands)
    assert torch.equal(torch.cat(bands), table) and torch.equal(weights.tensor("w"), table)
    x = torch.randn(2, 3, 1000)
    found = StoredDefinition(CONFIG, weights).linear(x, "w")
    torch.testing.assert_close(found, x @ table.t(), rtol=0, atol=1e-3)


def test_states_that_grow_are_exact(tmp_path: Path) -> None:
    """The fast scan is for states that decay; a cause of `bisect` has negative time steps."""
    generator, shape = torch.Generator().manual_seed(0), (1, 140, 4)
    x, B, C = (torch.randn(*shape, 8, generator=generator) for _ in range(3))
    A, ssm = -torch.rand(4, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)
    model, exact = StoredDefinition(CONFIG, TensorReader("test", InMemory({}, tmp_path))), Definition.scan
    for dt in (torch.rand(shape, generator=generator), torch.randn(shape, generator=generator)):
        found, expected = model.scan(x, dt, A, B, C, ssm), exact(model, x, dt, A, B, C, ssm)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_queries_in_parts_are_those_of_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (1100, 1107, 1107))
    model = StoredDefinition(CONFIG, TensorReader("test", InMemory({}, tmp_path)))
    expected = Definition.attend(model, q, k, v)
    torch.testing.assert_close(model.attend(q, k, v), expected, rtol=0, atol=1e-6)


def test_every_name_is_put_together_as_the_converter_does(right: Pair) -> None:
    """Two independent ways from Megatron's tensors to Hugging Face's."""
    weights = MegatronReader(right.megatron, CONFIG)
    for name, expected in right.hf.content.items():
        assert torch.equal(weights.tensor(name), expected), name
