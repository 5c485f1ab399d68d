"""The performance options of a launch that change its time or its memory, read from its command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_nemotron3.launch import Launch
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
    moments. bf16: layers at start and end that are not quantized.
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
        moments=sum(TYPE_BYTES[first(name, "fp32")] for name in moments) if precise else 8,
    )


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
