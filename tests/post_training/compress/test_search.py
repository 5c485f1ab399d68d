"""The search for smaller forms of a model, against all of them."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common import output
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.serving import ServingUse
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.command import model
from megatron_nemotron3.post_training.compress.candidates import (
    MEASURES,
    NoCandidate,
    UniformLosses,
    amount,
    costs,
    parse_budget,
    search,
)
from megatron_nemotron3.post_training.compress.sizes import BY_LAYER, candidate_config

SERVING = ServingUse(GPUS["h100"], sequences=4, context=512)
#: Four E layers of two kinds, and MTP, whose experts stay.
TINY = get("super-tiny").but(
    name="mine", pattern="MEE*EME", num_moe_experts=8, moe_router_topk=4, moe_ffn_hidden_size=96,
    moe_layers=((96, 4), (64, 4), (96, 3), (96, 4)),
)  # fmt: skip
VALUES = {
    "moe_ffn_hidden_size": (32, 64, 96),
    "moe_router_topk": (2, 4),
    "moe_latent_size": (16, 32),
    "mamba_num_heads": (8, 16),
}


class Drawn:
    """Losses of no order: each width, top-k and size has its own random number in each layer."""

    def __init__(self, config: Nemotron3Config, seed: int) -> None:
        self.config, self.seed = config, seed

    def _drawn(self, *key: object) -> float:
        return random.Random(f"{self.seed} {key}").random()

    def layers(self, number: int) -> Sequence[int]:
        return sorted(random.Random(self.seed).sample(range(self.config.num_layers), number))

    def experts(self, layer: int, width: int, topk: int) -> float:
        own = self.config.at(layer)
        lost = (own.moe_ffn_hidden_size or 0) - width + 30 * ((own.moe_router_topk or 0) - topk)
        return self._drawn(layer) * lost**1.3 + 5 * self._drawn(layer, width, topk)

    def rest(self, config: Nemotron3Config, layers: Sequence[int]) -> float:
        key = (config.moe_latent_size, config.mamba_num_heads, config.hidden_size, tuple(layers))
        return 60 * self._drawn(*key)


Every = list[tuple[float, dict[str, float], Nemotron3Config]]


@cache
def enumerated(*names: str) -> tuple[Drawn, dict[str, tuple[int, ...]], Every]:
    """Losses, `VALUES` of some names, and all candidates."""
    losses, values = Drawn(TINY, len(names)), {name: VALUES[name] for name in names}
    return losses, values, enumerate_all(TINY, values, losses)


def enumerate_all(config: Nemotron3Config, values: Mapping[str, Sequence[int]], losses: Drawn) -> Every:
    """Loss, costs and config of every candidate, each made from its sizes."""
    layers = [layer for layer, kind in enumerate(config.pattern) if kind == "E"]
    rows = []
    for layer in layers:
        own = config.at(layer)
        most = (own.moe_ffn_hidden_size or 0, own.moe_router_topk or 0)
        columns = [
            [v for v in values.get(name, (m,)) if v <= m] for name, m in zip(BY_LAYER, most, strict=True)
        ]
        rows.append(list(itertools.product(*columns)))
    whole = {name: given for name, given in values.items() if name not in BY_LAYER}
    found = []
    for sizes in itertools.product(*whole.values()):
        for chosen in itertools.product(*rows):
            new: dict[str, Any] = dict(zip(whole, sizes, strict=True))
            new |= {name: tuple(row[i] for row in chosen) for i, name in enumerate(BY_LAYER)}
            one = candidate_config(config, new)
            loss = losses.rest(one, range(config.num_layers))
            loss += sum(losses.experts(layer, *row) for layer, row in zip(layers, chosen, strict=True))
            found.append((loss, costs(one, SERVING), one))
    return found


def middle(found: Every, name: str, share: float) -> float:
    every = [cost[name] for _, cost, _ in found]
    return min(every) + share * (max(every) - min(every))


@pytest.mark.parametrize("names", [*((name,) for name in MEASURES), ("active", "memory")], ids="-".join)
def test_finds_the_best_of_all_candidates(names: tuple[str, ...]) -> None:
    losses, values, every = enumerated("moe_ffn_hidden_size", "moe_router_topk", "moe_latent_size")
    assert len(every) == 2 * (6 * 4 * 3 * 6)
    for share in (0.02, 0.4, 0.8):
        budget = {name: middle(every, name, share) for name in names}
        fitting = [one for one in every if all(one[1][name] <= budget[name] for name in names)]
        loss, cost, config = min(fitting, key=lambda one: one[0])
        best = search(TINY, values, budget, SERVING, losses).candidates[0]
        assert best.loss == pytest.approx(loss, rel=1e-12)
        assert best.config == config and best.costs == cost
        assert config.moe_layers is not None and config.mtp_pattern == TINY.mtp_pattern


def test_every_combination_has_its_best_and_its_best_alike() -> None:
    losses, values, every = enumerated("moe_ffn_hidden_size", "mamba_num_heads")
    budget = {"params": middle(every, "params", 0.5)}
    found = search(TINY, values, budget, SERVING, losses).candidates
    assert [one.loss for one in found] == sorted(one.loss for one in found)
    for heads in VALUES["mamba_num_heads"]:
        mine = [one for one in found if one.config.mamba_num_heads == heads]
        fitting = [o for o in every if o[2].mamba_num_heads == heads and o[1]["params"] <= budget["params"]]
        assert mine[0].loss == pytest.approx(min(loss for loss, _, _ in fitting))
        alike = [o for o in fitting if len({width for width, _ in o[2].expert_sizes}) == 1]
        assert mine[-1].config == min(alike)[2]


def test_depth_keeps_the_layers_that_lose_least() -> None:
    losses = Drawn(TINY, 3)
    found = search(TINY, {"num_layers": (3, 5)}, {"latency": 1.0}, SERVING, losses).candidates
    assert {len(one.layers or ()) for one in found} == {3, 5}
    for one in found:
        assert list(one.layers or ()) == losses.layers(one.config.num_layers)
        assert one.config.pattern == "".join(TINY.pattern[layer] for layer in one.layers or ())


@pytest.mark.parametrize("name", MEASURES)
def test_a_budget_that_none_meets_names_the_nearest(name: str) -> None:
    losses, values, every = enumerated("moe_ffn_hidden_size", "moe_router_topk", "moe_latent_size")
    least = min(cost[name] for _, cost, _ in every)
    with pytest.raises(NoCandidate, match=f"the nearest, .*, has {name}=.* instead of") as caught:
        search(TINY, values, {name: least * 0.999}, SERVING, losses)
    assert caught.value.nearest.costs[name] == least and amount(name, least) in str(caught.value)
    assert search(TINY, values, {name: least}, SERVING, losses).candidates[0].costs[name] == least


def test_without_scores_the_whole_model_loses_nothing() -> None:
    values = {name: (getattr(TINY, name),) for name in ("hidden_size", "mamba_num_heads", *BY_LAYER)}
    losses = UniformLosses(TINY)
    assert losses.rest(TINY, range(TINY.num_layers)) == 0
    assert all(losses.experts(layer, *TINY.expert_sizes[i]) == 0 for i, layer in enumerate((1, 2, 4, 6)))
    # Layers that have less than every value given are refused, not left as they are.
    with pytest.raises(ValueError, match="moe_ffn_hidden_size=96: layer 2 of mine can have at most 64"):
        search(TINY, values, {}, SERVING)


def test_the_released_puzzle_is_found_from_its_own_choices() -> None:
    """Losses that only its rows do not have: at the released counts the search returns the released model."""
    puzzle, super_ = get("puzzle"), get("super").but(mamba_state_dim=96)
    rows = dict(zip((i for i, k in enumerate(super_.pattern) if k == "E"), puzzle.expert_sizes, strict=True))

    class Released(Drawn):
        def experts(self, layer: int, width: int, topk: int) -> float:
            return float((width, topk) != rows[layer])

        def rest(self, config: Nemotron3Config, layers: Sequence[int]) -> float:
            return 0.0

    values = {
        "moe_ffn_hidden_size": (1280, 1536, 1792, 2048, 2688),
        "moe_router_topk": tuple(range(4, 23, 2)),
    }
    serving = ServingUse(GPUS["h100"])
    budget = {name: costs(puzzle, serving)[name] for name in ("params", "active")}
    best = search(super_, values, budget, serving, Released(super_, 0)).candidates[0]
    assert best.loss == 0 and best.config.moe_layers == puzzle.moe_layers
    assert best.costs["active"] == pytest.approx(9.3e9, rel=0.005)  # published: 9.3B


def nemotron3(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it writes is a model that other commands take."""
    file = tmp_path / "best.json"
    words = (
        "prune",
        "search",
        "super",
        "--tiny",
        "--vary",
        "moe_ffn_hidden_size=32,64",
        "moe_router_topk=1,2",
    )
    assert nemotron3(*words, "--budget", "params=2600k", "--output", file) == 0
    out = capsys.readouterr().out
    assert "as it is" in out and "nemotron3 prune … --sizes moe_ffn_hidden_size=" in out and str(file) in out
    found = model(str(file))
    assert found.moe_layers is not None and costs(found, SERVING)["params"] <= 2.6e6
    assert nemotron3("show", "--model", file) == 0 and nemotron3("precision", "--model", file) == 0
    assert nemotron3("plan", "--model", file, "--gpus", 8, "--gpu", "h100") == 0
    assert nemotron3("flags", "--model", file) == 0
    assert "stack_spec@ME" in capsys.readouterr().out
    monkeypatch.setattr(output, "INTERVAL", 0.0)
    assert nemotron3(*words, "--budget", "params=2600k", "--json") == 0
    printed = capsys.readouterr()
    assert re.search(r"^search: 20 %, .* s left$", printed.err, re.M)
    facts = json.loads(printed.out)
    assert facts["candidates"][0]["config"]["moe_layers"] == [list(row) for row in found.moe_layers]
    # Its own output is where the next search begins.
    assert (
        nemotron3("prune", "search", "--model", file, "--vary", "moe_router_topk=1", "--budget", "active=1G")
        == 2
    )
    assert "give active in k, M, B, T" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--budget", "params=1M"),
            "no candidate meets the budget: the nearest, moe_router_topk 1, has params=",
        ),
        (("--budget", "size=1M"), "--budget size=1M: give MEASURE=N of params, active, memory, latency"),
        (("--budget", "parms=1M"), "or latency=12ms; did you mean 'params'?"),
        (("--budget", "params=1B", "params=2B"), "params is given twice"),
        (("--budget", "params=9B", "--vary", "mtp=1"), "mtp cannot be pruned: choose from hidden_size"),
        (("--budget", "params=9B", "--vary", "hidden_size=0"), "--vary hidden_size=0: give NAME=N,N"),
        (("--budget", "params=9B", "--vary", "num_layers=4", "moe_router_topk=1"), "cuts the depth first"),
        (("--budget", "params=9B", "--output", "best.txt"), "give a file that ends with .json"),
        (("--budget", "params=9B", "--scores", "none.safetensors"), "none.safetensors"),
    ],
)
def test_bad_input(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    vary = () if "--vary" in words else ("--vary", "moe_router_topk=1")
    assert nemotron3("prune", "search", "super", "--tiny", *vary, *words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_amounts() -> None:
    assert parse_budget(["params=60B", "memory=80GiB", "latency=1.5ms", "active=9e9"]) == {
        **{"params": 60e9, "memory": 80 * 2**30, "latency": 0.0015, "active": 9e9},
    }
    for name, value in (
        ("params", 60.25e9),
        ("memory", 3.5 * 2**30),
        ("memory", 9 * 2**20),
        ("latency", 0.012),
    ):
        assert parse_budget([f"{name}={amount(name, value)}"]) == {name: pytest.approx(value, rel=1e-3)}
