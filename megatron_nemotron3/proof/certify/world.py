"""One training run in any layout, through Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.launch.boosting import Boost
from megatron_nemotron3.models.lora import LoRASettings, adding_lora
from megatron_nemotron3.proof.certify.case import Batch, TrainingCase
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed, run_each
from megatron_nemotron3.proof.certify.tensors import (
    Pieces,
    RanksDiffer,
    Tensors,
    fsdp_gradients,
    fsdp_weights,
    gather,
    gradients,
    load,
    pieces,
)

#: Bias of the first expert of a layer; scores are between 0 and 1.
CROWDING = 0.3


@dataclass
class Result:
    """What a run computed."""

    #: Of each step: mean loss of all tokens, gradient norm, mean loss of each MTP depth.
    losses: list[float]
    norms: list[float]
    mtp: list[list[float]]
    #: Of the first step.
    gradients: Tensors
    #: After the last step; expert biases among them.
    weights: Tensors


def train(case: TrainingCase, weights: Tensors | None = None, timeout: float = 300) -> Result:
    """Train `case` on its world, from the whole model's `weights` (None: as Megatron initializes them).

    Raises:
        RanksDiffer: what the ranks end with is not one model.
        RuntimeError: a rank failed.
        TimeoutError: a rank did not end.
    """
    ranks = run_distributed(_train, case.layout.world_size, case, weights, timeout=timeout, apart=True)
    return _together(ranks)


def train_each(case: TrainingCase, starts: Sequence[Tensors], timeout: float = 300) -> list[Result]:
    """As `train` from each of the `starts` at the same time. `case` has the layout of one rank."""
    return [_together([one]) for one in run_each(_train, [(case, s) for s in starts], timeout * len(starts))]


def _together(ranks: Sequence[dict[str, Any]]) -> Result:
    first = ranks[0]
    for what in ("losses", "norms"):
        if any(rank[what] != first[what] for rank in ranks):
            raise RanksDiffer(f"ranks report different {what}: {[rank[what] for rank in ranks]}")
    return Result(
        losses=first["losses"],
        norms=first["norms"],
        mtp=ranks[-1]["mtp"],
        gradients=gather([rank["gradients"] for rank in ranks]),
        weights=gather([rank["weights"] for rank in ranks]),
    )


def initial_weights(case: TrainingCase, seed: int = 0) -> Tensors:
    """Random weights of the model of `case`, a case of one rank (`randomized`)."""
    return randomized(run_distributed(_built, 1, case, apart=True)[0], seed)


def randomized(held: Pieces, seed: int = 0) -> Tensors:
    """Of a model of one rank, whole tensors in which nothing is 1, 0 or equal to its neighbor by default."""
    generator = torch.Generator().manual_seed(seed)

    def moved(key: str, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        if key.endswith("expert_bias"):  # nearly every token chooses the first expert
            return noise * 1e-2 + CROWDING * (torch.arange(len(noise)) == 0)
        if ".adapter.linear_out." in key:  # zero before the first step, so A would have no gradient
            return 0.1 * noise
        if tensor.dim() == 1:  # gains, biases, A, D, dt
            return tensor + 0.1 * noise
        return tensor

    return {key: moved(key, tensor) for key, tensor in gather([held]).items()}


# What follows runs on the ranks.


def batches(case: TrainingCase) -> Callable[[int], Iterator[Batch]]:
    """Step -> this data-parallel rank's micro-batches, in the order in which one rank would see them."""
    from megatron.core import parallel_state

    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def of(step: int) -> Iterator[Batch]:
        whole = global_batch(case, step)
        for first in range(rank * case.micro_batch_size, case.sequences, dp * case.micro_batch_size):
            yield from case.shares(
                {key: t[first : first + case.micro_batch_size] for key, t in whole.items()}
            )

    return of


def global_batch(case: TrainingCase, step: int) -> dict[str, Tensor]:
    """Tokens, labels, loss mask and positions [sequences, s] of one optimizer step, without padding."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    n, lengths, entries = case.sequences, case.documents or (case.seq_length,), case.config.vocab_size
    streams = [torch.randint(entries, (n, length + 1), generator=generator) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(n, -1)
    # Where another number of tokens counts in every sequence, a mean of means is not the mean.
    random = torch.rand(n, sum(lengths), generator=generator) < torch.linspace(0.5, 1.0, n)[:, None]
    return {
        "tokens": torch.cat([stream[:, :-1] for stream in streams], dim=1),
        "labels": torch.cat([stream[:, 1:] for stream in streams], dim=1),
        "loss_mask": case.counting(positions, random).float(),
        "position_ids": positions,
    }


def build(case: TrainingCase, weights: Tensors | None = None) -> tuple[list[Any], Any]:
    """Groups, this rank's chunks wrapped as the stock training loop wraps them, and its arguments."""
    from megatron_nemotron3.train.build import megatron_args

    if case.fault is not None:
        case.fault()
    args = megatron_args(case.argv(), case.layout.world_size)
    sizes = {name: getattr(case.layout, name) for name in ("tp", "pp", "ep", "etp", "cp")}
    vpp = case.layout.vpp if case.layout.vpp > 1 else None
    initialize(**sizes, vpp=vpp, optimizer_instances=args.num_distributed_optimizer_instances)
    if args.vocab_size is None:
        args.vocab_size = case.config.vocab_size
    return wrapped(case, args, weights), args


def wrapped(case: TrainingCase, args: Any, weights: Tensors | None = None) -> list[Any]:
    """This rank's chunks, in groups that exist.

    `weights` are loaded before Megatron-FSDP divides them, otherwise behind the wrappers.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import hybrid_config_from_args
    from megatron.training.training import get_megatron_ddp_config

    from megatron_nemotron3.post_training.boost.heads import training_heads

    model_config = hybrid_config_from_args(args)
    early = weights if args.use_megatron_fsdp else None
    model_config.pre_wrap_hooks = [] if early is None else [partial(load, weights=early)]
    if case.sabotage is not None:
        model_config.pre_wrap_hooks.append(case.sabotage)
    heads = training_heads(Boost.parse(case.boost)) if case.boost is not None else nullcontext()
    with adding_lora(LoRASettings.parse(case.lora) if case.lora is not None else None), heads:
        chunks = model_config.get_builder_cls()(model_config).build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=get_megatron_ddp_config(args),
            use_megatron_fsdp=args.use_megatron_fsdp,
            use_torch_fsdp2=args.use_torch_fsdp2,
        )
    if weights is not None and early is None:
        load(chunks, weights)
    return chunks


def _built(case: TrainingCase) -> Pieces:
    return pieces(build(case)[0])


def _loss(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def _forward_step(labels: bool, iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    batch, packed = next(iterator)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"] if labels else None,
        loss_mask=batch.get("model_mask"),
        packed_seq_params=packed,
    )
    if not labels and output.shape[:2] == batch["labels"].shape:  # logits [b, s, v], on the last stage
        output = torch.nn.functional.cross_entropy(output.mT, batch["labels"], reduction="none")
    return output, partial(_loss, batch["loss_mask"])


class TrainingRun:
    """A model in training on this rank, driven as the stock training loop drives it."""

    def __init__(
        self, case: TrainingCase, weights: Tensors | None, built: tuple[list[Any], Any] | None = None
    ) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.utils import get_model_config
        from megatron.training.training import get_megatron_optimizer_config

        self.case = case
        self.chunks, self.args = built or build(case, weights)
        optimizer, overrides = get_megatron_optimizer_config(self.args)
        self.optimizer = get_megatron_optimizer(optimizer, self.chunks, config_overrides=overrides)
        _schedule(self.optimizer, self.args)
        config = get_model_config(self.chunks[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if self.args.overlap_grad_reduce:  # FSDP changes that of the DDP config
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        for chunk in self.chunks:
            chunk.train()

    def forward_backward(self, step: int, whole_gradients: bool = False) -> float:
        """Gradients of optimizer step `step`. Returns the loss per token of the global batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        case, data = self.case, batches(self.case)
        # With several optimizer instances Megatron completes the sum of a rank's own shard only.
        whole_gradients = whole_gradients and not self.fsdp  # which `gradients` gathers
        instances = self.args.num_distributed_optimizer_instances > 1
        gather_shards, whole_gradients = whole_gradients and instances, whole_gradients and not instances
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.force_all_reduce = whole_gradients
        self.optimizer.zero_grad()
        several = len(self.chunks) > 1
        reported = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, case.labels),
            data_iterator=[data(step) for _ in self.chunks] if several else data(step),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=case.microbatches,
            seq_length=case.seq_length,
            micro_batch_size=case.micro_batch_size,
            decoder_seq_length=case.seq_length,
            forward_only=False,
            force_all_reduce=whole_gradients,
        )
        if gather_shards:
            _gather_gradients(self.chunks)
        return _mean_loss(reported)

    def step(self) -> float:
        _, norm, _ = self.optimizer.step()
        return float(norm)

    @property
    def fsdp(self) -> bool:
        return bool(self.args.use_megatron_fsdp)

    def gradients(self) -> Pieces:
        """Copies of all gradients of the last `forward_backward(whole_gradients=True)`."""
        return fsdp_gradients(self.chunks[0]) if self.fsdp else gradients(self.chunks)

    def weights(self) -> Pieces:
        return fsdp_weights(self.chunks[0]) if self.fsdp else pieces(self.chunks)

    def finish(self) -> None:
        """Gather what `--overlap-param-gather` would gather in the next forward pass."""
        for chunk in () if self.fsdp else self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.disable_forward_pre_hook(param_sync=True)


def _schedule(optimizer: Any, args: Any) -> None:
    """Give each group of parameters its rate and its weight decay, none to biases and vectors."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


def _train(case: TrainingCase, weights: Tensors | None) -> dict[str, Any]:
    run = TrainingRun(case, weights)
    result: dict[str, Any] = {"losses": [], "norms": [], "mtp": []}
    for step in range(case.steps):
        # All of the first step's gradients on every rank; afterwards as the optimizer asks for them.
        result["losses"].append(run.forward_backward(step, whole_gradients=step == 0))
        if step == 0:
            result["gradients"] = run.gradients()
        result["mtp"].append([loss / case.microbatches for loss in mtp_losses()])
        result["norms"].append(run.step())
    run.finish()
    result["weights"] = run.weights()
    return result


def _gather_gradients(chunks: list[Any]) -> None:
    """Complete every rank's gradients with the shards that the ranks of its optimizer instance summed."""
    for chunk in chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ranks, own = (
                group.intra_distributed_optimizer_instance_group,
                group.intra_distributed_optimizer_instance_rank,
            )
            for bucket in group.buckets:
                shard = bucket.grad_data.chunk(ranks.size())[own].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)


def _mean_loss(reported: list[dict[str, Tensor]]) -> float:
    from megatron.core import parallel_state

    total = torch.zeros(2)
    for values in reported:
        total += values["lm loss"]
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(total, group=group)
    torch.distributed.broadcast(
        total,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return float(total[0] / total[1])


def mtp_losses() -> list[float]:
    """Loss of each MTP depth as Megatron logs it but for the micro-batches, on ranks of the last stage."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    tracker = MTPLossLoggingHelper.tracker
    values = tracker["loss_values"].tolist() if "loss_values" in tracker else []
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    return values
