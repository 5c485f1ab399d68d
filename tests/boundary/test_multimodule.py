"""The communicator without a schedule: two receivers of a module, a chain, a single rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_nemotron3.boundary.coordinator import Coordinator
from megatron_nemotron3.boundary.edge import Edge
from megatron_nemotron3.boundary.feed import FeedStream, Microbatch, RowFeed
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
from megatron_nemotron3.proof.certify.ranks import run_distributed

AXES = {"s": 0, "b": 1, "h": 2}


def _communicator(texts: dict[str, str], topology: dict[str, list[str]], ndim: dict[str, int]) -> Any:
    grids = {}
    for name, text in texts.items():
        layout = Layout.parse(text)
        names = ["tp", "cp", "pp", "dp"]
        grids[name] = HyperCommGrid([layout.size_of(d) for d in names], names, layout.offset)
        grids[name].create_pg(["pp"])
        torch.distributed.barrier()
    config = ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    return BoundaryCommunicator(grids, topology, config, AXES, ndim)


def _two_consumers() -> dict[str, Any]:
    """Images on ranks 0 and 1 feed ranks 2 and 3."""
    communicator = _communicator(
        {"images": "dp=2", "language": "offset=2", "critic": "offset=3"},
        {"images": ["language", "critic"], "language": [], "critic": []},
        {"images": 2},
    )
    rank = torch.distributed.get_rank()
    if rank < 2:
        rows = torch.full((rank + 1, 3), float(rank))
        return communicator.send_forward_recv_backward({"images": rows})
    rows = communicator.recv_forward()["images"]
    assert rows[:, 0].tolist() == [0.0, 1.0, 1.0]
    communicator.send_backward({"images": torch.arange(9.0).view(3, 3) * 10 ** (rank - 2)})
    return {}


def _chain() -> None:
    """[rows, h] of rank 0 into two lanes, ranks 1 and 2; their [s, b, h] into rank 3; and back."""
    communicator = _communicator(
        {"images": "tp=1", "language": "dp=2,offset=1", "generator": "offset=3"},
        {"images": ["language"], "language": ["generator"], "generator": []},
        {"images": 2},
    )
    rank = torch.distributed.get_rank()
    rows = torch.arange(12.0).view(4, 3)
    whole = torch.arange(48.0).view(2, 4, 6)  # four samples, two of each lane
    for _ in range(2):
        if rank == 0:
            back = communicator.send_forward_recv_backward({"images": rows})
            assert torch.equal(back["images"], -rows)
        elif rank == 3:
            found = communicator.recv_forward()["language"]
            assert torch.equal(found, whole)
            communicator.send_backward({"language": whole * 2})
        else:
            mine = slice(2 * rank - 2, 2 * rank)
            assert torch.equal(communicator.recv_forward()["images"], rows[mine])
            back = communicator.send_forward_recv_backward({"language": whole[:, mine]})
            assert torch.equal(back["language"], whole[:, mine] * 2)
            communicator.send_backward({"images": -rows[mine]})
    communicator.close()


def _both() -> dict[str, Any]:
    _chain()
    return _two_consumers()


def test_chain_and_two_consumers():
    """Every module gets its rows; the gradients of two receivers are added."""
    found = run_distributed(_both, 4, timeout=60)
    total = torch.arange(9.0).view(3, 3) * 11
    assert torch.equal(found[0]["images"], total[:1])
    assert torch.equal(found[1]["images"], total[1:])


def _by_itself(device: str) -> None:
    """Source and destination on one rank: what an exchange costs the host."""
    coordinator = Coordinator(
        [Edge(name, "language", Layout.of(), Layout.of()) for name in ("images", "audio")]
    )
    assert coordinator.groups.device.type == device
    batches = [{"images": [3, n], "audio": [n, 2]} for n in (1, 0, 4)]
    coordinator.training = FeedStream(RowFeed(batches, Microbatch.of))
    for number, batch in enumerate(batches):
        rows = {
            name: torch.randn(sum(counts), 8, device=device, requires_grad=True)
            for name, counts in batch.items()
        }
        if device == "cuda" and number:
            torch.cuda.set_sync_debug_mode("error")
        try:
            inputs, _ = coordinator.run(rows, forward=True)
            gradients = {name: 2 * tensor.detach() for name, tensor in inputs.items()}
            _, back = coordinator.run(gradients=gradients, backward=True)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        for name, mine in rows.items():
            assert torch.equal(inputs[name], mine) and torch.equal(back[name], 2 * mine)
    coordinator.close()


def test_one_rank_by_itself():
    """A rank that is on both sides copies."""
    run_distributed(_by_itself, 1, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_synchronization_on_a_gpu(tmp_path):
    """From the second microbatch on the host does not wait."""
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        _by_itself("cuda")
    finally:
        torch.distributed.destroy_process_group()
