"""`nemotron3 bisect`: which of two systems deviates from the checkpoint that both ran."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.remote import local, place
from megatron_nemotron3.common.options import NEEDED, add_command, argument, flag, json_flag, option
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.models.command import StoredModelOptions, stored_model


@dataclass(frozen=True, kw_only=True)
class BisectOptions:
    """Options of `nemotron3 bisect`."""

    checkpoint: Path | str = argument(
        "run, Megatron checkpoint or Hugging Face folder that both systems loaded", "CHECKPOINT", parse=place
    )
    previous: Path | str | None = option(
        "older checkpoint, to detect weights that were not updated", "DIR", parse=place
    )
    trainer: Path = option("recording of the trainer", "FILE", default=NEEDED)
    engine: Path = option("recording of the inference engine", "FILE", default=NEEDED)
    first: int | None = option("number of sequences to recompute (default: all)", "N", least=1)
    no_cause: bool = flag("find side, token and layer only; the search for a cause takes longest")
    stored: StoredModelOptions
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 bisect`."""
    add_command(commands.add_parser("bisect"), BisectOptions, bisect)


def bisect(options: BisectOptions) -> int:
    """Run `nemotron3 bisect`. Returns 0 if both systems agree with the checkpoint, 1 if one deviates."""
    config = stored_model(options.stored)
    if options.trainer.exists() and options.engine.exists() and options.trainer.samefile(options.engine):
        raise ValueError(f"--trainer and --engine are one file, {options.engine}: give two recordings")
    if options.previous is not None and (options.no_cause or options.previous == options.checkpoint):
        raise ValueError("--previous takes an older checkpoint, for the cause: drop it, or --no-cause")

    from megatron_nemotron3.proof.bisect.diagnose import Investigation
    from megatron_nemotron3.proof.bisect.recompute import Recomputation
    from megatron_nemotron3.proof.bisect.recording import check_model, check_same, read

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
        found = Investigation(model, previous, [] if options.no_cause else None, echo=say).compare(
            trainer, engine
        )
        lines = found.lines()
        say("\n".join(lines), **found.as_json(), findings=lines)
    return found.exit_status
