"""Which part of a Hugging Face tensor a rank holds, and where in its own tensor.

Every tensor of the family is cut along one axis, the same on both sides, so a part is a few intervals of it:

    q_proj [4096 d] at training TP 2, rank 1     rows 2048:4096 of the tensor = rows 0:2048 … of linear_qkv

Names, fusions and cuts of the engines' parameters are facts read from their sources, nothing else of them:

    vllm-project/vllm    models/nemotron_h.py and layers/mamba/mamba_mixer2.py at 00b08dc4,
                         models/nemotron_h_mtp.py at 01ca2773, layers/fused_moe/routed_experts.py at 002d6073
    sgl-project/sglang   models/nemotron_h.py at 02c60328, models/nemotron_h_mtp.py at 008b79d2,
                         distributed/utils.py at 1107be11

Shapes are those in which the engines create the parameters. Kernels that reorder a weight after loading need
the engine's own `load_weights`, which takes the whole tensors of engine "hf". Under SGLang's DP attention the
Mamba layers are cut over the attention ranks, too. What both engines' own loaders make of a refit on a CPU is
in tests/golden/engine_parameters.json.

Packed weights: `nvfp4`, `fp8` and full names of recipes give what `convert to-hf --quantize` writes. A recipe
that ends in `-blockwise` quantizes the weights that the recipe before the suffix has in FP8, but for in_proj,
whose parts engines refuse between blocks. Engines scale its activations as they come:

    X.weight            float8_e4m3fn [out, in]
    X.weight_scale_inv  float32 [out / 128, in / 128], rounded up: amax / 448 of each block
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from megatron_nemotron3.checkpoints.convert import transforms
from megatron_nemotron3.checkpoints.convert.inventory import Tensor, mappings
from megatron_nemotron3.checkpoints.convert.plan import CopyPiece, CopyPlan
from megatron_nemotron3.checkpoints.convert.quantized import Weight, formats, quantization
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import PARAMETER, NamedShape, Row, symbol_sizes
from megatron_nemotron3.precision.serving import FP8

#: The ranks over which a tensor is cut: those of an attention group, all tensor ranks, those that share an
#: expert, or those of the embedding or output layer.
Role = Literal["attention", "mlp", "shared", "experts", "embedding", "head", "whole"]
#: Pipeline stages that hold a tensor outside the layers.
Stages = Literal["first", "last", "all"]
#: Rows of a vocabulary are padded to a multiple of this, in both engines.
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class EngineParameter:
    """How an engine holds one tensor of Hugging Face's; q, k and v are one parameter, in this order.

    name: relative to the layer, as in `models.tensors`. stacked: experts are an additional first axis.
    negated_exp: holds -exp(tensor), FP32.
    """

    name: str
    role: Role
    stacked: bool = False
    negated_exp: bool = False


#: Tensors whose name below the layer is that of both engines, by role.
_SAME: dict[Role, str] = {
    "attention": "mixer.in_proj.weight mixer.conv1d.weight mixer.conv1d.bias mixer.D mixer.dt_bias "
    "mixer.norm.weight mixer.out_proj.weight mixer.o_proj.weight eh_proj.weight",
    "whole": "norm_f.weight norm.weight enorm.weight hnorm.weight final_layernorm.weight mixer.gate.weight "
    "mixer.gate.e_score_correction_bias mixer.fc1_latent_proj.weight mixer.fc2_latent_proj.weight",
    "shared": "mixer.shared_experts.up_proj.weight mixer.shared_experts.down_proj.weight",
    "mlp": "mixer.up_proj.weight mixer.down_proj.weight",
    "head": "lm_head.weight",
}
#: Name in Hugging Face's checkpoint, below the layer -> parameter of both engines.
PARAMETERS = {
    name: EngineParameter(name, role) for role, names in _SAME.items() for name in names.split()
} | {
    "embeddings.weight": EngineParameter("embed_tokens.weight", "embedding"),
    "mixer.A_log": EngineParameter("mixer.A", "attention", negated_exp=True),
    **{f"mixer.{x}_proj.weight": EngineParameter("mixer.qkv_proj.weight", "attention") for x in "qkv"},
    "mixer.experts.{e}.up_proj.weight": EngineParameter("mixer.experts.w13_weight", "experts", stacked=True),
    "mixer.experts.{e}.down_proj.weight": EngineParameter("mixer.experts.w2_weight", "experts", stacked=True),
}


@dataclass(frozen=True)
class EngineNames:
    """What differs between the engines.

    outside: stages with the embedding, and stages with the final norm and the output layer. last_first: the
    layers that a division leaves over go to the last stages; otherwise to those before the last. experts: the
    module that holds the experts.
    """

    outside: tuple[Stages, Stages]
    last_first: bool
    experts: str

    def parameter_name(self, parameter: EngineParameter, prefix: str) -> str:
        name = parameter.name.replace("mixer.experts.", self.experts)
        if name == "lm_head.weight":
            return name
        if prefix.startswith("mtp."):
            return "draft.model." + prefix.removeprefix("mtp.") + name
        return "model." + prefix.removeprefix("backbone.").removeprefix("model.") + name

    def layers(self, number: int, stages: int) -> list[int]:
        each, left = divmod(number, stages)
        sizes = [each] * stages
        first = stages - left if self.last_first else stages - 1 - left
        for stage in range(first, first + left):
            sizes[stage] += 1
        return sizes


ENGINES: dict[str, EngineNames] = {
    "vllm": EngineNames(("all", "all"), False, "mixer.experts.routed_experts."),
    "sglang": EngineNames(("first", "last"), True, "mixer.experts."),
    # Whole tensors under Hugging Face's names, which the engines' `load_weights` takes.
    "hf": EngineNames(("first", "first"), True, ""),
}


class TensorShare(NamedTuple):
    """Elements [start, stop) of a tensor's axis, from index `at` of the rank's own tensor."""

    start: int
    stop: int
    at: int


#: The shares of one rank, ascending.
Shares = tuple[TensorShare, ...]


class AxisCut(NamedTuple):
    """Elements [start, stop) of the axis: at `source` in the sender's, `target` in the receiver's."""

    start: int
    stop: int
    source: int
    target: int


def axis_of(row: Row) -> int:
    """The axis along which a tensor of a row is cut."""
    return 1 if row.tp == "row" else 0


def hf_shape(row: Row, index: int, config: Nemotron3Config) -> tuple[int, ...]:
    """Shape of the HF tensor `index` of a row; of one expert where there are several."""
    table = symbol_sizes(config)
    return tuple(table[symbol] for symbol in row.hf[index].shape)


def _split(
    row: Row, config: Nemotron3Config, size: int, padded_vocab_size: int
) -> tuple[NamedShape, tuple[int, ...], CopyPlan]:
    """Megatron's tensor of a row, its whole shape, and how the training ranks cut it."""
    table = symbol_sizes(config, padded_vocab_size)
    tensor = row.spelling(PARAMETER).tensors[0]
    shape = tuple(table[symbol] for symbol in tensor.shape)
    split = transforms.split_parameter(row, config, tp=size, etp=size, padded_vocab_size=padded_vocab_size)
    if split is None:
        every = tuple((0, n) for n in shape)
        split = CopyPlan({"full": shape}, {"0": shape}, (CopyPiece("full", every, "0", every),))
    return tensor, shape, split


@lru_cache(maxsize=4096)
def training_shape(row: Row, config: Nemotron3Config, size: int, padded_vocab_size: int) -> tuple[int, ...]:
    """Shape of Megatron's tensor of a row on each of its ranks; of one expert where there are several."""
    return next(iter(_split(row, config, size, padded_vocab_size)[2].destinations.values()))


@lru_cache(maxsize=4096)
def training_shares(
    row: Row, config: Nemotron3Config, size: int, padded_vocab_size: int
) -> tuple[tuple[Shares, ...], ...]:
    """Shares by HF tensor and (expert-)tensor rank; a tensor that all ranks hold has one entry."""
    axis = axis_of(row)
    tensor, shape, split = _split(row, config, size, padded_vocab_size)
    hf = {t.name: hf_shape(row, i, config) for i, t in enumerate(row.hf)}
    rule = transforms.RULES[row.spelling(PARAMETER).rule]
    named = rule({tensor.name: shape}, hf, config.kv_channels)
    found: dict[tuple[str, str], list[TensorShare]] = {}
    for piece in named.pieces:
        in_tensor = TensorShare(*piece.source_slices[axis], piece.destination_slices[axis][0])
        for part in split.pieces:
            on_rank = TensorShare(*part.source_slices[axis], part.destination_slices[axis][0])
            for cut in cuts((in_tensor,), (on_rank,)):
                share = TensorShare(cut.source, cut.source + cut.stop - cut.start, cut.target)
                found.setdefault((piece.destination, part.destination), []).append(share)
    return tuple(
        tuple(_joined(found.get((name, str(rank)), [])) for rank in range(len(split.destinations)))
        for name in hf
    )


@lru_cache(maxsize=4096)
def serving_shares(
    row: Row, config: Nemotron3Config, size: int
) -> tuple[tuple[tuple[Shares, ...], ...], tuple[int, ...]]:
    """Shares of the engines' tensor ranks, [HF tensor][rank], and the shape of the parameter of a rank."""
    axis = axis_of(row)
    shapes = [hf_shape(row, index, config) for index in range(len(row.hf))]
    length = sum(shape[axis] for shape in shapes)
    local = list(shapes[0])
    if row.tp == "replicated":
        return (((TensorShare(0, length, 0),),),), tuple(local)
    if row.hf[0].shape[0] == "vocab":
        padded = -(-length // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        each = _divided(padded, size, f"{row.hf[0].name}: a padded vocabulary of {padded} rows")
        ranks = [TensorShare(min(r * each, length), min((r + 1) * each, length), 0) for r in range(size)]
        local[0] = each
        return (tuple((s,) if s.start < s.stop else () for s in ranks),), tuple(local)
    if len(row.hf) == 3:
        return _qkv(config, size, shapes)
    sizes = symbol_sizes(config)
    parts = [t.shape[0] for t in row.spellings[0].tensors] if row.tp == "parts" else []
    shares: list[list[TensorShare]] = [[] for _ in range(size)]
    start = at = 0
    for symbol, part in [(s, sizes[s]) for s in parts] or [("", length)]:
        # A single group of B and C is repeated on every rank.
        repeated = symbol == "bc" and config.mamba_num_groups == 1
        if symbol == "bc" and not repeated:
            _divided(config.mamba_num_groups, size, f"mamba_num_groups={config.mamba_num_groups}")
        if row.part == "M":
            _divided(config.mamba_num_heads, size, f"mamba_num_heads={config.mamba_num_heads}")
        each = part if repeated else _divided(part, size, f"{row.hf[0].name}: {part} elements")
        for rank in range(size):
            begin = start + (0 if repeated else rank * each)
            shares[rank].append(TensorShare(begin, begin + each, at))
        start, at = start + part, at + each
    local[axis] = at
    return (tuple(tuple(_joined(one)) for one in shares),), tuple(local)


def _qkv(
    config: Nemotron3Config, size: int, shapes: list[tuple[int, ...]]
) -> tuple[tuple[tuple[Shares, ...], ...], tuple[int, ...]]:
    """[q | k | v] of a rank: its query heads, and its KV heads or the one that its query heads need."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    q = _divided(heads, size, f"num_attention_heads={heads}") * width
    if groups % size and size % groups:
        raise ValueError(f"num_query_groups={groups} and TP={size}: one must divide the other")
    kv, copies = max(1, groups // size) * width, max(1, size // groups)
    queries = tuple((TensorShare(r * q, (r + 1) * q, 0),) for r in range(size))
    keys, values = (
        tuple((TensorShare(r // copies * kv, (r // copies + 1) * kv, at),) for r in range(size))
        for at in (q, q + kv)
    )
    return (queries, keys, values), (q + 2 * kv, shapes[0][1])


def cuts(source: Shares, target: Shares) -> tuple[AxisCut, ...]:
    """What a rank with `source` can send to one with `target`."""
    found = []
    for have in source:
        for want in target:
            a, b = max(have.start, want.start), min(have.stop, want.stop)
            if a < b:
                found.append(AxisCut(a, b, have.at + a - have.start, want.at + a - want.start))
    return tuple(sorted(found))


def _joined(shares: list[TensorShare]) -> Shares:
    joined: list[TensorShare] = []
    for one in sorted(shares):
        last = joined[-1] if joined else None
        if last and last.stop == one.start and last.at + last.stop - last.start == one.at:
            joined[-1] = TensorShare(last.start, one.stop, last.at)
        else:
            joined.append(one)
    return tuple(joined)


def _divided(whole: int, size: int, what: str) -> int:
    if whole % size:
        raise ValueError(f"{what} cannot be divided by {size} ranks: choose a size that divides it")
    return whole // size


#: Ends the name of a recipe with a scale for BLOCK x BLOCK elements.
BLOCKWISE = "-blockwise"
BLOCK = 128


class Blockwise(Weight):
    """A weight with a scale for each block of BLOCK x BLOCK."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        name, shape, _ = self.tensor
        return Tensor(name, shape, "float8_e4m3fn"), Tensor(f"{name}_scale_inv", grid_of(self), "float32")


def grid_of(weight: Weight) -> tuple[int, int]:
    """Number of FP32 scales along the rows and the columns of a quantized weight."""
    if not isinstance(weight, Blockwise):
        return 1, 1
    rows, columns = weight.tensor.shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


class Stored(NamedTuple):
    """A tensor that is stored for a weight.

    suffix: follows the module's name. columns: of the weight, for each of its own; 0: it is of the whole
    weight, and every holder of a part of it sends it.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: str
    columns: int

    def name(self, weight: str) -> str:
        return f"{weight.removesuffix('.weight')}.{self.suffix}"

    def cut(self, shares: tuple[Shares, ...], ranks: int, name: str) -> tuple[Shares, ...]:
        """Shares of its columns, from those of the weight's columns."""
        if any(at % self.columns for one in shares for share in one for at in share):
            raise ValueError(
                f"{name}: {ranks} ranks cut a weight of {self.shape[1] * self.columns:,} columns inside a "
                f"block of {self.columns} that shares a scale: train it on fewer tensor ranks"
            )
        by = self.columns
        return tuple(
            tuple(TensorShare(s.start // by, s.stop // by, s.at // by) for s in one) for one in shares
        )


def packed(
    config: Nemotron3Config, recipe: str, scales: Mapping[str, float], dtype: str
) -> dict[str, Weight]:
    """Every tensor that is stored otherwise than in the model's own checkpoint, by its name there."""
    if recipe.endswith(BLOCKWISE):
        if scales:
            raise ValueError(f"{recipe} has no scales of activations: leave them out")
        kinds = formats(config, recipe.removesuffix(BLOCKWISE))
        tensors = [t for mapping in mappings(config, dtype=dtype) for t in mapping.hf if kinds[t.name] == FP8]
        if cut := [t for t in tensors if ".experts." in t.name and any(n % BLOCK for n in t.shape)]:
            what = f"engines have experts in whole blocks of {BLOCK}, {cut[0].name} is {list(cut[0].shape)}"
            raise ValueError(f"{recipe}: {what}: use nvfp4, or fp8 with scales of activations")
        return {t.name: Blockwise(t, recipe) for t in tensors if not t.name.endswith("mixer.in_proj.weight")}
    plan = quantization(config, recipe, scales, dtype)
    return {w.tensor.name: w for w in plan.weights if w.outputs != (w.tensor,)}


def stored_of(weight: Weight) -> list[Stored]:
    """The tensors that are stored for a weight."""
    found = []
    for name, shape, dtype in weight.outputs:
        whole = not shape or name.endswith("_scale_inv")
        columns = 0 if whole else weight.tensor.shape[-1] // shape[-1]
        found.append(Stored(name.removeprefix(weight.module + "."), shape, dtype, columns))
    return found
