"""The published performance settings, by model, GPU and precision.

Source: the pre-training recipes of Megatron-Bridge at commit 067f987df03b (2026-08-22, version 0.7.0),
`perf_recipes/nemotronh/`, and `recipes/nemotronh/h100/` for Ultra on H100. `performance.py` reads this
table; `tests/launch/test_performance.py` compares every published set, as Megatron parses it, with the
recipe.

A row adds to the rows above it, and replaces their values. Not in the table is what only a benchmark may do
(forced balanced routing, no checks for NaN) and what contradicts the models' reports (an expert capacity that
drops tokens, MTP's loss factor, the standard deviation of the initialization); the test lists both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_nemotron3.launch.layout import ParallelLayout


@dataclass(frozen=True)
class Hardware:
    """Properties of a GPU that the settings depend on."""

    #: Ranks that NVLink connects.
    nvlink_domain: int
    #: Compute capability; None: not published.
    capability: tuple[int, int] | None
    #: GPUs whose settings to take where there are none for this one, nearest first.
    nearest: tuple[str, ...]


#: Types of GPU that `--gpu` accepts.
HARDWARE: dict[str, Hardware] = {
    "h100": Hardware(8, (9, 0), ("b200", "gb200")),
    "h200": Hardware(8, (9, 0), ("h100", "b200", "gb200")),
    "b200": Hardware(8, (10, 0), ("gb200", "b300", "gb300", "h100")),
    "b300": Hardware(8, (10, 3), ("gb300", "b200", "gb200", "h100")),
    "gb200": Hardware(72, (10, 0), ("gb300", "b200", "h100")),
    "gb300": Hardware(72, (10, 3), ("gb200", "b300", "h100")),
    "vr200": Hardware(72, None, ("gb300", "gb200", "b300", "h100")),
}
#: Ranks that the published multi-node NVLink runs use of a domain: 16 trays of 4, of 72.
USED_OF_NVL72 = 64


@dataclass(frozen=True)
class PublishedLaunch:
    """A published run: what a user chooses."""

    gpus: int
    layout: ParallelLayout
    micro_batch_size: int
    global_batch_size: int
    seq_length: int = 8192
    #: Folder of the recipe in Megatron-Bridge.
    folder: str = "perf_recipes"


def _run(gpus: int, micro: int, batch: int, *, tp: int = 1, pp: int = 1, ep: int = 1) -> PublishedLaunch:
    return PublishedLaunch(gpus, ParallelLayout(tp=tp, pp=pp, ep=ep, dp=gpus // (tp * pp)), micro, batch)


_BLACKWELL = ("bf16", "mxfp8", "nvfp4")

#: (model, GPU, precision) of each published set.
RUNS: dict[tuple[str, str, str], PublishedLaunch] = {
    ("nano", "h100", "bf16"): _run(16, 1, 1024, ep=8),
    ("nano", "h100", "fp8-tensorwise"): _run(16, 1, 1024, ep=16),
    **{
        ("nano", gpu, precision): _run(8, micro, 512, ep=8)
        for gpu, micro in (("b200", 2), ("b300", 4), ("gb200", 2), ("gb300", 4), ("vr200", 4))
        for precision in _BLACKWELL
    },
    ("lightning", "h100", "bf16"): _run(16, 1, 512, ep=8),
    ("lightning", "h100", "fp8-tensorwise"): _run(16, 1, 1024, ep=8),
    **{
        ("lightning", gpu, precision): _run(8, micro, 512, ep=8)
        for gpu, micro in (("gb200", 2), ("gb300", 4))
        for precision in _BLACKWELL
    },
    ("super", "h100", "bf16"): replace(_run(64, 1, 1280, pp=2, ep=32), seq_length=4096),
    **{
        ("super", gpu, precision): _run(64, 1, 512, tp=tp, ep=ep)
        for gpu, tp, ep in (
            ("b200", 1, 64),
            ("b300", 1, 8),
            ("gb200", 2, 64),
            ("gb300", 1, 64),
            ("vr200", 1, 64),
        )
        for precision in _BLACKWELL
    },
    ("super", "b200", "nvfp4"): _run(64, 1, 512, tp=2, ep=64),
    ("ultra", "h100", "bf16"): PublishedLaunch(
        24, ParallelLayout(pp=3, ep=8, dp=8), 1, 3072, folder="recipes"
    ),
    ("ultra", "gb200", "mxfp8"): _run(256, 1, 256, tp=2, ep=64),
    ("ultra", "gb300", "mxfp8"): _run(256, 1, 256, ep=64),
    ("nemotron-h-56b", "h100", "fp8-tensorwise"): _run(64, 1, 192, tp=8),
    **{
        ("nemotron-h-56b", gpu, "fp8-tensorwise"): _run(64, 1, 192, tp=2)
        for gpu in ("b200", "b300", "gb200", "gb300")
    },
}

#: Words of Bridge's names of recipes.
NAMES = {
    "nano": "nemotron_3_nano",
    "lightning": "nemotron_3_5_lightning",
    "super": "nemotron_3_super",
    "ultra": "nemotron_3_ultra",
    "nemotron-h-56b": "nemotronh_56b",
    "bf16": "bf16",
    "fp8-tensorwise": "fp8cs",
    "mxfp8": "fp8mx",
    "nvfp4": "nvfp4",
}


def _always(layout: ParallelLayout) -> bool:
    return True


@dataclass(frozen=True)
class PerformanceRow:
    """Settings of the models, GPUs and precisions named; "" names all."""

    models: str = ""
    gpus: str = ""
    precisions: str = ""
    #: One option with its values in a line.
    options: str = ""
    #: Options and variables that the run does not have, although rows above or `flags` do.
    without: str = ""
    #: NAME=value.
    environment: str = ""
    #: Fields of Megatron's configuration that the run sets and no option of any version can.
    fields: str = ""
    #: What the run gives up, in one sentence.
    caution: str = ""
    when: Callable[[ParallelLayout], bool] = _always

    def applies(self, model: str, gpu: str, precision: str, layout: ParallelLayout) -> bool:
        named = ((self.models, model), (self.gpus, gpu), (self.precisions, precision))
        return all(not words or word in words.split() for words, word in named) and self.when(layout)


_MOE = "nano lightning super ultra"
_SMALL = "nano lightning"
#: Models whose recipes overlap the collectives of data and tensor parallelism.
_OVERLAPPED = "nano lightning nemotron-h-56b"
_NVL72 = "gb200 gb300 vr200"
_TWO_HUNDRED = "b200 gb200"
_B = f"b200 b300 {_NVL72}"
_FP8 = "fp8-tensorwise mxfp8"
_HOPPER = "h100 h200"
#: The modules that are recomputed follow.
_SELECTIVE = "--recompute-granularity selective\n--recompute-modules"
_NO_GRAPHS = "--cuda-graph-impl\n--cuda-graph-modules\n--te-rng-tracker"


def _graphs(modules: str) -> str:
    return f"--cuda-graph-impl transformer_engine\n--cuda-graph-modules {modules}\n--te-rng-tracker"


ROWS: tuple[PerformanceRow, ...] = (
    PerformanceRow(
        options="""
            --grad-reduce-in-bf16
            --manual-gc
            --manual-gc-interval 100
        """,
        environment="""
            TORCH_NCCL_HIGH_PRIORITY=1
            TORCH_NCCL_AVOID_RECORD_STREAMS=1
            NCCL_GRAPH_REGISTER=0
            NCCL_NVLS_ENABLE=0
            PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
            CUDA_DEVICE_MAX_CONNECTIONS=32
            NVTE_FWD_LAYERNORM_SM_MARGIN=20
            NVTE_BWD_LAYERNORM_SM_MARGIN=20
        """,
    ),
    # Before Blackwell Megatron requires 1 with TP or CP: collectives then start in the order of the kernels.
    PerformanceRow(gpus=_HOPPER, environment="CUDA_DEVICE_MAX_CONNECTIONS=1", when=lambda p: p.tp * p.cp > 1),
    PerformanceRow(gpus="b300", environment="NCCL_IGNORE_CPU_AFFINITY=1"),
    PerformanceRow(
        _MOE,
        options="""
            --attention-backend fused
            --moe-token-dispatcher-type flex
            --moe-flex-dispatcher-backend hybridep
            --moe-flex-dispatcher-num-sms 32
            --ckpt-assume-constant-structure
        """,
        environment="NUM_OF_TOKENS_PER_CHUNK_COMBINE_API=128",
    ),
    PerformanceRow(_OVERLAPPED, options="--ddp-bucket-size 134217728"),
    PerformanceRow(_OVERLAPPED, options="--tp-comm-overlap", when=lambda p: p.tp > 1 and p.sequence_parallel),
    PerformanceRow(
        _SMALL,
        options="--moe-flex-dispatcher-num-sms 16",
        environment="NVTE_NORM_FWD_USE_CUDNN=1\nNVTE_NORM_BWD_USE_CUDNN=1",
    ),
    PerformanceRow("nano", _TWO_HUNDRED, "mxfp8", options="--moe-flex-dispatcher-num-sms 32"),
    # CUDA graphs.
    PerformanceRow(f"{_SMALL} super", _B, options=_graphs("attn mamba moe_router moe_preprocess")),
    PerformanceRow("super", "b200", "bf16 mxfp8", without=_NO_GRAPHS),
    PerformanceRow(_SMALL, _HOPPER, options=_graphs("attn mamba")),
    PerformanceRow("nemotron-h-56b", options=_graphs("mamba attn")),
    PerformanceRow("nemotron-h-56b", _HOPPER, options="--cuda-graph-modules mamba"),
    # Recomputation.
    PerformanceRow("nano", _HOPPER, "bf16", options=f"{_SELECTIVE} moe layernorm"),
    PerformanceRow(_SMALL, _HOPPER, "fp8-tensorwise", options=f"{_SELECTIVE} layernorm"),
    PerformanceRow("super", _HOPPER, options=f"{_SELECTIVE} layernorm moe_act moe core_attn"),
    PerformanceRow("super", "b200", "bf16", options=f"{_SELECTIVE} moe_act moe layernorm core_attn"),
    PerformanceRow("super", "b200", "mxfp8", options=f"{_SELECTIVE} moe_act layernorm"),
    PerformanceRow("super", "b300", "bf16 nvfp4", options=f"{_SELECTIVE} moe_act layernorm"),
    # Quantized runs.
    PerformanceRow(precisions=_FP8, options="--fp8-param-gather"),
    PerformanceRow(precisions="mxfp8", options="--reuse-grad-buf-for-mxfp8-param-ag"),
    PerformanceRow(
        _SMALL, precisions="mxfp8 nvfp4 fp8-tensorwise", without="--moe-router-padding-for-quantization"
    ),
    PerformanceRow(
        f"{_SMALL} super",
        _NVL72,
        "mxfp8",
        options="--use-transformer-engine-op-fuser",
        environment="NVTE_CUTEDSL_FUSED_GROUPED_MLP=1\nCUDNNFE_CLUSTER_OVERLAP_MARGIN=8",
        fields="fp8_dot_product_attention",
    ),
    PerformanceRow("nano super", _NVL72, "mxfp8", options="--moe-mlp-glu-interleave-size 32"),
    PerformanceRow(_MOE, precisions="nvfp4", environment="NVTE_USE_FAST_MATH=1"),
    # Single runs.
    PerformanceRow(
        "super",
        _HOPPER,
        options="""
            --use-precision-aware-optimizer
            --main-grads-dtype bf16
            --main-params-dtype fp16
            --exp-avg-dtype bf16
            --exp-avg-sq-dtype bf16
            --distributed-timeout-minutes 15
        """,
        without="--overlap-grad-reduce\n--overlap-param-gather",
        caution=(
            "to fit in memory it keeps FP16 master weights and BF16 gradients and moments; it also pads "
            "experts to 1.1 times their mean load and drops other tokens, which these options do not"
        ),
        environment="NUM_OF_TOKENS_PER_CHUNK_COMBINE_API=64",
    ),
    PerformanceRow(
        "lightning",
        _HOPPER,
        "bf16",
        options="""
            --use-precision-aware-optimizer
            --exp-avg-dtype bf16
            --exp-avg-sq-dtype bf16
            --recompute-granularity selective
            --recompute-modules moe_act layernorm
            --fine-grained-activation-offloading
            --offload-modules expert_fc1
            --delay-offload-until-cuda-graph
            --moe-router-fusion
            --moe-permute-fusion-into-hybridep
            --moe-flex-dispatcher-num-sms 32
        """,
        caution=(
            "its BF16 moments are a benchmark's, not equivalent to FP32 in convergence; "
            "--without exp-avg-dtype --without exp-avg-sq-dtype keeps FP32"
        ),
        environment="""
            NUM_OF_TOKENS_PER_CHUNK_COMBINE_API=64
            NVTE_CPU_OFFLOAD_V1=1
            NVTE_FWD_LAYERNORM_SM_MARGIN=10
            NVTE_BWD_LAYERNORM_SM_MARGIN=10
        """,
    ),
    PerformanceRow(
        "ultra",
        _B,
        options="""
            --use-megatron-fsdp
            --data-parallel-sharding-strategy optim_grads_params
            --megatron-fsdp-grad-comm-dtype bf16
            --megatron-fsdp-main-grads-dtype bf16
            --init-model-with-meta-device
            --no-gradient-accumulation-fusion
            --ckpt-format fsdp_dtensor
            --ddp-num-buckets 48
            --high-priority-stream-groups ep
            --distributed-timeout-minutes 30
            --moe-router-fusion
            --recompute-granularity selective
            --recompute-modules moe_act
        """,
        without="--reuse-grad-buf-for-mxfp8-param-ag",
    ),
    # The op fuser's expert path is for one format in all modules, and its output is what is offloaded.
    PerformanceRow(
        "ultra",
        _B,
        "mxfp8",
        options="""
            --use-transformer-engine-op-fuser
            --fine-grained-activation-offloading
            --offload-modules fused_group_mlp
            --min-offloaded-tensor-size 500000000
        """,
        environment="NVTE_CPU_OFFLOAD_V1=1\nNVTE_CUTEDSL_FUSED_GROUPED_MLP=1",
    ),
    PerformanceRow(
        "ultra",
        _TWO_HUNDRED,
        "mxfp8",
        options="--min-offloaded-tensor-size 350000000\n--fine-grained-offloading-max-inflight-offloads 1",
    ),
    PerformanceRow(
        "ultra",
        _TWO_HUNDRED,
        environment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,graph_capture_record_stream_reuse:True",
    ),
    # A recipe of Bridge's library, not tuned: gradients in FP32, Megatron's own garbage collection.
    PerformanceRow(
        "ultra",
        _HOPPER,
        options="--te-rng-tracker",
        without="""
            --grad-reduce-in-bf16
            --manual-gc
            --manual-gc-interval
            --moe-flex-dispatcher-num-sms
            CUDA_DEVICE_MAX_CONNECTIONS
            NUM_OF_TOKENS_PER_CHUNK_COMBINE_API
            NVTE_FWD_LAYERNORM_SM_MARGIN
            NVTE_BWD_LAYERNORM_SM_MARGIN
        """,
    ),
)
