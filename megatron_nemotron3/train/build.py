"""Build a Nemotron 3 model inside a Python program: no shell, no global Megatron arguments.

    import megatron_nemotron3 as n3
    with n3.cpu_mode():                                   # on a GPU: leave this line out
        model = n3.build_model("super", tiny=True)        # megatron.core HybridModel of this rank

The numbers take the way of a stock script: dataclass -> flags -> Megatron's parser and model builder.
"""

from __future__ import annotations

import io
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import __version__, parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_nemotron3 import cpu
from megatron_nemotron3.launch import Launch, ParallelLayout, flags, precision_file, to_argv
from megatron_nemotron3.layers.stack import Nemotron3Stack
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.stack_specs import MODULE
from megatron_nemotron3.precision import settings as emulation


def megatron_args(argv: Sequence[str], world_size: int, *, whole_world: bool = True) -> Namespace:
    """Parse and validate arguments with Megatron's own parser; no global state changes."""
    from megatron.training import arguments

    def reading_argv(parser: ArgumentParser) -> Any:
        # Megatron calls `parse_args()` of what this hook returns, without arguments: so give them here.
        parser.prog = "megatron_nemotron3"
        return SimpleNamespace(parse_args=partial(parser.parse_args, list(argv)))

    with redirect_stdout(io.StringIO()):  # a thousand lines of defaults
        args = arguments.parse_args(reading_argv)
        # Megatron reads both from the environment, which a running process group overrides.
        args.rank, args.world_size = 0, world_size
        if whole_world and torch.distributed.is_initialized():
            args.rank, args.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        arguments.validate_args(args)
    if args.spec and len(args.spec) == 2 and args.spec[0] == MODULE:
        import_module(MODULE).named(*args.spec)  # the name may hold a table of experts
    return args


def model_config(launch: Launch, *, whole_world: bool = True) -> Any:
    """Return Megatron's `HybridModelConfig` for a launch; `whole_world`: the model has all ranks of the job.

    A config does not record that NVFP4 is emulated: build inside `precision.settings.emulating`, as `build`.
    """
    from megatron.training import argument_utils

    emitted = flags(replace(launch, megatron_core=__version__))  # the imported one need not be the installed
    precision_file.check(launch)
    args = megatron_args(to_argv(emitted), launch.layout.world_size, whole_world=whole_world)
    if args.padded_vocab_size is None and args.vocab_size is None:
        args.vocab_size = launch.config.vocab_size
    return argument_utils.hybrid_config_from_args(args)


def build(
    launch: Launch,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
    seed: int = 1234,
) -> HybridModel:
    """Build this rank's `HybridModel`, on the GPU, or on the CPU inside `cpu_mode`.

    Megatron's groups are used where they exist (or `pg_collection`). Without a process group the layout must
    be one rank, and a world of one process is set up, seeded with `seed`. `pre_process`, `post_process` and
    `vp_stage` are those of Megatron's builder. Without `launch.emulate` an enclosing
    `precision.settings.emulating` counts, or else the variable NEMOTRON3_EMULATE.

    Raises:
        RuntimeError: no GPU and not inside `cpu_mode`; several ranks wanted but torch.distributed is not
            initialized; or Megatron built another stack than ours.
        RuleError: the launch violates a rule.
    """
    if not torch.cuda.is_available() and not cpu.is_active():
        raise RuntimeError("no GPU found: build inside `with megatron_nemotron3.cpu_mode():`")
    config = model_config(launch)
    _ensure_groups(launch.layout, seed)
    with emulation.emulating(launch.emulate or emulation.current()):
        model = built(config, pg_collection, pre_process, post_process, vp_stage)
    model.nemotron3_config = launch.config  # for checkpoints.save_checkpoint
    return model


_BUILD_KEYWORDS = ("pg_collection", "pre_process", "post_process", "vp_stage", "seed")
#: Without them the gradient is that of the caller's loss alone.
_OWN_LOSS = ("--mtp-loss-scaling-factor", "0.0", "--moe-aux-loss-coeff", "0.0")


def build_model(
    model: str | Nemotron3Config, *, auxiliary_losses: bool = True, **settings: Any
) -> HybridModel:
    """Build a model by its description: `build_model("super", tiny=True, tp=2, precision="fp32")`.

    Args:
        model: a catalog name ("super") or a config of your own.
        auxiliary_losses: the losses of MTP and of the routers are part of every gradient. They are sums over
            tokens, which Megatron's schedule divides: give False for a training loop of your own.
        settings: keywords of `Launch.of` (`tiny`, `layout` or sizes of one such as `tp`, `precision`,
            `backend`, `schedule`, `extra`, `te_precision_config_file`, `emulate`, …) and of `build`
            (`pg_collection`, `pre_process`, `post_process`, `vp_stage`, `seed`).
            `emulate` computes in NVFP4 without FP4 hardware (docs/nvfp4.md), with precision "nvfp4", backend
            "torch" and a `te_precision_config_file`, which `nemotron3 precision NAME --output FILE` writes.
            True: the published recipe; text: a value of NEMOTRON3_EMULATE, such as "nvfp4,sr=0".

    Raises:
        TypeError, RuntimeError, ValueError: an unknown keyword; and as `build` and `Launch.of`.
    """
    build_settings = {name: settings.pop(name) for name in _BUILD_KEYWORDS if name in settings}
    if not auxiliary_losses:
        settings["extra"] = (*settings.get("extra", ()), *_OWN_LOSS)
    made = build(Launch.of(model, **settings), **build_settings)
    if auxiliary_losses:
        _look_for_own_loop(made)
    return made


def _look_for_own_loop(model: HybridModel) -> None:
    """In the first training step print whether nothing divides the losses of MTP and of the routers."""

    def look(*_: Any) -> None:
        config = model.config
        if not (model.training and torch.is_grad_enabled()):
            return
        handle.remove()
        adds = (model.mtp_process and config.mtp_loss_scaling_factor) or config.moe_aux_loss_coeff
        if adds and config.calculate_per_token_loss and config.finalize_model_grads_func is None:
            print(
                "megatron_nemotron3: warning: without Megatron's schedule nothing divides the losses of MTP "
                "and routers by the tokens, so they outweigh yours: give build_model auxiliary_losses=False, "
                "or set config.finalize_model_grads_func",
                file=sys.stderr,
            )

    handle = model.register_forward_pre_hook(look)


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> HybridModel:
    """Build from Megatron's global arguments, as `megatron.training.pretrain(model_provider=…)` requires.

    `--spec` must name a spec of this package. With slime's arguments, which have `enable_mtp_training`, MTP
    runs where slime requests it (`mtp_on_request`).

    Args:
        config: a TransformerConfig; None: from the arguments.

    Raises:
        RuntimeError: Megatron built another stack than ours.
    """
    from megatron.training import argument_utils, get_args

    args = get_args()
    whole = argument_utils.hybrid_config_from_args(args, config)
    model = built(whole, pg_collection, pre_process, post_process, vp_stage)
    if hasattr(args, "enable_mtp_training"):
        mtp_on_request(model)
    return model


def mtp_on_request(model: HybridModel) -> None:
    """Run MTP only in a forward with `mtp_kwargs={"mtp_labels": tokens}`, as slime's GPTModel does.

    Megatron's HybridModel does not know the keyword and always runs MTP, whose labels it derives from
    `input_ids`. So a hook takes the keyword, and raises ValueError if its labels are another tensor. MTP's
    weights are loaded, saved and exported in any case.
    """
    has_mtp = model.mtp_process

    def take_keyword(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        labels = (kwargs.pop("mtp_kwargs", None) or {}).get("mtp_labels")
        tokens = args[0] if args else kwargs["input_ids"]
        if labels is not None and (labels.shape, labels.data_ptr()) != (tokens.shape, tokens.data_ptr()):
            raise ValueError(
                "mtp_labels is not the tensor input_ids: Megatron's HybridModel derives the labels of MTP "
                "from input_ids; pass mtp_kwargs={'mtp_labels': input_ids}, or nothing"
            )
        model.mtp_process = has_mtp and labels is not None
        return args, kwargs

    def restore(*_: Any) -> None:
        model.mtp_process = has_mtp

    # Before hooks that bind arguments.
    model.register_forward_pre_hook(take_keyword, with_kwargs=True, prepend=True)
    model.register_forward_hook(restore, always_call=True)


def built(
    config: Any,
    groups: ProcessGroupCollection | None,
    pre_process: bool | None,
    post_process: bool | None,
    vp_stage: int | None,
) -> HybridModel:
    """Build from a `HybridModelConfig`; RuntimeError if the stack is not ours.

    Megatron builds its own, silently, if a spec fails to import.
    """
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    model: HybridModel = builder.build_model(groups, pre_process, post_process, vp_stage)
    if not isinstance(model.decoder, Nemotron3Stack):
        raise RuntimeError(
            f"Megatron built {type(model.decoder).__name__} instead of Nemotron3Stack: "
            "pass --spec megatron_nemotron3.specs nemotron3_stack_spec"
        )
    return model


def _ensure_groups(layout: ParallelLayout, seed: int) -> None:
    if parallel_state.model_parallel_is_initialized():
        return
    if not torch.distributed.is_initialized():
        if layout.world_size != 1:
            raise RuntimeError(
                f"layout {layout} needs {layout.world_size} ranks, but torch.distributed is not initialized: "
                "start with torchrun and call torch.distributed.init_process_group first"
            )
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(seed)
