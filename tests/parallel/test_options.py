"""Options that save memory or divide the optimizer otherwise: the numbers of a plain run on one rank.

What Megatron refuses on a CPU, and what it computes wrongly with FSDP, is tested to be so still:
docs/measurements.md lists it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.compare import reference, weights
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import RanksDiffer
from megatron_nemotron3.proof.certify.world import train
from tests.parallel.compare import check
from tests.parallel.layouts import CASES
from tests.properties.entries import case
from tests.properties.measure import attempts, nothing
from tests.properties.step import Refusal

_L = ParallelLayout
_FULL = ("--recompute-granularity", "full", "--recompute-method")
_SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
_INSTANCES = ("--num-distributed-optimizer-instances", "2")
_FSDP = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy")
_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
_HSDP = (*_FSDP, "optim_grads_params", *_INSTANCES)
_OUTER = (*_HSDP, *_OVERLAP, "--outer-dp-sharding-strategy", "optim")
_UNIFORM = (*_FULL, "uniform", "--recompute-num-layers", "1")


@dataclass(frozen=True)
class Option:
    """Megatron's words in a layout, for a model of `CASES`."""

    model: str
    layout: ParallelLayout
    words: tuple[str, ...]
    quick: bool = False


OPTIONS: dict[str, Option] = {
    "full, uniform": Option("super", _L(tp=2, pp=2), _UNIFORM),
    "full, block": Option("super", _L(pp=2, vpp=2), (*_FULL, "block", "--recompute-num-layers", "1")),
    "full, CP": Option("super", _L(cp=2), _UNIFORM),
    "core_attn": Option("super", _L(cp=2), (*_SELECTIVE, "core_attn")),
    "mlp": Option("dense", _L(tp=2), (*_SELECTIVE, "mlp")),
    "moe": Option("nano", _L(dp=2, ep=2), (*_SELECTIVE, "moe")),
    "shared_experts": Option("super", _L(tp=2, ep=2), (*_SELECTIVE, "shared_experts")),
    # The dispatcher's exchanges are repeated on every rank, in the order of the others.
    "all modules": Option("super", _L(tp=2, ep=2), (*_SELECTIVE, "core_attn", "moe"), quick=True),
    "all modules, PP": Option(
        "super", _L(tp=2, pp=2, ep=2), (*_SELECTIVE, "core_attn", "moe", "shared_experts")
    ),
    "optimizer instances": Option("super", _L(dp=4), _INSTANCES),
    "optimizer instances, EP": Option("super", _L(dp=4, ep=2), _INSTANCES, quick=True),
    "optimizer instances, overlap": Option("nano", _L(dp=4, ep=2), (*_INSTANCES, *_OVERLAP)),
    # Divided: the optimizer's state, also the gradients, also the weights.
    "FSDP optim": Option("nano", _L(dp=2), (*_FSDP, "optim")),
    "FSDP optim_grads": Option("nano", _L(dp=2), (*_FSDP, "optim_grads")),
    "FSDP optim_grads_params": Option("nano", _L(dp=4), (*_FSDP, "optim_grads_params")),
    "FSDP optim, EP": Option("super", _L(dp=2, ep=2), (*_FSDP, "optim")),
    "FSDP optim_grads, EP": Option("nano", _L(dp=4, ep=2), (*_FSDP, "optim_grads")),
    "FSDP optim_grads_params, EP": Option(
        "super", _L(dp=4, ep=2), (*_FSDP, "optim_grads_params"), quick=True
    ),
    "FSDP, overlap": Option("super", _L(dp=4, ep=2), (*_FSDP, "optim_grads_params", *_OVERLAP)),
    "FSDP, TP": Option("super", _L(tp=2, dp=2, ep=2), (*_FSDP, "optim_grads_params")),
    "FSDP, CP": Option("super", _L(cp=2, dp=2), (*_FSDP, "optim_grads_params")),
    "FSDP, recompute": Option("nano", _L(dp=2), (*_FSDP, "optim_grads_params", *_UNIFORM)),
    "FSDP optim, recompute": Option("super", _L(dp=2), (*_FSDP, "optim", *_UNIFORM)),
    "FSDP optim, expert DP 1": Option("nano", _L(dp=2, ep=2), (*_FSDP, "optim")),
    "HSDP": Option("super", _L(dp=4), (*_HSDP, *_OVERLAP)),
    "HSDP, EP": Option("super", _L(dp=4, ep=2), (*_HSDP, *_OVERLAP)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if option.quick else pytest.mark.full, id=n) for n, option in OPTIONS.items()],
)
def test_option_equals_the_plain_run(name: str) -> None:
    """Losses, gradients, weights after three steps, expert biases."""
    option = OPTIONS[name]
    one = CASES[option.model]
    check(one, one.at(option.layout, *option.words))


def test_what_megatron_refuses_on_a_cpu() -> None:
    """docs/measurements.md has the reasons; moment types and `layernorm` are in tests/properties."""
    offloaded = ("--use-precision-aware-optimizer", "--optimizer-cpu-offload")
    runs = {
        "can't optimize a non-leaf Tensor": case(None, *offloaded, "--optimizer-offload-fraction", "1.0"),
        "only supported with transformer_engine implementation": case(
            None, "--fine-grained-activation-offloading", "--offload-modules", "moe_act"
        ),
    }
    found = run_distributed(attempts, 1, list(runs.values()), [nothing] * len(runs))[0]
    for message, result in zip(runs, found, strict=True):
        assert isinstance(result, Refusal) and message in result.message, result


#: A rule of the same name refuses it: what it says must be wrong with it.
WRONG: dict[str, tuple[Option, str]] = {
    # The buffer of a parameter that is not divided is scaled once for every micro-batch.
    "fsdp-expert-dp": (
        Option("nano", _L(dp=2, ep=2), (*_FSDP, "optim_grads")),
        r"gradients differ \([^)]*experts",
    ),
    # The weights of MTP are used once per depth, and each use reduces their gradients.
    "fsdp-mtp-recompute": (
        Option("super", _L(dp=2), (*_FSDP, "optim_grads", *_UNIFORM)),
        r"gradients differ \(mtp",
    ),
    # Only the last micro-batch of an overlapped reduction sums over the copies of the model.
    "hsdp-overlap": (Option("super", _L(dp=4), _HSDP), "ranks report different (losses|norms)"),
    # The norm of each instance's part of the gradients.
    "hsdp-outer-norm": (Option("super", _L(dp=4), _OUTER), "ranks report different norms"),
}


@pytest.mark.full
@pytest.mark.parametrize("rule", WRONG)
def test_fsdp_computes_something_else(rule: str) -> None:
    option, message = WRONG[rule]
    one = CASES[option.model]
    with pytest.raises((AssertionError, RanksDiffer), match=message):
        check(one, one.at(option.layout, *option.words, against_rules=True))


@pytest.mark.full
def test_sharding_over_instances_is_right_without_clipping() -> None:
    """The cure that rule hsdp-outer-norm names. Losses of three steps, and the sum of the squared gradients;
    which element is whose, the comparison does not know for shards of shards."""
    plain = CASES["super"].at(_L(), "--clip-grad", "0")
    one, many = reference(plain), train(plain.at(_L(dp=4), *_OUTER), weights(plain))
    assert many.losses == pytest.approx(one.losses, rel=1e-5)
    norms = [float(sum(g.double().square().sum() for g in run.gradients.values())) for run in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
