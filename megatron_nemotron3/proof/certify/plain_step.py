"""One step of training in FP64: `models.definition`, the loss that a command line defines, and AdamW.

The formulas are those that Megatron documents: of the load-balancing losses in
`switch_load_balancing_loss_func` (arXiv 2101.03961, 2501.11873), of the z-loss arXiv 2202.08906, of the
weights of MTP arXiv 2412.19437, of the expert bias arXiv 2408.15664, of AdamW arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.plan import apply
from megatron_nemotron3.common.processes import one_thread
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.definition import Definition, Forward, Routing, shifted
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.tensors import Tensors

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Objective:
    """What is minimized, and how, in the numbers of Megatron's arguments."""

    #: Divide by the tokens of the global batch instead of averaging the means of micro-batches.
    per_token: bool
    #: Weight of the mean of MTP's losses.
    mtp: float
    #: (kind, coefficient) of the load-balancing losses: "aux_loss", "seq_aux_loss", "global_aux_loss".
    balance: tuple[tuple[str, float], ...]
    z: float
    bias_rate: float
    lr: float
    #: Of embedding and output layer.
    edge_lr: float
    betas: tuple[float, float]
    epsilon: float
    decay: float

    @classmethod
    def of(cls, args: Any) -> Objective:
        kinds, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
        if not isinstance(kinds, (list, tuple)):
            kinds = [kinds]
        if not isinstance(coefficients, (list, tuple)):
            coefficients = [coefficients] * len(kinds)
        return cls(
            per_token=args.calculate_per_token_loss,
            mtp=args.mtp_loss_scaling_factor,
            balance=tuple(
                (kind, c) for kind, c in zip(kinds, coefficients) if c and kind.endswith("aux_loss")
            ),
            z=args.moe_z_loss_coeff or 0.0,
            bias_rate=args.moe_router_bias_update_rate,
            lr=args.lr,
            edge_lr=args.lr if args.decoupled_lr is None else args.decoupled_lr,
            betas=(args.adam_beta1, args.adam_beta2),
            epsilon=args.adam_eps,
            decay=args.weight_decay,
        )


@dataclass
class DefinedStep:
    """One step by its definition."""

    #: Per token of the global batch; and the mean over micro-batches for each MTP depth.
    loss: float
    mtp: list[float]
    #: [sequences, s, v], of the decoder and of each MTP depth.
    logits: list[Tensor]
    gradients: Tensors
    routings: list[Routing]
    #: Layer -> (kind of a loss of its router, or "z") -> the mean over micro-batches, without coefficient.
    routers: dict[str, dict[str, float]]


@one_thread()
def define(
    case: TrainingCase,
    objective: Objective,
    weights: Tensors,
    batch: Mapping[str, Tensor],
    choices: Mapping[str, Sequence[Tensor]],
    rows: Sequence[Sequence[int]] = (),
) -> DefinedStep:
    """Compute one step.

    Args:
        weights: of the whole model by checkpoint key.
        choices: the experts that the routers chose elsewhere, by layer, call by call, a mask [b, s, e] each.
            They are taken, because between two nearly equal experts rounding decides.
        rows: lengths of the documents of each row; default: those of the case.
    """
    sequences = len(batch["tokens"])
    rows = rows or [case.documents or (case.seq_length,)] * sequences
    alike = all(row == rows[0] for row in rows)
    groups = [slice(0, sequences)] if alike else [slice(i, i + 1) for i in range(sequences)]
    # Expert biases have no gradient.
    parameters = {
        key: t.double().requires_grad_(not key.endswith("expert_bias")) for key, t in weights.items()
    }
    model = Definition(case.config, by_hf_name(case.config, parameters).__getitem__, torch.float64)
    passes = [_passed(model, batch["tokens"], group, rows, choices) for group in groups]
    every_logits = [torch.cat(same) for same in zip(*(one.logits for one in passes))]
    routings = [_joined(same) for same in zip(*(one.routings for one in passes))]
    depths = len(every_logits) - 1

    def ahead_of(name: str, by: int) -> Tensor:
        return torch.cat([shifted(batch[name][group], rows[group.start], by) for group in groups])

    # [sequences, s] of the decoder and of each depth: loss of every token, and whether it counts.
    losses, masks = [], []
    for ahead, logits in enumerate(every_logits):
        chosen = logits.gather(-1, ahead_of("labels", ahead)[..., None]).squeeze(-1)
        losses.append(logits.logsumexp(-1) - chosen)
        masks.append(ahead_of("loss_mask", ahead).double())
    size = case.micro_batch_size
    parts = [slice(first, first + size) for first in range(0, sequences, size)]
    counted = masks[0].sum()
    # What the mean of a micro-batch weighs; and by Megatron, of the whole loss of its routers.
    shares = [masks[0][part].sum() / counted if objective.per_token else 1 / len(parts) for part in parts]
    tokens = batch["tokens"].numel() / len(parts)
    routed = tokens / counted if objective.per_token else 1 / len(parts)
    means = [[_mean(loss[part], mask[part]) for part in parts] for loss, mask in zip(losses, masks)]
    total = torch.zeros((), dtype=torch.float64)
    for ahead, depth in enumerate(means):
        weight = objective.mtp / depths if ahead else 1.0
        total = total + weight * torch.stack([share * mean for share, mean in zip(shares, depth)]).sum()
    repeats = depths if case.config.mtp_use_repeated_layer else 1
    noted: dict[str, dict[str, float]] = {}
    total += routed * _of_routers(objective, routings, parts, repeats, noted)
    trained = {key: t for key, t in parameters.items() if t.requires_grad}
    gradients = torch.autograd.grad(total, list(trained.values()), materialize_grads=True)
    return DefinedStep(
        loss=((losses[0] * masks[0]).sum() / counted).item(),
        mtp=[torch.stack(depth).mean().item() for depth in means[1:]],
        logits=[t.detach() for t in every_logits],
        gradients=dict(zip(trained, gradients)),
        routings=routings,
        routers=noted,
    )


def _passed(
    model: Definition,
    tokens: Tensor,
    group: slice,
    rows: Sequence[Sequence[int]],
    choices: Mapping[str, Sequence[Tensor]],
) -> Forward:
    """The forward pass of rows with the same documents."""
    calls = {layer: iter(masks) for layer, masks in choices.items()}

    def choose(routing: Routing) -> Tensor:
        mask = next(calls.get(routing.layer, iter(())), None)
        return routing.chosen if mask is None else mask[group].int().topk(routing.chosen.shape[-1]).indices

    return model(tokens[group], rows[group.start], choose=choose)


def _joined(calls: Sequence[Routing]) -> Routing:
    parts = zip(*((call.logits, call.ranked, call.chosen) for call in calls))
    return Routing(calls[0].layer, *map(torch.cat, parts))


def by_hf_name(config: Nemotron3Config, weights: Tensors) -> Tensors:
    """Return the weights by their Hugging Face names; the tables keep the padding of the vocabulary."""
    rows, result = len(weights[EMBEDDING]), Tensors()
    for mapping in inventory.mappings_of(config, weights, padded_vocab_size=rows):
        tables = {EMBEDDING, OUTPUT} & {t.name for t in mapping.megatron}
        if tables:
            result[mapping.hf[0].name] = weights[tables.pop()]
        else:
            result |= apply(mapping.to_hf(), {t.name: weights[t.name] for t in mapping.megatron})
    return result


def _mean(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def _of_routers(
    objective: Objective,
    routings: Sequence[Routing],
    parts: Sequence[slice],
    repeats: int,
    noted: dict[str, dict[str, float]],
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    layers: dict[str, list[Routing]] = {}
    for routing in routings:
        layers.setdefault(routing.layer, []).append(routing)
    for layer, calls in layers.items():
        weight = 1 / repeats if layer.startswith("mtp.") else 1.0
        seen = torch.zeros(calls[0].logits.shape[-1], dtype=torch.float64)
        for i, (part, call) in enumerate((part, call) for part in parts for call in calls):
            logits = call.logits[part]
            scores = logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
            topk = call.chosen.shape[-1]
            best = scores.topk(topk).indices
            chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
            seen = seen + chosen.sum((0, 1))
            for kind, coefficient in objective.balance:
                if kind == "seq_aux_loss":
                    loss = torch.stack([_balance(p, c.sum(0), topk) for p, c in zip(scores, chosen)]).mean()
                elif kind == "aux_loss":
                    loss = _balance(scores.flatten(0, 1), chosen.sum((0, 1)), topk)
                else:  # the average of what the router has seen in this step
                    loss = _balance(scores.flatten(0, 1), seen / (i + 1), topk)
                total = total + weight * coefficient * loss
                _add(noted.setdefault(layer, {}), kind, weight * loss / len(parts))
            z = logits.logsumexp(-1).square().mean()
            total = total + weight * objective.z * z
            _add(noted.setdefault(layer, {}), "z", weight * z / len(parts))
    return total


def _add(sums: dict[str, float], name: str, value: Tensor) -> None:
    sums[name] = sums.get(name, 0.0) + value.item()


def _balance(scores: Tensor, counts: Tensor, topk: int) -> Tensor:
    """E * sum_e (share of the choices that fell on e) * (mean score of e), for scores [t, e], counts [e]."""
    tokens, experts = scores.shape
    return experts * (counts / (tokens * topk) * scores.mean(0)).sum()


def moved_bias(objective: Objective, bias: Tensor, counts: Tensor) -> Tensor:
    """Return an expert bias after a step: it grows where an expert got fewer tokens than the mean."""
    return bias.double() + objective.bias_rate * (counts.double().mean() - counts.double()).sign()


def norm_of(tensors: Tensors) -> float:
    """Norm of all gradients or weights together."""
    return float(torch.stack([t.double().square().sum() for t in tensors.values()]).sum().sqrt())


class AdamW:
    """AdamW of parameters by checkpoint key."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.steps = objective, 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def step(self, weights: Tensors, gradients: Tensors, clip: float) -> tuple[Tensors, float]:
        """Return the weights after a step, and the norm of the gradients before they are clipped."""
        o = self.objective
        self.steps += 1
        norm = norm_of(gradients)
        scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        result: Tensors = {}
        first, second = o.betas
        for key, gradient in gradients.items():
            g, w = gradient.double() * scale, weights[key].double()
            m, v = self.moments.get(key, (torch.zeros_like(g), torch.zeros_like(g)))
            m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
            self.moments[key] = m, v
            lr = o.edge_lr if key in (EMBEDDING, OUTPUT) else o.lr
            # Biases and vectors (gains, A, D, dt) do not decay.
            decay = 0.0 if w.dim() == 1 or key.endswith(".bias") else o.decay
            update = (m / (1 - first**self.steps)) / ((v / (1 - second**self.steps)).sqrt() + o.epsilon)
            result[key] = w - lr * (update + decay * w)
        return result, norm
