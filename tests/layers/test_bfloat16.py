"""What stays FP32 in a bfloat16 model on the CPU: norm statistics, softplus, decay and state, router, losses.

Shown against a transcription of the mixer in FP32 that rounds to bfloat16 at the documented points and can be
told to round anywhere else as well: ours must agree with the former and not with the latter.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from torch import Tensor

from megatron_nemotron3 import build_model
from megatron_nemotron3.models import get
from tests.support.model_mapping import megatron_model, randomize

MODEL = get("super-tiny").but(pattern="ME*", vocab_size=256, mtp_pattern=None, mtp_num_layers=0)
MAMBA, MOE, ATTENTION = range(3)
TOKENS = 150
#: Unit roundoff of bfloat16: 8 bits of significand.
U = 2.0**-9
#: One more rounding of a whole tensor moves it by about U / sqrt(3) of its norm, as relative rounding errors
#: are spread over [-U, U]. Agreement to a quarter of that leaves no room for an undocumented rounding, and
#: room for the few elements that FP32 errors push over a rounding border (each by 2 U).
BOUND = U / 3**0.5 / 4


@pytest.fixture(scope="module")
def model(world: None) -> Any:
    result = megatron_model(MODEL, bf16=True, params_dtype=torch.bfloat16, moe_aux_loss_coeff=0.0)
    randomize(result, seed=3)
    return result.train()


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def bf(t: Tensor) -> Tensor:
    """Round to bfloat16; backward rounds the gradient."""
    return t.bfloat16().float()


# --- the mixer ----------------------------------------------------------------------------------------


#: What is FP32 inside the mixer: the names `mixer` can be told to round.
INTERNALS = ("input norm", "convolution", "softplus", "decay", "state", "gate", "gated norm")


def mixer(module: Any, x: Tensor, narrow: tuple[str, ...] = ()) -> Tensor:
    """x [s, d] -> [s, d] by the definition in FP32, rounded (`bf`) where values change hands.

    Args:
        narrow: of `INTERNALS`, what is rounded to bfloat16 after every operation as well.
    """

    def inside(part: str, t: Tensor) -> Tensor:
        return bf(t) if part in narrow else t

    def norm(part: str, t: Tensor, gain: Tensor) -> Tensor:
        mean = inside(part, inside(part, t.square()).mean(-1, keepdim=True))
        rstd = inside(part, torch.rsqrt(mean + MODEL.layernorm_epsilon))
        return inside(part, t * rstd) * gain

    w = {name: p.float() for name, p in module.named_parameters()}
    sizes, heads, n = module.sizes, MODEL.mamba_num_heads, MODEL.mamba_state_dim
    normed = bf(norm("input norm", x, w["in_proj.layer_norm_weight"]))
    z, xbc, dt = bf(normed @ w["in_proj.weight"].T).split([sizes.inner, sum(sizes.conv), heads], dim=-1)

    before, taps = F.pad(xbc, (0, 0, 3, 0)), w["conv1d_weight"].squeeze(1)
    total = w["conv1d_bias"]
    for j in range(4):
        total = inside("convolution", total + inside("convolution", before[j : j + len(x)] * taps[:, j]))
    u, B, C = bf(F.silu(total)).split(sizes.conv, dim=-1)

    u = u.view(len(x), heads, -1)
    B, C = (t.view(len(x), sizes.groups, n).repeat_interleave(heads // sizes.groups, dim=1) for t in (B, C))
    dt = inside("softplus", F.softplus(inside("softplus", dt + w["dt_bias"])))
    decay = inside("decay", torch.exp(inside("decay", -dt * inside("decay", w["A_log"].exp()))))
    state, ys = torch.zeros(heads, MODEL.mamba_head_dim, n), []
    for t in range(len(x)):
        state = inside(
            "state", decay[t, :, None, None] * state + (dt[t, :, None] * u[t])[..., None] * B[t, :, None]
        )
        ys.append((state * C[t, :, None]).sum(-1) + w["D"][:, None] * u[t])
    y = bf(torch.stack(ys).flatten(1))

    gated = inside("gate", y * inside("gate", F.silu(z))).view(len(x), sizes.groups, -1)
    out = bf(norm("gated norm", gated, w["norm.weight"].view(sizes.groups, -1)).flatten(1))
    return bf(out @ w["out_proj.weight"].T)


def test_mixer_is_fp32_inside(model: Any) -> None:
    module, x = model.decoder.layers[MAMBA].mixer, random(TOKENS, MODEL.hidden_size)
    found, _ = module(x.unsqueeze(1))
    assert found.dtype == torch.bfloat16
    d = distance(found.squeeze(1), mixer(module, x.float()))
    print(f"mixer: {d:.1e} from the transcription, bound {BOUND:.1e}")
    assert d < BOUND


@pytest.mark.parametrize("part", [*((part,) for part in INTERNALS), INTERNALS], ids=" ".join)
def test_rounding_inside_would_show(model: Any, part: tuple[str, ...]) -> None:
    """Each internal value, if kept in bfloat16, exceeds the bound; all of them together exceed it by far."""
    module, x = model.decoder.layers[MAMBA].mixer, random(TOKENS, MODEL.hidden_size)
    found = module(x.unsqueeze(1))[0].squeeze(1)
    d = distance(found, mixer(module, x.float(), narrow=part))
    print(f"{d:.1e} = {d / BOUND:.0f} bounds")
    assert d > (2 if len(part) == 1 else 10) * BOUND


def test_mixer_gradients(model: Any) -> None:
    """Backward rounds where forward rounds; FP32 parameters get FP32 gradients."""
    module, x = model.decoder.layers[MAMBA].mixer, random(TOKENS, MODEL.hidden_size).requires_grad_()
    dy = random(TOKENS, MODEL.hidden_size, seed=2)
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(module(x.unsqueeze(1))[0].squeeze(1), (x, *parameters), dy)
    expected = torch.autograd.grad(mixer(module, x.float()), (x, *parameters), dy.float())
    for name, parameter, f, e in zip(("x", *names), (x, *parameters), found, expected, strict=True):
        assert f.dtype == parameter.dtype
        # Backward has some ten roundings of its own, at other places than ours: their sum, not one of them.
        assert distance(f, e) < 10 * U / 3**0.5, f"{name}: {distance(f, e):.1e}"


# --- router and experts ---------------------------------------------------------------------------------


def test_router_is_fp32(model: Any) -> None:
    router, x = model.decoder.layers[MOE].mlp.router, random(TOKENS, 2, MODEL.hidden_size)
    logits = router.gating(x)
    assert logits.dtype == torch.float32
    exact = x.double() @ router.weight.double().T
    # A sum of 128 FP32 products: far below one rounding to bfloat16.
    assert distance(logits, exact) < 128 * 2.0**-24 < U / 100
    assert distance(x @ router.weight.T, exact) > U / 4

    probs, chosen = router.routing(logits)
    assert probs.dtype == torch.float32
    sums = probs.double().sum(-1) / MODEL.moe_router_topk_scaling_factor
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)
    # What a router in bfloat16 would have chosen for the same tokens.
    narrow = ((x @ router.weight.T).sigmoid() + router.expert_bias.bfloat16()).flatten(0, 1)
    others = torch.zeros_like(chosen).scatter(1, narrow.topk(MODEL.moe_router_topk, dim=-1).indices, True)
    assert (chosen != others).any(-1).float().mean() > 0.01


# --- a whole model, built and wrapped as Megatron does --------------------------------------------------


@pytest.fixture(scope="module")
def wrapped(world: None) -> Any:
    built = build_model("super", tiny=True, precision="bf16", backend="torch")
    wide = {name.rsplit(".", 1)[-1] for name, p in built.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "D"}
    assert {p.dtype for p in built.parameters()} == {torch.float32, torch.bfloat16}
    assert built.config.moe_router_dtype == "fp32"
    return Float16Module(built.config, built)


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_maintain_float32_expert_bias")]


def test_expert_bias_is_fp32_after_wrapping(wrapped: Any) -> None:
    for router in routers(wrapped):
        router._maintain_float32_expert_bias()  # training.get_model does, and every forward
        assert router.expert_bias.dtype == torch.float32
    # Where bfloat16 is too coarse for the update rate of 1e-3: its next number after 0.5 is 0.504.
    bias, counts = torch.full((4,), 0.5), torch.tensor([0.0, 9.0, 0.0, 9.0])
    updated = get_updated_expert_bias(counts, bias, MODEL.moe_router_bias_update_rate)
    torch.testing.assert_close(updated - bias, torch.tensor([1e-3, -1e-3, 1e-3, -1e-3]), rtol=1e-4, atol=0)
    assert torch.equal((bias.bfloat16() + 1e-3), bias.bfloat16())


def test_token_counts_are_exact(wrapped: Any) -> None:
    """The load counts behind the expert bias, over 16 microbatches, exceed the 8 bits of bfloat16."""
    (router, *_) = routers(wrapped)
    router._maintain_float32_expert_bias()  # as every forward does; upstream's leaves this buffer narrow
    router.local_tokens_per_expert.zero_()
    logits = torch.randn(300, 1, router.config.num_moe_experts, generator=torch.Generator().manual_seed(1))
    _, chosen = router.routing(logits)
    for _ in range(15):
        router.routing(logits)
    assert torch.equal(router.local_tokens_per_expert.float(), 16.0 * chosen.sum(0))


@pytest.mark.full
def test_training_falls(wrapped: Any) -> None:
    """Five steps of Megatron's own optimizer on one batch: FP32 losses, FP32 masters, finite gradients."""
    wrapped.train()
    ddp = DistributedDataParallel(wrapped.config, DistributedDataParallelConfig(), wrapped)
    options = OptimizerConfig(lr=6e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(options, [ddp])
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert sum(p.numel() for p in masters) == sum(p.numel() for p in wrapped.parameters())

    ids = torch.randint(0, 2048, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(2, -1)
    losses = []
    for _ in range(6):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        per_token = ddp(ids[:, :-1], positions, None, labels=ids[:, 1:].contiguous())
        assert per_token.dtype == torch.float32
        per_token.sum().backward()
        ddp.finish_grad_sync()
        ddp.scale_gradients(1 / per_token.numel())  # the family's flags have --calculate-per-token-loss
        losses.append(per_token.mean().item())
        succeeded, norm, _ = optimizer.step()
        assert succeeded and 0 < norm < float("inf")
    print("losses", [f"{loss:.3f}" for loss in losses])
    assert all(after < before for before, after in pairwise(losses))
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
    assert all(router.expert_bias.dtype == torch.float32 for router in routers(wrapped))
