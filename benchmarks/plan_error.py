"""How far `nemotron3 plan` is from published runs: time, peak memory, and the place of their layouts.

python benchmarks/plan_error.py          every published run: tokens/s/GPU and memory by the model
python benchmarks/plan_error.py --fit    fits the two constants anew, leaving out one run, then one model
python benchmarks/plan_error.py --places where the published layouts rank among all that fit
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_nemotron3.launch import Launch, TrainingSchedule, published_layout
from megatron_nemotron3.launch.plan.hardware import GIB, GPUS, RESERVE
from megatron_nemotron3.launch.plan.options import ALLTOALL, HYBRIDEP
from megatron_nemotron3.launch.plan.published import CARDS, RUNS, SEQUENCE, PublishedRun
from megatron_nemotron3.launch.plan.search import (
    MICRO_BATCHES,
    LaunchCandidate,
    PlanRequest,
    candidate,
    recomputations,
    search,
    worst_memory,
)
from megatron_nemotron3.launch.plan.timing import ASSUMED, Assumptions, Machine, step_time, tokens_per_gpu
from megatron_nemotron3.models import get

#: Public pre-training launches: model -> (GPU, GPUs, precision, dispatcher, micro batch).
#: Sequences of 8,192 tokens, 3,072 a step.
LAUNCHES = {
    "nano": ("h100", 3072, "bf16", ALLTOALL, 1),
    "super": ("gb200", 3072, "nvfp4", HYBRIDEP, 1),
    "ultra": ("gb200", 6144, "nvfp4", HYBRIDEP, 2),
}
#: The runs to which the constants are fitted: balanced routing, mock data. Nano-4B has no experts.
FITTED = tuple(run for run in RUNS + CARDS if not run.natural)


def modelled(run: PublishedRun, assumed: Assumptions = ASSUMED) -> float:
    """Tokens per second and GPU."""
    launch = run.launch()
    return tokens_per_gpu(launch, step_time(launch, Machine(GPUS[run.gpu], assumed)))


def errors(runs: Sequence[PublishedRun], assumed: Assumptions = ASSUMED) -> list[float]:
    """Modelled over published throughput, less 1."""
    return [modelled(run, assumed) / run.tokens - 1 for run in runs]


def spread(found: Sequence[float]) -> float:
    """Root mean square of log ratios."""
    return math.sqrt(sum(math.log1p(e) ** 2 for e in found) / len(found))


def memory_error(run: PublishedRun) -> float:
    """Modelled over measured peak memory, less 1."""
    return worst_memory(run.launch()).total / ((run.memory or 0.0) * GIB) - 1


class Line:
    """A run's seconds as a function of the two constants: they are a sum of one term for each.

    seconds = rest + scan / share of the vector units + experts * seconds of a wait
    """

    def __init__(self, run: PublishedRun) -> None:
        # Launches that the GPU waits for would bend the line; no run of `FITTED` has any.
        self.run, self.sequences = run, run.global_batch_size
        here = self._seconds(ASSUMED)
        self.scan = self._seconds(replace(ASSUMED, scan=ASSUMED.scan / 2)) - here
        self.scan *= ASSUMED.scan
        self.experts = (self._seconds(replace(ASSUMED, experts=2 * ASSUMED.experts)) - here) / ASSUMED.experts
        self.rest = here - self.scan / ASSUMED.scan - self.experts * ASSUMED.experts
        self.measured = run.seq_length * self.sequences / run.gpus / run.tokens

    def _seconds(self, assumed: Assumptions) -> float:
        return step_time(self.run.launch(), Machine(GPUS[self.run.gpu], assumed)).total

    def error(self, scan: float, experts: float) -> float:
        """Modelled over published throughput, less 1."""
        return self.measured / (self.rest + self.scan / scan + self.experts * experts) - 1


def fit(lines: Sequence[Line]) -> tuple[float, float]:
    """The two constants of least `spread`, by a pattern search from the present ones."""
    best, step = (ASSUMED.scan, ASSUMED.experts), 0.2
    least = spread([line.error(*best) for line in lines])
    while step > 1e-3:
        ways = ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step))
        trials = [(best[0] * math.exp(one), best[1] * math.exp(two)) for one, two in ways]
        lowest, trial = min((spread([line.error(*t) for line in lines]), t) for t in trials)
        if lowest < least:
            least, best = lowest, trial
        else:
            step /= 2
    return best


def show_runs() -> None:
    """The runs, and the table of errors of docs/measurements.md."""
    columns = "model GPUs precision layout micro source tokens/s/GPU plan error GiB plan error"
    print(f"| {' | '.join(columns.split())} |")
    print("|-|-|-|-|-:|-|-:|-:|-:|-:|-:|-:|")
    for run in RUNS + CARDS:
        (error,) = errors([run])
        held, free = worst_memory(run.launch()).total, GPUS[run.gpu].memory
        length = f", {run.seq_length}" if run.seq_length != SEQUENCE else ""
        print(
            f"| {run.model}{' *' if run.natural else ''} | {run.gpus} {run.gpu} | {run.precision} | "
            f"{run.layout}{length} | {run.micro_batch_size} | {run.source} | {run.tokens:,.0f} | "
            f"{run.tokens * (1 + error):,.0f} | {error:+.0%} | {run.memory or ''} | "
            f"{held / GIB:.1f}{' DOES NOT FIT' if held > free else ''} | "
            f"{format(memory_error(run), '+.1%') if run.memory else ''} |"
        )
    for name, runs in {
        "throughput table": RUNS,
        "and cards, balanced routing": FITTED,
        "cards, natural routing (*)": [run for run in CARDS if run.natural and not run.functional],
    }.items():
        found = errors(runs)
        print(f"\ntime, {name}: {_summary(found)}")
    found = [memory_error(run) for run in CARDS if run.memory]
    print(f"\nmemory: {_summary(found)}")


def _summary(found: Sequence[float]) -> str:
    return f"root mean square {spread(found):.1%}, worst {max(found, key=abs):+.1%}, {len(found)} runs"


def show_fit() -> None:
    """Fitted to all, to all but one run, and to all but one model: errors of what was left out."""
    lines = [Line(run) for run in FITTED]
    scan, experts = fit(lines)
    seen = [line.error(scan, experts) for line in lines]
    print(f"scan {scan:.3f}, experts {experts * 1e3:.2f} ms: {_summary(seen)}")
    unseen = []
    for line in lines:
        unseen.append(line.error(*fit([other for other in lines if other is not line])))
    print(f"one run left out: {_summary(unseen)}")
    unseen = []
    for model in dict.fromkeys(line.run.model for line in lines):
        values = fit([line for line in lines if line.run.model != model])
        mine = [line.error(*values) for line in lines if line.run.model == model]
        unseen += mine
        shown = " ".join(f"{e:+.0%}" for e in mine)
        constants = f"scan {values[0]:.3f}, experts {values[1] * 1e3:.2f} ms"
        print(f"without {model:10} {constants}, unseen {shown}")
    print(f"one model left out: {_summary(unseen)}")


def show_places() -> None:
    """Rank of the public launches' layouts, each with its best micro batch and recomputation."""
    for name, (gpu, gpus, precision, dispatcher, micro) in LAUNCHES.items():
        config = get(name)
        layout = published_layout(config)
        assert layout is not None
        schedule = TrainingSchedule(seq_length=SEQUENCE, global_batch_size=3072)
        launch = Launch(config=config, precision=precision, schedule=schedule)
        request = PlanRequest(launch, gpus, GPUS[gpu], dispatcher)
        best = search(request, best=100000).best
        tried = [
            candidate(request, request.at(layout, size, recompute))
            for size in MICRO_BATCHES
            for recompute in recomputations(config)
            if 3072 // layout.dp % size == 0
        ]
        fitting = [c for c in tried if c.memory.total <= request.limit]

        def place(found: LaunchCandidate) -> str:
            rank = 1 + sum(other.tokens > found.tokens for other in best)  # noqa: B023
            return f"{rank} of {len(best)}, {found.tokens / best[0].tokens:.0%} of the best"  # noqa: B023

        own = max(fitting, key=lambda c: c.tokens)
        launched = next(c for c in fitting if c.launch.micro_batch_size == micro)
        spare = (request.limit - launched.memory.total) / GIB
        print(
            f"{name} on {gpus} {gpu}: {layout}: fits with {spare:.0f} GiB to spare "
            f"(reserve {RESERVE / GIB:.0f}); as launched (micro {micro}) {place(launched)}; "
            f"its best (micro {own.launch.micro_batch_size}, {own.recompute}) {place(own)}; "
            f"fastest: {best[0].layout} micro {best[0].launch.micro_batch_size} {best[0].recompute}"
        )


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--places", action="store_true")
    options = parser.parse_args()
    if options.fit:
        show_fit()
    elif options.places:
        show_places()
    else:
        show_runs()


if __name__ == "__main__":
    main()
