"""`nemotron3 finetune`: convert, measure, train, measure, convert back. Each step is a command of its own."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.convert.job_options import MTPOptions
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.options import (
    NEEDED,
    add_command,
    argument,
    device_option,
    flag,
    option,
    tokenizer_option,
)
from megatron_nemotron3.common.parser import resolve_device
from megatron_nemotron3.common.switches import LORA, environment
from megatron_nemotron3.cpu import quiet_on_cpu
from megatron_nemotron3.models.lora import LoRASettings
from megatron_nemotron3.post_training.steps import require_positive, require_schedule, step
from megatron_nemotron3.train.inputs import format_option, reading, variables_option

if TYPE_CHECKING:
    from megatron_nemotron3.post_training.finetune.inputs import FineTuneInputs

#: Schedule of the tiny models, which learn in minutes on a CPU.
STEPS, LR, SEQ_LENGTH = 60, 1e-3, 512


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of `nemotron3 finetune`."""

    source: Path = argument("a Hugging Face folder with weights", "HF_DIR")
    conversations: Path = option(".jsonl conversations (to train on)", "FILE", default=NEEDED)
    held_out: Path | None = option(".jsonl: what to measure on (default: one line in 8)", "FILE")
    output: Path = option("where to write (a folder)", "DIR", default=NEEDED)
    tokenizer: Path | None = tokenizer_option("HF_DIR")
    chat_template: Path | None = option("Jinja; takes the place of the tokenizer's", "FILE")
    format: str | None = format_option()
    chat_template_kwargs: str | None = variables_option()
    lora: str | None = option("train adapters: dim=N, alpha=N, targets=A+B", "WORDS", nargs="?", const="")
    adapter_only: bool = flag("write the LoRA adapter alone, as a folder of peft")
    mtp: MTPOptions
    steps: int | None = option(
        f"training iterations (default {STEPS} for a tiny model)", "N", group="training"
    )
    lr: float | None = option(f"peak learning rate (default {LR} for a tiny model)", "N", group="training")
    seq_length: int = option(
        f"tokens per sequence (default {SEQ_LENGTH})", "N", default=SEQ_LENGTH, group="training"
    )
    device: str = device_option(group="training")
    #: The entry point of the commands that this one consists of.
    main: Callable[[list[str]], int]


def register(commands: Any) -> None:
    """Add `nemotron3 finetune`."""
    add_command(commands.add_parser("finetune"), FinetuneOptions, finetune_command)


def finetune_command(options: FinetuneOptions) -> int:
    """Run the steps that are not done yet. Exit status 0; that of a step that failed or was interrupted."""
    started = time.monotonic()
    lora = None if options.lora is None else LoRASettings.parse(options.lora)
    if lora is not None and lora.base is not None:
        raise ValueError(f"--lora {options.lora}: leave base= out, the base is HF_DIR")
    if options.adapter_only and lora is None:
        raise ValueError("--adapter-only goes with --lora")
    from megatron_nemotron3.post_training.finetune import inputs as given

    require_positive(options, "steps", "lr", "seq_length")
    source = options.source
    tokenizer = source if options.tokenizer is None else options.tokenizer
    checked = given.check(
        source,
        options.conversations,
        options.held_out,
        tokenizer,
        options.chat_template,
        reading=reading(options).text(),
        lora=lora.text() if lora is not None else "",
        adapter_only=options.adapter_only,
        mtp_from=str(options.mtp.mtp_from.resolve()) if options.mtp.mtp_from else "",
        mtp_num_layers=options.mtp.mtp_num_layers,
        steps=options.steps or STEPS,
        lr=options.lr or LR,
        seq_length=options.seq_length,
    )
    require_schedule(options, checked.config)
    device = resolve_device(options.device)
    if device == "cpu":
        quiet_on_cpu()
    held_out = given.prepare(checked, options.output)
    with lock.held(options.output):
        if status := _finetune(options, lora, checked, held_out, device):
            return status
    print(f"took             {time.monotonic() - started:.0f} s")
    return 0


def _finetune(
    options: FinetuneOptions, lora: LoRASettings | None, checked: FineTuneInputs, held_out: Any, device: str
) -> int:
    from megatron_nemotron3.inference.generate.text import Tokenizer
    from megatron_nemotron3.post_training.measure import first_prompt, measure_held_out

    source, out = options.source, options.output
    base, run, tuned, chat = out / "base", out / "run", out / "hf", out / "tokenizer"
    how = checked.record
    words = ["--mtp-from", how["mtp_from"]] if how["mtp_from"] else []
    if how["mtp_num_layers"] is not None:
        words += ["--mtp-num-layers", how["mtp_num_layers"]]
    if not base.exists() and (status := step(options.main, "convert", "from-hf", source, base, *words)):
        return status
    before = measure_held_out(base, checked.config, held_out, chat, device, out / "before.json")
    print(f"held-out loss before: {before.per_token:.4f} nats per token", flush=True)
    arguments: list[object] = ["--model", out / "model.json", "--conversations", out / "train.jsonl"]
    arguments += reading(options).options()
    arguments += ["--tokenizer", chat, "--output", run, "--device", options.device]
    arguments += ["--steps", how["steps"], "--seq-length", how["seq_length"]]
    arguments += ["--lr", how["lr"], *(() if lora is not None else ("--pretrained", base))]
    adapters = "" if lora is None else f"base={base},{lora.text()}"
    with environment(LORA, adapters):
        if status := step(
            options.main, "train", *arguments, prefix=f"{LORA}={shlex.quote(adapters)} " * bool(adapters)
        ):
            return status
    after = measure_held_out(run, checked.config, held_out, chat, device, out / "after.json")
    if not tuned.exists():
        adapter = [] if lora is None else ["--adapter-only" if options.adapter_only else "--merge-adapter"]
        files = [] if options.adapter_only else ["--reference", chat]
        size = ["--vocab-size", checked.config.vocab_size]
        if status := step(options.main, "convert", "to-hf", run, tuned, *size, *files, *adapter):
            return status
    print(
        f"\nheld-out loss    {before.per_token:.4f} -> {after.per_token:.4f} nats per token of the assistant"
    )
    print(f"by conversation  {before.per_conversation:.4f} -> {after.per_conversation:.4f}")
    print(f"prompt           {Tokenizer(chat).decode(first_prompt(held_out))!r}")
    print(f"answer before    {before.answer!r}")
    print(f"answer after     {after.answer!r}")
    print(f"Hugging Face     {tuned}")
    return 0
