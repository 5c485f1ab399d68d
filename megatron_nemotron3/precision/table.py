"""The published NVFP4 recipe, written once: which linear has which format, and which layers stay BF16.

From this table come Megatron's flags (`args`), the file for `--te-precision-config-file` (`yaml_file`), the
census of a built model (`census`) and the table of docs/nvfp4.md (`command`). Standard library only.

A kind whose format in the recipe is NVFP4 needs no line in the file: NVFP4 is what `--fp4-format e2m1` makes
of every Transformer Engine (TE) linear of a layer outside the BF16 tail. The file names the exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron_nemotron3.models import Nemotron3Config

NVFP4, MXFP8, BF16, FP32 = "nvfp4", "mxfp8", "bf16", "fp32"
#: What a model can be trained in by this table.
FORMATS = (NVFP4, MXFP8, BF16)

_SUPER = "Super report (arXiv 2604.12374), table 3"
_WHITE_PAPER = "Nemotron 3 white paper (arXiv 2512.20856), section 2.4"
_NEVER = "megatron-core 0.19: no TE module"


@dataclass(frozen=True)
class ModuleKind:
    """One row: linears that are treated alike."""

    #: Identifier, for messages and tests.
    name: str
    #: Symbol of the layers it is in: M, *, E or -; "" for all of MTP and for what is in no layer.
    layer: str
    #: Globs on Megatron's module names. Every module that holds a matrix matches exactly one row, top down.
    modules: tuple[str, ...]
    #: The same weights in `models.parameters` (Hugging Face names in a layer).
    tensors: tuple[str, ...]
    #: Format in the published NVFP4 recipe.
    recipe: str
    why: str
    source: str
    #: Names and globs of the matchers that say so in the precision file; none: nothing needs to be said.
    matchers: tuple[tuple[str, str], ...] = ()
    #: False: full precision whatever is asked for, because it is no TE linear.
    quantizable: bool = True

    def format(self, precision: str) -> str:
        """Its format outside the BF16 tail in a run of `precision` ("nvfp4", "mxfp8" or "bf16")."""
        if not self.quantizable or precision == NVFP4:
            return self.recipe
        return precision


#: What is never quantized. First, because an MTP block has routers, too.
NEVER: tuple[ModuleKind, ...] = (
    ModuleKind(
        "embedding",
        "",
        ("*embedding.word_embeddings",),
        (),
        BF16,
        "a lookup, no product",
        _NEVER,
        quantizable=False,
    ),
    ModuleKind(
        "output_layer",
        "",
        ("*output_layer",),
        (),
        BF16,
        "kept in high precision",
        "arXiv 2509.25149, section 4.1; " + _NEVER,
        quantizable=False,
    ),
    ModuleKind(
        "router",
        "E",
        ("*mlp.router",),
        ("mixer.gate.weight",),
        FP32,
        "chooses experts (--moe-router-dtype fp32)",
        "arXiv 2509.25149, section 4.1; " + _NEVER,
        quantizable=False,
    ),
    ModuleKind(
        "convolution",
        "M",
        ("*.mixer", "*.mixer.conv1d"),
        ("mixer.conv1d.weight",),
        BF16,
        "depth-wise: no matrix product",
        _NEVER,
        quantizable=False,
    ),
)

#: What could be quantized, in the order the precision file needs: MTP before the kinds it contains.
LINEARS: tuple[ModuleKind, ...] = (
    ModuleKind(
        "mtp",
        "",
        ("*mtp.*",),
        ("eh_proj.weight",),
        BF16,
        "kept out of NVFP4 in both reports",
        _SUPER,
        # Not "mtp.*": a model nested in another is at language_model.mtp.
        (("mtp", "*mtp.*"),),
    ),
    ModuleKind(
        "attention",
        "*",
        ("*self_attention.linear_qkv", "*self_attention.linear_proj"),
        ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight", "mixer.o_proj.weight"),
        BF16,
        "few layers, 2 KV heads: fidelity for little time",
        _SUPER,
        (("attention_qkv", "*.linear_qkv"), ("attention_proj", "*.linear_proj")),
    ),
    ModuleKind(
        "latent",
        "E",
        ("*mlp.fc1_latent_proj", "*mlp.fc2_latent_proj"),
        ("mixer.fc1_latent_proj.weight", "mixer.fc2_latent_proj.weight"),
        BF16,
        "negligible share of the step's time",
        _SUPER,
        (("latent", "*mlp.fc[12]_latent_proj"),),
    ),
    ModuleKind(
        "mamba_out",
        "M",
        ("*mixer.out_proj",),
        ("mixer.out_proj.weight",),
        MXFP8,
        "in NVFP4 up to 40 % flushes to zero (seen on Nano)",
        f"{_SUPER}; {_WHITE_PAPER}; Ultra's report says higher precision, not which",
        (("mamba_out", "*mixer.out_proj"),),
    ),
    ModuleKind(
        "mamba_in", "M", ("*mixer.in_proj",), ("mixer.in_proj.weight",), NVFP4, "bulk of the work", _SUPER
    ),
    ModuleKind(
        "experts",
        "E",
        ("*mlp.experts.linear_fc1", "*mlp.experts.linear_fc2"),
        ("mixer.experts.{e}.up_proj.weight", "mixer.experts.{e}.down_proj.weight"),
        NVFP4,
        "bulk of the parameters",
        _SUPER,
    ),
    ModuleKind(
        "shared_experts",
        "E",
        ("*mlp.shared_experts.linear_fc1", "*mlp.shared_experts.linear_fc2"),
        ("mixer.shared_experts.up_proj.weight", "mixer.shared_experts.down_proj.weight"),
        NVFP4,
        "bulk of the work",
        _SUPER,
    ),
    ModuleKind(
        "mlp",
        "-",
        ("*mlp.linear_fc1", "*mlp.linear_fc2"),
        ("mixer.up_proj.weight", "mixer.down_proj.weight"),
        NVFP4,
        "bulk of the work",
        _SUPER,
    ),
)

KINDS: tuple[ModuleKind, ...] = (*NEVER, *LINEARS)

_BY_TENSOR = {tensor: kind for kind in KINDS for tensor in kind.tensors}


@dataclass(frozen=True)
class Tail:
    """Decoder layers that stay BF16 at the end."""

    layers: int
    source: str


# (model, number of layers). A shortened Super is not Super.
_PUBLISHED_TAIL = {
    ("super", 88): Tail(14, f"{_SUPER}: the final 15 %; 14 in two public configurations, 16 in a third"),
    ("ultra", 108): Tail(16, "Ultra report (arXiv 2606.15007), section 2.2: the last 16 of 108"),
}


def tail(config: Nemotron3Config) -> Tail:
    """14 for Super, 16 for Ultra, else 15 % of the layers, up. No layer at the start stays BF16."""
    published = _PUBLISHED_TAIL.get((config.name, config.num_layers))
    return published or Tail(-(-15 * config.num_layers // 100), "none published: 15 % as for Super")


def bf16_tail(config: Nemotron3Config) -> int:
    """`tail(config).layers`, the value of `--num-layers-at-end-in-bf16`."""
    return tail(config).layers


def is_published(config: Nemotron3Config) -> bool:
    """Whether a report says that this model was trained so."""
    return (config.name, config.num_layers) in _PUBLISHED_TAIL


def kind_of(module: str) -> ModuleKind | None:
    """The row of a module name, at any depth of nesting ("language_model.decoder.layers.3.mixer.in_proj").

    None: no row, so the name belongs to no module of this family that holds a matrix.
    """
    return next((kind for kind in KINDS if any(fnmatchcase(module, glob) for glob in kind.modules)), None)


def tensor_kind(tensor: str) -> ModuleKind | None:
    """The row of a decoder layer's weight (`models.parameters` name); None: no matrix ("norm.weight")."""
    return _BY_TENSOR.get(tensor)
