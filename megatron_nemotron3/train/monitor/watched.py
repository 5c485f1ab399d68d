"""What each layer collects during a step, by forward hooks, and the numbers of the run that it is reduced to.

Nothing here changes a tensor. Hooks act on the first forward of a micro-batch. They ignore the forward that
activation recomputation repeats inside the backward pass, and evaluation, where modules are not in training
mode.

One model replica processes a micro-batch at a time, so its expert loads are summed over tensor and context
parallel ranks (with sequence parallelism each of them routes its own tokens). The micro-batches of all
data-parallel ranks form the global batch. To the router, expert-parallel ranks are data-parallel ranks.
Pipeline stages hold different layers and exchange finished numbers. All sums are FP64: counts stay exact, and
all layouts round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from megatron_nemotron3.common.hooks import MeasuredSteps, first_forward, gather_stages, no_wrapper
from megatron_nemotron3.models.series import Values
from megatron_nemotron3.precision.gradients import GradientPlaces, gradient_places, local_gradient

#: Maximum number of visits kept without a report, for training loops that never request one.
LIMIT = 16_384


@dataclass(eq=False)
class WatchedLayer:
    """One layer of the stack: its names, and what its hooks collected since the last report.

    `rows` has one name per visit of a micro-batch: one for a decoder layer, and one per depth, in order, for
    an MTP layer that is repeated. `name` is for numbers of the layer's weights, which all visits share.
    """

    name: str
    rows: tuple[str, ...]
    module: torch.nn.Module
    #: Shared by all layers.
    switch: MeasuredSteps
    #: DDP wrapper of the model, once it ran; its buffers hold the reduced gradients.
    ddp: Callable[[], Any] = no_wrapper
    #: Per visit: L2 norm and number of elements of the residual stream after this layer.
    residual: list[tuple[Tensor, int]] = field(default_factory=list)
    #: The same for the latent input of the experts, in LatentMoE layers.
    latent: list[tuple[Tensor, int]] = field(default_factory=list)
    #: Per visit: tokens of each expert [N] (int64) on this rank.
    loads: list[Tensor] = field(default_factory=list)
    #: Tokens of each expert [N] over all steps since the last report.
    interval_load: Tensor | None = None

    def __post_init__(self) -> None:
        moe = next((m for m in self.module.modules() if isinstance(m, BaseMoELayer)), None)
        self.router: Any = None
        self.module.register_forward_hook(self._on_layer)
        if moe is not None:
            self.router = moe.router
            self.router.register_forward_hook(self._on_router, with_kwargs=True)
            if getattr(moe, "fc1_latent_proj", None) is not None:
                moe.fc1_latent_proj.register_forward_hook(self._on_latent)

    @property
    def has_data(self) -> bool:
        return bool(self.residual)

    def clear(self) -> None:
        self.residual, self.latent, self.loads = [], [], []
        self.interval_load = None

    def _counts(self, module: torch.nn.Module) -> bool:
        return module.training and first_forward()

    def _on_layer(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Collect the residual stream. Output: [s, b, d], or a tuple that begins with it."""
        if self.switch.on and self._counts(module) and len(self.residual) < LIMIT:
            self.residual.append(_norm_and_size(output))

    def _on_latent(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Collect the latent. Output: [s, b, l] and its bias."""
        if self.switch.on and self._counts(module) and len(self.latent) < LIMIT:
            self.latent.append(_norm_and_size(output))

    def _on_router(self, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        """Collect expert loads. Output: probabilities and routing map [tokens, N] (bool)."""
        if not self._counts(module):
            return
        routing_map = output[1]
        padding = kwargs.get("padding_mask", inputs[1] if len(inputs) > 1 else None)
        if padding is not None:  # True for padding tokens
            routing_map = routing_map & ~padding.reshape(-1, 1)
        load = routing_map.sum(dim=0)
        if self.switch.on and len(self.loads) < LIMIT:
            self.loads.append(load)
        # Not in place, because `loads` holds the same tensor.
        self.interval_load = load if self.interval_load is None else self.interval_load + load


#: How far a label may stand ahead of its token: itself, the next one as it should be, the one after it.
_AHEAD = range(3)
#: Share of labels that stand in a wrong place, and least share of those of the next token.
_SHIFTED, _RIGHT = 0.9, 0.5


@dataclass(eq=False)
class WatchedLoss:
    """The main loss of one model on the last pipeline stage, MTP not included, and its inputs."""

    switch: MeasuredSteps
    #: Per micro-batch: sum of the token losses under the mask, its sum, tokens, those in it, and `_labels`.
    found: list[Tensor] = field(default_factory=list)
    #: Per micro-batch: a number for each row of tokens, by which equal rows are known.
    rows: list[Tensor] = field(default_factory=list)
    #: The same of the whole step that was measured before.
    before: Tensor | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Collect what `model` returns if it is token losses [b, s]; logits have three dimensions."""
        model.register_forward_hook(self._on_model, with_kwargs=True)

    def _on_model(self, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        counts = self.switch.on and module.training and first_forward() and len(self.found) < LIMIT
        if not counts or not isinstance(output, Tensor) or output.dim() != 2:
            return
        losses = output.detach().double()
        mask = kwargs.get("loss_mask")
        mask = torch.ones_like(losses) if mask is None else mask.reshape(losses.shape).double()
        tokens = kwargs.get("input_ids", inputs[0] if inputs else None)
        numbers = [(losses * mask).sum(), mask.sum(), torch.ones_like(mask).sum(), (mask > 0).sum()]
        numbers += _labels(tokens, kwargs.get("labels"), mask)
        self.found.append(torch.stack([number.double() for number in numbers]))
        if tokens is not None:
            places = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
            self.rows.append((tokens.long() * (places * 0x9E3779B97F4A7C1 % 0x7FFFFFFF)).sum(-1))

    def totals(self) -> Tensor | None:
        """Sums of the step; of its rows how many could repeat, do, are, came before. None without loss."""
        if not self.found:
            return None
        rows = torch.cat(self.rows) if self.rows else self.found[0].new_zeros(0)
        again = 0 if self.before is None else int(torch.isin(rows, self.before).sum())
        self.before = rows
        counts = [rows.numel() - 1, rows.numel() - rows.unique().numel(), rows.numel(), again]
        return torch.cat([torch.stack(self.found).sum(0), self.found[0].new_tensor(counts)])

    def clear(self) -> None:
        self.found.clear()
        self.rows.clear()


def _labels(tokens: Tensor | None, labels: Tensor | None, mask: Tensor) -> list[Tensor]:
    """Number of labels under the mask, and for each of `_AHEAD` those that are the token so far ahead."""
    # At the borders of a context-parallel rank's parts the next token is another one.
    last = _AHEAD[-1]
    if tokens is None or labels is None or tokens.shape != labels.shape or labels.shape[-1] <= last:
        return [mask.new_zeros(())] * (1 + len(_AHEAD))
    length = labels.shape[-1] - last
    counted = mask.reshape(labels.shape)[..., :length] > 0
    equal = [labels[..., :length] == tokens[..., ahead : ahead + length] for ahead in _AHEAD]
    return [counted.sum(), *((counted & one).sum() for one in equal)]


def _norm_and_size(output: Any) -> tuple[Tensor, int]:
    x = (output[0] if isinstance(output, tuple) else output).detach()
    return torch.linalg.vector_norm(x, dtype=torch.float32), x.numel()


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
    layers: Sequence[WatchedLayer], loss: Tensor | None, unchanged: dict[str, Tensor], groups: Any
) -> tuple[Values, dict[str, float]]:
    """Values of all layers of all stages, and numbers of the run; the same on every rank. Collective.

    layers: those of this rank. loss: `WatchedLoss.totals` on ranks of the last stage. unchanged: by
    module [rows without a change, rows].
    """
    where = {ddp: gradient_places(ddp) for ddp in {layer.ddp() for layer in layers}}
    parts = [_layer_sums(layer, where[layer.ddp()], groups) for layer in layers]
    whole = unchanged if loss is None else {**unchanged, "loss": loss}
    _all_reduce([t for part in (*parts, whole) for t in part.values()], groups.tp_cp)
    worst = [_by_micro_batch(part, len(layer.rows)) for layer, part in zip(layers, parts)]
    _all_reduce([t for part in (*parts, whole) for t in part.values()], groups.dp)
    _all_reduce([w for w in worst if w is not None], groups.dp, torch.distributed.ReduceOp.MAX)
    values: Values = {}
    for layer, part, w in zip(layers, parts, worst):
        _add_values(values, layer, part, w)
    for name, (rows, of) in unchanged.items():
        values.setdefault("unchanged_weights", {})[name] = float(rows / of)
    zeros = [sum(float(part["zeros"][i]) for part in parts if "zeros" in part) for i in (0, 1)]
    of_run = _router_numbers(layers, parts)
    if "loss" in whole:
        total, tokens, places, counted, *of_inputs = whole["loss"].tolist()
        of_run["loss_tokens"] = tokens / groups.tp.size()  # each of these ranks has all losses
        of_run["loss_share"] = counted / places
        if tokens > 0:
            of_run["lm_loss"] = total / tokens
        of_run |= _of_inputs(of_inputs)
    return _over_stages(values, zeros, of_run, groups.pp)


def _of_inputs(sums: Sequence[float]) -> dict[str, float]:
    """How far labels are ahead of tokens, and whether a rank's rows are equal (1), or came before (2)."""
    # A rank without tokens, or with one row, cannot say; it has the values of a healthy run.
    labels, own, right, after, repeatable, repeated, rows, again = sums
    shifted = right < _RIGHT * labels and max(own, after) >= _SHIFTED * labels
    return {
        "labels_ahead": 1.0 if not shifted else 0.0 if own > after else 2.0,
        "equal_rows": 1.0 if 0 < repeatable == repeated else 2.0 if 0 < rows == again else 0.0,
    }


def _router_numbers(layers: Sequence[WatchedLayer], parts: Sequence[_LayerSums]) -> dict[str, float]:
    """Numbers that the rules need: the same for all MoE layers, but for depths that share one."""
    found: dict[str, float] = {}
    for layer, part in zip(layers, parts):
        if "interval" not in part:
            continue
        tokens = float(part["interval"].sum()) / layer.router.topk
        found["experts"], found[f"top_k/{layer.name}"] = part["interval"].numel(), layer.router.topk
        found["interval_tokens"] = min(tokens, found.get("interval_tokens", tokens))
        if getattr(layer.router, "expert_bias", None) is not None:
            found["bias_update_rate"] = layer.router.config.moe_router_bias_update_rate
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
        part["zeros"] = _zero_gradients(layer.module, where, groups)
    return part


def _zero_gradients(module: torch.nn.Module, where: GradientPlaces, groups: Any) -> Tensor:
    """Count exact zeros in this rank's part of the gradients of `module`: [zeros, elements], float64."""
    found = torch.zeros(2, dtype=torch.float64, device=next(module.parameters()).device)
    for parameter in module.parameters():
        if (gradient := local_gradient(parameter, where, groups)) is not None:
            found[0] += gradient.numel() - torch.count_nonzero(gradient)
            found[1] += gradient.numel()
    return found


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
