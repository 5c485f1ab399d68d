"""`nemotron3 boost`: measure drafts, train the MTP heads, measure again. Training is `nemotron3 train`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.common import lock
from megatron_nemotron3.common.files import require_plot
from megatron_nemotron3.common.options import (
    add_option,
    add_options,
    data_path_option,
    device_option,
    text_option,
    tokenizer_option,
)
from megatron_nemotron3.common.switches import BOOST
from megatron_nemotron3.launch.boosting import LOSSES, Boost
from megatron_nemotron3.launch.command import LAYOUT, SCHEDULE, add_launch
from megatron_nemotron3.models.command import StoredModelOptions
from megatron_nemotron3.post_training.finetune.command import environment, step

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.boost.inputs import BoostInputs

#: Of the tiny models, which learn in a minute on a CPU.
STEPS, LR = 200, 1e-3
#: Recursive steps in training, and tokens drafted in measuring.
DEPTHS = 5


def register(commands: Any) -> None:
    """Add `nemotron3 boost`."""
    command = commands.add_parser("boost")
    command.set_defaults(run=boost_command)
    command.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a run, Megatron's or Hugging Face's folder"
    )
    command.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where to write (a folder)"
    )
    add_options(command, StoredModelOptions)
    heads = command.add_argument_group("the heads")
    heads.add_argument(
        "--depths",
        type=int,
        default=DEPTHS,
        metavar="N",
        help=f"recursive steps in training, and most drafts that are measured (default {DEPTHS})",
    )
    default = Boost(mix=1.0)
    heads.add_argument(
        "--loss", choices=LOSSES, default=default.loss, help=f"what is made small (default {default.loss})"
    )
    heads.add_argument(
        "--loss-temperature",
        type=float,
        default=default.temperature,
        metavar="T",
        help=f"of both distributions in the loss (default {default.temperature:g})",
    )
    heads.add_argument(
        "--mix",
        type=float,
        default=default.mix,
        metavar="P",
        help=f"share of tokens with a hidden state of any depth (default {default.mix:g}; 0: none)",
    )
    heads.add_argument(
        "--decay", type=float, default=default.decay, metavar="N", help="weight of a depth by the last one's"
    )
    heads.add_argument(
        "--cache", type=int, default=0, metavar="N", help="keep hidden states of the first N microbatches"
    )
    heads.add_argument(
        "--grow", metavar="PATTERN", help="add an MTP block of these layers (*E) to a model without"
    )
    data = command.add_argument_group("data")
    add_option(data, "text", text_option("default: the run's data"))
    add_option(data, "data_path", data_path_option("here one"))
    add_option(data, "tokenizer", tokenizer_option("the run's"), Path)
    data.add_argument(
        "--plot", type=Path, metavar="PNG", help="write acceptance before and after as a picture"
    )
    add_launch(command, precision=None)
    add_option(command, "device", device_option())


def boost_command(options: argparse.Namespace) -> int:
    """Run the steps that are not done yet. Exit status 0; that of a step that failed or was interrupted."""
    started = time.monotonic()
    boost = Boost(options.loss, options.loss_temperature, options.mix, options.decay, options.cache)
    if options.plot is not None:
        require_plot(options.plot, "--plot")
    from megatron_nemotron3.common.options import resolve_device
    from megatron_nemotron3.cpu import quiet_on_cpu
    from megatron_nemotron3.post_training.boost import inputs as boost_inputs

    options.device, options.dtype = resolve_device(options.device), None
    if options.device == "cpu":
        quiet_on_cpu()
    given = boost_inputs.check(options, boost, STEPS, LR)
    boost_inputs.prepare(given, options.output)
    with lock.held(options.output):
        if status := _boost(options, boost, given):
            return status
    print(f"took         {time.monotonic() - started:.0f} s")
    return 0


def _boost(options: argparse.Namespace, boost: Boost, given: BoostInputs) -> int:
    from megatron_nemotron3.post_training.boost import measure as boost_measure

    out = options.output
    before = None
    if not options.grow:
        before = boost_measure.measure(options.checkpoint, given, options, out / "before.json")
    base = out / "base"
    if given.hugging_face and not base.exists():
        status = step(options.main, "convert", "from-hf", options.checkpoint, base)
        if status:
            return status
    words = _training_words(options, given, out)
    with environment(BOOST, boost.text()):
        if status := step(options.main, "train", *words, prefix=f"{BOOST}={boost.text()} "):
            return status
    after = boost_measure.measure(out / "run", given, options, out / "after.json")
    for line in boost_measure.report(before, after):
        print(line)
    if options.plot is not None:
        boost_measure.plot(before, after, options.plot, f"MTP heads of {options.checkpoint}")
        print(f"plot         {options.plot}")
    print(f"checkpoint   {out / 'run'}")
    return 0


def _training_words(options: argparse.Namespace, given: BoostInputs, out: Path) -> list[object]:
    words: list[object] = ["--model", out / "model.json", "--pretrained", given.pretrained(out)]
    words += ["--data-path", given.prefix(out), "--tokenizer", given.tokenizer, "--output", out / "run"]
    words += ["--steps", given.steps, "--lr", given.lr, "--device", options.device]
    valued = {*LAYOUT, *SCHEDULE, "precision", "backend", "te_precision_config_file"} - {"steps", "lr"}
    for name in sorted(valued):
        if (value := getattr(options, name)) is not None:
            words += ["--" + name.replace("_", "-"), value]
    words += ["--emulate"] if options.emulate else []
    grown = ["--dist-ckpt-strictness", "log_unexpected"] if options.grow else []
    # Megatron pads the vocabulary to a multiple of this times TP: to as many rows as there are.
    padded = ["--make-vocab-size-divisible-by", given.rows // (options.tp or 1)]
    return [*words, "--", "--split", given.split, *padded, *grown, *options.extra]
