"""Published sets as Bridge's recipes and as Megatron's parser have them, and where the two may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import megatron.core as core

from megatron_nemotron3 import models
from megatron_nemotron3.launch.performance import RUNS

Key = tuple[str, str, str]


class Case(NamedTuple):
    """A published set: what the recipe sets, and what Megatron makes of our options; by part."""

    key: Key
    theirs: dict[str, dict[str, Any]]
    ours: dict[str, dict[str, Any]]


class Difference(NamedTuple):
    """A field that may differ, and why."""

    part: str
    fields: str
    reason: str
    #: (set, value of the recipe, our value): whether the reason holds.
    holds: Callable[[Case, Any, Any], bool] = lambda case, theirs, ours: True


def _dense(case: Case, theirs: Any, ours: Any) -> bool:
    return not models.get(case.key[0]).is_moe


def _unquantized(case: Case, theirs: Any, ours: Any) -> bool:
    return case.ours["transformer"]["fp8"] is None


def _no_kept_layers(case: Case, theirs: Any, ours: Any) -> bool:
    return not case.ours["transformer"]["first_last_layers_bf16"]


def _same_set(case: Case, theirs: Any, ours: Any) -> bool:
    return sorted(theirs or ()) == sorted(ours or ())


def _of_report(case: Case, theirs: Any, ours: Any) -> bool:
    config = models.get(case.key[0])
    return bool(ours in (config.init_method_std, config.mtp_loss_scaling_factor))


MEGATRON_LM = "a default of Megatron-LM's parser that nothing here reads"
BENCHMARK = "only a benchmark may do it"
NO_SUCH_LAYER = "the model has no MoE layers"
SPELLING = "another spelling of the same value"
REPORT = "the model's report says otherwise, and it is the model"
OF_PRECISION = (
    "which modules are quantized is the model's published recipe (docs/nvfp4.md), not the benchmark's"
)
SCHEDULE = "part of the schedule, which the user chooses"

DIFFERENCES = (
    Difference("transformer", "moe_router_force_load_balancing", BENCHMARK, lambda c, t, o: t and not o),
    Difference("ddp", "check_for_nan_in_grad", BENCHMARK, lambda c, t, o: o and not t),
    Difference(
        "transformer",
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
        "a capacity drops tokens, which no report of these models does",
        lambda c, t, o: c.key[:2] == ("super", "h100"),
    ),
    Difference(
        "transformer", "init_method_std embedding_init_method_std mtp_loss_scaling_factor", REPORT, _of_report
    ),
    Difference(
        "transformer",
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 quant_recipe",
        OF_PRECISION,
        lambda c, t, o: c.key[2] != "bf16",
    ),
    Difference(
        "transformer", "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", MEGATRON_LM, _no_kept_layers
    ),
    Difference(
        "transformer",
        "fp4_param",
        "parameters would be FP4 before the precision file is read (a rule refuses it)",
    ),
    Difference("ddp", "fp4_param_gather", "as fp4_param", lambda c, t, o: c.key[2] == "nvfp4"),
    Difference(
        "transformer",
        "fp8_dot_product_attention",
        "no version of Megatron has an option for it; flags says so",
        lambda c, t, o: t and not o,
    ),
    Difference(
        "transformer",
        "moe_use_grouped_tensor",
        "megatron-core 0.19 does not have it; main derives it from the op fuser",
        lambda c, t, o: o is None and core.__version__ < "0.20",
    ),
    Difference(
        "transformer",
        "cross_entropy_fusion_impl",
        "Megatron-LM refuses te",
        lambda c, t, o: (t, o) == ("te", "native"),
    ),
    Difference(
        "transformer",
        "calculate_per_token_loss",
        "every model with MTP is trained so here, as in NVIDIA's release test of Super",
        lambda c, t, o: models.get(c.key[0]).has_mtp,
    ),
    Difference(
        "ddp",
        "average_in_collective",
        "the same mean, which DistributedDataParallel refuses with --calculate-per-token-loss: MTP and "
        "fine-tuning need that",
        lambda c, t, o: t and not o,
    ),
    Difference(
        "transformer",
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "for ranks with different numbers of tokens, which no launch of ours has; costs a host "
        "synchronization per layer",
        lambda c, t, o: t and not o,
    ),
    Difference("optimizer", "lr min_lr", SCHEDULE),
    Difference("transformer", "moe_hybridep_num_sms", "the old name of moe_flex_dispatcher_num_sms"),
    Difference(
        "transformer",
        "moe_grouped_gemm moe_permute_fusion moe_router_dtype moe_router_enable_expert_bias "
        "moe_aux_loss_coeff moe_router_load_balancing_type moe_router_score_function "
        "moe_shared_expert_overlap moe_token_dispatcher_type",
        NO_SUCH_LAYER,
        _dense,
    ),
    Difference(
        "transformer",
        "attention_backend",
        "the recipe leaves the choice to TransformerEngine",
        lambda c, t, o: (t, o) == (None, "auto"),
    ),
    Difference(
        "transformer",
        "use_te_rng_tracker",
        "Megatron-LM keeps it outside its configuration; --te-rng-tracker is compared as an argument",
    ),
    Difference("transformer", "cuda_graph_modules", "another order", _same_set),
    Difference("transformer", "offload_modules", SPELLING, lambda c, t, o: not t and not o),
    Difference(
        "transformer",
        "moe_router_num_groups moe_router_group_topk",
        SPELLING,
        lambda c, t, o: (t, o) == (1, None),
    ),
    Difference("transformer", "mtp_num_layers", SPELLING, lambda c, t, o: not t and not o),
    Difference("transformer", "mtp_hybrid_override_pattern", "part of --hybrid-layer-pattern"),
    Difference("transformer", "use_cpu_initialization", SPELLING, lambda c, t, o: not t and not o),
    Difference("transformer", "apply_rope_fusion", "the models have no position embedding"),
    Difference(
        "transformer",
        "batch_p2p_comm",
        "there are no pipeline stages",
        lambda c, t, o: RUNS[c.key].layout.pp == 1,
    ),
    Difference(
        "transformer",
        "cp_comm_type",
        "there is no context parallelism",
        lambda c, t, o: RUNS[c.key].layout.cp == 1,
    ),
    Difference(
        "transformer", "wgrad_deferral_limit", "the deferral is off", lambda c, t, o: t <= 0 and o <= 0
    ),
    Difference("ddp", "delay_wgrad_compute", SPELLING, lambda c, t, o: not t and not o),
    Difference(
        "transformer",
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        "the parser fills it in",
        lambda c, t, o: t is None,
    ),
    Difference("transformer", "inference_sampling_seed", MEGATRON_LM),
    Difference("transformer", "fp8_recipe", MEGATRON_LM, _unquantized),
    Difference("optimizer", "fp8_recipe", MEGATRON_LM, _unquantized),
    Difference("optimizer", "barrier_with_L1_time muon_momentum", MEGATRON_LM),
    Difference(
        "optimizer",
        "optimizer_offload_fraction",
        MEGATRON_LM,
        lambda c, t, o: not c.ours["optimizer"]["optimizer_cpu_offload"],
    ),
    Difference(
        "ddp",
        "data_parallel_sharding_strategy megatron_fsdp_use_decoupled_grad",
        "read only with Megatron-FSDP",
        lambda c, t, o: not c.ours["ddp"]["use_megatron_fsdp"],
    ),
    Difference("ddp", "use_custom_fsdp", "the old name of use_megatron_fsdp"),
    Difference("train", "micro_batch_size global_batch_size seq_length", SCHEDULE),
    Difference(
        "checkpoint",
        "async_save",
        "the recipes of this package save asynchronously on every GPU",
        lambda c, t, o: t and not o,
    ),
    Difference(
        "distributed",
        "high_priority_stream_groups",
        "the parser adds the groups of Megatron-FSDP",
        lambda c, t, o: set(t) < set(o),
    ),
)


#: Differences that megatron-core's main does not have.
ONLY_ON_19 = {("transformer", "moe_use_grouped_tensor"), ("ddp", "megatron_fsdp_use_decoupled_grad")}


def differing(case: Case) -> Iterator[tuple[str, str, Any, Any]]:
    """(part, field, value of the recipe, our value) of every field that differs."""
    for part, theirs in case.theirs.items():
        for field in sorted(set(theirs) | set(case.ours[part])):
            # Functions of the initialization: another field has their standard deviation.
            if field.startswith("_") or field.endswith("init_method"):
                continue
            values = theirs.get(field), case.ours[part].get(field)
            if values[0] != values[1]:
                yield part, field, *values
