"""`nemotron3 train boost`: measure drafts, train the MTP heads, measure again."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.trust import trust_option, trusting
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.options import (
    NEEDED,
    add_option,
    add_options,
    argument,
    data_path_option,
    device_option,
    option,
    text_option,
    tokenizer_option,
)
from megatron_nemotron3.common.parser import resolve_device
from megatron_nemotron3.common.switches import BOOST, environment
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.launch.boosting import LOSSES, Boost
from megatron_nemotron3.launch.command import LAYOUT, SCHEDULE, add_launch
from megatron_nemotron3.models.command import StoredModelOptions
from megatron_nemotron3.post_training.steps import step

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.boost.inputs import BoostInputs

#: Of the tiny models, which learn in a minute on a CPU.
STEPS, LR = 200, 1e-3
#: Recursive steps in training, and tokens drafted in measuring.
DEPTHS = 5


_DEFAULT = Boost(mix=1.0)
_head = partial(option, group="MTP heads")


@dataclass(frozen=True, kw_only=True)
class BoostOptions:
    """Options of `nemotron3 train boost`, but for those of a launch."""

    checkpoint: Path = argument("run, or Megatron or Hugging Face checkpoint folder", "CHECKPOINT")
    output: Path = option("output folder", "DIR", default=NEEDED)
    stored: StoredModelOptions
    depths: int = _head(
        f"recursive steps in training, and drafted tokens in the measurements (default {DEPTHS})",
        "N",
        default=DEPTHS,
    )
    loss: str = _head(f"loss function (default {_DEFAULT.loss})", default=_DEFAULT.loss, choices=LOSSES)
    loss_temperature: float = _head(
        f"temperature of both distributions in the loss (default {_DEFAULT.temperature:g})",
        "T",
        default=_DEFAULT.temperature,
    )
    mix: float = _head(
        f"share of tokens that read the hidden state of a random depth (default {_DEFAULT.mix:g}; 0: none)",
        "P",
        default=_DEFAULT.mix,
    )
    decay: float = _head("loss weight of a depth relative to the previous one", "N", default=_DEFAULT.decay)
    grow: str | None = _head("add an MTP block with these layers (*E) to a model without MTP", "PATTERN")
    text: str | None = text_option("default: the run's data", group="data")
    data_path: str | None = data_path_option("only one", group="data")
    tokenizer: Path | None = tokenizer_option("the run's", group="data")
    trust_checkpoint: bool = trust_option()


def register(commands: Any) -> None:
    """Add `nemotron3 train boost`."""
    command = commands.add_parser("train boost")
    command.set_defaults(run=boost_command)
    add_options(command, BoostOptions)
    add_launch(command, precision=None)
    add_option(command, "device", device_option())


def boost_command(options: argparse.Namespace) -> int:
    """Run the steps that are not done yet. Exit status 0; that of a step that failed or was interrupted."""
    started = time.monotonic()
    boost = Boost(options.loss, options.loss_temperature, options.mix, options.decay)
    from megatron_nemotron3.post_training.boost import inputs as boost_inputs

    options.device = resolve_device(options.device, "megatron.core")
    if options.device == "cpu":
        quiet_on_cpu()
    with trusting(options.trust_checkpoint):
        given = boost_inputs.check(options, boost, STEPS, LR)
    boost_inputs.prepare(given, options.output)
    with lock.held(options.output):
        if status := _boost(options, boost, given):
            return status
    print(f"took         {time.monotonic() - started:.0f} s")
    return 0


def _boost(options: argparse.Namespace, boost: Boost, given: BoostInputs) -> int:
    from megatron_nemotron3.post_training.measure import measure_drafts, report_drafts

    out = options.output
    before = None
    if not options.grow:
        before = measure_drafts(options.checkpoint, given, options, out / "before.json")
    base = out / "base"
    if given.hugging_face and not base.exists():
        status = step(options.main, "convert", "from-hf", options.checkpoint, base)
        if status:
            return status
    arguments = _training_arguments(options, given, out)
    with environment(BOOST, boost.text()), trusting(options.trust_checkpoint):
        if status := step(options.main, "train", *arguments, prefix=f"{BOOST}={boost.text()} "):
            return status
    after = measure_drafts(out / "run", given, options, out / "after.json")
    for line in report_drafts(before, after):
        print(line)
    print(f"checkpoint   {out / 'run'}")
    return 0


def _training_arguments(options: argparse.Namespace, given: BoostInputs, out: Path) -> list[object]:
    arguments: list[object] = ["--model", out / "model.json", "--pretrained", given.pretrained(out)]
    arguments += ["--data-path", given.prefix(out), "--tokenizer", given.tokenizer, "--output", out / "run"]
    arguments += ["--steps", given.steps, "--lr", given.lr, "--device", options.device]
    valued = {*LAYOUT, *SCHEDULE, "precision", "backend", "te_precision_config_file"} - {"steps", "lr"}
    for name in sorted(valued):
        if (value := getattr(options, name)) is not None:
            arguments += ["--" + name.replace("_", "-"), value]
    arguments += ["--emulate"] if options.emulate else []
    grown = ["--dist-ckpt-strictness", "log_unexpected"] if options.grow else []
    # Megatron pads the vocabulary to a multiple of this times TP: to as many rows as there are.
    padded = ["--make-vocab-size-divisible-by", given.rows // (options.tp or 1)]
    return [*arguments, "--", "--split", given.split, *padded, *grown, *options.extra]
