"""Faults after public reports: forward, router, experts, MTP, gradients; `outside_faults_3b` has the rest.

Sources are issues and pull requests on GitHub.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.proof.certify.outside_faults import OutsideFault
from tests.proof.certify.outside_faults_3b import OUTSIDE_B
from tests.proof.certify.patching import arguments, attribute, in_place_of, result, then, wrap

MAMBA = "megatron_nemotron3.layers.mamba"
ROUTER = "megatron.core.transformer.moe.router"
FINALIZE = "megatron.core.distributed.finalize_model_grads"


def norm_groups_of_all_ranks() -> None:
    """A rank divides its width by the groups of all ranks, so the groups of the gated norm are too small."""

    def shrink(norm: Any) -> None:
        norm.group_size //= norm.tp_group.size()

    then(attribute("megatron_nemotron3.layers.norm.GatedGroupRMSNorm"), "__init__", shrink)


def convolution_across_documents() -> None:
    """The convolution of Mamba reads the last tokens of the document before, though the state is reset."""
    arguments(MAMBA, "causal_conv1d", seq_idx=None)


def borders_without_padding() -> None:
    """Mamba resets its state at the borders of unpadded documents, though padding lies between them."""
    in_place_of(MAMBA, "cu_seqlens", lambda packed: packed.cu_seqlens_q)


def half_gradient_of_decay() -> None:
    """Half of the gradient of the decay rates A is lost in the backward pass of the scan."""
    mixer = attribute("megatron.core.ssm.mamba_context_parallel.MambaContextParallel")
    result(mixer, "get_A_log", lambda a_log: (a_log + a_log.detach()) / 2)


def time_steps_of_ones() -> None:
    """The biases of the time steps begin at 1 instead of the inverse softplus of 0.001 to 0.1."""
    then(attribute(f"{MAMBA}.Mamba2Mixer"), "__init__", lambda mixer: mixer.dt_bias.data.fill_(1.0))


def causal_from_the_first_key() -> None:
    """The causal mask is aligned at the first key, so the queries of a later chunk miss the newest keys."""

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, **options)

    in_place_of("megatron_nemotron3.layers.attention", "causal_attention", attend)


def weights_with_expert_bias() -> None:
    """The weights of the chosen experts are taken from the scores with the expert bias, not without."""

    def make(route: Any) -> Any:
        def biased(logits: Any, topk: int, **options: Any) -> Any:
            probs, chosen = route(logits, topk, **options)
            if options.get("expert_bias") is None:
                return probs, chosen
            scores = (torch.sigmoid(logits.float()) + options["expert_bias"]) * chosen
            weights = scores / scores.sum(-1, keepdim=True)
            return (weights * (options["scaling_factor"] or 1)).type_as(probs), chosen

        return biased

    wrap(ROUTER, "topk_routing_with_score_function", make)


def balance_loss_of_a_shard() -> None:
    """With a loss per token, the balance loss is weighed by a rank's share of a sequence, not by all."""

    def make(attach: Any) -> Any:
        def attach_less(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["valid_token_count"] = kwargs["valid_token_count"] / self.tp_cp_group.size()
            return attach(self, *args, **kwargs)

        return attach_less

    wrap(attribute(f"{ROUTER}.TopKRouter"), "attach_and_log_load_balancing_loss", make)


def loads_of_all_steps() -> None:
    """The counts of the experts' tokens are not set to zero after a step, so the bias follows old loads."""
    in_place_of(FINALIZE, "reset_model_temporary_tensors", lambda *_args: None)


def weights_of_own_experts_learn() -> None:
    """Routing weights get gradients from the experts of their own rank only."""

    def make(dispatch: Any) -> Any:
        def detached(self: Any, hidden: Any, routing_map: Any, probs: Any) -> Any:
            own = torch.zeros(probs.shape[1], dtype=torch.bool)
            own[self.local_expert_indices] = True
            return dispatch(self, hidden, routing_map, torch.where(own, probs, probs.detach()))

        return detached

    name = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
    wrap(attribute(name), "dispatch_preprocess", make)


def shared_expert_backward_unreduced() -> None:
    """The gradient of the shared expert's input is not summed over the tensor-parallel ranks."""
    gather = attribute("megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region")

    def change(expert: Any) -> None:
        linear = expert.linear_fc1
        if linear.sequence_parallel:
            linear.sequence_parallel, linear.disable_grad_reduce = False, True
            linear.register_forward_pre_hook(
                lambda _, given: (gather(given[0], tensor_parallel_output_grad=False), *given[1:])
            )

    then(attribute("megatron.core.transformer.moe.shared_experts.SharedExpertMLP"), "__init__", change)


def latent_projections_counted_twice() -> None:
    """Latent projections are marked as split, so each tensor-parallel rank adds them to the gradient norm."""

    def mark(linear: Any) -> None:
        linear.weight.tensor_model_parallel = True

    then(attribute("megatron_nemotron3.layers.linear.DuplicatedLinear"), "__init__", mark)


def mtp_loss_without_mask() -> None:
    """The model does not get the loss mask for MTP, so MTP is trained on masked tokens, too."""
    arguments("megatron.core.models.hybrid.hybrid_model", "process_mtp_loss", loss_mask=None)


def mtp_depths_detached() -> None:
    """Each MTP depth detaches the hidden states that it gets, so its loss does not reach earlier layers."""

    def make(concat: Any) -> Any:
        return lambda self, hidden, embedded: concat(self, hidden.detach(), embedded)

    name = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer"
    wrap(attribute(name), "_concat_embeddings", make)


def mtp_embedding_alone() -> None:
    """The embedding of the last stage, which MTP uses, is not kept the same as that of the first stage."""
    in_place_of(FINALIZE, "_allreduce_word_embedding_grads", lambda *_args: None)


def instances_without_each_other() -> None:
    """Gradients are not summed over the instances of the distributed optimizer."""
    group = attribute("megatron.core.parallel_state.get_tensor_model_parallel_group")

    def separate(ddp: Any) -> None:
        for bucket in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            bucket.inter_distributed_optimizer_instance_group = group()  # of this rank alone

    name = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
    then(attribute(name), "__init__", separate)


def expert_gradients_times_ranks() -> None:
    """Gradients of experts, which come from all expert-parallel ranks, are multiplied by their number."""
    ranks = attribute("megatron.core.parallel_state.get_expert_model_parallel_world_size")

    def multiply(ddp: Any) -> None:
        for buffer in ddp.expert_parallel_buffers:
            buffer.scale_gradients(float(ranks()))

    name = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
    then(attribute(name), "scale_gradients", multiply)


def gradients_in_bf16() -> None:
    """Gradients are added up and reduced in BF16, though the launch asks for FP32."""

    def lower(config: Any) -> None:
        config.grad_reduce_in_fp32 = False

    name = "megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig"
    then(attribute(name), "__post_init__", lower)


OUTSIDE: dict[str, OutsideFault] = {
    "norm_groups_of_all_ranks": OutsideFault(norm_groups_of_all_ranks, "TP2", "state-spaces/mamba#951"),
    "convolution_across_documents": OutsideFault(
        convolution_across_documents, "CP2 packed", "PrimeIntellect-ai/prime-rl#3000", True
    ),
    "borders_without_padding": OutsideFault(
        borders_without_padding, "CP2, padded documents", "NovaSky-AI/SkyRL#2056", True
    ),
    "half_gradient_of_decay": OutsideFault(half_gradient_of_decay, "PP2", "state-spaces/mamba#537", True),
    "time_steps_of_ones": OutsideFault(time_steps_of_ones, "Super", "huggingface/transformers#43717", True),
    "causal_from_the_first_key": OutsideFault(causal_from_the_first_key, "CP2", "pytorch/pytorch#103082"),
    "weights_with_expert_bias": OutsideFault(
        weights_with_expert_bias, "Super", "huggingface/transformers#39581", True
    ),
    "balance_loss_of_a_shard": OutsideFault(balance_loss_of_a_shard, "TP2", "NVIDIA/Megatron-LM#3768"),
    "loads_of_all_steps": OutsideFault(loads_of_all_steps, "EP2", in_one_process=True),
    "weights_of_own_experts_learn": OutsideFault(
        weights_of_own_experts_learn, "EP2", "huggingface/transformers#48205"
    ),
    "shared_expert_backward_unreduced": OutsideFault(
        shared_expert_backward_unreduced, "TP2", "pytorch/torchtitan#1878"
    ),
    "latent_projections_counted_twice": OutsideFault(
        latent_projections_counted_twice, "TP2", "ROCm/TransformerEngine#715"
    ),
    "mtp_loss_without_mask": OutsideFault(
        mtp_loss_without_mask, "DP2", "NVIDIA-NeMo/Megatron-Bridge#6103", True
    ),
    "mtp_depths_detached": OutsideFault(mtp_depths_detached, "PP2 VPP2", "areal-project/AReaL#1670", True),
    "mtp_embedding_alone": OutsideFault(mtp_embedding_alone, "PP2", "NVIDIA-NeMo/Megatron-Bridge#5380"),
    "instances_without_each_other": OutsideFault(instances_without_each_other, "DP4, 2 optimizers"),
    "expert_gradients_times_ranks": OutsideFault(
        expert_gradients_times_ranks, "EP2", "NVIDIA/Megatron-LM#5956"
    ),
    "gradients_in_bf16": OutsideFault(gradients_in_bf16, "DP2, BF16", "NVIDIA/Megatron-LM#6624", True),
    **OUTSIDE_B,
}
