"""Build a Nemotron 3 model inside a Python pipeline: no shell, no global Megatron arguments.

    import megatron_nemotron3 as n3
    with n3.cpu_mode():                                   # on a GPU: leave this line out
        model = n3.build_model("super", tiny=True)        # megatron.core HybridModel of this rank

The numbers take one way whoever asks: dataclass -> flags -> Megatron's own parser -> TransformerConfig ->
Megatron's own model builder. So a model built here is the one the stock script builds from our flags.
"""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import __version__, parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_nemotron3 import cpu
from megatron_nemotron3.args import ParallelLayout, TrainingSchedule, flags, to_argv
from megatron_nemotron3.layers.stack import Nemotron3Stack
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models import tiny as make_tiny
from megatron_nemotron3.precision import settings as emulation


def megatron_args(argv: Sequence[str], world_size: int) -> Namespace:
    """Parse and validate words of a command line with Megatron's own parser, touching no global state.

    Args:
        argv: as `args.to_argv` gives them.
        world_size: number of ranks the layout wants, for Megatron's validation.

    Raises:
        SystemExit: Megatron refuses an option (its message is on stderr).
        AssertionError: Megatron refuses a combination.
    """
    from megatron.training import arguments

    with (
        patch.object(sys, "argv", ["megatron_nemotron3", *argv]),
        _environment_of(world_size),
        redirect_stdout(io.StringIO()),  # a thousand lines of defaults
    ):
        args = arguments.parse_args()
        arguments.validate_args(args)
    return args


@contextmanager
def _environment_of(world_size: int) -> Iterator[None]:
    """Megatron reads rank and world size from the environment; a running process group knows better."""
    rank = 0
    if torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with patch.dict("os.environ", {"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        yield


def model_config(
    model: str | Nemotron3Config,
    *,
    tiny: bool = False,
    layout: ParallelLayout | None = None,
    precision: str = "bf16",
    backend: str = "auto",
    schedule: TrainingSchedule | None = None,
    extra: Sequence[str] = (),
    te_precision_config_file: str | None = None,
    emulate: bool | str = False,
) -> Any:
    """Megatron's `HybridModelConfig` for a model; its builder is `HybridModelBuilder`.

    A config does not record that NVFP4 is emulated. `build_model` says so to the linears that it builds; a
    builder of your own must build inside `precision.settings.emulating`.

    Args:
        model: a catalog name ("super") or a config of your own.
        tiny: the small form of the same model.
        layout, precision, backend, schedule, te_precision_config_file: as for `flags`.
        extra: more Megatron options; one given here replaces ours.
        emulate: as for `build_model`.

    Raises:
        ValueError: unknown model, `emulate` has no meaning, or a rule is violated (`args.rules`).
    """
    from megatron.training import argument_utils

    config = get(model) if isinstance(model, str) else model
    config = make_tiny(config) if tiny else config
    layout = layout or ParallelLayout()
    emitted = flags(
        config,
        layout,
        precision=precision,
        backend=backend,
        schedule=schedule,
        extra=extra,
        te_precision_config_file=te_precision_config_file,
        emulate=bool(_emulation(emulate)),
        megatron_core=__version__,
    )
    args = megatron_args(to_argv(emitted), layout.world_size)
    if args.padded_vocab_size is None and args.vocab_size is None:
        args.vocab_size = config.vocab_size
    return argument_utils.hybrid_config_from_args(args)


def _emulation(emulate: bool | str) -> emulation.Emulation | None:
    """What the argument asks for; None if it asks for nothing."""
    if isinstance(emulate, str):
        return emulation.parse(emulate)
    return emulation.Emulation() if emulate else None


def build_model(
    model: str | Nemotron3Config,
    *,
    tiny: bool = False,
    layout: ParallelLayout | None = None,
    precision: str = "bf16",
    backend: str = "auto",
    schedule: TrainingSchedule | None = None,
    extra: Sequence[str] = (),
    te_precision_config_file: str | None = None,
    emulate: bool | str = False,
    pg_collection: ProcessGroupCollection | None = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
    seed: int = 1234,
) -> HybridModel:
    """This rank's `HybridModel`, on the GPU, or on the CPU inside `cpu_mode`.

    Where Megatron's groups exist they are used (or `pg_collection`). Where no process group exists, the
    layout must be one rank, and a world of one process is set up, seeded with `seed`.

    Other arguments: `model_config`; `pre_process`, `post_process`, `vp_stage` as in Megatron's builder.

    Args:
        emulate: compute in NVFP4 without FP4 hardware (docs/nvfp4.md); with precision "nvfp4", backend
            "torch" and a `te_precision_config_file`, which `nemotron3 precision NAME --output FILE` writes.
            True: the published recipe; text: a value of NEMOTRON3_EMULATE, such as "nvfp4,sr=0". False:
            whatever an enclosing `precision.settings.emulating` or, without one, that variable says.

    Raises:
        RuntimeError: no GPU and not inside `cpu_mode`; several ranks wanted but torch.distributed is not
            initialized; or the stack that got built is not ours.
        ValueError: unknown model, or a rule is violated.
    """
    if not torch.cuda.is_available() and not cpu.is_active():
        raise RuntimeError("no GPU here: build inside `with megatron_nemotron3.cpu_mode():`")
    layout = layout or ParallelLayout()
    _ensure_groups(layout, seed)
    config = model_config(
        model,
        tiny=tiny,
        layout=layout,
        precision=precision,
        backend=backend,
        schedule=schedule,
        extra=extra,
        te_precision_config_file=te_precision_config_file,
        emulate=emulate,
    )
    builder = config.get_builder_cls()(config)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    with emulation.emulating(_emulation(emulate) or emulation.current()):
        return verified(builder.build_model(groups, pre_process, post_process, vp_stage))


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> HybridModel:
    """What `megatron.training.pretrain(model_provider=…)` calls: build from Megatron's global arguments.

    The spec is the one `--spec` names; it must be of this package.

    Args:
        config: a TransformerConfig; None: from the arguments.

    Raises:
        RuntimeError: the stack that got built is not ours.
    """
    from megatron.training import argument_utils, get_args

    built = argument_utils.hybrid_config_from_args(get_args(), config)
    builder = built.get_builder_cls()(built)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return verified(builder.build_model(groups, pre_process, post_process, vp_stage))


def verified(model: HybridModel) -> HybridModel:
    """The model, if its stack is ours. Megatron-Core 0.19 silently builds its own if a spec fails to import.

    Raises:
        RuntimeError: it is not.
    """
    if not isinstance(model.decoder, Nemotron3Stack):
        raise RuntimeError(
            f"Megatron built {type(model.decoder).__name__} instead of Nemotron3Stack: "
            "pass --spec megatron_nemotron3.specs nemotron3_stack_spec"
        )
    return model


def _ensure_groups(layout: ParallelLayout, seed: int) -> None:
    """Use Megatron's groups, or make them for one process."""
    if parallel_state.model_parallel_is_initialized():
        return
    if not torch.distributed.is_initialized():
        if layout.world_size != 1:
            raise RuntimeError(
                f"layout {layout} wants {layout.world_size} ranks, but torch.distributed is not initialized: "
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
