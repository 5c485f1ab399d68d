"""Emulated linears against the definition: operands quantized and dequantized explicitly, FP32 products."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3.layers.experts import ColumnParallelGroupedLinear
from megatron_nemotron3.layers.functional import rms_norm
from megatron_nemotron3.layers.linear import DuplicatedLinear, LayerNormColumnParallelLinear
from megatron_nemotron3.precision import install
from megatron_nemotron3.precision.quantizer import fake_quantize
from megatron_nemotron3.precision.recipe import MatmulRecipe, Spec, recipe
from megatron_nemotron3.precision.settings import Emulation
from tests.support.emulation import seed
from tests.support.models import hybrid_config

#: Of FP32 sums in another order, relative to the norm; of a BF16 result.
NOISE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
#: A quantized product is at least this far from the plain one.
QUANTIZED = 0.01
ROW, COLUMN = Spec(), Spec(axis=-2)
MX_ROW, MX_COLUMN = Spec("mxfp8"), Spec("mxfp8", axis=-2)
NVFP4 = MatmulRecipe(
    fprop=(Spec(), Spec(tile=True)),
    dgrad=(Spec(stochastic=True), Spec(tile=True)),
    wgrad=(Spec(axis=-2, hadamard=True, stochastic=True), Spec(axis=-2, hadamard=True)),
)
MXFP8 = MatmulRecipe((MX_ROW, MX_ROW), (MX_ROW, MX_COLUMN), (MX_COLUMN, MX_COLUMN))


pytestmark = pytest.mark.usefixtures("world")


def away(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_recipes() -> None:
    """The published one; switches change what they name, four-over-six the weights of NVFP4 alone."""
    assert recipe("nvfp4", Emulation()) == NVFP4
    assert NVFP4.shares_weight
    assert recipe("mxfp8", Emulation()) == MXFP8
    assert not MXFP8.shares_weight
    assert recipe("bf16", Emulation()) is None
    without = recipe("nvfp4", Emulation(hadamard=False, stochastic=False, tile=False))
    assert without == MatmulRecipe((ROW, ROW), (ROW, COLUMN), (COLUMN, COLUMN))
    only = recipe("mxfp8", Emulation(fprop=False, wgrad=False))
    assert only == MatmulRecipe(None, MXFP8.dgrad, None)
    closest = Emulation(four_over_six=True)
    weight = Spec(tile=True, four_over_six=True)
    assert recipe("nvfp4", closest) == MatmulRecipe((ROW, weight), (NVFP4.dgrad[0], weight), NVFP4.wgrad)
    assert recipe("mxfp8", closest) == MXFP8
    with pytest.raises(ValueError, match="'fp8-tensorwise' is not emulated: use nvfp4, mxfp8 or bf16"):
        recipe("fp8-tensorwise", Emulation())


# -- one linear ----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One forward and backward."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]


def emulate(module: Any, fmt: str, chosen: Emulation) -> Any:
    install.assign_products(module, "here", fmt, chosen, None)
    return module


def run(module: Any, x: Tensor, dy: Tensor, *arguments: Any, start: int | None = 7) -> Step:
    """Forward, and backward with draws from `start` on; None: go on drawing."""
    x = x.clone().requires_grad_()
    y, _ = module(x, *arguments)
    if start is not None:
        seed(start)
    weights = [p for n, p in module.named_parameters() if n.startswith("weight")]
    dx, *dw = torch.autograd.grad(y, [x, *weights], dy)
    return Step(y.detach(), dx, dw)


def q(x: Tensor, how: Spec) -> Tensor:
    return fake_quantize(x, how, dtype=torch.float32)


def filled(x: Tensor, block: int) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % block, x.shape[1])])


def definition(x: Tensor, w: Tensor, dy: Tensor, how: MatmulRecipe) -> Step:
    """The three products [t, in], [out, in], [t, out] with explicit operands."""
    y = q(x, how.fprop[0]) @ q(w, how.fprop[1]).t() if how.fprop else x @ w.t()
    seed(7)
    dx = q(dy, how.dgrad[0]) @ q(w, how.dgrad[1]) if how.dgrad else dy @ w
    if how.wgrad:
        block = how.wgrad[0].block
        dw = q(filled(dy, block), how.wgrad[0]).t() @ q(filled(x, block), how.wgrad[1])
    else:
        dw = dy.t() @ x
    return Step(y, dx, [dw])


def duplicated(inner: int, outer: int, dtype: torch.dtype) -> DuplicatedLinear:
    config = hybrid_config("M", params_dtype=dtype)
    return DuplicatedLinear(inner, outer, config=config, init_method=config.init_method).train()


#: Formats and switches of the three products.
CASES: list[tuple[str, dict[str, bool]]] = [
    ("nvfp4", {}),
    ("mxfp8", {}),
    *(("nvfp4", {name: False}) for name in ("hadamard", "stochastic", "tile", "fprop", "dgrad", "wgrad")),
    ("mxfp8", {"fprop": False, "wgrad": False}),
]


@pytest.mark.parametrize(
    ("fmt", "switches", "tokens", "dtype"),
    [
        *((fmt, switches, 23, torch.float32) for fmt, switches in CASES),
        *((fmt, {}, 48, torch.bfloat16) for fmt in ("nvfp4", "mxfp8")),
    ],
)
def test_products(fmt: str, switches: dict[str, bool], tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, chosen = duplicated(64, 96, dtype), Emulation(**switches)
    # A sequence of odd length, twice; heavy tails, so that zeros and saturation occur.
    x, dy = (torch.randn(tokens, 2, n).pow(3).to(dtype) for n in (64, 96))
    flat = (x.flatten(0, 1), module.weight.detach(), dy.flatten(0, 1))
    how = recipe(fmt, chosen)
    assert how is not None
    plain, wanted = run(module, x, dy), definition(*flat, how)
    found = run(emulate(module, fmt, chosen), x, dy)
    assert found.y.shape == (tokens, 2, 96) and found.y.dtype == dtype
    for name in ("y", "dx", "dw"):
        a, b, c = (getattr(s, name) for s in (found, wanted, plain))
        a, b, c = (t[0] if name == "dw" else t for t in (a, b, c))
        assert away(a.reshape(b.shape), b) < NOISE[dtype], name
        product = {"y": how.fprop, "dx": how.dgrad, "dw": how.wgrad}[name]
        if product:
            assert away(a, c) > QUANTIZED * (0.5 if fmt == "mxfp8" else 1), name
        else:
            assert torch.equal(a, c), name


@pytest.mark.parametrize(("inner", "outer"), [(64, 88), (40, 96)])
def test_mxfp8_fills_the_last_block_with_zeros(inner: int, outer: int) -> None:
    """The definition on operands that zeros make whole; so is Mamba's in_proj of every tiny model."""
    torch.manual_seed(0)
    module = duplicated(inner, outer, torch.float32)
    x, dy = (torch.randn(23, 2, n).pow(3) for n in (inner, outer))
    weight = module.weight.detach()
    wide = torch.nn.functional.pad(weight, (0, -inner % 32, 0, -outer % 32))
    wanted = definition(
        filled(x.flatten(0, 1).t(), 32).t(), wide, filled(dy.flatten(0, 1).t(), 32).t(), MXFP8
    )
    found = run(emulate(module, "mxfp8", Emulation(format="mxfp8")), x, dy)
    assert away(found.y.flatten(0, 1), wanted.y[:, :outer]) < NOISE[torch.float32]
    assert away(found.dx.flatten(0, 1), wanted.dx[:, :inner]) < NOISE[torch.float32]
    assert away(found.dw[0], wanted.dw[0][:outer, :inner]) < NOISE[torch.float32]
    assert not any(wanted.y[:, outer:].flatten()) and not any(wanted.dw[0][outer:].flatten())


def test_norm_in_front_is_not_quantized() -> None:
    torch.manual_seed(0)
    config = hybrid_config("M")
    module: Any = LayerNormColumnParallelLinear(
        64, 96, config=config, init_method=config.init_method, bias=False, gather_output=False
    ).train()
    x, dy = torch.randn(16, 2, 64, requires_grad=True), torch.randn(16, 2, 96)
    gain = module.layer_norm_weight
    normed = rms_norm(x, gain, module.eps)
    wanted = definition(normed.detach().flatten(0, 1), module.weight.detach(), dy.flatten(0, 1), NVFP4)
    expected = torch.autograd.grad(normed, [x, gain], wanted.dx.view(16, 2, 64))
    y, _ = emulate(module, "nvfp4", Emulation())(x)
    seed(7)
    dx, dgain, dw = torch.autograd.grad(y, [x, gain, module.weight], dy)
    assert away(y.flatten(0, 1), wanted.y) < NOISE[torch.float32]
    assert away(dw, wanted.dw[0]) < NOISE[torch.float32]
    assert away(dx, expected[0]) < NOISE[torch.float32]
    assert away(dgain, expected[1]) < NOISE[torch.float32]


COUNTS = [17, 0, 32, 3]


def grouped(inner: int, outer: int, dtype: torch.dtype) -> ColumnParallelGroupedLinear:
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = hybrid_config("ME", params_dtype=dtype)
    return ColumnParallelGroupedLinear(
        len(COUNTS),
        inner,
        outer,
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).train()


EXPERTS = [(fmt, switches) for fmt, switches in CASES if not {"stochastic", "hadamard"} & switches.keys()]


@pytest.mark.parametrize(
    ("fmt", "switches", "dtype"),
    [*((*case, torch.float32) for case in EXPERTS), ("nvfp4", {}, torch.bfloat16)],
)
def test_experts(fmt: str, switches: dict[str, bool], dtype: torch.dtype) -> None:
    """Each expert is a linear of its own: its largest magnitudes, its rows filled up with zeros."""
    torch.manual_seed(0)
    module, chosen = grouped(64, 96, dtype), Emulation(stochastic=False, **switches)
    scale = torch.tensor([1.0, 1.0, 100.0, 1e-3]).repeat_interleave(torch.tensor(COUNTS)).unsqueeze(1)
    x, dy = ((torch.randn(sum(COUNTS), n) * scale).to(dtype) for n in (64, 96))
    how = recipe(fmt, chosen)
    assert how is not None
    found = run(emulate(module, fmt, chosen), x, dy, COUNTS)
    for e, (a, b) in enumerate(zip(x.split(COUNTS), dy.split(COUNTS), strict=True)):
        rows = slice(sum(COUNTS[:e]), sum(COUNTS[: e + 1]))
        if not COUNTS[e]:
            assert not found.dw[e].any()
            continue
        wanted = definition(a, module.weights()[e].detach(), b, how)
        assert away(found.y[rows], wanted.y) < NOISE[dtype]
        assert away(found.dx[rows], wanted.dx) < NOISE[dtype]
        assert away(found.dw[e], wanted.dw[0]) < NOISE[dtype]


@pytest.mark.parametrize(("fmt", "switches"), [*EXPERTS, ("nvfp4", {"hadamard": False})])
def test_experts_with_counts_of_the_device(
    fmt: str, switches: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with counts of the host. Here torch computes the products of the kernels (`test_triton_grouped`)."""
    triton_grouped = pytest.importorskip("megatron_nemotron3.precision.triton_grouped")
    called: list[str] = []

    def rows_product(x: Any, weights: Any, starts: Any, ends: Any, scale: Any, dtype: Any) -> Any:
        called.append("rows")
        y = torch.full((len(x), weights.shape[1]), torch.nan)
        for a, b, w in zip(starts, ends, weights, strict=True):
            y[a:b] = x[a:b] @ w.T
        return (y if scale is None else y * scale[:, None]).to(dtype)

    def weight_gradients(dy: Any, x: Any, starts: Any, ends: Any, scale: Any, dtype: Any) -> Any:
        called.append("weights")
        dw = torch.stack([dy[a:b].T @ x[a:b] for a, b in zip(starts, ends, strict=True)])
        return (dw if scale is None else dw * scale[:, None, None]).to(dtype)

    monkeypatch.setattr(triton_grouped, "rows_product", rows_product)
    monkeypatch.setattr(triton_grouped, "weight_gradients", weight_gradients)
    torch.manual_seed(0)
    module = emulate(grouped(64, 96, torch.float32), fmt, Emulation(stochastic=False, **switches))
    for counts in (COUNTS, [0, 31, 1, 0], [52, 0, 0, 0]):
        size = torch.tensor([1.0, 1.0, 100.0, 1e-3]).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
        x, dy = (torch.randn(sum(counts), n) * size for n in (64, 96))
        called.clear()
        wanted, found = (run(module, x, dy, given) for given in (counts, torch.tensor(counts)))
        assert called == ["rows", "rows", "weights"]
        for name in ("y", "dx"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=0)
        for a, b in zip(found.dw, wanted.dw, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def test_draws_come_from_megatrons_streams() -> None:
    """Experts have one of their own. It goes on from step to step; torch's generator stays where it was."""
    torch.manual_seed(0)
    module = emulate(grouped(64, 96, torch.float32), "nvfp4", Emulation())
    x, dy = (torch.randn(sum(COUNTS), n) for n in (64, 96))
    tracker = get_cuda_rng_tracker()
    first = run(module, x, dy, COUNTS)
    at, others = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"].clone()
    next_ = run(module, x, dy, COUNTS, start=None)
    assert torch.equal(torch.get_rng_state(), at)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], others)
    same = run(module, x, dy, COUNTS)
    assert torch.equal(first.dx, same.dx) and all(map(torch.equal, first.dw, same.dw))
    assert away(next_.dx, first.dx) > QUANTIZED and torch.equal(next_.y, first.y)
    exact = run(emulate(module, "nvfp4", Emulation(dgrad=False, wgrad=False)), x, dy, COUNTS)
    assert away(first.dx, exact.dx) < 0.25 and away(first.dw[2], exact.dw[2]) < 0.25


def test_no_tokens_at_all() -> None:
    module = emulate(grouped(64, 96, torch.float32), "nvfp4", Emulation())
    found = run(module, torch.zeros(0, 64), torch.zeros(0, 96), [0] * len(COUNTS))
    assert found.y.shape == (0, 96) and found.dx.shape == (0, 64)
    assert not any(gradient.any() for gradient in found.dw)


# -- what a module is told -----------------------------------------------------------------------------------


def told(**training: Any) -> Any:
    """As Megatron's `QuantizationConfig`."""
    content = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training}
    return SimpleNamespace(config=content, config_key="key")


def test_finish_init_follows_the_file() -> None:
    module = duplicated(64, 96, torch.float32)
    cases = [
        ("nvfp4", None, "nvfp4"),
        ("bf16", None, None),
        ("nvfp4", told(), None),
        ("nvfp4", told(fp8_quantization_recipe="mxfp8"), "mxfp8"),
        ("bf16", told(fp8_quantization_recipe="mxfp8"), None),
        ("bf16", told(fp4_quantization_recipe="nvfp4", override_nonquantized_autocast=True), "nvfp4"),
        ("nvfp4", told(override_quantized_autocast=False), "nvfp4"),
    ]
    for ambient, config, wanted in cases:
        install.assign_products(module, "here", ambient, Emulation(), config)
        assert (module.products and module.products.formats[0]) == wanted, (ambient, config)
    install.assign_products(module, "here", "nvfp4", Emulation(every_layer=True), told())
    assert module.products.formats == ("nvfp4", "nvfp4")


def test_evaluation_has_a_recipe_of_its_own() -> None:
    module, x = duplicated(64, 96, torch.float32), torch.randn(4, 2, 64)
    plain = module(x)[0]
    config = told(fp4_quantization_recipe="nvfp4")
    config.config["evaluation_recipe"] = {}
    install.assign_products(module, "here", "nvfp4", Emulation(), config)
    assert away(module(x)[0], plain) > QUANTIZED
    assert torch.equal(module.eval()(x)[0], plain)


def test_a_misspelt_config_is_refused() -> None:
    module = duplicated(64, 96, torch.float32)
    with pytest.raises(ValueError, match="fp4_quantisation_recipe"):
        install.assign_products(module, "here", "nvfp4", Emulation(), told(fp4_quantisation_recipe="nvfp4"))
