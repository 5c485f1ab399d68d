"""`nemotron3 plan`: the fastest layouts of a model on a number of GPUs."""

from __future__ import annotations

import argparse
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from megatron_nemotron3.args import PRECISIONS, Launch, TrainingSchedule, published
from megatron_nemotron3.common.files import require_plot
from megatron_nemotron3.common.output import add_json, print_json
from megatron_nemotron3.models.command import add_model, chosen_model
from megatron_nemotron3.plan.hardware import GPUS, gpu_named
from megatron_nemotron3.plan.options import DISPATCHERS
from megatron_nemotron3.plan.report import describe, memory_bars, render
from megatron_nemotron3.plan.search import Question, remedies, search

#: Default sequences of a step where no schedule was published; all three reports have 3072.
BATCH = 3072
#: No one has more GPUs, and the search would take long.
MOST_GPUS = 131072


def register(commands: Any) -> None:
    """Add `nemotron3 plan`."""
    command = commands.add_parser("plan")
    add_model(command)
    command.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the whole job")
    command.add_argument(
        "--gpu", choices=GPUS, required=True, help="type of GPU: memory, rates and NVLink are its"
    )
    command.add_argument(
        "--nvlink-domain", type=int, metavar="N", help="GPUs that NVLink joins (default: its)"
    )
    training = command.add_argument_group("training")
    training.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens per sequence (default: the model's)"
    )
    training.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help=f"sequences per step (default: as published, or {BATCH})",
    )
    training.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="number format of the linear layers (default bf16)",
    )
    training.add_argument(
        "--dispatcher",
        choices=DISPATCHERS,
        help="how tokens are sent to experts (default: as published for the GPU; with --plain: alltoall)",
    )
    training.add_argument(
        "--plain", action="store_true", help="without the performance options published for the GPU"
    )
    # Earlier spellings.
    command.add_argument("--seq", dest="seq_length", type=int, default=SUPPRESS, help=SUPPRESS)
    command.add_argument("--gbs", dest="global_batch_size", type=int, default=SUPPRESS, help=SUPPRESS)
    shown = command.add_argument_group("output")
    shown.add_argument(
        "--best", type=int, default=5, metavar="N", help="how many layouts or candidates to print (5)"
    )
    add_json(shown)
    shown.add_argument(
        "--plot", type=Path, metavar="PNG", help="write a bar chart of the memory of the best layouts"
    )
    command.set_defaults(run=plan)


def plan(options: argparse.Namespace) -> int:
    """Print the best layouts. Exit status 0, or 1 if nothing fits.

    Raises:
        ValueError: a number out of range, or a precision that the GPU has no units for.
        OSError: the PNG cannot be written.
        ModuleNotFoundError: matplotlib is not installed (`--plot`).
    """
    config = chosen_model(options)
    if options.plot is not None:
        require_plot(options.plot, "--plot")
    for name, most in (("gpus", MOST_GPUS), ("best", 1000)):
        if not 1 <= (value := getattr(options, name)) <= most:
            raise ValueError(f"--{name} {value}: give 1 to {most}")
    length, batch = options.seq_length, options.global_batch_size  # 0 is wrong, not "as published"
    schedule = TrainingSchedule(
        seq_length=config.seq_length if length is None else length,
        global_batch_size=(published(config).global_batch_size or BATCH) if batch is None else batch,
    )
    question = Question(
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
    answer = search(question, options.best)
    cures = [] if answer.best else remedies(question)
    if options.plot is not None:
        memory_bars(answer, options.plot)
    if options.json:
        print_json(describe(answer, cures))
    else:
        print(render(answer, cures))
        if options.plot is not None:
            print(f"wrote {options.plot}")
    return 0 if answer.best else 1
