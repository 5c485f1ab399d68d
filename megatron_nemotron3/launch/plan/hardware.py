"""GPUs with the numbers of their data sheets: dense peaks, bandwidths of one direction.

Memory is the data sheet's figure for the system divided by its GPUs. Its GB are 2**30 bytes: published runs
reserved 81 billion bytes of an H100's 80 GB. A process can allocate less (`RESERVE`).
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

    memory: bytes. bf16, fp8, fp4: operations per second of matrix products (fp4: None without FP4 units);
    vector: of FP32 outside them. hbm: bytes per second. nvlink, network: bytes per second that one GPU sends.
    nvlink_domain: GPUs connected by NVLink. capability: CUDA compute capability; None: no format is refused.
    """

    name: str
    memory: float
    bf16: float
    fp8: float
    fp4: float | None
    vector: float
    hbm: float
    nvlink: float
    network: float
    nvlink_domain: int
    capability: tuple[int, int] | None
    source: str

    def flops(self, format: str) -> float:
        """Peak operations per second of matrix products in "bf16", "fp32" or a format of `FORMATS`.

        FP32 products are assumed to run as TF32, at half the rate of BF16.
        """
        if format not in FORMATS:
            return {"bf16": self.bf16, "fp32": self.bf16 / 2}[format]
        peak = self.fp4 if FORMATS[format].kind == "fp4" else self.fp8
        if self.capability and (peak is None or not FORMATS[format].runs_on(self.capability)):
            raise ValueError(
                f"{self.name} (compute capability {capability_text(self.capability)}) has no {format} units: "
                f"use --precision {either(runnable(self.capability))}, or a GPU of compute capability "
                f"{FORMATS[format].needs}"
            )
        assert peak is not None
        return peak


# fmt: off
#: Name, GiB of memory, peaks in TFLOP/s (BF16, FP8, FP4, vector units), TB/s of memory, GB/s of NVLink and of
#: the network, NVLink domain, compute capability, system.
_DATA_SHEETS = (
    ("h100",   80,  989.4, 1978.9,  None, 67, 3.35, 450,  50,  8,  (9, 0), "H100 SXM"),
    ("h200",  141,  989.4, 1978.9,  None, 67,  4.8, 450,  50,  8,  (9, 0), "H200 SXM"),
    ("b200",  180, 2250.0, 4500.0,  9000, 75,  7.7, 900,  50,  8, (10, 0), "HGX B200"),
    ("b300",  270, 2250.0, 4500.0, 13500, 75,  7.7, 900, 100,  8, (10, 3), "HGX B300"),
    ("gb200", 186, 2500.0, 5000.0, 10000, 80,  8.0, 900,  50, 72, (10, 0), "GB200 NVL72"),
    ("gb300", 279, 2500.0, 5000.0, 15000, 80,  8.0, 900, 100, 72, (10, 3), "GB300 NVL72"),
    # Preliminary: NVIDIA's page and blog of the platform; FP4 is the rate of training.
    ("vr200", 287, 4000.0, 17500.0, 35000, 130, 22.0, 1800, 200, 72, None, "Vera Rubin NVL72"),
)
# fmt: on

GPUS: dict[str, GPU] = {
    name: GPU(
        name,
        memory * GIB,
        bf16=bf16 * TERA,
        fp8=fp8 * TERA,
        fp4=None if fp4 is None else fp4 * TERA,
        vector=vector * TERA,
        hbm=hbm * TERA,
        nvlink=nvlink * GIGA,
        network=network * GIGA,
        nvlink_domain=domain,
        capability=capability,
        source=f"{system} data sheet",
    )
    for name, memory, bf16, fp8, fp4, vector, hbm, nvlink, network, domain, capability, system in _DATA_SHEETS
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
