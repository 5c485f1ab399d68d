"""Every legal layout of a model on a number of GPUs: which fit, and which is fastest by the time model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule, check
from megatron_nemotron3.launch.plan.activation_forms import RankShare
from megatron_nemotron3.launch.plan.flops import symbols
from megatron_nemotron3.launch.plan.hardware import GIB, GPU, GPUS, RESERVE
from megatron_nemotron3.launch.plan.memory import RankMemory, memory
from megatron_nemotron3.launch.plan.options import NONE, CostOptions, Recompute, dispatcher_options, modules
from megatron_nemotron3.launch.plan.timing import (
    Machine,
    StepTime,
    layer_times,
    of_one_replica,
    one_replica,
    step_time,
    tokens_per_gpu,
)
from megatron_nemotron3.launch.versions import DEFAULT
from megatron_nemotron3.models import LoRASettings, Nemotron3Config

MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (1, 2, 4)
_TP = (1, 2, 4, 8, 16)
_CP = tuple(2**n for n in range(9))
#: A longer pipeline is of no use for 42 to 108 layers.
_MOST_STAGES = 32


@dataclass(frozen=True)
class PlanRequest:
    """A launch whose layout is wanted, on Transformer Engine; its schedule holds the global batch size.

    Args:
        gpus: GPUs of the whole job.
        dispatcher: one of `options.DISPATCHERS`; None: what the launch's options say.
    """

    launch: Launch
    gpus: int
    gpu: GPU
    dispatcher: str | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus}: give 1 or more")
        if not self._schedule.global_batch_size:
            raise ValueError("a launch without a global batch size: give it a schedule that has one")
        self.gpu.flops(self.launch.precision)

    @property
    def _schedule(self) -> TrainingSchedule:
        return self.launch.schedule or TrainingSchedule()

    @cached_property
    def _published_recompute(self) -> tuple[str, ...]:
        """Published options of the GPU that choose a recomputation."""
        published = self.launch.tuned.options if self.launch.tuned else ()
        return tuple(name for name in published if name.startswith("--recompute-"))

    @property
    def recomputations(self) -> tuple[Recompute, ...]:
        """Choices from recomputing nothing to recomputing everything, the cheapest in time first."""
        nothing, *others = recomputations(self.config)
        own = CostOptions.of(self.launch).recompute
        return tuple(dict.fromkeys((nothing, own, *others)))

    @property
    def config(self) -> Nemotron3Config:
        return self.launch.config

    @property
    def global_batch_size(self) -> int:
        return self._schedule.global_batch_size or 0

    @property
    def machine(self) -> Machine:
        return Machine(self.gpu)

    @property
    def limit(self) -> float:
        """Bytes that a rank may fill."""
        return self.gpu.memory - RESERVE

    def at(self, layout: ParallelLayout, micro_batch_size: int = 1, recompute: Recompute = NONE) -> Launch:
        """The launch in this layout, with this micro batch and recomputation instead of a published one."""
        dispatcher = dispatcher_options(self.dispatcher) if self.dispatcher else ()
        words = recompute.flags()
        return replace(
            self.launch,
            layout=layout,
            backend="te",
            schedule=_with_micro_batch(self._schedule, micro_batch_size),
            extra=(*dispatcher, *self.launch.extra, *words),
            without=(*self.launch.without, *(n for n in self._published_recompute if n not in words)),
            te_precision_config_file="precision.yaml" if self.launch.precision == "nvfp4" else None,
            compute_capability=self.gpu.capability,
            megatron_core=self.launch.megatron_core or DEFAULT,
        )

    def but(self, *, seq_length: int | None = None, global_batch_size: int | None = None) -> PlanRequest:
        """The same request for another sequence length or global batch."""
        schedule = replace(
            self._schedule,
            seq_length=seq_length or self.launch.seq_length,
            global_batch_size=global_batch_size or self.global_batch_size,
        )
        return replace(self, launch=replace(self.launch, schedule=schedule))


@lru_cache(maxsize=64)
def _with_micro_batch(schedule: TrainingSchedule, size: int) -> TrainingSchedule:
    return replace(schedule, micro_batch_size=size)


@dataclass(frozen=True)
class LaunchCandidate:
    """A launch with what it costs: `memory` of the fullest rank, `step` time, `tokens` per second and GPU."""

    launch: Launch
    memory: RankMemory
    step: StepTime
    tokens: float

    @property
    def layout(self) -> ParallelLayout:
        return self.launch.layout

    @property
    def recompute(self) -> Recompute:
        return CostOptions.of(self.launch).recompute


@dataclass(frozen=True)
class PlanResult:
    """The result of a search.

    best: distinct layouts, fastest first. legal: number of layouts that the rules allow. fitting: number of
    those that fit. smallest: if nothing fits, the layout that needs least memory, with everything recomputed.
    """

    request: PlanRequest
    best: tuple[LaunchCandidate, ...]
    legal: int
    fitting: int
    smallest: LaunchCandidate | None


def layouts(request: PlanRequest) -> Iterator[ParallelLayout]:
    """All divisions of the GPUs, before the rules are checked, with one virtual stage."""
    config, gpus = request.config, request.gpus
    experts = config.num_moe_experts or 1
    shares = [n for n in range(1, experts + 1) if experts % n == 0]
    for tp in _TP:
        for cp in _CP:
            if cp > 1 and request.launch.seq_length % (2 * cp):
                continue
            for pp in range(1, min(_MOST_STAGES, config.num_layers) + 1):
                dp, left = divmod(gpus, tp * cp * pp)
                if left or not dp or request.global_batch_size % dp:
                    continue
                for etp in sorted({1, tp}) if config.is_moe else (1,):
                    for ep in shares:
                        if gpus // pp % (ep * etp) == 0:
                            yield ParallelLayout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dp)


def legal(request: PlanRequest) -> list[ParallelLayout]:
    """The layouts that divide the GPUs and the batch, and that the rules allow.

    Rules depend on the sizes inside a stage, and on pp only against the number of layers, so each way to
    divide a stage is checked once.
    """
    checked: dict[tuple[int, ...], bool] = {}
    found = []
    for layout in layouts(request):
        key = (layout.tp, layout.cp, layout.ep, layout.etp, min(layout.pp, 2))
        if key not in checked:
            violations = check(request.at(layout))
            checked[key] = not any(violation.severity == "error" for violation in violations)
        if checked[key]:
            found.append(layout)
    return found


def recomputations(config: Nemotron3Config) -> tuple[Recompute, ...]:
    """As `PlanRequest.recomputations`, without that of a launch."""
    known = modules(config, "te")
    light = tuple(name for name in ("layernorm", "moe_act", "core_attn") if name in known)
    heavy = tuple(name for name in ("layernorm", "core_attn", "moe", "mlp") if name in known)
    choices = [NONE]
    if light:
        choices.append(Recompute("selective", light))
    if heavy and heavy != light:
        choices.append(Recompute("selective", heavy))
    return (*choices, Recompute("full"))


def rank_memories(launch: Launch, lora: LoRASettings | None = None) -> Iterator[RankMemory]:
    """Memory of the ranks that may hold most: the first two (microbatches in flight), the last (output)."""
    last, share = launch.layout.pp - 1, RankShare.of(launch, lora=lora)
    for rank in sorted({0, min(1, last), last}):
        yield memory(launch, rank, share=share)


def worst_memory(launch: Launch, lora: LoRASettings | None = None) -> RankMemory:
    """Memory of the pipeline rank that holds most; `lora`: the adapters, if they alone are trained."""
    return max(rank_memories(launch, lora), key=lambda found: found.total)


def candidate(request: PlanRequest, launch: Launch, worst: RankMemory | None = None) -> LaunchCandidate:
    """A launch of `request.at` with its time and its `worst_memory`, which is computed if it is not given."""
    step = step_time(launch, request.machine)
    return LaunchCandidate(launch, worst or worst_memory(launch), step, tokens_per_gpu(launch, step))


def _variants(request: PlanRequest, layout: ParallelLayout) -> Iterator[tuple[int, int]]:
    """(virtual stages, micro batch size) that a layout allows."""
    share = request.global_batch_size // layout.dp
    for vpp in VIRTUAL_STAGES if layout.pp > 1 else (1,):
        if layout.pp * vpp > request.config.num_layers:
            continue
        for size in MICRO_BATCHES:
            if share % size == 0 and (vpp == 1 or share // size % layout.pp == 0):
                yield vpp, size


def search(request: PlanRequest, best: int = 5) -> PlanResult:
    """Find the fastest layouts. The search is exact: it skips only candidates that cannot be among them.

    For each layout and micro batch it takes the cheapest recomputation that fits. It tries candidates in the
    order of a lower bound of their time, until the bound exceeds the times that it has found.
    """
    allowed = legal(request)
    choices = request.recomputations
    fitting = [layout for layout in allowed if _fits_somehow(request, layout, choices[-1])]
    floor = _TimeBound(request)
    bounds = sorted(
        (floor(layout, vpp, size), number, vpp, size)
        for number, layout in enumerate(fitting)
        for vpp, size in _variants(request, layout)
    )
    found: dict[ParallelLayout, LaunchCandidate] = {}
    accepted: dict[tuple[object, ...], bool] = {}
    slowest = float("inf")
    for bound, number, vpp, size in bounds:
        if bound > slowest:
            break
        layout = fitting[number]
        variant = replace(layout, vpp=vpp)
        for recompute in choices:
            launch = request.at(variant, size, recompute)
            worst = _fitting_memory(request, launch)
            if worst is not None and _accepted(launch, recompute, accepted):
                here = candidate(request, launch, worst)
                if layout not in found or here.tokens > found[layout].tokens:
                    found[layout] = here
                    if len(found) >= best:
                        slowest = sorted(c.step.total for c in found.values())[best - 1]
                break
    ranked = sorted(found.values(), key=lambda c: -c.tokens)
    smallest = None
    if allowed and not fitting:
        launches = (request.at(layout, recompute=choices[-1]) for layout in allowed)
        smallest = candidate(request, min(launches, key=lambda launch: worst_memory(launch).total))
    return PlanResult(request, tuple(ranked[:best]), len(allowed), len(fitting), smallest)


def _accepted(launch: Launch, recompute: Recompute, known: dict[tuple[object, ...], bool]) -> bool:
    """Whether the rules allow a recomputation with the launch's other options. Sizes are in `legal`."""
    layout = launch.layout
    key = (
        layout.tp > 1,
        layout.cp > 1,
        layout.ep > 1,
        layout.etp > 1,
        layout.pp > 1,
        layout.vpp > 1,
        recompute,
    )
    if key not in known:
        known[key] = not any(violation.severity == "error" for violation in check(launch))
    return known[key]


def _fitting_memory(request: PlanRequest, launch: Launch) -> RankMemory | None:
    """`worst_memory`, or None if a rank has more than the limit."""
    found = []
    for memory_of_rank in rank_memories(launch):
        if memory_of_rank.total > request.limit:
            return None
        found.append(memory_of_rank)
    return max(found, key=lambda one: one.total)


def _fits_somehow(request: PlanRequest, layout: ParallelLayout, recompute: Recompute) -> bool:
    """Whether one sequence a microbatch fits with some number of virtual stages."""
    cuts = (vpp for vpp, size in _variants(request, layout) if size == 1)
    launches = (request.at(replace(layout, vpp=vpp), 1, recompute) for vpp in cuts)
    return any(_fitting_memory(request, launch) is not None for launch in launches)


class _TimeBound:
    """Lower bound of a step's seconds: its layers alone, spread evenly over the pipeline."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.passes: dict[tuple[int, ...], float] = {}
        self.alone = {size: one_replica(request.at(ParallelLayout(), size)) for size in MICRO_BATCHES}
        config = request.config
        applied = symbols(config) + (config.mtp_pattern or "") * config.mtp_num_layers
        self.times = {kind: applied.count(kind) for kind in applied} | {"embedding": 1, "output": 1}
        if config.has_mtp:
            self.times["mtp"] = config.mtp_num_layers

    def __call__(self, layout: ParallelLayout, vpp: int, micro_batch_size: int) -> float:
        key = (layout.tp, layout.cp, layout.ep, layout.etp, micro_batch_size)
        if key not in self.passes:
            self.passes[key] = self._microbatch(layout, micro_batch_size)
        microbatches = self.request.global_batch_size // layout.dp // micro_batch_size
        return self.passes[key] / layout.pp * (microbatches + (layout.pp - 1) / vpp)

    def _microbatch(self, layout: ParallelLayout, micro_batch_size: int) -> float:
        launch = replace(self.alone[micro_batch_size], layout=of_one_replica(layout))
        layers = layer_times(launch, self.request.machine)
        return sum(layers[kind].total * times for kind, times in self.times.items() if times)


def remedies(request: PlanRequest, most: int = 1 << 15) -> list[str]:
    """Changes that would make the model fit where nothing does, one size of the request at a time."""
    found = []
    gpus = request.gpus * 2
    while gpus <= most:
        batch = max(request.global_batch_size, gpus)
        if search(replace(request.but(global_batch_size=batch), gpus=gpus), 1).fitting:
            found.append(f"{gpus} GPUs instead of {request.gpus}")
            break
        gpus *= 2
    for gpu in sorted(GPUS.values(), key=lambda g: g.memory):
        if gpu.memory > request.gpu.memory and search(replace(request, gpu=gpu), 1).fitting:
            found.append(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB) instead of {request.gpu.name}")
            break
    length = request.launch.seq_length // 2
    while length >= 1024:
        if search(request.but(seq_length=length), 1).fitting:
            found.append(f"sequences of {length} instead of {request.launch.seq_length}")
            break
        length //= 2
    return found
