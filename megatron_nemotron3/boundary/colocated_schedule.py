"""The schedule of a step where encoders share their ranks with a language model that has pipeline stages.

Every rank encodes, but rows are wanted on the first stage, and 1F1B leaves no moment at which all ranks meet.
So a step has three parts:

    1. encoders forward, and the exchange, for all microbatches of the step;
    2. the stock 1F1B schedule of the language model over detached rows;
    3. their gradients back from the first stage, and encoders backward, microbatch by microbatch;

then gradients are finalized, once. The price: rows, and what the encoders keep for backward, live for the
whole step instead of a pipeline's depth. Recompute inside the encoders (`--recompute-granularity full`)
leaves the rows, num_microbatches times [rows, h]; frozen encoders keep nothing else.

Source of the order: Megatron-LM pull request 4784.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.mimo import BoundaryMimoModel, Rows

#: batch -> what `BoundaryMimoModel.forward` takes as (modality_inputs, input_ids).
Inputs = Callable[[Any], tuple[Mapping[str, Any] | None, Tensor | None]]


def inputs_of(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Tensor | None]:
    """For batches that are the keyword arguments of the model's forward."""
    return batch.get("modality_inputs"), batch.get("input_ids")


def forward_backward_colocated(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    inputs: Inputs = inputs_of,
    pipeline: Callable[..., Any] = forward_backward_pipelining_without_interleaving,
    **options: Any,
) -> Any:
    """What Megatron calls as `forward_backward_func`; every rank of all modules does.

    Args:
        forward_step_func, model, num_microbatches, forward_only, options: as the stock schedule takes them;
            `p2p_communicator` and `pg_collection` are those of the language model.
        data_iterator: on every rank, of batches with the input of this rank's encoders; a `RowFeed` if the
            model's `feed` is one.
        inputs: reads them. Where batches are moved to the device in `forward_step_func`, it must move
            `modality_inputs`, too.
        pipeline: the schedule of the language model.

    Returns: what the stock schedule returns.

    Raises:
        BoundaryError: as `Colocated.communicate`.
    """
    wrapped = model[0] if isinstance(model, list) else model
    mimo = unwrap_model(wrapped)
    batches = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    drawn, crossed = [], []
    for _ in range(num_microbatches):
        batch = next(batches)
        modality_inputs, input_ids = inputs(batch)
        known = mimo.feed.current if mimo.feed is not None else None
        drawn.append(batch)
        crossed.append((known, mimo.cross(modality_inputs, known, input_ids)))
    leaves = [_detached(rows) for _, rows in crossed]
    if forward_only:
        crossed = [(known, {}) for known, _ in crossed]
    mimo.crossed.extend((known, rows) for (known, _), rows in zip(crossed, leaves, strict=True))

    config = get_model_config(wrapped)
    finalize, grad_sync = config.finalize_model_grads_func, config.grad_sync_func
    finalized: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if finalize is not None:
        config.finalize_model_grads_func = lambda *args, **kwargs: finalized.append((args, kwargs))
    config.grad_sync_func = None  # it would reduce the encoders' gradients before there are any
    try:
        result = pipeline(
            forward_step_func=forward_step_func,
            data_iterator=iter(drawn),
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **options,
        )
    finally:
        config.finalize_model_grads_func, config.grad_sync_func = finalize, grad_sync
        mimo.crossed.clear()
    if not forward_only:
        _encoders_backward(mimo, crossed, leaves)
    for args, kwargs in finalized:
        finalize(*args, **kwargs)
    return result


def _detached(rows: Rows) -> Rows:
    return {name: t.detach().requires_grad_(t.requires_grad) for name, t in rows.items()}


def _encoders_backward(
    mimo: BoundaryMimoModel, crossed: list[tuple[Microbatch | None, Rows]], leaves: list[Rows]
) -> None:
    """Microbatch by microbatch, each freed when it is done; gradient sync may start in the last one."""
    for number in range(len(crossed)):
        rows, given = crossed[number][1], leaves[number]
        crossed[number], leaves[number] = (None, {}), {}
        outputs = [t for t in rows.values() if t.requires_grad]
        # Where a stage had no use for rows, it has none, and takes part.
        grads = [_gradient(given[name]) for name, t in rows.items() if t.requires_grad]
        last = number == len(crossed) - 1
        with nullcontext() if last else mimo.no_sync():
            if outputs:
                torch.autograd.backward(outputs, grads)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
