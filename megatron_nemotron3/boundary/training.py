"""What Megatron's training loop calls when modules have layouts of their own: schedule and gradient scale.

Nothing is scaled at the boundary, so the sum over an encoder's data-parallel ranks is the derivative of the
plain sum of the language model's local losses. The remaining factor is applied after the module's gradient
sync. It depends on the loss and on the module's DistributedDataParallel (`calculate_per_token_loss` of the
language model's and of the module's config):

    loss of a rank                        DDP sums (per-token)       DDP averages (mean loss)
    sum over tokens (per-token loss)      1 / N                      module ranks / N
    mean over its tokens (mean loss)      1 / language ranks         module ranks / language ranks

N: tokens of the global batch, the same number for every module. Ranks: DP * CP of a module, over which its
DDP averages. Samples without a modality need no correction: their share of the sum is zero, and N counts
their tokens. (Megatron-Bridge issues 4066, 3197 and 5555 report errors by factors of 2 to 4 here.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron_nemotron3.boundary.feed import Microbatch
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.mimo import BoundaryMimoModel, Rows


def forward_backward_colocated(
    *,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    **options: Any,
) -> Any:
    """Run a step in which encoders share their ranks with a language model that has pipeline stages.

    Megatron calls it as `forward_backward_func` on every rank. Batches are the arguments of the model's
    forward. Every rank encodes, but rows are needed on the first stage, and 1F1B has no point at which all
    ranks meet. So a step has three parts:

        1. encoders forward, and the exchange, for all microbatches of the step;
        2. the stock 1F1B schedule of the language model over detached rows;
        3. their gradients back from the first stage, and encoders backward, microbatch by microbatch;

    then gradients are finalized once. Rows, and what the encoders keep for backward, live for the whole step.
    Source of the order: Megatron-LM pull request 4784.
    """
    wrapped = model[0] if isinstance(model, list) else model
    mimo = unwrap_model(wrapped)
    batches = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    drawn, exchanged = [], []
    for _ in range(num_microbatches):
        batch = next(batches)
        microbatch = mimo.feed.current if mimo.feed is not None else None
        drawn.append(batch)
        rows = mimo.exchange_rows(batch.get("modality_inputs"), microbatch, batch.get("input_ids"))
        exchanged.append((microbatch, rows))
    leaves = [
        {name: t.detach().requires_grad_(t.requires_grad) for name, t in rows.items()}
        for _, rows in exchanged
    ]
    if forward_only:
        exchanged = [(microbatch, {}) for microbatch, _ in exchanged]
    mimo.exchanged.extend((microbatch, rows) for (microbatch, _), rows in zip(exchanged, leaves, strict=True))

    config = get_model_config(wrapped)
    finalize_func, grad_sync_func = config.finalize_model_grads_func, config.grad_sync_func
    finalized: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if finalize_func is not None:
        config.finalize_model_grads_func = lambda *args, **kwargs: finalized.append((args, kwargs))
    config.grad_sync_func = None  # it would reduce the encoders' gradients before they exist
    try:
        result = forward_backward_pipelining_without_interleaving(
            data_iterator=iter(drawn),
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **options,
        )
    finally:
        config.finalize_model_grads_func, config.grad_sync_func = finalize_func, grad_sync_func
        mimo.exchanged.clear()
    if not forward_only:
        _encoders_backward(mimo, exchanged, leaves)
    for args, kwargs in finalized:
        finalize_func(*args, **kwargs)
    return result


def _encoders_backward(
    mimo: BoundaryMimoModel, exchanged: list[tuple[Microbatch | None, Rows]], leaves: list[Rows]
) -> None:
    """Run backward for each microbatch and free it; gradient sync may start in the last one."""
    for number in range(len(exchanged)):
        rows, leaf = exchanged[number][1], leaves[number]
        exchanged[number], leaves[number] = (None, {}), {}
        names = [name for name, t in rows.items() if t.requires_grad]
        outputs = [rows[name] for name in names]
        # Rows of later stages were not used and have no gradient; these ranks take part with zeros.
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (leaf[name] for name in names)]
        last = number == len(exchanged) - 1
        with nullcontext() if last else mimo.no_sync():
            if outputs:
                torch.autograd.backward(outputs, grads)


def gradient_scale(
    *, language_ranks: int, module_ranks: int, module_per_token: bool, tokens: torch.Tensor | None
) -> torch.Tensor | float:
    """Factor for a module's gradients after its own gradient sync, from the table above.

    tokens: [], of the global batch if the language model's loss is a sum over tokens; None if it is a mean
        over a rank's tokens. As in upstream, a batch without tokens counts as one token.
    """
    averaged = 1 if module_per_token else module_ranks
    if tokens is None:
        return averaged / language_ranks
    return averaged / tokens.clamp(min=1).float()


def global_tokens(
    num_tokens: torch.Tensor,
    language: ProcessGroupCollection | None,
    world: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Tokens of the global batch, on every rank: one all-reduce of 8 bytes without host synchronization.

    language: this rank's groups of the language model, if it has any. world: all ranks of all modules.
    """
    # Count one rank of each data lane and context slice: the first tensor rank of the last stage.
    counts = language is not None and language.tp.rank() == 0 and language.pp.rank() == language.pp.size() - 1
    total = num_tokens.detach().reshape(()).long() * int(counts)
    dist.all_reduce(total, group=world)
    return total


def finalize_model_grads(
    model: Sequence[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | MultiModuleProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    *,
    groups: Mapping[str, ProcessGroupCollection] | None = None,
    world: dist.ProcessGroup | None = None,
) -> None:
    """Finalize and scale the gradients of a MimoModel whose modules have layouts of their own.

    Use it as `config.finalize_model_grads_func`. Upstream's `finalize_model_grads` runs for each module of
    this rank with the module's groups (gradient sync, layer norms under sequence parallelism, tied
    embeddings, expert bias); then the module's gradients are multiplied by `gradient_scale`.

    Args:
        num_tokens: as the schedule passes it; None with a mean loss.
        world: group of all ranks of all modules; None: the default group.
    """
    mimo: Any = unwrap_model(model[0])
    if groups is None:
        if not isinstance(pg_collection, MultiModuleProcessGroupCollection):
            raise ValueError(
                "finalize_model_grads has no groups of the modules: give groups={name: collection}, because "
                f"the schedule's pg_collection is a {type(pg_collection).__name__}"
            )
        groups = pg_collection.module_pgs
    tokens = None if num_tokens is None else global_tokens(num_tokens, groups.get(LANGUAGE), world)
    grids = mimo.mimo_config.module_to_grid_map
    layouts = {name: Layout.from_grid(grid) for name, grid in grids.items()}
    ranks = {name: layout.dp * layout.cp for name, layout in layouts.items()}
    for name, module in {LANGUAGE: mimo.language_model, **dict(mimo.modality_submodules.items())}.items():
        if module is None:
            continue
        if not isinstance(module, DistributedDataParallel):
            if any(p.requires_grad for p in module.parameters()):
                raise ValueError(
                    f"module {name!r} is a {type(module).__name__}: wrap it in megatron.core's "
                    "DistributedDataParallel with its own groups, or freeze it"
                )
            continue
        finalize([module], None, pg_collection=groups[name], force_all_reduce=force_all_reduce)
        factor = gradient_scale(
            language_ranks=ranks[LANGUAGE],
            module_ranks=ranks[name],
            module_per_token=get_model_config(module).calculate_per_token_loss,
            tokens=tokens,
        )
        module.scale_gradients(factor)
