"""What each of Megatron's options becomes in the twin of a launch. Standard library only.

An option that stands in no table describes what is computed and is kept. So an option that this file does not
know is never dropped in silence: Megatron accepts it on a CPU or refuses it with its own message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Sizes of the model; the twin has its own.
SIZES = frozenset(
    (
        *("--hybrid-layer-pattern", "--num-layers", "--hidden-size", "--ffn-hidden-size", "--vocab-size"),
        *("--num-attention-heads", "--num-query-groups", "--group-query-attention", "--kv-channels"),
        *("--mamba-num-heads", "--mamba-head-dim", "--mamba-state-dim", "--mamba-num-groups"),
        *("--num-experts", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"),
        *("--moe-latent-size", "--moe-router-topk", "--mtp-num-layers", "--init-method-std"),
        *("--seq-length", "--max-position-embeddings", "--make-vocab-size-divisible-by"),
        *("--padded-vocab-size", "--is-hybrid-model", "--spec", "--decoder-first-pipeline-num-layers"),
        *("--decoder-last-pipeline-num-layers", "--num-layers-per-virtual-pipeline-stage"),
        *("--num-virtual-stages-per-pipeline-rank", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"),
    )
)
#: Sizes of the layout; the twin has its own, one process has none.
LAYOUT = frozenset(
    (
        *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
        *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel"),
        *("--num-distributed-optimizer-instances",),
    )
)
#: Batch and schedule: a few steps of a constant rate instead.
SCHEDULE = re.compile(
    r"--(micro-batch-size|global-batch-size|rampup-batch-size|decrease-batch-size-if-needed|step-batch-size.*"
    r"|train-iters|train-samples|train-sync-interval|lr|min-lr|lr-.*|adam-eps|override-opt-param-scheduler"
    r"|override-opt_param-scheduler|use-checkpoint-opt-param-scheduler|start-weight-decay|end-weight-decay"
    r"|weight-decay-incr-style|use-checkpoint-args|full-validation|phase-transition-iterations)"
)
#: Data, checkpoints, logs and the host: they decide nothing that is compared here.
OUTSIDE = re.compile(
    r"--(data-.*|per-split-data-args-path|split|train-data-path|valid-data-path|test-data-path|mock-data"
    r"|tokenizer-.*|tiktoken-.*|trust-remote-code|vocab-file|merge-file|sft-tokenizer-.*|num-workers"
    r"|dataloader-type|no-mmap-bin-files|no-create-attention-mask-in-dataloader|num-dataset-builder-threads"
    r"|object-storage-cache-path|mid-level-dataset-surplus|allow-ambiguous-pad-tokens"
    r"|save.*|load.*|ckpt-.*|async-.*|no-async-.*|use-persistent-ckpt-worker|no-use-persistent-.*|no-load-.*"
    r"|no-save-.*|finetune|pretrained-checkpoint|dist-ckpt-.*|auto-detect-ckpt-format|use-dist-ckpt.*"
    r"|non-persistent-.*|exit-.*|retro-.*|check-weight-hash-.*|replication.*|verify-integrity"
    r"|log-.*|no-log-.*|timing-.*|tensorboard-.*|wandb-.*|mlflow-.*|one-logger-.*|no-one-logger|enable-one-.*"
    r"|eval-.*|skip-train|test-mode|profile.*|use-pytorch-profiler|nvtx-.*|record-memory-history|memory-.*"
    r"|manual-gc.*|distributed-timeout-.*|distributed-backend|disable-gloo.*|enable-gloo-.*|local-rank"
    r"|high-priority-stream-groups|nccl-.*|use-tp-pp-dp-mapping|use-cpu-initialization|rerun-.*|error-.*"
    r"|enable-ft-package|calc-ft-timeouts|inprocess-.*|disable-straggler-.*|straggler-.*|enable-experimental"
    r"|use-mcore-models|seed|data-parallel-random-init|align-.*|empty-unused-memory-level|lazy-mpu-init"
    r"|export-.*|deterministic-mode|batch-invariant-mode|logging-level|config-logger-dir|device)"
)


@dataclass(frozen=True)
class OnGpu:
    """Options that need a GPU or Transformer Engine, and what the twin has instead."""

    options: re.Pattern[str]
    what: str
    instead: str


def _row(options: str, what: str, instead: str) -> OnGpu:
    return OnGpu(re.compile(f"--({options})"), what, instead)


ON_GPU: tuple[OnGpu, ...] = (
    _row(
        "transformer-impl|attention-backend|use-flash-attn|no-masked-softmax-fusion|no-persist-layer-norm"
        "|no-bias-dropout-fusion|no-bias-swiglu-fusion|no-bias-gelu-fusion|no-rope-fusion"
        "|no-gradient-accumulation-fusion|gradient-accumulation-fusion|apply-rope-fusion|fallback-to-eager.*",
        "Transformer Engine's and mamba-ssm's kernels",
        "the torch modules of this package",
    ),
    _row(
        "bf16|fp16|fp8-.*|fp4-.*|first-last-layers-bf16|num-layers-at-(start|end)-in-bf16|bf16-.*|fp16-.*"
        "|te-precision-config-file|reuse-grad-buf-for-mxfp8-param-ag|moe-router-padding-for-quantization"
        "|moe-router-padding-for-fp8|keep-fp8-.*|disable-bf16-.*|loss-scale.*|initial-loss-scale"
        "|min-loss-scale|hysteresis|no-fp8-.*|no-fp4-.*",
        "the number formats",
        "FP32, so that rounding hides no missing or repeated term",
    ),
    _row(
        "grad-reduce-in-bf16|accumulate-allreduce-grads-in-fp32|attention-softmax-in-fp32"
        "|use-precision-aware-optimizer|main-grads-dtype|main-params-dtype|exp-avg-dtype|exp-avg-sq-dtype"
        "|megatron-fsdp-.*-dtype|fp32-residual-connection|no-fp32-.*",
        "number formats of gradients and optimizer",
        "FP32",
    ),
    _row(
        "cuda-graph-.*|enable-cuda-graph|external-cuda-graph|te-rng-tracker|inference-rng-tracker"
        "|delay-offload-until-cuda-graph|moe-use-device-initiated-.*|moe-paged-.*",
        "CUDA graphs",
        "plain calls",
    ),
    _row(
        "moe-flex-.*|moe-enable-deepep|moe-hybridep-.*|moe-deepep-.*|moe-permute-fusion-into-hybridep"
        "|use-nccl-ub|hybridep-.*",
        "DeepEP and HybridEP",
        "the alltoall dispatcher",
    ),
    _row(
        "cross-entropy-loss-fusion|cross-entropy-fusion-impl|moe-grouped-gemm|moe-permute-fusion"
        "|moe-router-fusion|use-fused-weighted-squared-relu|use-transformer-engine-op-fuser"
        "|moe-mlp-glu-interleave-size|moe-use-legacy-grouped-gemm",
        "fused kernels",
        "the torch operations that define them",
    ),
    _row(
        "tp-comm-.*|overlap-moe-expert-parallel-comm|delay-wgrad-compute|moe-shared-expert-overlap"
        "|ep-overlap-.*|disable-tp-comm-.*|no-delay-.*",
        "communication overlapped by Transformer Engine or by streams",
        "the same communication without overlap",
    ),
    _row(
        "cpu-offloading.*|fine-grained-.*|offload-.*|optimizer-cpu-offload|optimizer-offload-fraction"
        "|use-torch-optimizer-for-cpu-offload|overlap-cpu-optimizer-d2h-h2d|no-pin-cpu-.*"
        "|min-offloaded-tensor-size",
        "offload to the host",
        "everything in memory",
    ),
    _row(
        "use-megatron-fsdp|use-torch-fsdp2|data-parallel-sharding-strategy|outer-dp-sharding-strategy"
        "|init-model-with-meta-device|suggested-communication-unit-size|fsdp-.*|use-custom-fsdp"
        "|megatron-fsdp-.*|grad-comm-.*|num-distributed-data-parallel-.*",
        "fully sharded data parallelism",
        "Megatron's DistributedDataParallel with the same ranks",
    ),
)
#: Ways to compute the same: the twin keeps them, the one process does without.
MECHANISM = re.compile(
    r"--(recompute-.*|moe-layer-recompute|distribute-saved-activations|overlap-.*|no-overlap-.*"
    r"|use-distributed-optimizer|ddp-.*|moe-token-dispatcher-type|defer-embedding-wgrad-compute"
    r"|wgrad-deferral-limit|microbatch-group-size-per-virtual-pipeline-stage|no-async-tensor-.*"
    r"|variable-seq-lengths|cp-comm-type|hierarchical-context-parallel-sizes|no-align-.*"
    r"|deallocate-pipeline-outputs|no-scatter-gather-tensors-in-pipeline|no-gradient-reduce-div-fusion"
    r"|gradient-reduce-div-fusion|check-for-nan-in-loss-and-grad|no-check-for-nan.*|barrier-with-.*"
    r"|pipeline-model-parallel-comm-backend)"
)
#: What an option computes depends on the layout by design, so no layout equals one process.
BY_LAYOUT = {
    "--moe-expert-capacity-factor": "drops tokens by their number on each rank",
    "--moe-input-jitter-eps": "adds random numbers that differ between layouts",
    "--moe-router-force-load-balancing": "routes by random numbers that differ between layouts",
    "--attention-dropout": "drops by random numbers that differ between layouts",
    "--hidden-dropout": "drops by random numbers that differ between layouts",
}
