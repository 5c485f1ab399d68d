"""Record what NVIDIA ModelOpt 0.47 makes of small weights: writes nvfp4_weights.npz beside itself.

    pip install --no-deps --target SITE nvidia-modelopt==0.47.0 pulp orloge cpsat_logutils
    PYTHONPATH=SITE python tests/golden/make_nvfp4_weights.py     # scipy, torch and transformers installed

Runs on a CPU. Per case: `weight` (bits of `dtype`), `codes`, `scale` (bits of float8_e4m3fn), `scale_2`, and
`values`, the bits of the weights ModelOpt's dequantization gives in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

MAGNITUDES = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])


def cases() -> dict[str, torch.Tensor]:
    """Weights [rows, columns] by name."""
    torch.manual_seed(3)
    normal = torch.randn(24, 64)
    spread = normal * torch.exp2(-torch.randint(0, 24, (24, 4)).float()).repeat_interleave(16, 1)
    holes = normal.clone()
    holes[3, 16:48], holes[7], holes[8, 1:16] = 0, 0, 0
    outlier = normal * 1e-3
    outlier[5, 17] = 300.0
    # Tensor scale 1 and exact block scales: every value and every halfway point, of both signs.
    exact = torch.stack([MAGNITUDES * s for s in (448, 1, 2.0**-9, 0.3125)]).repeat(2, 1)
    exact[4:] = -exact[4:]
    # Blocks whose scale is a halfway point of E4M3, so that the order of divisions decides its last bit.
    largest = torch.tensor(1.53125)
    candidates = torch.arange(1, 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    candidates = candidates[(candidates > largest / 500) & (candidates <= largest)]
    scale = largest / torch.tensor(2688.0)
    orders = candidates / (6 * scale), candidates / 6 / scale, candidates * (1 / (6 * scale))
    one, two, three = (o.clamp(max=448).to(torch.float8_e4m3fn).float() for o in orders)
    chosen = candidates[(one != two) | (one != three)]
    order = torch.zeros(len(chosen) + 1, 16)
    order[:, 5] = torch.cat((largest[None], chosen))
    return {
        "order": order.bfloat16(),
        "normal": normal.bfloat16(),
        "float32": normal * 0.0173,
        "float16": normal.half() * 0.0173,
        "spread": spread.bfloat16(),
        "holes": holes.bfloat16(),
        "outlier": outlier.bfloat16(),
        "exact": exact.reshape(4, 32).bfloat16(),
        "tiny": (normal * 1e-25).bfloat16(),
        "large": (normal * 1e30).bfloat16(),
        "column": normal[:1, :16].bfloat16(),
    }


def main() -> None:
    """Write the file."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    arrays: dict[str, numpy.ndarray] = {}
    for name, weight in cases().items():
        made, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
        values = made.dequantize(torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        signed = {2: torch.int16, 4: torch.int32}[weight.element_size()]
        arrays |= {
            f"{name}.dtype": numpy.array(str(weight.dtype).removeprefix("torch.")),
            f"{name}.weight": weight.view(signed).numpy(),
            f"{name}.codes": made._quantized_data.numpy(),
            f"{name}.scale": scale.view(torch.uint8).numpy(),
            f"{name}.scale_2": scale_2.numpy(),
            f"{name}.values": values.view(torch.int16).numpy(),
        }
    numpy.savez_compressed(Path(__file__).with_name("nvfp4_weights.npz"), **arrays)


if __name__ == "__main__":
    main()
