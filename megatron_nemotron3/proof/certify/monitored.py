"""What the monitors see in the first step: the same in a layout as in one process."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_nemotron3.models.series import AGGREGATES, KINDS
from megatron_nemotron3.proof.certify.bench import Bench
from megatron_nemotron3.proof.certify.finding import Finding, failed, untested
from megatron_nemotron3.proof.certify.tensors import Tensors, unmatched
from megatron_nemotron3.train.monitor import events

MONITORS = "monitors of the first step"


def monitors(bench: Bench) -> Iterator[Finding]:
    """Yield whether routers, residuals and gradients look the same in a layout, by the runs of `script`."""
    from megatron_nemotron3.proof.certify import noise
    from megatron_nemotron3.proof.certify.compare import farthest, verdict
    from megatron_nemotron3.proof.certify.script_stage import events as folder

    names = [f"one-{number}" for number in range(1 + noise.NUDGES)]
    if not all(folder(bench, name).is_dir() for name in (*names, "layout")):
        yield untested(MONITORS, "the script's runs did not come to their end")
        return
    base, *nudged = (_first(events.read(events.find(folder(bench, name)))) for name in names)
    found = _first(events.read(events.find(folder(bench, "layout"))))
    where = str(bench.proxy.sizes[0])
    if odd := unmatched(base, found):
        yield failed(MONITORS, where, odd)
        return
    if not base:
        yield untested(MONITORS, "the monitors have written nothing")
        return
    terms = bench.proxy.batch.sequences * bench.proxy.batch.seq_length
    distance = farthest(MONITORS, base, found, noise.spread(base, nudged, terms))
    yield verdict(distance, where, f"{len(base)} series")


def _first(history: events.History) -> Tensors:
    import torch

    return {
        tag: torch.tensor(points[0][1], dtype=torch.float64)
        for tag, points in history.items()
        if tag.partition("/")[0] in (*KINDS, AGGREGATES) and points
    }
