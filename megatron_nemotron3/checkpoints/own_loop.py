"""Save and resume a training loop of one's own around a model that `train.build_model` made.

The checkpoint is Megatron's, with the model's description: every command that takes a checkpoint reads it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.checkpoints.convert.megatron_args import args_of, common_state
from megatron_nemotron3.checkpoints.folders import checkpoint_path, latest_iteration, write_tracker
from megatron_nemotron3.checkpoints.resume import before_start, remove_incomplete
from megatron_nemotron3.checkpoints.structure import CONFIG as METADATA
from megatron_nemotron3.checkpoints.trust import require_trusted
from megatron_nemotron3.common.spawned import without_main

#: How Megatron's optimizers divide their state: in a form that any other layout can load.
_FORMAT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def save_checkpoint(folder: Path | str, model: Any, optimizer: Any, step: int) -> Path:
    """Save weights, optimizer and step as one Megatron checkpoint, and return its folder. All ranks call it.

    Args:
        folder: below it each step has a folder `iter_…`, and a file names the last complete one.
        model: what `train.build_model` returns, or a list of such chunks; wrappers of Megatron are allowed.
        optimizer: one of Megatron's, or a torch optimizer whose tensors have the shapes of the parameters.
        step: steps that have been made, at least 1.

    Raises:
        ValueError: the model is of another builder, the step is saved already, or the optimizer cannot be
            divided among ranks. Nothing has been written.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    folder, chunks = Path(folder), _chunks(model)
    place = checkpoint_path(folder, step)
    if step < 1 or (place / METADATA).exists():
        raise ValueError(f"{place}: " + ("steps are counted from 1" if step < 1 else "it is saved already"))
    config = getattr(chunks[0], "nemotron3_config", None)
    if config is None:
        raise ValueError("the model is not of build_model: use save_checkpoint of megatron.training")
    state = _weights(chunks)
    if hasattr(optimizer, "sharded_state_dict"):
        if len({parameter.dtype for chunk in chunks for parameter in chunk.parameters()}) > 1:
            raise ValueError("Megatron's optimizers save parameters of one type: use a Float16Module")
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=_metadata())
    else:
        state["optimizer"] = _of_torch(optimizer, state)
    dtype = str(chunks[0].config.params_dtype).removeprefix("torch.")
    args = args_of(config, padded_vocab_size=chunks[0].vocab_size, dtype=dtype)
    vars(args).update({name: getattr(chunks[0].config, name) for name in _LAYOUT})
    state |= {**common_state(args), "iteration": step}
    first = torch.distributed.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        remove_incomplete(folder)
        place.mkdir(exist_ok=True)
    torch.distributed.barrier()
    with without_main():  # Megatron's writer spawns a process, which would run a script without a guard again
        get_write_results_queue()
    with _without_notices():
        dist_checkpointing.save(state, str(place), content_metadata=dict(_FORMAT))
    if first:
        write_tracker(folder, step)
    torch.distributed.barrier()
    return place


def resume_checkpoint(folder: Path | str, model: Any, optimizer: Any) -> int:
    """Load what `save_checkpoint` saved last, and return its step; 0 if nothing is saved. All ranks call it.

    The layout may be another one. Arguments as of `save_checkpoint`.

    Raises:
        ValueError: the checkpoint has no state of such an optimizer, is damaged, or would run code.
    """
    from megatron.core import dist_checkpointing

    folder, chunks = Path(folder), _chunks(model)
    # A save that was killed before its last file is complete, but not named.
    for line in before_start(["--load", str(folder)], torch.distributed.get_rank()):
        print(f"megatron_nemotron3: {line}")
    torch.distributed.barrier()  # the first rank may have named another one
    step = latest_iteration(folder)
    if step is None:
        return 0
    place = checkpoint_path(folder, step)
    require_trusted(place)
    with _without_notices():
        stored = dist_checkpointing.load_common_state_dict(str(place)).get("optimizer")
    megatrons = hasattr(optimizer, "sharded_state_dict")
    if not stored or megatrons == ("tensors" in stored):
        kind = "Megatron's" if megatrons else "a torch optimizer's"
        raise ValueError(f"{place}: it has no state of {kind}: load_checkpoint loads its weights alone")
    state, shards = _weights(chunks), {}
    if megatrons:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=_metadata())
    else:
        shards = _shards(optimizer, state)
        state["optimizer"] = {"state": _places(optimizer, shards, stored["tensors"])}
        _require_alike(optimizer, shards, stored, place)
    with _without_notices():
        loaded = dist_checkpointing.load(state, str(place))
    for name, chunk in _named(chunks):
        chunk.load_state_dict(loaded[name])
    found = loaded["optimizer"]
    if not megatrons:
        groups = zip(stored["groups"], optimizer.state_dict()["param_groups"])
        found["param_groups"] = [{**kept, "params": own["params"]} for kept, own in groups]
        for number, shard in shards.items():
            # A copy: experts have one key, and torch counts a parameter's steps in its tensor.
            numbers = copy.deepcopy(stored["numbers"].get(shard.key, {}))
            found["state"].setdefault(number, {}).update(numbers)
        found["state"] = {number: kept for number, kept in found["state"].items() if kept}
    optimizer.load_state_dict(found)
    return step


@contextmanager
def _without_notices() -> Iterator[None]:
    """Without what torch and Megatron say about the age of their own interfaces."""
    log = logging.getLogger("megatron.core.dist_checkpointing.strategies.torch")
    log.addFilter(_not_of_age)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
            yield
    finally:
        log.removeFilter(_not_of_age)


def _not_of_age(record: logging.LogRecord) -> bool:
    return "async save is deprecated" not in record.getMessage()


def _chunks(model: Any) -> list[Any]:
    """The chunks of a model without Megatron's wrappers."""
    found = list(model) if isinstance(model, (list, tuple)) else [model]
    for number, chunk in enumerate(found):
        while hasattr(chunk, "module"):
            chunk = chunk.module
        found[number] = chunk
    return found


def _named(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The chunks by the names that Megatron gives them in a checkpoint."""
    for number, chunk in enumerate(chunks):
        yield "model" if len(chunks) == 1 else f"model{number}", chunk


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {**_FORMAT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _weights(chunks: Sequence[Any]) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=_metadata()) for name, chunk in _named(chunks)}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shards(optimizer: torch.optim.Optimizer, weights: dict[str, Any]) -> dict[int, Any]:
    """Number of a parameter in a torch optimizer -> its place among the weights of all ranks."""
    from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map

    parameters = _parameters(optimizer)
    found = get_param_id_to_sharded_param_map(weights, parameters)
    if missing := [number for number in range(len(parameters)) if number not in found]:
        shape = list(parameters[missing[0]].shape)
        raise ValueError(f"parameter {missing[0]} of the optimizer, {shape}, is none of the model")
    return found


def _of_torch(optimizer: torch.optim.Optimizer, weights: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch optimizer: tensors divided as the weights, numbers by the key of a weight."""
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    own, parameters, shards = optimizer.state_dict(), _parameters(optimizer), _shards(optimizer, weights)
    divided: dict[int, dict[str, Any]] = {}
    mine: list[tuple[str, str, str, Any]] = []
    for number, kept in own["state"].items():
        key, shape = shards[number].key, parameters[number].shape
        for name, value in kept.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                mine.append(("numbers", key, name, value.cpu() if isinstance(value, torch.Tensor) else value))
                continue
            if value.shape != shape:
                raise ValueError(f"the optimizer's {name} of {key} is {list(value.shape)}, not {list(shape)}")
            shard = make_sharded_optimizer_tensor(shards[number], value, f"optimizer.state.{name}")
            divided.setdefault(number, {})[name] = shard
            mine.append(("tensors", key, name, str(value.dtype).removeprefix("torch.")))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in own["param_groups"]]
    return {"state": divided, **_of_all_ranks(mine), "groups": groups}


def _of_all_ranks(mine: list[tuple[str, str, str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """What all ranks have, by kind, key of a weight and name: one value for all parts of a weight."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    whole: dict[str, dict[str, dict[str, Any]]] = {"tensors": {}, "numbers": {}}
    for kind, key, name, value in (fact for part in every for fact in part):
        if (before := whole[kind].setdefault(key, {}).setdefault(name, value)) != value:
            raise ValueError(f"the optimizer's {name} of {key} differs among its parts: {before}, {value}")
    return whole


def _places(
    optimizer: torch.optim.Optimizer, shards: dict[int, Any], stored: dict[str, dict[str, str]]
) -> dict[int, dict[str, Any]]:
    """Empty tensors of a torch optimizer's state, each with its place in the checkpoint."""
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    parameters = _parameters(optimizer)
    places: dict[int, dict[str, Any]] = {}
    for number, shard in shards.items():
        for name, dtype in stored.get(shard.key, {}).items():
            empty = torch.empty_like(parameters[number], dtype=getattr(torch, dtype))
            part = make_sharded_optimizer_tensor(shard, empty, f"optimizer.state.{name}")
            places.setdefault(number, {})[name] = part
    return places


def _require_alike(
    optimizer: torch.optim.Optimizer, shards: dict[int, Any], stored: dict[str, Any], place: Path
) -> None:
    """Raise ValueError unless the optimizer has the groups, and those of all ranks the parameters."""
    saved, own = len(stored["groups"]), len(optimizer.param_groups)
    if saved != own:
        raise ValueError(f"{place}: its optimizer has {saved} groups of parameters, this one {own}")
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, {shard.key for shard in shards.values()})
    if lost := (stored["tensors"].keys() | stored["numbers"].keys()) - set().union(*every):
        raise ValueError(f"{place}: its optimizer also has {min(lost)}, and this one does not")
