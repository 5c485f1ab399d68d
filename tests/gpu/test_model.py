"""Whole models: against transformers, kernels on and off, recomputation, host synchronization.

Comparisons with transformers also run on the CPU in `cpu_mode`, where they show that they hold. Weights are
random (`randomize`); the oracle is transformers' torch path in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.layers import experts, mamba
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.precision.settings import gpu_kernels
from tests.support import parity
from tests.support.gpu_world import host_waits, world
from tests.support.model_mapping import megatron_model, randomize, to_transformers
from tests.support.models import FULL_RECOMPUTE

transformers = pytest.importorskip("transformers")

#: FP32: rounding differs between devices and orders of summation; observed on the CPU: 1e-5.
LOGITS_ATOL, GRADIENT_RTOL = 1e-3, 1e-3
#: BF16: machine epsilon, twice the largest relative error of a rounding.
EPS = torch.finfo(torch.bfloat16).eps
#: Relative error (norms) of BF16 logits against FP32 ones. One rounding is off by at most eps / 4 in the mean
#: square: uniform within half a unit in the last place, which is at most eps of the value, gives
#: eps / sqrt(12). A layer rounds about 9 times on the way to the residual stream; for L layers independent
#: errors add to eps / sqrt(12) * sqrt(9 L) = 3 eps at L = 12.
LOGITS_RTOL = 3 * EPS
#: Of each gradient: backward adds as many roundings again to those of forward, which it reads: sqrt(2) * 3
#: eps on average over parameters. The gradients of the scan's few parameters (A_log, dt_bias: one number a
#: head) are sums with cancellation; a factor of 4 is left for them.
GRADIENT_MEDIAN_RTOL, GRADIENT_WORST_RTOL = 5 * EPS, 20 * EPS
#: Waits of the host in a step without kernels: the dispatcher's copy of the tokens per expert, once a MoE
#: layer, and as often again where the layer is computed twice. With torch's grouped product, in
#: all other layers, in the loss and in backward: none.
WAITS_PER_MOE = 1

MODELS = {
    # Widths that grouped_mm takes (multiples of 8), head 64 and state 128 as published.
    "super": get("super-tiny").but(
        pattern="ME*EM-E",
        dense_ffn_hidden_size=256,
        vocab_size=512,
        mtp_pattern=None,
        mtp_num_layers=0,
        mamba_num_heads=8,
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=2,
    ),
    "nano": get("nano-tiny").but(pattern="MEM*E", vocab_size=512),
}
#: Of weights and tokens. The last chosen and the best rejected expert are at least 4e-4 apart in every token,
#: a hundred times what scores differ by in FP32.
SEEDS = {"super-tiny": 25, "nano-tiny": 5}
#: More than one chunk of 128, and not a multiple.
TOKENS, BATCH = 200, 1

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


#: On the CPU: tests/layers/test_recompute.py and test_host_waits.py.
gpu_only = pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)], indirect=True)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device with Megatron's groups on it; FP32 products are not rounded to TF32."""
    with world(request.param), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert not torch.backends.cuda.matmul.allow_tf32
        yield request.param


@pytest.fixture(autouse=True)
def torch_path_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes mamba-ssm and causal-conv1d where they are installed; here it computes in torch."""
    from transformers.models.nemotron_h import modeling_nemotron_h as module

    for name in ("causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)


def build(
    model: Nemotron3Config, device: str, dtype: torch.dtype, kernels: bool | None = False, **changes: Any
) -> Any:
    """Our model with random weights that BF16 holds exactly, A_log and D too. Kernels stay on as built."""
    options: dict[str, Any] = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, **changes}
    with gpu_kernels(kernels):
        ours = megatron_model(model, use_cpu_initialization=device == "cpu", **options).train()
    randomize(ours, SEEDS[model.name])
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(p.bfloat16())
    return ours


@torch.no_grad()
def pin_routing(ours: Any) -> None:
    """Expert biases far apart, so that rounding changes no choice; scores still weight the experts."""
    generator = torch.Generator().manual_seed(1)
    for name, bias in ours.named_buffers():
        if name.endswith("expert_bias"):
            bias.copy_(10.0 * torch.randperm(bias.numel(), generator=generator))


@dataclass(frozen=True)
class Step:
    logits: Tensor  # [b, s, vocabulary], FP32
    loss: float
    gradients: dict[str, Tensor]  # transformers' names, FP32


def ids(model: Nemotron3Config, device: str) -> Tensor:
    """[b, s + 1]"""
    return parity.text(model, BATCH, TOKENS, SEEDS[model.name] + 5).to(device)


def training_loss(ours: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of tokens [b, s + 1]."""
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape[0], -1)
    losses: Tensor = ours(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous())
    return losses.mean()


def step(ours: Any, model: Nemotron3Config, device: str, kernels: bool | None = False) -> Step:
    """Logits, loss and gradients of our model."""
    tokens = ids(model, device)
    positions = torch.arange(TOKENS, device=device).expand(BATCH, -1)
    ours.zero_grad(set_to_none=True)
    with gpu_kernels(kernels):
        with torch.no_grad():
            logits = ours(tokens[:, :-1], positions, None).float()
        loss = training_loss(ours, tokens)
        loss.backward()
    gradients = to_transformers({n: p.grad.float() for n, p in ours.named_parameters()}, model)
    return Step(logits, loss.item(), gradients)


def oracle(ours: Any, model: Nemotron3Config, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with the weights of ours, on the device."""
    weights = {n: t.float() for n, t in parity.weights_of(ours).items()}
    theirs = parity.oracle(model, to_transformers(weights, model)).to(device, dtype)
    for module in theirs.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return theirs


def step_of_oracle(theirs: Any, model: Nemotron3Config, device: str) -> Step:
    logits, loss, gradients = parity.loss_and_gradients(theirs, ids(model, device))
    return Step(logits.float(), loss, {n: g.float() for n, g in gradients.items()})


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def gradient_errors(found: Step, expected: Step) -> list[tuple[float, str]]:
    """(relative error, name), largest first."""
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(g.norm() > 0 for g in expected.gradients.values())
    differences = parity.relative_differences(found.gradients, expected.gradients)
    return sorted(((d, n) for n, d in differences.items()), reverse=True)


# --- against transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_parity(device: str, name: str, kernels: bool | None) -> None:
    model = MODELS[name]
    ours = build(model, device, torch.float32, kernels)
    theirs = oracle(ours, model, device)
    tokens = ids(model, device)[:, :-1]
    positions = torch.arange(TOKENS, device=device).expand(BATCH, -1)
    with torch.no_grad(), gpu_kernels(kernels), parity.router_logits(ours, theirs) as calls:
        ours(tokens, positions, None), theirs(tokens)
    margin, score_difference = parity.routing(calls)
    # If this fails, choose another seed: the two sides chose different experts somewhere.
    assert 2 * score_difference < margin, (score_difference, margin)
    found, expected = step(ours, model, device, kernels), step_of_oracle(theirs, model, device)
    difference = (found.logits - expected.logits).abs().max().item()
    worst = gradient_errors(found, expected)[0]
    assert expected.logits.std() > 0.3
    assert difference <= LOGITS_ATOL
    assert found.loss == pytest.approx(expected.loss, abs=1e-4)
    assert worst[0] <= GRADIENT_RTOL, worst


@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_parity(device: str, name: str, kernels: bool | None) -> None:
    """Against FP32, and not much worse than transformers' own BF16 is."""
    model = MODELS[name]
    ours = build(model, device, torch.bfloat16, kernels)
    pin_routing(ours)
    expected = step_of_oracle(oracle(ours, model, device), model, device)
    found = step(ours, model, device, kernels)
    theirs = step_of_oracle(oracle(ours, model, device, torch.bfloat16), model, device)
    errors = gradient_errors(found, expected)
    logits, their_logits = (error(side.logits, expected.logits) for side in (found, theirs))
    median = errors[len(errors) // 2][0]
    assert logits <= LOGITS_RTOL
    assert median <= GRADIENT_MEDIAN_RTOL
    assert errors[0][0] <= GRADIENT_WORST_RTOL, errors[0]
    assert logits <= 1.5 * their_logits


#: Mistake -> attribute of transformers' modules and what becomes of it. Smaller ones show in FP32.
MISTAKES: dict[str, tuple[str, Any]] = {
    "scaling factor off by 10 %": ("routed_scaling_factor", lambda old: 1.1 * old),
    "no skip connection D": ("D", torch.zeros_like),
    "one expert fewer": ("top_k", lambda old: old - 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_the_bf16_tolerance(device: str, mistake: str) -> None:
    model = MODELS["super"]
    ours = build(model, device, torch.bfloat16)
    pin_routing(ours)
    theirs = oracle(ours, model, device)
    attribute, change = MISTAKES[mistake]
    for module in theirs.modules():
        old = getattr(module, attribute, None)
        if isinstance(old, Tensor):
            old.data.copy_(change(old.data))
        elif old is not None:
            setattr(module, attribute, change(old))
    tokens = ids(model, device)[:, :-1]
    positions = torch.arange(TOKENS, device=device).expand(BATCH, -1)
    with torch.no_grad():
        found = error(ours(tokens, positions, None).float(), theirs(tokens).logits)
    assert found > 1.5 * LOGITS_RTOL, f"{found / EPS:.1f} eps"


# --- kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_and_off(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values; and each setting takes the path it names."""
    calls = {"scan": 0, "grouped": 0}

    def counting(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(mamba, "select_scan", counting("scan", mamba.select_scan))
    grouped_form = counting("grouped", experts.squared_relu_experts_cuda)
    monkeypatch.setattr(experts, "squared_relu_experts_cuda", grouped_form)
    model = MODELS["super"]
    steps, counts = [], []
    for kernels in (False, None):
        ours = build(model, device, dtype, kernels)
        pin_routing(ours)
        calls.update(scan=0, grouped=0)
        steps.append(step(ours, model, device, kernels))
        counts.append(dict(calls))
    # Two forward passes. There are no CUDA kernels for a CPU's experts, and none that are fast for FP32.
    grouped = 2 * model.pattern.count("E") if device == "cuda" and dtype == torch.bfloat16 else 0
    assert counts == [
        {"scan": 0, "grouped": 0},
        {"scan": 2 * model.pattern.count("M"), "grouped": grouped},
    ]
    off, on = steps
    logits, worst = error(on.logits, off.logits), gradient_errors(on, off)[0]
    narrow = dtype == torch.bfloat16
    # Two BF16 results, each off by its own rounding errors.
    assert logits <= (2**0.5 * LOGITS_RTOL if narrow else 1e-5)
    assert worst[0] <= (2**0.5 * GRADIENT_WORST_RTOL if narrow else GRADIENT_RTOL), worst


# --- recomputation ------------------------------------------------------------------------------------

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": FULL_RECOMPUTE,
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "moe_act", "shared_experts"],
    },
}


@gpu_only
@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("how", RECOMPUTE)
def test_recomputation_changes_nothing(device: str, how: str, kernels: bool | None) -> None:
    """FP32: sums on a GPU may be in another order each time (atomics), hence a tolerance."""
    model = MODELS["super"]
    plain, again = (
        step(build(model, device, torch.float32, kernels, **options), model, device, kernels)
        for options in ({}, RECOMPUTE[how])
    )
    torch.testing.assert_close(again.logits, plain.logits, rtol=0, atol=1e-4)
    assert again.loss == pytest.approx(plain.loss, abs=1e-5)
    assert gradient_errors(again, plain)[0][0] <= 1e-4


# --- waits of the host --------------------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("how", ["nothing recomputed", *RECOMPUTE])
def test_host_waits_once_a_moe_layer(device: str, how: str, kernels: bool | None) -> None:
    model = MODELS["super"]
    ours = build(model, device, torch.bfloat16, kernels, **RECOMPUTE.get(how, {}))
    tokens = ids(model, device)

    def one_step() -> None:
        ours.zero_grad(set_to_none=True)
        training_loss(ours, tokens).backward()

    with gpu_kernels(kernels):
        one_step()  # compilation and first allocations may wait
        waits = host_waits(one_step, device)
    passes = 2 if how == "full" else 1
    per_layer = WAITS_PER_MOE if kernels is False else 0
    assert waits <= passes * per_layer * model.pattern.count("E")


@gpu_only
@pytest.mark.parametrize("kernels", [False, None])
def test_host_never_waits_without_experts(device: str, kernels: bool | None) -> None:
    model = MODELS["super"].but(pattern="M*-M")
    ours = build(model, device, torch.bfloat16, kernels)
    tokens = ids(model, device)
    with gpu_kernels(kernels):
        training_loss(ours, tokens).backward()
        assert host_waits(lambda: training_loss(ours, tokens).backward(), device) == 0
