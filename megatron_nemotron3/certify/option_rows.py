"""The rows of `options`: every option of the parsers of `versions.KNOWN` stands in exactly one. Standard
library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fate(enum.Enum):
    """What becomes of an option."""

    KEPT = "kept as it is"
    SIZED = "kept in structure, made small"
    REPLACED = "replaced"
    DROPPED = "without effect on what is compared"
    UNTESTED = "not testable here"


@dataclass(frozen=True)
class Row:
    """Options with one fate."""

    fate: Fate
    #: What they are, as a sentence names them.
    what: str
    #: What the twin has instead, or why it can have nothing.
    instead: str
    #: Names without their dashes, or patterns of names (`fnmatch`).
    names: tuple[str, ...]
    #: A way to compute the same, which one process does without.
    mechanism: bool = False
    #: Names of those that turn the others on; without one of them none has an effect.
    switches: tuple[str, ...] = ()


def _row(
    fate: Fate, what: str, instead: str, names: str, *, mechanism: bool = False, switches: str = ""
) -> Row:
    return Row(fate, what, instead, tuple(names.split()), mechanism, tuple(switches.split()))


MODEL_SIZES = _row(
    Fate.SIZED,
    "sizes of the model",
    "small ones with the same relations",
    """
    hybrid-layer-pattern hybrid-override-pattern mtp-hybrid-override-pattern num-layers hidden-size
    ffn-hidden-size vocab-size num-attention-heads num-query-groups group-query-attention kv-channels
    mamba-num-heads mamba-head-dim mamba-state-dim mamba-num-groups num-experts moe-ffn-hidden-size
    moe-shared-expert-intermediate-size moe-latent-size moe-router-topk moe-router-num-groups
    moe-router-group-topk mtp-num-layers init-method-std seq-length max-position-embeddings
    make-vocab-size-divisible-by padded-vocab-size is-hybrid-model spec decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers
    """,
)
LAYOUT_SIZES = _row(
    Fate.SIZED,
    "sizes of the layout",
    "small layouts with the same parallel dimensions",
    """
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size sequence-parallel
    num-distributed-optimizer-instances ddp-bucket-size
    """,
)
SCHEDULE = _row(
    Fate.REPLACED,
    "batch and schedule",
    "two steps of a constant learning rate, on a few short sequences",
    """
    micro-batch-size global-batch-size rampup-batch-size decrease-batch-size-if-needed
    step-batch-size-schedule train-iters train-samples train-sync-interval phase-transition-iterations
    lr min-lr lr-* adam-eps start-weight-decay end-weight-decay weight-decay-incr-style warmup
    override-opt-param-scheduler override-opt_param-scheduler use-checkpoint-opt-param-scheduler
    use-checkpoint-opt_param-scheduler full-validation iterations-to-skip iter-per-epoch
    """,
)
#: The model with its loss and its optimizer.
MEANING = _row(
    Fate.KEPT,
    "what is computed",
    "",
    """
    normalization norm-epsilon apply-layernorm-1p squared-relu swiglu quick-geglu openai-gelu
    glu-linear-offset activation-func-clamp-value disable-bias-linear add-qkv-bias
    untie-embeddings-and-output-weights apply-query-key-layer-scaling
    apply-residual-connection-post-layernorm qk-layernorm qk-l2-norm qk-clip qk-clip-* attention-output-gate
    softmax-type window-size window-attn-skip-freq embedding-init-method-std init-method-xavier-uniform
    position-embedding-type no-position-embedding use-rotary-position-embeddings rotary-* use-rope-scaling
    rope-* no-rope-freq mrope-section yarn-* no-yarn-* relative-attention-* mscale mscale-all-dim
    multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    cache-mla-latents mla-down-proj-fusion dsa-* no-dsa-* disable-dsa-* experimental-attention-variant
    linear-* gdp-num-* enable-mhc-connections mhc-init-gating-factor mhc-num-residual-streams
    mhc-sinkhorn-iterations use-mup mup-* heterogeneous-layers-config-* yaml-cfg
    moe-router-score-function moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-dtype
    moe-router-load-balancing-type moe-router-pre-softmax moe-router-topk-scaling-factor
    moe-router-quantile-balancing-ema moe-aux-loss-coeff moe-z-loss-coeff moe-shared-expert-gate
    moe-apply-probs-on-input moe-layer-freq moe-use-upcycling moe-upcycling-granularity moe-single-grouped-*
    mtp-loss-scaling-factor mtp-use-repeated-layer mtp-detach-heads mtp-standalone mtp-hsm
    calculate-per-token-loss weight-decay adam-beta1 adam-beta2 sgd-momentum lion-* muon-* optimizer
    clip-grad decoupled-lr decoupled-min-lr apply-wd-to-qk-layernorm no-weight-decay-cond-type
    freeze-all-layers num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
    pipeline-model-parallel-layout account-for-* encoder-num-layers decoder-num-layers
    encoder-seq-length decoder-seq-length hybrid-context-parallel max-seqlen-per-dp-cp-rank
    tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
    """,
)
#: What the batches are like; `twin.Batch` says it in tokens.
ROWS_OF_DATA = _row(
    Fate.KEPT,
    "packing and masks",
    "",
    "sft eod-mask-loss dataloader-inter-document-masking",
)
MECHANISM = _row(
    Fate.KEPT,
    "how it is computed",
    "",
    """
    recompute-* moe-layer-recompute mhc-recompute-layer-num distribute-saved-activations
    checkpoint-activations overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step
    overlap-p2p-communication-warmup-flush no-overlap-p2p-communication use-distributed-optimizer
    ddp-num-buckets ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw ddp-param-name-patterns-*
    ddp-reduce-scatter-with-fp32-accumulation
    moe-token-dispatcher-type
    microbatch-group-size-per-virtual-pipeline-stage cp-comm-type no-align-grad-reduce no-align-param-gather
    disable-align-grad-reduce no-gradient-reduce-div-fusion no-check-for-nan-in-loss-and-grad
    check-for-large-grads check-for-spiky-loss use-megatron-fsdp data-parallel-sharding-strategy
    outer-dp-sharding-strategy enable-full-sharding-in-hsdp suggested-communication-unit-size
    megatron-fsdp-version no-use-layer-wise-param-layout disable-clone-scatter-output-in-embedding
    no-clone-scatter-output-in-embedding mlp-chunks-for-training
    """,
    mechanism=True,
)

DROPPED = (
    _row(
        Fate.DROPPED,
        "data and tokenizer",
        "",
        """
        data-path data-args-path data-cache-path per-split-data-args-path train-data-path valid-data-path
        test-data-path per-dataset-sequences-path split mock-data dataloader-type dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap num-workers num-dataset-builder-threads no-mmap-bin-files
        object-storage-cache-path mid-level-dataset-surplus allow-ambiguous-pad-tokens no-data-sharding
        no-create-attention-mask-in-dataloader multiple-validation-sets validation-set-names fim-*
        reset-position-ids tokenizer-* no-tokenizer-* disable-tokenizer-* tiktoken-* null-tokenizer-*
        trust-remote-code vocab-file merge-file vocab-extra-ids chat-template sft-tokenizer-prompt-format
        use-gigatoken disable-pad-vocab-size no-pad-vocab-size short-seq-prob sample-rate mask-prob
        no-use-tokenizer-model-from-checkpoint-args
        disable-use-tokenizer-model-from-checkpoint-args finetune-data-files finetune-data-split
        finetune-hf-dataset enable-msc disable-msc max-tokens-to-oom
        """,
    ),
    _row(
        Fate.DROPPED,
        "checkpoints",
        "",
        """
        save save-interval save-retain-interval save-activations-interval save-*grads-interval
        save-params-interval save-tokens-per-expert-interval persistent-save-interval load
        load-main-params-from-ckpt ckpt-* async-* use-persistent-ckpt-worker no-load-* no-save-* finetune
        pretrained-checkpoint dist-ckpt-* use-dist-ckpt auto-detect-ckpt-format non-persistent-* replication
        replication-* verify-integrity override-ckpt-iteration use-checkpoint-args
        use-mp-args-from-checkpoint-args exit-on-missing-checkpoint no-ckpt-* disable-ckpt-*
        disable-save-tokenizer-assets disable-stream-ckpt-dequant no-stream-ckpt-dequant
        disable-strict-fsdp-dtensor-load no-strict-fsdp-dtensor-load distrib-optim-fully-reshardable-*
        dump-param-to-param-group-map no-initialization
        """,
    ),
    _row(
        Fate.DROPPED,
        "logs and profiles",
        "",
        """
        log-* no-log-* disable-log-* logging-level timing-* tensorboard-* wandb-* one-logger-* no-one-logger
        app-tag-* otel-* eval-* start-eval-at-iter skip-train profile profile-* use-pytorch-profiler
        pytorch-profiler-* nvtx-ranges record-memory-history record-shapes memory-snapshot-path
        config-logger-dir moe-per-layer-logging moe-routing-trace-* no-barrier-with-level-1-timing
        result-rejected-tracker-filename run-workload-inspector-server
        """,
    ),
    _row(
        Fate.DROPPED,
        "host, network and restarts",
        "",
        """
        exit-duration-in-mins exit-interval exit-signal exit-signal-handler exit-signal-handler-* manual-gc
        manual-gc-interval no-manual-gc-eval disable-manual-gc-eval distributed-timeout-* distributed-backend
        disable-gloo-process-groups local-rank nccl-communicator-config-path high-priority-stream-groups
        high-priority-a2a-comm-stream pipeline-model-parallel-comm-backend create-all-gather-group
        use-sharp sharp-enabled-group use-cpu-initialization lazy-mpu-init data-parallel-random-init seed
        use-same-sampling-seed-across-dp-ranks rerun-mode error-injection-* fault-injector-*
        enable-ft-package calc-ft-timeouts ft-num-warmup-iters inprocess-* log-straggler straggler-*
        disable-straggler-on-startup gpu-sniff-test-interval flight-recorder-* no-flight-recorder-*
        disable-flight-recorder-* adlr-autoresume adlr-autoresume-interval enable-experimental
        use-mcore-models deterministic-mode batch-invariant-mode batch-invariant-backend test-mode
        check-weight-hash-across-dp-replicas-interval empty-unused-memory-level fake-process-group
        onnx-safe disable-jit-fuser init-model-with-meta-device disable-symmetric-registration
        """,
    ),
    _row(
        Fate.DROPPED,
        "programs other than training: inference, vision, retrieval, BERT and T5",
        "",
        """
        inference-* no-inference-* mamba-inference-* decode-only-cuda-graphs flash-decode
        enable-chunked-prefill mlp-chunks-for-prefill use-legacy-static-engine nccl-all-reduce-for-prefill
        symmetric-ar-type num-speculative-tokens moe-pad-experts-for-cuda-graph-inference
        output-bert-embeddings bert-* biencoder-* block-data-path titles-data-path evidence-data-path
        embedding-path ict-* indexer-* query-in-block-prob retriever-* use-one-sent-docs img-h img-w
        num-channels num-classes patch-dim classes-fraction data-per-class-fraction dino-* head-lr-mult
        mask-type mask-factor swin-backbone-type vision-* batch-size model-parallel-size
        """,
    ),
)
REPLACED = (
    _row(
        Fate.REPLACED,
        "number formats",
        "FP32, so that rounding hides no missing or repeated term; the census shows the formats",
        """
        bf16 fp16 fp16-lm-cross-entropy fp8-* no-fp8-wgrad disable-fp8-wgrad fp4-* first-last-layers-bf16
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 te-precision-config-file
        reuse-grad-buf-for-mxfp8-param-ag moe-router-padding-for-quantization moe-router-padding-for-fp8
        keep-fp8-transpose-cache disable-bf16-reduced-precision-matmul loss-scale loss-scale-window
        initial-loss-scale min-loss-scale hysteresis output-logit-dtype mamba-training-ssm-states-dtype
        moe-combine-bwd-dtype moe-dispatch-fwd-dtype attention-softmax-in-fp32 fp32-residual-connection
        """,
    ),
    _row(
        Fate.REPLACED,
        "number formats of gradients and optimizer",
        "FP32",
        """
        grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 use-precision-aware-optimizer main-grads-dtype
        main-params-dtype exp-avg-dtype exp-avg-sq-dtype megatron-fsdp-*-dtype
        gtp-remat-reduce-scatter-with-fp32-accumulation
        """,
    ),
)
UNTESTED = (
    _row(
        Fate.UNTESTED,
        "kernels of Transformer Engine and mamba-ssm",
        "the torch modules of this package",
        """
        transformer-impl attention-backend use-flash-attn flash-attention-version no-masked-softmax-fusion
        no-persist-layer-norm no-bias-dropout-fusion no-bias-swiglu-fusion no-bias-gelu-fusion no-rope-fusion
        no-gradient-accumulation-fusion use-te-activation-func disable-mamba-mem-eff-path
        fused-residual-rmsnorm kitchen-attention-backend use-kitchen-attention gdp-cutedsl-kernel
        """,
    ),
    _row(
        Fate.UNTESTED,
        "fused kernels",
        "the torch operations that define them",
        """
        cross-entropy-loss-fusion cross-entropy-fusion-impl moe-grouped-gemm moe-permute-fusion
        moe-router-fusion use-fused-weighted-squared-relu use-transformer-engine-op-fuser
        moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size moe-use-grouped-tensor
        use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert
        """,
    ),
    _row(
        Fate.UNTESTED,
        "CUDA graphs",
        "plain calls",
        """
        cuda-graph-* enable-cuda-graph external-cuda-graph te-rng-tracker delay-offload-until-cuda-graph
        moe-paged-stash moe-paged-stash-* optimizer-cuda-graph
        """,
        switches="cuda-graph-impl enable-cuda-graph external-cuda-graph optimizer-cuda-graph moe-paged-stash",
    ),
    _row(
        Fate.UNTESTED,
        "DeepEP, HybridEP and NCCL's own buffers",
        "the alltoall dispatcher",
        """
        moe-flex-* moe-enable-deepep moe-hybridep-* moe-deepep-* moe-permute-fusion-into-hybridep
        moe-ncclep-* use-nccl-ub gtp-*
        """,
        switches="moe-token-dispatcher-type moe-enable-deepep use-nccl-ub",
    ),
    _row(
        Fate.UNTESTED,
        "communication overlapped by Transformer Engine or by streams",
        "the same communication without overlap",
        """
        tp-comm-* no-tp-comm-* disable-tp-comm-* overlap-moe-expert-parallel-comm delay-wgrad-compute
        moe-shared-expert-overlap ep-overlap-early-attn-memory-release
        overlap-dispatch-backward-with-experts-wgrad use-ring-exchange-p2p defer-embedding-wgrad-compute
        wgrad-deferral-limit
        """,
        switches="tp-comm-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute overlap-dispatch-* "
        "moe-shared-expert-overlap use-ring-exchange-p2p defer-embedding-wgrad-compute",
    ),
    _row(
        Fate.UNTESTED,
        "offload to the host",
        "everything in memory",
        """
        cpu-offloading-* fine-grained-* offload-modules activation-offload-fraction
        delta-offload-bytes-across-pp-ranks optimizer-cpu-offload optimizer-offload-fraction
        use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params
        min-offloaded-tensor-size
        """,
        switches="cpu-offloading-num-layers fine-grained-activation-offloading optimizer-cpu-offload",
    ),
    _row(
        Fate.UNTESTED,
        "FSDP of torch, and buffers of Megatron-FSDP",
        "the distributed optimizer, or Megatron-FSDP without them",
        """
        use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward fsdp-* megatron-fsdp-enable-*
        megatron-fsdp-max-*
        """,
        switches="use-torch-fsdp2 use-megatron-fsdp",
    ),
    _row(
        Fate.UNTESTED,
        "attention masks made by the data loader",
        "causal attention",
        "reset-attention-mask",
    ),
    _row(
        Fate.UNTESTED,
        "another order of the ranks, groups in two levels",
        "Megatron's own order",
        "use-tp-pp-dp-mapping hierarchical-context-parallel-sizes",
    ),
    _row(
        Fate.UNTESTED,
        "reinforcement learning: rollouts and the policy's loss",
        "training by cross entropy",
        """
        perform-rl-step rl-* no-rl-* grpo-* langrl-env-config refit-method moe-enable-routing-replay
        """,
    ),
    _row(
        Fate.UNTESTED,
        "distillation and quantization by ModelOpt, stored logits",
        "training by cross entropy",
        """
        export-* modelopt-enabled enable-gpt-oss freeze-base-for-mtp qad-train-target logits-load-*
        logits-save-*
        """,
        switches="export-kd-* export-quant-cfg modelopt-enabled logits-load-dir logits-save-dir",
    ),
    _row(
        Fate.UNTESTED,
        "tokens dropped by their number on each rank",
        "no token is dropped; which one is dropped depends on the layout",
        """
        moe-expert-capacity-factor moe-expert-rank-capacity-factor moe-pad-expert-input-to-capacity
        moe-token-drop-policy
        """,
        switches="moe-expert-capacity-factor moe-expert-rank-capacity-factor",
    ),
    _row(
        Fate.UNTESTED,
        "random numbers that differ between layouts",
        "none",
        """
        moe-input-jitter-eps moe-router-force-load-balancing moe-router-force-biased attention-dropout
        hidden-dropout
        """,
    ),
)
TABLE = (
    *(MODEL_SIZES, LAYOUT_SIZES, MEANING, ROWS_OF_DATA, MECHANISM, SCHEDULE),
    *(*DROPPED, *REPLACED, *UNTESTED),
)
