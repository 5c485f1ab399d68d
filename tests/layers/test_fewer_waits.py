"""What spares the host a wait computes the same: order of experts, borders of packs, packed attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.layers import attention, context_parallel
from megatron_nemotron3.layers.latent_moe import Reordered, order_by_expert


@pytest.mark.parametrize(
    "pieces", [[[2, 0, 3], [1, 4, 0]], [[0, 0], [0, 0]], [[3, 1]], [[0, 5], [2, 0], [0, 0]]]
)
def test_order_by_expert(pieces: list[list[int]]) -> None:
    """As cutting the rows into pieces and joining them expert by expert; backward restores the order."""
    sizes = torch.tensor(pieces)
    total = int(sizes.sum())
    x = torch.arange(2.0 * total).view(total, 2).requires_grad_()
    cut = torch.split(x, sizes.flatten().tolist())
    sources, experts = sizes.shape
    wanted = torch.cat([cut[s * experts + e] for e in range(experts) for s in range(sources)])
    order, inverse = order_by_expert(sizes, total)
    found = Reordered.apply(x, order, inverse)
    assert torch.equal(found, wanted)
    assert torch.equal(Reordered.apply(found, inverse, order), x)
    dy = torch.randn(total, 2)
    assert torch.equal(torch.autograd.grad(found, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])


def test_borders_are_read_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    tensor = torch.tensor([0, 8, 16])
    make: Callable[[Tensor], Tensor] = lambda t: read.append(1) or t.clone()  # type: ignore[func-returns-value]  # noqa: E731
    assert [context_parallel._kept(tensor, "borders", make).tolist() for _ in range(2)] == [[0, 8, 16]] * 2
    assert len(read) == 1
    tensor[1] = 4
    assert context_parallel._kept(tensor, "borders", make).tolist() == [0, 4, 16]
    assert len(read) == 2
    with torch.inference_mode():
        other = torch.tensor([0, 4])
    assert context_parallel._kept(other, "borders", make).tolist() == [0, 4]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *lengths: int, **how: Any
) -> Tensor:
    """What torch says of `varlen_attn`: rows between two borders attend to those, rows after the last are not
    written. `window_size` (-1, 0) is causal; heads of k may divide those of q."""
    assert how["window_size"] == (-1, 0) and torch.equal(ends_q, ends_k) and ends_q.dtype == torch.int32
    assert max(lengths) >= int(ends_q.diff().max())
    out = torch.full_like(q, torch.nan)
    pieces = [
        F.scaled_dot_product_attention(
            *(t[a:b].transpose(0, 1)[None] for t in (q, k, v)),
            is_causal=True,
            scale=how["scale"],
            enable_gqa=True,
        )[0].transpose(0, 1)
        for a, b in zip(ends_q[:-1].tolist(), ends_q[1:].tolist(), strict=True)
    ]
    written = torch.cat(pieces)
    return torch.cat([written, out[len(written) :]])


def check_flash_packed(
    form: Any, borders: list[int], total: int, *, heads: int, kv_heads: int, width: int, device: str = "cpu"
) -> None:
    """Values and gradients against one product a document in FP64. Scores, weights and results are rounded to
    BF16 on the way, so errors are a few eps of the largest value."""
    torch.manual_seed(0)
    q = torch.randn(total, heads, width).bfloat16()
    k, v = (torch.randn(total, kv_heads, width).bfloat16() for _ in range(2))
    dy, scale = torch.randn(total, heads, width).bfloat16(), width**-0.5

    def run(tensors: list[Tensor], call: Any, dy: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = call(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    def exact(*qkv: Tensor) -> Tensor:
        ends = torch.tensor([*borders, total], dtype=torch.int32)
        return varlen(*qkv, ends, ends, total, scale=scale, window_size=(-1, 0))

    on_device = torch.tensor(borders, dtype=torch.int32, device=device)
    placed = [t.to(device) for t in (q, k, v)]
    got = run(placed, lambda *qkv: form(*qkv, on_device, scale), dy.to(device))
    want = run([t.double() for t in (q, k, v)], exact, dy.double())
    for a, b in zip(got, want, strict=True):
        assert (a.cpu().double() - b).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * b.abs().max()


@pytest.mark.parametrize("borders", [[0, 7, 20], [0, 7, 15], [0, 12, 12, 19]])
def test_packed_attention(borders: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments for flash attention, which a CPU has not; tokens after the last border are a document."""
    monkeypatch.setattr(attention, "_varlen_attn", varlen)
    check_flash_packed(attention._flash_packed, borders, 20, heads=4, kv_heads=2, width=8)
