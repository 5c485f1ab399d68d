"""Record what TransformerEngine's own PyTorch reference makes of small tensors: writes nvfp4_training.npz.

For TransformerEngine >= 2.19, where the reference is `custom_recipes.reference_nvfp4`. Recorded with 2.20.2.

    python tests/golden/make_nvfp4_reference.py     # in an environment with transformer_engine.pytorch

Runs on a CPU. Per case: `x` (bits of `dtype`); `amax` where it is given from outside; and for `row`,
`column`, `tile_row`, `tile_column`, `rotated` (column): `.codes` (two in a byte), `.scales` (bits of
float8_e4m3fn), `.amax`.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

MAX = torch.finfo(torch.float32).max
#: Every E2M1 magnitude and every halfway point.
POINTS = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])


def cases() -> dict[str, tuple[torch.Tensor, float | None]]:
    """(tensor [m, k], amax from outside) by name; m and k divisible by 16."""
    torch.manual_seed(5)
    normal = torch.randn(32, 48)
    spread = normal * torch.exp2(-torch.randint(0, 26, (32, 3)).float()).repeat_interleave(16, 1)
    tall = normal * torch.exp2(-torch.randint(0, 26, (2, 48)).float()).repeat_interleave(16, 0)
    holes = normal.clone()
    holes[3, 16:48], holes[7], holes[16:, 32:], holes[8, 1:16] = 0, 0, 0, -0.0
    holes[:, 5] = -0.0
    outlier = normal * 1e-3
    outlier[5, 17] = 300.0
    # S = 1 (amax 2688): all points, their neighbors and their negatives, with exact and with inexact block
    # scales.
    up, down = torch.nextafter(POINTS, torch.tensor(9.0)), torch.nextafter(POINTS, torch.tensor(-9.0))
    down[-1] = 6.0
    up[-1] = 6.0
    rows = [
        p * s for s in (448.0, 1.0, 2.0**-6, 2.0**-9, 0.3125) for p in (POINTS, -POINTS, up, down, -up, -down)
    ]
    ties = torch.zeros(32, 16)
    ties[: len(rows)] = torch.stack(rows)
    # Blocks whose scale the order of operations decides: TransformerEngine <= 2.13 divided by 6 first.
    amax = torch.tensor(1.53125)
    near = torch.arange(1, 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    near = near[(near > amax / 400) & (near <= amax)]
    scale = torch.tensor(2688.0) / amax
    new, old = (v.to(torch.float8_e4m3fn).float() for v in (near * (scale * (1 / 6)), (near / 6) * scale))
    near = near[new != old]
    near = torch.cat((amax[None], near))[:96]
    order = torch.zeros(32, 48)
    order[:, 5:48:16] = torch.nn.functional.pad(near, (0, 96 - len(near))).view(32, 3)
    infinite = normal.clone()
    infinite[2, 3], infinite[9, 40] = torch.inf, -torch.inf
    exact = (normal * 64).round() / 64  # sums of 16 are exact in FP32 in any order
    return {
        "normal": (normal.bfloat16(), None),
        "float16": (normal.half(), None),
        "float32": (exact, None),
        "spread": (spread.bfloat16(), None),
        "tall": (tall.bfloat16(), None),
        "holes": (holes.bfloat16(), None),
        "outlier": (outlier.bfloat16(), None),
        "ties": (ties, None),
        "order": (order.bfloat16(), None),
        "zeros": (torch.zeros(16, 32), None),
        "smallest": (normal[:16, :16].bfloat16(), None),
        "tiny": ((normal * 1e-30).bfloat16(), None),
        "subnormal": (exact[:16, :32] * 2.0**-126, None),
        "below": (exact[:16, :32] * 2.0**-120, None),
        "huge": ((exact[:16, :32] / exact[:16, :32].abs().max()) * MAX, None),
        "infinite": (infinite.bfloat16(), None),
        "low_amax": (normal.bfloat16(), 0.37),
        "high_amax": (normal.bfloat16(), 5000.0),
    }


def main() -> None:
    """Write the file."""
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    quantizer = reference_nvfp4.NVFP4QuantizerRef

    def blocks(x: torch.Tensor, rows: int, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantizer._quantize_blockwise_reference(x, amax, 16, rows, pow_2_scales=False, eps=0.0)

    arrays: dict[str, numpy.ndarray] = {}
    for name, (x, amax) in cases().items():
        made = {}
        for tile in (False, True):
            prefix = "tile_" if tile else ""
            shape = (16, 16) if tile else (1, 16)
            q = quantizer(reference_utils.Fp4Formats.E2M1, quant_tile_shape=shape).quantize(x)
            made[f"{prefix}row"] = (q.data, q.scale, q.global_amax_row)
            made[f"{prefix}column"] = (q.data_t, q.scale_t, q.global_amax_col)
            if amax is not None:
                whole = torch.tensor([amax])
                made[f"{prefix}row"] = (*blocks(x, shape[0], whole), whole)
                made[f"{prefix}column"] = (*blocks(x.t().contiguous(), shape[0], whole), whole)
        if name not in ("huge", "infinite"):  # sums overflow
            q = quantizer(reference_utils.Fp4Formats.E2M1, with_rht=True).quantize(x)
            made["rotated"] = (q.data_t, q.scale_t, q.global_amax_col)
            if amax is not None:
                rotated = quantizer(reference_utils.Fp4Formats.E2M1, with_rht=True)._apply_rht(
                    x.t().contiguous()
                )
                made["rotated"] = (*blocks(rotated, 1, whole), whole)
        signed = {2: torch.int16, 4: torch.int32}[x.element_size()]
        arrays |= {
            f"{name}.dtype": numpy.array(str(x.dtype).removeprefix("torch.")),
            f"{name}.x": x.view(signed).numpy(),
        }
        if amax is not None:
            arrays[f"{name}.given"] = numpy.float32(amax)
        for kind, (codes, scales, whole) in made.items():
            arrays |= {
                f"{name}.{kind}.codes": codes.numpy(),
                f"{name}.{kind}.scales": scales.view(torch.uint8).numpy(),
                f"{name}.{kind}.amax": whole.numpy().reshape(()),
            }
    numpy.savez_compressed(Path(__file__).with_name("nvfp4_training.npz"), **arrays)


if __name__ == "__main__":
    main()
