"""Changes and factors of what a layer computes on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.causes import EMBEDDING, LAYERS, MODEL, Cause, Context, compose
from megatron_nemotron3.proof.bisect.chains import chains
from megatron_nemotron3.proof.bisect.changes import every_change, maps, scaled_matrices
from megatron_nemotron3.proof.bisect.diagnose import Investigation, cause_table
from megatron_nemotron3.proof.bisect.evidence import Evidence
from megatron_nemotron3.proof.bisect.fits import block_map, factors, mapped, numbers
from megatron_nemotron3.proof.bisect.listed import routers, sights
from megatron_nemotron3.proof.bisect.quantities import MATRICES, QUANTITIES, Quantity
from megatron_nemotron3.proof.bisect.structure import at_borders
from tests.proof.bisect import faults
from tests.proof.bisect.systems import MODEL as SMALL
from tests.proof.bisect.systems import Engine, checkpoint, tokens

#: A layer of each kind.
PLACES = {"M": 2, "*": 3, "E": 4, LAYERS: 5, EMBEDDING: 0}


def _output(layer: int, cause: Cause | None = None) -> Tensor:
    """What a layer, or what follows the last (-1), makes of the embeddings, with a cause."""
    model = faults.investigation().model
    ids, context = torch.arange(1, 41)[None], Context(SMALL, 20, layer, ids=torch.arange(1, 41))
    x = model.embed(ids, cause.embed(context) if cause is not None and cause.embed else None)
    if layer < 0:
        return model.logprobs(x, ids, cause.last(context) if cause is not None and cause.last else None)
    return model.layer(layer, x, cause.layer(context) if cause is not None and cause.layer else None).stream


@pytest.mark.parametrize("one", (*QUANTITIES, *MATRICES), ids=lambda one: one.name)
def test_a_quantity_is_where_it_says(one: Quantity) -> None:
    """Its own values change nothing, others do; blocks of channels divide it."""
    place = -1 if one.kind == MODEL else PLACES[one.kind]
    plain = _output(place)
    assert torch.allclose(_output(place, one.cause("{}", lambda t: t.clone())), plain, atol=1e-5)
    other: Any = (lambda t: t.flip(-1)) if one.numbers else (lambda t: -2 * t)
    assert not torch.allclose(_output(place, one.cause("other {}", other)), plain)
    for _, count in one.divisions(SMALL):
        halves = one.cause("{}", lambda t, n=count: t.unflatten(-1, (n, -1)).flatten(-2))
        assert torch.allclose(_output(place, halves), plain, atol=1e-5)


_CHANGES = (
    *(one for one in cause_table(SMALL) if one.layer is not None or one.last is not None),
    *every_change(SMALL, token=7),
    *at_borders(SMALL, 7),
    *sights(7),
    *routers(2),
    *scaled_matrices(),
)


@pytest.mark.parametrize(
    ("first", "of"), [(0, 400), *(pytest.param(n, 40, marks=pytest.mark.full) for n in range(40))]
)
def test_every_change_can_be_computed(first: int, of: int) -> None:
    """On every kind of layer; what rounds or moves nothing here may leave it as it is."""
    for cause in _CHANGES[first::of]:
        place = -1 if cause.kind == MODEL else PLACES[cause.kind]
        assert _output(place, cause).shape == _output(place).shape, cause.name


TOY = Quantity("the toy", LAYERS, lambda context, change: {"toy": change})


def _toy(system: Callable[[Tensor], Tensor]) -> Callable[[Cause], Sequence[Tensor] | None]:
    quantity = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))

    def compute(cause: Cause) -> Sequence[Tensor]:
        assert cause.layer is not None
        steps = cause.layer(Context(SMALL, 0, 0))
        assert steps is not None
        return [system(steps["toy"](quantity))]

    return compute


def _fit(system: Callable[[Tensor], Tensor], by: Tensor, count: int, noise: float = 0.0) -> list[str]:
    compute = _toy(system)
    plain = TOY.cause("{}", lambda t: (t.unflatten(-1, (len(by), -1)) * by[:, None]).flatten(-2))
    (rows,) = compute(plain) or ()
    rows = rows + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
    return [cause.name for cause in factors(TOY, "head", count, compute, [rows])]


@pytest.mark.parametrize("system", [lambda t: 3 * t, lambda t: torch.nn.functional.silu(t) + t])
def test_factors_are_found(system: Any) -> None:
    whole, one = torch.tensor([0.37]), torch.tensor([1.0, 0.5, 1, 1])
    assert _fit(system, whole, 1) == ["0.37 times the toy"]
    assert _fit(system, torch.tensor([0.0]), 1) == ["no toy"]
    assert _fit(system, one, 4) == ["0.5 times head 1 of the toy"]
    assert _fit(system, torch.tensor([2.0, 1, 1, 0]), 4) == ["2 times head 0 and 0 times head 3 of the toy"]
    # Rounding moves a factor, but it is still 1 for the other heads.
    assert _fit(system, one, 4, noise=0.05)[0].endswith("times head 1 of the toy")


def test_what_is_no_factor_gives_none() -> None:
    compute = _toy(lambda t: 3 * t)
    other = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
    assert not list(factors(TOY, "head", 1, compute, [other + 100]))
    assert not list(factors(TOY, "head", 1, compute, compute(TOY.cause("{}", lambda t: t)) or ()))
    assert not list(factors(TOY, "head", 1, lambda cause: None, [other]))


@pytest.mark.full
@pytest.mark.parametrize("hidden", [True, False])
def test_a_scaled_norm_is_named(world: None, hidden: bool) -> None:
    """No cause of the list is a factor of 0.9."""

    def scaled() -> Any:
        engine = Engine(checkpoint())
        engine.layers[3].norm.weight.data.mul_(0.9)
        return faults.recording(tuple(engine.score(*one) for one in tokens()), "hf", torch.float32, hidden)

    side = Investigation(faults.investigation().model).side("engine", scaled())
    assert side.layer == 3 and not side.rest
    assert side.cause == "0.9 times the gain of the norm before the layer"


@pytest.mark.full
def test_what_is_known_without_a_cause(world: None) -> None:
    """Noise in eight channels of the last tokens of one layer."""

    def noisy(module: Any, inputs: Any, output: Any) -> Any:
        output = output.clone()
        draws = torch.Generator().manual_seed(0)
        output[:, 150:, 8:16] += torch.randn(output[:, 150:, 8:16].shape, generator=draws)
        return output

    engine = Engine(checkpoint())
    engine.layers[3].mixer.o_proj.register_forward_hook(noisy)
    scored = tuple(engine.score(*one) for one in tokens())
    side = Investigation(faults.investigation().model).side(
        "engine", faults.recording(scored, "hf", torch.float32, True)
    )
    assert side.cause is None and side.layer == 3
    assert side.known[1:3] == [
        "all of them follow the prompt",
        "of 64 channels, only 8 between 8 and 15",
    ]


def _left(
    compute: Callable[[Cause], Sequence[Tensor] | None], found: Sequence[Tensor]
) -> Callable[[Cause], float]:
    (plain,) = compute(TOY.cause("{}", lambda t: t)) or ()

    def left(cause: Cause) -> float:
        (row,) = compute(cause) or ()
        return float((row - found[0]).norm() / (plain - found[0]).norm())

    return left


def test_blocks_in_place_of_others_are_found() -> None:
    compute = _toy(lambda t: torch.nn.functional.silu(t) + t)
    found = compute(mapped(TOY, (0, 0, 3, 3), "{}")) or ()
    (cause,) = block_map(partial(mapped, TOY), "head", 4, _left(compute, found))
    assert cause.name == "head 0 in place of 1, 3 in place of 2 of the toy"
    other = [torch.randn(40, 8, generator=torch.Generator().manual_seed(3)) + 100]
    assert not list(block_map(partial(mapped, TOY), "head", 1, _left(compute, other)))


def test_numbers_are_found() -> None:
    compute = _toy(lambda t: 3 * t)
    for name, change in {
        "the toy limited to 0.7": lambda t: t.clamp(max=0.7),
        "the toy over 1.1 where positive, times it where negative": lambda t: (
            t * torch.where(t > 0, 1 / 1.1, 1.1)
        ),
    }.items():
        found = compute(TOY.cause("{}", lambda t, f=change: f(t))) or ()
        assert name in [cause.name for cause in numbers(TOY, _left(compute, found))]


def test_numbers_of_heads_are_dealt_out() -> None:
    """Shards, blocks and parts in other places; where they do not fit, nothing moves."""
    heads = next(one for one in QUANTITIES if one.name == "B and C of each head")
    found, t = maps(heads, SMALL), torch.arange(16).float()[None]
    assert found["{} dealt out by head to 4 ranks in turn"](t)[0, ::2].tolist() == [0, 4, 8, 12, 2, 6, 10, 14]
    assert found["the first of 4 shards of {} in place of each"](t)[0, ::4].tolist() == [0, 0, 0, 0]
    whole = next(one for one in QUANTITIES if one.name == "the convolution's channels")
    parts = maps(whole, SMALL)
    size = sum(whole.parts(SMALL).values())
    joined = parts["the shards of 2 ranks of {} joined without sorting x, B, C"](torch.arange(size))
    apart = parts["the shards of 2 ranks of {} cut apart without sorting x, B, C"]
    assert apart(joined).tolist() == list(range(size)) != joined.tolist()


def test_links_of_chains_are_missing_twice_or_others() -> None:
    found = {cause.name: cause for cause in chains()}
    plain = _output(PLACES["M"])
    assert {"no bias in the time steps", "no SiLU in the convolution, B only"} <= found.keys()
    for name in ("ReLU instead of SiLU in the convolution", "one group in the norm after the scan"):
        assert not torch.allclose(_output(PLACES["M"], found[name]), plain)
    assert found["gain twice in the final norm"].last and not found["gain twice in the final norm"].layer


def test_two_changes_of_the_same_step_are_both_made() -> None:
    bound = MethodType(lambda model, t: t, object())
    steps = [
        {"x": lambda plain, t, f=f: f(plain(t))}
        for f in (lambda t: 2 * t, lambda t: t + 1)  # type: ignore[misc]
    ]
    assert compose(*steps)["x"](bound, 3) == 7


def test_what_tokens_are_left_wrong_is_seen() -> None:
    """A change that misses one of fifty tokens is not one of the quantity."""
    cause, found = TOY.cause("{}", lambda t: t), torch.ones(100, 4)
    draws = [[1e-6 * torch.ones(100, 4)]]
    evidence = Evidence([(0, 0)], [found], [torch.zeros(100, 4)], draws)
    assert evidence.everywhere(cause, [found])
    found = found.clone()
    found[[3, 60]] = 0
    assert not evidence.everywhere(cause, [found])
