"""Published throughput of Nemotron 3 pre-training, to which the time model is fitted and compared.

Source: Megatron-Bridge, docs/performance-summary.md and performance-summary-archive.md (state of 2026-08-22),
newest container in which the row appears. 8,192 tokens a sequence, balanced routing forced, PP 1, CP 1.
The measured runs use CUDA graphs, HybridEP's dispatch and fused kernels, which our flags do not set; Ultra's
also offload activations. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_nemotron3.args import Launch, ParallelLayout, TrainingSchedule
from megatron_nemotron3.models import get
from megatron_nemotron3.plan.recompute import NONE, Recompute

SEQUENCE = 8192


@dataclass(frozen=True)
class Run:
    """One row: model, GPU, number of GPUs, precision, batch, layout, tokens per second and GPU."""

    model: str
    gpu: str
    gpus: int
    precision: str
    global_batch_size: int
    micro_batch_size: int
    tp: int
    ep: int
    tokens: int
    #: Model TFLOP/s per GPU, by the source's count.
    tflops: int
    container: str
    recompute: Recompute = NONE

    @property
    def layout(self) -> ParallelLayout:
        """The layout, with ETP 1."""
        return ParallelLayout(tp=self.tp, ep=self.ep, dp=self.gpus // self.tp)

    def launch(self, *extra: str) -> Launch:
        """The run as a launch on Transformer Engine, with more of Megatron's options."""
        return Launch(
            config=get(self.model),
            layout=self.layout,
            precision=self.precision,
            backend="te",
            schedule=TrainingSchedule(
                seq_length=SEQUENCE,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
            ),
            extra=(*self.recompute.flags(), *extra),
        )


_NORM = Recompute("selective", ("layernorm",))
_ACT_NORM = Recompute("selective", ("moe_act", "layernorm"))

RUNS: tuple[Run, ...] = (
    Run("nano", "gb300", 8, "mxfp8", 512, 4, 1, 8, 39936, 901, "26.08"),
    Run("nano", "gb200", 8, "mxfp8", 512, 2, 1, 8, 34816, 776, "26.06.01"),
    Run("nano", "b300", 8, "mxfp8", 512, 4, 1, 8, 37316, 831, "26.06"),
    Run("nano", "b200", 8, "mxfp8", 512, 2, 1, 8, 32768, 726, "26.04.01"),
    Run("nano", "h100", 16, "fp8-tensorwise", 1024, 1, 1, 8, 14719, 328, "26.06", _NORM),
    Run("lightning", "gb200", 8, "mxfp8", 512, 2, 1, 8, 28672, 807, "26.08"),
    Run("super", "gb300", 64, "mxfp8", 512, 1, 1, 64, 9856, 831, "26.08"),
    Run("super", "gb300", 64, "nvfp4", 512, 1, 1, 64, 10240, 864, "26.08"),
    Run("super", "gb200", 64, "mxfp8", 512, 1, 2, 64, 7040, 600, "26.08"),
    Run("super", "gb200", 64, "nvfp4", 512, 1, 2, 64, 7168, 610, "26.08"),
    Run("super", "b300", 64, "mxfp8", 512, 1, 1, 8, 7867, 667, "26.06"),
    Run("super", "b300", 64, "nvfp4", 512, 1, 1, 8, 8131, 689, "26.06"),
    Run("super", "b200", 64, "mxfp8", 512, 1, 1, 64, 6400, 542, "26.04.01", _ACT_NORM),
    Run("super", "b200", 64, "nvfp4", 512, 1, 2, 64, 5632, 475, "26.04.01"),
    Run("ultra", "gb300", 256, "mxfp8", 256, 1, 1, 64, 3552, 1281, "26.08"),
    Run("ultra", "gb200", 256, "mxfp8", 256, 1, 2, 64, 2528, 923, "26.08"),
)
