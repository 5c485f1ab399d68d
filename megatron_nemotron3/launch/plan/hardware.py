"""GPUs with the numbers of their data sheets. Standard library only.

Peaks are dense (without sparsity). Bandwidths are of one direction. Memory is the data sheet's figure for the
system divided by its GPUs. Its GB are 2**30 bytes: published runs reserved 81 billion bytes of an H100's 80
GB and 187 billion of a GB200's 186 GB. A process can allocate less (`RESERVE`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_nemotron3.precision.formats import FORMATS, capability_text, either, runnable

TERA, GIGA, GIB = 1e12, 1e9, 2**30
#: Bytes for the CUDA context, NCCL's buffers, cuBLAS workspaces and memory that the allocator leaves unused:
#: an assumption, not a measurement.
RESERVE = 6 * GIB


@dataclass(frozen=True)
class GPU:
    """One GPU in its system.

    memory: bytes. bf16, fp8, fp4: operations per second of matrix products; vector: of FP32 outside them.
    hbm: bytes per second. nvlink, network: bytes per
    second that one GPU sends. nvlink_domain: GPUs connected by NVLink. capability: CUDA compute capability.
    """

    name: str
    memory: float
    bf16: float
    fp8: float
    #: None for a GPU without FP4 units.
    fp4: float | None
    vector: float
    hbm: float
    nvlink: float
    network: float
    nvlink_domain: int
    capability: tuple[int, int]
    source: str

    def flops(self, format: str) -> float:
        """Peak operations per second of matrix products in "bf16", "fp32" or a format of `FORMATS`.

        FP32 products are assumed to run as TF32, at half the rate of BF16.
        """
        if format not in FORMATS:
            return {"bf16": self.bf16, "fp32": self.bf16 / 2}[format]
        peak = self.fp4 if FORMATS[format].kind == "fp4" else self.fp8
        if peak is None or not FORMATS[format].runs_on(self.capability):
            raise ValueError(
                f"{self.name} (compute capability {capability_text(self.capability)}) has no {format} units: "
                f"use --precision {either(runnable(self.capability))}, or a GPU of compute capability "
                f"{FORMATS[format].needs}"
            )
        return peak


GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU(
            "h100",
            80 * GIB,
            bf16=989.4 * TERA,
            fp8=1978.9 * TERA,
            fp4=None,
            vector=67 * TERA,
            hbm=3.35 * TERA,
            nvlink=450 * GIGA,
            network=50 * GIGA,
            nvlink_domain=8,
            capability=(9, 0),
            source="H100 SXM data sheet",
        ),
        GPU(
            "h200",
            141 * GIB,
            bf16=989.4 * TERA,
            fp8=1978.9 * TERA,
            fp4=None,
            vector=67 * TERA,
            hbm=4.8 * TERA,
            nvlink=450 * GIGA,
            network=50 * GIGA,
            nvlink_domain=8,
            capability=(9, 0),
            source="H200 SXM data sheet",
        ),
        GPU(
            "b200",
            180 * GIB,
            bf16=2250 * TERA,
            fp8=4500 * TERA,
            fp4=9000 * TERA,
            vector=75 * TERA,
            hbm=7.7 * TERA,
            nvlink=900 * GIGA,
            network=50 * GIGA,
            nvlink_domain=8,
            capability=(10, 0),
            source="HGX B200 data sheet",
        ),
        GPU(
            "b300",
            270 * GIB,
            bf16=2250 * TERA,
            fp8=4500 * TERA,
            fp4=13500 * TERA,
            vector=75 * TERA,
            hbm=7.7 * TERA,
            nvlink=900 * GIGA,
            network=100 * GIGA,
            nvlink_domain=8,
            capability=(10, 3),
            source="HGX B300 data sheet",
        ),
        GPU(
            "gb200",
            186 * GIB,
            bf16=2500 * TERA,
            fp8=5000 * TERA,
            fp4=10000 * TERA,
            vector=80 * TERA,
            hbm=8 * TERA,
            nvlink=900 * GIGA,
            network=50 * GIGA,
            nvlink_domain=72,
            capability=(10, 0),
            source="GB200 NVL72 data sheet",
        ),
        GPU(
            "gb300",
            279 * GIB,
            bf16=2500 * TERA,
            fp8=5000 * TERA,
            fp4=15000 * TERA,
            vector=80 * TERA,
            hbm=8 * TERA,
            nvlink=900 * GIGA,
            network=100 * GIGA,
            nvlink_domain=72,
            capability=(10, 3),
            source="GB300 NVL72 data sheet",
        ),
    )
}


def gpu_named(name: str, nvlink_domain: int | None = None) -> GPU:
    """Return a GPU of the table, with another NVLink domain if one is given."""
    if name not in GPUS:
        raise ValueError(f"unknown GPU {name!r}: use one of {', '.join(GPUS)}")
    if nvlink_domain is None:
        return GPUS[name]
    if nvlink_domain < 1:
        raise ValueError(f"--nvlink-domain {nvlink_domain}: give 1 or more")
    return replace(GPUS[name], nvlink_domain=nvlink_domain)
