"""The scale of gradients when modules have data-parallel sizes of their own.

Nothing is scaled at the boundary. So what an encoder's data-parallel ranks sum up to is the derivative of the
plain sum of the language model's local losses, whatever either size is. What is left to do depends on two
conventions, that of the loss and that of the module's DistributedDataParallel (`calculate_per_token_loss` of
the language model's and of the module's config), and is one factor after the module's gradient sync:

    loss of a rank                        DDP sums (per-token)       DDP averages (mean loss)
    sum over tokens (per-token loss)      1 / N                      module ranks / N
    mean over its tokens (mean loss)      1 / language ranks         module ranks / language ranks

N: tokens of the global batch, the same number for every module. Ranks: DP * CP of a module, over which its
DDP averages. Samples without a modality need no correction: their share of the sum is zero, and N counts
their tokens. (Megatron-Bridge issues 4066, 3197 and 5555 were this table got wrong, by factors of 2 to 4.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron_nemotron3.boundary.layout import Layout


def gradient_scale(
    *,
    language_ranks: int,
    module_ranks: int,
    module_per_token: bool,
    tokens: torch.Tensor | None,
) -> torch.Tensor | float:
    """The factor for a module's gradients after its own gradient sync. The table above.

    Args:
        language_ranks, module_ranks: DP * CP of the language model and of the module.
        module_per_token: `calculate_per_token_loss` of the module's config: its DDP sums, and averages else.
        tokens: [], those of the global batch, if the language model's loss is a sum over tokens; None: it is
            the mean over a rank's tokens. A batch without any counts as one token, as upstream has it.
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
    """Tokens of the global batch, on every rank: one all-reduce of eight bytes, no host synchronization.

    Args:
        num_tokens: [], this rank's count as the schedule sums it up: its data lane and context slice.
        language: this rank's groups of the language model; None: it has no part in it.
        world: all ranks of all modules; None: the default group.
    """
    # One rank of each data lane and context slice counts: the first tensor rank of the last stage.
    counts = language is not None and language.tp.rank() == 0 and _is_last(language.pp)
    total = num_tokens.detach().reshape(()).long() * int(counts)
    dist.all_reduce(total, group=world)
    return total


def _is_last(group: dist.ProcessGroup) -> bool:
    return group.rank() == group.size() - 1


def finalize_model_grads(
    model: Sequence[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | MultiModuleProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    *,
    groups: Mapping[str, ProcessGroupCollection] | None = None,
    world: dist.ProcessGroup | None = None,
) -> None:
    """For `config.finalize_model_grads_func` of a MimoModel whose modules have layouts of their own.

    Each module of this rank goes through upstream's `finalize_model_grads` with its own groups (gradient
    sync, layer norms under sequence parallelism, tied embeddings, expert bias), then gets its factor.

    Args:
        model: the MimoModel alone, its modules each in a DistributedDataParallel.
        num_tokens: as the schedule gives it; None with a mean loss.
        pg_collection: the schedule's. With `MultiModuleProcessGroupCollection`, nothing else is needed.
        groups: name of each module of this rank -> its groups, where the schedule has but one collection
            (colocated modules): `functools.partial(finalize_model_grads, groups=…)`.
        world: all ranks of all modules; None: the default group.

    Raises:
        ValueError: no groups; or a module with trainable parameters is not in a DistributedDataParallel.
    """
    mimo: Any = unwrap_model(model[0])
    if groups is None:
        if not isinstance(pg_collection, MultiModuleProcessGroupCollection):
            raise ValueError(
                "finalize_model_grads knows no groups of the modules: give groups={name: collection} where "
                f"the schedule's pg_collection is a {type(pg_collection).__name__}"
            )
        groups = pg_collection.module_pgs
    tokens = None if num_tokens is None else global_tokens(num_tokens, groups.get(LANGUAGE), world)
    ranks = {name: _data_ranks(grid) for name, grid in mimo.mimo_config.module_to_grid_map.items()}
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


def _data_ranks(grid: Any) -> int:
    layout = Layout.from_grid(grid)
    return layout.dp * layout.cp
