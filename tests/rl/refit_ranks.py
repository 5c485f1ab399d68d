"""A refit's stream through the weight-sync code of RL frameworks, on ranks of a gloo world."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.rl.frameworks import placeholder, skeleton, use
from tests.support.quantized_models import random_model
from tests.support.refit_packed import Packing, converted, packing_plan
from tests.support.refit_reference import trained


def _stream(case: Packing) -> tuple[Any, dict[str, Any]]:
    """The stream of this rank, and the tensors that it must have."""
    import torch.distributed as dist

    from megatron_nemotron3.inference.refit.execute import Refit

    plan = packing_plan(case)
    config, hf = plan.training.config, random_model(plan.training.config)
    source = trained(config, plan.training.layout, dist.get_rank(), hf)
    return Refit(plan).stream(source), converted(config, case, hf)


def _equal(found: dict[str, Any], expected: dict[str, Any]) -> int:
    import torch

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))), name
    return len(found)


def nemo_rl(case: Packing) -> int:
    """NeMo-RL's packed broadcast takes the stream; returns how many equal tensors its consumer unpacks."""
    folder = use("NEMO_RL_DIR")
    for name in ("nemo_rl", "nemo_rl.utils"):
        skeleton(folder, name)
    packed_tensor = importlib.import_module("nemo_rl.utils.packed_tensor")
    stream, expected = _stream(case)
    info, sent = {}, []

    def tensor_of(pair: tuple[str, Any]) -> Any:
        name, tensor = pair
        info[name] = tuple(tensor.shape), tensor.dtype
        return tensor

    group = mock.Mock(broadcast=lambda tensor, src: sent.append(tensor.clone()))
    with mock.patch.object(packed_tensor, "get_target_packed_tensor_size", lambda: 1 << 20):
        packed_tensor.packed_broadcast_producer(stream, group, 0, tensor_of)
        assert len(sent) > 1
        left, found = iter(sent), {}
        group = mock.Mock(broadcast=lambda tensor, src: tensor.copy_(next(left)))
        packed_tensor.packed_broadcast_consumer(
            iter(info.items()), group, 0, lambda pairs: found.update((n, t.clone()) for n, t in pairs)
        )
    return _equal(found, expected)


def verl(case: Packing, folder: Path) -> int:
    """verl's sender of buckets takes the stream; returns how many tensors its receiver has, all equal."""
    import torch
    import torch.distributed as dist

    checkout = use("VERL_DIR")
    for name in ("verl", "verl.utils", "verl.workers", "verl.workers.rollout"):
        skeleton(checkout, name)
    skeleton(checkout, "verl.workers.rollout.vllm_rollout")

    async def one_by_one(pairs: Any) -> Any:
        for pair in pairs:
            yield pair

    nothing = dict.fromkeys(("synchronize", "empty_cache", "ipc_collect"), lambda: None)
    placeholder(
        "verl.utils.device",
        get_device_id=lambda: 0,
        get_device_name=lambda: "cpu",
        get_torch_device=lambda: SimpleNamespace(**nothing),
        is_support_ipc=lambda: False,
    )
    placeholder("verl.workers.rollout.utils", ensure_async_iterator=one_by_one)
    transfer = importlib.import_module("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    stream, expected = _stream(case)
    socket = f"ipc://{folder}/{dist.get_rank()}-{os.getpid()}.sock"
    found: dict[str, Any] = {}
    buckets = []

    def receive() -> None:
        receiver = transfer.BucketedWeightReceiver(socket, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(
            lambda pairs, last: (buckets.append(last), found.update((n, t.clone()) for n, t in pairs))
        )

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sender = transfer.BucketedWeightSender(socket, bucket_size_mb=1, use_shm=True)
    asyncio.run(sender.async_send_weights(stream))
    thread.join(60)
    assert len(buckets) > 1 and buckets[-1]
    return _equal(found, expected)
