"""A training step of the tiny Omni model in a layout of its modules, and in one process.

Each module is in Megatron's DistributedDataParallel on its own groups; the schedules are stock. Runs on every
rank of a gloo world, inside `cpu_mode`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.partition import sample_shares
from megatron_nemotron3.models.omni import OmniConfig, get_omni
from megatron_nemotron3.proof.certify.tensors import Pieces, Tensors, gather
from tests.support.omni_oracle import without_mtp

SAMPLES, LENGTH, MICROBATCHES = 12, 48, 2
LANGUAGE, VISION, SOUND = "language", "vision", "sound"
#: (batch of a rank, the rank) -> the batch that it gets.
Change = Callable[[dict[str, Any], int], dict[str, Any]]
BUFFERS = ("expert_bias", "running_mean", "running_var")
IDS = {VISION: 18, SOUND: 27}
#: Media of each sample: ("picture", patches high, patches wide), ("video", frames, height, width), ("sound",
#: frames). The second microbatch has them in reverse and no sounds.
MEDIA: tuple[tuple[tuple[Any, ...], ...], ...] = (
    (("picture", 4, 6), ("sound", 40)),
    (("sound", 24), ("sound", 16)),
    (("video", 4, 32, 64), ("picture", 2, 4), ("video", 2, 64, 32)),
    (("picture", 2, 2), ("picture", 6, 4)),
    (("sound", 33), ("video", 2, 32, 32), ("picture", 2, 6)),
    (),
)


@dataclass(frozen=True)
class Case:
    """Where the modules are, as `Layout.parse` reads it, and how they are trained; sound "": Super VL."""

    language: str
    vision: str
    sound: str
    ep: int = 1
    feed: bool = True
    frozen: tuple[str, ...] = ()

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layouts by module."""
        texts = {LANGUAGE: self.language, VISION: self.vision, SOUND: self.sound}
        return {name: Layout.parse(text) for name, text in texts.items() if text}

    @property
    def colocated(self) -> bool:
        """Whether all modules have the same ranks."""
        return len({layout.ranks for layout in self.layouts.values()}) == 1

    def freezes(self, parameter: str) -> bool:
        """Whether a parameter is part of what is frozen."""
        for name in IDS:
            if parameter.startswith(f"modality_submodules.{name}."):
                return (name if ".encoders." in parameter else f"{name}-projector") in self.frozen
        return LANGUAGE in self.frozen


@dataclass
class Sample:
    """One conversation: ids [s], and its media in order."""

    ids: Tensor
    pictures: list[Tensor] = field(default_factory=list)
    grids: list[list[int]] = field(default_factory=list)
    videos: list[Tensor] = field(default_factory=list)
    #: Of each medium for the vision encoder, whether it is a video.
    is_video: list[bool] = field(default_factory=list)
    sounds: list[Tensor] = field(default_factory=list)


def model(case: Case) -> OmniConfig:
    """The model of a case."""
    made = get_omni("nano-omni-tiny" if case.sound else "super-vl-tiny")
    assert made is not None
    return made if case.sound else without_mtp(made)


def samples(number: int) -> list[Sample]:
    """Samples of microbatch `number`."""
    random = torch.Generator().manual_seed(number)
    made = []
    for media in 2 * (MEDIA if number % 2 == 0 else MEDIA[::-1]):
        sample = Sample(torch.randint(30, 2048, (LENGTH,), generator=random))
        at = 3
        for kind, *size in media:
            if kind == "sound":
                if number % 2:
                    continue
                # A spectrogram is one frame longer than its mask.
                sample.sounds.append(torch.randn(size[0] + 1, 32, generator=random))
                name, rows = SOUND, -(-(size[0] + 1) // 8)
            elif kind == "picture":
                sample.grids.append(list(size))
                sample.pictures.append(torch.randn(size[0] * size[1], 768, generator=random))
                sample.is_video.append(False)
                name, rows = VISION, size[0] * size[1] // 4
            else:
                frames, height, width = size
                sample.videos.append(torch.randn(frames, 3, height, width, generator=random))
                sample.is_video.append(True)
                name, rows = VISION, frames // 2 * (height // 32) * (width // 32)
            sample.ids[at : at + rows] = IDS[name]
            at += rows + 2
        assert at <= LENGTH
        made.append(sample)
    return made


def vision_input(of: list[Sample]) -> dict[str, Any] | None:
    """Input of the vision encoder for a lane's samples; None without media."""
    places = [video for sample in of for video in sample.is_video]
    if not places:
        return None
    grids = [grid for sample in of for grid in sample.grids]
    made: dict[str, Any] = {}
    if grids:
        made["pixel_values"] = torch.cat([p for sample in of for p in sample.pictures])
        made["image_grid_hw"] = torch.tensor(grids)
    if videos := [video for sample in of for video in sample.videos]:
        made["pixel_values_videos"] = videos
    order = [i for i, v in enumerate(places) if not v] + [i for i, v in enumerate(places) if v]
    return {"radio": {**made, "order": torch.tensor(order)}}


def sound_input(of: list[Sample]) -> dict[str, Any] | None:
    """Input of the sound encoder for a lane's samples; None without media."""
    clips = [clip for sample in of for clip in sample.sounds]
    if not clips:
        return None
    longest = max(size[0] for media in MEDIA for kind, *size in media if kind == "sound") + 1
    features = torch.stack([torch.nn.functional.pad(c, (0, 0, 0, longest - len(c))) for c in clips])
    mask = torch.arange(longest)[None] < torch.tensor([len(c) - 1 for c in clips])[:, None]
    return {"parakeet": {"input_features": features, "input_features_mask": mask}}


def lane_of(layout: Layout, rank: int) -> tuple[int, int]:
    """(data lane, number of lanes) of a rank; the first lane for a rank that the module does not have."""
    if rank not in layout.ranks:
        return 0, layout.dp
    stage = layout.coordinates(rank).get("pp", 0)
    return next(i for i, ranks in enumerate(layout.lanes(stage)) if rank in ranks), layout.dp


def share(values: Any, lane: tuple[int, int]) -> Any:
    """A lane's part of the samples."""
    mine = sample_shares(len(values), lane[1])[lane[0]]
    return values[mine.start : mine.stop]


def batches(layouts: dict[str, Layout]) -> Iterator[dict[str, Any]]:
    """Keyword arguments of this rank's forward, microbatch by microbatch."""
    rank = dist.get_rank()
    lanes = {name: lane_of(layout, rank) for name, layout in layouts.items()}
    own = next(name for name, layout in layouts.items() if rank in layout.ranks)
    for number in range(MICROBATCHES):
        whole = samples(number)
        ids = torch.stack([sample.ids for sample in whole])
        mine = share(ids, lanes[own])
        yield {
            "input_ids": mine,
            "position_ids": torch.arange(LENGTH).expand_as(mine),
            "labels": mine.roll(-1, 1),
            "loss_mask": ((mine >= 30) & (torch.arange(LENGTH) < LENGTH - 1)).float(),
            "modality_inputs": {
                name: make(share(whole, lanes[name]))
                for name, make in ((VISION, vision_input), (SOUND, sound_input))
                if name in lanes
            },
        }


def descriptions(ids: dict[str, int]) -> Iterator[Any]:
    """Of all microbatches, for a feed."""
    from megatron_nemotron3.boundary.feed import describe_ids

    for number in range(MICROBATCHES):
        yield describe_ids(torch.stack([sample.ids for sample in samples(number)]), ids)


def sharded(of: Any) -> list[Any]:
    """This rank's ShardedTensors but for counters; names do not show DistributedDataParallel."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = of.sharded_state_dict()
    apply_factories(state)
    tensors = [v for v in nested_values(state) if isinstance(v, ShardedTensor)]
    found = [tensor for tensor in tensors if tensor.data.is_floating_point()]
    for tensor in found:
        tensor.key = tensor.key.replace(".module.", ".")
    return found


def load(into: Any, weights: Tensors) -> None:
    """Copy this rank's part of the weights of one process."""
    with torch.no_grad():
        for t in sharded(into):
            local = (1,) * t.prepend_axis_num + tuple(t.data.shape)
            place = tuple(slice(o, o + n) for o, n in zip(t.global_offset, local, strict=True))
            t.data.copy_(weights[t.key][place].reshape(t.data.shape))


def pieces(of: Any) -> Pieces:
    """Copies of what this rank would save."""
    return [
        (
            t.key,
            tuple(t.global_shape),
            tuple(t.global_offset),
            t.data.detach().clone().reshape((1,) * t.prepend_axis_num + tuple(t.data.shape)),
        )
        for t in sharded(of)
    ]


def gradients(of: Any) -> Pieces:
    """Copies of the final gradients, named and cut as the parameters are; zeros of frozen ones."""
    values = {p: p.data for p in of.parameters()}
    try:
        for p in values:
            p.data = p.main_grad.clone() if p.requires_grad else torch.zeros_like(p.data)
        return [piece for piece in pieces(of) if not piece[0].endswith(BUFFERS)]
    finally:
        for p, value in values.items():
            p.data = value


def wrapped(made: Any, groups: dict[str, Any]) -> None:
    """Put each module into DistributedDataParallel and set how gradients are finalized."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_nemotron3.boundary.training import finalize_model_grads

    def ddp(module: Any, config: Any, name: str) -> Any:
        return DistributedDataParallel(
            config, DistributedDataParallelConfig(), module, pg_collection=groups[name]
        )

    if made.language_model is not None:
        made.language_model = ddp(made.language_model, made.config, LANGUAGE)
    for name, submodule in made.modality_submodules.items():
        config = copy.copy(made.config)
        config.sequence_parallel = False
        submodule.config = config
        if any(p.requires_grad for p in submodule.parameters()):
            made.modality_submodules[name] = ddp(submodule, config, name)
    made.config.finalize_model_grads_func = partial(finalize_model_grads, groups=groups)


def loss_of(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = (output.float() * mask).sum()
    return total, mask.sum().int(), {"loss": total.detach().clone()}


def forward_step(iterator: Any, made: Any) -> Any:
    output, mask = made(**next(iterator))
    return output, partial(loss_of, mask)


def step(case: Case, weights: Tensors | None = None, change: Change | None = None) -> dict[str, Any]:
    """A step in a layout, from `weights` (None: as built; in one process moved off 0 and 1).

    Args:
        change: changes a batch of a rank: `change(batch, rank)`; not what the feed describes.

    Returns: gradients and weights of this rank as `Pieces`, and the sum of this rank's losses; expert biases
        are after the step.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

    from megatron_nemotron3.boundary.feed import RowFeed
    from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
    from megatron_nemotron3.boundary.training import forward_backward_colocated
    from megatron_nemotron3.train.omni.model import build

    config_of_case = model(case)
    encoders = list(config_of_case.special_ids())
    made, groups = build(config_of_case, case.layouts, ep=case.ep, frozen=case.frozen)
    if weights is not None:
        load(made, weights)
    elif dist.get_world_size() == 1:
        randomize(made)
        weights = gather([pieces(made)])
    wrapped(made, groups)
    made.train()
    config = made.config
    config.variable_seq_lengths, config.pipeline_dtype = True, torch.float32
    data: Any = batches(case.layouts)
    if change is not None:
        data = (change(batch, dist.get_rank()) for batch in data)
    if case.feed:
        known = descriptions(config_of_case.special_ids())
        made.feed = data = RowFeed(data, lambda batch: next(known))
    language = case.layouts[LANGUAGE]
    common: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": data,
        "num_microbatches": MICROBATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": SAMPLES // language.dp,
        "forward_only": False,
    }
    for module in (made.language_model, *made.modality_submodules.values()):
        if hasattr(module, "zero_grad_buffer"):
            module.zero_grad_buffer()
    if case.colocated and language.pp == 1:
        result = schedules.forward_backward_no_pipelining(
            **common, model=made, pg_collection=groups[LANGUAGE]
        )
    elif case.colocated:
        result = forward_backward_colocated(
            **common,
            model=[made],
            pg_collection=groups[LANGUAGE],
            p2p_communicator=P2PCommunicator(pp_group=groups[LANGUAGE].pp, config=config),
        )
    else:
        communicator = BoundaryCommunicator(
            made.mimo_config.module_to_grid_map,
            {**{name: [LANGUAGE] for name in encoders}, LANGUAGE: []},
            config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
            module_output_ndim=dict.fromkeys(encoders, 2),
            sequence_parallel=[LANGUAGE] if language.tp > 1 else [],
            frozen=[n for n in encoders if {n, f"{n}-projector"} <= set(case.frozen)],
            hidden_size=config_of_case.language.hidden_size,
        )
        made.communicator = communicator
        if case.feed:
            communicator.feed = data
        result = schedules.forward_backward_pipelining_without_interleaving(
            **common,
            model=made,
            p2p_communicator=communicator,
            pg_collection=MultiModuleProcessGroupCollection(groups, LANGUAGE if LANGUAGE in groups else None),
        )
    return {
        "gradients": gradients(made),
        "weights": weights if dist.get_world_size() == 1 else {},
        "biases": [piece for piece in pieces(made) if piece[0].endswith("expert_bias")],
        "loss": sum(float(part["loss"]) for part in result),
    }


def steps(cases: list[Case], weights: Tensors) -> list[dict[str, Any]]:
    """Steps in several layouts, one after the other in the same world."""
    return [step(case, weights) for case in cases]


@torch.no_grad()
def randomize(made: Any) -> None:
    """Move what initialization sets to 0 or 1, so that a missing factor shows."""
    from tests.support.model_mapping import randomize as randomize_language

    randomize_language(made.language_model, 24)
    generator = torch.Generator().manual_seed(24)
    for p in made.modality_submodules.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=generator))
