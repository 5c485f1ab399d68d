"""An optimizer step of encoder and language model with any data-parallel sizes equals that of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_nemotron3.boundary.agreement import SPLIT_SIZES
from megatron_nemotron3.boundary.bridge import Bridge
from megatron_nemotron3.boundary.training import finalize_model_grads, gradient_scale
from megatron_nemotron3.proof.certify.ranks import run_distributed

SAMPLES, MICROBATCHES, LENGTH, WIDTH, WORDS = 8, 2, 7, 8, 11
#: DP of the encoder, DP of the language model.
SIZES: list[tuple[int, int]] = [(1, 1), (4, 1), (1, 4), (2, 4)]
#: calculate_per_token_loss of the language model, of the encoder.
CONVENTIONS = [(True, True), (False, False), (True, False), (False, True)]
#: A step so large that a wrong factor shows: plain gradient descent, since Adam forgives one.
LR = 0.5


def _batch() -> dict[str, Any]:
    """Ragged: pictures per sample (some have none) and tokens that count (one has none)."""
    random = torch.Generator().manual_seed(5)
    total = SAMPLES * MICROBATCHES
    rows = [0, 3, 1, 2, 5, 0, 1, 4] * MICROBATCHES
    counted = [1, 6, 2, 0, 7, 3, 1, 5, 4, 4, 7, 1, 2, 6, 3, 5]
    return {
        "pictures": [torch.randn(n, 5, generator=random) for n in rows],
        "words": torch.randint(WORDS, (total, LENGTH), generator=random),
        "labels": torch.randint(WORDS, (total, LENGTH), generator=random),
        "mask": torch.stack([(torch.arange(LENGTH) < n).float() for n in counted]),
    }


def _modules(per_token: tuple[bool, bool]) -> tuple[Any, Any]:
    """The language model and the encoder, of the same weights everywhere."""

    def config(sums: bool) -> Any:
        return TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=sums
        )

    class Encoder(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config(per_token[1]))
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.Linear(16, WIDTH)
            )

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return self.layers(pictures)

    class Language(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config(per_token[0]))
            self.embedding = torch.nn.Embedding(WORDS, WIDTH)
            self.output = torch.nn.Linear(WIDTH, WORDS)

        def forward(self, words: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """Losses [s] of one sample."""
            seen = self.embedding(words) + rows.sum(0)
            return torch.nn.functional.cross_entropy(
                self.output(seen.cumsum(0).tanh()), labels, reduction="none"
            )

    torch.manual_seed(0)
    return Language(), Encoder()


def _loss(language: Any, batch: dict[str, Any], samples: Any, rows: Any, per_token: bool) -> Any:
    """(loss as the schedule differentiates it, tokens) of some samples of one microbatch."""
    total, tokens = torch.zeros(()), torch.zeros((), dtype=torch.int)
    for sample, mine in zip(samples, rows, strict=True):
        losses = language(batch["words"][sample], mine, batch["labels"][sample])
        total = total + (losses * batch["mask"][sample]).sum()
        tokens += int(batch["mask"][sample].sum())
    if not per_token:
        total = total / tokens.clamp(min=1) / MICROBATCHES
    return total, tokens


def _expected(lanes: int, per_token: tuple[bool, bool]) -> dict[str, torch.Tensor]:
    """Weights after the step in one process. A mean loss is the mean over lanes and microbatches of means."""
    language, encoder = _modules(per_token)
    batch = _batch()
    share = SAMPLES // lanes
    objective, tokens = torch.zeros(()), 0
    for start in range(0, SAMPLES * MICROBATCHES, share):
        samples = range(start, start + share)
        rows = [encoder(batch["pictures"][sample]) for sample in samples]
        loss, counted = _loss(language, batch, samples, rows, per_token[0])
        objective, tokens = objective + loss, tokens + int(counted)
    (objective / (tokens if per_token[0] else lanes)).backward()
    with torch.no_grad():
        for module in (language, encoder):
            for parameter in module.parameters():
                parameter -= LR * parameter.grad
    return _weights(language, encoder)


def _weights(*modules: Any) -> dict[str, torch.Tensor]:
    return {
        f"{type(module).__name__}.{name}": p.detach().clone()
        for module in modules
        for name, p in module.named_parameters()
    }


def _steps() -> list[tuple[tuple[int, int], tuple[bool, bool], dict[str, torch.Tensor]]]:
    """Every pair of sizes and conventions, in one world of 8: encoder on the first ranks, the language model
    on the next ones, the rest looks on. -> (sizes, conventions, weights after the step of this rank)"""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    spans = sorted({span for e, d in SIZES for span in ((0, e), (e, e + d), (0, e + d))})
    groups = {span: dist.new_group(list(range(*span))) for span in spans}
    bridges = {sizes: Bridge(*_grids(*sizes).values(), tensor_ndim=2) for sizes in SIZES}
    return [
        (sizes, per_token, _step(sizes, per_token, bridges[sizes], alone, groups))
        for sizes in SIZES
        if dist.get_rank() < sum(sizes)
        for per_token in CONVENTIONS
    ]


def _grids(e: int, d: int) -> dict[str, HyperCommGrid]:
    names = ["tp", "cp", "pp", "dp"]
    return {
        "vision": HyperCommGrid([1, 1, 1, e], names, rank_offset=0),
        "language": HyperCommGrid([1, 1, 1, d], names, rank_offset=e),
    }


def _step(
    sizes: tuple[int, int], per_token: tuple[bool, bool], bridge: Bridge, alone: Any, groups: Any
) -> Any:
    e, d = sizes
    is_encoder = dist.get_rank() < e
    world = groups[0, e + d]
    name, dp = ("vision", groups[0, e]) if is_encoder else ("language", groups[e, e + d])
    mine = ProcessGroupCollection(
        **dict.fromkeys(("tp", "cp", "pp", "ep", "tp_ep", "expt_tp", "tp_ep_pp", "mp", "tp_cp"), alone),
        **dict.fromkeys(("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "tp_dp_cp"), dp),
        embd=None,
        pos_embd=None,
    )
    language, encoder = _modules(per_token)
    module = encoder if is_encoder else language
    wrapped = DistributedDataParallel(
        module.config, DistributedDataParallelConfig(), module, pg_collection=mine
    )
    mimo = SimpleNamespace(
        language_model=None if is_encoder else wrapped,
        modality_submodules={"vision": wrapped} if is_encoder else {},
        mimo_config=SimpleNamespace(module_to_grid_map=_grids(e, d)),
    )
    wrapped.zero_grad_buffer()
    batch, tokens = _batch(), torch.zeros((), dtype=torch.int)
    for first in range(0, SAMPLES * MICROBATCHES, SAMPLES):
        tokens += _microbatch(wrapped, bridge, batch, first, per_token)
    finalize_model_grads(
        [mimo],  # type: ignore[list-item]
        tokens if per_token[0] else None,
        MultiModuleProcessGroupCollection(
            module_pgs={name: mine}, language_model_module_name=None if is_encoder else "language"
        ),
        world=world,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= LR * parameter.main_grad
    return _weights(module)


def _microbatch(module: Any, bridge: Bridge, batch: Any, first: int, per_token: tuple[bool, bool]) -> Any:
    """Forward and backward of this rank's samples; the tokens that count."""
    edge, rank = bridge.edge, dist.get_rank()
    layout = edge.source if rank in edge.source.ranks else edge.destination
    share = SAMPLES // layout.dp
    start = first + layout.lane_of(rank) * share
    samples = range(start, start + share)
    counts = [len(batch["pictures"][sample]) for sample in samples]
    if layout is edge.source:
        rows = torch.cat([module(batch["pictures"][sample]) for sample in samples])
        setattr(rows, SPLIT_SIZES, counts)
        rows.backward(bridge.send_forward_recv_backward(rows))
        return 0
    received = bridge.recv_forward()
    loss, tokens = _loss(module, batch, samples, received.split(counts), per_token[0])
    loss.backward()
    bridge.send_backward(received.grad)
    return tokens


def test_one_step_equals_that_of_a_single_process() -> None:
    """Largest relative difference of a weight over 4 pairs of sizes and 4 pairs of conventions."""
    expected = {(d, c): _expected(d, c) for d in (1, 2, 4) for c in CONVENTIONS}
    seen = set()
    for rank, steps in enumerate(run_distributed(_steps, 8)):
        for (e, d), conventions, weights in steps:
            for name, weight in weights.items():
                reference = expected[d, conventions][name]
                difference = ((weight - reference).norm() / reference.norm()).item()
                assert difference < 2e-6, (
                    f"encoder DP {e}, language DP {d}, {conventions}, rank {rank}: {name}"
                )
                seen.add((e, d, conventions, name.split(".")[0]))
    assert len(seen) == len(SIZES) * len(CONVENTIONS) * 2


@pytest.mark.parametrize("convention", [(True, True), (False, False)])
def test_the_step_is_one_that_a_wrong_factor_changes(convention: tuple[bool, bool]) -> None:
    """Guards the test above: after the step encoder weights differ by far more than its tolerance."""
    language, encoder = _modules(convention)
    before = _weights(language, encoder)
    after = _expected(2, convention)
    for name, weight in before.items():
        assert ((after[name] - weight).norm() / weight.norm()).item() > 1e-4, name


@pytest.mark.parametrize(
    ("module_per_token", "tokens", "factor"),
    [(True, 50, 1 / 50), (False, 50, 4 / 50), (True, None, 1 / 2), (False, None, 4 / 2), (True, 0, 1.0)],
)
def test_factors(module_per_token: bool, tokens: int | None, factor: float) -> None:
    counted = None if tokens is None else torch.tensor(tokens)
    found = gradient_scale(
        language_ranks=2, module_ranks=4, module_per_token=module_per_token, tokens=counted
    )
    assert float(found) == pytest.approx(factor)


def test_a_schedule_without_the_modules_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="give groups="):
        finalize_model_grads([torch.nn.Linear(1, 1)])
