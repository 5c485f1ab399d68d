"""One rank of a training run of omni_cpu.py, in any of its modes. Schedules and optimizer are stock."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import omni_data as data
import omni_model
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from omni_model import LANGUAGE
from torch import Tensor

from megatron_nemotron3.boundary.feed import RowFeed, tokens
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
from megatron_nemotron3.boundary.partition import sample_shares
from megatron_nemotron3.boundary.training import finalize_model_grads, forward_backward_colocated
from megatron_nemotron3.cpu import cpu_mode

#: Samples of an optimizer step, in every mode.
STEP = 24


@dataclass(frozen=True)
class Mode:
    """Layouts of the modules.

    layouts: layouts of "vision", "audio" and "language".
    samples: samples of a microbatch, over all data lanes.
    stock: whether to use upstream's own MimoModel, which needs one layout for all modules.
    """

    layouts: Mapping[str, Layout]
    samples: int
    stock: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return max(layout.ranks.stop for layout in self.layouts.values())

    @property
    def disjoint(self) -> bool:
        """Whether each rank has one module, in one pipeline."""
        return sum(layout.size for layout in self.layouts.values()) == self.world > 1

    def __str__(self) -> str:
        return "; ".join(f"{name} {layout}" for name, layout in self.layouts.items())


@dataclass(frozen=True)
class Losses:
    """Per step: mean loss of all counted tokens, mean loss of the captions' words (nats), gradient norm.

    Adam forgives a gradient of the wrong scale; the norm does not.
    """

    all: list[float]
    captions: list[float]
    norms: list[float]


def train(
    rank: int,
    mode: Mode,
    steps: int,
    store: str,
    weights: str,
    result: str,
    save: bool = False,
    blind: bool = False,
) -> None:
    """Run one rank: set up gloo, build, load the common initial weights, train, tear down.

    Args:
        store: file for torch.distributed to meet in.
        weights: file of the initial weights; written with `save`, else read.
        result: file in which rank 0 leaves the `Losses`.
        blind: noise in place of pictures and sounds.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with cpu_mode():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=mode.world)
        losses = run(mode, steps, weights, save=save, blind=blind)
        if rank == 0:
            torch.save(astuple(losses), result)
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()


def run(mode: Mode, steps: int, weights: str, *, save: bool = False, blind: bool = False) -> Losses:
    """Train on this rank of an initialized world, inside `cpu_mode`. Arguments as `train`."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # all that is wanted of Megatron's global state
        parallel_state._set_global_memory_buffer()
    grids = {name: omni_model.grid(layout) for name, layout in mode.layouts.items()}
    feed = RowFeed(_batches(mode, blind), tokens("global_ids", data.SPECIAL))
    kind: Callable[..., Any] = MimoModel if mode.stock else partial(BoundaryMimoModel, feed=feed)
    model, groups = omni_model.build(kind, mode.layouts, grids)
    model.config.variable_seq_lengths = mode.disjoint  # the stock schedule asks for it there
    if save:
        torch.save(omni_model.weights(model), weights)
    omni_model.load(model, torch.load(weights))
    config = model.config
    if mode.disjoint:
        communicator = BoundaryCommunicator(
            grids,
            {"vision": [LANGUAGE], "audio": [LANGUAGE], LANGUAGE: []},
            config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
            module_output_ndim={"vision": 2, "audio": 2},
            sequence_parallel=[name for name, layout in mode.layouts.items() if layout.sequence_parallel],
            hidden_size=config.hidden_size,
        )
        communicator.feed = feed
        collection = MultiModuleProcessGroupCollection(groups, LANGUAGE if LANGUAGE in groups else None)
        config.finalize_model_grads_func = finalize_model_grads
        forward_backward = partial(
            schedules.forward_backward_pipelining_without_interleaving,
            p2p_communicator=communicator,
            pg_collection=collection,
        )
    else:
        config.finalize_model_grads_func = partial(finalize_model_grads, groups=groups)
        language = groups[LANGUAGE]
        forward_backward = partial(schedules.forward_backward_no_pipelining, pg_collection=language)
        if mode.layouts[LANGUAGE].pp > 1:
            forward_backward = partial(
                forward_backward_colocated,
                p2p_communicator=P2PCommunicator(pp_group=language.pp, config=config),
                pg_collection=language,
            )
    settings = OptimizerConfig(lr=3e-3, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_mimo_optimizer(model, settings)
    # One rank of each data lane tells its losses.
    tells = LANGUAGE in groups and groups[LANGUAGE].tp.rank() == 0
    losses = Losses([], [], [])
    model.train()
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = forward_backward(
            forward_step_func=forward_step,
            data_iterator=feed,
            model=[model],
            num_microbatches=STEP // mode.samples,
            seq_length=data.LENGTH,
            micro_batch_size=mode.samples // mode.layouts[LANGUAGE].dp,
        )
        _, norm, _ = optimizer.step()
        losses.norms.append(float(norm or 0.0))
        total = sum(told, torch.zeros(4)) * tells
        dist.all_reduce(total)
        losses.all.append((total[0] / total[1]).item())
        losses.captions.append((total[2] / total[3]).item())
    return losses


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[[Tensor], Any]]:
    """Megatron's forward_step_func: the loss is the sum over tokens (`calculate_per_token_loss`)."""
    batch = dict(next(batches))
    del batch["global_ids"]
    output, mask = model(**batch)

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """losses [b, s] -> (sum, tokens, values to report)."""
        captions = torch.isin(batch["labels"], torch.tensor(data.CAPTIONS))
        total = (losses * mask).sum()
        told = [total, mask.sum(), (losses * captions).sum(), captions.sum()]
        return total, mask.sum().int(), torch.stack([value.detach().float() for value in told])

    return output, loss


def _batches(mode: Mode, blind: bool) -> Iterator[dict[str, Any]]:
    """This rank's batches: its lane's share of each microbatch for each module, and all token ids."""
    rank, first = dist.get_rank(), 0
    shares = {
        name: sample_shares(mode.samples, layout.dp)[layout.coordinates(rank).get("dp", 0)]
        for name, layout in mode.layouts.items()
        if rank in layout.ranks
    }
    while True:
        samples = data.microbatch(first, mode.samples, blind)
        batch: dict[str, Any] = {"global_ids": data.language_batch(samples)["input_ids"], "input_ids": None}
        for name, share in shares.items():
            mine = [samples[number] for number in share]
            if name == LANGUAGE:
                batch |= data.language_batch(mine)
            else:
                batch.setdefault("modality_inputs", {})[name] = data.encoder_batch(name, mine)
        yield batch
        first += mode.samples


def read(result: str | Path) -> Losses:
    """Read the result that `train` wrote."""
    return Losses(*torch.load(result))
