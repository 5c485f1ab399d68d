"""Every module of the torch backend against its definition in plain torch below.

Values and gradients, of whole layers inside stock `HybridModel`; packed documents against separate ones;
multi-token prediction against its recursion and its losses; what the modules refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_nemotron3.layers.attention import TorchCoreAttention
from megatron_nemotron3.layers.experts import ColumnParallelGroupedLinear, GroupedExperts
from megatron_nemotron3.layers.grouped import grouped_linear
from megatron_nemotron3.layers.linear import LayerNormColumnParallelLinear
from megatron_nemotron3.layers.mamba import Mamba2Mixer
from megatron_nemotron3.layers.norm import NormBuilder, RMSNorm
from megatron_nemotron3.models import get
from tests.support.model_mapping import megatron_model, randomize, transformer_config
from tests.support.references import grouped_linear_reference

#: "ME*/*E/*E": each kind once (their place in it below), then two depths of one MTP block.
MODEL = get("super-tiny").but(pattern="ME*", vocab_size=256)
MAMBA, MOE, ATTENTION = range(3)
TOKENS, BATCH = 150, 2  # more than two chunks of the scan

# --- the definitions --------------------------------------------------------------------------------


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + MODEL.layernorm_epsilon) * gain


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence: q [s, heads, c], k and v [s, groups, c] -> [s, heads * c]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    later = torch.ones(len(q), len(q)).triu(1).bool()
    scores = torch.einsum("qhc,khc->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khc->qhc", weights, v).flatten(1)


def attention_layer(layer: Any, x: Tensor) -> Tensor:
    """x [s, d] -> [s, d]."""
    module, groups, c = layer.self_attention, MODEL.num_query_groups, MODEL.kv_channels
    qkv = rms(x, module.linear_qkv.layer_norm_weight) @ module.linear_qkv.weight.T
    qkv = qkv.view(len(x), groups, -1, c)
    q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    return x + softmax_attention(q, k, v) @ module.linear_proj.weight.T


def moe_layer(layer: Any, x: Tensor) -> Tensor:
    """x [s, d] -> [s, d], expert by expert."""
    moe, u = layer.mlp, rms(x, layer.pre_mlp_layernorm.weight)
    scores = (u @ moe.router.weight.T).sigmoid()
    chosen = (scores + moe.router.expert_bias).topk(MODEL.moe_router_topk, dim=-1).indices
    probs = scores.gather(-1, chosen)
    probs = probs / probs.sum(-1, keepdim=True) * MODEL.moe_router_topk_scaling_factor
    latent = u @ moe.fc1_latent_proj.weight.T
    routed = torch.zeros_like(latent)
    for e in range(MODEL.num_moe_experts):
        token, rank = torch.where(chosen == e)
        fc1, fc2 = (getattr(fc, f"weight{e}") for fc in (moe.experts.linear_fc1, moe.experts.linear_fc2))
        expert = (latent[token] @ fc1.T).relu() ** 2 @ fc2.T
        routed = routed.index_add(0, token, expert * probs[token, rank].unsqueeze(-1))
    if hasattr(moe, "fc2_norm"):
        routed = rms(routed, moe.fc2_norm.weight)
    shared = moe.shared_experts
    shared = (u @ shared.linear_fc1.weight.T).relu() ** 2 @ shared.linear_fc2.weight.T
    return x + routed @ moe.fc2_latent_proj.weight.T + shared


def mamba_layer(layer: Any, x: Tensor) -> Tensor:
    """x [s, d] -> [s, d], token by token."""
    mixer, inner = layer.mixer, MODEL.mamba_inner_size
    groups, n, heads = MODEL.mamba_num_groups, MODEL.mamba_state_dim, MODEL.mamba_num_heads
    zxbcdt = rms(x, mixer.in_proj.layer_norm_weight) @ mixer.in_proj.weight.T
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * groups * n, heads], dim=-1)
    taps = mixer.conv1d_weight.squeeze(1)  # [channels, 4], the last tap sees the token itself
    before = F.pad(xbc, (0, 0, 3, 0))
    xbc = F.silu(sum(before[j : j + len(x)] * taps[:, j] for j in range(4)) + mixer.conv1d_bias)
    u, B, C = xbc.split([inner, groups * n, groups * n], dim=-1)
    u = u.view(-1, heads, inner // heads)
    B, C = (t.view(-1, groups, n).repeat_interleave(heads // groups, dim=1) for t in (B, C))
    dt = F.softplus(dt + mixer.dt_bias)
    decay = torch.exp(-dt * mixer.A_log.exp())
    state, ys = torch.zeros(heads, inner // heads, n), []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state + (dt[t, :, None] * u[t])[..., None] * B[t, :, None]
        ys.append((state * C[t, :, None]).sum(-1) + mixer.D[:, None] * u[t])
    gated = (torch.stack(ys).flatten(1) * F.silu(z)).view(len(x), groups, -1)
    return x + rms(gated, mixer.norm.weight.view(groups, -1)).flatten(1) @ mixer.out_proj.weight.T


DEFINITIONS = {MAMBA: mamba_layer, MOE: moe_layer, ATTENTION: attention_layer}


@pytest.fixture(scope="module")
def model(world: None) -> Any:
    result = megatron_model(MODEL, moe_aux_loss_coeff=0.0)
    randomize(result, seed=3)
    return result.train()


def run_layer(layer: Any, x: Tensor, packed: PackedSeqParams | None = None) -> Tensor:
    """[s, b, d] -> [s, b, d] through a layer of the stack."""
    out = layer(hidden_states=x, attention_mask=None, packed_seq_params=packed)
    return out[0] if isinstance(out, tuple) else out


def per_sequence(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` [s, ...] -> [s, ...] on every sequence of a batch [s, b, ...]."""
    return torch.stack([function(x[:, i]) for i in range(x.shape[1])], dim=1)


def gradients(out: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None) -> list[Tensor]:
    """Gradient of every input, zero where the output does not depend on it. Keeps the graph."""
    return list(torch.autograd.grad(out, inputs, cotangent, retain_graph=True, materialize_grads=True))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-5 of the largest element, or of 1."""
    scale = max(float(theirs.detach().abs().max()), 1.0)
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=1e-5 * scale)


def assert_same(ours: Tensor, theirs: Tensor, inputs: Sequence[Tensor]) -> None:
    """Outputs are close, and gradients of `inputs` equal to 1e-4 of each one's norm."""
    assert_close(ours, theirs)
    cotangent = random(*ours.shape, seed=5)
    for a, b in zip(gradients(ours, inputs, cotangent), gradients(theirs, inputs, cotangent), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm(), f"{tuple(a.shape)}: {(a - b).norm() / b.norm():.1e}"


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def norm(**changes: Any) -> RMSNorm:
    return RMSNorm(transformer_config(MODEL, **changes), 24)


def built_norm(**changes: Any) -> RMSNorm:
    return NormBuilder(transformer_config(MODEL, **changes), 24)


def linear(**changes: Any) -> LayerNormColumnParallelLinear:
    config = transformer_config(MODEL, **changes)
    return LayerNormColumnParallelLinear(24, 40, config=config, init_method=config.init_method, bias=False)


@pytest.mark.parametrize("kind", DEFINITIONS, ids=["mamba", "moe", "attention"])
def test_layer_is_its_definition(model: Any, kind: int) -> None:
    layer, x = model.decoder.layers[kind], random(TOKENS, BATCH, MODEL.hidden_size)
    expected = per_sequence(lambda sequence: DEFINITIONS[kind](layer, sequence), x)
    assert_same(run_layer(layer, x), expected, [x, *layer.parameters()])


def test_mixer_joins_no_gradients_by_copying(model: Any) -> None:
    """Gradients of z, xBC, x, B and C are written into the gradients of what they are parts of."""
    operations: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    layer, x = model.decoder.layers[MAMBA], random(TOKENS, BATCH, MODEL.hidden_size)
    out = run_layer(layer, x)
    with Record():
        gradients(out, [x, *layer.parameters()], random(*out.shape, seed=2))
    assert "bmm" in operations and "cat" not in operations


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_and_fused_linear(world: None, zero_centered: bool) -> None:
    alone = norm(layernorm_zero_centered_gamma=zero_centered)
    fused = linear(layernorm_zero_centered_gamma=zero_centered)
    assert [name for name, _ in fused.named_parameters()] == ["layer_norm_weight", "weight"]
    x, added = random(7, BATCH, 24), 1.0 if zero_centered else 0.0
    for gain in (alone.weight, fused.layer_norm_weight):
        assert (gain + added == 1).all()
        with torch.no_grad():
            gain.copy_(random(24, seed=4))
    assert_same(alone(x), rms(x, alone.weight + added), [x, alone.weight])
    expected = rms(x, fused.layer_norm_weight + added) @ fused.weight.T
    assert_same(fused(x)[0], expected, [x, *fused.parameters()])


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 2**16),
)
def test_grouped_linear_is_its_reference(counts: list[int], sizes: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weights = draw(sum(counts), sizes[0]), [draw(sizes[1], sizes[0]) for _ in counts]
    ours, theirs = grouped_linear(x, weights, counts), grouped_linear_reference(x, weights, counts)
    torch.testing.assert_close(ours, theirs)
    cotangent = draw(*ours.shape).detach()
    # An expert without rows has a gradient of zeros, not None.
    ours_gradients = torch.autograd.grad(ours, [x, *weights], cotangent)
    torch.testing.assert_close(ours_gradients, tuple(gradients(theirs, [x, *weights], cotangent)))


# --- packed documents -------------------------------------------------------------------------------

#: Padded lengths of the documents, real lengths, tokens behind the last border.
PACKINGS = {
    "one": ([150], [150], 0),
    "several": ([3, 70, 1, 76], [3, 70, 1, 76], 0),
    "empty document": ([60, 0, 40], [60, 0, 40], 0),
    "tail outside": ([60, 30], [60, 30], 10),
    "padded": ([64, 40, 16], [50, 40, 3], 0),
}


#: Which fields hold the padded (True) and the real (False) borders. `pretrain_hybrid.py` makes the first two.
FIELDS = {"one": (True, None), "both padded": (True, True), "real and padded": (False, True)}


def pack(padded: list[int], real: list[int], tail: int = 0, fields: str = "one") -> PackedSeqParams:
    lengths = {True: padded, False: real}
    borders = {k: torch.tensor([0, *accumulate(n)], dtype=torch.int32) for k, n in lengths.items()}
    first, second = (borders.get(which) for which in FIELDS[fields])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=first,
        cu_seqlens_kv=first,
        cu_seqlens_q_padded=second,
        cu_seqlens_kv_padded=second,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        total_tokens=sum(padded) + tail,
    )


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", [MAMBA, ATTENTION], ids=["mamba", "attention"])
def test_packed_is_separate(model: Any, kind: int, packing: str, fields: str) -> None:
    padded, real, tail = PACKINGS[packing]
    layer, x = model.decoder.layers[kind], random(sum(padded) + tail, 1, MODEL.hidden_size)
    starts = [0, *accumulate(padded)]
    documents = [slice(a, a + n) for a, n in zip(starts, [*real, tail], strict=True) if n]
    packed = run_layer(layer, x, pack(padded, real, tail, fields))
    separate = [run_layer(layer, x[document]) for document in documents]
    assert_same(torch.cat([packed[d] for d in documents]), torch.cat(separate), [x, *layer.parameters()])


def test_packed_model_is_separate(model: Any) -> None:
    """Logits, and the hidden states of both MTP depths, which may not look past their document."""
    lengths = [20, 33, 11]
    ids = torch.randint(MODEL.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    seen: list[Tensor] = []
    with torch.no_grad(), model.mtp.register_forward_hook(lambda *call: seen.append(call[-1])):
        logits = model(ids, positions, None, packed_seq_params=pack(lengths, lengths))
        separate = [model(i, p, None) for i, p in zip(ids.split(lengths, 1), positions.split(lengths, 1))]
    assert_close(logits, torch.cat(separate, dim=1))
    depths = zip(*(hidden.chunk(3) for hidden in seen[1:]))
    for together, apart in zip(seen[0].chunk(3), depths, strict=True):
        assert_close(together, torch.cat(apart))


# --- multi-token prediction -------------------------------------------------------------------------


def shift(t: Tensor) -> Tensor:
    """[b, s] one to the left, 0 at the end (a mask of 0; token 0 as the input that does not exist)."""
    return F.pad(t[:, 1:], (0, 1))


def cross_entropy(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """[s, b, d], [b, s] -> [b, s]."""
    logits = (hidden @ model.output_layer.weight.T).permute(1, 2, 0)
    return F.cross_entropy(logits, labels, reduction="none")


def mtp_definition(model: Any, h: Tensor, ids: Tensor) -> list[Tensor]:
    """h_0 [s, b, d] after the final norm -> [h_1, h_2]: the one block, applied twice."""
    (block,) = model.mtp.layers
    attention, moe = block.mtp_model_layer.layers
    result = []
    for _ in range(MODEL.mtp_num_layers):
        ids = shift(ids)
        embedded = model.embedding.word_embeddings.weight[ids].transpose(0, 1)
        both = torch.cat([rms(embedded, block.enorm.weight), rms(h, block.hnorm.weight)], dim=-1)
        h = both @ block.eh_proj.weight.T
        h = per_sequence(lambda x: moe_layer(moe, attention_layer(attention, x)), h)
        h = rms(h, block.final_layernorm.weight)
        result.append(h)
    return result


def test_mtp_is_its_definition(model: Any) -> None:
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    MTPLossLoggingHelper.tracker.clear()
    generator, shape = torch.Generator().manual_seed(9), (BATCH, TOKENS)
    ids, labels = (torch.randint(MODEL.vocab_size, shape, generator=generator) for _ in range(2))
    mask = (torch.rand(shape, generator=generator) > 0.2).float()
    positions = torch.arange(TOKENS).expand(shape)
    seen: list[Tensor] = []
    with model.mtp.register_forward_hook(lambda *call: seen.append(call[-1])):
        main = model(ids, positions, None, labels=labels, loss_mask=mask)
    parameters = dict(model.named_parameters())
    total = torch.autograd.grad(main.mean(), list(parameters.values()))

    h0 = model.decoder(model.embedding(ids, positions), None)
    expected_hidden = mtp_definition(model, h0, ids)
    for ours, theirs in zip(seen[0].chunk(3), [h0, *expected_hidden], strict=True):
        assert_close(ours, theirs)
    expected_main = cross_entropy(model, h0, labels)
    assert_close(main, expected_main)
    losses: list[Tensor] = []
    for hidden in expected_hidden:
        labels, mask = shift(labels), shift(mask)
        losses.append((cross_entropy(model, hidden, labels) * mask).sum() / mask.sum())
    assert_close(MTPLossLoggingHelper.tracker["loss_values"], torch.stack(losses))

    # The scaled losses enter the gradient beside the main loss, and depth 2 passes through depth 1.
    scaled = [MODEL.mtp_loss_scaling_factor / MODEL.mtp_num_layers * loss for loss in losses]
    terms = [gradients(loss, list(parameters.values())) for loss in (expected_main.mean(), *scaled)]
    for i, name in enumerate(parameters):
        from_main, *from_depths = (gradient[i] for gradient in terms)
        expected = sum(from_depths, from_main)
        assert (total[i] - expected).norm() <= 1e-4 * expected.norm(), name
        if name.startswith("mtp."):
            assert from_main.norm() == 0 and all(g.norm() > 1e-2 * expected.norm() for g in from_depths), name


# --- refusals ---------------------------------------------------------------------------------------


def groups(**sizes: int) -> Any:
    """Process groups of which only the sizes are used."""
    sizes = dict.fromkeys(("tp", "cp", "ep", "expt_tp", "expt_dp"), 1) | sizes
    return SimpleNamespace(**{name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()})


def core_attention(mask: AttnMaskType = AttnMaskType.causal, cp: int = 1, **changes: Any) -> Any:
    config = transformer_config(MODEL, **changes)
    return TorchCoreAttention(config, 1, mask, "self", pg_collection=groups(cp=cp))


def grouped(width: int, tp: int) -> Any:
    config = transformer_config(MODEL)
    options = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
    return ColumnParallelGroupedLinear(2, 8, width, **options, pg_collection=groups(expt_tp=tp))


def mixer(tp: int, **changes: Any) -> Any:
    return Mamba2Mixer(
        transformer_config(MODEL, **changes), None, MODEL.hidden_size, pg_collection=groups(tp=tp)
    )


QKV = [torch.zeros(4, 1, 2, 32)] * 3
REFUSALS = {
    "no causal mask": (lambda: core_attention(AttnMaskType.no_mask), "no_mask.*causal only"),
    "softmax": (lambda: core_attention(softmax_type="off-by-one"), "off-by-one.*full softmax"),
    "window": (lambda: core_attention(window_size=(8, 0)), r"window_size=\(8, 0\)"),
    "attention bias": (lambda: core_attention()(*QKV, attention_bias=QKV[0]), "attention_bias"),
    "another norm": (lambda: built_norm(normalization="L2Norm"), "'L2Norm'.*--normalization RMSNorm"),
    "linear after another norm": (lambda: linear(normalization="L2Norm"), "--normalization RMSNorm"),
    "an unknown layer": (
        lambda: megatron_model(MODEL, pattern="M+M"),
        r"layers \[1\] of this stage are of a kind that the spec does not build",
    ),
    "Mamba width": (
        lambda: mixer(tp=1, mamba_num_heads=None, mamba_head_dim=24),
        "is not by mamba_head_dim=24",
    ),
    "gated experts": (
        lambda: GroupedExperts(2, transformer_config(MODEL, gated_linear_unit=True)),
        "gated squared_relu.*--squared-relu",
    ),
    "SiLU experts": (lambda: GroupedExperts(2, transformer_config(MODEL, activation_func=F.silu)), "silu"),
    "bias": (lambda: megatron_model(MODEL, add_bias_linear=True), "pass --disable-bias-linear"),
    "expert TP": (lambda: grouped(10, tp=4), "width 10 is not divisible by expert TP=4"),
    "Mamba heads": (lambda: mixer(tp=3), "mamba_num_heads=16 is not divisible by TP=3"),
    "Mamba groups": (lambda: mixer(tp=16), "mamba_num_groups=8 is not divisible by TP=16"),
    "grouped rows": (lambda: grouped_linear(QKV[0], [QKV[0]], [3]), "add up to 3.*4 rows"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(world: None, case: str) -> None:
    build, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        build()


def test_mixer_refuses_inference(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="training and evaluation"):
        model.decoder.layers[MAMBA].mixer(torch.zeros(2, 1, MODEL.hidden_size), inference_context=object())
