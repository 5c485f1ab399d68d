"""The twin of a launch: the smallest model and layouts that keep its structure. Standard library only.

From the words of a command line follow a small model, the words that train it in each of a few small layouts,
and the words that train it in one process. What is not the same as in the launch is said (`Twin.remarks`).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.args import ParallelLayout, parser_table
from megatron_nemotron3.args.architecture import MODEL, MOE, MTP, emit
from megatron_nemotron3.args.flag import Flag, to_argv
from megatron_nemotron3.certify import options as table
from megatron_nemotron3.certify.layouts import Sizes, cover
from megatron_nemotron3.convert.megatron_args import config_of
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.models.stack_specs import MODULE, spec_name

#: Values of arguments that a command line does not give, where the family has others.
_DEFAULTS: dict[str, Any] = {
    "squared_relu": False,
    "swiglu": False,
    "group_query_attention": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk": 2,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
}
#: Switch -> the argument that it turns off.
_OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-position-embedding": "add_position_embedding",
}
#: The torch modules on a CPU; what they stand for is among the remarks.
_BACKEND = (
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-bias-dropout-fusion"),
    "--no-create-attention-mask-in-dataloader",
)
_SEQUENCE = 64
#: Largest stages of the twin's pipeline.
_STAGES = 4


@dataclass(frozen=True)
class Remark:
    """What of a launch the twin has in another form, or cannot have."""

    #: Options or property of the launch.
    what: str
    #: What the twin has instead, or why it can have nothing.
    instead: str
    #: Whether nothing about it is proven.
    untested: bool = False


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step of the twin trains on."""

    seq_length: int = _SEQUENCE
    micro_batch_size: int = 1
    sequences: int = 8
    #: Whether tokens are left out of the loss, another number of them in every sequence.
    masked: bool = False
    #: Lengths of documents packed into a row, None without packing.
    documents: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A small model, and the words that train it in small layouts and in one process."""

    #: The model of the launch, and its small form.
    model: Nemotron3Config
    config: Nemotron3Config
    #: The layout of the launch, and the small ones.
    large: Sizes
    sizes: tuple[Sizes, ...]
    batch: Batch
    #: Words without layout, batch and schedule: what is computed, and by which mechanism.
    meaning: tuple[str, ...]
    mechanism: tuple[str, ...]
    remarks: tuple[Remark, ...]

    def words(self, sizes: Sizes | None) -> list[str]:
        """Return Megatron's command line in a layout or in one process (None), without batch and schedule."""
        layout = sizes.layout if sizes else ParallelLayout()
        pattern = stages_of(self.config, layout)
        head = [
            Flag("--spec", (MODULE, spec_name(self.config, "torch"))),
            Flag("--hybrid-layer-pattern", (pattern,)),
        ]
        rows = MODEL + (MOE if self.config.is_moe else ()) + (MTP if self.config.has_mtp else ())
        size_rows = [row for row in rows if row.flag in table.SIZES]
        head += [flag for row in size_rows for flag in emit(row.flag, row.value(self.config), "extra", "")]
        for name, value in (
            ("--tensor-model-parallel-size", layout.tp),
            ("--sequence-parallel", layout.sequence_parallel),
            ("--pipeline-model-parallel-size", layout.pp),
            ("--context-parallel-size", layout.cp),
            *(
                (("--expert-model-parallel-size", layout.ep), ("--expert-tensor-parallel-size", layout.etp))
                if self.config.is_moe
                else ()
            ),
            (
                "--num-distributed-optimizer-instances",
                sizes.instances if sizes and sizes.instances > 1 else None,
            ),
            ("--make-vocab-size-divisible-by", self.config.vocab_size // 2),
            ("--seq-length", self.batch.seq_length),
            ("--max-position-embeddings", self.batch.seq_length),
        ):
            head += emit(name, value, "extra", "")
        return [*to_argv(head), *self.meaning, *(self.mechanism if sizes else ()), *_BACKEND]


def stages_of(config: Nemotron3Config, layout: ParallelLayout) -> str:
    """Return `--hybrid-layer-pattern` of a twin: its stages, joined to as many as the layout has."""
    stages = patterns.parse(config.source or config.pattern).stages
    joined = ["".join(part) for part in _divided(stages, layout.stages)]
    return patterns.join_stages(joined, (config.mtp_pattern or "",) * config.mtp_num_layers)


def make(
    flags: Sequence[Flag], ranks: int, *, world_size: int | None = None, vocab_size: int | None = None
) -> Twin:
    """Return the twin of a command line.

    Args:
        flags: options of the launch, each once, as `command_line.read` gives them.
        ranks: largest world of the twin.
        world_size: ranks of the launch; None: at least two data-parallel copies are assumed.
        vocab_size: tokens of the launch's tokenizer, where the command line does not say.

    Raises:
        ValueError: the command line describes no model of this family, or sizes that do not fit together.
    """
    given = {flag.name: flag.values for flag in flags}
    model = _model(given, vocab_size)
    large, remarks = _large(given, model, world_size)
    sizes, missing = cover(large, ranks)
    remarks += [
        Remark(" with ".join(dict.fromkeys(pair)), f"needs more than {ranks} ranks (--ranks)", untested=True)
        for pair in missing
    ]
    config = _small_model(model, given, large.layout, sizes)
    meaning, mechanism = list[str](), list[str]()
    for flag in flags:
        if treated := _treated(flag, remarks):
            (mechanism if table.MECHANISM.fullmatch(flag.name) else meaning).extend(to_argv([treated]))
    return Twin(
        model=model,
        config=config,
        large=large,
        sizes=tuple(sizes),
        batch=_batch(given),
        meaning=tuple(meaning),
        mechanism=tuple(mechanism),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _treated(flag: Flag, remarks: list[Remark]) -> Flag | None:
    """Return an option as the twin has it, None for none, and say what is lost."""
    name = flag.name
    if name in table.SIZES | table.LAYOUT or table.SCHEDULE.fullmatch(name) or table.OUTSIDE.fullmatch(name):
        return None
    if name == "--moe-token-dispatcher-type" and flag.values == ("flex",):
        remarks.append(Remark("DeepEP and HybridEP", "the alltoall dispatcher", untested=True))
        return Flag(name, ("alltoall",))
    if name in table.BY_LAYOUT and not _is_off(flag):
        remarks.append(Remark(str(flag), table.BY_LAYOUT[name], untested=True))
        return None
    for row in table.ON_GPU:
        if row.options.fullmatch(name):
            remarks.append(Remark(row.what, row.instead, untested=True))
            return None
    return flag


def _is_off(flag: Flag) -> bool:
    return bool(flag.values) and _number(flag.values[0]) == 0


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _model(given: Mapping[str, tuple[str, ...]], vocab_size: int | None) -> Nemotron3Config:
    """Return the model that the options describe, with Megatron's defaults for those that are missing."""
    kinds = parser_table.options("0.19")
    values: dict[str, Any] = dict(_DEFAULTS)
    for name, words in given.items():
        if name in _OFF:
            values[_OFF[name]] = False
            continue
        kind = kinds.get(name.removeprefix("--"), "text").partition(" ")[0]
        read = {"int": int, "float": float}.get(kind, str)
        try:
            value = [read(word) for word in words]
        except ValueError:
            raise ValueError(f"{name} {' '.join(words)}: {kind} expected") from None
        values[name.removeprefix("--").replace("-", "_")] = value[0] if len(value) == 1 else value or True
    if "--position-embedding-type" not in given and "--use-rotary-position-embeddings" in given:
        values["position_embedding_type"] = "rope"
    known = vocab_size or values.get("vocab_size") or values.get("padded_vocab_size") or 131072
    return config_of(Namespace(**values), name="the launch", vocab_size=known)


def _large(
    given: Mapping[str, tuple[str, ...]], model: Nemotron3Config, world_size: int | None
) -> tuple[Sizes, list[Remark]]:
    """Return the layout of the launch, and what is assumed of it."""

    def size(name: str, default: int = 1) -> int:
        return int((given.get(name) or (str(default),))[0])

    tp, pp, cp = (size(f"--{kind}-model-parallel-size") for kind in ("tensor", "pipeline", "context"))
    cp = size("--context-parallel-size")
    ep = size("--expert-model-parallel-size") if model.is_moe else 1
    etp = size("--expert-tensor-parallel-size", tp) if model.is_moe else 1
    least = max(2, math.lcm(ep * etp, tp * cp) // (tp * cp))
    remarks = []
    if world_size is None:
        dp = least
        remarks.append(Remark("number of ranks", f"not in the launch; DP {dp} is assumed"))
    else:
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or not dp:
            raise ValueError(f"{world_size} ranks are no multiple of TP{tp} x PP{pp} x CP{cp}")
    stages = given.get("--hybrid-layer-pattern", ("",))[0].count(patterns.PIPE) + 1
    vpp = max(1, stages // pp)
    layout = ParallelLayout(
        tp=tp, pp=pp, cp=cp, dp=dp, vpp=vpp, ep=ep, etp=etp, sp="--sequence-parallel" in given
    )
    return Sizes(layout=layout, instances=size("--num-distributed-optimizer-instances")), remarks


def _small_model(
    model: Nemotron3Config,
    given: Mapping[str, tuple[str, ...]],
    layout: ParallelLayout,
    sizes: Sequence[Sizes],
) -> Nemotron3Config:
    """Return the small form of the model. `source` is its pattern with the cuts of the largest pipeline."""
    ep = max(s.layout.ep for s in sizes)
    count = max(s.layout.stages for s in sizes)
    stages = [_shortened(stage) for stage in _chosen(_stages(model, given, layout), count)]
    mtp = _shortened(model.mtp_pattern) if model.mtp_pattern else None
    heads_per_group = model.num_attention_heads // model.num_query_groups
    replicated = model.num_query_groups < layout.tp
    groups = 1 if replicated else 2
    square = model.num_attention_heads * model.kv_channels == model.hidden_size
    heads = groups * (4 // groups if heads_per_group > 1 else 1)
    mamba_groups = 2 if model.mamba_num_groups <= layout.tp else 4
    moe: dict[str, Any] = {}
    if model.is_moe:
        assert model.num_moe_experts and model.moe_router_topk
        experts = ep * (1 if model.num_moe_experts == layout.ep else 2) * (2 if ep == 1 else 1)
        experts = max(experts, 4)
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": min(model.moe_router_topk, 3),
            "moe_ffn_hidden_size": 32,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size and 64,
            "moe_latent_size": model.moe_latent_size and 32,
            "moe_layers": None,
        }
    return model.but(
        name="twin",
        title=f"twin of {model.title}",
        pattern="".join(stages),
        mtp_pattern=mtp,
        hidden_size=64,
        vocab_size=128,
        seq_length=_SEQUENCE,
        max_position_embeddings=_SEQUENCE,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=64 // heads if square else 8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        mamba_state_dim=16,
        mamba_num_groups=mamba_groups,
        dense_ffn_hidden_size=128 if model.dense_ffn_hidden_size else None,
        init_method_std=0.11,
        source="|".join(stages),
        published_total=None,
        published_active=None,
        **moe,
    )


def _stages(
    model: Nemotron3Config, given: Mapping[str, tuple[str, ...]], layout: ParallelLayout
) -> list[str]:
    """Return the layers of each stage of the launch."""
    stages = patterns.parse(given["--hybrid-layer-pattern"][0]).stages
    if len(stages) > 1 or layout.pp == 1:
        return list(stages)
    # Without cuts Megatron takes equal stages, but for a first and last one of given length.
    layers, ends = model.pattern, []
    first, last = (
        int(given[name][0]) if name in given else None
        for name in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    )
    rest = layers[first or 0 : len(layers) - (last or 0)]
    ends = [layers[: first or 0]] if first is not None else []
    between = layout.pp - (first is not None) - (last is not None)
    ends += _divided(rest, between)
    return ends + ([layers[len(layers) - last :]] if last is not None else [])


def _divided(parts: Any, count: int) -> list[Any]:
    """Divide a sequence into `count` runs of about equal length."""
    borders = [round(i * len(parts) / count) for i in range(count + 1)]
    return [parts[begin:end] for begin, end in zip(borders, borders[1:])]


def _chosen(stages: Sequence[str], count: int) -> list[str]:
    """Return the first and the last stage, and of those between the ones that differ most."""
    if count == 1 or len(stages) == 1:
        return ["".join(stages)] if count == 1 else list(stages)
    between = sorted(set(stages[1:-1]), key=lambda stage: (len(set(stage)), stages.index(stage)))
    middle = [between[i % len(between)] for i in range(count - 2)] if between else []
    return [stages[0], *middle, stages[-1]]


def _shortened(stage: str) -> str:
    """Return the first and the last layer of a stage, and one layer of each other kind between them."""
    if len(stage) < 3:
        return stage
    inner = [kind for kind in dict.fromkeys(stage[1:-1]) if kind not in (stage[0], stage[-1])]
    return "".join((stage[0], *inner, stage[-1]))


def _batch(given: Mapping[str, tuple[str, ...]]) -> Batch:
    micro = 2 if (given.get("--micro-batch-size") or ("1",))[0] != "1" else 1
    packed = "--sft" in given or "--dataloader-inter-document-masking" in given
    return Batch(
        micro_batch_size=1 if packed else micro,
        sequences=8 * (1 if packed else micro),
        masked="--sft" in given or "--eod-mask-loss" in given,
        documents=(24, 8, 16) if packed else None,
    )
