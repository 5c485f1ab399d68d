"""Bytes that cross links in a training step, by process group and cause, in closed form.

Standard library only.

What Megatron's collectives move, as the flags of this package set them up: sequence parallelism with tensor
parallelism, the all-to-all dispatcher (every copy of a token is sent), Mamba's all-to-all and gathered keys
and values under context parallelism, one reduce-scatter of gradients and one all-gather of weights a step.
Exchanges of sizes (tokens per expert, loss sums) are left out: kilobytes.

`Transfer.buffer` is proven against counted collectives (tests/plan/test_traffic.py); what of it one rank
sends is the ring's or the exchange's arithmetic (`sent`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.plan.elements import Elements, cut, stage_elements
from megatron_nemotron3.plan.state import padded_vocab_size

#: Bytes of an activation that crosses a link (BF16; nothing is sent in FP8), and of FP32.
ACTIVATION, SINGLE = 2, 4
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, SEND = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "send",
)


@dataclass(frozen=True)
class Transfer:
    """One kind of collective of one rank in a step.

    link: group it runs in: "tp", "cp", "ep", "etp", "pp", "dp" (data and context ranks), "edp" (copies of the
    experts) or "embedding" (first and last stage). ranks: of the group. buffer: bytes of whole buffers, those
    of all ranks together, over the step. overlaps: whether Megatron hides it behind computation.
    """

    link: str
    module: str
    collective: str
    ranks: int
    calls: float
    buffer: float
    overlaps: bool = False

    @property
    def sent(self) -> float:
        """Bytes one rank sends."""
        if self.collective == SEND:
            return self.buffer
        share = (self.ranks - 1) / self.ranks
        return self.buffer * share * (2 if self.collective == ALL_REDUCE else 1)


@lru_cache(maxsize=4096)
def layer_transfers(
    config: Nemotron3Config, layout: ParallelLayout, kind: str, seq_length: int, micro_batch_size: int
) -> tuple[Transfer, ...]:
    """Of one layer for one microbatch, forward and backward.

    Args:
        kind: "M", "*", "E", "-", "embedding", "output" (with the loss), or "mtp": what a depth has beside its
            layers, its own embedding and output among it.
    """
    tokens = seq_length // layout.cp * micro_batch_size
    return tuple(t for t in _LAYERS[kind](config, layout, tokens) if t.ranks > 1 and t.buffer)


def _linears(
    config: Nemotron3Config, layout: ParallelLayout, tokens: int, module: str, width: int | None = None
) -> Iterator[Transfer]:
    """A column- and a row-parallel linear around something sharded, with sequence parallelism.

    Forward: gather the input, scatter the output's sums. Backward: gather the gradient and, for the weights',
    the input again; scatter the sums of the input's gradient.
    """
    whole = tokens * (width or config.hidden_size) * ACTIVATION
    if layout.sequence_parallel:
        yield Transfer("tp", module, ALL_GATHER, layout.tp, 3, 3 * whole)
        yield Transfer("tp", module, REDUCE_SCATTER, layout.tp, 2, 2 * whole)
    else:
        yield Transfer("tp", module, ALL_REDUCE, layout.tp, 2, 2 * whole)


def _mamba(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    yield from _linears(config, layout, tokens, "mamba")
    # z, x, B, C, dt against heads; y back, and z for the gated norm. Too few groups are repeated first.
    groups = max(config.mamba_num_groups // layout.tp, layout.cp)
    inner, heads = config.mamba_inner_size // layout.tp, config.mamba_num_heads // layout.tp
    width = 4 * inner + 2 * groups * config.mamba_state_dim + heads
    yield Transfer("cp", "mamba", ALL_TO_ALL, layout.cp, 14, 2 * tokens * width * ACTIVATION)


def _attention(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    yield from _linears(config, layout, tokens, "attention")
    groups = max(1, config.num_query_groups // layout.tp)
    keys = 2 * groups * config.kv_channels * ACTIVATION * tokens * layout.cp
    yield Transfer("cp", "attention", ALL_GATHER, layout.cp, 2, keys)
    yield Transfer("cp", "attention", REDUCE_SCATTER, layout.cp, 2, keys)
    if layout.tp > config.num_query_groups:  # the projection's rows are gathered, every rank takes its heads'
        rows = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        yield Transfer("tp", "attention", ALL_GATHER, layout.tp, 1, tokens * rows * ACTIVATION)
        yield Transfer("tp", "attention", REDUCE_SCATTER, layout.tp, 1, tokens * rows * ACTIVATION)


def _experts(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    if config.moe_shared_expert_intermediate_size:
        yield from _linears(config, layout, tokens, "shared experts")
    # Each tensor rank routes its own part of the sequence.
    copies = tokens // layout.tp * (config.moe_router_topk or 0)
    width = config.moe_latent_size or config.hidden_size
    row = width * ACTIVATION
    yield Transfer("ep", "experts", ALL_TO_ALL, layout.ep, 4, 4 * copies * row)
    yield Transfer("ep", "probabilities", ALL_TO_ALL, layout.ep, 2, 2 * copies * SINGLE)
    gathered = copies * layout.etp
    # Sums of the parts of an expert are FP32, and so is their gradient.
    forth, back = gathered * row, gathered * width * SINGLE
    yield Transfer("etp", "experts", ALL_GATHER, layout.etp, 2, forth + back)
    yield Transfer("etp", "experts", REDUCE_SCATTER, layout.etp, 2, forth + back)
    yield Transfer("etp", "probabilities", ALL_GATHER, layout.etp, 1, gathered * SINGLE)
    yield Transfer("etp", "probabilities", REDUCE_SCATTER, layout.etp, 1, gathered * SINGLE)


def _dense(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    yield from _linears(config, layout, tokens, "mlp")


def _embedding(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    whole = tokens * config.hidden_size * ACTIVATION
    if layout.sequence_parallel:
        yield Transfer("tp", "embedding", REDUCE_SCATTER, layout.tp, 1, whole)
        yield Transfer("tp", "embedding", ALL_GATHER, layout.tp, 1, whole)
    else:
        yield Transfer("tp", "embedding", ALL_REDUCE, layout.tp, 1, whole)


def _output(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    whole = tokens * config.hidden_size * ACTIVATION
    if layout.sequence_parallel:
        yield Transfer("tp", "output", ALL_GATHER, layout.tp, 2, 2 * whole)
        yield Transfer("tp", "output", REDUCE_SCATTER, layout.tp, 1, whole)
    else:
        yield Transfer("tp", "output", ALL_REDUCE, layout.tp, 1, whole)
    # Maximum, sum and target of every token's logits.
    yield Transfer("tp", "loss", ALL_REDUCE, layout.tp, 3, 3 * tokens * SINGLE)


def _mtp(config: Nemotron3Config, layout: ParallelLayout, tokens: int) -> Iterator[Transfer]:
    yield from _embedding(config, layout, tokens)
    yield from _output(config, layout, tokens)
    whole = tokens * config.hidden_size * ACTIVATION
    if layout.sequence_parallel:
        # eh_proj takes 2 d; its output is gathered, then cut along the sequence.
        yield Transfer("tp", "eh_proj", ALL_GATHER, layout.tp, 4, 6 * whole)
        yield Transfer("tp", "eh_proj", REDUCE_SCATTER, layout.tp, 1, 2 * whole)
    else:
        yield Transfer("tp", "eh_proj", ALL_GATHER, layout.tp, 1, whole)
        yield Transfer("tp", "eh_proj", ALL_REDUCE, layout.tp, 1, 2 * whole)


_LAYERS = {
    "M": _mamba,
    "*": _attention,
    "E": _experts,
    "-": _dense,
    "embedding": _embedding,
    "output": _output,
    "mtp": _mtp,
}


@lru_cache(maxsize=65536)
def _kinds(config: Nemotron3Config, pp: int, vpp: int, pp_rank: int, seq_length: int) -> dict[str, int]:
    stages = cut(config, pp * vpp, seq_length)
    applied = "".join(stages[pp_rank::pp])
    last = pp_rank == pp - 1
    depths = config.mtp_num_layers if config.has_mtp and last else 0
    applied += (config.mtp_pattern or "") * depths
    found = {kind: applied.count(kind) for kind in "M*E-"}
    found |= {"embedding": int(pp_rank == 0), "output": int(last), "mtp": depths}
    return {kind: times for kind, times in found.items() if times}


def stage_kinds(
    config: Nemotron3Config, layout: ParallelLayout, pp_rank: int, seq_length: int | None = None
) -> dict[str, int]:
    """Layer kinds (as `layer_transfers` names them) a pipeline rank applies to a microbatch -> how often."""
    return _kinds(config, layout.pp, layout.vpp, pp_rank, seq_length or config.seq_length)


def step_traffic(
    config: Nemotron3Config,
    layout: ParallelLayout,
    *,
    pp_rank: int = 0,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    microbatches: int = 1,
    gradient_bytes: int = SINGLE,
    weight_bytes: int = ACTIVATION,
    distributed_optimizer: bool = True,
    overlap: bool = True,
) -> list[Transfer]:
    """What one rank of a pipeline stage takes part in, in one step.

    Args:
        gradient_bytes: of a reduced gradient (4: `--accumulate-allreduce-grads-in-fp32`).
        weight_bytes: of a gathered weight.
        distributed_optimizer: False: gradients are all-reduced and no weights gathered.
        overlap: `--overlap-grad-reduce --overlap-param-gather`. Without, Megatron 0.19 gathers all weights
            once for each of its optimizers, so twice where experts have one of their own.
    """
    length = seq_length or config.seq_length
    found: dict[tuple[str, str, str], Transfer] = {}
    for kind, times in stage_kinds(config, layout, pp_rank, length).items():
        times *= microbatches
        for transfer in layer_transfers(config, layout, kind, length, micro_batch_size):
            key = (transfer.link, transfer.module, transfer.collective)
            before = found.get(key)
            calls, buffer = (before.calls, before.buffer) if before else (0.0, 0.0)
            found[key] = replace(
                transfer, calls=calls + times * transfer.calls, buffer=buffer + times * transfer.buffer
            )
    outer = outer_traffic(
        config,
        layout,
        pp_rank=pp_rank,
        seq_length=length,
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
        gradient_bytes=gradient_bytes,
        weight_bytes=weight_bytes,
        distributed_optimizer=distributed_optimizer,
        overlap=overlap,
    )
    return [*found.values(), *outer]


def outer_traffic(
    config: Nemotron3Config,
    layout: ParallelLayout,
    *,
    pp_rank: int = 0,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    microbatches: int = 1,
    gradient_bytes: int = SINGLE,
    weight_bytes: int = ACTIVATION,
    distributed_optimizer: bool = True,
    overlap: bool = True,
) -> list[Transfer]:
    """The part of `step_traffic` that no layer causes: between stages, and of gradients and weights."""
    length = seq_length or config.seq_length
    hidden = length // layout.cp * micro_batch_size * config.hidden_size * ACTIVATION
    if layout.sequence_parallel:
        hidden //= layout.tp
    held = stage_elements(config, layout, pp_rank, length)
    found = (
        *_pipeline(layout, pp_rank, hidden, microbatches),
        *_state(config, layout, pp_rank, held, gradient_bytes, weight_bytes, distributed_optimizer, overlap),
    )
    return [t for t in found if t.ranks > 1 and t.buffer]


def _pipeline(layout: ParallelLayout, pp_rank: int, hidden: float, microbatches: int) -> Iterator[Transfer]:
    """Hidden states to the next stage, their gradients to the one before."""
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    onward, backward = layout.vpp - last, layout.vpp - first  # the last rank's last chunk sends nothing on
    for module, times in (("activations", onward), ("gradients", backward)):
        yield Transfer("pp", module, SEND, layout.pp, times * microbatches, times * hidden * microbatches)


def _state(
    config: Nemotron3Config,
    layout: ParallelLayout,
    pp_rank: int,
    held: Elements,
    gradient_bytes: int,
    weight_bytes: int,
    distributed_optimizer: bool,
    overlap: bool,
) -> Iterator[Transfer]:
    """Gradients and weights, once a step."""
    gathers = 2 if held.expert and not overlap else 1
    for link, ranks, elements in (
        ("dp", layout.dp * layout.cp, held.dense),
        ("edp", layout.edp, held.expert),
    ):
        if distributed_optimizer:
            yield Transfer(link, "gradients", REDUCE_SCATTER, ranks, 1, elements * gradient_bytes, overlap)
            gathered = gathers * elements * weight_bytes
            yield Transfer(link, "weights", ALL_GATHER, ranks, gathers, gathered, overlap)
        else:
            yield Transfer(link, "gradients", ALL_REDUCE, ranks, 1, elements * gradient_bytes, overlap)
    if layout.pp > 1 and config.has_mtp and pp_rank in (0, layout.pp - 1):
        table = padded_vocab_size(config, layout) // layout.tp * config.hidden_size
        yield Transfer("embedding", "gradients", ALL_REDUCE, 2, 1, table * gradient_bytes)
    if layout.sequence_parallel:
        yield Transfer(
            "tp", "replicated weights' gradients", ALL_REDUCE, layout.tp, 1, held.replicated * gradient_bytes
        )
