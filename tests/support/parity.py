"""Our model and transformers' NemotronHForCausalLM on the same random weights and tokens, FP32 on the CPU.

OMP_NUM_THREADS=1 python -m tests.support.parity     # the table of docs/measurements.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.model_mapping import (
    megatron_model,
    randomize,
    to_transformers,
    transformers_model,
    unclamped,
)
from tests.support.world import world_of_one

#: More than two chunks of 128 tokens, and not a multiple of one.
TOKENS, BATCH = 300, 2
LOGITS_ATOL = 1e-4
#: Relative to the norm of each gradient.
GRADIENT_RTOL = 1e-3
#: A selected and a rejected expert may be swapped if they are closer than twice the difference of a score
#: between the two sides. That difference is up to 2e-6 (this module prints it); the bound is twice as large.
ROUTING_MARGIN = 1e-5
#: Weights and tokens of each tiny form. Those with experts were chosen for a routing margin above the bound;
#: some forms are the same model under two names, so the seeds differ. Models that are not here have a form
#: that is.
SEEDS = {
    "nano": 24,
    "super": 9,
    "ultra": 22,
    "lightning": 8,
    "nano-4b": 6,
    "nano-9b-v2": 7,
    "nemotron-h-8b": 10,
    "puzzle": 11,
}


@dataclass(frozen=True)
class Comparison:
    """Results of both sides for the same weights and tokens; gradients have transformers' names."""

    model: Nemotron3Config
    logits: Tensor
    expected_logits: Tensor
    #: Smallest gap between the last selected and the best rejected expert; inf without experts.
    routing_margin: float
    #: Largest absolute difference of a routing score (sigmoid of a router logit); 0 without experts.
    score_difference: float
    loss: float = math.nan
    expected_loss: float = math.nan
    gradients: dict[str, Tensor] = field(default_factory=dict)
    expected_gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def logits_difference(self) -> float:
        """Largest absolute difference."""
        return (self.logits - self.expected_logits).abs().max().item()

    @property
    def gradient_differences(self) -> dict[str, float]:
        """Relative difference (norms) of each parameter's gradient."""
        return relative_differences(self.gradients, self.expected_gradients)


def relative_differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """|found - expected| / |expected| of tensors of the same names."""
    return {n: ((found[n] - e).norm() / e.norm()).item() for n, e in expected.items()}


def without_mtp(model: Nemotron3Config) -> Nemotron3Config:
    """The model as transformers builds it."""
    return model.but(mtp_pattern=None, mtp_num_layers=0)


def oracle(model: Nemotron3Config, weights: dict[str, Tensor]) -> Any:
    """transformers' model with `weights`, which must contain each of its tensors exactly once."""
    settings = {"_attn_implementation": "eager", "_experts_implementation": "eager"}
    result = transformers_model(model, **settings).eval()
    result.load_state_dict(weights, strict=True)
    return unclamped(result)


def weights_of(ours: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict without `_extra_state` entries, which TE would fill and which are None here."""
    return {name: t for name, t in ours.state_dict().items() if t is not None}


def text(model: Nemotron3Config, batch: int = BATCH, tokens: int = TOKENS, seed: int = 11) -> Tensor:
    """Random ids [batch, tokens + 1]."""
    return torch.randint(model.vocab_size, (batch, tokens + 1), generator=torch.Generator().manual_seed(seed))


def forward(ours: Any, ids: Tensor, labels: Tensor | None = None) -> Tensor:
    """Logits [b, s, vocabulary] of ids [b, s], or with labels the loss of each token [b, s]."""
    positions = torch.arange(ids.shape[1]).expand(*ids.shape)
    result: Tensor = ours(ids, positions, None, labels=labels)
    return result


def loss_and_gradients(theirs: Any, ids: Tensor) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits [b, s, vocabulary] of ids [b, s + 1] without the last, mean loss, parameter gradients."""
    theirs.zero_grad()
    logits = theirs(ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.item(), {n: p.grad.clone() for n, p in theirs.named_parameters()}


@contextmanager
def router_logits(ours: torch.nn.Module, theirs: torch.nn.Module) -> Iterator[list[tuple[Any, Tensor]]]:
    """Collect (router, logits [b * s, N]) of every router call on both sides."""
    calls: list[tuple[Any, Tensor]] = []
    routers = [module for module in ours.modules() if hasattr(module, "expert_bias")]
    gates = [module for module in theirs.modules() if hasattr(module, "e_score_correction_bias")]

    def watch(router: Any) -> None:
        routing = router.routing

        def note(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((router, logits.detach().transpose(0, 1).flatten(0, 1)))  # [s, b, N] as they have it
            return routing(logits, *args, **kwargs)

        router.routing = note

    for router in routers:
        watch(router)
    hooks = [g.register_forward_hook(lambda gate, _, out: calls.append((gate, out[0]))) for g in gates]
    try:
        yield calls
    finally:
        for router in routers:
            del router.routing  # the class's method shows again
        for hook in hooks:
            hook.remove()


def routing(calls: list[tuple[Any, Tensor]]) -> tuple[float, float]:
    """Smallest margin and largest difference of a score, from what `router_logits` collected."""
    first = calls[: len(calls) // 2]
    margins, differences = [math.inf], [0.0]
    for (router, logits), (_, expected) in zip(first, calls[len(first) :], strict=True):
        scores = logits.sigmoid()
        differences.append((scores - expected.sigmoid()).abs().max().item())
        if router.topk < scores.shape[1]:
            ranked = (scores + router.expert_bias).topk(router.topk + 1, dim=-1).values
            margins.append((ranked[:, -2] - ranked[:, -1]).min().item())
    return min(margins), max(differences)


def compare(
    model: Nemotron3Config, *, seed: int = 6, batch: int = BATCH, tokens: int = TOKENS, gradients: bool = True
) -> Comparison:
    """Run both sides inside `world_of_one`.

    Args:
        model: has no MTP.
        seed: of the weights and of the tokens.
        gradients: of the mean cross-entropy, for every parameter.
    """
    ours = megatron_model(model).eval()
    randomize(ours, seed)
    theirs = oracle(model, to_transformers(weights_of(ours), model))
    ids = text(model, batch, tokens, seed + 5)
    with torch.no_grad(), router_logits(ours, theirs) as calls:
        seen = Comparison(model, forward(ours, ids[:, :-1]), theirs(ids[:, :-1]).logits, *routing(calls))
    if not gradients:
        return seen
    loss = forward(ours, ids[:, :-1], ids[:, 1:].contiguous()).mean()
    loss.backward()
    found = to_transformers({n: p.grad for n, p in ours.named_parameters()}, model)
    _, expected_loss, expected = loss_and_gradients(theirs, ids)
    return replace(
        seen,
        loss=loss.item(),
        expected_loss=expected_loss,
        gradients=found,
        expected_gradients=expected,
    )


def rounding_floor(model: Nemotron3Config, *, seed: int = 6) -> tuple[float, float]:
    """Change of transformers' results when every weight changes by half a unit in the last place of FP32.

    No two implementations that round at different places can be asked to agree better than about this.

    Returns:
        Largest absolute change of the logits, largest relative change of a gradient.
    """
    ours = megatron_model(model)
    randomize(ours, seed)
    theirs = oracle(model, to_transformers(weights_of(ours), model))
    ids = text(model, seed=seed + 5)
    logits, _, gradients = loss_and_gradients(theirs, ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in theirs.parameters():
            p *= 1 + 2.0**-24 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    moved, _, moved_gradients = loss_and_gradients(theirs, ids)
    change = relative_differences(moved_gradients, gradients)
    return (moved - logits).abs().max().item(), max(change.values())


def main() -> None:
    """Print the table: per catalog model, differences seen, the rounding floor, the tolerance."""
    print("| tiny form of | logits | floor | worst gradient | of | floor | routing scores | routing margin |")
    print("|-|-|-|-|-|-|-|-|")
    with world_of_one():
        for name in SEEDS:
            seen = compare(model := without_mtp(get(f"{name}-tiny")), seed=SEEDS[name])
            floor = rounding_floor(model, seed=SEEDS[name])
            worst, parameter = max((d, n) for n, d in seen.gradient_differences.items())
            cells = [seen.logits_difference, floor[0], worst, parameter, floor[1]]
            cells += [seen.score_difference, seen.routing_margin]
            line = " | ".join(f"`{c}`" if isinstance(c, str) else f"{c:.1e}" for c in cells)
            print(f"| {name} | {line} |", flush=True)
    print(f"| tolerance | {LOGITS_ATOL:.0e} | | {GRADIENT_RTOL:.0e} | | | | > {ROUTING_MARGIN:.0e} |")


if __name__ == "__main__":
    main()
