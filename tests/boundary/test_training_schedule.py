"""Encoders on all ranks, language model in stages: the step equals that of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_nemotron3.proof.certify.ranks import run_distributed

SAMPLES, LENGTH, MICROBATCHES = 4, 16, 3
PATTERN = "M*|M*"


def loss_of(mask: Any) -> Any:
    def loss(output: Any) -> Any:
        total = (output.float() * mask).sum()
        return total, mask.sum().int(), {"loss": total.detach().clone()}

    return loss


def forward_step(batches: Any, model: Any) -> Any:
    output, mask = model(**next(batches))
    return output, loss_of(mask)


def batches_of(encoder_lane: tuple[int, int], language_lane: tuple[int, int]) -> list[dict[str, Any]]:
    """Keyword arguments of the model's forward, for each microbatch."""
    from tests.support import boundary_batches as batches

    made = []
    for number in range(MICROBATCHES):
        ids = batches.tokens(SAMPLES, LENGTH, seed=number)
        mine = batches.share(ids, *language_lane)
        made.append(
            {
                "input_ids": mine,
                "labels": mine.roll(-1, 1) % 200,
                "loss_mask": (mine < 200).float(),
                "modality_inputs": batches.inputs(ids, *encoder_lane),
            }
        )
    return made


def descriptions() -> list[Any]:
    from megatron_nemotron3.boundary.feed import describe_ids
    from tests.support import boundary_batches as batches
    from tests.support import boundary_omni as omni

    return [describe_ids(batches.tokens(SAMPLES, LENGTH, seed=n), omni.SPECIAL) for n in range(MICROBATCHES)]


def whole() -> tuple[dict[str, Any], dict[str, Any], float]:
    """(parameters, gradients, loss) of a step of upstream's model in one process."""
    from megatron.core.models.mimo.model.base import MimoModel

    from tests.support import boundary_omni as omni

    grid = omni.grid()
    model = omni.build(
        MimoModel, dict.fromkeys(("vision", "audio", "language"), grid), pattern="M*M*", on_grids=False
    )
    total = 0.0
    for batch in batches_of((0, 1), (0, 1)):
        output, mask = model(position_ids=None, attention_mask=None, **batch)
        loss = (output.float() * mask).sum()
        loss.backward()
        total += loss.item()
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return parameters, grads, total


def staged(
    pp: int, dp: int, parameters: dict[str, Any], frozen: bool, feed: bool
) -> tuple[dict[str, Any], float]:
    """(gradients summed over data lanes, by the single process's names; loss) of this rank."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_nemotron3.boundary.feed import RowFeed
    from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
    from megatron_nemotron3.boundary.training import forward_backward_colocated
    from tests.support import boundary_omni as omni

    rank, world = dist.get_rank(), dist.get_world_size()
    grids = {"vision": omni.grid(dp=world), "audio": omni.grid(dp=world), "language": omni.grid(pp=pp, dp=dp)}
    model = omni.build(BoundaryMimoModel, grids, pattern=PATTERN)
    pg = omni.groups(grids["language"])
    names = {name: global_name(name, 2 * pg.pp.rank()) for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(parameters[names[name]]))
    if frozen:
        model.modality_submodules["vision"].requires_grad_(False)
    finalized: list[bool] = []
    model.config.finalize_model_grads_func = lambda *args, **kwargs: finalized.append(
        all(p.grad is not None for p in model.modality_submodules["audio"].parameters())
    )

    def run(forward_only: bool) -> float:
        batches: Any = iter(batches_of((rank, world), (pg.dp.rank(), dp)))
        if feed:
            known = iter(descriptions())
            model.feed = batches = RowFeed(batches, lambda batch: next(known))
        result = forward_backward_colocated(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=MICROBATCHES,
            forward_only=forward_only,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES // dp,
            p2p_communicator=P2PCommunicator(pp_group=pg.pp, config=model.config),
            pg_collection=pg,
        )
        return sum(float(part["loss"]) for part in result)

    with torch.no_grad():
        evaluated = run(forward_only=True)
    assert not finalized
    losses = run(forward_only=False)
    assert evaluated == losses
    assert finalized == [True]  # once, when the encoders have their gradients
    grads = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad, group=None if "modality" in name else pg.dp)
        grads[names[name]] = p.grad.numpy()
    loss = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(loss)
    return grads, loss.item()


def global_name(name: str, offset: int) -> str:
    """Of a parameter of a stage whose first layer is `offset`."""
    head, layers, rest = name.partition("decoder.layers.")
    number, dot, last = rest.partition(".")
    return head + layers + str(int(number) + offset) + dot + last if layers else name


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, Any], dict[str, Any], float]:
    return run_distributed(whole, 1)[0]


@pytest.mark.parametrize(
    ("world", "pp", "frozen", "feed"),
    [
        (2, 2, False, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((2, 2, True, False), (4, 2, False, True), (4, 2, False, False))
        ),
    ],
)
def test_a_step_equals_that_of_a_single_process(
    single: tuple[dict[str, Any], dict[str, Any], float], world: int, pp: int, frozen: bool, feed: bool
) -> None:
    parameters, wanted, loss = single
    seen = set()
    for grads, total in run_distributed(staged, world, pp, world // pp, parameters, frozen, feed):
        assert total == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            scale = abs(wanted[name]).max()
            assert abs(grad - wanted[name]).max() <= 1e-5 * scale, name
        seen |= set(grads)
    assert seen == {name for name in wanted if not (frozen and "vision" in name)}
