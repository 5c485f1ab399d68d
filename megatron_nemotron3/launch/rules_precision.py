"""Rules on number formats: block sizes, and supported combinations."""

from __future__ import annotations

from functools import lru_cache

from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.rule import ARGUMENTS, CONFIG, Rule
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import decoder_layers
from megatron_nemotron3.models.tensors import rows_of, symbol_sizes
from megatron_nemotron3.precision.formats import (
    BF16,
    BLOCKWISE,
    DELAYED,
    EMULATED,
    FORMATS,
    MXFP8,
    NVFP4,
    TENSORWISE,
    Format,
    capability_text,
    either,
    runnable,
)
from megatron_nemotron3.precision.table import kind_named

_TE = "Transformer Engine's quantizers; megatron/core/fp4_utils.py"
#: Cure of what a GPU cannot compute.
_EMULATION = "--emulate (in Python emulate=True)"


@lru_cache(maxsize=1024)  # rules and a search for layouts ask for the same ones again and again
def _local_shapes(
    model: Nemotron3Config, precision: str, by_recipe: bool, tp: int, etp: int
) -> tuple[tuple[str, tuple[int, ...], Format], ...]:
    """The weights of the decoder's quantized GEMMs on one rank: (name, (output, input), format)."""
    found = []
    for symbol, config, _ in sorted(decoder_layers(model), key=lambda layer: layer[0]):
        sizes = symbol_sizes(config)
        for row in rows_of(config, symbol):
            kind = kind_named(row.linear)
            if kind is None or not kind.quantizable:
                continue
            # Without a precision file every linear has the format of its layer.
            number_format = kind.format(precision) if by_recipe else precision
            if number_format == BF16:
                continue
            shape = [sizes[size] for size in row.hf[0].shape]
            if row.tp != "replicated":
                shape[row.tp == "row"] //= etp if row.routed else tp
            found.append((f"{symbol} {row.hf[0].name}", tuple(shape), FORMATS[number_format]))
    return tuple(found)


def _misaligned(c: Launch, *, documented: bool = False) -> list[str]:
    """Return weights whose local dimensions are not multiples of what their format needs or documents."""
    found, by_recipe = [], c.precision == NVFP4 and bool(c.precision_file)
    shapes = _local_shapes(c.config, c.precision, by_recipe, c.layout.tp, c.layout.etp)
    for name, shape, fmt in shapes:
        multiple = fmt.documented if documented else fmt.multiple
        if any(size % multiple for size in shape):
            found.append(f"{name} {list(shape)} (multiples of {multiple})")
    return list(dict.fromkeys(found))  # layers whose experts differ share the other weights


def _alignment_message(c: Launch) -> str:
    return (
        f"{c.precision} quantizes in blocks, and at TP={c.layout.tp} ETP={c.layout.etp} the sizes of these "
        f"weights are not multiples of a block: {', '.join(_misaligned(c))}. Use another TP or bf16"
    )


def _tokens(c: Launch) -> int:
    """Return the tokens of a microbatch in one rank's GEMMs (sequence parallelism gathers them)."""
    return c.micro_batch_size * c.seq_length // c.layout.cp


def _format(c: Launch) -> Format:
    return FORMATS[c.precision]


def _hardware_message(c: Launch) -> str:
    capability = c.capability or (0, 0)
    return (
        f"{c.precision} training requires a GPU of compute capability {_format(c).needs}; this one has "
        f"{capability_text(capability)}: use precision {either(runnable(capability))}"
        + (f", or {_EMULATION} with backend torch" if _format(c).emulated else "")
    )


def _emulated(c: Launch) -> str:
    return c.emulate.format if c.emulate else ""


def _filled(c: Launch) -> bool:
    """Whether emulation fills last blocks with zeros, in which NVFP4's tiles would differ."""
    return bool(c.emulate) and c.precision == MXFP8


def _recomputed(c: Launch) -> list[str]:
    """Return the recomputed modules that delayed scaling does not support."""
    return [m for m in c.options.get("--recompute-modules", ()) if m in ("moe_act", "layernorm")]


PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        "nvfp4-without-file",
        lambda c: (
            c.precision == NVFP4
            and not (c.precision_file or c.allow_plain_nvfp4 or (c.emulate and c.emulate.packed))
        ),
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
            f"formats with precision nvfp4 and {_EMULATION}"
        ),
        "this package",
    ),
    Rule(
        "precision-file-unused",
        lambda c: (
            c.precision_file and not c.quantized and not (c.te_precision_config_file and c.backend == "torch")
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
        CONFIG,
    ),
    Rule(
        "fp8-bf16-layers-pipeline",
        lambda c: (
            c.quantized
            and not c.emulate
            and _format(c).kind == "fp8"
            and _format(c).bf16_layers
            and max(c.bf16_at_start, c.bf16_at_end) > c.config.num_layers // c.layout.pp
        ),
        lambda c: (
            f"{c.precision} keeps {max(c.bf16_at_start, c.bf16_at_end)} BF16 layers at one end; Megatron "
            f"allows at most layers/PP={c.config.num_layers // c.layout.pp}: lower PP, or pass "
            f"--num-layers-at-{'end' if c.bf16_at_end >= c.bf16_at_start else 'start'}-in-bf16 "
            f"{c.config.num_layers // c.layout.pp}"
        ),
        CONFIG,
    ),
    Rule(
        "fp8-torch",
        lambda c: c.quantized and _format(c).kind == "fp8" and c.backend == "torch" and not c.emulate,
        lambda c: (
            f"{c.precision} GEMMs exist only in Transformer Engine: use backend te, or "
            + (_EMULATION if _format(c).emulated else "precision bf16")
        ),
        CONFIG,
    ),
    Rule(
        "delayed-bf16-layers",
        lambda c: c.precision == DELAYED and c.first_of("--first-last-layers-bf16"),
        lambda c: (
            "Megatron cannot keep first and last layers in BF16 with delayed scaling: drop "
            f"--first-last-layers-bf16, or use precision {TENSORWISE}"
        ),
        CONFIG,
    ),
    Rule(
        "delayed-recompute",
        lambda c: c.precision == DELAYED and _recomputed(c),
        lambda c: (
            f"delayed scaling does not support recomputing {' and '.join(_recomputed(c))}: drop "
            f"{'it' if len(_recomputed(c)) == 1 else 'them'} from --recompute-modules, or use precision "
            f"{TENSORWISE}"
        ),
        CONFIG,
    ),
    Rule(
        "fp8-param-gather",
        lambda c: c.first_of("--fp8-param-gather") and not (c.quantized and _format(c).kind == "fp8"),
        lambda c: f"--fp8-param-gather needs an FP8 recipe, not {c.precision}: drop it",
        ARGUMENTS,
    ),
    Rule(
        "nvfp4-torch",
        lambda c: c.precision == NVFP4 and c.backend == "torch" and not c.emulate,
        lambda c: (
            "FP4 GEMMs exist only in Transformer Engine, and Megatron's parser refuses --fp4-format "
            f"without it: use backend te, or {_EMULATION}"
        ),
        ARGUMENTS,
    ),
    Rule(
        "quantized-hardware",
        lambda c: (
            c.quantized
            and not c.emulate
            and c.capability is not None
            and not _format(c).runs_on(c.capability)
        ),
        _hardware_message,
        "Transformer Engine's documentation of each recipe; TE #3281",
    ),
    Rule(
        "emulate-other",
        lambda c: c.emulate and (c.precision, c.backend) != (c.emulate.format, "torch"),
        lambda c: (
            f"emulation supports only precision {' and '.join(EMULATED)} on backend torch; this launch asks "
            f"for {c.precision} on backend {c.backend} and emulates {_emulated(c)}: use precision "
            f"{_emulated(c)} and backend torch, or emulate=False"
        ),
        "this package",
    ),
    Rule(
        "weight-alignment",
        lambda c: c.quantized and not _filled(c) and _misaligned(c),
        _alignment_message,
        _TE,
    ),
    Rule(
        "partial-blocks",
        lambda c: _filled(c) and _misaligned(c),
        lambda c: (
            f"{c.precision} hardware refuses these weights at TP={c.layout.tp} ETP={c.layout.etp}; emulation "
            f"fills their last block with zeros: {', '.join(_misaligned(c))}"
        ),
        "this package",
        "warning",
    ),
    Rule(
        "fp4-row-alignment",
        lambda c: (
            c.precision == NVFP4 and not c.emulate and not _misaligned(c) and _misaligned(c, documented=True)
        ),
        lambda c: (
            f"FP4 GEMMs read rows in multiples of {_format(c).documented} elements; at TP={c.layout.tp} "
            f"ETP={c.layout.etp} these weights have other sizes, which no source reports as tested: "
            f"{', '.join(_misaligned(c, documented=True))}"
        ),
        "megatron/core/fp4_utils.py",
        "warning",
    ),
    Rule(
        "blockwise-alignment",
        lambda c: c.precision == BLOCKWISE and not _misaligned(c) and _misaligned(c, documented=True),
        lambda c: (
            f"Transformer Engine documents FP8 blocks for multiples of {_format(c).documented}; at "
            f"TP={c.layout.tp} ETP={c.layout.etp} these weights have other sizes, with a partial last block: "
            f"{', '.join(_misaligned(c, documented=True))}. {TENSORWISE} has no blocks"
        ),
        "Transformer Engine's documentation of FP8 blockwise scaling",
        "warning",
    ),
    Rule(
        "token-alignment",
        lambda c: c.quantized and _tokens(c) % _format(c).multiple,
        lambda c: (
            f"the {_tokens(c)} tokens of a microbatch (micro_batch_size*seq_length/CP) are not a multiple of "
            f"{_format(c).multiple}, as {c.precision} requires: use a seq_length that is a multiple of "
            f"{_format(c).multiple * c.layout.cp}"
        ),
        _TE,
    ),
)
