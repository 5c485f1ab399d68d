"""How far `nemotron3 plan` is from published runs: time and peak memory.

python benchmarks/plan_error.py          # every published run: tokens/s/GPU and memory by the model
python benchmarks/plan_error.py --fit    # fits the two constants anew, without one run, without one model
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from common import parser, show

from megatron_nemotron3.launch.plan.hardware import GIB, GPUS
from megatron_nemotron3.launch.plan.published import CARDS, RUNS, SEQUENCE, PublishedRun
from megatron_nemotron3.launch.plan.search import worst_memory
from megatron_nemotron3.launch.plan.timing import ASSUMED, Assumptions, Machine, step_time, tokens_per_gpu

#: The runs to which the constants are fitted: balanced routing, mock data. Nano-4B has no experts.
FITTED = tuple(run for run in RUNS + CARDS if not run.natural and not run.later)


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
    rows = []
    for run in RUNS + CARDS:
        (error,) = errors([run])
        held, free = worst_memory(run.launch()).total, GPUS[run.gpu].memory
        rows.append(
            {
                "model": f"{run.model}{' *' if run.natural else ''}",
                "GPUs": f"{run.gpus} {run.gpu}",
                "precision": run.precision,
                "layout": f"{run.layout}{f', {run.seq_length}' if run.seq_length != SEQUENCE else ''}",
                "micro": run.micro_batch_size,
                "source": run.source,
                "tokens/s/GPU": f"{run.tokens:,.0f}",
                "plan": f"{run.tokens * (1 + error):,.0f}",
                "error": f"{error:+.0%}",
                "GiB": run.memory,
                "plan GiB": f"{held / GIB:.1f}{' DOES NOT FIT' if held > free else ''}",
                "error GiB": f"{memory_error(run):+.1%}" if run.memory else None,
            }
        )
    show(rows)
    for name, runs in {
        "throughput table": RUNS,
        "and cards, balanced routing": FITTED,
        "cards, natural routing (*)": [run for run in CARDS if run.natural and not run.functional],
        "published later, balanced routing": [run for run in CARDS if run.later],
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


def main() -> None:
    """Print what is asked for."""
    options = parser(__doc__)
    options.add_argument("--fit", action="store_true")
    (show_fit if options.parse_args().fit else show_runs)()


if __name__ == "__main__":
    main()
