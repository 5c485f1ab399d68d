"""Faults of gradients, optimizers, dtypes, schedules, checkpoints and logs; more in `outside_faults_2b`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.proof.certify.outside_faults import OutsideFault
from tests.proof.certify.outside_faults_2b import OUTSIDE_B
from tests.proof.certify.patching import attribute, in_place_of, then, wrap

FINALIZE = "megatron.core.distributed.finalize_model_grads"
TRAINING = "megatron.training.training"


def _finalizing(make: Callable[[Any], Any]) -> None:
    """Replace Megatron's `finalize_model_grads` wherever it is bound by name."""
    for module in (FINALIZE, "megatron.core.distributed", TRAINING):
        wrap(module, "finalize_model_grads", make)


def router_gradient_of_own_tokens() -> None:
    """The router's weight is not marked for sequence parallelism, so each TP rank keeps its own gradient."""

    def unmark(router: Any) -> None:
        router.weight.sequence_parallel = False

    then(attribute("megatron.core.transformer.moe.router.Router"), "reset_parameters", unmark)


def gradients_divided_by_own_tokens() -> None:
    """Each rank divides the summed gradients by its own tokens times the ranks, not by the tokens of all."""

    def make(original: Any) -> Any:
        def finalize(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
            from megatron.core import parallel_state

            original(model, None, *args, **kwargs)
            if num_tokens is not None:
                ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
                for chunk in model:
                    chunk.scale_gradients(1.0 / (num_tokens.clamp(min=1) * ranks))

        return finalize

    _finalizing(make)


def accumulated_gradients_dropped() -> None:
    """At the third micro-batch of a step a stage clears what its first ones have accumulated."""

    def make(original: Any) -> Any:
        def forward_step(function: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("current_microbatch") == 2 and model.training:
                model.zero_grad_buffer()
            return original(function, iterator, model, *args, **kwargs)

        return forward_step

    wrap("megatron.core.pipeline_parallel.schedules", "forward_step", make)


def later_chunks_not_normalized() -> None:
    """Only the first virtual stage of a rank is divided by the number of tokens."""

    def make(original: Any) -> Any:
        def scale_gradients(self: Any, factor: Any) -> None:
            from megatron.core.utils import get_attr_wrapped_model

            if not get_attr_wrapped_model(self, "vp_stage"):
                original(self, factor)

        return scale_gradients

    wrap(attribute("megatron.core.distributed.DistributedDataParallel"), "scale_gradients", make)


def latent_gradient_averaged() -> None:
    """The gradients of the latent projections are averaged over TP ranks, which hold parts of the sum."""

    def mark(linear: Any) -> None:
        linear.weight.average_gradients_across_tp_domain = True

    then(attribute("megatron_nemotron3.layers.linear.DuplicatedLinear"), "__init__", mark)


def expert_gradients_too_large() -> None:
    """The gradients of routed experts are multiplied by the size of expert parallelism."""

    def enlarge(ddp: Any) -> None:
        from megatron.core import parallel_state

        for group in ddp.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= parallel_state.get_expert_model_parallel_world_size()

    then(attribute("megatron.core.distributed.DistributedDataParallel"), "__init__", enlarge)


def experts_counted_by_dense_ranks() -> None:
    """In the gradient norm experts of TP ranks other than the first are taken for copies and left out."""

    def make(original: Any) -> Any:
        def is_counted(parameter: Any, *args: Any, **kwargs: Any) -> bool:
            from megatron.core import parallel_state

            if not getattr(parameter, "allreduce", True):
                return bool(parallel_state.get_tensor_model_parallel_rank() == 0)
            return bool(original(parameter, *args, **kwargs))

        return is_counted

    wrap("megatron.core.tensor_parallel", "param_is_not_tensor_parallel_duplicate", make)


def norm_of_own_shard() -> None:
    """Each rank of the distributed optimizer clips by the norm of its own shard of the gradients."""

    def own_group(_self: Any) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_model_parallel_group()

    in_place_of(
        attribute("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"),
        "get_grad_stats_parallel_group",
        own_group,
    )


def instances_reduced_in_wrong_group() -> None:
    """After the reduce-scatter inside an optimizer instance the second sum is inside it, too, not across."""

    def make(original: Any) -> Any:
        def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inter_distributed_optimizer_instance_group is not None:
                own = self.intra_distributed_optimizer_instance_group
                self.inter_distributed_optimizer_instance_group = own
            return original(self, *args, **kwargs)

        return start_grad_sync

    owner = attribute("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup")
    wrap(owner, "start_grad_sync", make)


def masters_rounded_each_step() -> None:
    """After each step the FP32 master weights are read back from the BF16 weights."""
    owner = attribute("megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params")
    then(owner, "_copy_main_params_to_model_params", lambda self: self._copy_model_params_to_main_params())


def gradients_rounded_to_bf16() -> None:
    """The reduced gradients, divided by the tokens, are rounded to BF16 before the optimizer reads them."""
    owner = attribute("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer")
    then(owner, "scale_gradients", lambda buffer: buffer.grad_data.copy_(buffer.grad_data.bfloat16()))


def expert_bias_in_bf16() -> None:
    """The experts' bias and token counts stay in the BF16 to which the model was cast."""
    owner = attribute("megatron_nemotron3.layers.latent_moe.CountingRouter")
    in_place_of(owner, "_maintain_float32_expert_bias", lambda _self: None)


def router_in_bf16() -> None:
    """The router multiplies in the dtype of its input and ignores the dtype it was given."""

    def make(original: Any) -> Any:
        return lambda x, weight, bias, _dtype: original(x, weight, bias, x.dtype)

    wrap("megatron.core.transformer.moe.router", "router_gating_linear", make)


def schedule_counted_twice_on_resume() -> None:
    """A resumed run advances the learning-rate schedule by the samples so far, as the load has done."""
    owner = attribute("megatron.core.optimizer_param_scheduler.OptimizerParamScheduler")
    then(owner, "load_state_dict", lambda schedule: schedule.step(increment=schedule.num_steps))


def weight_decay_of_vectors() -> None:
    """Norms, A_log, D and the biases of Mamba decay as matrices do."""
    for module in (TRAINING, "megatron.core.optimizer"):
        in_place_of(module, "get_standard_config_overrides", lambda *_, **__: {})


def expert_bias_not_saved() -> None:
    """The experts' bias is no part of the state dict, so a resumed run begins with zeros."""
    owner = attribute("megatron.core.transformer.moe.router.TopKRouter")
    then(owner, "__init__", lambda router: router._non_persistent_buffers_set.add("expert_bias"))


def moments_not_loaded() -> None:
    """A load sets Adam's moments to zero, with the step count of the checkpoint."""

    def make(original: Any) -> Any:
        def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
            lost = {name: torch.zeros_like(tensors[name]) for name in ("exp_avg", "exp_avg_sq")}
            return original(self, parameter, {**tensors, **lost})

        return set_states

    owner = attribute("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer")
    wrap(owner, "_set_main_param_and_optimizer_states", make)


def data_begin_again_on_resume() -> None:
    """The loader of a resumed run begins at the first sample."""

    def make(original: Any) -> Any:
        return lambda dataset, _consumed: original(dataset, 0)

    wrap(TRAINING, "build_pretraining_data_loader", make)


def stale_weights_saved() -> None:
    """A checkpoint is written before other ranks' updated weights have been gathered."""
    in_place_of(TRAINING, "force_param_sync", lambda *_, **__: None)


def attention_exported_by_kind() -> None:
    """Conversion to and from Hugging Face takes the fused rows for all q, then all k, then all v."""
    transforms: Any = importlib.import_module("megatron_nemotron3.checkpoints.convert.transforms")

    def qkv(megatron: Any, hf: Any, head_dim: int = 0) -> Any:
        ((name, shape),) = megatron.items()
        pieces, start = [], 0
        for part, part_shape in hf.items():
            source = transforms.band(shape, start, start + part_shape[0])
            pieces.append(transforms.CopyPiece(name, source, part, transforms.whole(part_shape)))
            start += part_shape[0]
        return transforms.CopyPlan(megatron, hf, tuple(pieces))

    mock.patch.dict(transforms.RULES, {"qkv": qkv}).start()


def mtp_losses_logged_as_sum() -> None:
    """The logged losses of MTP are added up over data-parallel ranks, not averaged."""

    def make(original: Any) -> Any:
        def save(*args: Any, avg_group: Any = None, **kwargs: Any) -> None:
            original(*args, **{**kwargs, "reduce_group": avg_group})

        return save

    owner = attribute("megatron.core.transformer.multi_token_prediction.MTPLossLoggingHelper")
    wrap(owner, "save_metrics_to_tracker", make)


def balance_logged_twice() -> None:
    """The forward pass and its recomputation both add the load-balancing loss to the log."""

    def make(original: Any) -> Any:
        def record(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            original(self, *args, **kwargs)

        return record

    wrap(attribute("megatron.core.transformer.moe.moe_logging.MoEMetricsTracker"), "record", make)


OUTSIDE: dict[str, OutsideFault] = {
    "router_gradient_of_own_tokens": OutsideFault(
        router_gradient_of_own_tokens, "TP2", "NVIDIA/Megatron-LM#619"
    ),
    "gradients_divided_by_own_tokens": OutsideFault(
        gradients_divided_by_own_tokens, "CP2", "pytorch/torchtitan#2206"
    ),
    "accumulated_gradients_dropped": OutsideFault(
        accumulated_gradients_dropped, "PP2", "NVIDIA-NeMo/Automodel#3530"
    ),
    "later_chunks_not_normalized": OutsideFault(later_chunks_not_normalized, "PP2 VPP2"),
    "latent_gradient_averaged": OutsideFault(latent_gradient_averaged, "TP2, BF16"),
    "expert_gradients_too_large": OutsideFault(expert_gradients_too_large, "EP2", "NVIDIA/Megatron-LM#5956"),
    "experts_counted_by_dense_ranks": OutsideFault(
        experts_counted_by_dense_ranks, "TP2 EP2, BF16", "NVIDIA/Megatron-LM#5916"
    ),
    "norm_of_own_shard": OutsideFault(norm_of_own_shard, "DP2"),
    "instances_reduced_in_wrong_group": OutsideFault(
        instances_reduced_in_wrong_group, "DP4, 2 optimizers", "NVIDIA/Megatron-LM#3670"
    ),
    "masters_rounded_each_step": OutsideFault(
        masters_rounded_each_step, "TP2, BF16", "NVIDIA/Model-Optimizer#2322"
    ),
    "gradients_rounded_to_bf16": OutsideFault(gradients_rounded_to_bf16, "DP2, BF16", in_one_process=True),
    "expert_bias_in_bf16": OutsideFault(
        expert_bias_in_bf16, "TP2 EP2, BF16", "NVIDIA/Megatron-LM#7081", in_one_process=True
    ),
    "router_in_bf16": OutsideFault(
        router_in_bf16, "TP2, BF16", "sgl-project/sglang#40149", in_one_process=True
    ),
    "schedule_counted_twice_on_resume": OutsideFault(
        schedule_counted_twice_on_resume, "DP2, BF16", "radixark/miles#1627"
    ),
    "weight_decay_of_vectors": OutsideFault(
        weight_decay_of_vectors, "DP2", "ServiceNow/Fast-LLM#545", in_one_process=True
    ),
    "expert_bias_not_saved": OutsideFault(
        expert_bias_not_saved, "TP2", "flagos-ai/FlagScale#412", in_one_process=True
    ),
    "moments_not_loaded": OutsideFault(moments_not_loaded, "DP2", "areal-project/AReaL#1468"),
    "data_begin_again_on_resume": OutsideFault(
        data_begin_again_on_resume, "EP2", "NVIDIA-NeMo/Megatron-Bridge#3503", in_one_process=True
    ),
    "stale_weights_saved": OutsideFault(stale_weights_saved, "DP2", "NVIDIA-NeMo/RL#949"),
    "attention_exported_by_kind": OutsideFault(attention_exported_by_kind, "TP2", in_one_process=True),
    "mtp_losses_logged_as_sum": OutsideFault(mtp_losses_logged_as_sum, "DP2", "NovaSky-AI/SkyRL#1420"),
    "balance_logged_twice": OutsideFault(balance_logged_twice, "DP2, recomputed", "NVIDIA/Megatron-LM#1330"),
    **OUTSIDE_B,
}
