"""Changes and factors of what a layer computes on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.causes import LAYERS, MODEL, Cause, Context
from megatron_nemotron3.proof.bisect.changes import listed, neighbours, residuals
from megatron_nemotron3.proof.bisect.diagnose import Investigation
from megatron_nemotron3.proof.bisect.factors import factors
from megatron_nemotron3.proof.bisect.quantities import MATRICES, QUANTITIES, Quantity
from tests.proof.bisect import faults
from tests.proof.bisect.systems import MODEL as SMALL
from tests.proof.bisect.systems import Engine, checkpoint, tokens

#: A layer of each kind.
PLACES = {"M": 2, "*": 3, "E": 4, LAYERS: 5}


def _output(layer: int, cause: Cause | None = None) -> Tensor:
    """What a layer, or what follows the last (-1), makes of the embeddings, with a cause."""
    model = faults.investigation().model
    ids, context = torch.arange(1, 41)[None], Context(SMALL, 20, layer)
    x = model.embed(ids)
    if layer < 0:
        return model.logprobs(x, ids, cause.last(context) if cause is not None and cause.last else None)
    return model.layer(layer, x, cause.layer(context) if cause is not None and cause.layer else None).stream


@pytest.mark.parametrize("one", (*QUANTITIES, *MATRICES), ids=lambda one: one.name)
def test_a_quantity_is_where_it_says(one: Quantity) -> None:
    """Its own values change nothing, others do; blocks of channels divide it."""
    place = -1 if one.kind == MODEL else PLACES[one.kind]
    plain = _output(place)
    assert torch.equal(_output(place, one.cause("{}", lambda t, context: t.clone())), plain)
    assert not torch.allclose(_output(place, one.cause("twice {}", lambda t, context: 2 * t)), plain)
    for _, count in one.divisions(SMALL):
        halves = one.cause("{}", lambda t, c, n=count: t.unflatten(-1, (n, -1)).flatten(-2))
        assert torch.equal(_output(place, halves), plain)


_CHANGES = (*listed(SMALL, token=7), *residuals(), *neighbours())


@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 40))])
def test_every_change_can_be_computed(share: int) -> None:
    """On every kind of layer; what rounds or moves nothing here may leave it as it is."""
    for cause in _CHANGES[share::40]:
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
    plain = TOY.cause("{}", lambda t, context: (t.unflatten(-1, (len(by), -1)) * by[:, None]).flatten(-2))
    (rows,) = compute(plain) or ()
    rows = rows + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
    return [cause.name for cause in factors(TOY, "head", count, compute, [rows])]


@pytest.mark.parametrize("system", [lambda t: 3 * t, lambda t: torch.nn.functional.silu(t) + t])
def test_factors_are_found(system: Any) -> None:
    whole, one = torch.tensor([0.37]), torch.tensor([1.0, 0.5, 1, 1])
    assert _fit(system, whole, 1) == ["0.37 times the toy"]
    assert _fit(system, torch.tensor([0.0]), 1) == ["no the toy"]
    assert _fit(system, one, 4) == ["0.5 times head 1 of the toy"]
    assert _fit(system, torch.tensor([2.0, 1, 1, 0]), 4) == ["2 times head 0 and 0 times head 3 of the toy"]
    # Rounding moves a factor, but it is still 1 for the other heads.
    assert _fit(system, one, 4, noise=0.05)[0].endswith("times head 1 of the toy")


def test_what_is_no_factor_gives_none() -> None:
    compute = _toy(lambda t: 3 * t)
    other = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
    assert not list(factors(TOY, "head", 1, compute, [other + 100]))
    assert not list(factors(TOY, "head", 1, compute, compute(TOY.cause("{}", lambda t, c: t)) or ()))
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
