"""Emulation over ranks.

What TransformerEngine reduces over ranks is equal here by construction: operands are quantized after the
gather. A weight, and a gradient split along its columns, are scaled by each rank's part, so a layout changes
a result exactly where the largest magnitudes of the parts differ.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.layers.linear import ColumnParallelLinear, DuplicatedLinear, RowParallelLinear
from megatron_nemotron3.precision import install
from megatron_nemotron3.precision.recipe import recipe
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.emulation import built, step
from tests.support.models import hybrid_config

from .test_linear import NOISE, QUANTIZED, Step, away, definition

EXACT = Emulation(stochastic=False)
TOKENS, BATCH, WIDTH, OUTER = 32, 2, 64, 96


def case(kind: str, twins: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and dy of the whole linear; twins: both halves of what is split have the same magnitudes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, BATCH, WIDTH, generator=generator)
    w = torch.randn(OUTER, WIDTH, generator=generator)
    dy = torch.randn(TOKENS, BATCH, OUTER, generator=generator)
    if kind == "row":
        x, w, dy = dy, w.t().contiguous(), x
    split = [(w, 0), (dy, 2)] if kind == "column" else [(w, 1), (x, 2)]
    for tensor, axis in split:
        first, second = tensor.chunk(2, axis)
        second.copy_(first.flip(axis) if twins else 3.7 * second)
    return x, w, dy


def on_ranks(kind: str, twins: bool, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's y, dx and dw."""
    rank = torch.distributed.get_rank()
    config = hybrid_config("M", sequence_parallel=sequence_parallel)
    x, w, dy = case(kind, twins)
    common: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
    module: Any
    if kind == "column":
        module = ColumnParallelLinear(WIDTH, OUTER, gather_output=False, **common)
        w, dy = w.chunk(2)[rank], dy.chunk(2, -1)[rank]
        x = x.chunk(2)[rank] if sequence_parallel else x
    else:
        module = RowParallelLinear(OUTER, WIDTH, input_is_parallel=True, skip_bias_add=True, **common)
        w, x = w.chunk(2, 1)[rank], x.chunk(2, -1)[rank]
        dy = dy.chunk(2)[rank] if sequence_parallel else dy
    module.weight.data.copy_(w)
    install.assign_products(module, "here", "nvfp4", EXACT, None)
    x = x.contiguous().requires_grad_()
    y, _ = module(x)
    dx, dw = torch.autograd.grad(y, [x, module.weight], dy.contiguous())
    return y.detach(), dx, dw


def whole(kind: str, sequence_parallel: bool, results: list[tuple[Tensor, Tensor, Tensor]]) -> Step:
    """The ranks' results put together."""
    (y, dx, dw), (y2, dx2, dw2) = results
    if kind == "column":
        input_side = torch.cat([dx, dx2]) if sequence_parallel else dx
        return Step(torch.cat([y, y2], -1), input_side, [torch.cat([dw, dw2])])
    output_side = torch.cat([y, y2]) if sequence_parallel else y
    return Step(output_side, torch.cat([dx, dx2], -1), [torch.cat([dw, dw2], 1)])


def by_definition(x: Tensor, w: Tensor, dy: Tensor) -> Step:
    how = recipe("nvfp4", EXACT)
    assert how is not None
    return definition(x.flatten(0, 1), w.contiguous(), dy.flatten(0, 1), how)


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[dict[tuple[Any, ...], Any], tuple[Tensor, Tensor]]]:
    """Of each rank: case -> result of `on_ranks`; the result of `gradients_of_equal_inputs`."""
    return run_distributed(all_cases, 2)


def all_cases() -> tuple[dict[tuple[Any, ...], Any], tuple[Tensor, Tensor]]:
    initialize(tp=2)
    cases = itertools.product(("column", "row"), (True, False), (True, False))
    return {case: on_ranks(*case) for case in cases}, gradients_of_equal_inputs()


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_tensor_parallel(kind: str, sequence_parallel: bool, two_ranks: Any) -> None:
    """Twin parts: as one rank. Else: as the parts one by one, added or joined, and not as one rank."""
    for twins in (True, False):
        results = [cases[kind, twins, sequence_parallel] for cases, _ in two_ranks]
        found = whole(kind, sequence_parallel, results)
        x, w, dy = case(kind, twins)
        one = by_definition(x, w, dy)
        if twins:
            wanted = one
        elif kind == "column":
            a, b = (by_definition(x, *part) for part in zip(w.chunk(2), dy.chunk(2, -1), strict=True))
            wanted = Step(torch.cat([a.y, b.y], -1), a.dx + b.dx, [torch.cat([a.dw[0], b.dw[0]])])
        else:
            a, b = (by_definition(p, q, dy) for p, q in zip(x.chunk(2, -1), w.chunk(2, 1), strict=True))
            wanted = Step(a.y + b.y, torch.cat([a.dx, b.dx], -1), [torch.cat([a.dw[0], b.dw[0]], 1)])
        for mine, theirs in ((found.y, wanted.y), (found.dx, wanted.dx), (found.dw[0], wanted.dw[0])):
            assert away(mine.reshape(theirs.shape), theirs) < NOISE[torch.float32]
        if not twins:
            assert away(found.y.reshape(one.y.shape), one.y) > QUANTIZED / 10


def gradients_of_equal_inputs() -> tuple[Tensor, Tensor]:
    """dw of a linear that every rank holds, and of one that is split; x and dy are the same on all ranks."""
    config = hybrid_config("M", sequence_parallel=False)
    common: dict[str, Any] = {"config": config, "init_method": config.init_method}
    whole_one: Any = DuplicatedLinear(WIDTH, OUTER, **common)
    split: Any = ColumnParallelLinear(WIDTH, 2 * OUTER, gather_output=False, bias=False, **common)
    x, _, dy = case("column", twins=True)
    gradients = []
    for module in (whole_one, split):
        install.assign_products(module, "here", "nvfp4", Emulation(), None)
        (dw,) = torch.autograd.grad(module(x)[0], module.weight, dy)
        gradients.append(dw)
    return gradients[0], gradients[1]


def test_replicas_round_alike(two_ranks: Any) -> None:
    """A replicated weight's gradient must not drift apart between TP ranks; the draws of parts differ."""
    (_, (held, split)), (_, (held2, split2)) = two_ranks
    assert torch.equal(held, held2)
    assert away(split, split2) > QUANTIZED


def expert_step(ep: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a MoE layer; on every rank the same tokens."""
    initialize(ep=ep)
    model = built(
        "nvfp4,sr=0,wgrad=0,every_layer=1",
        "E",
        quant_recipe=None,
        first_last_layers_bf16=False,
        mtp_use_repeated_layer=False,
        expert_model_parallel_size=ep,
    )
    rank, local = torch.distributed.get_rank(), 8 // ep

    def whole_name(name: str) -> str:
        head, _, number = name.rpartition("weight")
        return f"{head}weight{int(number) + rank * local}" if ".experts.linear_fc" in name else name

    for name, parameter in model.named_parameters():  # expert by expert, wherever it is
        generator = torch.Generator().manual_seed(sum(whole_name(name).encode()))
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    found = step(model)
    # An expert has the gradients of all ranks' tokens, which Megatron divides by their number.
    gradients = {
        whole_name(name): gradient / (ep if ".experts.linear_fc" in name else 1)
        for name, gradient in found.gradients.items()
    }
    return found.loss, gradients


def test_expert_parallel() -> None:
    """An expert's scale is of all its tokens, from wherever they came; twice the same ones change nothing.

    Without wgrad's quantization, whose blocks of 16 tokens depend on who comes first.
    """
    (loss, wanted), *_ = run_distributed(expert_step, 1, 1)
    parts = run_distributed(expert_step, 2, 2)
    for other, gradients in parts:
        assert away(other, loss) < 1e-5
        for name, gradient in gradients.items():
            assert away(gradient, wanted[name]) < 1e-3, name
    assert {name for _, gradients in parts for name in gradients} == wanted.keys()
