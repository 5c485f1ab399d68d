"""`nemotron3 plan`: the fastest layouts of a model on a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_nemotron3.common.options import NEEDED, add_command, flag, json_flag, option
from megatron_nemotron3.common.output import print_json
from megatron_nemotron3.launch import PRECISIONS, Launch, TrainingSchedule, published
from megatron_nemotron3.launch.plan.hardware import GPUS, gpu_named
from megatron_nemotron3.launch.plan.options import DISPATCHERS
from megatron_nemotron3.launch.plan.report import describe, render
from megatron_nemotron3.launch.plan.search import PlanRequest, remedies, search
from megatron_nemotron3.models.command import ModelOptions, chosen_model

#: Default sequences of a step where no schedule was published; all three reports have 3072.
BATCH = 3072
#: No one has more GPUs, and the search would take long.
MOST_GPUS = 131072


_training = partial(option, group="training")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `nemotron3 plan`."""

    which: ModelOptions
    gpus: int = option("number of GPUs of the whole job", "N", default=NEEDED, least=1, most=MOST_GPUS)
    gpu: str = option("GPU type, for memory, rates and NVLink", default=NEEDED, choices=GPUS)
    nvlink_domain: int | None = option(
        "number of GPUs in an NVLink domain (default: that of the GPU type)", "N"
    )
    seq_length: int | None = _training("tokens per sequence (default: the model's)", "N", hidden=["--seq"])
    global_batch_size: int | None = _training(
        f"sequences per step (default: as published, or {BATCH})", "N", hidden=["--gbs"]
    )
    precision: str = _training(
        "number format of the linear layers (default bf16)", default="bf16", choices=PRECISIONS
    )
    dispatcher: str | None = _training(
        "token dispatcher (default: as published for the GPU; with --plain: alltoall)", choices=DISPATCHERS
    )
    plain: bool = flag("leave out the performance options published for the GPU", group="training")
    best: int = option(
        "number of layouts to print (default 5)", "N", default=5, group="output", least=1, most=1000
    )
    json: bool = json_flag(group="output")


def register(commands: Any) -> None:
    """Add `nemotron3 plan`."""
    add_command(commands.add_parser("plan"), PlanOptions, plan)


def plan(options: PlanOptions) -> int:
    """Print the best layouts. Exit status 0, or 1 if nothing fits."""
    config = chosen_model(options.which)
    length, batch = options.seq_length, options.global_batch_size  # 0 is wrong, not "as published"
    schedule = TrainingSchedule(
        seq_length=config.seq_length if length is None else length,
        global_batch_size=(published(config).global_batch_size or BATCH) if batch is None else batch,
    )
    request = PlanRequest(
        launch=Launch(
            config=config,
            precision=options.precision,
            backend="te",
            schedule=schedule,
            gpu=None if options.plain else options.gpu,
        ),
        gpus=options.gpus,
        gpu=gpu_named(options.gpu, options.nvlink_domain),
        dispatcher=options.dispatcher,
    )
    result = search(request, options.best)
    cures = [] if result.best else remedies(request)
    if options.json:
        print_json(describe(result, cures))
    else:
        print(render(result, cures))
    return 0 if result.best else 1
