"""`nemotron3 prune`: measure importance on text, and cut a checkpoint."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_nemotron3.checkpoints.folders import require_tokenizer
from megatron_nemotron3.checkpoints.remote import local, place
from megatron_nemotron3.common.files import require_output
from megatron_nemotron3.common.options import (
    add_command,
    argument,
    data_path_option,
    device_option,
    flag,
    json_flag,
    option,
    repeated,
    text_option,
    tokenizer_option,
    workers_option,
)
from megatron_nemotron3.common.output import BYTES, Bar, result, say, size_text
from megatron_nemotron3.common.parser import resolve_device
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.launch.command import layout_option
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, count
from megatron_nemotron3.models.command import StoredModelOptions, stored_model
from megatron_nemotron3.post_training.compress.sizes import BY_LAYER, Sizes, candidate_config, parse_sizes

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
    from megatron_nemotron3.inference.generate.checkpoint_folder import CheckpointFolder
    from megatron_nemotron3.post_training.compress.scores import Scores

TOKENS = 65536
_LAYOUT = ("tp", "pp", "ep", "etp")


_MEASURED, _RANKS, _CUT = "importance", "measurement (under torchrun)", "pruning"


_size = partial(layout_option, default=1, group=_RANKS)


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of `nemotron3 prune`."""

    checkpoint: Path | str = argument(
        "Megatron or Hugging Face checkpoint, or a URL", "CHECKPOINT", parse=place
    )
    stored: StoredModelOptions
    text: str | None = text_option("to measure on", group=_MEASURED)
    data_path: str | None = data_path_option(group=_MEASURED)
    scores: Path | None = option(
        "importance file: written with --text or --data-path, otherwise read", "FILE", group=_MEASURED
    )
    tokenizer: Path | None = tokenizer_option("the checkpoint's", group=_MEASURED)
    sample_tokens: int = option(
        f"maximum number of tokens to measure on (default {TOKENS})",
        "N",
        default=TOKENS,
        group=_MEASURED,
        least=2,
    )
    seq_length: int | None = option("tokens per sequence (default: the model's)", "N", group=_MEASURED)
    tp: int = _size("tp")
    pp: int = _size("pp")
    ep: int = _size("ep")
    etp: int = _size("etp")
    precision: Literal["bf16", "fp32"] | None = option(
        "number format of the linear layers (default fp32 on a CPU, else bf16)", group=_RANKS
    )
    device: str = device_option(group=_RANKS)
    sizes: list[str] = repeated(
        "new sizes, such as hidden_size=2048; those of experts may differ by layer (N,N,…)",
        "NAME=N",
        nargs="+",
        group=_CUT,
    )
    output: Path | None = option("output folder, new", "DIR", group=_CUT)
    dry_run: bool = flag("print the plan and its size, then exit", group=_CUT)
    workers: int = workers_option(group=_CUT)
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 prune`."""
    add_command(commands.add_parser("prune"), PruneOptions, prune_command)


def prune_command(options: PruneOptions) -> int:
    """Measure, cut, or both. Exit status 0."""
    sizes = parse_sizes(options.sizes)
    _check(options, sizes)
    with result(options.json and _rank() == 0), local(options.checkpoint) as folder:
        return _prune(options, folder, sizes)


def _check(options: PruneOptions, sizes: Sizes) -> None:
    measures = options.text is not None or options.data_path is not None
    if not measures and options.scores is None:
        raise ValueError("give --text PATH to measure importance on, or --scores FILE of a measurement")
    if bool(sizes) != bool(options.output or options.dry_run):
        given, missing = ("--sizes", "--output DIR") if sizes else ("--output", "--sizes NAME=N …")
        raise ValueError(f"{given} needs {missing}")
    if not sizes and not (measures and options.scores is not None):
        raise ValueError("nothing to do: give --sizes and --output, or --text and --scores FILE to write")
    if "num_layers" in sizes and any(isinstance(sizes.get(name), tuple) for name in BY_LAYER):
        raise ValueError(
            "num_layers and sizes by layer: the scores decide which layers stay; prune the depth first, then "
            "the experts of what is left"
        )
    if options.tokenizer is not None:
        require_tokenizer(options.tokenizer)
    if options.text is not None and not Path(options.text).exists():
        raise ValueError(f"--text {options.text} does not exist")
    if measures and options.scores is not None:
        require_output(options.scores, "--scores", b"nemotron3 scores")
    if options.output is not None:
        from megatron_nemotron3.checkpoints.convert.job import check_target

        check_target(options.output)
    if measures:
        _layout(options)
    elif _ranks() > 1:
        raise ValueError("ranks of torchrun measure, and one process cuts: run this without torchrun")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _layout(options: PruneOptions) -> ParallelLayout:
    sizes = {name: getattr(options, name) for name in _LAYOUT}
    model, ranks = ParallelLayout(**sizes), _ranks()
    if ranks % (options.tp * options.pp):
        raise ValueError(
            f"--tp {options.tp} --pp {options.pp} need a multiple of {model.world_size} ranks, torchrun "
            f"started {ranks}: torchrun --nproc-per-node N -m megatron_nemotron3 prune …"
        )
    return ParallelLayout(**sizes, dp=ranks // (options.tp * options.pp))


def _prune(options: PruneOptions, folder: Path, sizes: Sizes) -> int:
    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
    from megatron_nemotron3.post_training.compress.scores import Scores

    found = find_checkpoint(folder)
    opened = found.open(stored_model(options.stored))
    if opened.omni is not None:
        raise ValueError(
            f"{folder}: it has encoders: `nemotron3 convert … --only language` takes the language model out"
        )
    if opened.adapter is not None:
        raise ValueError(f"{folder}: it has a LoRA adapter: `nemotron3 convert … --merge-adapter` adds it")
    config = opened.config
    number = sizes.get("num_layers", config.num_layers)
    assert isinstance(number, int)
    candidate_config(config, sizes, range(number))  # before any work; which layers stay is not known yet
    if options.text is None and options.data_path is None:
        assert options.scores is not None
        scores = Scores.load(options.scores, config)
    else:
        scores = _measured(options, found, opened)
        if _rank() > 0:
            return 0
        if options.scores is not None:
            scores.save(options.scores)
            say(f"scores       {options.scores}", scores=str(options.scores))
    if not sizes:
        say(f"next         nemotron3 prune {folder} --scores {options.scores} --sizes NAME=N --output DIR")
        return 0
    layers = scores.layers(number)
    pruned = candidate_config(config, sizes, layers)
    _say_plan(config, pruned, sizes)
    if options.output is not None and not options.dry_run:
        _cut(options, found, opened, scores, pruned, layers)
    return 0


def _measured(options: PruneOptions, found: CheckpointFolder, opened: Checkpoint) -> Scores:
    from megatron_nemotron3.inference.generate.evaluate_command import chosen_seq_length, evaluation_tokens
    from megatron_nemotron3.launch import Launch
    from megatron_nemotron3.launch.rules import enforce

    device, layout = resolve_device(options.device), _layout(options)
    if device == "cpu":
        quiet_on_cpu()
    config = opened.config
    length = chosen_seq_length(options.seq_length, config)
    launch = Launch.of(
        config.but(seq_length=length),
        layout=layout,
        precision=options.precision or ("fp32" if device == "cpu" else "bf16"),
        backend="torch" if device == "cpu" else "auto",
    )
    enforce(launch)
    from megatron_nemotron3.inference.generate.evaluate import windows

    ids, source = evaluation_tokens(
        found, 4 * options.sample_tokens, options.text, options.data_path, options.tokenizer
    )
    text = windows(ids, length, options.sample_tokens)
    if int(text.max()) >= config.vocab_size:
        raise ValueError(f"{source}: token {int(text.max())} is not in the vocabulary of {config.vocab_size}")
    if text.shape[1] - 1 != length or len(text) < layout.dp:
        raise ValueError(
            f"{source}: {len(ids):,} tokens and --sample-tokens {options.sample_tokens} give {len(text)} "
            f"windows of {text.shape[1] - 1}, and each of {layout.dp} data-parallel ranks needs one of "
            f"{length}: give more text, or a smaller --seq-length"
        )
    text = text[: len(text) // layout.dp * layout.dp]
    from megatron_nemotron3.post_training.compress.importance import (
        calibrate,  # Megatron, after all that can be refused
    )

    scores, loss = calibrate(opened, launch, text, device)
    if _rank() == 0:
        say(
            f"measured     {scores.tokens:,} tokens of {source}, loss {loss:.4f}",
            tokens=scores.tokens,
            text=source,
            loss=loss,
        )
    return scores


def _say_plan(config: Nemotron3Config, pruned: Nemotron3Config, sizes: Sizes) -> None:
    for name in sizes:
        say(f"size         {name}: {getattr(config, name)} -> {_shown(pruned, sizes, name)}")
    if config.pattern != pruned.pattern:
        say(f"layers       {config.pattern} -> {pruned.pattern}", pattern=pruned.pattern)
    before, after = count(config).stored, count(pruned).stored
    say(
        f"parameters   {before:,} -> {after:,} ({after / before:.1%})",
        sizes={name: _shown(pruned, sizes, name) for name in sizes},
        parameters_before=before,
        parameters=after,
    )
    if lost := sorted(set(config.pattern) - set(pruned.pattern)):
        say(f"note         no layer of kind {' '.join(lost)} is left", lost_kinds=lost)


def _shown(pruned: Nemotron3Config, sizes: Sizes, name: str) -> Any:
    return list(new) if isinstance(new := sizes[name], tuple) else getattr(pruned, name)


def _cut(
    options: PruneOptions,
    found: CheckpointFolder,
    opened: Checkpoint,
    scores: Scores,
    pruned: Nemotron3Config,
    layers: tuple[int, ...],
) -> None:
    from megatron_nemotron3.checkpoints.convert.job import run
    from megatron_nemotron3.post_training.compress.cut import MODEL, cut_job

    output, tokenizer = options.output, options.tokenizer
    assert output is not None
    with contextlib.suppress(ValueError, ModuleNotFoundError):
        tokenizer = found.tokenizer(tokenizer).folder
    job = cut_job(opened, scores, pruned, layers, output, tokenizer)
    with Bar("prune", BYTES) as bar:
        run(job, workers=options.workers, report=lambda at: bar.to(at.done, at.total, begun=at.begun))
    say(f"written      {output}: {size_text(job.length)}", output=str(output), bytes=job.length)
    model = output / MODEL
    if opened.kind == "hugging face":
        say(f"next         nemotron3 convert from-hf {output} MEGATRON_DIR --model {model}")
    else:
        say(f"next         nemotron3 train --model {model} --pretrained {output}")
