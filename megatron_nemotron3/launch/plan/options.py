"""The options of a launch that change its time or its memory, read from its command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.models import LoRASettings, Nemotron3Config
from megatron_nemotron3.precision.formats import DEFAULT_RECIPES, FORMATS

#: What sends tokens to experts: every copy (`--moe-token-dispatcher-type alltoall`, what our flags emit), or
#: one a rank (flex with DeepEP or HybridEP; the published runs use HybridEP).
ALLTOALL, DEEPEP, HYBRIDEP = "alltoall", "deepep", "hybridep"
DISPATCHERS = (ALLTOALL, DEEPEP, HYBRIDEP)
#: `--cross-entropy-fusion-impl`. Transformer Engine's loss keeps the logits and writes their gradient over
#: them. Megatron's, fused or not, keeps an FP32 softmax.
IN_PLACE, NATIVE = "te", "native"
#: Bytes of the types that `--exp-avg-dtype` and `--exp-avg-sq-dtype` name.
TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
#: Module of `--cuda-graph-modules` -> (layer kind, share of its launches that the graph replaces). The shares
#: of the two parts of an E layer are estimates: its dispatcher and experts stay outside.
GRAPHS = {
    "mamba": ("M", 1.0),
    "attn": ("*", 1.0),
    "mlp": ("-", 1.0),
    "moe": ("E", 1.0),
    "moe_router": ("E", 0.5),
    "moe_preprocess": ("E", 0.5),
}
#: Modules of `--offload-modules` that this family's layers have -> layer kind.
OFFLOADED = {
    "attn_norm": "*",
    "qkv_linear": "*",
    "core_attn": "*",
    "attn_proj": "*",
    "expert_fc1": "E",
    "moe_act": "E",
    "fused_group_mlp": "E",
}

GRANULARITIES = ("none", "selective", "full")
METHODS = ("uniform", "block")

#: Module of `--recompute-modules` -> (layer kind it is part of, backends that support it). Megatron 0.19.2
#: also has `mla_up_proj` and `gdn_norm_out`, which belong to parts that this family lacks. `layernorm` and
#: `moe_act` need Transformer Engine (`launch.rules`); in the torch spec the norms of M, * and - are parts of
#: their linears.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "core_attn": ("*", ("te", "torch")),
    "mlp": ("-", ("te", "torch")),
    "moe": ("E", ("te", "torch")),
    "shared_experts": ("E", ("te", "torch")),
    "moe_act": ("E", ("te",)),
    "layernorm": ("E", ("te",)),
}


@dataclass(frozen=True)
class Recompute:
    """A choice of recomputation, in the terms of Megatron's flags.

    none: everything that backward reads is kept. selective: the named modules keep only their input
    (`--recompute-modules`). full: each run of layers keeps only its input.

    Args:
        modules: with "selective", names of `MODULES`.
        method: with "full": "uniform" cuts a stage's layers into runs of `num_layers` and keeps each run's
            input; "block" does so for the first `num_layers` layers of a stage, one by one, and keeps the
            others whole.
    """

    granularity: str = "none"
    modules: tuple[str, ...] = ()
    method: str = "uniform"
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity={self.granularity!r}: use one of {', '.join(GRANULARITIES)}")
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}: use one of {', '.join(METHODS)}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers}: use 1 or more")
        if unknown := [name for name in self.modules if name not in MODULES]:
            raise ValueError(f"unknown module {unknown[0]!r}: use some of {', '.join(MODULES)}")
        if (self.granularity == "selective") != bool(self.modules):
            raise ValueError(
                f"granularity={self.granularity!r} with modules={self.modules!r}: name modules with "
                "'selective', and only then"
            )

    @property
    def full(self) -> bool:
        return self.granularity == "full"

    def flags(self) -> list[str]:
        if self.granularity == "none":
            return []
        words = ["--recompute-granularity", self.granularity]
        if self.granularity == "selective":
            return [*words, "--recompute-modules", *self.modules]
        return [*words, "--recompute-method", self.method, "--recompute-num-layers", str(self.num_layers)]

    def __str__(self) -> str:
        if self.granularity == "selective":
            return " ".join(self.modules)
        return f"full {self.method} {self.num_layers}" if self.full else "none"


NONE = Recompute()


def modules(config: Nemotron3Config, backend: str) -> tuple[str, ...]:
    """The modules of this model that this backend ("te" or "torch") can recompute."""
    kinds = config.pattern + (config.mtp_pattern or "")
    return tuple(name for name, (kind, by) in MODULES.items() if kind in kinds and backend in by)


def runs(pattern: str, recompute: Recompute) -> tuple[tuple[str, ...], str]:
    """Split a stage's layers into (runs that keep only their input, layers that keep everything)."""
    n = recompute.num_layers
    if not recompute.full:
        return (), pattern
    if recompute.method == "uniform":
        return tuple(pattern[i : i + n] for i in range(0, len(pattern), n)), ""
    return tuple(pattern[:n]), pattern[n:]


#: The options that are read.
READ = (
    "--moe-token-dispatcher-type",
    "--moe-flex-dispatcher-backend",
    "--cuda-graph-impl",
    "--cuda-graph-modules",
    "--cuda-graph-scope",
    "--cross-entropy-fusion-impl",
    "--fine-grained-activation-offloading",
    "--offload-modules",
    "--min-offloaded-tensor-size",
    "--use-megatron-fsdp",
    "--num-distributed-optimizer-instances",
    "--megatron-fsdp-main-grads-dtype",
    "--fp8-param-gather",
    "--fp8-recipe",
    "--moe-expert-capacity-factor",
    "--moe-pad-expert-input-to-capacity",
    "--grad-reduce-in-bf16",
    "--use-precision-aware-optimizer",
    "--main-params-dtype",
    "--exp-avg-dtype",
    "--exp-avg-sq-dtype",
    "--recompute-granularity",
    "--recompute-modules",
    "--recompute-method",
    "--recompute-num-layers",
)


def dispatcher_options(dispatcher: str) -> tuple[str, ...]:
    """The options that choose a dispatcher."""
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"dispatcher={dispatcher!r}: use one of {', '.join(DISPATCHERS)}")
    if dispatcher == ALLTOALL:
        return ("--moe-token-dispatcher-type", ALLTOALL)
    return ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", dispatcher)


@dataclass(frozen=True)
class CostOptions:
    """What the options say that cost time or memory.

    dispatcher: one of `DISPATCHERS`. graphs: modules captured in CUDA graphs. overlap: gradients and weights
    travel during computation. loss: `IN_PLACE`, `NATIVE`, or "" where it is not fused. offload: modules whose
    inputs go to the CPU. fsdp: weights and gradients are divided over the data ranks as well (Megatron-FSDP).
    instances: groups of data ranks that each hold all of it (`--num-distributed-optimizer-instances`).
    packed_weights: quantized linears hold no BF16 weight (`--fp8-param-gather`). capacity: rows of an expert
    over their mean to which it is padded, or None. weight, gradient, master, moments: bytes of a weight, of
    its accumulated gradient, of the optimizer's own copy (0 where the weight is FP32 itself), and of both
    moments. bf16: layers at start and end that are not quantized. recompute: what is computed again. lora:
    adapters beside frozen weights, which no option of Megatron names; None: all weights are trained.
    """

    dispatcher: str = ALLTOALL
    graphs: frozenset[str] = frozenset()
    overlap: bool = True
    loss: str = ""
    offload: tuple[str, ...] = ()
    least_offloaded: int = 1 << 20
    fsdp: bool = False
    instances: int = 1
    packed_weights: bool = False
    capacity: float | None = None
    weight: int = 2
    gradient: int = 4
    master: int = 4
    moments: int = 8
    bf16: tuple[int, int] = (0, 0)
    recompute: Recompute = NONE
    lora: LoRASettings | None = None

    @staticmethod
    def of(launch: Launch) -> CostOptions:
        given = launch.options
        words = tuple((name, given[name]) for name in READ if name in given)
        removed = launch.tuned.removed if launch.tuned else frozenset()
        overlap = launch.distributed_optimizer and launch.backend != "torch"
        if "--overlap-param-gather" in removed:
            overlap = "--overlap-param-gather" in given
        kept = (launch.bf16_at_start, launch.bf16_at_end)
        if "--first-last-layers-bf16" in removed and "--first-last-layers-bf16" not in given:
            kept = (0, 0)
        found = _options(words, launch.precision, launch.backend, overlap, kept)
        if launch.precision != "fp32":
            return found
        gradient = 2 if "--grad-reduce-in-bf16" in launch.extra else 4
        return replace(found, weight=4, gradient=gradient, master=0, moments=8)

    @property
    def deduplicates(self) -> bool:
        """Whether a token goes to a rank only once, however many of its experts are there."""
        return self.dispatcher != ALLTOALL


@lru_cache(maxsize=1024)
def _options(
    words: tuple[tuple[str, tuple[str, ...]], ...],
    precision: str,
    backend: str,
    overlap: bool,
    kept: tuple[int, int],
) -> CostOptions:
    given = dict(words)

    def first(name: str, default: str) -> str:
        return (given.get(name) or (default,))[0]

    dispatcher = first("--moe-token-dispatcher-type", ALLTOALL)
    if dispatcher == "flex":
        dispatcher = first("--moe-flex-dispatcher-backend", DEEPEP)
    graphs: frozenset[str] = frozenset()
    if first("--cuda-graph-impl", "none") != "none":
        named = given.get("--cuda-graph-modules") or given.get("--cuda-graph-scope") or ()
        graphs = frozenset(named or GRAPHS)  # without names, whole layers
    fsdp = "--use-megatron-fsdp" in given
    precise = "--use-precision-aware-optimizer" in given
    # Where the optimizer reads BF16 weights it keeps only the other 16 bits of an FP32 copy. In FP8 it
    # cannot.
    half = not fsdp and (first("--main-params-dtype", "fp32") != "fp32" or not _fp8_recipe(given, precision))
    moments = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
    padded = "--moe-pad-expert-input-to-capacity" in given
    offloads = "--fine-grained-activation-offloading" in given
    fused = NATIVE if backend == "te" else ""
    return CostOptions(
        dispatcher=dispatcher if dispatcher in DISPATCHERS else ALLTOALL,
        graphs=graphs,
        overlap=overlap,
        loss=first("--cross-entropy-fusion-impl", fused),
        offload=given.get("--offload-modules", ()) if offloads else (),
        least_offloaded=int(first("--min-offloaded-tensor-size", str(1 << 20))),
        fsdp=fsdp,
        instances=int(first("--num-distributed-optimizer-instances", "1")),
        packed_weights="--fp8-param-gather" in given,
        capacity=float(first("--moe-expert-capacity-factor", "1")) if padded else None,
        gradient=_gradient_bytes(given, fsdp),
        master=2 if precise and half else 4,
        bf16=kept,
        recompute=_recompute(given),
        moments=sum(TYPE_BYTES[first(name, "fp32")] for name in moments) if precise else 8,
    )


def _recompute(given: dict[str, tuple[str, ...]]) -> Recompute:
    (granularity, *_) = given.get("--recompute-granularity", ("none",))
    if granularity == "selective":
        return Recompute(granularity, given.get("--recompute-modules", ("core_attn",)))
    (method, *_) = given.get("--recompute-method", ("uniform",))
    (layers, *_) = given.get("--recompute-num-layers", ("1",))
    return Recompute(granularity, method=method, num_layers=int(layers))


def _fp8_recipe(given: dict[str, tuple[str, ...]], precision: str) -> bool:
    """Whether Megatron's optimizer takes weights for FP8 with a scale of their own, as it decides it."""
    eight = precision in FORMATS and FORMATS[precision].kind == "fp8"
    default = FORMATS[precision].recipe if eight else DEFAULT_RECIPES["fp8"]
    return (given.get("--fp8-recipe") or (default,))[0] != "delayed"


def _gradient_bytes(given: dict[str, tuple[str, ...]], fsdp: bool) -> int:
    """Bytes in which a gradient is accumulated. Megatron-FSDP has an option of its own."""
    (kind, *_) = given.get("--megatron-fsdp-main-grads-dtype") or ("auto",)
    if fsdp and kind != "auto":
        return TYPE_BYTES[kind]
    return 2 if "--grad-reduce-in-bf16" in given else 4
