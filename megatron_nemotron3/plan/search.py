"""Every legal layout of a model on some GPUs: which fit, and which is fastest by the time model.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_nemotron3.args import Launch, ParallelLayout, TrainingSchedule, check
from megatron_nemotron3.args.versions import DEFAULT
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.plan.hardware import GPU, GPUS, RESERVE
from megatron_nemotron3.plan.memory import Memory, memory
from megatron_nemotron3.plan.recompute import NONE, Recompute, modules
from megatron_nemotron3.plan.timing import (
    ALLTOALL,
    ASSUMED,
    Step,
    cell,
    layer_times,
    step_time,
    tokens_per_gpu,
)

MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (1, 2, 4)
_TP = (1, 2, 4, 8, 16)
_CP = tuple(2**n for n in range(9))
#: A pipeline longer than this is never what one wants of 42 to 108 layers.
_MOST_STAGES = 32


@dataclass(frozen=True)
class Question:
    """What is asked. dispatcher: `timing.ALLTOALL` or `timing.HYBRIDEP`.

    Raises:
        ValueError: a size below 1, or a precision the GPU has no units for.
    """

    config: Nemotron3Config
    gpus: int
    gpu: GPU
    seq_length: int
    global_batch_size: int
    precision: str = "bf16"
    dispatcher: str = ALLTOALL
    megatron_core: str = DEFAULT

    def __post_init__(self) -> None:
        for name in ("gpus", "seq_length", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more")
        self.gpu.flops(self.precision)

    @property
    def limit(self) -> float:
        """Bytes a rank may fill."""
        return self.gpu.memory - RESERVE


@dataclass(frozen=True)
class Candidate:
    """A layout with its batch and recomputation, and what it costs."""

    layout: ParallelLayout
    micro_batch_size: int
    microbatches: int
    recompute: Recompute
    memory: Memory
    step: Step
    #: Tokens a second and GPU.
    tokens: float


@dataclass(frozen=True)
class Answer:
    """best: distinct layouts, fastest first. legal: layouts that the rules allow. fitting: those that fit.
    smallest: if nothing fits, the layout that needs least, with everything recomputed."""

    question: Question
    best: tuple[Candidate, ...]
    legal: int
    fitting: int
    smallest: Candidate | None


def layouts(
    config: Nemotron3Config, gpus: int, seq_length: int, global_batch_size: int
) -> Iterator[ParallelLayout]:
    """All cuts of so many GPUs that divide, before the rules are asked; one virtual stage."""
    experts = config.num_moe_experts or 1
    shares = [n for n in range(1, experts + 1) if experts % n == 0]
    for tp in _TP:
        for cp in _CP:
            if cp > 1 and seq_length % (2 * cp):
                continue
            for pp in range(1, min(_MOST_STAGES, config.num_layers) + 1):
                dp, left = divmod(gpus, tp * cp * pp)
                if left or not dp or global_batch_size % dp:
                    continue
                for etp in sorted({1, tp}) if config.is_moe else (1,):
                    for ep in shares:
                        if gpus // pp % (ep * etp) == 0:
                            yield ParallelLayout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dp)


def legal(question: Question) -> list[ParallelLayout]:
    """Layouts that divide, that the batch fills, and that the rules allow on the Transformer Engine backend.

    Rules see sizes inside a stage, and pp against the number of layers: each way to cut a stage is asked
    once.
    """
    asked: dict[tuple[int, ...], bool] = {}
    found = []
    for layout in layouts(question.config, question.gpus, question.seq_length, question.global_batch_size):
        key = (layout.tp, layout.cp, layout.ep, layout.etp, min(layout.pp, 2))
        if key not in asked:
            asked[key] = not _refused(question, layout)
        if asked[key]:
            found.append(layout)
    return found


def _refused(question: Question, layout: ParallelLayout) -> bool:
    launch = Launch(
        config=question.config,
        layout=layout,
        precision=question.precision,
        backend="te",
        schedule=TrainingSchedule(
            global_batch_size=question.global_batch_size, seq_length=question.seq_length, micro_batch_size=1
        ),
        te_precision_config_file="precision.yaml" if question.precision == "nvfp4" else None,
        compute_capability=question.gpu.capability,
        megatron_core=question.megatron_core,
    )
    return any(violation.severity == "error" for violation in check(launch))


def recomputations(config: Nemotron3Config) -> tuple[Recompute, ...]:
    """From nothing to everything: cheapest in time first."""
    known = modules(config, "te")
    light = tuple(name for name in ("layernorm", "moe_act", "core_attn") if name in known)
    heavy = tuple(name for name in ("layernorm", "core_attn", "moe", "mlp") if name in known)
    choices = [NONE]
    if light:
        choices.append(Recompute("selective", light))
    if heavy and heavy != light:
        choices.append(Recompute("selective", heavy))
    return (*choices, Recompute("full"))


def rank_memories(
    question: Question, layout: ParallelLayout, micro_batch_size: int, recompute: Recompute
) -> Iterator[Memory]:
    """Of the pipeline ranks that may hold most: the first two (in flight), the last (output, MTP)."""
    microbatches = question.global_batch_size // layout.dp // micro_batch_size
    for rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
        yield memory(
            question.config,
            layout,
            pp_rank=rank,
            seq_length=question.seq_length,
            micro_batch_size=micro_batch_size,
            microbatches=microbatches,
            precision=question.precision,
            recompute=recompute,
            backend="te",
        )


def worst_memory(
    question: Question, layout: ParallelLayout, micro_batch_size: int, recompute: Recompute
) -> Memory:
    """Of the pipeline rank that holds most."""
    ranks = rank_memories(question, layout, micro_batch_size, recompute)
    return max(ranks, key=lambda found: found.total)


def candidate(
    question: Question, layout: ParallelLayout, micro_batch_size: int, recompute: Recompute
) -> Candidate:
    """A layout with everything that is known of it."""
    microbatches = question.global_batch_size // layout.dp // micro_batch_size
    step = step_time(
        question.config,
        layout,
        question.gpu,
        seq_length=question.seq_length,
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
        precision=question.precision,
        recompute=recompute,
        dispatcher=question.dispatcher,
    )
    return Candidate(
        layout,
        micro_batch_size,
        microbatches,
        recompute,
        worst_memory(question, layout, micro_batch_size, recompute),
        step,
        tokens_per_gpu(step, layout, question.seq_length, question.global_batch_size),
    )


def _variants(question: Question, layout: ParallelLayout) -> Iterator[tuple[int, int]]:
    """(virtual stages, micro batch size)."""
    share = question.global_batch_size // layout.dp
    for vpp in VIRTUAL_STAGES if layout.pp > 1 else (1,):
        if layout.pp * vpp > question.config.num_layers:
            continue
        for size in MICRO_BATCHES:
            if share % size == 0 and (vpp == 1 or share // size % layout.pp == 0):
                yield vpp, size


def search(question: Question, best: int = 5) -> Answer:
    """The fastest layouts, and how many there were. Exact: nothing that could be among them is left out.

    For each layout and micro batch the cheapest recomputation that fits is taken. Candidates are tried in the
    order of a lower bound of their time, until the bound exceeds what has been found.
    """
    allowed = legal(question)
    choices = recomputations(question.config)
    fitting = [layout for layout in allowed if _fits(question, layout, choices[-1])]
    floor = _Floor(question)
    bounds = sorted(
        (floor(layout, vpp, size), number, vpp, size)
        for number, layout in enumerate(fitting)
        for vpp, size in _variants(question, layout)
    )
    found: dict[ParallelLayout, Candidate] = {}
    slowest = float("inf")
    for bound, number, vpp, size in bounds:
        if bound > slowest:
            break
        layout = fitting[number]
        variant = replace(layout, vpp=vpp)
        for recompute in choices:
            if _holds(question, variant, size, recompute):
                here = candidate(question, variant, size, recompute)
                if layout not in found or here.tokens > found[layout].tokens:
                    found[layout] = here
                break
        if len(found) >= best:
            slowest = sorted(c.step.total for c in found.values())[best - 1]
    ranked = sorted(found.values(), key=lambda c: -c.tokens)
    smallest = None
    if allowed and not fitting:
        layout = min(allowed, key=lambda layout: worst_memory(question, layout, 1, choices[-1]).total)
        smallest = candidate(question, layout, 1, choices[-1])
    return Answer(question, tuple(ranked[:best]), len(allowed), len(fitting), smallest)


def _holds(question: Question, layout: ParallelLayout, micro_batch_size: int, recompute: Recompute) -> bool:
    """Whether every rank's memory is within the limit."""
    ranks = rank_memories(question, layout, micro_batch_size, recompute)
    return all(found.total <= question.limit for found in ranks)


def _fits(question: Question, layout: ParallelLayout, recompute: Recompute) -> bool:
    """Whether one sequence a microbatch fits, the stages cut in one way or another."""
    cuts = (vpp for vpp, size in _variants(question, layout) if size == 1)
    return any(_holds(question, replace(layout, vpp=vpp), 1, recompute) for vpp in cuts)


class _Floor:
    """Seconds that a step takes at least: all its layers, spread evenly over the pipeline, nothing else."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.passes: dict[tuple[int, ...], float] = {}
        config = question.config
        applied = config.pattern + (config.mtp_pattern or "") * config.mtp_num_layers
        self.times = {kind: applied.count(kind) for kind in "M*E-"} | {"embedding": 1, "output": 1}
        if config.has_mtp:
            self.times["mtp"] = config.mtp_num_layers

    def __call__(self, layout: ParallelLayout, vpp: int, micro_batch_size: int) -> float:
        key = (layout.tp, layout.cp, layout.ep, layout.etp, micro_batch_size)
        if key not in self.passes:
            self.passes[key] = self._microbatch(layout, micro_batch_size)
        microbatches = self.question.global_batch_size // layout.dp // micro_batch_size
        return self.passes[key] / layout.pp * (microbatches + (layout.pp - 1) / vpp)

    def _microbatch(self, layout: ParallelLayout, micro_batch_size: int) -> float:
        question = self.question
        layers = layer_times(
            question.config,
            question.gpu,
            cell(layout),
            question.seq_length,
            micro_batch_size,
            question.precision,
            NONE,
            question.dispatcher,
            ASSUMED,
        )
        return sum(layers[kind].total * times for kind, times in self.times.items() if times)


def remedies(question: Question, most: int = 1 << 15) -> list[str]:
    """What would make it fit where nothing does: other sizes of the same question, one changed at a time."""
    found = []
    gpus = question.gpus * 2
    while gpus <= most:
        if search(
            replace(question, gpus=gpus, global_batch_size=max(question.global_batch_size, gpus)), 1
        ).fitting:
            found.append(f"{gpus} GPUs instead of {question.gpus}")
            break
        gpus *= 2
    for gpu in sorted(GPUS.values(), key=lambda g: g.memory):
        if gpu.memory > question.gpu.memory and search(replace(question, gpu=gpu), 1).fitting:
            found.append(f"{gpu.name} ({gpu.memory / 1e9:.0f} GB) instead of {question.gpu.name}")
            break
    length = question.seq_length // 2
    while length >= 1024:
        if search(replace(question, seq_length=length), 1).fitting:
            found.append(f"sequences of {length} instead of {question.seq_length}")
            break
        length //= 2
    return found
