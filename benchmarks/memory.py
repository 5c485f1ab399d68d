"""Peak memory of forward and backward of one layer of each kind, which must be linear in sequence length.

    OMP_NUM_THREADS=2 python benchmarks/memory.py [--quick]

Each kind (M, *, E, -) is a one-layer model without embedding or head in a separate process. Its peak is the
growth of resident memory during one forward and backward (FP32, batch 1). The slope of the least-squares line
is the memory per token; R^2 measures how linear it is. Workspace of bounded size flattens the line slightly
at long sequences. Quadratic memory would bend it upwards, which fails the benchmark: one [heads, s, s]
attention matrix of 8192 tokens would take 1 GiB here.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from common import MIB, Worker, machine, model, peak_memory, print_table, world_of_one

LENGTHS = (512, 1024, 2048, 4096, 8192)
KINDS = ("M", "*", "E", "-")
#: Largest factor allowed for the last doubling of the length: linear memory gives 2, quadratic 4.
LAST_DOUBLING = 2.6
REPETITIONS = 3


class Layer:
    """A stack of one layer."""

    def __init__(self, kind: str) -> None:
        from tests.support.model_mapping import megatron_model

        self.config = model(pattern=kind)
        self._stack = ExitStack()
        self._stack.enter_context(world_of_one())
        self.layer: Any = megatron_model(self.config).decoder.layers[0].train()
        for _ in range(2):
            self.run(64)

    def run(self, length: int) -> None:
        """Forward and backward of [length, 1, hidden]."""
        import torch

        x = torch.randn(length, 1, self.config.hidden_size, requires_grad=True)
        out = self.layer(x, attention_mask=None)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()

    def peak(self, length: int) -> int:
        """Bytes over the idle layer with its gradients; the median of some runs."""
        return sorted(peak_memory(lambda: self.run(length)) for _ in range(REPETITIONS))[REPETITIONS // 2]


def line(lengths: list[int], peaks: list[int]) -> tuple[float, float]:
    """Slope in bytes a token and R^2 of the least-squares line."""
    n = len(lengths)
    mean_x, mean_y = sum(lengths) / n, sum(peaks) / n
    sxx = sum((x - mean_x) ** 2 for x in lengths)
    sxy = sum((x - mean_x) * (y - mean_y) for x, y in zip(lengths, peaks, strict=True))
    syy = sum((y - mean_y) ** 2 for y in peaks)
    return sxy / sxx, sxy**2 / (sxx * syy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="lengths up to 2048")
    args = parser.parse_args()
    lengths = list(LENGTHS[:3] if args.quick else LENGTHS)
    print(machine(), flush=True)
    rows, bent = [], []
    for kind in KINDS:
        worker = Worker(Layer, kind)
        peaks = [worker.call("peak", length) for length in lengths]
        worker.close()
        slope, r_squared = line(lengths, peaks)
        if peaks[-1] > LAST_DOUBLING * peaks[-2]:
            bent.append(kind)
        rows.append([kind, *(f"{p / MIB:,.1f}" for p in peaks), f"{slope:,.0f}", f"{r_squared:.4f}"])
    print_table(["kind", *(f"{length} MiB" for length in lengths), "bytes/token", "R^2"], rows)
    if bent:
        raise SystemExit(f"more than linear: {', '.join(bent)}")


if __name__ == "__main__":
    main()
