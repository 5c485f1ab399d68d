"""Which of a checkpoint's tensors are the optimizer's FP32 master weights.

What a torch_dist folder holds of them depends on the options of the run that saved it:

    plain optimizer                                 optimizer.state.fp32_param.<key>
    distributed, --dist-ckpt-optim-fully-reshardable        optimizer.state.param.<key>
    distributed, fully_sharded_model_space (old)            optimizer.state.fp32_param.<key>
    distributed, default (dp_reshardable)           optimizer.distributed.….bucket_idx_0.param: no names

Before all stands `chained_0.` where the experts have an optimizer of their own, in some of these. The keys
behind the prefix are those of the weights, in_proj and conv1d in parts and experts stacked. Weights stored as
float32 (FP32 runs, Megatron-FSDP, the expert bias) need no master.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from megatron_nemotron3.convert.places import master_of, plain, what_else

_BUCKET = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\..*\.(?:param|fp32_param|param_state)(?:/.*)?"
)
_RESHARD = (
    "load the checkpoint in Megatron with the layout that wrote it and save again with "
    "--dist-ckpt-optim-fully-reshardable"
)


class _Tensor(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def masters(tensors: Mapping[str, _Tensor]) -> dict[str, str]:
    """Plain name of a weight -> key of its FP32 master copy. Weights that are float32 may be left out.

    Args:
        tensors: all of a checkpoint's, by key.

    Raises:
        ValueError: weights without a master, masters without a weight or of another shape; the message gives
            numbers and the option to save with.
    """
    weights = {plain(key): key for key in tensors if what_else(key) is None}
    found: dict[str, str] = {}
    for key in tensors:
        if (name := master_of(key)) is None:
            continue
        if name in found:
            raise ValueError(f"{found[name]!r} and {key!r} are masters of the same weight")
        found[name] = key
    if stray := [name for name in found if name not in weights]:
        raise ValueError(
            f"{len(stray)} of {len(found)} FP32 masters are of no weight of the checkpoint, the first is "
            f"{found[stray[0]]!r}"
        )
    if missing := [n for n, key in weights.items() if n not in found and tensors[key].dtype != "float32"]:
        raise ValueError(_why(len(missing), len(weights), missing[0], tensors))
    for name, key in found.items():
        if tensors[key].shape != tensors[weights[name]].shape or tensors[key].dtype != "float32":
            raise ValueError(
                f"{key!r} is {tensors[key].dtype} {list(tensors[key].shape)}, but the weight it should be a "
                f"master of has shape {list(tensors[weights[name]].shape)}"
            )
    return found


def _why(missing: int, total: int, first: str, tensors: Mapping[str, _Tensor]) -> str:
    number = (
        f"{missing} of {total} weights have no FP32 master that can be told by its name, first {first!r}: "
    )
    if buckets := sum(_BUCKET.fullmatch(key) is not None for key in tensors):
        return number + (
            f"the distributed optimizer saved them in {buckets} bucket(s) whose layout only a run of the "
            f"same layout knows. To export them, {_RESHARD}; or leave --from-optimizer-master out"
        )
    if any(what_else(key) == "optimizer" for key in tensors):
        return number + (
            f"the optimizer state covers a part of the weights only. If it was saved so, {_RESHARD}; or "
            "leave --from-optimizer-master out"
        )
    return number + (
        "the checkpoint holds no optimizer state with names (saved with --no-save-optim, a release, or a "
        "legacy mp_rank folder): leave --from-optimizer-master out"
    )
