"""What a candidate loses by measured importance, against its definition on the parts that the cut drops."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.serving import ServingUse
from megatron_nemotron3.models import get
from megatron_nemotron3.models.parameters import prefixes
from megatron_nemotron3.post_training.compress.candidates import search
from megatron_nemotron3.post_training.compress.scores import ScoredLosses, Scores, statistics
from megatron_nemotron3.post_training.compress.sizes import candidate_config

SUPER = get("super-tiny")
E = [layer for layer, kind in enumerate(SUPER.pattern) if kind == "E"]


@pytest.fixture
def scores() -> Scores:
    """Random scores of the tiny Super."""
    drawn = numpy.random.default_rng(5)
    values = {
        key: drawn.gamma(2.0, size=shape).astype(numpy.float32) for key, _, _, shape in statistics(SUPER)
    }
    for layer in E:
        key = f"decoder.layers.{layer}. ranks"
        values[key] = -numpy.sort(-values[key])
    return Scores(SUPER, 64, values)


def test_the_model_itself_loses_nothing(scores: Scores) -> None:
    losses = ScoredLosses(scores)
    assert losses.rest(SUPER, range(SUPER.num_layers)) == 0
    assert all(losses.experts(layer, *row) == 0 for layer, row in zip(E, SUPER.expert_sizes, strict=True))


def test_widths_and_places_in_the_top_k(scores: Scores) -> None:
    """By hand: each expert keeps its own best channels, and a token its best experts."""
    layer, of = E[1], lambda kind: scores.values[f"decoder.layers.{E[1]}. {kind}"].astype(float)
    width, topk = (SUPER.moe_ffn_hidden_size or 0) // 2, (SUPER.moe_router_topk or 0) - 1
    ffn = numpy.sort(of("ffn") ** 2, axis=1)
    dropped = ffn[:, : ffn.shape[1] - width].sum() / ffn.sum() + of("ranks")[topk:].sum() / of("ranks").sum()
    assert ScoredLosses(scores).experts(layer, width, topk) == pytest.approx(float(of("distance")) * dropped)


@pytest.mark.parametrize(
    ("sizes", "kind", "entry"),
    [
        ({"moe_shared_expert_intermediate_size": 96}, "E", "shared"),
        ({"num_moe_experts": 20}, "E", "experts"),
        ({"num_attention_heads": 4}, "*", "heads"),
        ({"mamba_num_heads": 8}, "M", "x"),
        ({"hidden_size": 96}, "ME*", "normed"),
    ],
    ids=lambda value: str(value),
)
def test_other_sizes(scores: Scores, sizes: dict[str, int], kind: str, entry: str) -> None:
    """The share of the parts that `prune` drops, in every layer that has them."""
    pruned = candidate_config(SUPER, sizes)
    axis = {"heads": "q", "x": "inner", "normed": "d"}.get(entry, entry)
    expected = 0.0
    for one, other in zip(prefixes(SUPER), prefixes(pruned), strict=True):
        if one.part not in kind or not one.megatron.startswith("decoder.layers."):
            continue
        whole = scores.values[f"{one.megatron} {entry}"].astype(float).ravel()
        whole = whole if entry == "experts" else whole**2
        kept = scores.axes(one, other)[axis]
        assert kept is not None and len(kept) < len(whole)
        expected += float(scores.values[f"{one.megatron} distance"]) * (1 - whole[kept].sum() / whole.sum())
    assert ScoredLosses(scores).rest(pruned, range(SUPER.num_layers)) == pytest.approx(expected, rel=1e-6)
    assert expected > 0


def test_depth(scores: Scores) -> None:
    losses = ScoredLosses(scores)
    layers = losses.layers(SUPER.num_layers - 2)
    pruned = candidate_config(SUPER, {"num_layers": len(layers)}, layers)
    distances = sorted(float(scores.values[f"decoder.layers.{i}. distance"]) for i in range(SUPER.num_layers))
    assert losses.rest(pruned, layers) == pytest.approx(sum(distances[:2]))


def test_a_layer_that_matters_keeps_its_experts(scores: Scores) -> None:
    """One E layer changes the residual stream most, another has channels that are never used."""
    for layer in E:
        scores.values[f"decoder.layers.{layer}. distance"][...] = 5.0 if layer == E[2] else 0.5
    scores.values[f"decoder.layers.{E[0]}. ffn"][:, 16:] = 0
    full = SUPER.moe_ffn_hidden_size or 0
    values = {"moe_ffn_hidden_size": (16, full // 2, full)}
    losses = ScoredLosses(scores)
    serving = ServingUse(GPUS["h100"])
    whole = search(SUPER, values, {}, serving, losses).candidates[0]
    assert whole.loss == 0 and whole.config.expert_sizes[0][0] == 16
    least = search(SUPER, {"moe_ffn_hidden_size": (16,)}, {}, serving, losses).candidates[0].costs["params"]
    budget = {"params": least + (whole.costs["params"] - least) * 0.4}
    best = search(SUPER, values, budget, serving, losses).candidates[0]
    widths = [width for width, _ in best.config.expert_sizes]
    assert widths[2] == full and widths[0] == 16 and min(widths) < full


def test_command(scores: Scores, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scores.safetensors"
    scores.save(file)
    words = ["prune", "search", "super", "--tiny"]
    words += ["--vary", "moe_ffn_hidden_size=32,64", "--budget", "params=2600k"]
    assert cli.main([*words, "--scores", str(file)]) == 0
    assert "without --scores" not in capsys.readouterr().out
    assert cli.main([*words[:2], "nano", *words[3:], "--scores", str(file)]) == 2
    assert "are not those of nano" in capsys.readouterr().err
