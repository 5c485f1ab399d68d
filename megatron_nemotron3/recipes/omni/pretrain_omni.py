"""The MIMO entry of a Megatron-LM checkout (examples/mimo, tag core_v0.19.0) with this package's model.

    PYTHONPATH=$MEGATRON_LM_DIR torchrun … -m megatron_nemotron3.run pretrain_omni.py ARGS…

Arguments, topology, mock data, forward step and training loop are the checkout's. Its entry cannot be given
another model, communicator or builder, so this script replaces the entry and calls the same functions. New:

    layers of --spec             the checkout's provider always takes upstream's TE stack
    BoundaryMimoModel,           any DP ratio, ragged rows; the same process groups as the checkout's
    BoundaryCommunicator
    finalize_model_grads         gradient scale by boundary/training.py
    --colocated                  encoder and language model on the same ranks, each with its own TP and DP:
                                 the checkout refuses that in arguments, builder and loaders
    --vision-num-layers          fewer layers of the vision encoder, for a trial
    --transformer-impl local     an encoder without TE, for a trial on a CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from examples.mimo import pretrain_mimo as stock
from examples.mimo.model_providers import MimoProvider
from examples.mimo.model_providers.nemotron_moe_vlm import nemotron_provider
from examples.mimo.training import builder as stock_builder
from examples.mimo.training import data as stock_data
from examples.mimo.training.runtime import (
    _module_config,
    configure_module_rng,
    wrap_active_modules_with_ddp,
)
from examples.mimo.training.topology import HeteroTopology, ModuleGridSpec, create_topology
from megatron.core.enums import ModelType
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_args, set_global_variables
from megatron.training.training import pretrain
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_nemotron3.boundary.mimo import BoundaryMimoModel
from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator
from megatron_nemotron3.boundary.training import finalize_model_grads


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the checkout's arguments and ours."""
    parser = stock.extra_args_provider(parser)
    group = parser.add_argument_group("boundaries of megatron_nemotron3")
    group.add_argument("--colocated", action="store_true", help="all modules on all ranks")
    group.add_argument("--vision-num-layers", type=int, help="of the vision encoder; default: all 32")
    return parser


def parse() -> argparse.Namespace:
    """Parse and validate. Megatron's own validation sees the language model's share of the world.

    Raises:
        ValueError: the layouts do not fit the world or each other.
    """
    args = parse_args(add_arguments)
    if args.colocated:
        _check_colocated(args)
    else:
        stock.validate_hetero_grid_args(args, args.world_size)
    if not args.spec:
        raise ValueError("no --spec: give --spec megatron_nemotron3.specs nemotron3_stack_spec")
    world, args.world_size = args.world_size, args.llm_dp
    try:
        validate_args(args, {"dataloader_type": "external"})
    finally:
        args.world_size = world
    if args.padded_vocab_size is None:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.llm_tp, logging_enabled=False
        )
    return args


def _check_colocated(args: argparse.Namespace) -> None:
    sizes = {"encoder": args.encoder_tp * args.encoder_dp, LANGUAGE: args.llm_tp * args.llm_dp}
    for name, size in sizes.items():
        if size != args.world_size:
            raise ValueError(
                f"{name}: TP * DP = {size}, the world is {args.world_size}: use --colocated sizes"
            )
    if (args.llm_pp, args.llm_cp) != (1, 1):
        raise ValueError(f"--llm-pp {args.llm_pp} --llm-cp {args.llm_cp}: use 1 and 1 with --colocated here")
    if args.micro_batch_size * args.llm_dp % args.encoder_dp:
        raise ValueError(
            f"{args.micro_batch_size * args.llm_dp} samples of a microbatch do not divide among "
            f"--encoder-dp {args.encoder_dp}"
        )


def _language_spec(args: argparse.Namespace, pg_collection: Any, grid: Any) -> ModuleSpec:
    """The checkout's language model with the layers of --spec."""
    spec = nemotron_provider().language_spec(args, pg_collection, grid)
    params = {name: value for name, value in spec.params.items() if name != "mamba_stack_spec"}
    return ModuleSpec(
        module=HybridModel, params=params | {"hybrid_stack_spec": import_module(tuple(args.spec))}
    )


def _encoder_spec(name: str, args: argparse.Namespace, pg_collection: Any, grid: Any) -> ModuleSpec:
    """The checkout's vision encoder, with fewer layers or without TE if the arguments say so."""
    spec = nemotron_provider().encoder_specs[name](args, pg_collection, grid)
    params = spec.submodules["encoders"][name].params
    if args.vision_num_layers:
        params["transformer_config"].num_layers = args.vision_num_layers
    if args.transformer_impl == "local":
        params["transformer_layer_spec"] = get_vit_layer_with_local_spec()
    return spec


class OneStage(MultiModulePipelineCommunicator):
    """Communicator of a one-stage pipeline, for modules on the same ranks, which exchange rows in the model.

    With several modules Megatron's loop always takes the pipeline schedule.
    """

    is_pp_first_stage = is_pp_last_stage = True
    total_stages, current_stage = 1, 0

    def __init__(self, config: Any) -> None:
        self.config = config

    def recv_forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return no input."""
        return {}

    def send_forward_recv_backward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return no gradient, because the output is the loss."""
        return {}

    send_forward = send_backward = send_backward_recv_forward = recv_backward = recv_forward


def _communicator(args: argparse.Namespace, topology: HeteroTopology) -> MultiModulePipelineCommunicator:
    config = _language_spec(args, None, topology.grids[LANGUAGE]).params["config"]
    if args.colocated:
        return OneStage(config)
    encoders = [name for name in topology.grids if name != LANGUAGE]
    return BoundaryCommunicator(
        topology.grids,
        {LANGUAGE: []} | {name: [LANGUAGE] for name in encoders},
        config,
        dim_mapping={"s": 0, "b": 1, "h": 2},
        module_output_ndim=dict.fromkeys(encoders, 2),
        hidden_size=config.hidden_size,
        frozen=encoders if args.freeze_vit and args.freeze_projection else (),
    )


def provider() -> MimoProvider:
    """The checkout's model with our layers and communicator."""
    given = nemotron_provider()
    return replace(
        given,
        language_spec=_language_spec,
        encoder_specs={name: partial(_encoder_spec, name) for name in given.encoder_specs},
        build_communicator=_communicator,
    )


class OmniBuilder(stock_builder.MimoModelBuilder):
    """Builds a BoundaryMimoModel of this rank's modules, each seeded and synchronized in its own groups."""

    def build_distributed_models(
        self, pg_collection: Any, *unused: Any, data_parallel_random_init: bool = False, **also_unused: Any
    ) -> list[BoundaryMimoModel]:
        """Do what the checkout's builder does, for any number of modules on this rank."""
        args, topology, ours = get_args(), self._topology, provider()
        mine = {n: pg for n, pg in topology.module_pgs.items() if topology.grids[n].is_current_rank_in_grid()}
        names = [name for name in topology.grids if name != LANGUAGE]
        for pg in mine.values():  # the log of MoE losses asks for it, the checkout's topology lacks it
            pg.dp_cp_gtp_remat = pg.dp_cp

        def seed(name: str) -> None:
            offset = stock_builder._LANGUAGE_SEED_OFFSET
            offset = offset if name == LANGUAGE else stock_builder._ENCODER_SEED_OFFSET
            configure_module_rng(args, mine[name], offset, data_parallel_random_init)

        class Seeded(BoundaryMimoModel):
            def _initialize_submodules(self) -> None:
                for name in names:
                    if name in mine:
                        seed(name)
                super()._initialize_submodules()

            def _initialize_language_model(self) -> None:
                if LANGUAGE in mine:
                    seed(LANGUAGE)
                super()._initialize_language_model()

        language = mine.get(LANGUAGE)
        grids = topology.grids
        tokens = ours.special_token_ids(args)
        config = stock_builder.MimoModelConfig(
            language_model_spec=ours.language_spec(args, language, grids[LANGUAGE]),
            modality_submodules_spec={n: ours.encoder_specs[n](args, mine.get(n), grids[n]) for n in names},
            special_token_ids={name: tokens[name] for name in names},
            module_to_grid_map=grids,
        )
        model = Seeded(
            config,
            cp_group=language.cp if language is not None else None,
            tp_group=language.tp if language is not None else None,
        )
        model.model_type = ModelType.encoder_or_decoder
        for encoder in model.modality_submodules.values():  # in FP32 the checkout finds no config otherwise
            encoder.config = _module_config(encoder)
        wrap_active_modules_with_ddp(args, model, topology, data_parallel_random_init)
        model.config.finalize_model_grads_func = partial(finalize_model_grads, groups=mine)
        model.config.grad_scale_func = lambda loss: loss
        if args.overlap_grad_reduce:
            model.config.no_sync_func = model.no_sync
            if args.align_grad_reduce:
                model.config.grad_sync_func = model.start_grad_sync
        model.pg_collection = mine[LANGUAGE if language is not None else names[0]]
        model.rng_state_key_prefix = "language." if language is not None else "encoder."
        return [model]


@dataclass(kw_only=True)
class OmniBuildConfig(stock_builder.MimoBuildConfig):
    """Configuration that makes Megatron's loop use `OmniBuilder`."""

    def get_builder_cls(self) -> type:
        """Return the class instead of its import path."""
        return OmniBuilder


def _grids(args: argparse.Namespace, encoder: str) -> list[ModuleGridSpec]:
    if not args.colocated:
        return list(stock.build_module_grid_specs(args, args.world_size, encoder))
    size = args.world_size
    return [
        ModuleGridSpec(name=encoder, num_ranks=size, tp=args.encoder_tp),
        ModuleGridSpec(
            name=LANGUAGE, num_ranks=size, tp=args.llm_tp, ep=args.llm_ep, expt_tp=args.llm_expt_tp or 1
        ),
    ]


def _loaders(args: argparse.Namespace, topology: HeteroTopology, encoder: str) -> tuple[Any, ...]:
    """Training, validation and test batches of this rank; a rank with both modules gets both parts."""
    if not args.colocated:
        loaders = stock_data.build_train_valid_test_data_loaders(args, topology)
        return tuple(iter(loader) if loader is not None else None for loader in loaders)
    build, pgs = stock_data._build_split_loaders, topology.module_pgs
    parts = [
        build(
            args,
            batch_size=args.micro_batch_size * args.llm_dp // dp,
            pg_collection=pgs[name],
            module_seed_offset=offset,
            encoder_name=encoder if name == encoder else None,
        )
        for name, dp, offset in (
            (LANGUAGE, args.llm_dp, stock_data._LANGUAGE_SEED_OFFSET),
            (encoder, args.encoder_dp, stock_data._ENCODER_SEED_OFFSET),
        )
    ]

    def both(language: Any, seen: Any) -> Iterator[dict[str, Any]]:
        for batch, other in zip(language, seen, strict=False):
            yield {**batch, "modality_inputs": other["modality_inputs"]}

    return tuple(both(language, seen) for language, seen in zip(*parts, strict=True))


def main() -> None:
    """Build the topology and run Megatron's training loop."""
    args = parse()
    set_global_variables(args, build_tokenizer=False)
    if args.distributed_backend != "nccl":  # on a CPU; the checkout knows nothing else than nccl
        torch.distributed.init_process_group(args.distributed_backend)
    stock.initialize_distributed()
    ours = provider()
    (encoder,) = ours.encoder_module_names
    topology = create_topology(_grids(args, encoder))

    def datasets(_samples: Any) -> tuple[Any, ...]:
        return _loaders(args, topology, encoder)

    datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        pretrain_cfg_container_from_args(args, OmniBuildConfig(_topology=topology)),
        datasets,
        ModelType.encoder_or_decoder,
        stock.mimo_forward_step,
        model_provider=None,
        skip_model_parallel_init=True,
        p2p_communicator=ours.build_communicator(args, topology),
        pg_collection=topology.schedule_pg_collection,
    )
    stock.shutdown_distributed()


if __name__ == "__main__":
    main()
