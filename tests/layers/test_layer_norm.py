"""LayerNorm, alone and in front of a linear, is torch.nn.LayerNorm; parallel layouts compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.layers.linear import LayerNormColumnParallelLinear
from megatron_nemotron3.layers.norm import LayerNorm, NormBuilder, RMSNorm
from megatron_nemotron3.models import get
from tests.parallel.case import Case
from tests.parallel.compare import check
from tests.parallel.layouts import small
from tests.support.model_mapping import transformer_config

pytestmark = pytest.mark.usefixtures("world")
MODEL = get("super-tiny").but(pattern="ME*", vocab_size=256)
D, OUT = 24, 40


def config(**changes: Any) -> Any:
    return transformer_config(MODEL, **{"normalization": "LayerNorm"} | changes)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def torchs(gain: Tensor, bias: Tensor, eps: float) -> torch.nn.LayerNorm:
    """torch's module in FP64."""
    norm = torch.nn.LayerNorm(D, eps=eps, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(gain)
        norm.bias.copy_(bias)
    return norm


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, zero_centered: bool) -> None:
    norm = NormBuilder(config(layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype), D, eps=1e-3)
    assert type(norm) is LayerNorm and norm.weight.dtype == norm.bias.dtype == dtype
    start = 0.0 if zero_centered else 1.0
    assert torch.equal(norm.weight, torch.full((D,), start, dtype=dtype)) and not norm.bias.any()
    with torch.no_grad():
        norm.weight += random(D, seed=1).to(dtype)
        norm.bias += random(D, seed=2).to(dtype)
    # A mean far from zero: RMSNorm would give something else.
    x = (3 + random(5, 2, D, seed=3)).to(dtype).requires_grad_()
    cotangent = random(5, 2, D, seed=4).to(dtype)
    theirs = torchs(norm.weight + zero_centered, norm.bias, 1e-3)
    wide = x.detach().double().requires_grad_()
    output, expected = norm(x), theirs(wide)
    assert output.dtype == dtype
    found = torch.autograd.grad(output, [x, norm.weight, norm.bias], cotangent)
    wanted = torch.autograd.grad(expected, [wide, theirs.weight, theirs.bias], cotangent.double())
    # Each result is rounded once to the dtype; sums over 10 tokens and the statistics are FP32.
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 2e-6
    for a, b in zip((output, *found), (expected, *wanted), strict=True):
        assert a.dtype == dtype and (a.double() - b).abs().max() <= tolerance * (b.abs().max() + 1)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_fused_linear(zero_centered: bool) -> None:
    options = config(layernorm_zero_centered_gamma=zero_centered, layernorm_epsilon=1e-3)
    layer = LayerNormColumnParallelLinear(D, OUT, config=options, init_method=options.init_method, bias=False)
    # TransformerEngine's names and order.
    assert list(dict(layer.named_parameters())) == ["layer_norm_weight", "layer_norm_bias", "weight"]
    with torch.no_grad():
        layer.layer_norm_weight += random(D, seed=1)
        layer.layer_norm_bias += random(D, seed=2)
    x = (3 + random(5, 2, D, seed=3)).requires_grad_()
    theirs = torchs(layer.layer_norm_weight + zero_centered, layer.layer_norm_bias, 1e-3)
    wide = x.detach().double().requires_grad_()
    output, none = layer(x)
    expected = theirs(wide) @ layer.weight.detach().double().T
    assert none is None
    cotangent = random(5, 2, OUT, seed=4)
    found = torch.autograd.grad(output, [x, layer.layer_norm_weight, layer.layer_norm_bias], cotangent)
    wanted = torch.autograd.grad(expected, [wide, theirs.weight, theirs.bias], cotangent.double())
    for a, b in zip((output, *found), (expected, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= 2e-5 * (b.abs().max() + 1)


def test_rms_norm_has_no_bias() -> None:
    rms = config(normalization="RMSNorm")
    assert type(NormBuilder(rms, D)) is RMSNorm
    layer = LayerNormColumnParallelLinear(D, OUT, config=rms, init_method=rms.init_method, bias=False)
    assert list(dict(layer.named_parameters())) == ["layer_norm_weight", "weight"]
    assert set(layer.state_dict()) == {"layer_norm_weight", "weight", "_extra_state"}


def test_marks_and_checkpoint() -> None:
    """Megatron sums gradients over TP ranks where a parameter has the mark, and stores one copy."""
    options = config(sequence_parallel=True, tensor_model_parallel_size=2)
    norm = NormBuilder(options, D)
    assert norm.weight.sequence_parallel and norm.bias.sequence_parallel
    assert not NormBuilder(config(), D).bias.sequence_parallel
    plain = config()
    layer = LayerNormColumnParallelLinear(D, OUT, config=plain, init_method=plain.init_method, bias=False)
    stored = layer.sharded_state_dict(prefix="in_proj.", metadata={"dp_cp_group": None})
    bias = stored["in_proj.layer_norm_bias"]
    assert (bias.key, bias.global_shape, bias.axis_fragmentations) == ("in_proj.layer_norm_bias", (D,), (1,))
    assert stored["in_proj.weight"].global_shape == (OUT, D)


@pytest.mark.full  # marks of the parameters: above
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2, pp=2)], ids=str)
def test_layouts_equal_one_process(layout: ParallelLayout) -> None:
    """Losses, gradients and three steps of a whole model with MTP, biases of the norms included."""
    words = ("--normalization", "LayerNorm")
    one = Case(config=small("super", "MEM*EME*"), extra=words, against_rules=True)
    check(one, one.at(layout))
