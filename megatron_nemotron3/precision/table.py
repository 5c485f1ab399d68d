"""The published NVFP4 recipe, written once: which linear has which format, and which layers stay BF16.

A kind whose format in the recipe is NVFP4 needs no line in the precision file: NVFP4 is what `--fp4-format
e2m1` makes of every Transformer Engine (TE) linear of a layer outside the BF16 tail. The file names the
exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.pattern import KINDS as LAYER_KINDS
from megatron_nemotron3.models.tensors import ROWS, Row, registered
from megatron_nemotron3.precision.formats import BF16, BLOCKWISE, FORMATS, MXFP8, NVFP4, TENSORWISE

FP32 = "fp32"
#: Precisions in which a model can be trained with this table.
PRECISIONS = (*FORMATS, BF16)

_SUPER = "Super report (arXiv 2604.12374), table 3"
_WHITE_PAPER = "Nemotron 3 white paper (arXiv 2512.20856), section 2.4"
_NO_TE_MODULE = "megatron-core 0.19: no TE module"


@dataclass(frozen=True)
class ModuleKind:
    """Linears that are treated alike. The table of tensors (`models.tensors`) says which they are."""

    #: The value of `Row.linear`, also used in messages.
    name: str
    #: Format in the published NVFP4 recipe.
    recipe: str
    why: str
    source: str
    #: Names and globs of the matchers that say so in the precision file; none where the recipe is NVFP4.
    matchers: tuple[tuple[str, str], ...] = ()
    #: False for a module that is no TE linear and keeps full precision in every run.
    quantizable: bool = True
    #: Glob of a kind that covers all modules below a name; None: the modules of its tensors.
    everything_in: str | None = None

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the table of tensors that hold its weights."""
        return tuple(row for row in ROWS if row.linear == self.name)

    @cached_property
    def layer(self) -> str:
        """Symbol of the layers it is in: M, *, E or -; "" for all of MTP and for what is in no layer."""
        part = self.rows[0].part
        return part if part in LAYER_KINDS else ""

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Globs on Megatron's module names. Every module that holds a matrix matches one kind, top down."""
        if self.everything_in:
            return (self.everything_in,)
        return tuple(f"*{module}" for row in self.rows for module in row.modules)

    def format(self, precision: str) -> str:
        """Its format outside the BF16 layers in a run of `precision`, one of `PRECISIONS`."""
        if not self.quantizable or precision == NVFP4:
            return self.recipe
        return precision


#: Modules that are never quantized. They come first, because an MTP block has routers, too.
NEVER: tuple[ModuleKind, ...] = (
    ModuleKind("embedding", BF16, "a lookup, no product", _NO_TE_MODULE, quantizable=False),
    ModuleKind(
        "output_layer",
        BF16,
        "kept in high precision",
        "arXiv 2509.25149, section 4.1; " + _NO_TE_MODULE,
        quantizable=False,
    ),
    ModuleKind(
        "router",
        FP32,
        "chooses experts (--moe-router-dtype fp32)",
        "arXiv 2509.25149, section 4.1; " + _NO_TE_MODULE,
        quantizable=False,
    ),
    ModuleKind("convolution", BF16, "depth-wise: no matrix product", _NO_TE_MODULE, quantizable=False),
)

#: Linears that can be quantized, in the order that the precision file needs: MTP before the kinds it
#: contains.
LINEARS: tuple[ModuleKind, ...] = (
    # Not "mtp.*": a model nested in another has it at language_model.mtp.
    ModuleKind(
        "mtp",
        BF16,
        "kept out of NVFP4 in both reports",
        _SUPER,
        (("mtp", "*mtp.*"),),
        everything_in="*mtp.*",
    ),
    ModuleKind(
        "attention",
        BF16,
        "few layers, 2 KV heads: fidelity for little time",
        _SUPER,
        (("attention_qkv", "*.linear_qkv"), ("attention_proj", "*.linear_proj")),
    ),
    ModuleKind(
        "latent",
        BF16,
        "negligible share of the step's time",
        _SUPER,
        (("latent", "*mlp.fc[12]_latent_proj"),),
    ),
    ModuleKind(
        "mamba_out",
        MXFP8,
        "in NVFP4 up to 40 % flushes to zero (seen on Nano)",
        f"{_SUPER}; {_WHITE_PAPER}; Ultra's report says higher precision, not which",
        (("mamba_out", "*mixer.out_proj"),),
    ),
    ModuleKind("mamba_in", NVFP4, "bulk of the work", _SUPER),
    ModuleKind("experts", NVFP4, "bulk of the parameters", _SUPER),
    ModuleKind("shared_experts", NVFP4, "bulk of the work", _SUPER),
    ModuleKind("mlp", NVFP4, "bulk of the work", _SUPER),
)

KINDS: tuple[ModuleKind, ...] = (*NEVER, *LINEARS)

_BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class BF16Layers:
    """The numbers of first and last decoder layers that stay BF16, and the source of these numbers."""

    start: int
    end: int
    source: str


# (model, number of layers) -> tail; a shortened Super has no published tail.
_PUBLISHED_TAIL = {
    ("super", 88): BF16Layers(
        0, 14, f"{_SUPER}: the final 15 %; 14 in two public configurations, 16 in a third"
    ),
    ("ultra", 108): BF16Layers(0, 16, "Ultra report (arXiv 2606.15007), section 2.2: the last 16 of 108"),
}
#: Recipe -> source of its 2 first and 2 last layers, which hold four matrix products at each end.
_TWO_AND_TWO = {
    TENSORWISE: "Nemotron-H report (arXiv 2504.03624): the first and last four products",
    BLOCKWISE: "Nemotron Nano 2 report (arXiv 2508.14444): the first and last four products",
}
#: The models of these reports, and their numbers of layers. What the 9B v2 was distilled in is UNKNOWN, and
#: which FP8 recipe the 47B was.
_TRAINED_IN = {TENSORWISE: ("nemotron-h-56b", 118), BLOCKWISE: ("nano-12b-v2", 62)}


def bf16_layers(config: Nemotron3Config, precision: str) -> BF16Layers:
    """The layers that stay BF16 in a run of `precision`: the tail of NVFP4 and MXFP8, 2 at each end in FP8.

    Megatron cannot keep layers in BF16 with delayed scaling.
    """
    if precision in _TWO_AND_TWO:
        count = min(2, config.num_layers // 2)
        return BF16Layers(count, count, _TWO_AND_TWO[precision])
    if precision in FORMATS and FORMATS[precision].bf16_layers:
        return tail(config)
    return BF16Layers(0, 0, "none are possible with delayed scaling" if precision in FORMATS else "")


def tail(config: Nemotron3Config) -> BF16Layers:
    """14 layers for Super, 16 for Ultra, else 15 % of the layers, rounded up. No first layers stay BF16."""
    return tail_of_depth(config.num_layers, config.name)


def tail_of_depth(num_layers: int, name: str | None = None) -> BF16Layers:
    """The tail of the catalog's model with this number of layers (and name), else 15 % as for `tail`."""
    found = (t for (own, n), t in _PUBLISHED_TAIL.items() if n == num_layers and name in (None, own))
    return next(found, BF16Layers(0, -(-15 * num_layers // 100), "none published: 15 % as for Super"))


def bf16_tail(config: Nemotron3Config) -> int:
    """`tail(config).end`, the value of `--num-layers-at-end-in-bf16`."""
    return tail(config).end


def is_published(config: Nemotron3Config, precision: str = NVFP4) -> bool:
    """Whether a report states that this model was trained with this recipe; for MXFP8, with NVFP4's."""
    model = config.name, config.num_layers
    return model in _PUBLISHED_TAIL if precision in (NVFP4, MXFP8) else model == _TRAINED_IN.get(precision)


def kind_of(module: str) -> ModuleKind | None:
    """The kind of a module, whose name may be nested ("language_model.decoder.layers.3.mixer.in_proj").

    None if the name belongs to no module of this family that holds a matrix.
    """
    return next((kind for kind in KINDS if any(fnmatchcase(module, glob) for glob in kind.modules)), None)


def kind_named(linear: str | None) -> ModuleKind | None:
    """The kind with this name (`Row.linear`); None for None."""
    return None if linear is None else _BY_NAME[linear]


@dataclass(frozen=True)
class LinearRow:
    """A linear of a model that could be quantized."""

    #: As `named_modules()` of a `HybridModel` on one pipeline stage has it.
    name: str
    kind: ModuleKind
    #: Decoder layer from 0, or None in MTP.
    layer: int | None
    #: Layer in an MTP block from 0, or None outside its layers.
    in_mtp: int | None = None


@dataclass(frozen=True)
class Structure:
    """What the names of a model's linears depend on: its patterns, and whether its experts are latent."""

    pattern: str
    #: One pattern for each physical MTP block.
    mtp: tuple[str, ...] = ()
    latent: bool = False

    @classmethod
    def of(cls, config: Nemotron3Config) -> Structure:
        blocks = (config.mtp_pattern or "",) * config.mtp_num_blocks
        return cls(config.pattern, blocks, bool(config.moe_latent_size))

    def linears(self) -> Iterator[LinearRow]:
        """All linears that can be quantized, decoder first. Experts count as one per layer and FC."""
        for number, symbol in enumerate(self.pattern):
            yield from self._linears_below(f"decoder.layers.{number}", symbol, number)
        for block, inner in enumerate(self.mtp):
            yield from self._linears_below(f"mtp.layers.{block}", "mtp_in")
            for number, symbol in enumerate(inner):
                path = f"mtp.layers.{block}.mtp_model_layer.layers.{number}"
                yield from self._linears_below(path, symbol, in_mtp=number)

    def kinds(self) -> set[str]:
        return {linear.kind.name for linear in self.linears()}

    def _linears_below(
        self, path: str, part: str, layer: int | None = None, in_mtp: int | None = None
    ) -> Iterator[LinearRow]:
        for row in registered(row for row in ROWS if row.part == part):
            kind = kind_named(row.linear)
            if kind and kind.quantizable and (self.latent or row.needs != "moe_latent_size"):
                kind = _BY_NAME["mtp"] if layer is None else kind
                for module in row.modules:
                    yield LinearRow(f"{path}.{module}", kind, layer, in_mtp)
