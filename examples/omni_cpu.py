"""Train vision + audio + language model on gloo processes, the modules laid out in five ways; compare losses.

    python examples/omni_cpu.py                             # all modes, 8 processes, a few minutes on 2 cores
    python examples/omni_cpu.py --mode disjoint --steps 10 --processes 4

    single       one process, upstream's MimoModel: what the others must reproduce
    homogeneous  one layout for all modules, upstream's MimoModel
    colocated    all ranks have all modules, each module its own TP and DP (BoundaryMimoModel)
    pipelined    the same with two pipeline stages of the language model (forward_backward_colocated)
    disjoint     each module on ranks of its own, stock 1F1B schedule (BoundaryCommunicator)

All runs start with the same weights and take the same samples in every step. Pictures and sounds are ragged,
and some samples have none. Two more runs of a single process help to interpret the losses. "blind" gets noise
in place of pictures and sounds, so the gap to it shows what the encoders contribute. "reordered" splits its
samples into four microbatches, which sums in another order. That order decides which expert a token near a
tie is routed to: curves agree to about 1e-6 for some steps, then differ by about half a percent, also for
"reordered". (With moe_router_topk=16 in omni_model.py every token gets all experts, and the difference stays
at 1e-5.) The exit status is 1 if a curve differs from that of the single process by more than the tolerances.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Workers are forked from a server that has imported these; it starts with the environment alone.
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
warnings.simplefilter("ignore")
os.environ |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch.multiprocessing
from omni_train import Losses, Mode, read, train

from megatron_nemotron3 import plots
from megatron_nemotron3.boundary.layout import Layout


def _mode(samples: int, vision: str, audio: str, language: str, stock: bool = False) -> Mode:
    words = {"vision": vision, "audio": audio, "language": language}
    return Mode({name: Layout.parse(text) for name, text in words.items()}, samples, stock)


#: processes -> mode -> layouts of the modules, and samples of a microbatch. Encoders have no tensor
#: parallelism of their own: TP in their layouts means replicas.
MODES: dict[int, dict[str, Mode]] = {
    4: {
        "homogeneous": _mode(12, "tp=2,dp=2", "tp=2,dp=2", "tp=2,dp=2,sp", stock=True),
        "colocated": _mode(12, "dp=4", "tp=4", "tp=2,dp=2,sp"),
        "pipelined": _mode(12, "dp=4", "tp=2,dp=2", "pp=2,dp=2"),
        "disjoint": _mode(6, "dp=1", "dp=1,offset=1", "tp=2,offset=2,sp"),
    },
    8: {
        "homogeneous": _mode(24, "tp=2,dp=4", "tp=2,dp=4", "tp=2,dp=4,sp", stock=True),
        "colocated": _mode(24, "dp=8", "tp=4,dp=2", "tp=2,dp=4,sp"),
        "pipelined": _mode(8, "dp=8", "tp=4,dp=2", "tp=2,pp=2,dp=2,sp"),
        # Three vision lanes feed two of the language model, which has two pipeline stages.
        "disjoint": _mode(6, "dp=3", "dp=1,offset=3", "pp=2,dp=2,offset=4"),
    },
}
SINGLE = _mode(24, "dp=1", "dp=1", "dp=1", stock=True)
#: Steps before rounding has had time to send a token to another expert.
EARLY = 8
#: The same sums in another order: four microbatches.
REORDERED = _mode(6, "dp=1", "dp=1", "dp=1", stock=True)


def spawn(mode: Mode, steps: int, folder: Path, *, save: bool = False, blind: bool = False) -> Losses:
    """Run `train` on every rank of a mode and return its losses.

    Args:
        folder: for the initial weights, which the first call writes (`save`), and what else passes around.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the others are ended.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        store, result = str(Path(own, "store")), str(Path(own, "losses"))
        torch.multiprocessing.start_processes(
            train,
            (mode, steps, store, str(folder / "weights"), result, save, blind),
            nprocs=mode.world,
            start_method="forkserver",
        )
        return read(result)


def differences(losses: Losses, reference: Losses) -> tuple[float, float]:
    """Largest relative differences of loss and gradient norm in the first EARLY steps, and of all losses."""

    def of(mine: list[float], other: list[float]) -> float:
        gaps = [abs(a - b) / b for a, b in zip(mine, other, strict=True)]
        return max(gaps) if all(map(math.isfinite, gaps)) else math.inf

    early = max(
        of(losses.all[:EARLY], reference.all[:EARLY]), of(losses.norms[:EARLY], reference.norms[:EARLY])
    )
    return early, of(losses.all, reference.all)


def table(runs: Mapping[str, Losses]) -> str:
    """Table of losses by step, a column for each run, with the differences in the last rows."""
    lines = ["step" + "".join(f"{name:>13}" for name in runs)]
    for step in range(len(runs["single"].all)):
        lines.append(f"{step + 1:4}" + "".join(f"{losses.all[step]:13.6f}" for losses in runs.values()))
    tail = len(runs["single"].all) // 5 or 1
    words = "".join(f"{sum(losses.captions[-tail:]) / tail:13.3f}" for losses in runs.values())
    return "\n".join(
        [*lines, "", f"loss of the captions' words, mean of the last {tail} steps", "    " + words]
    )


def plot(runs: Mapping[str, Losses], path: Path) -> None:
    """Plot the loss curves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plots.picture(path, 1, 2, size=(10, 4)) as (_, grid):
        left, right = grid[0]
        styles = itertools.cycle(("-", ":", "--", "-."))
        for style, (name, losses) in zip(styles, runs.items(), strict=False):
            steps = range(1, len(losses.all) + 1)
            left.plot(steps, losses.all, style, label=name)
            right.plot(steps, losses.captions, style, label=name)
        left.set(title="All text", xlabel="step", ylabel="loss (nats per token)")
        right.set(title="Words of captions", xlabel="step")
        left.legend()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("single", *MODES[8], "all")
    parser.add_argument("--mode", choices=names, default="all", help="beside the single process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, choices=sorted(MODES), default=8)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help=f"relative, of loss and norm in {EARLY} steps"
    )
    parser.add_argument("--late-tolerance", type=float, default=5e-2, help="relative, of every step's loss")
    parser.add_argument("--plot", type=Path, default=Path("runs/omni_cpu.png"), help="picture to write")
    args = parser.parse_args(argv)
    chosen = {name: mode for name, mode in MODES[args.processes].items() if args.mode in (name, "all")}
    multiprocessing.set_forkserver_preload(
        ["omni_train", "transformers.models.vit", "transformers.models.parakeet"]
    )
    runs: dict[str, Losses] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in {"single": SINGLE, "reordered": REORDERED, **chosen, "blind": SINGLE}.items():
            began = time.monotonic()
            runs[name] = spawn(mode, args.steps, Path(folder), save=not runs, blind=name == "blind")
            print(f"{name:12} {mode} ({time.monotonic() - began:.0f} s)", flush=True)
    print("", table(runs), "", "largest relative difference to the single process", sep="\n")
    print(f"{'':12} loss and gradient norm, {EARLY} steps     loss, all steps")
    bad = []
    for name in ("reordered", *chosen):
        early, late = differences(runs[name], runs["single"])
        print(f"{name:12} {early:32.1e} {late:19.1e}")
        if not (early <= args.tolerance and late <= args.late_tolerance):
            bad.append(name)
    plot(runs, args.plot)
    print(f"curves: {args.plot}")
    if bad:
        print(f"not within --tolerance and --late-tolerance: {', '.join(bad)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
