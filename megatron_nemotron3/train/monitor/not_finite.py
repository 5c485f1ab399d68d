"""Name the NaN or infinity at which Megatron ends a run: step, rank and weights, on standard error.

Megatron tests the loss and the gradients of each rank before ranks add them up. It logs or raises what it
finds, with a number of a bucket of gradients, and an iteration that is one too large (0.19).
"""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_nemotron3.common.hooks import find_ddp, unwrapped
from megatron_nemotron3.common.switches import megatron_options

_FOUND = re.compile(r"Unexpected result .*\(message='(?:found )?(NaN|Inf) in .*?(loss|bucket #\d+)")
#: DDP wrappers of the models of this process, in the order of their layers.
_WRAPPERS: list[Callable[[], Any]] = []


def watch_not_finite(stack: Any) -> None:
    """Let `naming_not_finite` read the weights of the model around a decoder stack."""
    find_ddp(stack, lambda ddp: _WRAPPERS.append(weakref.ref(ddp)))


@contextmanager
def naming_not_finite() -> Iterator[None]:
    """Inside the block print what is not finite as soon as Megatron finds it."""

    def look(record: logging.LogRecord) -> bool:
        _say(record.getMessage(), ", on this GPU only with --rerun-mode disabled")
        return True

    logger = logging.getLogger("megatron.core.rerun_state_machine")
    logger.addFilter(look)
    try:
        yield
    except RuntimeError as problem:  # with --rerun-mode disabled
        _say(str(problem))
        raise
    finally:
        logger.removeFilter(look)


def _say(text: str, where: str = "") -> None:
    if (found := _FOUND.search(text)) is None:
        return
    kind, place = found.groups()
    models = [unwrapped(ddp) for wrapper in _WRAPPERS if (ddp := wrapper()) is not None]
    weights = {name: weight for model in models for name, weight in model.named_parameters()}
    step, rank = megatron_options().curr_iteration + 1, torch.distributed.get_rank()
    cure = f"the same command repeats the step{where}, and --iterations-to-skip {step} leaves it out"
    if place == "loss":
        what = "the loss"
        if bad := _not_finite(weights):  # Megatron does not test the first step of a process
            cure = f"{len(bad)} of {len(weights)} weights had it before: go on from a checkpoint without it"
    elif bad := _not_finite({name: getattr(weight, "main_grad", None) for name, weight in weights.items()}):
        # Backward goes from the last weight to the first one.
        what = f"the gradients of {len(bad)} of {len(weights)} weights, from {bad[-1]} back ({place})"
    else:
        what = f"the norm of gradients that are finite ({place})"
    line = f"megatron_nemotron3: step {step}, rank {rank}: {kind} in {what}; {cure}"
    print(line, file=sys.stderr, flush=True)


def _not_finite(tensors: dict[str, Any]) -> list[str]:
    return [name for name, x in tensors.items() if x is not None and not x.detach().isfinite().all()]
