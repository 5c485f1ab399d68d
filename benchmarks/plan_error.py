"""How far `nemotron3 plan` is from published runs: throughput, memory, and the place of their layouts.

python benchmarks/plan_error.py          every published run: tokens/s/GPU and memory by the model
python benchmarks/plan_error.py --fit    fits the four constants anew, and leaves out one model at a time
python benchmarks/plan_error.py --places where the published layouts rank among all that fit
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_nemotron3.args import Launch, TrainingSchedule, published_layout
from megatron_nemotron3.models import get
from megatron_nemotron3.plan.hardware import GPUS, RESERVE
from megatron_nemotron3.plan.memory import memory
from megatron_nemotron3.plan.published import RUNS, SEQUENCE, Run
from megatron_nemotron3.plan.search import (
    MICRO_BATCHES,
    Candidate,
    Question,
    candidate,
    recomputations,
    search,
)
from megatron_nemotron3.plan.timing import (
    ALLTOALL,
    ASSUMED,
    HYBRIDEP,
    Assumptions,
    Machine,
    step_time,
    tokens_per_gpu,
)
from megatron_nemotron3.precision.formats import FORMATS

#: Public pre-training launches: model -> (GPU, GPUs, precision, dispatcher, micro batch).
#: Sequences of 8,192 tokens, 3,072 a step.
LAUNCHES = {
    "nano": ("h100", 3072, "bf16", ALLTOALL, 1),
    "super": ("gb200", 3072, "nvfp4", HYBRIDEP, 1),
    "ultra": ("gb200", 6144, "nvfp4", HYBRIDEP, 2),
}

#: What the published runs of Super and Ultra accumulate gradients in.
BF16_GRADIENTS = ("--grad-reduce-in-bf16",)


def modelled(run: Run, assumed: Assumptions = ASSUMED) -> float:
    """Tokens per second and GPU."""
    launch = run.launch()
    return tokens_per_gpu(launch, step_time(launch, Machine(GPUS[run.gpu], HYBRIDEP, assumed)))


def errors(runs: Sequence[Run], assumed: Assumptions = ASSUMED) -> list[float]:
    """Modelled over published, less 1."""
    return [modelled(run, assumed) / run.tokens - 1 for run in runs]


def spread(found: Sequence[float]) -> float:
    """Root mean square of log ratios."""
    return math.sqrt(sum(math.log1p(e) ** 2 for e in found) / len(found))


def with_constants(values: Sequence[float]) -> Assumptions:
    """FP8 and NVFP4 shares of the peak, passes, seconds a layer."""
    fp8, nvfp4, passes, layer = values
    products = {**ASSUMED.products, **dict.fromkeys(FORMATS, fp8), "nvfp4": nvfp4}
    return replace(ASSUMED, products=products, passes=passes, layer=layer)


def fit(runs: Sequence[Run]) -> list[float]:
    """The constants of least `spread`, by a pattern search from the present ones."""
    best = [ASSUMED.products["mxfp8"], ASSUMED.products["nvfp4"], ASSUMED.passes, ASSUMED.layer]
    least, step = spread(errors(runs, with_constants(best))), 0.2
    while step > 0.005:
        trials = [
            [v * math.exp(sign * step) if i == place else v for i, v in enumerate(best)]
            for place in range(len(best))
            for sign in (1, -1)
        ]
        scored = [(spread(errors(runs, with_constants(t))), t) for t in trials if max(t[:2]) <= 1]
        lowest, trial = min(scored)
        if lowest < least:
            least, best = lowest, trial
        else:
            step /= 2
    return best


def show_runs() -> None:
    """The table of docs/measurements.md."""
    found = errors(RUNS)
    print("| model | GPUs | precision | layout | micro | published tokens/s/GPU | model | error | GB of |")
    print("|-|-|-|-|-|-|-|-|-|")
    for run, error in zip(RUNS, found, strict=True):
        held = memory(run.launch(*(BF16_GRADIENTS if run.model in ("super", "ultra") else ()))).total
        print(
            f"| {run.model} | {run.gpus} {run.gpu} | {run.precision} | {run.layout} | "
            f"{run.micro_batch_size} | "
            f"{run.tokens:,} | {run.tokens * (1 + error):,.0f} | {error:+.0%} | "
            f"{held / 1e9:.0f} of {GPUS[run.gpu].memory / 1e9:.0f} |"
        )
    print(f"\nroot mean square {spread(found):.1%}, worst {max(map(abs, found)):.0%}, {len(RUNS)} runs")


def show_fit() -> None:
    """Fitted to all, and to all but one model: what the model predicts for what it has not seen."""
    for left_out in (None, *dict.fromkeys(run.model for run in RUNS)):
        runs = [run for run in RUNS if run.model != left_out]
        values = fit(runs)
        shown = " ".join(f"{v:.3g}" for v in values)
        unseen = (
            errors([run for run in RUNS if run.model == left_out], with_constants(values)) if left_out else []
        )
        print(
            f"without {left_out or 'nothing':10} fp8 nvfp4 passes layer = {shown}  "
            f"seen {spread(errors(runs, with_constants(values))):.1%}  "
            f"unseen {' '.join(f'{e:+.0%}' for e in unseen)}"
        )


def show_places() -> None:
    """Rank of the public launches' layouts, each with its best micro batch and recomputation."""
    for name, (gpu, gpus, precision, dispatcher, micro) in LAUNCHES.items():
        config = get(name)
        layout = published_layout(config)
        assert layout is not None
        schedule = TrainingSchedule(seq_length=SEQUENCE, global_batch_size=3072)
        launch = Launch(config=config, precision=precision, schedule=schedule)
        question = Question(launch, gpus, GPUS[gpu], dispatcher)
        best = search(question, best=100000).best
        tried = [
            candidate(question, question.at(layout, size, recompute))
            for size in MICRO_BATCHES
            for recompute in recomputations(config)
            if 3072 // layout.dp % size == 0
        ]
        fitting = [c for c in tried if c.memory.total <= question.limit]

        def place(found: Candidate) -> str:
            rank = 1 + sum(other.tokens > found.tokens for other in best)  # noqa: B023
            return f"{rank} of {len(best)}, {found.tokens / best[0].tokens:.0%} of the best"  # noqa: B023

        own = max(fitting, key=lambda c: c.tokens)
        launched = next(c for c in fitting if c.launch.micro_batch_size == micro)
        spare = (question.limit - launched.memory.total) / 1e9
        print(
            f"{name} on {gpus} {gpu}: {layout}: fits with {spare:.0f} GB to spare "
            f"(reserve {RESERVE / 1e9:.0f}); as launched (micro {micro}) {place(launched)}; "
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
