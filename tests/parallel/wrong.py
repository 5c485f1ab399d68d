"""How wrong a layout is: gradients of one step against one rank."""

from __future__ import annotations

import functools
from dataclasses import replace

from megatron_nemotron3.proof.certify.compare import reference, weights
from megatron_nemotron3.proof.certify.world import Result, train
from tests.parallel.case import Case


@functools.cache
def one_step(case: Case, other: Case) -> tuple[Result, Result]:
    """(`case` on one rank, `other` in its layout) for one step, from the same weights."""
    case, other = replace(case, steps=1), replace(other, steps=1)
    return reference(case), train(other, weights(case))


def relative(one: Result, other: Result, part: str = "") -> float:
    """Largest difference of the gradients whose name holds `part`, over the largest element of the tensor."""
    assert any(part in key for key in one.gradients)
    return max(
        float((value - other.gradients[key]).abs().max() / value.abs().max())
        for key, value in one.gradients.items()
        if part in key
    )
