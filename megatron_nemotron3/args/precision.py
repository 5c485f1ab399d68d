"""Number formats by name: bf16, fp32, mxfp8, nvfp4. Standard library only.

The router computes in FP32 in all of them (`--moe-router-dtype fp32`, emitted for every MoE model).

nvfp4 is table 3 of the Super report, and flags alone cannot say it: attention projections, latent projections
and MTP stay BF16 and Mamba's output projection is MXFP8, per module, in a `--te-precision-config-file`.
Without that file Megatron quantizes all of them to NVFP4, silently. So the file is required
(`te_precision_config_file=`), unless `allow_plain_nvfp4=True` asks for exactly that.
"""

from __future__ import annotations

from megatron_nemotron3.models import Nemotron3Config

PRECISIONS = ("bf16", "fp32", "mxfp8", "nvfp4")

#: Block sizes: every dimension a quantized weight is blocked along must be a multiple.
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32

# (name, number of layers) -> BF16 layers at the end. Super: 14 in two public configs, 16 in a third.
_PUBLISHED_TAIL = {("super", 88): 14, ("ultra", 108): 16}


def bf16_tail(config: Nemotron3Config) -> int:
    """Decoder layers kept BF16 at the end: 14 for Super, 16 for Ultra, else 15 % of the layers, up."""
    return _PUBLISHED_TAIL.get((config.name, config.num_layers), -(-15 * config.num_layers // 100))


def precision_flags(
    config: Nemotron3Config, precision: str, te_precision_config_file: str | None = None
) -> list[tuple[str, tuple[object, ...]]]:
    """(option, values) of a precision, without the router's.

    Raises:
        ValueError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision == "fp32":  # Megatron's default: no option
        return []
    flags: list[tuple[str, tuple[object, ...]]] = [("--bf16", ())]
    if precision == "bf16":
        return flags
    if precision == "nvfp4":
        flags += [("--fp4-format", ("e2m1",)), ("--fp4-recipe", ("nvfp4",))]
    else:
        flags += [("--fp8-format", ("e4m3",)), ("--fp8-recipe", ("mxfp8",))]
    # NVIDIA's MXFP8 test of Super keeps the same tail. The count at the start defaults to 1 in Megatron.
    flags += [
        ("--first-last-layers-bf16", ()),
        ("--num-layers-at-start-in-bf16", (0,)),
        ("--num-layers-at-end-in-bf16", (bf16_tail(config),)),
    ]
    if config.is_moe:  # pad every expert's tokens to the GEMM's alignment
        flags.append(("--moe-router-padding-for-quantization", ()))
    if te_precision_config_file:
        flags.append(("--te-precision-config-file", (te_precision_config_file,)))
    return flags
