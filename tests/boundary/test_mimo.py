"""`BoundaryMimoModel` beside upstream's `MimoModel` on the same weights: values, gradients, names, memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo.model.base import MimoModel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_nemotron3.boundary.decoder_input import RankShard
from megatron_nemotron3.boundary.feed import describe_ids
from megatron_nemotron3.boundary.groups import BoundaryError
from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support import boundary_batches as batches
from tests.support import boundary_omni as omni
from tests.support.boundary_reference import zigzag

LENGTH = 16


class Widest(TorchDispatchMode):
    """Rows of the largest tensor [.., hidden] that any operation makes, weights' shapes left out."""

    def __init__(self, hidden: int, but: set[torch.Size]) -> None:
        super().__init__()
        self.hidden, self.but, self.rows = hidden, but, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if (
                isinstance(t, torch.Tensor)
                and t.ndim
                and t.shape[-1] == self.hidden
                and t.shape not in self.but
            ):
                self.rows = max(self.rows, t.numel() // self.hidden)
        return out


def beside_upstream(tp: int, cp: int, sp: bool) -> dict[str, Any]:
    """Both models forward and backward on this rank, ours with a feed and without; what differs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lanes = world // (tp * cp)
    own = omni.grid(dp=world)
    grids = {"vision": own, "audio": own, "language": omni.grid(tp=tp, cp=cp, dp=lanes)}
    language = omni.groups(grids["language"])
    pattern = "M*E" if sp or tp == 1 else "M*"  # upstream: no experts with TP without sequence parallelism
    same = dict.fromkeys(grids, grids["language"])
    theirs = omni.build(MimoModel, same, pattern=pattern, sequence_parallel=sp, on_grids=False)
    ours = omni.build(BoundaryMimoModel, grids, pattern=pattern, sequence_parallel=sp)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.sharded_state_dict()) == list(theirs.sharded_state_dict())

    ids = batches.tokens(world * 2, LENGTH, seed=0)
    lane = language.dp.rank()
    mine = batches.share(ids, lane, lanes)
    common = {
        "position_ids": None,
        "attention_mask": None,
        "loss_mask": torch.rand(mine.shape),
        "labels": mine % 200,
    }
    wanted, wanted_mask = theirs(mine, modality_inputs=batches.inputs(ids, lane, lanes), **common)
    wanted.sum().backward()
    for name, a in theirs.named_parameters():
        if "modality" in name:
            # Theirs: replicas of each lane, with CP a part each. Ours: a lane for each rank.
            a.grad = torch.zeros_like(a) if a.grad is None else a.grad  # upstream skips it without input
            for group in (language.cp, language.dp):
                dist.all_reduce(a.grad, group=group)
    given = batches.inputs(ids, rank, world)
    errors = {}
    for known in (describe_ids(ids, omni.SPECIAL), None):
        ours.zero_grad()
        got, got_mask = ours(mine, modality_inputs=given, microbatch=known, **common)
        assert torch.equal(got, wanted) and torch.equal(got_mask, wanted_mask)
        got.sum().backward()
        for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
            if "modality" in name:
                assert b.grad is not None
                dist.all_reduce(b.grad)
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                error = float((a.grad - b.grad).abs().max() / a.grad.abs().max().clamp_min(1e-9))
                errors[name, known is None] = error
        weights = {p.shape for p in ours.parameters()}
        ours._microbatch = known
        with torch.no_grad():
            rows = ours.exchange_rows(given, known, mine)
            with Widest(omni.HIDDEN, weights) if known is not None else nullcontext() as seen:
                part = ours.decoder_input(mine, None, rows)
        share = mine.numel() // (cp * tp if sp else cp)
        assert part.shape == (share // len(mine), len(mine), omni.HIDDEN)
        if seen is not None:
            assert 0 < seen.rows <= share, "more than this rank's part of the sequence was built"
    return {"error": max(errors.values()), "absent": sum(part is None for part in given.values())}


@pytest.mark.parametrize(
    ("world", "tp", "cp", "sp"),
    [
        (4, 2, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((2, 2, 1, True), (2, 1, 2, False), (2, 1, 1, False), (2, 2, 1, False))
        ),
    ],
)
def test_values_and_gradients_are_upstreams(world: int, tp: int, cp: int, sp: bool) -> None:
    results = run_distributed(beside_upstream, world, tp, cp, sp)
    # Values are equal bit for bit; sums of weights' gradients are in another order.
    assert max(result["error"] for result in results) < 1e-6
    assert any(result["absent"] for result in results)  # some rank had no input for a modality


def check_packed() -> None:
    """Documents of a packed sequence, without TransformerEngine's library; by the feed and without."""
    rank = dist.get_rank()
    one_lane, alone = omni.grid(tp=2), omni.grid(dp=2)
    grids = {"vision": one_lane, "audio": one_lane, "language": omni.grid(cp=2)}
    model = omni.build(BoundaryMimoModel, grids, packed=True)
    single = omni.build(MimoModel, dict.fromkeys(grids, alone), on_grids=False)
    single.load_state_dict(model.state_dict())
    ids = batches.tokens(3, 24, seed=1)[1:2]
    cuts = [0, 8, 24]
    mine = [p for a, b in zip(cuts, cuts[1:], strict=False) for p in np.add(zigzag(b - a, 2, rank), a)]
    bounds = torch.tensor(cuts, dtype=torch.int32)
    packing = {f"cu_seqlens_{side}": bounds for side in ("q", "kv", "q_padded", "kv_padded")}
    packing |= {f"max_seqlen_{side}": torch.tensor(16, dtype=torch.int32) for side in ("q", "kv")}
    common = {"labels": ids % 200, "modality_inputs": batches.inputs(ids, 0, 1)}
    assert all(common["modality_inputs"].values())
    wanted, _ = single(ids, packing_kwargs=dict(packing), **common)
    wanted.sum().backward()
    whole = (ids < 200).float()
    for known in (describe_ids(ids, omni.SPECIAL, [cuts]), None):
        model.zero_grad()
        loss, mask = model(ids, loss_mask=whole, packing_kwargs=dict(packing), microbatch=known, **common)
        assert torch.equal(mask, whole[:, mine])
        torch.testing.assert_close(loss, wanted[:, mine], rtol=1e-5, atol=1e-6)
        loss.sum().backward()
        for (name, a), (_, b) in zip(single.named_parameters(), model.named_parameters(), strict=True):
            if "modality" not in name and b.grad is not None:  # encoders' gradients are whole on each rank
                dist.all_reduce(b.grad)
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.full
def test_packed_documents_equal_a_single_process() -> None:
    run_distributed(check_packed, 2)


def check_single() -> None:
    """No grids, no groups: as upstream; wrong counts are named; nothing on the way reads a device."""
    grids = dict.fromkeys(("vision", "audio", "language"), omni.grid())
    theirs = omni.build(MimoModel, grids, on_grids=False)
    ours = omni.build(BoundaryMimoModel, grids, on_grids=False)
    ours.load_state_dict(theirs.state_dict())
    ids = batches.tokens(3, LENGTH, seed=0)
    given = batches.inputs(ids, 0, 1)
    known = describe_ids(ids, omni.SPECIAL)
    wanted, _ = theirs(ids, labels=ids % 200, modality_inputs=given)
    for microbatch in (known, None):
        got, _ = ours(ids, labels=ids % 200, modality_inputs=given, microbatch=microbatch)
        assert torch.equal(got, wanted)
        fewer = {"vision": given["vision"], "audio": {"tiny": {"x": given["audio"]["tiny"]["x"][1:]}}}
        with pytest.raises(ValueError, match="positions of input_ids are for audio"):
            ours(ids, modality_inputs=fewer, microbatch=microbatch)
    with pytest.raises(ValueError, match="mark other positions"):
        ours(ids, modality_inputs=given, microbatch=describe_ids(ids.flip(1), omni.SPECIAL))
    # Tensors without data: what waits for the device would raise.
    ours.to("meta")
    rows = {
        n: torch.empty(int((ids == t).sum()), omni.HIDDEN, device="meta") for n, t in omni.SPECIAL.items()
    }
    ours._microbatch = known
    assert ours.decoder_input(ids.to("meta"), None, rows).shape == (LENGTH, 3, omni.HIDDEN)
    ours._shard = RankShard(cp=2, context_rank=1)
    mine = zigzag(LENGTH, 2, 1)
    rows = {n: r[: int((ids[:, mine] == omni.SPECIAL[n]).sum())] for n, r in rows.items()}
    assert ours.decoder_input(ids.to("meta"), None, rows).shape == (LENGTH // 2, 3, omni.HIDDEN)
    ours._microbatch = None
    with pytest.raises((RuntimeError, NotImplementedError)):  # without a feed the ids are read
        ours.decoder_input(ids.to("meta"), None, rows)


def test_one_process_and_no_waiting_for_the_device() -> None:
    run_distributed(check_single, 1)


def failing(kind: str) -> str:
    """The error on this rank where rank 1 of two lacks an input, or has too much of it."""
    rank, own = dist.get_rank(), omni.grid(dp=2)
    model = omni.build(BoundaryMimoModel, dict.fromkeys(("vision", "audio", "language"), own))
    ids = batches.tokens(4, LENGTH, seed=0)
    given = batches.inputs(ids, rank, 2)
    if rank == 1:
        given["vision"] = None
    known = describe_ids(ids, omni.SPECIAL) if kind == "feed" else None
    with pytest.raises(BoundaryError) as error:
        model(batches.share(ids, rank, 2), modality_inputs=given, microbatch=known)
    return str(error.value)


@pytest.mark.parametrize("kind", ["feed", pytest.param("header", marks=pytest.mark.full)])
def test_a_missing_input_is_an_error_everywhere(kind: str) -> None:
    """The rank without input says why, the other one where to look."""
    first, second = run_distributed(failing, 2, kind)
    assert "same samples" in second and ("same samples" in first or "failed or ended first" in first)


def refused_fsdp() -> str:
    """The error of an encoder in torch's FSDP, before any exchange."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    own = omni.grid(dp=2)
    model = omni.build(BoundaryMimoModel, dict.fromkeys(("vision", "audio", "language"), own))
    fully_shard(model.modality_submodules["vision"].encoders["tiny"], mesh=init_device_mesh("cpu", (2,)))
    ids = batches.tokens(4, LENGTH, seed=0)
    with pytest.raises(BoundaryError) as error:
        model(batches.share(ids, dist.get_rank(), 2), modality_inputs=batches.inputs(ids, dist.get_rank(), 2))
    return str(error.value)


def test_fsdp_is_refused_before_any_exchange() -> None:
    for said in run_distributed(refused_fsdp, 2):
        assert "module 'vision' is in FSDP" in said and "distributed optimizer" in said


def check_overlap() -> float:
    """Gradient sync that hooks start while backward runs: norm of a gradient, rank 1 having no input."""
    rank, own = dist.get_rank(), omni.grid(dp=2)
    grids = dict.fromkeys(("vision", "audio", "language"), own)
    model = omni.build(BoundaryMimoModel, grids)
    ids = batches.tokens(4, LENGTH, seed=0)
    ids[2:][ids[2:] == omni.SPECIAL["vision"]] = 7
    encoder = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=True),
        module=model.modality_submodules["vision"],
        pg_collection=omni.groups(own),
    )
    model.modality_submodules["vision"] = encoder
    given = batches.inputs(ids, rank, 2)
    assert (given["vision"] is None) == (rank == 1)
    known = describe_ids(ids, omni.SPECIAL)
    for _ in range(2):  # hooks learn in the first step which parameters have gradients
        encoder.zero_grad_buffer()
        loss, _ = model(batches.share(ids, rank, 2), modality_inputs=given, microbatch=known)
        loss.sum().backward()
        encoder.finish_grad_sync()
    return max(float(p.main_grad.norm()) for p in encoder.parameters())


@pytest.mark.full
def test_a_rank_without_input_takes_part_in_overlapped_gradient_sync() -> None:
    first, second = run_distributed(check_overlap, 2)
    assert first == second > 0
