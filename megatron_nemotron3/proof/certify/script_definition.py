"""The script's own steps by definition: what one process logged, clipped and evaluated, and its weights after
each step, against the definition of the batches that it drew.

A fault of the training loop that every layout has (a logged number, a schedule that the optimizer does not
follow, targets that are not the next tokens) shows here alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.files import atomic
from megatron_nemotron3.launch.continued import Schedule
from megatron_nemotron3.models.definition import shifted
from megatron_nemotron3.proof.certify import observer
from megatron_nemotron3.proof.certify.bench import Finding, failed, passed
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.compare import Distance, verdict
from megatron_nemotron3.proof.certify.definition import (
    OPTIMIZER,
    ModelWatch,
    chosen,
    plain_arguments,
    unwritten_model,
    unwritten_of,
    worst_of,
)
from megatron_nemotron3.proof.certify.plain_step import (
    AdamW,
    DefinedStep,
    Objective,
    define,
    moved_bias,
    norm_of,
)
from megatron_nemotron3.proof.certify.script_result import ScriptResult
from megatron_nemotron3.proof.certify.tensors import Tensors
from megatron_nemotron3.train.log import RATE, Curve, LogStep

WHERE = "one process, by definition"
#: Names of the losses of routers in the log.
_LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z": "z_loss",
}
_FILE = "batches.pt"


class _Calls:
    """Calls of the model in one step, or in one evaluation."""

    def __init__(self, calls: Sequence[Mapping[str, Any]]) -> None:
        self.batch = {name: torch.cat([c[name] for c in calls]) for name in ("tokens", "labels", "loss_mask")}
        self.rows = [row for c in calls for row in [c["documents"]] * len(c["tokens"])]
        self.choices: dict[str, list[Tensor]] = {
            layer: [torch.cat(same) for same in zip(*(c["choices"][layer] for c in calls), strict=True)]
            for layer in calls[0]["choices"]
        }


def defined(
    case: TrainingCase, start: Tensors, run: ScriptResult, folder: Path
) -> tuple[ScriptResult | None, list[Finding]]:
    """Return the two steps of one process's run by definition, as its log would show them; and findings of
    what has no counterpart in another run. None where the definition is not written for the launch.

    Args:
        start: the weights that the run began with.
        folder: of the run.
    """
    noted = torch.load(folder / _FILE, weights_only=True)
    args = SimpleNamespace(**noted["args"])
    if unwritten_model(args, case.config.is_moe):
        return None, []  # the stage of the definition has said it
    objective, calls = Objective.of(args), noted["batches"]
    stepped = not unwritten_of(args, OPTIMIZER)
    steps = [_Calls([c for c in calls if c["step"] == n and c["training"]]) for n in (1, 2)]
    found = [_targets(steps), _counts(run, args.global_batch_size)]
    optimizer, before, own = AdamW(objective), start, start
    result, distances, first = ScriptResult({}, Curve()), list[Distance](), dict[str, float]()
    for number, step in enumerate(steps, 1):
        by = define(case, objective, before, step.batch, step.choices, step.rows)
        samples = [(number - 1 + n) * args.global_batch_size for n in (0, 1)]
        rates = [rate_of(args, n, args.lr, args.min_lr) for n in samples]
        optimizer.objective = replace(
            objective,
            lr=rates[0],
            edge_lr=_edge_rate(args, samples[0], rates[0]),
            decay=decay_of(args, samples[0]),
        )
        own, _ = optimizer.step(own, run.gradients(number), 0.0)
        biases = {
            k: _bias(objective, k, b, step.choices) for k, b in before.items() if k.endswith("expert_bias")
        }
        after = (own if stepped else run.weights(number)) | biases
        norm = norm_of(by.gradients)
        scale = min(1.0, args.clip_grad / (norm + 1e-6)) if args.clip_grad else 1.0
        result.seen[number, observer.GRADIENTS] = {key: g * scale for key, g in by.gradients.items()}
        result.seen[number, observer.WEIGHTS] = after
        logged = run.curve.steps[number].values
        losses = {"lm loss": by.loss} | {f"mtp_{depth} loss": loss for depth, loss in enumerate(by.mtp, 1)}
        if not case.config.is_moe:
            losses = {name: _in_line(loss, name, first, logged) for name, loss in losses.items()}
        first = first or losses
        values = losses | {"grad norm": norm, RATE: rates[1]} | _of_routers(by, logged, args)
        values |= {"params norm": norm_of(result.weights(number))} if "params norm" in logged else {}
        result.curve.steps[number] = LogStep(number, 2, values)
        before = run.seen[number, observer.WEIGHTS]
        distances += chosen(by.routings, step.choices)
        evaluation = [c for c in calls if c["step"] == number and not c["training"]]
        # After the end of training Megatron evaluates on the next batches, too.
        evaluation = evaluation[: args.global_batch_size // args.micro_batch_size]
        if evaluation and number in run.curve.validation:
            step = _Calls(evaluation)
            by = define(case, objective, before, step.batch, step.choices, step.rows)
            result.curve.validation[number] = by.loss
            distances += chosen(by.routings, step.choices)
    return result, [*found, *(verdict(one, WHERE) for one in worst_of(distances))]


def _targets(steps: Sequence[_Calls]) -> Finding:
    """Whether the label of each token that counts is the next token of its document."""
    for step in steps:
        for i, row in enumerate(step.rows):
            tokens, labels, mask = (step.batch[name][i : i + 1] for name in ("tokens", "labels", "loss_mask"))
            inside = shifted(torch.ones_like(tokens), row, 1).bool() & mask.bool()
            wrong = inside & (labels != shifted(tokens, row, 1))
            if wrong.any():
                place = int(wrong.flatten().nonzero()[0])
                return failed("targets", WHERE, f"the label of token {place} of a row is not the next token")
    return passed("targets", WHERE, "the label of each token is the next one")


def _counts(run: ScriptResult, sequences: int) -> Finding:
    """Whether the log counts the samples, and no step that was left out."""
    for number, step in run.curve.steps.items():
        expected = {"consumed samples": number * sequences, "number of skipped iterations": 0}
        expected["number of nan iterations"] = 0
        for name, value in expected.items():
            if step.values.get(name, value) != value:
                return failed("counts of the log", WHERE, f"{name}: {step.values[name]:.0f}, not {value}")
    return passed("counts of the log", WHERE)


def _in_line(loss: float, name: str, first: Mapping[str, float], logged: Mapping[str, float]) -> float:
    """A loss, or the mean with the first step: Megatron's second line, where monitors do not correct it."""
    return min((loss, (first.get(name, loss) + loss) / 2), key=lambda value: abs(value - logged[name]))


def _of_routers(by: DefinedStep, logged: Mapping[str, float], args: Any) -> dict[str, float]:
    """Losses of the routers as they are logged: means over layers, of which each version counts others."""
    found, depths = {}, args.mtp_num_layers or 0
    own = {layer: losses for layer, losses in by.routers.items() if not layer.startswith("mtp.")}
    counts = (len(own) + depths, args.hybrid_layer_pattern.count("E") + depths)
    for kind, name in _LOGGED.items():
        sums = [sum(losses.get(kind, 0.0) for losses in some.values()) for some in (own, by.routers)]
        if name in logged:
            found[name] = min(
                (s / n for s in sums for n in counts), key=lambda mean: abs(mean - logged[name])
            )
    return found


def _bias(objective: Objective, key: str, bias: Tensor, choices: Mapping[str, Sequence[Tensor]]) -> Tensor:
    counts = torch.stack([call.sum((0, 1)) for call in choices[key.removesuffix("mlp.router.expert_bias")]])
    return bias + (moved_bias(objective, torch.zeros_like(bias), counts.sum(0))).float()


def rate_of(args: Any, samples: int, most: float, least: float) -> float:
    """The learning rate after so many samples, with Megatron's arguments for a run by iterations."""
    batch, length = args.global_batch_size, args.lr_decay_iters or args.train_iters
    schedule = Schedule(
        unit="iters",
        train=args.train_iters,
        batch=batch,
        lr=most,
        min_lr=least,
        init=args.lr_warmup_init,
        warmup=(args.lr_warmup_fraction or 0) * length * batch,
        decay_end=length * batch,
        wsd_decay=args.lr_wsd_decay_iters and args.lr_wsd_decay_iters * batch,
        style=args.lr_decay_style,
        wsd_style=args.lr_wsd_decay_style,
    )
    return schedule.rate(samples)


def _edge_rate(args: Any, samples: int, rate: float) -> float:
    """The rate of embedding and output layer."""
    if args.decoupled_lr is None:
        return rate
    least = args.min_lr if args.decoupled_min_lr is None else args.decoupled_min_lr
    return rate_of(args, samples, args.decoupled_lr, least)


def decay_of(args: Any, samples: int) -> float:
    """The weight decay after so many samples."""
    start, end = args.start_weight_decay, args.end_weight_decay
    done = min(1.0, samples / (args.train_iters * args.global_batch_size))
    shapes = {"constant": 1.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
    return float(start + (end - start) * shapes[args.weight_decay_incr_style])


# What follows runs on the ranks.


class BatchWatch:
    """Notes what the model gets and chooses in each call, on one rank that holds all of it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE
        self._watch: ModelWatch | None = None
        self._calls: list[dict[str, Any]] = []
        self._step = 1

    def install(self) -> None:
        """Look from now on, until the process ends."""
        torch.nn.modules.module.register_module_forward_pre_hook(self._find)

    def _find(self, module: torch.nn.Module, _inputs: object) -> None:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        if self._watch is None and not isinstance(module, HybridModel):
            for part in module.modules():
                if isinstance(part, HybridModel):  # a wrapper of it: its own hooks are not read yet
                    self._watch = ModelWatch(part)
                    part.register_forward_pre_hook(self._before, with_kwargs=True)
                    part.register_forward_hook(self._after)
                    return

    def _before(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens, labels = inputs[0] if inputs else named["input_ids"], named["labels"]
        mask = named.get("loss_mask")
        packed = named.get("packed_seq_params")
        documents = [tokens.shape[1]]
        if packed is not None:
            from megatron_nemotron3.layers.context_parallel import cu_seqlens

            ends = [0, *cu_seqlens(packed).flatten().tolist(), tokens.shape[1]]
            documents = [b - a for a, b in zip(ends, ends[1:], strict=False) if b > a]
        call = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": torch.ones_like(labels) if mask is None else mask,
        }
        self._calls.append(
            {k: t.detach().clone() for k, t in call.items()}
            | {
                "documents": documents,
                "training": module.training,
                "step": self._step - (not module.training),
            }
        )

    def _after(self, *_: object) -> None:
        assert self._watch is not None
        self._calls[-1]["choices"] = self._watch.take(1)[0]
        if not self._calls[-1]["training"]:
            self._write()

    def write(self) -> None:
        """Write what was seen up to the step that the optimizer is about to make."""
        self._step += 1
        self._write()

    def _write(self) -> None:
        from megatron.training import get_args

        with atomic(self._file) as part:
            torch.save({"args": plain_arguments(get_args()), "batches": self._calls}, part)
