"""Isolated documents of pre-training data: what the script hands to the model, in any layout, is what the
definition computes of each document alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.common.switches import MONITOR
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.case import Batch
from megatron_nemotron3.proof.certify.compare import weights
from megatron_nemotron3.proof.certify.plain_step import Objective, define
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.proof.certify.world import global_batch, train
from tests.parallel.case import Case
from tests.parallel.layouts import CASES

OPTION = "--dataloader-inter-document-masking"
#: What the script reads of Megatron's arguments.
ARGUMENTS = SimpleNamespace(
    dataloader_inter_document_masking=True,
    sft=False,
    create_attention_mask_in_dataloader=False,
    micro_batch_size=1,
    mtp_num_layers=2,
)


@dataclass(frozen=True, kw_only=True)
class FromScript(Case):
    """Batches take the way of the script: a sample of GPTDataset, broadcast over TP, cut over CP."""

    def shares(self, batch: dict[str, Tensor]) -> Iterator[Batch]:
        from megatron_nemotron3.train.pretrain_script import get_batch, packed_of

        assert self.documents is not None
        layout, length = self.layout, sum(self.documents)
        ARGUMENTS.context_parallel_size, ARGUMENTS.pipeline_model_parallel_size = layout.cp, layout.pp
        ARGUMENTS.seq_length = length
        borders = torch.full((1, length + 1), length, dtype=torch.int32)
        borders[0, 1 : len(self.documents) + 1] = torch.tensor(list(accumulate(self.documents)))
        borders[0, 0] = 0
        longest = torch.tensor([max(self.documents)], dtype=torch.int32)
        drawn = get_batch(iter([{**batch, "cu_seqlens": borders, "max_seqlen": longest}]), None)
        share: Any = {name: drawn[name] for name in batch}
        yield {**share, "model_mask": share["loss_mask"]}, packed_of(drawn)


def set_arguments() -> None:
    """On a rank, before anything is built: the global arguments that a script has."""
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = ARGUMENTS
    os.environ[MONITOR] = "0"


#: The first token is what a sample begins with where the one before it ended before an end of document; the
#: last two are documents of one token. At CP 2 the second border is the edge of a chunk.
SUPER = FromScript(
    config=CASES["super"].config,
    documents=(1, 15, 17, 29, 1, 1),
    extra=(OPTION, "--moe-aux-loss-coeff", "0.01"),
    fault=set_arguments,
    steps=1,
)
ROWS = [
    (ParallelLayout(), True),
    (ParallelLayout(cp=2), False),
    (ParallelLayout(cp=4), True),
    (ParallelLayout(tp=2, pp=2), True),
    (ParallelLayout(tp=2, cp=2, pp=2), True),
    (ParallelLayout(cp=2, dp=2, ep=2), True),
]


#: Arguments of what is minimized; those of the optimizer are not used.
OBJECTIVE = {
    "calculate_per_token_loss": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "mtp_loss_scaling_factor": SUPER.config.mtp_loss_scaling_factor,
    **dict.fromkeys(("moe_z_loss_coeff", "decoupled_lr")),
    **dict.fromkeys(("moe_router_bias_update_rate", "lr", "weight_decay", "clip_grad"), 0.0),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), 1.0),
}


def farthest(found: Tensors, wanted: Tensors) -> float:
    """Largest difference over the largest element of a tensor, of all tensors."""
    return max(
        float((found[key] - t).abs().max() / t.abs().max().clamp(min=1e-6)) for key, t in wanted.items()
    )


@pytest.mark.parametrize(
    "layout", [pytest.param(row, marks=pytest.mark.full if full else (), id=str(row)) for row, full in ROWS]
)
def test_a_step_is_that_of_the_documents_alone(layout: ParallelLayout) -> None:
    start = weights(SUPER)
    found = train(SUPER.at(layout), start)
    objective = Objective.of(SimpleNamespace(**OBJECTIVE))
    wanted = define(SUPER, objective, start, global_batch(SUPER, 0), {})
    assert found.losses[0] == pytest.approx(wanted.loss, rel=1e-6)
    assert found.mtp[0] == pytest.approx(wanted.mtp, rel=1e-6)
    assert farthest(found.gradients, wanted.gradients) < 1e-4


@dataclass(frozen=True, kw_only=True)
class WithoutBorders(FromScript):
    """A script that knows nothing of the option."""

    def shares(self, batch: dict[str, Tensor]) -> Iterator[Batch]:
        for share, _ in super().shares(batch):
            yield share, None


@pytest.mark.full
def test_a_script_that_gives_no_borders_is_refused() -> None:
    case = WithoutBorders(**vars(SUPER))
    with pytest.raises(RuntimeError, match="this script gives the model no borders of documents"):
        train(case, weights(SUPER))
