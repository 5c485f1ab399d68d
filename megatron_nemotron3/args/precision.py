"""Number formats by name: bf16, fp32, mxfp8, nvfp4. Standard library only.

The router computes in FP32 in all of them (`--moe-router-dtype fp32`, emitted for every MoE model).

nvfp4 is the table of `precision.table`, and flags alone cannot say it: attention projections, latent
projections and MTP stay BF16 and Mamba's output projection is MXFP8, per module, in a
`--te-precision-config-file` (`nemotron3 precision NAME --output FILE` writes it). Without that file Megatron
quantizes all of them to NVFP4, silently. So the file is required (`te_precision_config_file=`), unless
`allow_plain_nvfp4=True` asks for exactly that.

`emulate=True` asks Megatron for BF16 and leaves NVFP4 to the linears of the torch backend, which read the
same file and the same BF16 layers: no `--fp4-format`, which Megatron refuses without Transformer Engine.
"""

from __future__ import annotations

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.table import bf16_tail

__all__ = ["FP4_CAPABILITIES", "MXFP8_BLOCK", "NVFP4_BLOCK", "PRECISIONS", "bf16_tail", "precision_flags"]

PRECISIONS = ("bf16", "fp32", "mxfp8", "nvfp4")

#: Block sizes: every dimension a quantized weight is blocked along must be a multiple.
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32

#: CUDA compute capabilities that Transformer Engine's documentation names for training in NVFP4. Its code
#: lets every GPU from 10.0 pass; from 12.0 MXFP8 is refused and stochastic rounding gave zeros (TE #3281).
FP4_CAPABILITIES = ((10, 0), (10, 3))


def precision_flags(
    config: Nemotron3Config,
    precision: str,
    te_precision_config_file: str | None = None,
    emulate: bool = False,
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
    if emulate:
        pass
    elif precision == "nvfp4":
        flags += [("--fp4-format", ("e2m1",)), ("--fp4-recipe", ("nvfp4",))]
    else:
        flags += [("--fp8-format", ("e4m3",)), ("--fp8-recipe", ("mxfp8",))]
    # NVIDIA's MXFP8 test of Super keeps the same tail. The count at the start defaults to 1 in Megatron.
    flags += [
        ("--first-last-layers-bf16", ()),
        ("--num-layers-at-start-in-bf16", (0,)),
        ("--num-layers-at-end-in-bf16", (bf16_tail(config),)),
    ]
    if config.is_moe and not emulate:  # pad every expert's tokens to the GEMM's alignment
        flags.append(("--moe-router-padding-for-quantization", ()))
    if te_precision_config_file:
        flags.append(("--te-precision-config-file", (te_precision_config_file,)))
    return flags
