"""The Mamba-2 scan alone, forward and backward: chunked, transformers' torch path, the plain recurrence.

    OMP_NUM_THREADS=2 python benchmarks/ssd.py [--quick]

FP32, batch 1, the head sizes of the published models (head dimension 64, state 128) with 8 heads in 2 groups.
The outputs are compared before they are timed. Time is the median of alternating runs; peak memory is the
growth of resident memory in a process that runs one form only. The recurrence is limited to `REFERENCE_LIMIT`
tokens, because autograd saves every state (0.25 MiB each here) and more.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from common import MIB, Worker, in_turn, machine, peak_memory, print_table, timed

LENGTHS = (512, 2048, 8192)
HEADS, HEAD_DIM, GROUPS, STATE = 8, 64, 2, 128
REFERENCE_LIMIT = 2048
FORMS = ("chunked", "transformers", "recurrence")
ATOL = 1e-3


class Scan:
    """One form of the scan on random inputs."""

    def __init__(self, form: str) -> None:
        self.form = form
        for _ in range(2):
            self.step(64)

    def inputs(self, length: int) -> list[Any]:
        """x, dt, A, B, C, D that need gradients; decays as at initialization."""
        import torch

        g = torch.Generator().manual_seed(length)
        x = torch.randn(1, length, HEADS, HEAD_DIM, generator=g)
        dt = torch.empty(1, length, HEADS).uniform_(math.log(1e-3), math.log(1e-1), generator=g).exp_()
        A = -torch.empty(HEADS).uniform_(1, 16, generator=g)
        B, C = (torch.randn(1, length, GROUPS, STATE, generator=g) for _ in range(2))
        return [t.requires_grad_() for t in (x, dt, A, B, C, torch.ones(HEADS))]

    def compute(self, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> Any:
        """y [1, length, heads, head_dim]."""
        if self.form == "transformers":
            from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

            return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=128, D=D)
        from megatron_nemotron3.layers import ssd

        scan = ssd.ssd_chunked if self.form == "chunked" else ssd.ssd_reference
        return scan(x, dt, A, B, C, D=D)

    def output(self, length: int) -> Any:
        """y as a NumPy array."""
        import torch

        with torch.no_grad():
            return self.compute(*self.inputs(length)).numpy()

    def step(self, length: int) -> float:
        """Seconds of forward and backward; the gradient of y is random and dense, as in a model."""
        inputs = self.inputs(length)
        dy = inputs[0].detach().roll(1, dims=1)
        return timed(lambda: self.compute(*inputs).backward(dy))

    def peak(self, length: int) -> int:
        """Bytes of forward and backward, inputs and their gradients included."""
        return peak_memory(lambda: self.step(length))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="lengths 512 and 2048, three repetitions")
    parser.add_argument("--repetitions", type=int, default=None)
    args = parser.parse_args()
    repetitions = args.repetitions or (3 if args.quick else 5)
    print(machine(), flush=True)
    workers = {form: Worker(Scan, form) for form in FORMS}
    rows = []
    for length in LENGTHS[:2] if args.quick else LENGTHS:
        forms = [f for f in FORMS if f != "recurrence" or length <= REFERENCE_LIMIT]
        outputs = {form: workers[form].call("output", length) for form in forms}
        for form in forms[1:]:
            difference = float(abs(outputs[form] - outputs["chunked"]).max())
            if difference > ATOL:
                raise SystemExit(f"{length} tokens: {form} differs from chunked by {difference:.2g} > {ATOL}")
        peaks = [workers[form].call("peak", length) for form in forms]
        seconds = in_turn([lambda s=length, f=f: workers[f].call("step", s) for f in forms], repetitions)
        for form, peak, t in zip(forms, peaks, seconds, strict=True):
            time_ratio, memory_ratio = t / seconds[0], peak / peaks[0]
            rows.append(
                [
                    str(length),
                    form,
                    f"{t * 1e3:,.1f}",
                    f"{length / t:,.0f}",
                    f"{time_ratio:.2f}",
                    f"{peak / MIB:,.0f}",
                    f"{memory_ratio:.2f}",
                ]
            )
    print_table(["tokens", "form", "ms", "tok/s", "time / chunked", "peak MiB", "peak / chunked"], rows)


if __name__ == "__main__":
    main()
