"""The host never waits for the device in a step: shown without a GPU, by tensors that have no values.

Each case runs forward and backward of a small model on a fake CUDA device (`tests/support/fake_cuda.py`), so
the code takes the paths of a GPU. What remains is named: each case of `WAITING` shows one place.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import triton  # noqa: F401  (imports of Triton's modules make tensors)

from megatron_nemotron3.layers import context_parallel, grouped
from megatron_nemotron3.layers.experts import GroupedExperts
from megatron_nemotron3.layers.lora import add_adapters
from megatron_nemotron3.models import get
from megatron_nemotron3.models.lora import LoRASettings
from megatron_nemotron3.precision import quantizer, scales, triton_grouped  # noqa: F401
from megatron_nemotron3.precision.settings import emulating, gpu_kernels, parse_emulation
from tests.support.fake_cuda import DEVICE, HostWait, backward, fake_cuda, first_of_two_ranks
from tests.support.gpu_world import world
from tests.support.model_mapping import megatron_model
from tests.support.models import FULL_RECOMPUTE

#: Widths that `grouped_mm` takes, head 64 and state 128 as published.
MODEL = get("super-tiny").but(
    dense_ffn_hidden_size=256,
    vocab_size=512,
    mamba_num_heads=16,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=2,
)
TOKENS = 200
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def packed(how: str | None) -> Any:
    """Borders of documents on the device; "padded": with padding between them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if how is None:
        return None
    borders, physical = (torch.empty(5, dtype=torch.int32, device=DEVICE) for _ in range(2))
    given: dict[str, Any] = {"cu_seqlens_q": borders, "cu_seqlens_kv": borders}
    if how == "padded":
        given |= {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS, **given)


def step(
    pattern: str,
    how: str | None = None,
    *,
    kernels: bool | None = None,
    mtp: bool = False,
    groups: Any = None,
    before: Any = None,
    change: Any = lambda model: None,
    **changes: Any,
) -> set[str]:
    """Forward and backward of a model; the names of the Triton kernels that were launched.

    Args:
        kernels: True for ours, None for those of libraries, False for none.
        groups: context manager of Megatron's groups; None for a single rank.
        change: called with the model that was built.
        before: called on the fake device before the step.
    """
    model = MODEL if mtp else MODEL.but(mtp_pattern=None, mtp_num_layers=0)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "bf16": True, **changes}

    def build() -> Any:
        built = megatron_model(model.but(pattern=pattern), **options).train()
        change(built)
        return built

    with groups or world("cpu"), gpu_kernels(kernels), fake_cuda(build) as (ours, device):
        if before is not None:
            before()
        tokens = torch.empty(1, TOKENS + 1, dtype=torch.long, device=DEVICE)
        positions = torch.arange(TOKENS, device=DEVICE)[None]
        inputs: dict[str, Any] = {"labels": tokens[:, 1:].contiguous()}
        if how is not None:
            inputs |= {"packed_seq_params": packed(how), "loss_mask": torch.ones(1, TOKENS, device=DEVICE)}
        backward(ours(tokens[:, :-1], positions, None, **inputs).mean())
        assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)
        return set(device.launched)


@pytest.mark.parametrize("how", [None, "packed", "padded"])
def test_layers_of_all_kinds(how: str | None) -> None:
    """torch's own kernels take the counts of experts and the borders of documents."""
    assert step("M*-E", how) == set()


def test_experts_from_the_last_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they lie in DDP's buffer."""
    asked = []

    def reverse(self: Any, possible: bool) -> bool:
        asked.append(possible)
        self.reversed = possible
        return possible

    monkeypatch.setattr(GroupedExperts, "reverse", reverse)
    assert step("E") == set()
    assert asked == [True]


def test_mtp_reads_the_borders_of_a_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's shift cuts at them on the host: ids, positions, labels and mask, of every depth."""
    read: list[Any] = []

    def count(borders: Any) -> Any:
        read.append(borders)
        return [0, 50, 100, 150, TOKENS]  # a tensor's values would be unknown here

    monkeypatch.setattr(context_parallel, "_read", count)
    assert step("ME", "padded", mtp=True) == set()
    assert len(read) == 1


SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp", "moe_act", "shared_experts"],
}


@pytest.mark.parametrize("changes", [FULL_RECOMPUTE, SELECTIVE], ids=["full", "selective"])
def test_recomputed(changes: dict[str, Any]) -> None:
    assert step("ME", "packed", **changes) == set()


def test_adapters() -> None:
    """LoRA on experts: each projection is a product of its own."""

    def adapt(model: Any) -> None:
        add_adapters(model, LoRASettings(targets=("*.experts.linear_fc1", "*.experts.linear_fc2"), dim=8))

    assert step("E", change=adapt) == set()


def test_plain_torch_waits_only_for_what_it_cuts() -> None:
    """Without kernels; packs of M too."""
    assert step("M-", "padded", kernels=False) == set()
    assert step("*", kernels=False) == set()


SHARED = {"sequence_parallel": True, "tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    "layout, changes",
    [
        ({"context_parallel_size": 2}, {"context_parallel_size": 2}),
        ({"tensor_model_parallel_size": 2}, SHARED),
    ],
    ids=["CP2", "TP2 SP"],
)
def test_layouts(layout: dict[str, int], changes: dict[str, Any]) -> None:
    assert step("M*-", groups=first_of_two_ranks(**layout), **changes) == set()


def test_expert_parallel_ranks_wait_for_split_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange takes numbers of the host; the counts of experts and of pieces stay on the device."""
    from megatron.core.transformer.moe import token_dispatcher

    copied: list[int] = []
    waits: list[int] = []

    def copy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            copied.append(tensor.numel())
            return np.full(tensor.numel(), TOKENS * MODEL.moe_router_topk // tensor.numel())
        return tensor

    def before() -> None:
        monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", copy)
        # `fake_cuda` puts the original back, before monkeypatch could put back the one of `fake_cuda`.
        torch.cuda.Event.synchronize = lambda event: waits.append(1)  # type: ignore[assignment,method-assign]

    groups = first_of_two_ranks(expert_model_parallel_size=2)
    assert step("E", groups=groups, before=before, expert_model_parallel_size=2) == set()
    assert copied == [2, 2, 1] and len(waits) == 1  # split sizes of EP and of expert TP


#: What the host waits for: (pattern, packing, kernels, where).
WAITING: dict[str, tuple[str, str | None, bool | None, dict[str, Any], str]] = {
    "experts without grouped products": ("E", None, False, {}, "event"),
    "experts in FP32": ("E", None, None, {"params_dtype": torch.float32, "bf16": False}, "event"),
    "documents without flash attention": ("*", "packed", False, {}, "cuda to cpu"),
    "emulated experts without kernels": ("E", None, None, {"emulated": "nvfp4,every_layer=1"}, "event"),
}


@pytest.mark.parametrize("case", WAITING)
def test_what_waits_is_known(case: str) -> None:
    pattern, how, kernels, changes, where = WAITING[case]
    emulated = parse_emulation(changes.get("emulated", ""))
    changes = {name: value for name, value in changes.items() if name != "emulated"}
    with emulating(emulated), pytest.raises(HostWait, match=where):
        step(pattern, how, kernels=kernels, **changes)


@pytest.mark.parametrize("major, waits", [(8, True), (9, False), (10, False), (12, True)])
def test_grouped_products_where_torch_has_a_kernel(
    major: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other devices torch would copy the offsets to the host in each of its products."""
    monkeypatch.setattr(grouped, "_compute_capability", lambda device: (major, 0))
    with pytest.raises(HostWait, match="event") if waits else contextlib.nullcontext():
        step("E")


PARTLY = pytest.param("nvfp4,every_layer=1,wgrad=0,fprop=0", marks=pytest.mark.full)


@pytest.mark.parametrize("pattern", ["M*-", "E"])
@pytest.mark.parametrize("how", ["nvfp4,every_layer=1", PARTLY, "mxfp8"])
def test_emulated(pattern: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' products in Triton. The rotation's matrix is uploaded once a process, before. Whether a device
    takes compiled quantizers is tried once a process, too."""
    monkeypatch.setattr(quantizer, "_exact_on", lambda device: False)
    monkeypatch.setattr(scales, "hadamard_matrix", lambda device: torch.empty(16, 16, device=device))
    with emulating(parse_emulation(how)):
        launched = step(pattern, kernels=True)
    assert launched == ({"_rows_kernel", "_weight_kernel"} if pattern == "E" else set())


def test_waits_are_found() -> None:
    """The check itself: operations that wait on a GPU raise, those that do not pass."""
    waiting: dict[str, Any] = {
        "item": lambda t: t.sum().item(),
        "tolist": lambda t: t.tolist(),
        "truth": lambda t: bool(t.any()),
        "copy": lambda t: t.cpu(),
        "copy to": lambda t: torch.arange(3).to(DEVICE),
        "from a list": lambda t: torch.tensor([1, 2], device=DEVICE),
        "nonzero": lambda t: t.nonzero(),
        "mask": lambda t: t[t > 0],
        "assigned by a mask": lambda t: t.__setitem__(t > 0, t[:2]),
        "selected": lambda t: t.masked_select(t > 0),
        "unique": lambda t: t.unique(),
        "repeated": lambda t: t.repeat_interleave(t.long()),
        "equal": lambda t: torch.equal(t, t),
        "event": lambda t: torch.cuda.current_stream().record_event().synchronize(),
    }
    passing: dict[str, Any] = {
        "arithmetic": lambda t: (t + 1).sum(),
        "filled by a mask": lambda t: t.__setitem__(t > 0, 0.0),
        "copy that does not wait": lambda t: torch.arange(3).to(DEVICE, non_blocking=True),
        "repeated to a size": lambda t: t.repeat_interleave(t.long(), output_size=5),
        "index": lambda t: t[t.argsort()],
    }
    with fake_cuda(torch.nn.Module):
        for name, function in waiting.items():
            with pytest.raises(HostWait):
                function(torch.empty(6, device=DEVICE))
                raise AssertionError(name)
        for function in passing.values():
            function(torch.empty(6, device=DEVICE))
