"""`nemotron3 finetune`: convert, measure, train, measure, convert back. Each step is a command of its own."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.convert.job_options import MTPOptions
from megatron_nemotron3.checkpoints.hub import push, push_option, require_hub
from megatron_nemotron3.checkpoints.remote import local, place
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.config_file import FILE, config_text
from megatron_nemotron3.common.files import write_text
from megatron_nemotron3.common.options import (
    NEEDED,
    TrackingOptions,
    add_command,
    argument,
    config_option,
    device_option,
    flag,
    option,
    repeated,
    tokenizer_option,
)
from megatron_nemotron3.common.parser import resolve_device
from megatron_nemotron3.common.switches import LORA, environment
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.launch.command import LAYOUT, chosen_layout, layout_option
from megatron_nemotron3.launch.data_sets import split_bounds
from megatron_nemotron3.launch.flag import values_by_name
from megatron_nemotron3.launch.plan.hardware import GPUS, RESERVE
from megatron_nemotron3.models.lora import LoRASettings
from megatron_nemotron3.post_training.finetune import LR, SEQ_LENGTH, STEPS
from megatron_nemotron3.post_training.steps import require_positive, step
from megatron_nemotron3.train.command import require_own_options
from megatron_nemotron3.train.inputs import format_option, reading, require_tracking, variables_option
from megatron_nemotron3.train.processes import machines

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.finetune.inputs import FineTuneInputs
    from megatron_nemotron3.post_training.measure import HeldOut, HeldOutResult
    from megatron_nemotron3.train.data.conversations import Encoded

#: Values of vLLM's --max-lora-rank; 16 is its default.
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_PLAN = "plan; HF_DIR may also be a name of the catalog"


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of `nemotron3 finetune`."""

    source: Path | str = argument(
        "Hugging Face folder with weights, URL, or repository id", "HF_DIR", parse=place
    )
    conversations: list[Path] = option("conversation files to train on", "FILE", nargs="+", default=NEEDED)
    held_out: list[Path] = repeated(
        "conversation files to evaluate on (default: about one line in 8)", "FILE", nargs="+"
    )
    output: Path = option("output folder", "DIR", default=NEEDED)
    config: str | None = config_option()
    tokenizer: Path | None = tokenizer_option("HF_DIR")
    chat_template: Path | None = option("Jinja file, in place of the tokenizer's chat template", "FILE")
    format: str | None = format_option()
    chat_template_kwargs: str | None = variables_option()
    lora: str | None = option("LoRA adapters: dim=N,alpha=N,targets=A+B", "SETTINGS", nargs="?", const="")
    adapter_only: bool = flag("write only the LoRA adapter, as a peft folder")
    push_to_hub: str | None = push_option()
    mtp: MTPOptions
    steps: int | None = option(
        f"training iterations (default {STEPS} for a tiny model)", "N", group="training"
    )
    lr: float | None = option(f"peak learning rate (default {LR} for a tiny model)", "N", group="training")
    seq_length: int | None = option(
        f"tokens per sequence (default {SEQ_LENGTH} for a tiny model, else as the conversations need)",
        "N",
        group="training",
    )
    global_batch_size: int | None = option(
        "sequences per step (default 4 per data-parallel rank and pipeline stage)", "N", group="training"
    )
    split: str | None = option(
        "Megatron's --split of the packed rows (default 90,10,0; all for training if there are few)",
        "A,B,C",
        group="training",
    )
    device: str = device_option(group="training")
    tracking: TrackingOptions = TrackingOptions()
    tp: int | None = layout_option("tp")
    pp: int | None = layout_option("pp")
    vpp: int | None = layout_option("vpp")
    ep: int | None = layout_option("ep")
    etp: int | None = layout_option("etp")
    cp: int | None = layout_option("cp")
    dp: int | None = layout_option("dp")
    plan: bool = flag(
        "only say whether the training fits on the GPUs (exit status 0) or not (1)", group=_PLAN
    )
    gpu: str | None = option("type of GPU for --plan (default: this machine's)", choices=GPUS, group=_PLAN)
    #: Megatron's own options, after a lone --.
    extra: Sequence[str] = ()
    #: For `config_text`.
    given: Mapping[str, str] = field(default_factory=dict)
    #: The entry point of the commands that this one consists of.
    main: Callable[[list[str]], int]


def register(commands: Any) -> None:
    """Add `nemotron3 finetune`."""
    command = commands.add_parser("finetune")
    add_command(command, FinetuneOptions, finetune_command)
    command.epilog = "Megatron arguments of the training may follow a separate --."
    command.set_defaults(extra=())


def finetune_command(options: FinetuneOptions) -> int:
    """Run the steps that are not done yet. Exit status 0; that of a step that failed or was interrupted."""
    started = time.monotonic()
    lora = None if options.lora is None else LoRASettings.parse(options.lora)
    if lora is not None and lora.base is not None:
        raise ValueError(f"--lora {options.lora}: leave base= out, the base is HF_DIR")
    if options.adapter_only and lora is None:
        raise ValueError("--adapter-only goes with --lora")
    require_positive(options, "steps", "lr", "seq_length", "global_batch_size")
    layout = chosen_layout(options)
    require_own_options(options.extra)
    if options.split is not None and "--split" in values_by_name(options.extra):
        raise ValueError("--split before and after --: give one")
    if options.split is not None and split_bounds(options.split)[0] is None:
        raise ValueError(f"--split {options.split} leaves nothing to train on: give a first number above 0")
    require_tracking(options.tracking, options.extra)
    if options.plan:
        from megatron_nemotron3.post_training.finetune.plan import plan

        return plan(options, layout, lora)
    if options.gpu is not None:
        raise ValueError(f"--gpu {options.gpu} goes with --plan: drop it, or plan first")
    if options.push_to_hub is not None:
        require_hub(options.push_to_hub)
    with ExitStack() as stack:
        source = stack.enter_context(local(options.source))
        if status := _prepared(options, lora, source):
            return status
    print(f"took             {time.monotonic() - started:.0f} s")
    return 0


def _prepared(options: FinetuneOptions, lora: LoRASettings | None, source: Path) -> int:
    """Check the inputs in a local folder, write them, and run the steps."""
    from megatron_nemotron3.post_training.finetune import inputs as given

    device = resolve_device(options.device, "megatron.core")
    if device == "cpu":
        quiet_on_cpu()
    checked = given.check(options, lora, source, device)
    machines(chosen_layout(options).world_size, device)
    given.prepare(checked, options.output)
    with lock.held(options.output):
        text = config_text(options.output, options.given, options.extra, "finetune")
        write_text(options.output / FILE, text)
        return _finetune(options, lora, checked, device)


def _finetune(
    options: FinetuneOptions, lora: LoRASettings | None, checked: FineTuneInputs, device: str
) -> int:
    from megatron_nemotron3.post_training.measure import measure_held_out

    out, held_out = options.output, _held_out(options, checked, device)
    base, run, tuned, chat = out / "base", out / "run", out / "hf", out / "tokenizer"
    how = checked.record
    words = ["--mtp-from", how["mtp_from"]] if how["mtp_from"] else []
    if how["mtp_num_layers"] is not None:
        words += ["--mtp-num-layers", how["mtp_num_layers"]]
    if not base.exists() and (
        status := step(options.main, "convert", "from-hf", options.source, base, *words)
    ):
        return status
    before = after = None
    if held_out is not None:
        before = measure_held_out(base, held_out, out / "before.json")
        print(f"held-out loss before: {before.per_token:.4f} nats per token", flush=True)
    adapters = "" if lora is None else f"base={base},{lora.text()}"
    with environment(LORA, adapters):
        if status := step(
            options.main,
            *("train", *_training_words(options, how, full=lora is None)),
            prefix=f"{LORA}={shlex.quote(adapters)} " * bool(adapters),
        ):
            return status
    if held_out is not None:
        after = measure_held_out(run, held_out, out / "after.json")
    if not tuned.exists():
        adapter = [] if lora is None else ["--merge-adapter"]
        if options.adapter_only:
            adapter = ["--adapter-only", "--base-model", str(options.source)]
        size = ["--vocab-size", checked.config.vocab_size]
        if status := step(options.main, "convert", "to-hf", run, tuned, *size, "--reference", chat, *adapter):
            return status
    if before is not None and after is not None:
        _report(before, after, checked.encoded, chat)
    print(f"Hugging Face     {tuned}")
    if options.push_to_hub is not None:
        print(f"pushed           {push(tuned, options.push_to_hub)}")
    for line in next_commands(options):
        print(f"next             {line}")
    return 0


def _held_out(options: FinetuneOptions, checked: FineTuneInputs, device: str) -> HeldOut | None:
    """What measures the held-out conversations: this process, or the ranks of the training; None: nothing."""
    from megatron_nemotron3.post_training.finetune import inputs as given
    from megatron_nemotron3.post_training.measure import HeldOut

    if not checked.encoded:
        print(f"too few conversations ({len(checked.train)}) to hold some out: nothing is measured")
        return None
    out, how, layout = options.output, reading(options), chosen_layout(options)
    file, chat = out / "held_out.jsonl", out / "tokenizer"
    found = HeldOut(checked.config, checked.encoded, file, how, chat, device)
    launch = given.launch_of(options, checked.config, layout, checked.seq_length, device)
    if layout.world_size == 1 or has_room(given.whole_weights(launch), device):
        return found
    if (number := machines(layout.world_size, device)) > 1:
        print(
            f"held-out loss not measured, which would need {number} machines: nemotron3 evaluate measures it "
            "where one device has room for the model"
        )
        return None
    return replace(found, launch=launch)


def has_room(weights: float, device: str) -> bool:
    """Whether one device holds a model of so many bytes; memory of a CPU is that of all ranks, too."""
    import torch

    return device == "cpu" or weights <= torch.cuda.get_device_properties(0).total_memory - RESERVE


def _training_words(options: FinetuneOptions, how: Mapping[str, object], *, full: bool) -> list[object]:
    """The arguments of `nemotron3 train`; `full`: all weights are trained, from the base."""
    out, tracking = options.output, options.tracking
    words: list[object] = ["--model", out / "model.json", "--conversations", out / "train.jsonl"]
    words += reading(options).options()
    words += ["--tokenizer", out / "tokenizer", "--output", out / "run", "--device", options.device]
    words += ["--steps", how["steps"], "--seq-length", how["seq_length"], "--lr", how["lr"]]
    words += ["--pretrained", out / "base"] if full else []
    if options.global_batch_size is not None:
        words += ["--global-batch-size", options.global_batch_size]
    for name in LAYOUT:
        if (size := getattr(options, name)) is not None:
            words += [f"--{name}", size]
    extra = list(options.extra)
    if tracking.wandb is not None:
        words += ["--wandb", tracking.wandb]
        extra = ["--wandb-exp-name", out.resolve().name, *extra]
    if tracking.tensorboard is not None:
        words += ["--tensorboard", tracking.tensorboard or out / "run/tensorboard"]
    if options.split is not None:
        extra = ["--split", options.split, *extra]
    return [*words, "--", *extra] if extra else words


def _vllm_rank(dim: int) -> int:
    """The least --max-lora-rank of vLLM for adapters of this rank."""
    return next((rank for rank in _VLLM_RANKS if rank >= dim), dim)


def _report(before: HeldOutResult, after: HeldOutResult, held_out: Sequence[Encoded], chat: Path) -> None:
    from megatron_nemotron3.inference.generate.text import Tokenizer
    from megatron_nemotron3.post_training.measure import first_prompt

    print(
        f"\nheld-out loss    {before.per_token:.4f} -> {after.per_token:.4f} nats per token of the assistant"
    )
    print(f"by conversation  {before.per_conversation:.4f} -> {after.per_conversation:.4f}")
    if before.answer is None or after.answer is None:
        return
    print(f"prompt           {Tokenizer(chat).decode(first_prompt(held_out))!r}")
    print(f"answer before    {before.answer!r}")
    print(f"answer after     {after.answer!r}")


def next_commands(options: FinetuneOptions) -> list[str]:
    """Commands for the result: talk to it, measure it, serve it."""
    out = options.output
    run, tuned, held_out = out / "run", out / "hf", out / "held_out.jsonl"
    model = run if options.adapter_only else tuned
    evaluate = ["nemotron3", "evaluate", model, "--conversations", held_out, *reading(options).options()]
    serve: list[object] = ["vllm", "serve", tuned]
    if options.adapter_only:
        rank = _vllm_rank(LoRASettings.parse(options.lora or "").dim)
        serve = ["vllm", "serve", options.source, "--enable-lora", "--lora-modules", f"tuned={tuned}"]
        serve += ["--max-lora-rank", rank, "--tokenizer", out / "tokenizer"]
    lines: list[list[object]] = [["nemotron3", "chat", model]]
    lines += [[*evaluate, "--tokenizer", out / "tokenizer"]] if held_out.stat().st_size else []
    return [shlex.join(map(str, line)) for line in [*lines, serve]]
