"""Faults of an engineer who does not know the proof: from public reports, or seeded. No training fails.

Each patches Megatron-Core or the layers of this package in one rank, before anything is built.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.proof.certify.patching import arguments, attribute, in_place_of, result, then, wrap

FINALIZE = "megatron.core.distributed.finalize_model_grads"


@dataclass(frozen=True)
class OutsideFault:
    """A fault; the docstring of `patch` says in one sentence what is wrong."""

    patch: Callable[[], None]
    #: A launch in which it has an effect, by name.
    launch: str
    #: "owner/repository#number" of a public report, or "seeded".
    source: str = "seeded"
    #: Whether the fault is there with one process, too.
    in_one_process: bool = False


def _on_last() -> bool:
    """Whether this is the last of several ranks."""
    return dist.is_initialized() and 1 < dist.get_world_size() == dist.get_rank() + 1


def _rounded(t: Tensor) -> Tensor:
    return t.bfloat16().to(t.dtype)


def _ddp() -> Any:
    return attribute("megatron.core.distributed.distributed_data_parallel.DistributedDataParallel")


def _distributed_optimizer() -> Any:
    return attribute("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer")


def _wrap_model(make: Callable[[Any], Any]) -> None:
    """Replace the model's forward, whose signature hooks read."""
    model = attribute("megatron.core.models.hybrid.hybrid_model.HybridModel")
    wrap(model, "forward", lambda forward: functools.wraps(forward)(make(forward)))


def _scheduler() -> Any:
    return attribute("megatron.core.optimizer_param_scheduler.OptimizerParamScheduler")


def _top_k_router() -> Any:
    return attribute("megatron.core.transformer.moe.router.TopKRouter")


def _counting_router() -> Any:
    return attribute("megatron_nemotron3.layers.latent_moe.CountingRouter")


def _mtp_layer() -> Any:
    return attribute("megatron_nemotron3.layers.mtp.MTPLayer")


def _mixer() -> Any:
    return attribute("megatron_nemotron3.layers.mamba.Mamba2Mixer")


# Gradients


def norm_without_experts() -> None:
    """The gradient norm leaves out the experts of all tensor-parallel ranks but the first."""
    from megatron.core import parallel_state

    def make(filtered: Any) -> Any:
        def some(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            all_experts = parallel_state.get_tensor_model_parallel_rank() == 0
            params = [p for p in params if all_experts or getattr(p, "allreduce", True)]
            return filtered(self, params, *args, **kwargs)

        return some

    wrap(attribute("megatron.core.optimizer.optimizer.MegatronOptimizer"), "_filter_grads_for_norm", make)


def clipped_by_own_norm() -> None:
    """Each rank clips its shard of the gradients by the norm of this shard, not by that of all gradients."""

    def make(clip: Any) -> Any:
        def by_own(*args: Any, **kwargs: Any) -> None:
            given = inspect.signature(clip).bind(*args, **kwargs)
            norms = [p.grad.float().norm() for p in given.arguments["parameters"] if p.grad is not None]
            if norms:
                given.arguments["total_norm"] = torch.stack(norms).norm().item()
            clip(*given.args, **given.kwargs)

        return by_own

    wrap("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", make)


def mtp_norms_of_own_tokens() -> None:
    """The gradients of the norms before MTP's projection are not summed over tensor-parallel ranks."""

    def unmark(layer: Any) -> None:
        layer.enorm.weight.sequence_parallel = layer.hnorm.weight.sequence_parallel = False

    then(_mtp_layer(), "__init__", unmark)


def mamba_left_out_of_norm() -> None:
    """Mamba's own parameters are split over ranks but not marked so: the norm counts those of one rank."""

    def unmark(mixer: Any) -> None:
        own = (mixer.A_log, mixer.D, mixer.dt_bias, mixer.conv1d_weight, mixer.conv1d_bias, mixer.norm.weight)
        for parameter in own:
            parameter.tensor_model_parallel = False

    then(_mixer(), "__init__", unmark)


def instances_over_wrong_group() -> None:
    """Gradient shards are added up inside an optimizer instance a second time, not over the instances."""

    def regroup(ddp: Any) -> None:
        for bucket in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            if getattr(bucket, "inter_distributed_optimizer_instance_group", None) is not None:
                inside = bucket.intra_distributed_optimizer_instance_group
                bucket.inter_distributed_optimizer_instance_group = inside

    then(_ddp(), "__init__", regroup)


def gradients_reduced_in_bf16() -> None:
    """Gradients are added up and reduced in BF16, although the launch keeps them in FP32."""

    owner = attribute(
        "megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig"
    )
    then(owner, "__post_init__", lambda config: setattr(config, "grad_reduce_in_fp32", False))


def last_stage_keeps_gradients() -> None:
    """The last pipeline stage starts a step with the gradients of the step before, not with zeros."""

    def make(zero: Any) -> Any:
        def keep(ddp: Any) -> None:
            buffers = ddp.buffers + ddp.expert_parallel_buffers
            kept = [buffer.grad_data.clone() for buffer in buffers] if _on_last() else []
            zero(ddp)
            for buffer, gradients in zip(buffers, kept, strict=False):
                buffer.grad_data.copy_(gradients)

        return keep

    wrap(_ddp(), "zero_grad_buffer", make)


# Optimizer and schedule


def last_rank_steps_less() -> None:
    """The learning rate of the last rank is a tenth smaller than that of the others."""

    def slow(scheduler: Any) -> None:
        for group in scheduler.optimizer.param_groups if _on_last() else ():
            group["lr"] = group["lr"] * 0.9

    then(_scheduler(), "step", slow)


def last_rank_decays_nothing() -> None:
    """The last rank has no weight decay."""
    result(_scheduler(), "get_wd", lambda decay: 0.0 if _on_last() else decay)


def last_shard_stays_behind() -> None:
    """The last rank updates its FP32 master weights, but never writes them to the BF16 weights."""

    def make(copy: Any) -> Any:
        return lambda self: None if _on_last() else copy(self)

    wrap(_distributed_optimizer(), "_copy_main_params_to_model_params", make)


# Routers and experts


def mtp_balance_once_per_depth() -> None:
    """The routers of MTP's repeated block add their balancing loss at each depth, not once for all depths."""

    def unmark(layer: Any) -> None:
        for module in layer.modules():
            if hasattr(module, "router") and hasattr(module, "is_mtp_layer"):
                module.is_mtp_layer = module.router.is_mtp_layer = False

    then(_mtp_layer(), "__init__", unmark)


def mtp_replays_decoder() -> None:
    """MTP's routers replay the choices of the decoder layer that has their number inside the block, 2."""

    def make(route: Any) -> Any:
        kept: dict[int, Tensor] = {}

        def replay(router: Any, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            probs, chosen = route(router, logits, *args, **kwargs)
            if not router.is_mtp_layer:
                kept[router.layer_number] = chosen
                return probs, chosen
            chosen = kept.get(2, chosen)
            scores = torch.sigmoid(logits.reshape(chosen.shape).float()) * chosen
            scores = scores * router.config.moe_router_topk_scaling_factor / scores.sum(-1, keepdim=True)
            # The balancing loss, which hangs on the true weights, stays.
            return scores.type_as(probs) + (probs - probs), chosen

        return replay

    wrap(_counting_router(), "routing", make)


def padded_tokens_count_twice() -> None:
    """With padding the balancing loss is weighted by the tokens of all ranks, and by their number again."""
    name = "attach_and_log_load_balancing_loss"
    in_place_of(_counting_router(), name, getattr(_top_k_router(), name))


def expert_bias_in_bf16() -> None:
    """The experts' biases stay in BF16, to which Megatron casts all buffers."""
    in_place_of(_top_k_router(), "_maintain_float32_expert_bias", lambda router: None)


def router_in_bf16() -> None:
    """The routers' logits are rounded to BF16, although the launch has FP32 routers."""
    result(attribute("megatron.core.transformer.moe.router.Router"), "gating", _rounded)


def router_learns_balance_only() -> None:
    """Routing weights lose their gradient in the exchange of tokens; only the balancing loss has one."""

    def make(dispatch: Any) -> Any:
        def cut(self: Any, tokens: Tensor, probs: Tensor) -> Any:
            return dispatch(self, tokens, probs.detach() + (probs - probs) if self.ep_size > 1 else probs)

        return cut

    dispatcher = attribute("megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher")
    wrap(dispatcher, "token_dispatch", make)


def last_rank_keeps_expert_biases() -> None:
    """The last rank takes part in the update of the experts' biases, but keeps its old ones."""

    def make(update: Any) -> Any:
        def keep(model: Any, *args: Any, **kwargs: Any) -> None:
            modules = [module for chunk in model for module in chunk.modules()]
            biases = [b for m in modules if (b := getattr(m, "expert_bias", None)) is not None]
            old = [bias.clone() for bias in biases]
            update(model, *args, **kwargs)
            for bias, value in zip(biases, old, strict=True) if _on_last() else ():
                bias.copy_(value)

        return keep

    wrap(FINALIZE, "_update_router_expert_bias", make)


def last_rank_rounds_experts_inputs() -> None:
    """The last rank rounds the tokens that its experts get to BF16 in an FP32 training."""

    def make(forward: Any) -> Any:
        def rounding(experts: Any, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(experts, _rounded(tokens) if _on_last() else tokens, *args, **kwargs)

        return rounding

    wrap(attribute("megatron_nemotron3.layers.experts.GroupedExperts"), "forward", make)


# Tensor and pipeline parallelism


def loss_of_gathered_logits() -> None:
    """Logits are gathered over tensor-parallel ranks, and the loss takes them for parts of a vocabulary."""

    from megatron.core import parallel_state

    def make(forward: Any) -> Any:
        def gathering(*args: Any, **kwargs: Any) -> Any:
            parts = parallel_state.get_tensor_model_parallel_world_size() > 1
            return forward(*args, **(kwargs | ({"runtime_gather_output": True} if parts else {})))

        return gathering

    _wrap_model(make)


def mtp_embedding_apart() -> None:
    """The embedding that MTP has on the last stage and that of the first get their own gradients only."""
    in_place_of(FINALIZE, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


def stages_send_bf16() -> None:
    """Stages round the gradients that they send to the stage before to BF16 in an FP32 training."""

    def make(communicate: Any) -> Any:
        def rounding(self: Any, *, tensor_send_prev: Tensor | None, **kwargs: Any) -> Any:
            t = tensor_send_prev
            return communicate(self, tensor_send_prev=None if t is None else _rounded(t), **kwargs)

        return rounding

    wrap(attribute("megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator"), "_communicate", make)


# Context parallelism and packed documents


def keys_learn_from_own_queries() -> None:
    """Keys and values get the gradients of their own context-parallel rank's queries only."""
    owner, name = "megatron_nemotron3.layers.attention", "gather_from_sequence_parallel_region"
    arguments(owner, name, tensor_parallel_output_grad=False)


def state_crosses_documents() -> None:
    """Mamba's convolution and state run from one document of a pack into the next."""

    def make(scan: Any) -> Any:
        def joined(mixer: Any, xbc: Tensor, dt: Tensor, seq_idx: Any, *args: Any, **kwargs: Any) -> Tensor:
            return scan(mixer, xbc, dt, None, *args, **kwargs)

        return joined

    wrap(_mixer(), "scan", make)


def last_rank_takes_first_heads_steps() -> None:
    """The last context-parallel rank takes the step biases of Mamba's first heads for its own heads."""

    def make(get: Any) -> Any:
        return lambda cp: cp.dt_bias_cp1[: cp.nheads_local_tpcp] if _on_last() else get(cp)

    owner = attribute("megatron.core.ssm.mamba_context_parallel.MambaContextParallel")
    wrap(owner, "get_dt_bias", make)


# Multi-token prediction


def mtp_weighted_by_own_tokens() -> None:
    """MTP's loss is divided by the tokens of each context-parallel rank, not by those of the sequence."""
    in_place_of(attribute("megatron_nemotron3.layers.mtp.LossHooks"), "install", lambda model: None)


def _unpadded_borders(of_embeddings: bool) -> None:
    def make(of: Any) -> Any:
        def unpadded(packed: Any, total: int, shiftable: Tensor | None = None) -> Any:
            borders = of(packed, total, shiftable)
            if (shiftable is None) == of_embeddings:
                borders.cu_seqlens_q = packed.cu_seqlens_q.cpu()
            return borders

        return unpadded

    wrap(attribute("megatron_nemotron3.layers.mtp.PhysicalBorders"), "of", make)


def mtp_loss_at_unpadded_borders() -> None:
    """MTP's labels and loss mask are shifted at the borders that documents would have without padding."""
    _unpadded_borders(of_embeddings=False)


def mtp_tokens_at_unpadded_borders() -> None:
    """The tokens that MTP embeds are shifted at the borders that documents would have without padding."""
    _unpadded_borders(of_embeddings=True)


def mtp_without_mask() -> None:
    """The model does not get the loss mask, so MTP's loss counts masked tokens."""

    _wrap_model(lambda forward: lambda *args, **kwargs: forward(*args, **(kwargs | {"loss_mask": None})))


# Data, and what is only logged


def replica_trains_first_ones_samples() -> None:
    """All data-parallel ranks train the tokens of the first one, whose samples count more than once."""
    from megatron.core import parallel_state

    def of_first(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.int64:
            return value
        group, value = parallel_state.get_data_parallel_group(), value.clone()
        dist.broadcast(value, dist.get_process_group_ranks(group)[0], group=group)
        return value

    def make(forward: Any) -> Any:
        def same(model: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(model, *map(of_first, args), **{k: of_first(v) for k, v in kwargs.items()})

        return same

    _wrap_model(make)


def balance_logged_twice() -> None:
    """Recomputed layers log their balancing loss in the first pass and in the second."""

    def make(route: Any) -> Any:
        def with_grad(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                return route(*args, **kwargs)

        return with_grad

    wrap(_counting_router(), "routing", make)


def loss_logged_per_microbatch() -> None:
    """The logged loss is the mean of the micro-batches' means, however many tokens each has."""

    def mean(loss: Tensor) -> Tensor:
        loss = loss.view(-1)
        if loss.numel() != 2:
            return loss
        value = loss[0] / loss[1].clamp(min=1)
        return torch.stack([value, torch.ones_like(value)])

    def make(step: Any) -> Any:
        @functools.wraps(step)
        def averaging(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(step).bind(*args, **kwargs)
            run = given.arguments["forward_backward_func"]

            def means(*args: Any, **kwargs: Any) -> Any:
                losses = run(*args, **kwargs)
                return [{name: mean(loss) for name, loss in one.items()} for one in losses]

            given.arguments["forward_backward_func"] = means
            return step(*given.args, **given.kwargs)

        return averaging

    wrap("megatron.training.training", "train_step", make)


# Precision and initialization


def norms_in_bf16() -> None:
    """The statistics of RMS norms are computed in BF16."""
    importlib.import_module("megatron_nemotron3.layers.backend")  # others keep the function that they import
    in_place_of("megatron_nemotron3.layers.functional", "accumulation_dtype", lambda x: x.dtype)


def tp_ranks_start_alike() -> None:
    """All tensor-parallel ranks start with the first rank's part of each split matrix."""
    arguments("megatron.core.tensor_parallel.layers", "_initialize_affine_weight_cpu", rank=0)
    arguments("megatron.core.tensor_parallel", "model_parallel_cuda_manual_seed", tp_rank=0)


def replicas_start_apart() -> None:
    """Each data-parallel rank initializes with a seed of its own, and no rank broadcasts its weights."""
    from megatron.core import parallel_state

    def make(seed_all: Any) -> Any:
        def apart(seed: int, *args: Any, **kwargs: Any) -> None:
            seed_all(seed + 10 * parallel_state.get_data_parallel_rank(), *args, **kwargs)

        return apart

    wrap("megatron.training.initialize", "_set_random_seed", make)


# Checkpoints


def _set_other_state(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    def make(set_state: Any) -> Any:
        def changed(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
            set_state(self, parameter, {**tensors, **change(tensors)})

        return changed

    wrap(_distributed_optimizer(), "_set_main_param_and_optimizer_states", make)


def masters_resume_in_bf16() -> None:
    """Master weights are rounded to BF16 when a checkpoint is loaded."""
    _set_other_state(lambda tensors: {"param": _rounded(tensors["param"])})


def last_rank_loses_momentum() -> None:
    """The last rank resumes with first moments of zero."""
    _set_other_state(lambda tensors: {"exp_avg": 0 * tensors["exp_avg"]} if _on_last() else {})


def schedule_resumes_twice_as_far() -> None:
    """After a resume the schedule is stepped once more by the steps that the checkpoint restored."""
    then(_scheduler(), "load_state_dict", lambda scheduler: scheduler.step(scheduler.num_steps))


def adam_counts_from_zero() -> None:
    """Adam's step count is lost in a checkpoint, so that its bias correction starts anew after a resume."""

    def forget(optimizer: Any) -> None:
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))

    then(attribute("megatron.core.optimizer.optimizer.FP32Optimizer"), "load_state_dict", forget)


def expert_biases_resume_from_zero() -> None:
    """The experts' biases are zero after a resume."""

    def forget(router: Any) -> None:
        if router.expert_bias is not None:
            router.expert_bias.data.zero_()

    then(_top_k_router(), "_load_from_state_dict", forget)


def saved_before_gather() -> None:
    """A checkpoint is written before ranks gather the weights that the others updated in the last step."""

    def make(sync: Any) -> Any:
        def unforced(self: Any, *args: Any, force_sync: bool = False, **kwargs: Any) -> None:
            if not force_sync:
                sync(self, *args, **kwargs)

        return unforced

    wrap(_ddp(), "start_param_sync", make)


_LM, _BRIDGE = "NVIDIA/Megatron-LM", "NVIDIA-NeMo/Megatron-Bridge"
_PADDED = "CP2, padded documents"
OUTSIDE: dict[str, OutsideFault] = {
    fault.patch.__name__: fault
    for fault in (
        OutsideFault(norm_without_experts, "TP2 EP2", f"{_LM}#5916"),
        OutsideFault(clipped_by_own_norm, "DP2", "NVIDIA-NeMo/Automodel#3816"),
        OutsideFault(mtp_norms_of_own_tokens, "TP2", f"{_LM}#7452"),  # finding 11
        OutsideFault(mamba_left_out_of_norm, "TP2", f"{_LM}#7452"),  # finding 8
        OutsideFault(instances_over_wrong_group, "DP4, 2 optimizers"),
        OutsideFault(gradients_reduced_in_bf16, "DP2, BF16", in_one_process=True),
        OutsideFault(last_stage_keeps_gradients, "PP2"),
        OutsideFault(last_rank_steps_less, "DP2"),
        OutsideFault(last_rank_decays_nothing, "TP2"),
        OutsideFault(last_shard_stays_behind, "DP2, BF16"),
        OutsideFault(mtp_balance_once_per_depth, "DP2", f"{_LM}#6748", in_one_process=True),
        OutsideFault(mtp_replays_decoder, "DP2", "NVIDIA-NeMo/RL#3903", in_one_process=True),
        OutsideFault(padded_tokens_count_twice, _PADDED, f"{_LM}#7452"),  # finding 10
        OutsideFault(expert_bias_in_bf16, "DP2, BF16", f"{_LM}#1482", in_one_process=True),
        OutsideFault(router_in_bf16, "TP2 EP2, BF16", in_one_process=True),
        OutsideFault(router_learns_balance_only, "EP2", "NVIDIA-NeMo/Automodel#2995"),
        OutsideFault(last_rank_keeps_expert_biases, "EP2"),
        OutsideFault(last_rank_rounds_experts_inputs, "EP2"),
        OutsideFault(loss_of_gathered_logits, "TP2", f"{_LM}#7452"),  # finding 2
        OutsideFault(mtp_embedding_apart, "PP2", f"{_BRIDGE}#5380"),
        OutsideFault(stages_send_bf16, "PP2 VPP2"),
        OutsideFault(keys_learn_from_own_queries, "CP2", "NVIDIA/TransformerEngine#1557"),
        OutsideFault(state_crosses_documents, "CP2 packed", "verl-project/verl#7192", in_one_process=True),
        OutsideFault(last_rank_takes_first_heads_steps, "CP2"),
        OutsideFault(mtp_weighted_by_own_tokens, "CP2", f"{_LM}#7498"),
        OutsideFault(mtp_loss_at_unpadded_borders, _PADDED, f"{_LM}#6205", in_one_process=True),
        OutsideFault(mtp_tokens_at_unpadded_borders, _PADDED, f"{_LM}#4495", in_one_process=True),
        OutsideFault(mtp_without_mask, "DP2", f"{_BRIDGE}#6103", in_one_process=True),
        OutsideFault(replica_trains_first_ones_samples, "DP2 per batch", f"{_BRIDGE}#5944"),
        OutsideFault(balance_logged_twice, "DP2, recomputed", f"{_LM}#1585", in_one_process=True),
        OutsideFault(loss_logged_per_microbatch, "DP2", in_one_process=True),
        OutsideFault(norms_in_bf16, "TP2, BF16", in_one_process=True),
        OutsideFault(tp_ranks_start_alike, "TP2", "modelscope/ms-swift#7944"),
        OutsideFault(replicas_start_apart, "DP2"),
        OutsideFault(masters_resume_in_bf16, "DP2, BF16", f"{_LM}#1359", in_one_process=True),
        OutsideFault(last_rank_loses_momentum, "EP2"),
        OutsideFault(schedule_resumes_twice_as_far, "DP2", "radixark/miles#1627", in_one_process=True),
        OutsideFault(adam_counts_from_zero, "TP2", f"{_BRIDGE}#3832", in_one_process=True),
        OutsideFault(expert_biases_resume_from_zero, "TP2 EP2", "flagos-ai/FlagScale#412", True),
        OutsideFault(saved_before_gather, "DP2", f"{_LM}#6920"),
    )
}
