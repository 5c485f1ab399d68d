"""All that one rank holds at the worst moment of a step, in closed form. Standard library only.

What is counted and what is not, term by term: docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.plan.activation_forms import FLOAT, Share, moe_backward
from megatron_nemotron3.plan.activations import share, stage_bytes
from megatron_nemotron3.plan.elements import approximate_state, cut
from megatron_nemotron3.plan.inflight import in_flight
from megatron_nemotron3.plan.packed import weight_copies
from megatron_nemotron3.plan.recompute import NONE, Recompute
from megatron_nemotron3.plan.state import BF16, FP32, padded_vocab_size, state

__all__ = ["Memory", "approximate_state", "buffers", "in_flight", "memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    weights, gradients, optimizer: as `state.State`.
    activations: by layer kind, of all microbatches in flight.
    recompute_peak: what recomputing one module or run of layers adds to that, where it does: by then the loss
        and the layers behind it have gone backward, and what they held is free.
    buffers: the sum of `buffers`, and what the backward of routed experts adds (`activation_forms`).

    Not in it: the CUDA context, communicators, workspaces of kernels, other gradients of activations, other
    gradients of weights before they are added up, fragmentation.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: dict[str, int]
    recompute_peak: int
    buffers: int
    packed_weights: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        state = self.weights + self.gradients + self.optimizer
        return (
            state + sum(self.activations.values()) + self.recompute_peak + self.buffers + self.packed_weights
        )


def memory(
    config: Nemotron3Config,
    layout: ParallelLayout,
    *,
    pp_rank: int = 0,
    dp_rank: int = 0,
    edp_rank: int = 0,
    seq_length: int | None = None,
    micro_batch_size: int = 1,
    microbatches: int = 1,
    precision: str = "bf16",
    recompute: Recompute = NONE,
    distributed_optimizer: bool = True,
    backend: str = "torch",
    imbalance: float = 1.0,
    exact: bool = False,
    gradient_bytes: int | None = None,
) -> Memory:
    """What one rank holds at the worst moment.

    Args:
        pp_rank, dp_rank, edp_rank: as for `state.state`; the last two matter with `exact` only.
        seq_length: None: the config's.
        microbatches: of one step, for each data-parallel rank.
        recompute, backend, imbalance: as for `activations.layer_activations`.
        exact: weights, gradients and optimizer to the byte, padding included: `state`, which is slow.

        gradient_bytes: of an accumulated gradient; None: 4, our flags' (2: `--grad-reduce-in-bf16`).

    Raises:
        ValueError: an unknown precision or backend, no such rank, or fewer layers than stages.
    """
    length = seq_length or config.seq_length
    sizes = FP32 if precision == "fp32" else BF16
    if gradient_bytes is not None:
        sizes = replace(sizes, gradient=gradient_bytes)
    at = share(layout, length, micro_batch_size, precision, recompute, backend, imbalance)
    vocab = padded_vocab_size(config, layout)
    patterns = cut(config, layout.stages, length)
    work = moe_backward(config, at, layout.ep) if config.is_moe else 0
    chunks = [
        stage_bytes(config, at, recompute, patterns, stage, vocab, work)
        for stage in range(pp_rank, layout.stages, layout.pp)
    ]
    weights = [sum(kinds.values()) for kinds, *_ in chunks] if layout.vpp > 1 else ()
    activations: dict[str, int] = {}
    for times, (kinds, *_) in zip(in_flight(layout, pp_rank, microbatches, weights), chunks, strict=True):
        for kind, number in kinds.items():
            activations[kind] = activations.get(kind, 0) + times * number
    options = {"sizes": sizes, "distributed_optimizer": distributed_optimizer, "seq_length": length}
    if exact:
        held = state(config, layout, pp_rank=pp_rank, dp_rank=dp_rank, edp_rank=edp_rank, **options)  # type: ignore[arg-type]
    else:
        held = approximate_state(config, layout, pp_rank, **options)  # type: ignore[arg-type]
    return Memory(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=activations,
        recompute_peak=max(again for _, again, _ in chunks),
        buffers=max(more for _, _, more in chunks)
        + sum(buffers(config, layout, at, patterns, pp_rank, vocab).values()),
        packed_weights=_packed(config, layout, at, "".join(patterns[pp_rank :: layout.pp])),
    )


def _packed(config: Nemotron3Config, layout: ParallelLayout, at: Share, pattern: str) -> int:
    """Bytes of packed copies of the weights of a pipeline rank's decoder layers."""
    if not at.te:
        return 0
    return sum(
        pattern.count(kind) * weight_copies(config, kind, at.precision, at.tp, at.etp, layout.ep)
        for kind in dict.fromkeys(pattern)
    )


def buffers(
    config: Nemotron3Config,
    layout: ParallelLayout,
    at: Share,
    patterns: tuple[str, ...],
    pp_rank: int,
    vocab: int,
) -> dict[str, int]:
    """Bytes that no saved tensor holds and that exist while a microbatch is computed, by purpose.

    sequence gather: input of a column-parallel linear of all TP ranks, in one buffer that Megatron keeps.
    expert exchange: rows that a rank sends to experts, and those that it receives before it sorts them.
    routing: probabilities and map [tokens, experts] of the last microbatch, which every dispatcher refers to.
    pipeline: a received and a sent tensor each way; interleaved one more that has arrived early.
    logits: in the model's precision beside the FP32 softmax made from them.
    """
    kinds = "".join(patterns[pp_rank :: layout.pp])
    last = pp_rank == layout.pp - 1
    if last:
        kinds += config.mtp_pattern or ""
    d, found = config.hidden_size, {}
    if at.sequence_parallel:
        found["sequence gather"] = at.inner(2 * d if last and config.has_mtp else d)
    if "E" in kinds and layout.ep > 1:
        sent = at.shard * (config.moe_router_topk or 0) * config.expert_input_size * at.element
        found["expert exchange"] = sent + round(sent * layout.etp * at.imbalance)
    if "E" in kinds:
        layers = "".join(patterns[pp_rank :: layout.pp]).count("E")
        layers += (config.mtp_pattern or "").count("E") * config.mtp_num_blocks if last else 0
        found["routing"] = layers * at.shard * (config.num_moe_experts or 0) * (FLOAT + 1)
    if layout.pp > 1:
        found["pipeline"] = (4 if layout.vpp > 1 else 2) * at.stream(d)
    if last and at.element == 2:
        found["logits"] = at.inner(vocab // layout.tp)
    return found
