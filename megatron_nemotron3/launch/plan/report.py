"""The result of a search as text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_nemotron3.common.output import count
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.flops import step_flops
from megatron_nemotron3.launch.plan.hardware import GIB, RESERVE
from megatron_nemotron3.launch.plan.memory import RankMemory
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.launch.plan.published import CARDS, RUNS, SEQUENCE
from megatron_nemotron3.launch.plan.search import LaunchCandidate, PlanRequest, PlanResult
from megatron_nemotron3.launch.plan.traffic import split, step_traffic, usable_domain

GB = 1e9
KINDS = {
    "M": "Mamba",
    "*": "attention",
    "E": "experts",
    "-": "MLP",
    "mtp": "MTP",
    "embedding": "embedding",
    "output": "output",
}
CAUSES = {
    "products": "matrix products",
    "memory": "memory-bound work",
    "layers": "launches and waits",
    "tp": "tensor-parallel traffic",
    "ep": "expert exchange",
    "cp": "context-parallel traffic",
    "pp": "sends between stages",
    "bubble": "pipeline bubble",
    "dp": "exposed data-parallel traffic",
    "optimizer": "optimizer",
}
#: Causes below this share of a step are not mentioned.
_NOTABLE = 0.005


def memory_classes(memory: RankMemory) -> dict[str, float]:
    """Bytes by class, in the order of printing; classes below 5 MB are left out."""
    found = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    for kind, size in memory.activations.items():
        found[f"activations of {KINDS[kind]}"] = size
    found["packed weights"] = memory.packed_weights
    found |= {"recomputed layer": memory.recompute_peak, "communication buffers": memory.buffers}
    return {name: float(size) for name, size in found.items() if size >= 5e6}


def why_slower(loser: LaunchCandidate, winner: LaunchCandidate) -> str:
    """ "4.1 % slower: pipeline bubble +3.2 %, expert exchange +1.1 %", shares of the winner's step."""
    total = winner.step.total
    slower = loser.step.total / total - 1
    causes = {
        name: (getattr(loser.step, name) - getattr(winner.step, name)) / total for name in vars(winner.step)
    }
    ranked = sorted(causes.items(), key=lambda entry: -entry[1])
    worse = [f"{CAUSES[name]} +{share:.1%}" for name, share in ranked if share > _NOTABLE][:3]
    better = [f"{CAUSES[name]} {share:.1%}" for name, share in ranked[::-1] if share < -_NOTABLE][:2]
    text = f"{slower:.1%} slower: {', '.join(worse) or 'many small differences'}"
    return text + (f"; in return {', '.join(better)}" if better else "")


def command(request: PlanRequest, found: LaunchCandidate) -> str:
    """The `nemotron3 flags` command that gives this layout."""
    sizes = vars(found.layout)
    layout = " ".join(f"--{name} {sizes[name]}" for name in sizes if name != "sp" and sizes[name] > 1)
    words = [
        f"nemotron3 flags {request.config.name} {layout}".rstrip(),
        f"--precision {found.launch.precision} --backend te",
        f"--seq-length {found.launch.seq_length} --global-batch-size {request.global_batch_size}",
        f"--micro-batch-size {found.launch.micro_batch_size}",
    ]
    if found.launch.precision == "nvfp4":
        words.append("--te-precision-config-file precision.yaml")
    extra = list(found.launch.extra)
    if found.launch.gpu:
        words.append(f"--gpu {found.launch.gpu}")
        words += [f"--without {name.removeprefix('--')}" for name in found.launch.without]
    if extra:
        words.append("-- " + " ".join(extra))
    return " ".join(words)


def _options_text(request: PlanRequest) -> str:
    dispatcher = CostOptions.of(request.at(ParallelLayout())).dispatcher
    if request.launch.tuned is None:
        return f"{dispatcher}, no published options"
    return f"{dispatcher}, options of {request.launch.tuned.recipe}"


def _traffic_lines(request: PlanRequest, found: LaunchCandidate) -> list[str]:
    links: dict[str, list[float]] = {}
    for transfer in step_traffic(found.launch):
        sent = split(transfer, found.layout, request.gpu)
        sums = links.setdefault(transfer.link, [0.0, 0.0, transfer.ranks])
        sums[0] += sent.nvlink
        sums[1] += sent.network
    lines = [
        f"  {link:10} {int(ranks):>6} ranks {nvlink / GB:>10.2f} {network / GB:>10.2f}"
        for link, (nvlink, network, ranks) in links.items()
    ]
    head = [f"  {'group':10} {'':>12} {'NVLink GB':>10} {'network GB':>10}"]
    config = request.config
    if config.moe_latent_size:
        ratio = config.hidden_size / config.moe_latent_size
        head.append(f"  (expert exchange in the latent space: {ratio:g} times less than in hidden space)")
    return head + lines


def render(result: PlanResult, remedies: list[str] | None = None) -> str:
    """The result as text."""
    request, gpu, launch = result.request, result.request.gpu, result.request.launch
    lines = [
        f"{request.config.name} on {request.gpus:,} {gpu.name} ({gpu.memory / GIB:.0f} GiB, NVLink domain "
        f"{gpu.nvlink_domain}, {usable_domain(gpu)} used), {launch.precision}, sequences of "
        f"{launch.seq_length:,}, global batch {request.global_batch_size:,}, {_options_text(request)}",
        f"{count(result.legal, 'legal layout')}, of which {result.fitting:,} in "
        f"{request.limit / GIB:.0f} GiB ({RESERVE / GIB:.0f} GiB kept for CUDA, NCCL and fragments)",
    ]
    if not result.best:
        return "\n".join(lines + _nothing_fits(result, remedies or []))
    lines += [
        "",
        f"  {'layout':32} {'micro':>5} {'recompute':28} {'GiB':>6} {'tok/s/GPU':>9} {'TFLOP/s':>7} "
        f"{'s/step':>7}",
    ]
    flops = step_flops(request.config, 1, launch.seq_length)
    for place, found in enumerate(result.best, 1):
        lines.append(
            f"{place} {str(found.layout):32} {found.launch.micro_batch_size:>5} {str(found.recompute):28} "
            f"{found.memory.total / GIB:>6.1f} {found.tokens:>9,.0f} {found.tokens * flops / 1e12:>7.0f} "
            f"{found.step.total:>7.2f}"
        )
    first = result.best[0]
    lines += ["", "memory of 1, GiB on the fullest rank"]
    lines += [f"  {name:26} {size / GIB:>7.2f}" for name, size in memory_classes(first.memory).items()]
    lines += ["", "time of 1"]
    for name, value in sorted(vars(first.step).items(), key=lambda entry: -entry[1]):
        if value / first.step.total > _NOTABLE:
            lines.append(f"  {CAUSES[name]:30} {value / first.step.total:>6.1%}")
    lines += ["", "traffic of 1, sent by one rank of the first stage in a step"]
    lines += _traffic_lines(request, first)
    reasons = [f"{n} is {why_slower(found, first)}" for n, found in enumerate(result.best[1:], 2)]
    lines += ["", *reasons] if reasons else []
    lines += ["", "flags of 1", f"  {command(request, first)}"]
    if near := measured(request):
        lines += ["", *near]
    lines.append("Times are a model's: docs/measurements.md has its error on published runs.")
    return "\n".join(lines)


def measured(request: PlanRequest) -> list[str]:
    """Lines with the published runs of this model on this GPU."""
    return [
        f"published ({run.source}): {run.gpus} {run.gpu}, {run.precision}, {run.layout}, "
        f"micro batch {run.micro_batch_size}: {run.tokens:,.0f} tokens/s/GPU"
        for run in RUNS + CARDS
        if (run.model, run.gpu) == (request.config.name, request.gpu.name)
        and request.launch.seq_length == SEQUENCE
    ]


def _nothing_fits(result: PlanResult, remedies: list[str]) -> list[str]:
    request, least = result.request, result.smallest
    if least is None:
        return [
            f"no layout of {request.gpus} GPUs divides the model and a global batch of "
            f"{request.global_batch_size}: give a batch that DP divides, or another number of GPUs"
        ]
    lines = [
        "",
        f"Nothing fits. The smallest is {least.layout}, micro batch 1, everything recomputed: "
        f"{least.memory.total / GIB:.1f} GiB",
    ]
    lines += [f"  {name:26} {size / GIB:>7.2f}" for name, size in memory_classes(least.memory).items()]
    if remedies:
        lines += ["", "What would make it fit:", *(f"  {remedy}" for remedy in remedies)]
    else:
        lines += ["", "No single change of GPUs, GPU or sequence length would."]
    return lines


def describe(result: PlanResult, remedies: list[str] | None = None) -> dict[str, Any]:
    """The result for JSON, in bytes and seconds."""
    request = result.request

    def one(found: LaunchCandidate) -> dict[str, Any]:
        return {
            "layout": {name: size for name, size in vars(found.layout).items() if name != "sp"},
            "micro_batch_size": found.launch.micro_batch_size,
            "microbatches": found.launch.microbatches,
            "recompute": found.recompute.flags(),
            "memory": memory_classes(found.memory) | {"total": found.memory.total},
            "seconds": vars(found.step) | {"total": found.step.total},
            "tokens_per_second_per_gpu": found.tokens,
            "flags": command(request, found),
            "traffic": [
                asdict(transfer) | {"sent": transfer.sent} for transfer in step_traffic(found.launch)
            ],
        }

    return {
        "model": request.config.name,
        "gpus": request.gpus,
        "gpu": asdict(request.gpu),
        "seq_length": request.launch.seq_length,
        "global_batch_size": request.global_batch_size,
        "precision": request.launch.precision,
        "dispatcher": CostOptions.of(request.at(ParallelLayout())).dispatcher,
        "published_options": request.launch.tuned.recipe if request.launch.tuned else None,
        "legal": result.legal,
        "fitting": result.fitting,
        "best": [one(found) for found in result.best],
        "smallest": one(result.smallest) if result.smallest else None,
        "remedies": remedies or [],
    }
