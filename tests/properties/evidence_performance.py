"""Evidence for the rules on performance options."""

from __future__ import annotations

from tests.properties import measure_performance as measure
from tests.properties.entries import MTP, Evidence, NotShown, Refused, Wrong, case, model, schedule

_FSDP = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy")
_BY_TRAINING = (
    "tests/parallel/test_options.py trains three steps, on a CPU: the gradients are not those of one rank"
)

PERFORMANCE: dict[str, Evidence] = {
    "option-without-effect": Wrong(
        case=case(None, "--recompute-modules", "moe"),
        measured=measure.without_effect,
        shown="trains the same with 4 such options, refuses all of them together with what they need",
    ),
    "cpu-offloading-num-layers": Wrong(
        case=case(None, "--cpu-offloading-num-layers", "1"),
        measured=measure.layer_offloading,
        shown="the same run; the hybrid stack has no offload context",
    ),
    "packed-graphs": Wrong(
        case=case(None, "--sft", "--cuda-graph-impl", "transformer_engine", backend="te"),
        measured=measure.packed_replay,
        shown="replay: AssertionError: CUDA graph accepts only Tensor inputs",
    ),
    "hybridep-domain": Wrong(
        case=case(
            model(num_moe_experts=6),
            *("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"),
            ep=6,
            dp=12,
            schedule=schedule(global_batch_size=12),
            backend="te",
            precision="bf16",
            gpu="h100",
        ),
        measured=measure.hybridep_groups,
        shown="ranks 6 to 11 are an expert group, on NVLink domains 0 and 1",
    ),
    "activation-offloading": Refused(
        case=case(None, "--fine-grained-activation-offloading", "--offload-modules", "moe_act"),
        stage="arguments",
        message="Fine-grained activation offloading is only supported with transformer_engine implementation",
    ),
    "optimizer-types": Refused(
        case=case(None, "--exp-avg-dtype", "bf16"),
        stage="step",
        message="exp_avg_dtype can only be fp32 when not using precision-aware optimizer",
    ),
    "precision-aware-optimizer": Refused(
        case=case(None, "--use-precision-aware-optimizer", precision="bf16"),
        stage="step",
        message="--use-precision-aware-optimizer requires FusedAdam from TransformerEngine",
    ),
    "moe-router-fusion": Wrong(
        case=case(None, "--moe-router-fusion"),
        measured=measure.fused_router,
        shown="choosing experts: ValueError: fused_topk_with_score_function is not available. Please install "
        "TE >= 2.6.0.",
    ),
    "fsdp-pipeline": Refused(
        case=case(None, *_FSDP, "optim_grads", pp=2, dp=2),
        stage="model",
        message="EinopsError",
    ),
    "fsdp-expert-dp": NotShown(
        case=case(None, *_FSDP, "optim_grads", dp=2, ep=2),
        why=_BY_TRAINING,
    ),
    "fsdp-mtp-recompute": NotShown(
        case=case(
            model(**MTP, mtp_use_repeated_layer=True),
            *(*_FSDP, "optim_grads", "--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
            dp=2,
        ),
        why=_BY_TRAINING,
    ),
    "hsdp-overlap": NotShown(
        case=case(None, *_FSDP, "optim_grads", "--num-distributed-optimizer-instances", "2", dp=4),
        why=_BY_TRAINING,
    ),
    "hsdp-outer-norm": NotShown(
        case=case(
            None,
            *(*_FSDP, "optim_grads_params", "--num-distributed-optimizer-instances", "2"),
            *("--overlap-grad-reduce", "--outer-dp-sharding-strategy", "optim"),
            dp=4,
        ),
        why="tests/parallel/test_options.py trains three steps, on a CPU: the norms of the two instances are "
        "those of their parts, and without clipping all other numbers are those of one rank",
    ),
    "optimizer-instances": Refused(
        case=case(None, "--num-distributed-optimizer-instances", "2", dp=2, ep=2),
        stage="groups",
        message="Expert data parallel size should be divisible by partial DistOpt shard factor",
    ),
}
