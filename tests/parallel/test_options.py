"""Every layout, and options that save memory or divide the optimizer otherwise: the numbers of one process.

Losses, gradients, three steps, expert biases. Each sabotage breaks a mark of a parameter, which the
comparison notices.

What Megatron refuses on a CPU, and what it computes wrongly with FSDP, is tested to be so still:
docs/measurements.md lists it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.proof.certify.compare import farthest, nudged, reference, tolerances, weights
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import RanksDiffer, gather
from megatron_nemotron3.proof.certify.world import train, train_each
from tests.parallel.compare import against, check
from tests.parallel.layouts import CASES, LAYOUTS, Layout, cases
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


def _of(model: str, sizes: ParallelLayout, words: tuple[str, ...]) -> Layout:
    """Megatron's words in a layout, for one model of `CASES`."""
    return Layout(sizes, words, models=(model,))


OPTIONS: dict[str, Layout] = {
    "full, block": _of("super", _L(pp=2, vpp=2), (*_FULL, "block", "--recompute-num-layers", "1")),
    "full, CP": _of("super", _L(cp=2), _UNIFORM),
    "mlp": _of("dense", _L(tp=2), (*_SELECTIVE, "mlp")),
    # The dispatcher's exchanges are repeated on every rank, in the order of the others.
    "all modules": _of("super", _L(tp=2, ep=2), (*_SELECTIVE, "core_attn", "moe")),
    "all modules, PP": _of(
        "super", _L(tp=2, pp=2, ep=2), (*_SELECTIVE, "core_attn", "moe", "shared_experts")
    ),
    "optimizer instances, EP": _of("super", _L(dp=4, ep=2), _INSTANCES),
    "optimizer instances, overlap": _of("nano", _L(dp=4, ep=2), (*_INSTANCES, *_OVERLAP)),
    # Upstream refuses it together with latent experts; on a CPU there is no stream to overlap on.
    "shared experts overlapped": _of("super", _L(dp=2, ep=2), ("--moe-shared-expert-overlap",)),
    # Divided: the optimizer's state, also the gradients, also the weights.
    "FSDP optim_grads, EP": _of("nano", _L(dp=4, ep=2), (*_FSDP, "optim_grads")),
    "FSDP optim_grads_params, EP": _of("super", _L(dp=4, ep=2), (*_FSDP, "optim_grads_params")),
    "FSDP, overlap": _of("super", _L(dp=4, ep=2), (*_FSDP, "optim_grads_params", *_OVERLAP)),
    "FSDP, TP": _of("super", _L(tp=2, dp=2, ep=2), (*_FSDP, "optim_grads_params")),
    "FSDP, CP": _of("super", _L(cp=2, dp=2), (*_FSDP, "optim_grads_params")),
    "FSDP, recompute": _of("nano", _L(dp=2), (*_FSDP, "optim_grads_params", *_UNIFORM)),
    "FSDP optim, recompute": _of("super", _L(dp=2), (*_FSDP, "optim", *_UNIFORM)),
    "FSDP optim, expert DP 1": _of("nano", _L(dp=2, ep=2), (*_FSDP, "optim")),
    "HSDP, EP": _of("super", _L(dp=4, ep=2), (*_HSDP, *_OVERLAP)),
}


#: `quick` names what runs in `make test`. Nano in parallel: test_resharding.py.
ROWS = [
    pytest.param(model, row, id=f"{model}-{name}", marks=() if quick else pytest.mark.full)
    for name, row in (LAYOUTS | OPTIONS).items()
    for model in row.models
    for quick in [model in row.quick]
]


@pytest.mark.parametrize(("model", "row"), ROWS)
def test_equals_one_process(model: str, row: Layout) -> None:
    check(*cases(model, row))


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
WRONG: dict[str, tuple[Layout, str]] = {
    # The buffer of a parameter that is not divided is scaled once for every micro-batch.
    "fsdp-expert-dp": (
        _of("nano", _L(dp=2, ep=2), (*_FSDP, "optim_grads")),
        r"gradients differ \([^)]*experts",
    ),
    # The weights of MTP are used once per depth, and each use reduces their gradients.
    "fsdp-mtp-recompute": (
        _of("super", _L(dp=2), (*_FSDP, "optim_grads", *_UNIFORM)),
        r"gradients differ \(mtp",
    ),
    # Only the last micro-batch of an overlapped reduction sums over the copies of the model.
    "hsdp-overlap": (_of("super", _L(dp=4), _HSDP), "ranks report different (losses|norms)"),
    # The norm of each instance's part of the gradients.
    "hsdp-outer-norm": (_of("super", _L(dp=4), _OUTER), "ranks report different norms"),
}


@pytest.mark.full
@pytest.mark.parametrize("rule", WRONG)
def test_fsdp_computes_something_else(rule: str) -> None:
    row, message = WRONG[rule]
    one = CASES[row.models[0]]
    with pytest.raises((AssertionError, RanksDiffer), match=message):
        check(one, one.at(row.sizes, *row.extra, against_rules=True))


@pytest.mark.full
def test_sharding_over_instances_is_right_without_clipping() -> None:
    """The cure that rule hsdp-outer-norm names. Losses of three steps, and the sum of the squared gradients;
    which element is whose, the comparison does not know for shards of shards."""
    plain = CASES["super"].at(_L(), "--clip-grad", "0")
    one, many = reference(plain), train(plain.at(_L(dp=4), *_OUTER), weights(plain))
    assert many.losses == pytest.approx(one.losses, rel=1e-5)
    norms = [float(sum(g.double().square().sum() for g in run.gradients.values())) for run in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def forget_sequence_parallel_norms(chunks: Sequence[Any]) -> None:
    """Norm gains see a part of the tokens on each rank; unmarked, their gradients are not summed."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("layer_norm_weight"):
                parameter.sequence_parallel = False


def forget_latent_projections(chunks: Sequence[Any]) -> None:
    """The same for the latent projections, which every tensor-parallel rank holds whole."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "latent_proj" in name:
                parameter.sequence_parallel = False


def sum_experts_over_all(chunks: Sequence[Any]) -> None:
    """Gradients of experts summed over ranks that hold other experts."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts.linear" in name:
                parameter.allreduce = True


@pytest.mark.parametrize(
    ("sabotage", "layout", "error", "message"),
    [
        pytest.param(
            forget_sequence_parallel_norms, _L(tp=2), RanksDiffer, "ranks differ", marks=pytest.mark.full
        ),
        pytest.param(
            forget_latent_projections, _L(tp=2), RanksDiffer, "ranks differ", marks=pytest.mark.full
        ),
        (sum_experts_over_all, _L(dp=2, ep=2), AssertionError, "gradients differ"),
    ],
)
def test_broken_marks_are_noticed(
    sabotage: Any, layout: ParallelLayout, error: type[Exception], message: str
) -> None:
    case = CASES["super"]
    with pytest.raises(error, match=message):
        against(case, reference(case), train(case.at(layout, sabotage=sabotage), weights(case)))


def test_tolerance_is_rounding() -> None:
    """What passes is far below what a wrong sum makes; and a run nudged once more passes."""
    case = CASES["super"]
    base, (gradients, after) = reference(case), tolerances(case)
    for allowed, found in ((gradients, base.gradients), (after, base.weights)):
        for key, tolerance in allowed.items():
            assert 0 <= tolerance <= 1e-3 * found[key].abs().max(), key
    against(case, base, train(case, nudged(weights(case), seed=99)))


@pytest.mark.full
def test_runs_of_one_process_are_those_of_several() -> None:
    """The second run in a process is what it is alone, so no state of the first is left."""
    case = CASES["super"]
    other = nudged(weights(case), seed=0)
    _, second = train_each(case, [weights(case), other])
    alone = train(case, other)
    assert second.losses == alone.losses and second.norms == alone.norms
    assert all(second.weights[key].equal(value) for key, value in alone.weights.items())


def test_a_tensor_of_one_model_only_is_a_difference() -> None:
    one, both = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for expected, found in ((one, both), (both, one)):
        distance = farthest("weights", expected, found, expected)
        assert distance.share == float("inf") and distance.key == "b"


def test_gather_puts_pieces_together() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    left, right = ("w", (2, 3), (0, 0), whole[:, :2]), ("w", (2, 3), (0, 2), whole[:, 2:])
    assert gather([[left], [right]])["w"].equal(whole)
    with pytest.raises(RanksDiffer, match="no rank holds"):
        gather([[left]])
    with pytest.raises(RanksDiffer, match="ranks differ by 1"):
        gather([[left, right], [("w", (2, 3), (0, 0), whole[:, :2] + 1)]])
