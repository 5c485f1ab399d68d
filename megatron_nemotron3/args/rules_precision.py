"""Rules on number formats: block sizes, and supported combinations. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_nemotron3.args.launch import Launch
from megatron_nemotron3.args.rule import Rule
from megatron_nemotron3.models.tensors import rows_of, symbol_sizes
from megatron_nemotron3.precision.numerics import MXFP8_BLOCK, NVFP4_BLOCK
from megatron_nemotron3.precision.table import BF16, MXFP8, NVFP4, kind_named

_ARGUMENTS = "megatron/training/arguments.py"
_CONFIG = "megatron/core/transformer/transformer_config.py"
_TE = "Transformer Engine's quantizers; megatron/core/fp4_utils.py"

#: CUDA compute capabilities that Transformer Engine's documentation names for training in NVFP4. Its code
#: accepts every GPU from 10.0 on, but from 12.0 on it refuses MXFP8, and stochastic rounding returned zeros
#: (TE #3281).
FP4_CAPABILITIES = ((10, 0), (10, 3))

#: Elements per FP4 row that keep every row at a 16-byte aligned address.
_FP4_ROW = 32


def _has_file(c: Launch) -> bool:
    return bool(c.te_precision_config_file) or "--te-precision-config-file" in c.options


def _local_shapes(c: Launch) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the weights of the decoder's quantized GEMMs on one rank: (name, [output, input], block)."""
    sizes = symbol_sizes(c.config)
    for symbol in sorted(set(c.config.pattern)):
        for row in rows_of(c.config, symbol):
            kind = kind_named(row.linear)
            if kind is None or not kind.quantizable:
                continue
            # Without a precision file every linear has the format of its layer.
            by_recipe = c.precision == NVFP4 and _has_file(c)
            number_format = kind.format(c.precision) if by_recipe else c.precision
            if number_format == BF16:
                continue
            shape = [sizes[size] for size in row.hf[0].shape]
            if row.tp != "replicated":
                shape[row.tp == "row"] //= c.layout.etp if row.routed else c.layout.tp
            block = MXFP8_BLOCK if number_format == MXFP8 else NVFP4_BLOCK
            yield f"{symbol} {row.hf[0].name}", tuple(shape), block


def _misaligned(c: Launch, at_least: int = 1) -> list[str]:
    """Return weights whose local dimensions are not multiples of their block size or of `at_least`."""
    return [
        f"{name} {list(shape)} (multiples of {max(block, at_least)})"
        for name, shape, block in _local_shapes(c)
        if any(size % max(block, at_least) for size in shape)
    ]


def _alignment_message(c: Launch) -> str:
    return (
        f"{c.precision} quantizes in blocks, and at TP={c.layout.tp} ETP={c.layout.etp} the sizes of these "
        f"weights are not multiples of a block: {', '.join(_misaligned(c))}. Use another TP or bf16"
    )


def _tokens(c: Launch) -> int:
    """Return the tokens of a microbatch in one rank's GEMMs (sequence parallelism gathers them)."""
    micro = c.schedule.micro_batch_size if c.schedule else 1
    return micro * c.seq_length // c.layout.cp


def _capability(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"


def _block_size(c: Launch) -> int:
    return MXFP8_BLOCK if c.precision == "mxfp8" else NVFP4_BLOCK


PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        "nvfp4-without-file",
        lambda c: c.precision == "nvfp4" and not _has_file(c) and not c.allow_plain_nvfp4,
        lambda c: (
            "nvfp4 without --te-precision-config-file: Megatron would also quantize attention and latent "
            "projections, MTP and Mamba's out_proj, against the published recipe. Give "
            f"te_precision_config_file=PATH (nemotron3 precision {c.config.name} --output PATH writes it), "
            "or allow_plain_nvfp4=True to accept that"
        ),
        "Super report, table 3",
    ),
    Rule(
        "precision-file-torch",
        # In `extra` the file may say how a plain run is measured; what is built decides then.
        lambda c: c.te_precision_config_file and c.backend == "torch" and not c.quantized,
        lambda c: (
            f"a precision file has no effect in {c.precision} on the torch backend: drop it, or emulate its "
            "formats (--precision nvfp4 --emulate; in Python precision='nvfp4', emulate=True)"
        ),
        "this package",
    ),
    Rule(
        "precision-file-unused",
        lambda c: (
            _has_file(c) and not c.quantized and not (c.te_precision_config_file and c.backend == "torch")
        ),
        lambda c: (
            f"a precision file affects {c.precision} only through entries that set "
            "override_nonquantized_autocast: drop it or use nvfp4"
        ),
        "megatron/core/extensions/transformer_engine.py",
        "warning",
    ),
    Rule(
        "bf16-layers-range",
        lambda c: (
            c.quantized
            and (
                min(c.bf16_at_start, c.bf16_at_end) < 0
                or c.bf16_at_start + c.bf16_at_end > c.config.num_layers
            )
        ),
        lambda c: (
            f"{c.bf16_at_start} BF16 layers at the start and {c.bf16_at_end} at the end of "
            f"{c.config.num_layers} layers: use counts from 0 whose sum is at most {c.config.num_layers} "
            "(Megatron does not check them for FP4)"
        ),
        _CONFIG,
    ),
    Rule(
        "mxfp8-tail-pipeline",
        lambda c: (
            c.precision == "mxfp8"
            and max(c.bf16_at_start, c.bf16_at_end) > c.config.num_layers // c.layout.pp
        ),
        lambda c: (
            f"mxfp8 keeps {max(c.bf16_at_start, c.bf16_at_end)} BF16 layers at one end; Megatron allows "
            f"at most layers/PP={c.config.num_layers // c.layout.pp}: lower PP, or pass "
            f"--num-layers-at-end-in-bf16 {c.config.num_layers // c.layout.pp}"
        ),
        _CONFIG,
    ),
    Rule(
        "mxfp8-torch",
        lambda c: c.precision == "mxfp8" and c.backend == "torch",
        lambda c: "mxfp8 GEMMs exist only in Transformer Engine: use backend te, or precision bf16",
        _CONFIG,
    ),
    Rule(
        "nvfp4-torch",
        lambda c: c.precision == "nvfp4" and c.backend == "torch" and not c.emulate,
        lambda c: (
            "FP4 GEMMs exist only in Transformer Engine, and Megatron's parser refuses --fp4-format "
            "without it: use backend te, or emulate=True"
        ),
        _ARGUMENTS,
    ),
    Rule(
        "quantized-hardware",
        lambda c: c.quantized and not c.emulate and c.compute_capability not in (None, *FP4_CAPABILITIES),
        lambda c: (
            f"{c.precision} training requires a GPU of compute capability "
            f"{' or '.join(map(_capability, FP4_CAPABILITIES))}; this one has "
            f"{_capability(c.compute_capability or (0, 0))}: use precision bf16"
            + (", or emulate=True with backend torch" if c.precision == "nvfp4" else "")
        ),
        "Transformer Engine's documentation of NVFP4 and MXFP8; TE #3281",
    ),
    Rule(
        "emulate-other",
        lambda c: c.emulate and (c.precision, c.backend) != ("nvfp4", "torch"),
        lambda c: (
            f"emulation supports only precision nvfp4 on backend torch, not {c.precision} on backend "
            f"{c.backend}: use precision nvfp4 and backend torch, or emulate=False"
        ),
        "this package",
    ),
    Rule("weight-alignment", lambda c: c.quantized and _misaligned(c), _alignment_message, _TE),
    Rule(
        "fp4-row-alignment",
        lambda c: (
            c.precision == "nvfp4" and not c.emulate and not _misaligned(c) and _misaligned(c, _FP4_ROW)
        ),
        lambda c: (
            f"FP4 GEMMs read rows in multiples of {_FP4_ROW} elements; at TP={c.layout.tp} "
            f"ETP={c.layout.etp} these weights have other sizes, which no source reports as tested: "
            f"{', '.join(_misaligned(c, _FP4_ROW))}"
        ),
        "megatron/core/fp4_utils.py",
        "warning",
    ),
    Rule(
        "token-alignment",
        lambda c: c.quantized and _tokens(c) % _block_size(c),
        lambda c: (
            f"the {_tokens(c)} tokens of a microbatch (micro_batch_size*seq_length/CP) are not a multiple of "
            f"{_block_size(c)}, as {c.precision} requires: use a seq_length that is a multiple of "
            f"{_block_size(c) * c.layout.cp}"
        ),
        _TE,
    ),
)
