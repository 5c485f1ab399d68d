"""A training step of the small omni model in any layout, and the same step in one process.

The single process saves its weights and its gradients as checkpoints; every rank of a layout loads its parts
of both, through the model's own `sharded_state_dict`, and compares the gradients that it has at the end of
its step, after gradient sync and scale.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.boundary_reference import media_of

SAMPLES, LENGTH, MICROBATCHES = 4, 16, 3
PATTERN = "M*E"
MODULES = ("vision", "audio", "language")
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class Case(NamedTuple):
    """Layouts and options of one run.

    layouts: text of `Layout.parse` of vision, audio and language.
    ep: expert parallelism of the language model.
    pattern: of its layers, with `|` between stages.
    frozen: parameters that are not trained, by the beginnings of their names below `modality_submodules`.
    recompute: activations of encoders and of the language model are computed again in backward.
    fed: row counts come with the batch.
    extra: rows of the first vision rank that no position is for.
    evaluated: before the step all batches run forward only. For modules that share ranks, with stages.
    """

    layouts: tuple[str, str, str]
    ep: int = 1
    pattern: str = PATTERN
    frozen: tuple[str, ...] = ()
    recompute: bool = False
    fed: bool = True
    extra: int = 0
    evaluated: bool = False


class Outcome(NamedTuple):
    """Of one rank.

    loss: sum over microbatches, on the ranks that have it.
    error: largest difference of a gradient, relative to the largest number of that gradient.
    compared: parameters with a gradient other than zero, by name.
    sent: bytes that this rank sends to other ranks point to point, which are those of boundaries if the
        language model has no PP.
    exchanges: number of batches of point-to-point operations.
    encoded: calls of the encoders, those for recompute included.
    layers: calls of the first layer of the language model, too.
    """

    loss: float
    error: float
    compared: tuple[str, ...]
    sent: int
    exchanges: int
    encoded: int
    layers: int


def single(folder: str, pattern: str) -> float:
    """Save weights and gradients of a step in one process, for layers `pattern`; returns the loss."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.mimo.model.base import MimoModel

    from tests.support import boundary_omni as omni

    model = omni.build(
        MimoModel, dict.fromkeys(MODULES, omni.grid()), pattern=pattern.replace("|", ""), on_grids=False
    )
    for name in ("weights", "gradients"):
        Path(folder, name).mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(Path(folder, "weights")))
    total, tokens = torch.zeros(()), 0
    for ids, _ in _batches(None):
        known = {"input_ids": ids, "labels": ids.roll(-1, 1) % 200, "loss_mask": (ids < 200).float()}
        given = _inputs(ids, None, 0, None)
        output, mask = model(position_ids=None, attention_mask=None, modality_inputs=given, **known)
        total, tokens = total + (output.float() * mask).sum(), tokens + int(mask.sum())
    (total / tokens).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    dist_checkpointing.save(model.sharded_state_dict(), str(Path(folder, "gradients")))
    return float(total)


def steps(cases: list[Case], folder: str) -> list[Outcome]:
    """The steps of several cases in the same processes."""
    found = []
    for case in cases:
        found.append(step(case, folder))
        dist.barrier()
    return found


def step(case: Case, folder: str) -> Outcome:
    """The step on this rank, beside the numbers that `single` saved in `folder`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.utils import unwrap_model

    from megatron_nemotron3.boundary.layout import Layout
    from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
    from megatron_nemotron3.boundary.training import finalize_model_grads
    from tests.support import boundary_omni as omni

    layouts = dict(zip(MODULES, map(Layout.parse, case.layouts), strict=True))
    grids = {
        name: omni.grid(
            **{d: at.size_of(d) for d in ("tp", "cp", "pp", "dp")},
            offset=at.offset,
            ep=case.ep if name == "language" else 1,
        )
        for name, at in layouts.items()
    }
    mine = {name: omni.groups(grid) for name, grid in grids.items() if grid.is_current_rank_in_grid()}
    apart = set(layouts["vision"].ranks).isdisjoint(layouts["language"].ranks)

    def built() -> Any:
        fields: dict[str, Any] = {"variable_seq_lengths": apart}
        return omni.build(
            partial(BoundaryMimoModel, share={name: at.share for name, at in layouts.items()}),
            grids,
            pattern=case.pattern,
            sequence_parallel=layouts["language"].sequence_parallel,
            recompute=case.recompute,
            **fields | (FULL_RECOMPUTE if case.recompute else {}),
        )

    model, twin = built(), built()
    model.model_type = ModelType.encoder_or_decoder
    _load(model, folder, "weights")
    _load(twin, folder, "gradients")
    _freeze(model, case.frozen)
    expected = dict(twin.named_parameters())
    parameters = dict(model.named_parameters())
    config = model.config
    config.calculate_per_token_loss, config.pipeline_dtype = True, torch.float32
    config.variable_seq_lengths = apart
    modules: dict[str, Any] = {**dict(model.modality_submodules.items()), "language": model.language_model}
    for name, module in modules.items():
        if module is None or name not in mine or not any(p.requires_grad for p in module.parameters()):
            continue
        wrapped = DistributedDataParallel(
            config, DistributedDataParallelConfig(), module, pg_collection=mine[name]
        )
        wrapped.zero_grad_buffer()
        if name == "language":
            model.language_model = wrapped
        else:
            model.modality_submodules[name] = wrapped
    finalized = []

    def finalize(*args: Any, **kwargs: Any) -> None:
        finalized.append(args)
        finalize_model_grads(*args, **kwargs, groups=mine)

    config.finalize_model_grads_func = finalize
    encoders = [part for part in model.modules() if isinstance(part, omni.Encoder)]
    layers = [0]
    if model.language_model is not None:
        first = unwrap_model(model.language_model).decoder.layers[0]
        first.register_forward_hook(lambda *_: layers.__setitem__(0, layers[0] + 1))
    with _counted() as counts:
        loss = _run(case, model, layouts, grids, mine, apart)
    assert len(finalized) == 1  # an evaluation does not
    errors = {}
    for name, p in parameters.items():
        wanted = expected[name].detach()
        if not p.requires_grad:
            assert p.grad is None and getattr(p, "main_grad", None) is None, name
        elif bool(wanted.any()):
            errors[name] = float((p.main_grad - wanted).abs().max() / wanted.abs().max())
        else:
            assert not bool(p.main_grad.any()), name
    encoded = sum(encoder.calls for encoder in encoders)
    return Outcome(loss, max(errors.values(), default=0.0), tuple(errors), *counts, encoded, layers[0])


def _run(case: Case, model: Any, layouts: Any, grids: Any, mine: Any, apart: bool) -> float:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

    from megatron_nemotron3.boundary.feed import RowFeed
    from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
    from megatron_nemotron3.boundary.training import forward_backward_colocated

    arguments: dict[str, Any] = {"num_microbatches": MICROBATCHES, "seq_length": LENGTH}
    arguments |= {"micro_batch_size": SAMPLES // layouts["language"].dp, "model": [model]}
    arguments["forward_step_func"] = _forward_step

    def drawn() -> Any:
        batches: Any = iter(_of_rank(layouts, mine, case.extra))
        if case.fed:
            known = iter([description for _, description in _batches(layouts)])
            batches = model.feed = RowFeed(batches, lambda batch: next(known))
        return batches

    batches = drawn()
    if not apart:
        pg = mine["language"]
        arguments |= {"data_iterator": batches, "pg_collection": pg}
        if pg.pp.size() == 1:
            result = schedules.forward_backward_no_pipelining(**arguments)
        else:
            arguments["p2p_communicator"] = P2PCommunicator(pp_group=pg.pp, config=model.config)
            if case.evaluated:
                with torch.no_grad():
                    evaluated = forward_backward_colocated(**arguments, forward_only=True)
                arguments["data_iterator"] = drawn()
            result = forward_backward_colocated(**arguments)
            assert not case.evaluated or evaluated == result
        return sum(float(part["loss"]) for part in result)
    communicator = BoundaryCommunicator(
        grids,
        {"vision": ["language"], "audio": ["language"], "language": []},
        model.config,
        dim_mapping={"s": 0, "b": 1, "h": 2},
        module_output_ndim={"vision": 2, "audio": 2},
        sequence_parallel=[name for name, at in layouts.items() if at.sequence_parallel],
        share={name: at.share for name, at in layouts.items()},
        frozen=[name for name in MODULES[:2] if name in case.frozen],
    )
    model.communicator = communicator
    if case.fed:
        communicator.feed = batches
    named = "language" if "language" in mine else None
    result = schedules.forward_backward_pipelining_without_interleaving(
        **{**arguments, "model": model},
        data_iterator=batches,
        p2p_communicator=communicator,
        pg_collection=MultiModuleProcessGroupCollection(mine, named),
    )
    return sum(float(part["loss"]) for part in result)


def _forward_step(batches: Any, model: Any) -> Any:
    output, mask = model(**next(batches))

    def loss(values: Tensor) -> Any:
        total = (values.float() * mask).sum()
        return total, mask.sum().int(), {"loss": total.detach().clone()}

    return output, loss if mask is not None else None


def _batches(layouts: Any) -> list[tuple[Tensor, Any]]:
    """(token ids of the global microbatch, its description) of every microbatch."""
    from megatron_nemotron3.boundary.feed import describe_ids
    from tests.support import boundary_batches as batches
    from tests.support import boundary_omni as omni

    found = []
    for number in range(MICROBATCHES):
        ids = batches.tokens(SAMPLES, LENGTH, seed=number)
        media = None
        if layouts is not None:
            media = {
                name: [media_of(layouts[name], int((row == token).sum())) for row in ids]
                for name, token in omni.SPECIAL.items()
            }
        found.append((ids, describe_ids(ids, omni.SPECIAL, media=media)))
    return found


def _of_rank(layouts: Any, mine: Any, extra: int) -> list[dict[str, Any]]:
    """Keyword arguments of the model's forward on this rank, for every microbatch."""
    from tests.support import boundary_batches as batches

    made = []
    for ids, known in _batches(layouts):
        name = "language" if "language" in mine else next(iter(mine))
        own = batches.share(ids, layouts[name].coordinates(dist.get_rank())["dp"], layouts[name].dp)
        made.append(
            {
                "input_ids": own,
                "position_ids": None,
                "attention_mask": None,
                "labels": own.roll(-1, 1) % 200,
                "loss_mask": (own < 200).float(),
                "modality_inputs": _inputs(ids, layouts, dist.get_rank(), known),
            }
        )
    if "vision" in mine and dist.get_rank() == layouts["vision"].offset:
        seen = made[0]["modality_inputs"]["vision"]["tiny"]
        seen["x"] = torch.cat([seen["x"], seen["x"][:extra]])
    return made


def _media_on(known: Any, name: str, layout: Any, rank: int) -> range:
    """The media of the whole microbatch that a rank of an encoder with share "media" encodes."""
    from megatron_nemotron3.boundary.partition import media_shares, sample_shares

    media = known.media_of(name)
    samples = sample_shares(len(media), layout.dp)[layout.lane_of(rank)]
    before = sum(len(sample) for sample in media[: samples.start])
    mine = [n for sample in media[samples.start : samples.stop] for n in sample]
    own = media_shares(mine, layout.cp)[layout.coordinates(rank).get("cp", 0)]
    return range(before + own.start, before + own.stop)


def _inputs(ids: Tensor, layouts: Any, rank: int, known: Any) -> dict[str, Any]:
    """`modality_inputs` of a rank: the features of its media."""
    from tests.support import boundary_batches as batches
    from tests.support import boundary_omni as omni

    whole = batches.inputs(ids, 0, 1)
    if layouts is None:
        return whole
    found: dict[str, Any] = {}
    for name in omni.SPECIAL:
        found[name] = None
        if rank in layouts[name].ranks and whole[name] is not None:
            sizes = [n for sample in known.media_of(name) for n in sample]
            mine = _media_on(known, name, layouts[name], rank)
            start, rows = sum(sizes[: mine.start]), sum(sizes[mine.start : mine.stop])
            if rows:
                found[name] = {"tiny": {"x": whole[name]["tiny"]["x"][start : start + rows]}}
    return found


def _freeze(model: Any, names: tuple[str, ...]) -> None:
    for name, p in model.named_parameters():
        if any(name.startswith(f"modality_submodules.{frozen}") for frozen in names):
            p.requires_grad_(False)


def _load(model: Any, folder: str, name: str) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(
        model.sharded_state_dict(), str(Path(folder, name)), validate_access_integrity=False
    )
    model.load_state_dict(state)


@contextmanager
def _counted() -> Any:
    """[bytes that leave this rank, exchanges] while the block runs."""
    counts = [0, 0]
    original = dist.batch_isend_irecv

    def batched(operations: Any) -> Any:
        sends = [o for o in operations if o.op is dist.isend]
        counts[0] += sum(o.tensor.numel() * o.tensor.element_size() for o in sends)
        counts[1] += 1
        return original(operations)

    dist.batch_isend_irecv = batched  # type: ignore[assignment]
    try:
        yield counts
    finally:
        dist.batch_isend_irecv = original  # type: ignore[assignment]
