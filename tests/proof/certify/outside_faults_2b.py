"""Faults of MTP, Mamba, attention, routers, dispatch and initial weights; `outside_faults_2` has the rest."""

from __future__ import annotations

from typing import Any

import torch

from tests.proof.certify.outside_faults import OutsideFault
from tests.proof.certify.patching import arguments, attribute, in_place_of, result, then, wrap

MTP = "megatron.core.transformer.multi_token_prediction"
MAMBA = "megatron_nemotron3.layers.mamba"
ATTENTION = "megatron_nemotron3.layers.attention"
ROUTER = "megatron.core.transformer.moe.router"
MOE = "megatron_nemotron3.layers.latent_moe"


def mtp_tokens_counted_before_shift() -> None:
    """The loss of MTP is divided by the tokens of the unshifted mask, of which the shift has dropped some."""

    def make(original: Any) -> Any:
        def roll(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            rolled, total = original(tensor, *args, **kwargs)
            return rolled, tensor.sum() if tensor is not None and tensor.is_floating_point() else total

        return roll

    wrap(MTP, "roll_tensor", make)


def mtp_shifts_across_documents() -> None:
    """MTP shifts labels, mask and tokens along the row and not inside each document."""

    def make(original: Any) -> Any:
        def roll(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "packed_seq_params": None})

        return roll

    wrap(MTP, "roll_tensor", make)


def mtp_embedding_on_its_own() -> None:
    """The gradients of the two copies of the embedding, of which MTP reads the last, are not added up."""
    finalize = "megatron.core.distributed.finalize_model_grads"
    in_place_of(finalize, "_allreduce_word_embedding_grads", lambda *_, **__: None)


def convolution_across_documents() -> None:
    """Mamba's convolution reads the last tokens of the document before."""
    arguments(MAMBA, "causal_conv1d", seq_idx=None)


def documents_begin_one_token_late() -> None:
    """The first token of each document counts as one of the document before in the mixer."""

    def seq_idx(borders: Any, total: int) -> Any:
        position = torch.arange(total, device=borders.device)
        ends = borders[1:].to(position.dtype).contiguous()
        return torch.searchsorted(ends, position, right=False, out_int32=True).unsqueeze(0)

    in_place_of(MAMBA, "seq_idx_from_cu_seqlens", seq_idx)


def gated_norm_groups_cut_twice() -> None:
    """The group size of Mamba's gated norm is the local width over the number of groups of all TP ranks."""

    def cut(norm: Any) -> None:
        norm.group_size //= norm.tp_group.size()

    then(attribute("megatron_nemotron3.layers.norm.GatedGroupRMSNorm"), "__init__", cut)


def gathered_gradient_not_summed() -> None:
    """Of the gradient of the keys and values that it gathered, a context rank keeps its own cut."""
    arguments(ATTENTION, "gather_from_sequence_parallel_region", tensor_parallel_output_grad=False)


def attention_across_documents() -> None:
    """Attention takes a packed row for one document."""
    result(ATTENTION, "document_borders", lambda borders: borders[[0, -1]])


def heads_share_keys_in_turn() -> None:
    """Query head i reads KV head i modulo their number instead of its group's."""

    def make(original: Any) -> Any:
        def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
            times = q.shape[1] // k.shape[1]
            return original(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), **options)

        return attention

    wrap(ATTENTION, "causal_attention", make)


def expert_bias_in_weights() -> None:
    """Chosen experts are weighted by their scores plus the bias, which is there for the choice alone."""

    def make(original: Any) -> Any:
        def route(logits: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
            probs, chosen = original(logits, topk, *args, **kwargs)
            scores = (torch.sigmoid(logits.float()) + kwargs["expert_bias"].float()) * chosen
            scores = scores / scores.sum(-1, keepdim=True)
            return (scores * (kwargs["scaling_factor"] or 1.0)).type_as(probs), chosen

        return route

    wrap(ROUTER, "topk_routing_with_score_function", make)


def expert_bias_by_own_tokens() -> None:
    """A TP rank updates the experts' bias by the loads of its own part of the sequence."""

    def make(original: Any) -> Any:
        def updated(*args: Any, **kwargs: Any) -> Any:
            from megatron.core import parallel_state

            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            return original(*args, **{**kwargs, "tp_dp_cp_group": group})

        return updated

    wrap("megatron.core.distributed.finalize_model_grads", "get_updated_expert_bias", make)


def balance_weighted_by_all_tokens() -> None:
    """With padding the load-balancing loss is weighted by the tokens of all ranks, once for each rank."""
    upstream = attribute(f"{ROUTER}.TopKRouter").attach_and_log_load_balancing_loss
    in_place_of(attribute(f"{MOE}.CountingRouter"), "attach_and_log_load_balancing_loss", upstream)


def balance_loss_not_attached() -> None:
    """The load-balancing loss is computed and logged, but what carries its gradient is not used."""

    def make(original: Any) -> Any:
        def attach(self: Any, activation: Any, *args: Any, **kwargs: Any) -> Any:
            original(self, activation, *args, **kwargs)
            return activation

        return attach

    wrap(attribute(f"{ROUTER}.TopKRouter"), "attach_and_log_load_balancing_loss", make)


def tokens_gradient_in_wrong_order() -> None:
    """The backward of sorting tokens by expert sorts once more instead of undoing the sort."""

    def forward(ctx: Any, x: Any, order: Any, inverse: Any) -> Any:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    in_place_of(attribute(f"{MOE}.Reordered"), "forward", forward)


def router_without_gradient_of_experts() -> None:
    """The weights of experts lose their gradient in the exchange, so routers learn from the balance alone."""

    def make(original: Any) -> Any:
        def dispatch(self: Any, tokens: Any, probs: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, tokens, probs.detach(), *args, **kwargs)

        return dispatch

    owner = attribute("megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher")
    wrap(owner, "token_dispatch", make)


def latent_weights_differ_between_ranks() -> None:
    """The latent projections are drawn from a random stream that differs between TP ranks."""

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

            original(self, *args, **kwargs)
            with get_cuda_rng_tracker().fork():
                kwargs["init_method"](self.weight)

        return init

    wrap(attribute("megatron_nemotron3.layers.linear.DuplicatedLinear"), "__init__", make)


def shared_expert_input_detached() -> None:
    """The gradient of the shared expert does not reach the layers below."""

    def make(original: Any) -> Any:
        return lambda self, hidden_states: original(self, hidden_states.detach())

    wrap(attribute(f"{MOE}.LatentMoELayer"), "shared_experts_compute", make)


def step_bias_without_inverse() -> None:
    """The initial dt_bias is dt itself and not the number whose softplus is dt."""

    def overwrite(mixer: Any) -> None:
        mixer.dt_bias.data = torch.nn.functional.softplus(mixer.dt_bias.data)

    then(attribute(f"{MAMBA}.Mamba2Mixer"), "_new_own_parameters", overwrite)


OUTSIDE_B: dict[str, OutsideFault] = {
    "mtp_tokens_counted_before_shift": OutsideFault(
        mtp_tokens_counted_before_shift, "PP2", "NVIDIA/Megatron-LM#3159", in_one_process=True
    ),
    "mtp_shifts_across_documents": OutsideFault(
        mtp_shifts_across_documents, "CP2 packed", "areal-project/AReaL#1445", in_one_process=True
    ),
    "mtp_embedding_on_its_own": OutsideFault(
        mtp_embedding_on_its_own, "PP2", "NVIDIA-NeMo/Megatron-Bridge#5380"
    ),
    "convolution_across_documents": OutsideFault(
        convolution_across_documents, "CP2 packed", "PrimeIntellect-ai/prime-rl#3000", in_one_process=True
    ),
    "documents_begin_one_token_late": OutsideFault(documents_begin_one_token_late, "CP2, padded documents"),
    "gated_norm_groups_cut_twice": OutsideFault(gated_norm_groups_cut_twice, "TP2", "state-spaces/mamba#951"),
    "gathered_gradient_not_summed": OutsideFault(gathered_gradient_not_summed, "CP2"),
    "attention_across_documents": OutsideFault(
        attention_across_documents, "CP2 packed", "huggingface/trl#6843"
    ),
    "heads_share_keys_in_turn": OutsideFault(heads_share_keys_in_turn, "DP2, BF16", in_one_process=True),
    "expert_bias_in_weights": OutsideFault(
        expert_bias_in_weights, "TP2 EP2", "ml-explore/mlx-lm#1354", in_one_process=True
    ),
    "expert_bias_by_own_tokens": OutsideFault(expert_bias_by_own_tokens, "TP2"),
    "balance_weighted_by_all_tokens": OutsideFault(
        balance_weighted_by_all_tokens, "CP2, padded documents", "NVIDIA/Megatron-LM#7452"
    ),
    "balance_loss_not_attached": OutsideFault(
        balance_loss_not_attached, "DP2", "NVIDIA-NeMo/Automodel#1412", in_one_process=True
    ),
    "tokens_gradient_in_wrong_order": OutsideFault(tokens_gradient_in_wrong_order, "EP2"),
    "router_without_gradient_of_experts": OutsideFault(
        router_without_gradient_of_experts, "TP2 EP2", "huggingface/transformers#48687"
    ),
    "latent_weights_differ_between_ranks": OutsideFault(latent_weights_differ_between_ranks, "TP2"),
    "shared_expert_input_detached": OutsideFault(
        shared_expert_input_detached, "TP2, BF16", in_one_process=True
    ),
    "step_bias_without_inverse": OutsideFault(
        step_bias_without_inverse, "DP2", "NVIDIA-NeMo/Megatron-Bridge#2778", in_one_process=True
    ),
}
