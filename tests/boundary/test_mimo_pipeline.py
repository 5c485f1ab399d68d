"""`BoundaryMimoModel` on disjoint ranks with the stock 1F1B schedule equals one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.boundary import test_training_schedule as colocated

SAMPLES, LENGTH, MICROBATCHES = colocated.SAMPLES, colocated.LENGTH, colocated.MICROBATCHES


def disjoint(
    language: dict[str, int], parameters: dict[str, Any], feed: bool
) -> tuple[dict[str, Any], float]:
    """(gradients of one copy of this rank's module, by the single process's names; loss)."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

    from megatron_nemotron3.boundary.feed import RowFeed
    from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
    from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
    from tests.support import boundary_omni as omni

    rank = dist.get_rank()
    grids = {
        "vision": omni.grid(dp=2),
        "audio": omni.grid(offset=2),
        "language": omni.grid(offset=3, **language),
    }
    name = next(name for name, grid in grids.items() if grid.is_current_rank_in_grid())
    pg = omni.groups(grids[name])
    pattern = colocated.PATTERN if pg.pp.size() > 1 else "M*M*"
    model = omni.build(BoundaryMimoModel, grids, pattern=pattern, variable_seq_lengths=True)
    names = {n: colocated.global_name(n, 2 * pg.pp.rank()) for n, _ in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(torch.from_numpy(parameters[names[n]]))
    encoder_lane = (rank, 2) if name == "vision" else (0, 1)
    language_lane = (pg.dp.rank(), pg.dp.size()) if name == "language" else encoder_lane
    batches: Any = iter(colocated.batches_of(encoder_lane, language_lane))
    config = model.config
    config.variable_seq_lengths, config.calculate_per_token_loss = True, True
    config.pipeline_dtype = torch.float32
    communicator = BoundaryCommunicator(
        grids,
        {"vision": ["language"], "audio": ["language"], "language": []},
        config,
        dim_mapping={"s": 0, "b": 1, "h": 2},
        module_output_ndim={"vision": 2, "audio": 2},
        hidden_size=omni.HIDDEN,
    )
    if feed:
        known = iter(colocated.descriptions())
        model.feed = communicator.feed = batches = RowFeed(batches, lambda batch: next(known))
    result = forward_backward_pipelining_without_interleaving(
        forward_step_func=partial(step, name == "language"),
        data_iterator=batches,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        p2p_communicator=communicator,
        pg_collection=MultiModuleProcessGroupCollection(
            {name: pg}, "language" if name == "language" else None
        ),
    )
    grads = {}
    for n, p in model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=pg.dp_cp)
            grads[names[n]] = p.grad.numpy()
    loss = torch.tensor(sum(float(part["loss"]) for part in result), dtype=torch.float64)
    dist.all_reduce(loss)
    return grads, loss.item()


def step(language: bool, batches: Any, model: Any) -> Any:
    output, mask = model(**next(batches))
    return output, colocated.loss_of(mask) if language else None


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, Any], dict[str, Any], float]:
    return run_distributed(colocated.whole, 1)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("language", "feed"),
    [({"cp": 2}, True), ({"dp": 2}, True), ({"dp": 2}, False), ({"pp": 2}, False), ({"pp": 2}, True)],
    ids=str,
)
def test_a_step_equals_that_of_a_single_process(
    single: tuple[dict[str, Any], dict[str, Any], float], language: dict[str, int], feed: bool
) -> None:
    parameters, wanted, loss = single
    seen = set()
    for grads, total in run_distributed(disjoint, 5, language, parameters, feed):
        assert total == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            assert abs(grad - wanted[name]).max() <= 1e-5 * abs(wanted[name]).max(), name
        seen |= set(grads)
    assert seen == set(wanted)
