"""What Megatron's training loop needs to train Nano Omni: builder, communicator, batches.

`recipes/omni/pretrain_omni.py` calls them; `arguments` reads its command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import torch
from megatron.core.enums import ModelType
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.global_vars import get_args, set_global_variables
from megatron.training.initialize import _set_random_seed
from megatron.training.models.base import ModelBuilder, ModelConfig
from megatron.training.training import pretrain
from megatron.training.utils import print_rank_0

from megatron_nemotron3.boundary.feed import RowFeed
from megatron_nemotron3.boundary.groups import grid, groups
from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
from megatron_nemotron3.train.data.packing import conversation_multiple
from megatron_nemotron3.train.omni import data
from megatron_nemotron3.train.omni.arguments import layouts_of, omni_of
from megatron_nemotron3.train.omni.layouts import LANGUAGE
from megatron_nemotron3.train.omni.mock import MockSamples
from megatron_nemotron3.train.omni.model import (
    OmniModel,
    encoder_specs,
    freeze,
    frozen_encoders,
    hybrid_spec,
    prepare,
)
from megatron_nemotron3.train.omni.processor import load_processor


def check_data(args: argparse.Namespace) -> None:
    """Read all conversations and the headers of their media. Collective."""
    if args.mock_data:
        return
    for path in (*args.data_path, *(args.valid_data_path or ())):
        print_rank_0(f"megatron_nemotron3: {path}: {data.check(_file(args, path), decode=False)}")


def _file(args: argparse.Namespace, path: str) -> data.ChatFile:
    return data.ChatFile(
        path,
        load_processor(args.omni_processor),
        omni_of(args),
        args.seq_length,
        pack=not args.omni_no_packing,
        multiple=conversation_multiple(args.context_parallel_size),
        cache=args.data_cache_path,
    )


def train(args: argparse.Namespace, forward_step: Callable[..., Any]) -> None:
    """Run Megatron's loop, in an initialized world; `forward_step` as the checkout's `mimo_forward_step`."""
    set_global_variables(args, build_tokenizer=False)
    topology = Topology.of(args)
    communicator = topology.communicator(args)
    pretrain(
        pretrain_cfg_container_from_args(
            args, OmniBuildConfig(_topology=topology, _communicator=communicator)
        ),
        Batches(args, topology, communicator),
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=None,
        skip_model_parallel_init=True,
        p2p_communicator=communicator,
        pg_collection=topology.schedule,
    )


@dataclass(frozen=True)
class Topology:
    """The modules' grids, and this rank's groups of the modules that it has."""

    grids: dict[str, HyperCommGrid]
    groups: dict[str, ProcessGroupCollection]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Topology:
        """Create them; collective."""
        layouts = layouts_of(args)
        ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or 1
        grids = {
            name: grid(layout, *((ep, etp) if name == LANGUAGE else ())) for name, layout in layouts.items()
        }
        return cls(grids, {n: groups(g) for n, g in grids.items() if g.is_current_rank_in_grid()})

    @property
    def encoders(self) -> list[str]:
        return [name for name in self.grids if name != LANGUAGE]

    @property
    def shared(self) -> bool:
        return len({(grid.rank_offset, grid.size) for grid in self.grids.values()}) == 1

    @property
    def schedule(self) -> MultiModuleProcessGroupCollection:
        return MultiModuleProcessGroupCollection(self.groups, LANGUAGE if LANGUAGE in self.groups else None)

    def communicator(self, args: argparse.Namespace) -> MultiModulePipelineCommunicator:
        config = _language_config(args).transformer
        if self.shared:
            return OneStage(config)
        return BoundaryCommunicator(
            self.grids,
            {LANGUAGE: []} | {name: [LANGUAGE] for name in self.encoders},
            config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
            module_output_ndim=dict.fromkeys(self.encoders, 2),
            sequence_parallel=[LANGUAGE] if config.sequence_parallel else [],
            frozen=frozen_encoders(self.encoders, args.freeze),
            hidden_size=config.hidden_size,
        )


class OneStage(MultiModulePipelineCommunicator):
    """Communicator for modules on the same ranks: Megatron's loop always takes the pipeline schedule."""

    is_pp_first_stage = is_pp_last_stage = True
    total_stages, current_stage = 1, 0

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rank_module_map: dict[str, Any] = {}  # no module has a stage that is not the first

    def recv_forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def send_forward_recv_backward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    send_forward = send_backward = send_backward_recv_forward = recv_backward = recv_forward


def _language_config(args: argparse.Namespace) -> Any:
    config = hybrid_config_from_args(args)
    # The schedule needs it where modules have layouts of their own.
    config.transformer.variable_seq_lengths = True
    return config


class OmniBuilder(ModelBuilder[OmniModel, "OmniBuildConfig"]):
    """Builds this rank's modules, each synchronized in its own groups."""

    def build_model(self, pg_collection: Any, *unused: Any, **also_unused: Any) -> OmniModel:
        args, topology = get_args(), self._model_config._topology
        groups = topology.groups
        at = groups.get(LANGUAGE) or next(iter(groups.values()))
        _set_random_seed(
            args.seed,
            args.data_parallel_random_init,
            pp_group=at.pp,
            dp_group=at.dp,
            tp_group=at.tp,
            ep_group=at.ep,
            etp_group=at.expt_tp,
        )
        language, omni = groups.get(LANGUAGE), omni_of(args)
        model = OmniModel(
            MimoModelConfig(
                language_model_spec=hybrid_spec(_language_config(args), language),
                modality_submodules_spec=encoder_specs(omni, groups, args.seed),
                special_token_ids=omni.special_ids(),
                module_to_grid_map=topology.grids,
            ),
            cp_group=language.cp if language is not None else None,
            tp_group=language.tp if language is not None else None,
        )
        model.model_type = ModelType.encoder_or_decoder
        return model

    def build_distributed_models(
        self, pg_collection: Any, ddp_config: Any = None, *unused: Any, **also_unused: Any
    ) -> list[OmniModel]:
        args, topology = get_args(), self._model_config._topology
        model = self.build_model(pg_collection)
        if isinstance(self._model_config._communicator, BoundaryCommunicator):
            model.communicator = self._model_config._communicator
        freeze(model, args.freeze)
        prepare(model, topology.groups, ddp_config, data_parallel_random_init=args.data_parallel_random_init)
        model.config.grad_scale_func = lambda loss: loss
        if args.overlap_grad_reduce:
            model.config.no_sync_func = model.no_sync
            if args.align_grad_reduce:
                model.config.grad_sync_func = model.start_grad_sync
        name = next(name for name in topology.grids if name in topology.groups)
        model.pg_collection = topology.groups[name]
        model.rng_state_key_prefix = f"{name}."
        return [model]


@dataclass(kw_only=True)
class OmniBuildConfig(ModelConfig):
    """Makes Megatron's loop use `OmniBuilder`. Fields that begin with _ are not written to checkpoints."""

    builder: ClassVar[str] = "megatron_nemotron3.train.omni.entry.OmniBuilder"
    _topology: Topology = field(default=None)  # type: ignore[assignment]
    _communicator: MultiModulePipelineCommunicator | None = None


class Batches:
    """Megatron's dataset provider: iterators over this rank's batches, from where the checkpoint ended."""

    is_distributed = True

    def __init__(
        self, args: argparse.Namespace, topology: Topology, communicator: MultiModulePipelineCommunicator
    ) -> None:
        self._args, self._communicator, self._omni = args, communicator, omni_of(args)
        layouts, rank = layouts_of(args), args.rank
        self._samples = args.micro_batch_size * layouts[LANGUAGE].dp
        self._lanes = {
            name: (layouts[name].coordinates(rank).get("dp", 0), layouts[name].dp) for name in topology.groups
        }

    def __call__(self, counts: Sequence[int | None]) -> tuple[Any, ...]:
        """Return iterators over training, validation and test batches; none ends."""
        args = self._args
        starts = (args.consumed_train_samples, args.consumed_valid_samples, 0)
        feeds = [RowFeed(self._batches(*one), itemgetter("microbatch")) for one in enumerate(starts)]
        if isinstance(self._communicator, BoundaryCommunicator):
            self._communicator.feed, self._communicator.evaluation_feed = feeds[:2]
        return tuple(feeds)

    def _batches(self, split: int, start: int) -> Iterator[dict[str, Any]]:
        if start % self._samples:
            raise ValueError(
                f"the checkpoint ends after {start} samples, which is no multiple of the {self._samples} of "
                "a microbatch over all replicas: use a smaller --micro-batch-size"
            )
        args, seed = self._args, self._args.seed + split
        source: data.Samples
        if args.mock_data:
            source = MockSamples(self._omni, args.seq_length, seed)
        else:
            path = ((args.valid_data_path if split else None) or args.data_path)[0]
            source = data.MediaRows(_file(args, path), seed)
        for batch in data.batches(source, self._samples, self._lanes, start, args.num_workers):
            yield batch | {"modality_inputs": _cast(batch["modality_inputs"], args.params_dtype)}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    if isinstance(value, list):
        return [_cast(one, dtype) for one in value]
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
