"""Reduce what the layers of each rank collected to the numbers of the run.

One model replica processes a micro-batch at a time, so its expert loads are summed over tensor and context
parallel ranks (with sequence parallelism each of them routes its own tokens). The micro-batches of all
data-parallel ranks form the global batch. To the router, expert-parallel ranks are data-parallel ranks.
Pipeline stages hold different layers and exchange finished numbers.

All sums are FP64: counts stay exact, and all layouts round alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.hooks import gather_stages
from megatron_nemotron3.models.series import Values
from megatron_nemotron3.precision.gradients import gradient_places, zero_gradients
from megatron_nemotron3.train.monitor.watched import WatchedLayer

#: Sums of one layer, with D visits (rows) per micro-batch and N experts:
#: residual, latent [D, 2]: sum of squares, elements. loads [visits, N]. interval [N]. zeros [2].
_LayerSums = dict[str, Tensor]


def max_vio(load: Tensor) -> Tensor:
    """Largest load over mean load: [..., N] -> [...]. 1 is perfect balance; the maximum is experts / top-k.

    This is the definition of the Nemotron 3 reports; "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664)
    uses the same name for (largest - mean) / mean, which is one less.
    """
    return load.amax(-1) / load.mean(-1)


def measure(
    layers: Sequence[WatchedLayer], loss: Tensor | None, groups: Any
) -> tuple[Values, dict[str, float]]:
    """Values of all layers of all stages, and numbers of the run; the same on every rank. Collective.

    layers: those of this rank. loss: [sum, tokens] of the main loss on ranks of the last stage.
    """
    where = {ddp: gradient_places(ddp) for ddp in {layer.ddp() for layer in layers}}
    parts = [_layer_sums(layer, where[layer.ddp()], groups) for layer in layers]
    whole = {} if loss is None else {"loss": loss}
    _all_reduce([t for part in (*parts, whole) for t in part.values()], groups.tp_cp)
    worst = [_by_micro_batch(part, len(layer.rows)) for layer, part in zip(layers, parts)]
    _all_reduce([t for part in (*parts, whole) for t in part.values()], groups.dp)
    _all_reduce([w for w in worst if w is not None], groups.dp, torch.distributed.ReduceOp.MAX)
    values: Values = {}
    for layer, part, w in zip(layers, parts, worst):
        _add_values(values, layer, part, w)
    zeros = [sum(float(part["zeros"][i]) for part in parts if "zeros" in part) for i in (0, 1)]
    of_run = _router_numbers(layers, parts)
    if "loss" in whole and (tokens := float(whole["loss"][1])) > 0:
        of_run["lm_loss"] = float(whole["loss"][0]) / tokens
    return _over_stages(values, zeros, of_run, groups.pp)


def _router_numbers(layers: Sequence[WatchedLayer], parts: Sequence[_LayerSums]) -> dict[str, float]:
    """Numbers that the rules need: the same for all MoE layers, but for depths that share one."""
    found: dict[str, float] = {}
    for layer, part in zip(layers, parts):
        if "interval" not in part:
            continue
        config = layer.router.config
        tokens = float(part["interval"].sum()) / layer.router.topk
        found["experts"], found[f"top_k/{layer.name}"] = part["interval"].numel(), layer.router.topk
        found["interval_tokens"] = min(tokens, found.get("interval_tokens", tokens))
        if getattr(layer.router, "expert_bias", None) is not None:
            found["bias_update_rate"] = config.moe_router_bias_update_rate
    return found


def _layer_sums(layer: WatchedLayer, where: Any, groups: Any) -> _LayerSums:
    part = {"residual": _visit_squares(layer.residual, len(layer.rows))}
    if layer.latent:
        part["latent"] = _visit_squares(layer.latent, len(layer.rows))
    if layer.loads:
        assert layer.interval_load is not None
        part["loads"] = torch.stack(layer.loads).double()
        part["interval"] = layer.interval_load.double()
    if where is not None:
        part["zeros"] = zero_gradients(layer.module, where, groups)
    return part


def _visit_squares(visits: list[tuple[Tensor, int]], depths: int) -> Tensor:
    """Sum of squares and number of elements per depth, [D, 2]."""
    norms = torch.stack([norm for norm, _ in visits]).double()
    sizes = torch.tensor([size for _, size in visits], dtype=torch.float64, device=norms.device)
    return torch.stack([norms.square(), sizes], dim=-1).reshape(-1, depths, 2).sum(0)


def _by_micro_batch(part: _LayerSums, depths: int) -> Tensor | None:
    """Replace loads [visits, N] by sums that add up over data-parallel ranks; return the worst MaxVio [D]."""
    if "loads" not in part:
        return None
    loads = part.pop("loads").unflatten(0, (-1, depths))  # [micro-batches, D, N]
    each = max_vio(loads)
    part["load"] = loads.sum(0)
    part["micro"] = torch.stack([each.sum(0), torch.full_like(each[0], len(each))], dim=-1)  # [D, 2]
    return each.amax(0)


def _add_values(values: Values, layer: WatchedLayer, part: _LayerSums, worst: Tensor | None) -> None:
    def put(kind: str, numbers: Tensor) -> None:
        values.setdefault(kind, {}).update(zip(layer.rows, numbers.tolist()))

    def put_one(kind: str, number: Tensor) -> None:
        values.setdefault(kind, {})[layer.name] = number.item()

    for kind in ("residual", "latent"):
        if kind in part:
            put(f"{kind}_rms", (part[kind][:, 0] / part[kind][:, 1]).sqrt())
    if worst is not None:
        put("max_vio", max_vio(part["load"]))
        put("max_vio_micro_mean", part["micro"][:, 0] / part["micro"][:, 1])
        put("max_vio_micro_worst", worst)
        # Depths that share experts share the bias that balances them, so an expert is dead in all or in none.
        put_one("dead_experts", (part["load"].sum(0) == 0).sum())
        put_one("dead_experts_interval", (part["interval"] == 0).sum())
        put_one("max_vio_interval", max_vio(part["interval"]))
        if (bias := getattr(layer.router, "expert_bias", None)) is not None:
            put_one("expert_bias_spread", bias.max() - bias.min())
            put_one("expert_bias_mean", bias.mean())
    if "zeros" in part:
        put_one("zero_gradients", part["zeros"][0] / part["zeros"][1])


def _over_stages(
    values: Values, zeros: list[float], of_run: dict[str, float], group: Any
) -> tuple[Values, dict[str, float]]:
    found = gather_stages((values, zeros, of_run), group)
    merged: Values = {}
    numbers: dict[str, float] = {}
    for stage, _, of_stage in found:
        for kind, rows in stage.items():
            merged.setdefault(kind, {}).update(rows)
        numbers |= of_stage
    by_layer = {name: value for name, value in numbers.items() if name.startswith("top_k/")}
    if len(every := set(by_layer.values())) == 1:  # as in most models: one number of the run
        numbers = {name: value for name, value in numbers.items() if name not in by_layer}
        numbers["top_k"] = every.pop()
    zero, elements = (sum(z[i] for _, z, _ in found) for i in (0, 1))
    return merged, numbers | ({"zero_gradients": zero / elements} if elements else {})


def _all_reduce(tensors: list[Tensor], group: Any, op: Any = torch.distributed.ReduceOp.SUM) -> None:
    if not tensors or group.size() == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    torch.distributed.all_reduce(flat, op=op, group=group)
    for tensor, reduced in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(reduced.view_as(tensor))
