"""Stage `rates` of gpu.py: the doctor's findings, and what the device reaches at products and copies.

    python benchmarks/rates.py [--device cuda]

The figures of the other stages are compared with these: TFLOP/s of a BF16 matrix product of random numbers,
and GB/s of a copy, read and written.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from common import GIB, MIB, ROOT, parser, seconds, show


def main() -> None:
    args = parser(__doc__, gpu=True).parse_args()
    import torch

    subprocess.run([sys.executable, "-m", "megatron_nemotron3", "doctor"], cwd=ROOT, check=False)
    small = args.small or args.device == "cpu"
    n, size = (256, MIB) if small else (8192, 4 * GIB)
    a, b = (torch.randn(n, n, device=args.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(size, device=args.device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(function: Callable[[], Any]) -> float:
        return min(seconds(function, args.device) for _ in range(10))

    matmul, copy = best(lambda: a @ b), best(lambda: target.copy_(source))
    show([{"matmul TFLOP/s": 2 * n**3 / matmul / 1e12, "copy GB/s": 2 * size / copy / 1e9}], "rates")


if __name__ == "__main__":
    main()
