"""Record what NVIDIA ModelOpt 0.47 makes of small weights: writes nvfp4_weights.npz beside itself.

    pip install --no-deps --target SITE nvidia-modelopt==0.47.0 pulp orloge cpsat_logutils
    PYTHONPATH=SITE python tests/golden/make_nvfp4_weights.py     # scipy, torch and transformers installed

Runs on a CPU. Per case: `weight` (bits of `dtype`), `codes`, `scale` (bits of float8_e4m3fn), `scale_2`, and
`values`, the bits of the weights ModelOpt's dequantization gives in bfloat16. Names with `four_` are of its
four-over-six (`configs/numerics/nvfp4_four_over_six`, a search over 1 and 1.5), those with `all_` of its
search over all E4M3 scales (`configs/numerics/nvfp4_static`, `fp8_scale_sweep`). Its kernel that is for CUDA
alone, of the values that a search compares, is replaced by ModelOpt's functions for CPUs. `fp8_amax` is what
the search over 1 and 1.5 makes of the weight's largest magnitude for FP8 (`configs/numerics/fp8`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

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
        "odd": (normal[:7, :48] * 0.02).bfloat16(),
        "subnormal": (spread * torch.exp2(-torch.arange(24.0))[:, None]).float() * 1e-3,
        # From two values in the first row to all, so that many scales have the same error, or nearly.
        "ties": MAGNITUDES[torch.randint(0, 1 << 20, (24, 64)) % torch.arange(2, 26)[:, None] % 16] * 0.37,
        "equal": torch.tensor([6.0, 4, 3, 2] * 12).view(3, 16).bfloat16(),  # no error with 6, nor with 4
    }


FOUR_OVER_SIX = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {
            "quantizer_name": "*weight_quantizer",
            "cfg": {
                "num_bits": (2, 1),
                "block_sizes": {-1: 16, "type": "static", "scale_bits": (4, 3), "four_over_six": True},
            },
        },
    ],
    "algorithm": {
        "method": "mse",
        "fp8_scale_sweep": False,
        "start_multiplier": 1.0,
        "stop_multiplier": 1.5,
        "step_size": 0.5,
    },
}


#: As `ptq/nvfp4-mse` of Super.
ALL_SCALES = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {
            "quantizer_name": "*weight_quantizer",
            "cfg": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "static", "scale_bits": (4, 3)}},
        },
    ],
    "algorithm": {"method": "mse", "fp8_scale_sweep": True},
}


def all_scales(weight: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """`searched` over all scales. A tensor whose squares FP32 cannot hold is multiplied by a power of two.

    ModelOpt takes a tensor up to 3.6e-7 for one of zeros, and gives the smallest scale to all its blocks.
    """
    largest = float(weight.abs().max())
    if 1e-6 < largest < 1e15:
        return searched(weight, ALL_SCALES)
    unit = 2.0 ** -math.frexp(largest)[1]
    made, scale, scale_2 = searched(weight * unit, ALL_SCALES)
    return made, scale, scale_2 / unit


def searched(weight: torch.Tensor, search: dict[str, Any]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """ModelOpt's `NVFP4QTensor` of a weight, its block scales and its tensor scale."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.kernels.quantization.gemm.fp4_kernel import compute_fp4_scales
    from modelopt.torch.quantization.nn.modules import tensor_quantizer
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def values(x: Any, amax: Any, whole: Any, rounded: bool, largest: float, *rest: Any) -> torch.Tensor:
        steps = compute_fp4_scales(amax, whole, rounded, largest).view(-1, 1)
        safe = torch.where((steps == 0) | ~steps.isfinite(), 1.0, steps)
        codes = NVFP4QTensor._cast_fp4(x.view(-1, 16) / safe)
        rounded_values = NVFP4QTensor.get_e2m1_values(x.device)[codes.long()] * safe
        return torch.where(steps == 0, 0.0, rounded_values).view_as(x)

    linear = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    model = torch.nn.Sequential(linear)
    with mock.patch.object(tensor_quantizer, "static_blockwise_fp4_fake_quant", values):
        mtq.quantize(model, search)
    quantizer = model[0].weight_quantizer
    scale, scale_2 = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, weight)
    return NVFP4QTensor.quantize(weight.clone(), 16, scale, scale_2)


def fp8_amax(weight: torch.Tensor) -> torch.Tensor:
    """ModelOpt's largest magnitude of an FP8 weight, float32 []."""
    import modelopt.torch.quantization as mtq

    linear = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    model = torch.nn.Sequential(linear)
    off, on = FOUR_OVER_SIX["quant_cfg"]
    quantizers = [off, {**on, "cfg": {"num_bits": (4, 3), "axis": None}}]
    mtq.quantize(model, {**FOUR_OVER_SIX, "quant_cfg": quantizers})
    return model[0].weight_quantizer.amax.float()


def main() -> None:
    """Write the file."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    arrays: dict[str, numpy.ndarray] = {}
    for name, weight in cases().items():
        signed = {2: torch.int16, 4: torch.int32}[weight.element_size()]
        arrays[f"{name}.dtype"] = numpy.array(str(weight.dtype).removeprefix("torch."))
        arrays[f"{name}.weight"] = weight.view(signed).numpy()
        arrays[f"{name}.fp8_amax"] = fp8_amax(weight).numpy()
        forms = {
            "": NVFP4QTensor.quantize(weight.clone(), 16),
            "four_": searched(weight, FOUR_OVER_SIX),
            "all_": all_scales(weight),
        }
        for form, (made, scale, scale_2) in forms.items():
            values = made.dequantize(torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
            arrays |= {
                f"{name}.{form}codes": made._quantized_data.numpy(),
                f"{name}.{form}scale": scale.view(torch.uint8).numpy(),
                f"{name}.{form}scale_2": scale_2.numpy(),
                f"{name}.{form}values": values.view(torch.int16).numpy(),
            }
    numpy.savez_compressed(Path(__file__).with_name("nvfp4_weights.npz"), **arrays)


if __name__ == "__main__":
    main()
