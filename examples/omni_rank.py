"""One rank of a training run of omni_learns.py, in any layout. Schedules and optimizer are Megatron's."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import omni_task as task
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from torch import Tensor

from megatron_nemotron3.boundary import (
    BoundaryCommunicator,
    Layout,
    RowFeed,
    describe_ids,
    sample_shares,
    tokens,
)
from megatron_nemotron3.train.omni import LANGUAGE, SOUND, VISION, build, load, prepare, save

PEAK_RATE = 2e-3
SPECIAL = {VISION: task.model().image_token_id, SOUND: task.model().sound_token_id}


@dataclass(frozen=True)
class Job:
    """A training run.

    layouts: of VISION, SOUND and LANGUAGE.
    samples: of a microbatch over all data lanes; microbatches: of a step.
    blind: without encoders.
    scored: steps between scores of held-out conversations, by a single process; 0: none.
    threads: of each rank.
    """

    layouts: Mapping[str, Layout]
    steps: int
    samples: int = 32
    microbatches: int = 1
    blind: bool = False
    scored: int = 0
    threads: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return max(layout.ranks.stop for layout in self.layouts.values())

    @property
    def disjoint(self) -> bool:
        """Whether each rank has one module."""
        return sum(layout.size for layout in self.layouts.values()) == self.world > 1


@dataclass
class Curve:
    """Per step: loss of the answers (nats per token) and gradient norm; scores by step; seconds of training.

    A score is, for each kind of medium, the share of answers that greedy decoding gives to the letter.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scores: dict[int, dict[str, float]] = field(default_factory=dict)
    without_media: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def train(job: Job, samples: str, start: str, result: str | None) -> Curve:
    """Train on this rank of an initialized gloo world, inside `cpu_mode`.

    Args:
        samples: file of the encoded conversations, "train" and "held_out".
        start: folder of the initial weights, drawn and saved by a single process if it is new.
        result: folder in which a single process saves the trained weights.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    parts = torch.load(samples, mmap=True)
    config = task.model()
    feed = RowFeed(_batches(job, parts["train"]), tokens("global_ids", SPECIAL))
    language_layout = job.layouts[LANGUAGE]
    model, groups = build(config, job.layouts, ep=language_layout.tp, feed=feed)
    model.config.variable_seq_lengths = job.disjoint  # the stock schedule asks for it there
    if Path(start).exists():
        load(model, Path(start))
    else:
        save(model, config, Path(start), groups)
    with redirect_stdout(io.StringIO()):  # Megatron counts parameters aloud
        prepare(model, groups, DistributedDataParallelConfig(use_distributed_optimizer=True))
    forward_backward = _schedule(model, job, groups, feed)
    settings = OptimizerConfig(
        lr=PEAK_RATE,
        min_lr=PEAK_RATE / 50,
        adam_beta2=0.98,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=True,
    )
    optimizer = get_mimo_optimizer(model, settings)
    schedule = _rate(optimizer, job.steps)
    # One rank of each data lane tells its losses.
    tells = LANGUAGE in groups and groups[LANGUAGE].tp.rank() == 0
    curve = Curve()
    model.train()
    began = time.monotonic()
    for step in range(1, job.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = forward_backward(
            forward_step_func=forward_step,
            data_iterator=feed,
            model=[model],
            num_microbatches=job.microbatches,
            seq_length=task.LENGTH,
            micro_batch_size=job.samples // language_layout.dp,
        )
        _, norm, _ = optimizer.step()
        schedule.step(1)
        total = sum(told, torch.zeros(2)) * tells
        dist.all_reduce(total)
        curve.losses.append((total[0] / total[1]).item())
        curve.norms.append(float(norm or 0.0))
        if job.scored and (step % job.scored == 0 or step == job.steps):
            curve.seconds += time.monotonic() - began
            curve.scores[step] = score(model, parts["held_out"], job.blind)
            print(
                f"  step {step}: loss {curve.losses[-1]:.3f}; held out {said(curve.scores[step])}", flush=True
            )
            began = time.monotonic()
    curve.seconds += time.monotonic() - began
    if job.scored and not job.blind:
        curve.without_media = score(model, parts["held_out"], blind=True)
    if result is not None:
        save(model, config, Path(result), groups)
    return curve


def said(scores: Mapping[str, float]) -> str:
    """Scores in words."""
    return ", ".join(f"{kind} {share:.0%}" for kind, share in scores.items())


@torch.no_grad()
def score(model: Any, samples: Sequence[dict[str, Any]], blind: bool) -> dict[str, float]:
    """Share of answers, for each kind of medium, that greedy decoding gives to the letter.

    It does if each token of the answer is the likeliest after the tokens before it, which one pass tells.
    """
    model.eval()
    right: dict[str, list[bool]] = {kind: [] for kind in task.QUESTIONS}
    for first in range(0, len(samples), 50):
        some = samples[first : first + 50]
        batch = task.language_batch(some, blind)
        inputs = {} if blind else task.encoder_batch(VISION, some) | task.encoder_batch(SOUND, some)
        ids = batch["input_ids"]
        known = describe_ids(ids, SPECIAL)
        logits, _ = model(ids, batch["position_ids"], modality_inputs=inputs, microbatch=known)
        hit = (logits.argmax(-1) == batch["labels"]) | (batch["loss_mask"] == 0)
        for one, whole in zip(some, hit.all(1).tolist(), strict=True):
            right[one["kind"]].append(whole)
    model.train()
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[[Tensor], Any]]:
    """Megatron's forward_step_func: the loss is the sum over tokens (`calculate_per_token_loss`)."""
    batch = dict(next(batches))
    del batch["global_ids"]
    output, mask = model(**batch)

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """losses [b, s] -> (sum, tokens, values to report)."""
        total = (losses * mask).sum()
        return total, mask.sum().int(), torch.stack([total.detach().float(), mask.sum()])

    return output, loss


def _batches(job: Job, samples: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """This rank's batches: its lane's share of each microbatch for each module, and all token ids."""
    rank = dist.get_rank()
    shares = {
        name: sample_shares(job.samples, layout.dp)[layout.coordinates(rank).get("dp", 0)]
        for name, layout in job.layouts.items()
        if rank in layout.ranks
    }
    for drawn in task.draws(samples, job.samples, seed=1):
        everything = task.language_batch(drawn, job.blind)["input_ids"]
        batch: dict[str, Any] = {"global_ids": everything, "input_ids": None, "modality_inputs": {}}
        for name, share in shares.items():
            mine = [drawn[number] for number in share]
            if name == LANGUAGE:
                batch |= task.language_batch(mine, job.blind)
            elif not job.blind:
                batch["modality_inputs"] |= task.encoder_batch(name, mine)
        yield batch


def _schedule(model: Any, job: Job, groups: Mapping[str, Any], feed: RowFeed) -> Callable[..., Any]:
    """Megatron's forward and backward passes of a step."""
    config = model.config
    if not job.disjoint:
        return partial(schedules.forward_backward_no_pipelining, pg_collection=groups[LANGUAGE])
    communicator = BoundaryCommunicator(
        model.mimo_config.module_to_grid_map,
        {VISION: [LANGUAGE], SOUND: [LANGUAGE], LANGUAGE: []},
        config,
        dim_mapping={"s": 0, "b": 1, "h": 2},
        module_output_ndim={VISION: 2, SOUND: 2},
        sequence_parallel=[name for name, layout in job.layouts.items() if layout.sequence_parallel],
        hidden_size=config.hidden_size,
    )
    communicator.feed = feed
    return partial(
        schedules.forward_backward_pipelining_without_interleaving,
        p2p_communicator=communicator,
        pg_collection=MultiModuleProcessGroupCollection(groups, LANGUAGE if LANGUAGE in groups else None),
    )


def _rate(optimizer: Any, steps: int) -> OptimizerParamScheduler:
    """Megatron's schedule: warm up for 50 steps, fall along a cosine to a fiftieth."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=PEAK_RATE / 50,
        max_lr=PEAK_RATE,
        min_lr=PEAK_RATE / 50,
        lr_warmup_steps=50,
        lr_decay_steps=max(steps, 51),
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
