"""`nemotron3 bisect`: which of two systems deviates from the checkpoint that both ran."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.remote import local, place
from megatron_nemotron3.common.output import add_json, result, say
from megatron_nemotron3.models.command import add_stored_model, stored_model

_PLACES = {
    "--checkpoint": "a run, a Megatron checkpoint or a Hugging Face folder: what both systems ran",
    "--previous": "an older checkpoint, to find weights that were not updated",
}
_FILES = {"--trainer": "recording of the trainer", "--engine": "recording of the inference engine"}


def register(commands: Any) -> None:
    """Add `nemotron3 bisect`."""
    command = commands.add_parser("bisect")
    for option, words in _PLACES.items():
        needed = option != "--previous"
        command.add_argument(option, type=place, required=needed, metavar="DIR", help=words)
    for option, words in _FILES.items():
        command.add_argument(option, type=Path, required=True, metavar="FILE", help=words)
    words = "recompute the first N sequences (default: all)"
    command.add_argument("--first", type=int, metavar="N", help=words)
    add_stored_model(command)
    add_json(command)
    command.set_defaults(run=bisect)


def bisect(options: argparse.Namespace) -> int:
    """Run `nemotron3 bisect`. Returns 0 if both systems agree with the checkpoint, 1 if one deviates.

    Raises:
        ValueError: a recording cannot be read, is of other tokens than the other one, or of another model; or
            as `Recomputation.open`.
    """
    if options.first is not None and options.first < 1:
        raise ValueError(f"--first {options.first}: give 1 or more")
    config = stored_model(options)

    from megatron_nemotron3.bisect.diagnose import Investigation
    from megatron_nemotron3.bisect.recompute import Recomputation
    from megatron_nemotron3.bisect.recording import check_model, check_same, read

    files = (options.trainer, options.engine)
    trainer, engine = (read(file) for file in files)
    check_same(trainer, engine)
    with ExitStack() as stack:
        model = Recomputation.open(stack.enter_context(local(options.checkpoint)), config)
        previous = None
        if options.previous is not None:
            previous = Recomputation.open(stack.enter_context(local(options.previous)), model.config)
        for file, side in zip(files, (trainer, engine)):
            try:
                check_model(side, model.config)
            except ValueError as problem:
                raise ValueError(f"{file}: {problem}") from None
            side.sequences = side.sequences[: options.first]
        stack.enter_context(result(options.json))
        name, lengths = model.config.name, [len(one.ids) for one in trainer.sequences]
        say(
            f"checkpoint {name}, layers {model.config.pattern}; sequences {len(lengths)}, tokens "
            f"{sum(lengths):,}, in the longest {max(lengths):,}",
            **{"model": name, "sequences": len(lengths), "tokens": sum(lengths)},
        )
        found = Investigation(model, previous, echo=say).compare(trainer, engine)
        lines = found.lines()
        say("\n".join(lines), **found.as_json(), findings=lines)
    return found.exit_status
