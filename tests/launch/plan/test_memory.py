"""Microbatches in flight, peaks and buffers equal what Megatron's schedules hold."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_nemotron3.launch import ParallelLayout, published_layout
from megatron_nemotron3.launch.plan.activation_forms import RankShare
from megatron_nemotron3.launch.plan.memory import buffers, in_flight, memory
from megatron_nemotron3.launch.plan.options import NONE, Recompute
from megatron_nemotron3.launch.plan.state import (
    state,
)
from megatron_nemotron3.models import LoRASettings, Nemotron3Config, get, tiny
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.world import TrainingRun
from tests.parallel.case import Case
from tests.support.exact_state import exact_state
from tests.support.launches import launch

SUPER = tiny(get("super"))
TOLERANCE = 0.05


def upstream_moments(pp: int, vpp: int, rank: int, microbatches: int) -> list[tuple[int, ...]]:
    """What a rank holds after each forward pass, by Megatron's own numbers and table."""
    from megatron.core.pipeline_parallel import schedules

    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
    )
    _, _, first, _ = schedules.get_pp_rank_microbatches(microbatches, vpp, pp, p2p_communicator=communicator)
    order = [chunk for _, chunk in schedules.get_schedule_table(microbatches, vpp, pp)]
    held, found = Counter[int](), []
    for step, chunk in enumerate(order):
        held[chunk] += 1
        found.append(tuple(held[index] for index in range(vpp)))
        if step >= first:
            held[vpp - 1 - order[step - first]] -= 1
    return found


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), *product([2, 3, 4, 8], [1, 2, 3, 7])])
def test_in_flight_as_upstream_schedules(pp: int, vpp: int) -> None:
    for rank in range(pp):
        for groups in (1, 2, 3, 5, 20):
            microbatches = pp * groups if vpp > 1 else groups
            moments = upstream_moments(pp, vpp, rank, microbatches)
            layout = ParallelLayout(pp=pp, vpp=vpp)
            assert sum(in_flight(layout, rank, microbatches)) == max(map(sum, moments))
            for weights in (
                [1.0] * vpp,
                [float(n + 1) for n in range(vpp)],
                [1.0 / (n + 1) for n in range(vpp)],
            ):
                chosen = in_flight(layout, rank, microbatches, weights)
                assert chosen in moments
                worst = max(sum(n * w for n, w in zip(held, weights, strict=True)) for held in moments)
                assert sum(n * w for n, w in zip(chosen, weights, strict=True)) == pytest.approx(worst)


def test_in_flight_refuses_what_is_not_there() -> None:
    for rank, microbatches in ((2, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="use 0 to 1"):
            in_flight(ParallelLayout(pp=2), rank, microbatches)


class Live:
    """Bytes of the storages that autograd holds now, and the most so far."""

    def __init__(self, skipped: set[int]) -> None:
        self.skipped, self.now, self.peak = skipped, 0, 0
        self.holders: Counter[int] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        import torch

        live = self

        class Held:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor, storage = tensor, tensor.untyped_storage()
                self.place, self.size = storage.data_ptr(), storage.nbytes()
                live.holders[self.place] += 1
                if live.holders[self.place] == 1:
                    live.now += self.size
                    live.peak = max(live.peak, live.now)

            def __del__(self) -> None:
                live.holders[self.place] -= 1
                if not live.holders[self.place]:
                    live.now -= self.size

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if tensor.untyped_storage().data_ptr() in live.skipped else Held(tensor)

        def unpack(kept: Any) -> torch.Tensor:
            return kept.tensor if isinstance(kept, Held) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def step(case: Case) -> dict[str, Any]:
    """Of this rank: bytes autograd held at most, Megatron's gather buffer, bytes of messages."""
    import torch
    from megatron.core import parallel_state as groups

    run = TrainingRun(case, None)
    tensors = [t for chunk in run.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    live = Live({t.untyped_storage().data_ptr() for t in tensors})
    exchanged, sent = [], [0]
    exchange, message = torch.distributed.all_to_all_single, torch.distributed.P2POp

    def exchanging(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dim() == 2:  # rows, not their probabilities
            exchanged.append(output.nbytes + input.nbytes)
        return exchange(output, input, *args, **kwargs)

    def sending(op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            sent.append(tensor.nbytes)
        return message(op, tensor, *args, **kwargs)

    with (
        mock.patch("torch.distributed.all_to_all_single", exchanging),
        mock.patch("torch.distributed.P2POp", sending),
        live.counting(),
    ):
        run.forward_backward(0)
    dispatchers = [
        m.token_dispatcher for c in run.chunks for m in c.modules() if hasattr(m, "token_dispatcher")
    ]
    gathered = groups.get_global_memory_buffer().buffer.values()
    return {
        "pp_rank": groups.get_pipeline_model_parallel_rank(),
        "peak": live.peak,
        "left": live.now,
        "sequence gather": sum(buffer.nbytes for buffer in gathered),
        "routing": sum(d.probs.nbytes + d.routing_map.nbytes for d in dispatchers),
        "exchanged": exchanged,
        "message": max(sent),
    }


def stepped(
    layout: ParallelLayout, recompute: Recompute, sequences: int, **fields: Any
) -> list[dict[str, Any]]:
    """`step` on every rank of a layout."""
    fields = {"config": SUPER, "seq_length": 128, "precision": "bf16", **fields}
    case = Case(layout=layout, extra=tuple(recompute.flags()), sequences=sequences, mask="none", **fields)
    return run_distributed(step, layout.world_size, case, apart=True, timeout=200)


PEAKS = [
    pytest.param(ParallelLayout(), Recompute("selective", ("moe",)), 1, id="one-moe", marks=pytest.mark.full),
    pytest.param(ParallelLayout(pp=2), Recompute("full"), 4, id="pp2-full"),
    pytest.param(ParallelLayout(pp=2, vpp=2), NONE, 6, id="pp2-vpp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "recompute", "microbatches"), PEAKS)
def test_peak_of_a_step(layout: ParallelLayout, recompute: Recompute, microbatches: int) -> None:
    for found in stepped(layout, recompute, microbatches):
        what = launch(SUPER, layout, seq_length=128, microbatches=microbatches, recompute=recompute)
        form = memory(what, found["pp_rank"])
        assert found["left"] < 0.01 * found["peak"], "something is held after the step"
        assert sum(form.activations.values()) + form.recompute_peak == pytest.approx(
            found["peak"], rel=TOLERANCE
        ), found


def everything(case: Case) -> int:
    """Bytes of all tensors at the worst moment of a step, parameters and gradient buffers left out."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    run = TrainingRun(case, None)
    standing = [t for chunk in run.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    standing += [
        buffer.grad_data
        for chunk in run.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    skipped = {t.untyped_storage().data_ptr() for t in standing}
    live: dict[int, int] = {}
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            result = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    place, size = storage.data_ptr(), storage.nbytes()
                    if size and place not in live and place not in skipped:
                        live[place] = size
                        weakref.finalize(storage, live.pop, place, None)
                        most = max(most, sum(live.values()))
            return result

    with Watch():
        run.forward_backward(0)
    return most


NANO = get("nano").but(pattern="M*E", num_moe_experts=8, vocab_size=1024)
#: Fewer for the wide model: without BF16 instructions (AVX2) 512 tokens of it take five minutes.
TOKENS = {SUPER.hidden_size: 512, NANO.hidden_size: 128}
WHOLE = [
    # The worst moment is at the loss; then in the experts' backward, where a CPU has blocks of FP32 besides.
    pytest.param(SUPER.but(vocab_size=8192), NONE, None, TOLERANCE, id="loss", marks=pytest.mark.full),
    pytest.param(NANO, NONE, None, 0.1, id="experts", marks=pytest.mark.full),
    pytest.param(NANO, Recompute("full"), None, 0.1, id="experts-full", marks=pytest.mark.full),
    # Without gradients of all experts that of the scan would be the worst, by its blocks of FP32.
    pytest.param(SUPER.but(vocab_size=8192), NONE, "dim=16", TOLERANCE, id="lora", marks=pytest.mark.full),
    pytest.param(NANO.but(pattern="*E"), NONE, "dim=16", 0.1, id="lora-experts", marks=pytest.mark.full),
    pytest.param(
        NANO.but(pattern="*E"), NONE, "dim=16,targets=linear_qkv", 0.1, id="lora-qkv", marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize(("config", "recompute", "lora", "tolerance"), WHOLE)
def test_all_tensors_of_a_step(
    config: Nemotron3Config, recompute: Recompute, lora: str | None, tolerance: float
) -> None:
    tokens = TOKENS[config.hidden_size]
    case = Case(
        config=config,
        extra=tuple(recompute.flags()),
        # gloo's reduce-scatter makes a copy of all gradients
        without=("--use-distributed-optimizer",),
        precision="bf16",
        seq_length=tokens,
        sequences=1,
        mask="none",
        lora=lora,
    )
    (found,) = run_distributed(everything, 1, case, apart=True, timeout=280)
    what = launch(config, seq_length=tokens, recompute=recompute)
    adapters = None if lora is None else LoRASettings.parse(lora)
    form = memory(what, share=RankShare.of(what, lora=adapters))
    assert sum(form.activations.values()) + form.recompute_peak + form.buffers == pytest.approx(
        found, rel=tolerance
    )


def expected_buffers(layout: ParallelLayout, pp_rank: int = 0) -> dict[str, int]:
    what = launch(SUPER, layout, seq_length=128)
    return buffers(what, RankShare.of(what), pp_rank)


def test_buffers_of_tensor_and_expert_ranks() -> None:
    layout = ParallelLayout(tp=2, ep=2)
    form, ranks = expected_buffers(layout), stepped(layout, NONE, 1)
    for found in ranks:
        assert found["sequence gather"] == form["sequence gather"]
        assert found["routing"] == form["routing"]
    calls = list(zip(*(found["exchanged"] for found in ranks), strict=True))
    layers = SUPER.pattern.count("E") + SUPER.mtp_num_layers
    assert len(calls) == 4 * layers  # to the experts and back, and both backward
    for call in calls:  # routing is not balanced, their sum is known
        assert sum(call) == layout.world_size * form["expert exchange"]


@pytest.mark.full
def test_messages_of_a_pipeline() -> None:
    layout = ParallelLayout(pp=2, tp=2)
    for found in stepped(layout, NONE, 2):
        assert 2 * found["message"] == expected_buffers(layout, found["pp_rank"])["pipeline"]


@pytest.mark.parametrize("name", ["super", "ultra", "puzzle"])
def test_state_is_near_the_exact_one(name: str) -> None:
    config = get(name)
    published = published_layout(config)
    for layout in (
        *([published] if published else []),
        ParallelLayout(tp=2, pp=4, ep=4, dp=8),
        ParallelLayout(pp=2, vpp=2, dp=2, cp=2),
    ):
        for pp_rank in range(layout.pp):
            found = state(launch(config, layout), pp_rank)
            exact = exact_state(launch(config, layout), pp_rank=pp_rank)
            assert found.weights == pytest.approx(exact.weights, rel=1e-3)
            assert found.gradients == pytest.approx(exact.gradients, rel=1e-3)
            alone = launch(config, layout, distributed_optimizer=False)
            assert state(alone, pp_rank) == exact_state(alone, pp_rank=pp_rank)
            # A rank's share of the buffer has more or less padding in it; the mean of all ranks is meant.
            assert found.optimizer == pytest.approx(exact.optimizer, rel=1e-3)
