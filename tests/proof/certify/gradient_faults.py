"""Faults of gradients and optimizer: sums over ranks that are missing, repeated or divided wrongly.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

from megatron_nemotron3.layers.latent_moe import LatentMoELayer
from tests.proof.certify.patching import in_place_of, then, wrap

FINALIZE = "megatron.core.distributed.finalize_model_grads"


def _unmarked(belongs: Callable[[str], bool]) -> None:
    """Leave parameters out of the sum over tensor-parallel ranks that sequence parallelism needs."""

    def make(reduce: Any) -> Any:
        def without(model: Any, *args: Any, **kwargs: Any) -> None:
            marked = [
                parameter
                for chunk in model
                for name, parameter in chunk.named_parameters()
                if belongs(name) and getattr(parameter, "sequence_parallel", False)
            ]
            for parameter in marked:
                parameter.sequence_parallel = False
            reduce(model, *args, **kwargs)
            for parameter in marked:
                parameter.sequence_parallel = True

        return without

    wrap(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", make)


def norms_not_reduced() -> None:
    """Gradients of norm gains are not summed over tensor-parallel ranks."""
    _unmarked(lambda name: name.endswith("layer_norm_weight"))


def latent_not_reduced() -> None:
    """Gradients of the latent projections are not summed over tensor-parallel ranks."""
    _unmarked(lambda name: "latent_proj" in name)


def router_not_reduced() -> None:
    """Gradients of the routers are not summed over tensor-parallel ranks."""
    _unmarked(lambda name: name.endswith("router.weight"))


def norms_reduced_twice() -> None:
    """The sum over tensor-parallel ranks is made twice."""

    def make(reduce: Any) -> Any:
        def twice(*args: Any, **kwargs: Any) -> None:
            reduce(*args, **kwargs)
            reduce(*args, **kwargs)

        return twice

    wrap(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", make)


def embedding_not_tied() -> None:
    """Gradients of the embedding that MTP shares are not summed over the first and the last stage."""
    in_place_of(FINALIZE, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


def only_first_chunk_finalized() -> None:
    """Of the model chunks of an interleaved schedule only the first is divided by the number of tokens."""

    def make(scale: Any) -> Any:
        def first_only(self: Any, factor: Any) -> None:
            scale(self, 1.0 if getattr(self.module, "vp_stage", None) == 1 else factor)

        return first_only

    wrap(DistributedDataParallel, "scale_gradients", make)


def experts_scaled_by_ep() -> None:
    """Gradients of experts are multiplied by the number of expert-parallel ranks."""

    def make(scale: Any) -> Any:
        def scaled(self: Any, factor: Any) -> None:
            scale(self, factor)
            for buffer in self.expert_parallel_buffers:
                buffer.scale_gradients(float(parallel_state.get_expert_model_parallel_world_size()))

        return scaled

    wrap(DistributedDataParallel, "scale_gradients", make)


def experts_summed_as_dense() -> None:
    """Gradients of experts are summed over ranks that hold other experts."""

    def marked(layer: Any) -> None:
        for parameter in layer.experts.parameters():
            parameter.allreduce = True

    then(LatentMoELayer, "__init__", marked)


def averaged_over_dp() -> None:
    """Gradients of a loss per token are averaged over data-parallel ranks as well."""

    def make(scale: Any) -> Any:
        def divided(self: Any, factor: Any) -> None:
            scale(self, factor / parallel_state.get_data_parallel_world_size())

        return divided

    wrap(DistributedDataParallel, "scale_gradients", make)


def _without_collective(name: str) -> None:
    """Leave one kind of collective of the number of tokens out of `finalize_model_grads`."""

    def skip(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1:
            return getattr(torch.distributed, name)(tensor, *args, **kwargs)
        return None

    in_place_of(FINALIZE, "torch", _Instead(torch, distributed=_Instead(torch.distributed, **{name: skip})))


class _Instead:
    """A module with some other attributes."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def tokens_of_one_rank() -> None:
    """Every data-parallel rank divides by the number of its own tokens."""
    _without_collective("all_reduce")


def tokens_not_sent_to_stages() -> None:
    """Only the last stage learns the number of tokens; the others divide by one."""
    _without_collective("broadcast")


def divided_by_microbatches() -> None:
    """A loss per token is divided by the number of micro-batches, too."""

    def make(calculate: Any) -> Any:
        def divided(model: Any, output: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
            loss, tokens = calculate(model, output, loss_func, *args, **kwargs)
            number = args[3]
            return loss / number, tokens

        return divided

    wrap("megatron.core.pipeline_parallel.schedules", "forward_step_calc_loss", make)


def last_bucket_not_reduced() -> None:
    """The last bucket of gradients is never exchanged."""

    def make(start: Any) -> Any:
        def skipping(self: Any, *args: Any, **kwargs: Any) -> None:
            kept = [bucket.grad_data.clone() for bucket in self.buckets]
            start(self, *args, **kwargs)
            if self.grad_reduce_handle is not None:
                self.grad_reduce_handle.wait()
            for bucket, own in zip(self.buckets[-1:], kept[-1:]):
                bucket.grad_data.copy_(own)

        return skipping

    wrap(Buckets, "start_grad_sync", make)


def instances_not_reduced() -> None:
    """Gradients are not summed over the instances of the distributed optimizer."""

    def make(start: Any) -> Any:
        groups: list[Any] = []

        def apart(self: Any, *args: Any, **kwargs: Any) -> None:
            if not groups:  # every rank makes all of them
                groups.extend(
                    torch.distributed.new_group([r]) for r in range(torch.distributed.get_world_size())
                )
            group = self.inter_distributed_optimizer_instance_group
            self.inter_distributed_optimizer_instance_group = group and groups[torch.distributed.get_rank()]
            start(self, *args, **kwargs)
            self.inter_distributed_optimizer_instance_group = group

        return apart

    wrap(Buckets, "start_grad_sync", make)


def stale_gathered_weights() -> None:
    """An overlapped gather hands out the other ranks' weights of the step before."""

    def make(start: Any) -> Any:
        def stale(self: Any, force_sync: bool = False) -> None:
            overlapped = self.ddp_config.overlap_param_gather and not force_sync
            before = [bucket.param_data.clone() for bucket in self.buckets] if overlapped else []
            start(self, force_sync)
            if overlapped and self.param_gather_handle is not None:
                self.param_gather_handle.wait()
            for bucket, old in zip(self.buckets, before):
                bucket.param_data.copy_(old)

        return stale

    wrap(Buckets, "start_param_sync", make)


def shard_ends_early() -> None:
    """The optimizer of a rank leaves out the last element of each of its shards."""

    def make(step: Any) -> Any:
        def short(self: Any) -> Any:
            last = [p.data.view(-1)[-1:] for group in self.optimizer.param_groups for p in group["params"]]
            before = [value.clone() for value in last]
            done = step(self)
            for value, old in zip(last, before):
                value.copy_(old)
            return done

        return short

    wrap(MixedPrecisionOptimizer, "step_with_ready_grads", make)


def duplicates_in_norm() -> None:
    """Parameters that every tensor-parallel rank holds count once for each of them in the norm."""
    for module in ("megatron.core.tensor_parallel", "megatron.core.optimizer.clip_grads"):
        in_place_of(module, "param_is_not_tensor_parallel_duplicate", lambda *args, **kwargs: True)


def _counts(owner: Callable[[Any], bool]) -> None:
    """Let a rank other than the first count no parameter in the norm for which `owner` holds."""

    def make(counts: Any) -> Any:
        def partly(parameter: Any, *args: Any, **kwargs: Any) -> bool:
            if owner(parameter) and parallel_state.get_tensor_model_parallel_rank() > 0:
                return False
            return bool(counts(parameter, *args, **kwargs))

        return partly

    wrap("megatron.core.tensor_parallel", "param_is_not_tensor_parallel_duplicate", make)


def head_vectors_missing_in_norm() -> None:
    """Vectors cut over tensor-parallel ranks by heads count in the norm on the first rank only."""
    _counts(lambda parameter: parameter.dim() == 1)


def experts_missing_in_norm() -> None:
    """Experts count in the norm on the first tensor-parallel rank only, though each holds others."""
    _counts(lambda parameter: not getattr(parameter, "allreduce", True))


def experts_not_clipped() -> None:
    """Gradients of experts that are spread over ranks are not clipped."""

    def make(clip: Any) -> Any:
        def dense_only(parameters: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            dense = [p for p in parameters if getattr(p, "allreduce", True)]
            if dense:
                clip(dense, *args, **kwargs)

        return dense_only

    wrap("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", make)


def norm_of_one_stage() -> None:
    """The norm of the gradients is that of the rank's own stage."""
    in_place_of(
        MegatronOptimizer,
        "get_grad_stats_parallel_group",
        lambda self: parallel_state.get_tensor_model_parallel_group(),
    )
    in_place_of(
        DistributedOptimizer,
        "get_grad_stats_parallel_group",
        lambda self: parallel_state.get_tensor_and_data_parallel_group(),
    )
