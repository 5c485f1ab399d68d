"""Attention by one mask, by tiles and by row gives the result of each query alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_nemotron3.inference.generate import batch as batch_module
from megatron_nemotron3.inference.generate.attention import attend, by_causal_kernel, by_row, by_tile
from megatron_nemotron3.inference.generate.batch import ForwardBatch
from megatron_nemotron3.inference.generate.decode import Decode
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.models import get
from tests.support.engines import tensors
from tests.support.gpu_world import attention_kernels

CPU = torch.device("cpu")


def one_by_one(q: Tensor, cache: Tensor, lengths: list[int]) -> Tensor:
    """[b, n, groups, heads per group, c]: softmax of each query over the keys up to its own."""
    b, groups, per_group, n, c = q.shape
    y = q.new_empty(b, n, groups, per_group, c)
    for row, before in enumerate(lengths):
        for i in range(n):
            keys, values = cache[row, :, :, : before + i + 1]  # [groups, tokens, c]
            scores = torch.einsum("ghc,gtc->ght", q[row, :, :, i], keys) * c**-0.5
            y[row, i] = torch.einsum("ght,gtc->ghc", scores.softmax(-1), values)
    return y


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    same=st.booleans(),
    n=st.integers(2, 40),
    seed=st.integers(0, 2**31),
)
def test_masked_forms_equal_single_queries(lengths: list[int], same: bool, n: int, seed: int) -> None:
    lengths = lengths[:1] * len(lengths) if same else lengths
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), 2, 2, n, 8, generator=draw)
    cache = torch.randn(len(lengths), 2, 2, max(lengths) + n + 3, 8, generator=draw)
    expected = one_by_one(q, cache, lengths)
    torch.testing.assert_close(by_tile(q, cache, ForwardBatch(lengths, n, None, CPU)), expected)
    torch.testing.assert_close(by_row(q, cache, ForwardBatch(lengths, n, None, CPU)), expected)
    if len(set(lengths)) == 1:
        whole = ForwardBatch(lengths, n, None, CPU)
        torch.testing.assert_close(by_causal_kernel(q, cache, whole), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "MASK_ELEMENTS", 1)
        tiled = ForwardBatch(lengths, n, None, CPU)
        assert len(tiled.query_tiles(2)) == -(-n // 8)
        torch.testing.assert_close(by_tile(q, cache, tiled), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths", [[0], [300], [300, 300]])
def test_the_causal_kernel_on_a_gpu(lengths: list[int]) -> None:
    """BF16, heads of 128 in groups of 16, as in Nano; against FP32 of the same numbers."""
    config = get("nano")
    b, n, groups = len(lengths), 200, config.num_query_groups
    per_group = config.num_attention_heads // groups
    q = torch.randn(b, groups, per_group, n, 128, device="cuda").bfloat16()
    cache = torch.randn(b, 2, groups, lengths[0] + n + 3, 128, device="cuda").bfloat16()
    found = by_causal_kernel(q, cache, ForwardBatch(lengths, n, None, q.device))
    expected = one_by_one(q.float(), cache.float(), lengths)
    # The result and the weights are rounded to BF16 (eps 2^-7).
    assert (found.float() - expected).norm() <= 2.0**-7 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("lengths", [[300], [300, 41]])
def test_few_queries_on_a_gpu(lengths: list[int], n: int) -> None:
    """As above, also in rows of different lengths."""
    q = torch.randn(len(lengths), n, 2, 16, 128, device="cuda").bfloat16()
    cache = torch.randn(len(lengths), 2, 2, max(lengths) + n + 3, 128, device="cuda").bfloat16()
    found = attend(q, cache, ForwardBatch(lengths, n, None, q.device))
    expected = one_by_one(q.permute(0, 2, 3, 1, 4).float(), cache.float(), lengths)
    assert (found.float() - expected.reshape(found.shape)).norm() <= 2.0**-7 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_kernel_is_built_for_every_length() -> None:
    config = get("nano-tiny").but(kv_channels=128)
    read = {name: tensor.cuda() for name, tensor in tensors(config).items()}.__getitem__
    engine = Engine(Decode(config, read, torch.bfloat16, "cuda"))
    state, tokens = engine.new_state(), torch.arange(40, device="cuda")[None]
    with attention_kernels() as kernels:
        for n in (32, 1, 4):
            engine.forward(tokens[:, :n], state)
    assert kernels and not any("cudnn" in name for name in kernels)
