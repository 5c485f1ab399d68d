"""A checkpoint of any layout loads at any other: weights to the bit, the optimizer where Megatron can.

Saved and loaded as `megatron.training.checkpointing` does it for torch_dist with a distributed optimizer and
`--dist-ckpt-optim-fully-reshardable`; training then goes on as if nothing had happened. Where experts have
process groups of their own Megatron keeps a second optimizer for them, and one layout's two optimizers do not
load as another's one: such a checkpoint gives its weights only (`--no-load-optim`). Where gradients lie in
several buckets, what it saves of the optimizer is wrong (`test_state_behind_a_padded_bucket_is_shifted`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_nemotron3.launch import ParallelLayout, versions
from megatron_nemotron3.proof.certify.compare import reference, weights
from megatron_nemotron3.proof.certify.tensors import Tensors
from tests.parallel.checkpoint import load, on_ranks, save, shifted_state
from tests.parallel.compare import against
from tests.parallel.layouts import CASES, PER_TOKEN

_L = ParallelLayout
RESHARD = ("--dist-ckpt-optim-fully-reshardable",)
#: Gradients reduced in buckets while the backward pass runs, as the published launches do.
_BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "100000")
#: Steps before the checkpoint; the rest after it, of `Case.steps`.
BEFORE = 2

LAYOUTS: dict[str, ParallelLayout] = {
    "1 rank": _L(),
    "TP2": _L(tp=2),
    "EP2": _L(dp=2, ep=2),
    "PP2": _L(pp=2),
    "PP2 VPP2": _L(pp=2, vpp=2),
    "DP2": _L(dp=2),
    "CP2": _L(cp=2),
    "TP2 EP2": _L(tp=2, ep=2),
    "TP2 ETP2": _L(tp=2, etp=2),
    "TP2 PP2": _L(tp=2, pp=2),
    "PP2 EP2": _L(pp=2, dp=2, ep=2),
    "TP4": _L(tp=4),
    "EP4": _L(dp=4, ep=4),
}


def expert_optimizer(layout: ParallelLayout) -> bool:
    """Whether Megatron makes a second optimizer for the experts (`layers/experts.py`, as TE's linears)."""
    return layout.ep > 1 or layout.etp != layout.tp


QUICK = {("TP2 EP2", "PP2 VPP2")}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(a, b, marks=() if (a, b) in QUICK else pytest.mark.full, id=f"{a} to {b}")
        for a in LAYOUTS
        for b in LAYOUTS
        if a != b and (a in ("1 rank", "TP2 EP2", "PP2 VPP2") or b in ("1 rank", "TP2 EP2", "PP2 VPP2"))
    ],
)
def test_any_layout_loads_any_other(saved: str, loaded: str, tmp_path: Path) -> None:
    # Super with the mask under which MTP is right at CP, too; its shared embedding makes a bucket of its own
    # in a pipeline, so pipelines take Nano.
    piped = LAYOUTS[saved].pp > 1 or LAYOUTS[loaded].pp > 1
    one = replace(CASES["nano"], extra=(PER_TOKEN,)) if piped else replace(CASES["super"], mask="heads")
    first, second = (one.at(LAYOUTS[name], *RESHARD) for name in (saved, loaded))
    whole = expert_optimizer(first.layout) == expert_optimizer(second.layout)
    kept_weights, kept_state = on_ranks(save, first, weights(one), tmp_path, BEFORE)
    got_weights, *rest = on_ranks(load, second, tmp_path, BEFORE, whole)
    _equal(kept_weights, got_weights)
    # Both moments of every parameter, and the FP32 copy it is updated in.
    assert len(kept_state) == 3 * sum(not key.endswith("expert_bias") for key in kept_weights)
    if whole:
        got_state, after = rest
        _equal(kept_state, got_state)
        base = reference(one)
        against(one, base, replace(base, weights=after))


@pytest.mark.full  # what Megatron does; nothing here depends on it
def test_one_optimizer_does_not_load_as_two(tmp_path: Path) -> None:
    """What the weights-only pairs above leave out, as Megatron refuses it."""
    one = CASES["super"].at(_L(), *RESHARD)
    on_ranks(save, one, weights(CASES["super"]), tmp_path, BEFORE)
    with pytest.raises(RuntimeError, match="Expected 2 entries in state dict"):
        on_ranks(load, one.at(LAYOUTS["EP2"]), tmp_path, BEFORE, True)


@pytest.mark.parametrize(
    ("model", "layout", "extra", "shifted"),
    [
        # The embedding MTP shares between the first and the last stage has a bucket of its own.
        pytest.param("super", _L(pp=2), (), True, id="MTP in a pipeline"),
        pytest.param("nano", _L(pp=2), (), False, id="pipeline", marks=pytest.mark.full),
        pytest.param("nano", _L(dp=2), _BUCKETS, True, id="buckets", marks=pytest.mark.full),
        pytest.param("nano", _L(dp=2), (), False, id="one bucket", marks=pytest.mark.full),
    ],
)
def test_state_behind_a_padded_bucket_is_shifted(
    model: str, layout: ParallelLayout, extra: tuple[str, ...], shifted: bool
) -> None:
    """reshardable-buckets: Megatron drops the padding between buckets, but not from positions (#5077).

    In FP32 the optimizer's copy of a parameter is the parameter, so what would be saved of it can be checked.
    main mended it.
    """
    from megatron.core import __version__

    one, wrong_here = CASES[model], shifted and versions.minor(__version__) == "0.19"
    wrong = shifted_state(one.at(layout, *RESHARD, *extra, against_rules=shifted), weights(one))
    assert bool(wrong) == wrong_here, wrong


def _equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    for key in a:
        assert a[key].equal(b[key]), f"{key} changed"
