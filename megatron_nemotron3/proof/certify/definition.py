"""One process against the definition of what it trains, written out in FP64.

A fault that every layout has (a shared expert added twice, MTP's loss counted per depth, a border between
documents that is ignored, a bias that weighs and not only chooses) shows here alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.models.definition import Routing
from megatron_nemotron3.proof.certify.bench import Bench, Finding, failed, last_line, untested
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.compare import (
    NUDGES,
    UNIT,
    Distance,
    farthest,
    nudged,
    numbers,
    spread,
    verdict,
)
from megatron_nemotron3.proof.certify.plain_step import AdamW, Objective, define, moved_bias, norm_of
from megatron_nemotron3.proof.certify.ranks import run_each
from megatron_nemotron3.proof.certify.tensors import Tensors, gather, load, pieces
from megatron_nemotron3.proof.certify.world import TrainingRun, build, global_batch, mtp_losses, randomized

#: Micro-batches of a step: more than one, and not all with the same number of counting tokens.
_MICROBATCHES = 3
#: By how much a chosen expert may rank behind another. Scores are below 1 and differ by rounding.
_TIE = 1e-4


@dataclass
class ObservedStep:
    """What one process did in a step."""

    loss: float
    mtp: list[float]
    norm: float
    #: Largest norm of the gradients that was set for this step; 0: not clipped.
    clip: float
    before: Tensors
    after: Tensors
    gradients: Tensors
    #: [sequences, s, v] of the decoder and of each MTP depth, by name.
    logits: Tensors
    #: Layer -> the choices of its router, call by call, [sequences, s, e].
    choices: dict[str, list[Tensor]]
    #: Largest difference of each that rounding explains.
    gradient_noise: Tensors
    logits_noise: Tensors


#: Megatron's arguments -> the values for which the model and its loss are written, where they are some.
_MODEL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "hidden_dropout": (0.0,),
    "use_mup": (False,),
    "mtp_detach_heads": (False,),
    "qk_layernorm": (False,),
    "qk_clip": (False,),
    "softmax_type": ("vanilla",),
    "attention_output_gate": (False,),
    "window_size": (None,),
}
_MOE: dict[str, tuple[Any, ...]] = {
    "moe_router_score_function": ("sigmoid",),
    "moe_router_num_groups": (None, 1),
    "moe_router_group_topk": (None, 1),
    "moe_router_load_balancing_type": (
        *("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        *(["none"], ["aux_loss"], ["seq_aux_loss"], ["global_aux_loss"]),
    ),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_input_jitter_eps": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
}
#: The same of the optimizer.
OPTIMIZER: dict[str, tuple[Any, ...]] = {"optimizer": ("adam",), "decoupled_weight_decay": (True,)}


def definition(bench: Bench) -> Iterator[Finding]:
    """Yield how one process compares with the definition: logits, losses, gradients, choices, optimizer.

    The same of one layer with as many experts as the launch has, of which a token chooses as many.
    """
    where = "one process, by definition"
    if bench.proxy.case.boost is not None:
        yield untested("definition", "the loss of MTP heads alone is not part of the definition", where)
        return
    tried = {where: bench}
    model, config = bench.proxy.model, bench.proxy.config
    if model.moe_layers is None and (model.num_moe_experts or 0) > (config.num_moe_experts or 0):
        whole = config.but(
            pattern="E",
            source=None,
            num_moe_experts=model.num_moe_experts,
            moe_router_topk=model.moe_router_topk,
        )
        proxy = replace(bench.proxy, config=whole, case=replace(bench.proxy.case, config=whole))
        tried[f"{model.num_moe_experts} experts, by definition"] = replace(bench, proxy=proxy)
    cases = [_case(one) for one in tried.values()]
    try:
        seen = run_each(_observe, [(case,) for case in cases], bench.timeout)
    except (RuntimeError, TimeoutError) as problem:
        yield failed("training", where, last_line(problem))
        return
    for place, case, (steps, args) in zip(tried, cases, seen, strict=True):
        yield from _defined(case, place, steps, SimpleNamespace(**args))


def _case(bench: Bench) -> TrainingCase:
    batch = bench.proxy.case
    return bench.case(
        None,
        sequences=_MICROBATCHES * batch.micro_batch_size,
        seq_length=sum(batch.documents or (batch.seq_length,)),
        mask="random",
    )


def _defined(
    case: TrainingCase, where: str, steps: Sequence[ObservedStep], args: SimpleNamespace
) -> Iterator[Finding]:
    if unwritten := unwritten_model(args, case.config.is_moe):
        yield untested("definition", unwritten, where)
        return
    if unwritten := unwritten_of(args, OPTIMIZER):
        yield untested("optimizer", unwritten, where)
    try:
        worst = worst_of(_compared(case, Objective.of(args), steps))
    except ValueError as problem:  # the names of the weights
        yield failed("tensors of the model", where, str(problem))
        return
    for distance in worst:
        if distance.what != "optimizer" or not unwritten:
            yield verdict(distance, where)


def worst_of(distances: Iterable[Distance]) -> list[Distance]:
    """Return the farthest of each property."""
    found: dict[str, Distance] = {}
    for distance in distances:
        worst = found.setdefault(distance.what, distance)
        if not distance.share <= worst.share:
            found[distance.what] = distance
    return list(found.values())


def unwritten_model(args: Any, moe: bool) -> str:
    """Say which argument of the model or its loss has a value for which nothing is written; "" for none."""
    return unwritten_of(args, _MODEL | (_MOE if moe else {}))


def unwritten_of(args: Any, values: dict[str, tuple[Any, ...]]) -> str:
    """Say which of Megatron's arguments has a value for which nothing is written; "" for none."""
    for name, written in values.items():
        if (given := getattr(args, name, written[0])) not in written:
            return f"--{name.replace('_', '-')} {given} is not part of the definition"
    return ""


def _compared(case: TrainingCase, objective: Objective, steps: Sequence[ObservedStep]) -> Iterator[Distance]:
    optimizer = AdamW(objective)
    for number, seen in enumerate(steps):
        batch = global_batch(case, number)
        defined = define(case, objective, seen.before, batch, seen.choices)
        yield from chosen(defined.routings, seen.choices)
        yield farthest("logits", _named(defined.logits), seen.logits, seen.logits_noise)
        yield numbers("losses", [defined.loss], [seen.loss])
        if defined.mtp:
            yield numbers("losses of MTP", defined.mtp, seen.mtp)
        yield farthest("gradients", defined.gradients, seen.gradients, seen.gradient_noise)
        yield from _biases(objective, seen)
        after, norm = optimizer.step(seen.before, seen.gradients, seen.clip)
        yield numbers("gradient norms", [norm], [seen.norm])
        # An update is at most the rate, but for the decay; each of its dozen operations is rounded once.
        rate = max(objective.lr, objective.edge_lr)
        allowed = {key: 16 * UNIT * (t.abs().max() + rate) for key, t in after.items()}
        yield farthest("optimizer", after, {key: seen.after[key] for key in after}, allowed)


def _named(logits: Sequence[Tensor]) -> Tensors:
    return {f"logits of depth {depth}" if depth else "logits": t for depth, t in enumerate(logits)}


def chosen(routings: Sequence[Routing], choices: Mapping[str, Sequence[Tensor]]) -> Iterator[Distance]:
    """Yield how far each router's choice ranks behind the best; infinite if it chose another number.

    choices: layer -> masks [b, s, e], call by call.
    """
    for routing in routings:
        gap, masks = _behind(routing), choices.get(routing.layer, ())
        others = any((mask.sum(-1) != routing.chosen.shape[-1]).any() for mask in masks)
        yield Distance("router choices", routing.layer, math.inf if others else max(0.0, gap) / _TIE, gap)


def _behind(routing: Routing) -> float:
    """By how much the best expert that was left out outranks the worst that was chosen, at most."""
    worst = routing.ranked.gather(-1, routing.chosen).amin(-1)
    best = routing.ranked.scatter(-1, routing.chosen, -torch.inf).amax(-1)
    return float((best - worst).max())


def _biases(objective: Objective, seen: ObservedStep) -> Iterator[Distance]:
    for layer, calls in seen.choices.items():
        key = f"{layer}mlp.router.expert_bias"
        if key not in seen.before:
            continue
        counts = sum(call.sum((0, 1)) for call in calls)
        assert isinstance(counts, Tensor)
        expected = moved_bias(objective, seen.before[key], counts)
        apart = float((expected - seen.after[key]).abs().max())
        allowed = 4 * UNIT * float(expected.abs().max())
        yield Distance("expert biases", key, apart / allowed if apart else 0.0, apart / objective.bias_rate)


# What follows runs on the one rank.


class ModelWatch:
    """What the routers and the output layer of a model give, while it is computed."""

    def __init__(self, model: Any) -> None:
        self.choices: dict[str, list[Tensor]] = {}
        self.logits: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith("mlp.router"):
                module.register_forward_hook(partial(self._note_choice, name.removesuffix("mlp.router")))
        model.output_layer.register_forward_hook(self._note_logits)

    def _note_choice(self, layer: str, module: Any, inputs: Any, output: Any) -> None:
        s, b = inputs[0].shape[:2]
        self.choices.setdefault(layer, []).append(output[1].bool().view(s, b, -1).transpose(0, 1).clone())

    def _note_logits(self, module: Any, inputs: Any, output: Any) -> None:
        self.logits.append(output[0].detach().transpose(0, 1).clone())

    def take(self, microbatches: int) -> tuple[dict[str, list[Tensor]], Tensors]:
        """Return choices and logits of so many micro-batches, and begin anew."""
        choices = {layer: _by_call(calls, microbatches) for layer, calls in self.choices.items()}
        *ahead, own = _by_call(self.logits, microbatches)  # Megatron computes MTP's first
        self.choices, self.logits = {}, []
        return choices, _named([own, *ahead])


def _by_call(noted: Sequence[Tensor], microbatches: int) -> list[Tensor]:
    calls = len(noted) // microbatches
    return [torch.cat(list(noted[call::calls])) for call in range(calls)]


def plain_arguments(args: Any) -> dict[str, Any]:
    """Return those of Megatron's arguments that a process without Megatron can read."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in vars(args).items() if isinstance(value, plain)}


def _observe(case: TrainingCase) -> tuple[list[ObservedStep], dict[str, Any]]:
    """Train, and measure at every step what it changes to move all weights to a neighboring float."""
    built = build(case)
    load(built[0], randomized(pieces(built[0])))
    run = TrainingRun(case, None, built)
    model = unwrapped(run.chunks[0])
    watch = ModelWatch(model)
    buffers = list(model.buffers())
    terms = case.sequences * case.seq_length
    steps = []
    for step in range(case.steps):
        before, state = gather([run.weights()]), [b.clone() for b in buffers]
        loss = run.forward_backward(step, whole_gradients=True)
        gradients, (choices, logits) = gather([run.gradients()]), watch.take(case.microbatches)
        mtp = [value / case.microbatches for value in mtp_losses()]
        clip = _set_clip(run, gradients, above=step % 2 == 0)
        norm = run.step()
        after, left = gather([run.weights()]), [b.clone() for b in buffers]
        moved: list[Tensors] = []
        moved_logits: list[Tensors] = []
        for seed in range(NUDGES):
            load(run.chunks, nudged(before, seed))
            _restore(buffers, state)
            run.forward_backward(step, whole_gradients=True)
            moved.append(gather([run.gradients()]))
            moved_logits.append(watch.take(case.microbatches)[1])
            mtp_losses()
        load(run.chunks, after)
        _restore(buffers, left)
        steps.append(
            ObservedStep(
                loss, mtp, norm, clip, before, after, gradients, logits, choices,
                gradient_noise=spread(gradients, moved, terms),
                logits_noise=spread(logits, moved_logits, terms),
            )
        )  # fmt: skip
    return steps, plain_arguments(run.args)


def _set_clip(run: TrainingRun, gradients: Tensors, above: bool) -> float:
    """Clip the gradients to half of their norm, or to twice of it; not if the launch does not clip them."""
    if not run.args.clip_grad:
        return 0.0
    clip = norm_of(gradients) * (0.5 if above else 2.0)
    for one in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        one.config.clip_grad = clip
    return clip


def _restore(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values):
        buffer.copy_(value)
