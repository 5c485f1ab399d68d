"""Dense FP32 products by oneDNN: which CPU and which product, values and gradients, and the way back.

The CPU is replaced by one that prefers oneDNN, so all of this runs on any machine whose torch has oneDNN.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_nemotron3 import cpu
from megatron_nemotron3.cpu import products
from megatron_nemotron3.specs import stack_spec
from tests.support.model_mapping import randomize
from tests.support.models import VOCABULARY, build_hybrid
from tests.support.world import world_of_one

AMD, INTEL = "AuthenticAMD", "GenuineIntel"
needs_onednn = pytest.mark.skipif(not products.is_available(), reason="this torch has no oneDNN for FP32")


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_vendor", lambda: AMD)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes [m, k, n] that went to oneDNN."""
    found: list[tuple[int, ...]] = []
    products.is_available()  # tries a product, once a process
    own = products._by_onednn

    def counted(a: Tensor, b: Tensor) -> Tensor:
        found.append((*a.shape, b.shape[1]))
        return own(a, b)

    monkeypatch.setattr(products, "_by_onednn", counted)
    return found


@pytest.fixture
def active(on_amd: None, calls: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    with cpu.cpu_mode():
        yield calls


def _values_and_gradients(
    linear: Callable[..., Tensor], x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = linear(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return y.detach(), dx, dw


def _distance(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


def test_which_cpu() -> None:
    choices = [(AMD, "AVX512"), (AMD, "AVX2"), (INTEL, "AVX512"), ("", "AVX512"), ("", "DEFAULT"), (AMD, "")]
    assert [products.prefers_onednn(*choice) for choice in choices] == [True, *[False] * 5]


def test_the_vendor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nvendor_id\t: AuthenticAMD\n"
    monkeypatch.setattr(products.Path, "read_text", lambda self: text)
    assert products.cpu_vendor() == AMD
    monkeypatch.setattr(products.Path, "read_text", lambda self: "processor\t: 0\nBogoMIPS\t: 50.00\n")  # Arm
    assert products.cpu_vendor() == ""

    def missing(self: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(products.Path, "read_text", missing)
    monkeypatch.setattr(products.platform, "processor", lambda: "AMD64 Family 25 Model 97, AuthenticAMD")
    assert products.cpu_vendor() == AMD


@needs_onednn
@pytest.mark.parametrize("shape", [(3, 171), (1, 2500)])
@pytest.mark.parametrize("k, n", [(96, 600), (600, 96)])
@pytest.mark.parametrize("strided", [False, True])
def test_equals_the_plain_product(
    active: list, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], k: int, n: int, strided: bool
) -> None:
    """As exact as F.linear, judged in FP64; 2,500 rows are more than one copy for the weight gradient.

    Strided: transposed parts of wider matrices, for which oneDNN itself would take a second a product.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(products, "COPIED_ELEMENTS", 2**17)

    def draw(*size: int) -> Tensor:
        if not strided:
            return torch.randn(size)
        return torch.randn(*size[:-2], size[-1], size[-2] + 5).transpose(-1, -2)[..., 5:, :]

    x, w, dy = draw(*shape, k), draw(n, k), draw(*shape, n)
    exact = _values_and_gradients(F.linear, x.double(), w.double(), dy.double())
    plain = _values_and_gradients(F.linear, x, w, dy)
    ours = _values_and_gradients(products.linear, x, w, dy)
    rows = x.numel() // k
    copies = -(-rows // (2**17 // 96))  # of the narrow operand of the weight gradient, in parts
    assert len(active) == 2 + copies and (copies > 1) == (rows == 2500)
    for result, reference, other in zip(ours, exact, plain, strict=True):
        assert result.shape == reference.shape and result.is_contiguous()
        assert _distance(result, reference) < 1e-6 and _distance(other, reference) < 1e-6


@needs_onednn
def test_only_what_needs_a_gradient_is_kept_and_computed(active: list) -> None:
    x, w = torch.randn(512, 96), torch.randn(600, 96)
    saved: list[Tensor] = []
    for x_grad, w_grad in ((True, False), (False, True), (False, False)):
        active.clear()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = products.linear(x.detach().requires_grad_(x_grad), w.detach().requires_grad_(w_grad))
        assert y.requires_grad == (x_grad or w_grad)
        assert [t.shape for t in saved] == [t.shape for t, other in ((x, w_grad), (w, x_grad)) if other]
        if y.requires_grad:
            y.sum().backward()
        assert len(active) == 1 + x_grad + w_grad


@needs_onednn
def test_what_stays_with_torch(active: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single rows, small or narrow products, other dtypes, autocast and the switch of torch: bit by bit."""

    def draw(rows: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, k, dtype=dtype), torch.randn(n, k, dtype=dtype)

    large = (512, 96, 600)
    others = [
        draw(1, 4096, 2048),
        draw(0, 96, 600),
        draw(64, 96, 32),
        draw(4096, 1024, 8),
        draw(*large, torch.float64),
        draw(*large, torch.bfloat16),
    ]
    for x, w in others:
        assert torch.equal(products.linear(x, w), F.linear(x, w))
    x, w = draw(*large)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, w).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        products.linear(x, w)
    meta = products.linear(x.to("meta"), w.to("meta"))
    assert meta.shape == (512, 600) and not active
    products.linear(x, w)
    assert active == [large]


@needs_onednn
def test_only_in_cpu_mode(on_amd: None, calls: list) -> None:
    x, w = torch.randn(512, 96), torch.randn(600, 96)
    products.linear(x, w)
    assert not calls and not products.active
    with cpu.cpu_mode():
        products.linear(x, w)
        assert len(calls) == 1
    products.linear(x, w)
    assert len(calls) == 1 and not products.active


def test_other_machines_keep_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CPU, a torch without the operation, and one that computes something else there."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")

    def raising(error: type[Exception]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            raise error

        return operation

    wrong: list[Any] = [raising(AttributeError), raising(RuntimeError), lambda a, b: torch.zeros(3, 2)]
    cases = [(INTEL, products._by_onednn), *((AMD, operation) for operation in wrong)]
    try:
        for vendor, operation in cases:
            products.is_available.cache_clear()
            monkeypatch.setattr(products, "cpu_vendor", lambda v=vendor: v)
            monkeypatch.setattr(products, "_by_onednn", operation)
            assert products.table() == []
            with cpu.cpu_mode():
                x, w = torch.randn(512, 96), torch.randn(600, 96)
                assert torch.equal(products.linear(x, w), F.linear(x, w))
    finally:
        products.is_available.cache_clear()


def _step(frozen: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a small model; its linears are frozen, as under LoRA, or trained."""
    with world_of_one():
        model = build_hybrid("M*E-", stack_spec("torch", None), moe_latent_size=32)
        randomize(model, seed=3)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.endswith("weight") and parameter.dim() == 2))
        tokens = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))
        loss = model(tokens, torch.arange(64).repeat(2, 1), None, labels=tokens).mean()
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@needs_onednn
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_of_a_model(
    frozen: bool, monkeypatch: pytest.MonkeyPatch, on_amd: None, calls: list[tuple[int, ...]]
) -> None:
    """Megatron's column and row parallel layers, its output layer and ours, against Megatron's products."""
    monkeypatch.setattr(products, "LEAST_SIZE", 1)
    loss, gradients = _step(frozen)
    # M: 2 linears; *: 2; E: 2 latent, 2 of the shared expert; -: 2; output: 1. Each has three products, or
    # two if frozen.
    assert len(calls) == 11 * (2 if frozen else 3)
    monkeypatch.setattr(products, "cpu_vendor", lambda: INTEL)
    calls.clear()
    plain_loss, plain = _step(frozen)
    assert not calls and gradients.keys() == plain.keys()
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def _functions() -> list[Any]:
    return [layers.LinearWithGradAccumulationAndAsyncCommunication, layers.LinearWithFrozenWeight]


class _Later(torch.autograd.Function):
    """Megatron's function in a version with an argument that this package does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, novelty: bool) -> Tensor:
        return torch.matmul(x, weight.t())


@needs_onednn
def test_communication_stays_with_megatron(
    monkeypatch: pytest.MonkeyPatch, on_amd: None, calls: list
) -> None:
    """A linear with a bias, fused accumulation, communication or a deferred gradient is Megatron's own.

    So is any linear of a version that has further arguments.
    """
    other = {
        "bias": torch.zeros(600),
        "gradient_accumulation_fusion": True,
        "allreduce_dgrad": True,
        "sequence_parallel": True,
        "grad_output_buffer": [],
        "gtp_remat_size": 2,
        "output_dtype": torch.bfloat16,
    }
    plain = {
        "bias": None,
        "grad_output_buffer": None,
        "tp_group": None,
        "gtp_remat_size": 1,
        "output_dtype": None,
    }
    originals = _functions()
    x, w = torch.randn(512, 96), torch.randn(600, 96)
    for original in originals:
        called: list[Any] = []
        monkeypatch.setattr(original, "apply", lambda *arguments, c=called: c.append(arguments))
        _, _, _, *names = inspect.signature(original.forward).parameters
        for name in (None, *names):
            values = [other.get(n) if n == name else plain.get(n, False) for n in names]
            called.clear()
            with cpu.cpu_mode(), torch.no_grad():
                replaced = next(f for f, o in zip(_functions(), originals, strict=True) if o is original)
                result = replaced.apply(x, w, *values)
            if name in other:
                assert called == [(x, w, *values)] and not calls, name
            else:
                assert not called and result.shape == (512, 600) and len(calls) == 1, name
            calls.clear()
    monkeypatch.setattr(layers, "LinearWithFrozenWeight", _Later)
    with cpu.cpu_mode():
        layers.LinearWithFrozenWeight.apply(x, w, None, False)
    assert not calls
