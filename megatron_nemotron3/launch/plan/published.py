"""Published training runs of Nemotron 3, to which the plan's time and memory are compared.

Sources, all in Megatron-Bridge (state of 2026-08-22, 067f987df03b):

- "26.08" and the like: docs/performance-summary.md and performance-summary-archive.md, newest container that
  has the row. 8,192 tokens a sequence, balanced routing forced, PP 1, CP 1.
- "card": examples/model_verification_cards/*/card.yaml. "card <commit>": a state of that file in the history
  of the repository, or of pull request 5568 (Ultra on H100).

The options of a run are those of its recipe (`perf_recipes/nemotronh`, `recipes/nemotronh`, and for
containers 26.04 and 26.06 `scripts/performance/configs/nemotronh` of version 0.5.0), as options of Megatron.
Super's runs on H100 also do not overlap data-parallel traffic with computation, which no option can say:
0.3 % of their step.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule
from megatron_nemotron3.models import get

SEQUENCE = 8192

_HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
#: What all runs share: gradients in BF16, and HybridEP.
_ALL = f"--grad-reduce-in-bf16 {_HYBRIDEP}"
#: The loss of the benchmarks. Megatron 0.19 refuses it.
_PERF = f"{_ALL} --cross-entropy-fusion-impl te"
_GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules"
_FULL = f"{_PERF} {_GRAPHS} attn mamba moe_router moe_preprocess"
#: In FP8 no layer stays BF16, and quantized linears have no BF16 weight.
_PACKED = "--fp8-param-gather --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_SHORT_MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_ULTRA = (
    f"{_FSDP} --megatron-fsdp-main-grads-dtype bf16 --num-distributed-optimizer-instances 4 "
    f"{_SELECTIVE} moe_act --fine-grained-activation-offloading --offload-modules fused_group_mlp "
    f"--min-offloaded-tensor-size"
)
_SUPER_H100 = (
    f"{_PERF} {_SHORT_MOMENTS} --main-params-dtype fp16 {_SELECTIVE} layernorm moe_act moe core_attn "
    "--moe-expert-capacity-factor 1.1 --moe-pad-expert-input-to-capacity"
)


@dataclass(frozen=True)
class PublishedRun:
    """One run: model, GPU, number of GPUs, precision, batch, layout, and what was measured.

    tokens: a second and GPU. memory: GiB that torch had allocated at most, or None. natural: real data and
    routing as the model learns it; the others have mock data and forced balanced routing. functional: a run
    that verifies that training works and sets options that slow it down.
    """

    model: str
    gpu: str
    gpus: int
    precision: str
    global_batch_size: int
    micro_batch_size: int
    tp: int
    ep: int
    tokens: float
    source: str
    options: str = _FULL
    pp: int = 1
    cp: int = 1
    seq_length: int = SEQUENCE
    memory: float | None = None
    natural: bool = False
    functional: bool = False

    @property
    def layout(self) -> ParallelLayout:
        ranks = self.gpus // (self.tp * self.pp * self.cp)
        return ParallelLayout(tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep, dp=ranks)

    def launch(self) -> Launch:
        return Launch(
            config=get(self.model),
            layout=self.layout,
            precision=self.precision,
            backend="te",
            schedule=TrainingSchedule(
                seq_length=self.seq_length,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
            ),
            extra=tuple(self.options.split()),
            megatron_core="0.19",
        )


def _tokens(run_sequences: int, gpus: int, milliseconds: float, length: int = SEQUENCE) -> float:
    """Tokens a second and GPU of a step, which the cards give in milliseconds."""
    return run_sequences * length / gpus / milliseconds * 1e3


_MX = f"{_FULL} {_PACKED}"

#: The throughput table.
RUNS: tuple[PublishedRun, ...] = (
    PublishedRun("nano", "gb300", 8, "mxfp8", 512, 4, 1, 8, 39936, "26.08", _MX),
    PublishedRun("nano", "gb200", 8, "mxfp8", 512, 2, 1, 8, 34816, "26.06.01", _MX),
    PublishedRun("nano", "b300", 8, "mxfp8", 512, 4, 1, 8, 37316, "26.06", _MX),
    PublishedRun("nano", "b200", 8, "mxfp8", 512, 2, 1, 8, 32768, "26.04.01", _MX),
    PublishedRun(
        *("nano", "h100", 16, "fp8-tensorwise", 1024, 1, 1, 8, 14719, "26.06"),
        options=f"{_PERF} {_PACKED} {_GRAPHS} mamba {_SELECTIVE} moe layernorm core_attn moe_act",
    ),
    PublishedRun("lightning", "gb200", 8, "mxfp8", 512, 2, 1, 8, 28672, "26.08", _MX),
    PublishedRun("super", "gb300", 64, "mxfp8", 512, 1, 1, 64, 9856, "26.08", _MX),
    PublishedRun("super", "gb300", 64, "nvfp4", 512, 1, 1, 64, 10240, "26.08"),
    PublishedRun("super", "gb200", 64, "mxfp8", 512, 1, 2, 64, 7040, "26.08", _MX),
    PublishedRun("super", "gb200", 64, "nvfp4", 512, 1, 2, 64, 7168, "26.08"),
    PublishedRun("super", "b300", 64, "mxfp8", 512, 1, 1, 8, 7867, "26.06", _MX),
    PublishedRun(
        *("super", "b300", 64, "nvfp4", 512, 1, 1, 8, 8131, "26.06"),
        options=f"{_FULL} {_SELECTIVE} moe_act layernorm",
    ),
    PublishedRun(
        *("super", "b200", 64, "mxfp8", 512, 1, 1, 64, 6400, "26.04.01"),
        options=f"{_PERF} {_PACKED} {_SELECTIVE} moe_act layernorm",
    ),
    PublishedRun("super", "b200", 64, "nvfp4", 512, 1, 2, 64, 5632, "26.04.01"),
    PublishedRun(
        *("ultra", "gb300", 256, "mxfp8", 256, 1, 1, 64, 3552, "26.08"),
        options=f"{_ALL} {_PACKED} {_ULTRA} 500000000",
    ),
    PublishedRun(
        *("ultra", "gb200", 256, "mxfp8", 256, 1, 2, 64, 2528, "26.08"),
        options=f"{_ALL} {_PACKED} {_ULTRA} 350000000",
    ),
)

#: Pre-training runs of the verification cards that RUNS does not have, with peak memory where it is given.
CARDS: tuple[PublishedRun, ...] = (
    PublishedRun(
        *("super", "h100", 64, "bf16", 1280, 1, 1, 32, _tokens(1280, 64, 27588.58, 4096), "card"),
        options=_SUPER_H100,
        pp=2,
        seq_length=4096,
        memory=59.0,
    ),
    PublishedRun("super", "gb200", 64, "bf16", 512, 1, 2, 64, _tokens(512, 64, 9926.35), "card"),
    PublishedRun(
        *("lightning", "h100", 16, "bf16", 512, 1, 1, 8, _tokens(512, 16, 18467.28), "card"),
        # Bridge's optimizer has FP8's default recipe also in BF16, and so an FP32 copy of the weights.
        options=f"{_PERF} {_GRAPHS} attn mamba {_SHORT_MOMENTS} --fp8-recipe tensorwise {_SELECTIVE} moe_act "
        "layernorm --fine-grained-activation-offloading --offload-modules expert_fc1",
        memory=72.066,
    ),
    PublishedRun(
        *("lightning", "h100", 16, "bf16", 512, 1, 1, 8, _tokens(512, 16, 20826.37), "card 98bce3260"),
        options=f"{_PERF} {_GRAPHS} attn mamba {_SELECTIVE} moe layernorm",
        memory=71.949,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 2, 1, 8, _tokens(512, 8, 18236.06), "card"),
        memory=156.85,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "mxfp8", 384, 3, 1, 8, _tokens(384, 8, 13917.0), "card"),
        options=f"{_PERF} {_PACKED} {_FSDP}",
        memory=169.54,
    ),
    PublishedRun(
        *("nano-4b", "h100", 8, "bf16", 1024, 1, 1, 1, _tokens(1024, 8, 26775.11, 4096), "card"),
        options="--use-precision-aware-optimizer",
        seq_length=4096,
    ),
    PublishedRun(
        *("super", "h100", 64, "bf16", 1280, 1, 1, 32, _tokens(1280, 64, 29368.69, 4096), "card"),
        options=_SUPER_H100,
        pp=2,
        seq_length=4096,
        memory=58.079,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "h100", 16, "bf16", 512, 1, 1, 8, _tokens(512, 16, 36869.27), "card"),
        options=f"{_ALL} {_GRAPHS} mamba {_SELECTIVE} moe layernorm core_attn",
        cp=2,
        memory=68.547,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 2, 1, 8, _tokens(512, 8, 21483.63), "card"),
        options=_PERF,
        memory=158.22,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 2, 1, 8, _tokens(512, 8, 13362.64, 4096), "card 513e30e83"),
        options=f"{_ALL} {_GRAPHS} attn mamba moe_router moe_preprocess",
        seq_length=4096,
        memory=130.12,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 1, 1, 8, _tokens(512, 8, 26051.24), "card c9a70e2f5"),
        options=f"{_ALL} {_GRAPHS} attn mamba moe_router moe_preprocess",
        memory=130.12,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 2, 1, 8, _tokens(512, 8, 26665.83), "card"),
        options=f"{_PERF} {_FSDP} --megatron-fsdp-main-grads-dtype fp32",
        memory=160.76,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 2, 1, 8, _tokens(512, 8, 24690.75), "card a10679e0c"),
        options=f"{_PERF} {_FSDP}",
        memory=152.52,
        natural=True,
    ),
    PublishedRun(
        *("lightning", "gb200", 8, "bf16", 512, 1, 1, 8, _tokens(512, 8, 40722.94), "card c9a70e2f5"),
        options=f"{_ALL} {_FSDP}",
        memory=123.04,
        natural=True,
    ),
    PublishedRun(
        # Its recipe also computes MLPs in 64 pieces, has NCCL buffers of 256 KiB and no prefetch of weights.
        *("ultra", "h100", 256, "bf16", 512, 1, 4, 64, _tokens(512, 256, 388228.08), "card f1f241b0b"),
        options=f"--cross-entropy-fusion-impl te {_FSDP} {_SHORT_MOMENTS} --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 108",
        memory=41.934,
        natural=True,
        functional=True,
    ),
)
