"""What fine-tuning starts from: checked before anything is converted, and the same when a command goes on."""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
from megatron_nemotron3.checkpoints.convert.from_hf import pad_vocab_size
from megatron_nemotron3.checkpoints.folders import locate, require_tokenizer
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common import lock, record
from megatron_nemotron3.common.files import json_outside, printable, read_outside, write_json
from megatron_nemotron3.common.output import Bar, count
from megatron_nemotron3.common.switches import SFT_MEAN
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.command import chosen_layout
from megatron_nemotron3.launch.plan.options import CostOptions
from megatron_nemotron3.launch.plan.state import require_divisible
from megatron_nemotron3.launch.rules import enforce
from megatron_nemotron3.models import LoRASettings, Nemotron3Config
from megatron_nemotron3.models import count as parameters_of
from megatron_nemotron3.models.show import describe
from megatron_nemotron3.post_training.finetune import LR, SEQ_LENGTH, STEPS
from megatron_nemotron3.post_training.steps import length_step, require_schedule, with_own_name
from megatron_nemotron3.train.data.conversations import Conversation, Encoded, Encoder, Reading, parse_line
from megatron_nemotron3.train.data.forms import Findings, read_rows
from megatron_nemotron3.train.data.workers import worked
from megatron_nemotron3.train.inputs import CONVERSATION_OPTIONS, parse_mean, reading
from megatron_nemotron3.train.training import schedule_of

#: Written first: what the folder is the work of.
RECORD = "finetune.json"
#: One line in this many is held out.
HELD_OUT = 8
#: Longest sequence that is chosen by itself: that of the pre-training of the family.
MOST = 8192
_LIMIT = 1 << 30
#: Megatron pads the vocabulary to a multiple of this.
_MULTIPLE = 128


@dataclass(frozen=True)
class FineTuneInputs:
    """What was read and found right."""

    config: Nemotron3Config
    #: Two starts in one folder must agree in it.
    record: dict[str, object]
    #: Place -> line: those to train on, and those to measure on.
    train: dict[str, bytes]
    held_out: dict[str, bytes]
    #: The latter's conversations.
    encoded: list[Encoded]
    tokenizer: Path
    template: str | None
    #: Tokens of a row.
    seq_length: int


def launch_of(
    options: Any, config: Nemotron3Config, layout: ParallelLayout, seq_length: int, device: str = "cuda"
) -> Launch:
    """The launch of `nemotron3 train`, without its paths; `options`: `FinetuneOptions`."""
    on_cpu = device == "cpu"
    given = {"steps": options.steps or 1, "lr": options.lr or 1.0, "seq_length": seq_length}
    batch = options.global_batch_size
    return Launch(
        config=config,
        layout=layout,
        precision="fp32" if on_cpu else "bf16",
        backend="torch" if on_cpu else "auto",
        schedule=schedule_of(config, layout, conversations=True, global_batch_size=batch, **given),
        extra=(*CONVERSATION_OPTIONS, *options.extra),
        own_script=True,
    )


def whole_weights(launch: Launch) -> float:
    """Bytes of all weights, which one GPU holds that measures the model alone."""
    return parameters_of(launch.config).trainable * CostOptions.of(launch).weight


def default_length(longest: int, config: Nemotron3Config, layout: ParallelLayout) -> int:
    """Tokens of a row where nothing says it: those of the longest conversation, within bounds.

    A multiple of `length_step`, at least `SEQ_LENGTH`, at most `MOST` and the model's context. A tiny model
    has `SEQ_LENGTH`.
    """
    if "-tiny" in config.name:
        return SEQ_LENGTH
    step = length_step(config, layout)
    most = max(step, min(MOST, config.max_position_embeddings) // step * step)
    return min(most, -(-max(longest, SEQ_LENGTH) // step) * step)


def require_possible(launch: Launch, lora: LoRASettings | None) -> None:
    """Raise ValueError if the training cannot be launched."""
    enforce(launch)
    if lora is not None:
        require_divisible(launch, lora)


def check(options: Any, lora: LoRASettings | None, source: Path, device: str = "cuda") -> FineTuneInputs:
    """Read all inputs, and write nothing but how long the sequences are.

    Without --held-out one line in `HELD_OUT` is held out, by its checksum, or none where that would leave no
    line on one side.

    Args:
        options: `FinetuneOptions`.
        source: HF_DIR on this machine.
        device: "cpu" or "cuda".

    Raises:
        ValueError: an input is missing or wrong, or the training could not be launched.
    """
    if locate(source).kind != "hugging face":
        raise ValueError(
            f"{source}: it is a Megatron checkpoint: nemotron3 convert to-hf makes a folder of it"
        )
    config = with_own_name(open_hugging_face(source, **vars(options.mtp)).config)
    if not options.plan:
        require_schedule(options, config)
    layout, tokenizer = chosen_layout(options), source if options.tokenizer is None else options.tokenizer
    require_tokenizer(tokenizer)
    length = options.seq_length or default_length(0, config, layout)
    require_possible(launch_of(options, config, layout, length, device), lora)
    how, mean = reading(options), parse_mean(os.environ.get(SFT_MEAN, ""))
    lines = _lines(options.conversations, how.form)
    if options.held_out:
        train, measured = lines, _lines(options.held_out, how.form)
        trained_on = {line.strip() for line in train.values()}
        if known := sum(line.strip() in trained_on for line in measured.values()):
            of = f"{known:,} of {len(measured):,} held-out rows"
            print(f"warning: {of} are also trained on: the loss on them is that of known text")
    else:
        measured = {at: line for at, line in lines.items() if zlib.crc32(line.strip()) % HELD_OUT == 0}
        train = {at: line for at, line in lines.items() if at not in measured}
        if not train or not measured:
            train, measured = lines, {}
    template = options.chat_template
    text = None if template is None else read_outside(template, limit=_LIMIT).decode("utf-8")
    lengths, encoded = _encoded(config, train, measured, tokenizer, text, how)
    length = options.seq_length or default_length(max(lengths, default=0), config, layout)
    _require_some(lengths, length, chosen=options.seq_length is None)
    names = ("tokenizer", "vocab", "merges", "special", "chat")
    files = [file for file in _tokenizer_files(tokenizer) if file.name.startswith(names)]
    started = {
        "model": shown(source.resolve()),
        "conversations": _digest(b"".join(train.values())),
        "held_out": _digest(b"".join(measured.values())),
        "tokenizer": _digest(*(file.read_bytes() for file in files)),
        "chat_template": _digest(text.encode()) if text is not None else "",
        "reading": how.text(),
        "mean": mean,
        "lora": lora.text() if lora is not None else "",
        "adapter_only": options.adapter_only,
        "mtp_from": str(options.mtp.mtp_from.resolve()) if options.mtp.mtp_from else "",
        "mtp_num_layers": options.mtp.mtp_num_layers,
        "steps": options.steps or STEPS,
        "lr": options.lr or LR,
        "global_batch_size": options.global_batch_size,
        "seq_length": length,
    }
    return FineTuneInputs(config, started, train, measured, encoded, tokenizer, text, length)


def prepare(inputs: FineTuneInputs, output: Path) -> None:
    """Write the record, the conversations, the tokenizer and the model.

    A second call with the same inputs changes nothing, and one with more steps only their number.
    """

    def write(folder: Path) -> None:
        (folder / "train.jsonl").write_bytes(b"".join(inputs.train.values()))
        (folder / "held_out.jsonl").write_bytes(b"".join(inputs.held_out.values()))
        write_json(folder / "model.json", describe(inputs.config))
        _write_tokenizer(folder / "tokenizer", inputs.tokenizer, inputs.template)

    _train_on(inputs.record, output)
    record.begin(output, RECORD, inputs.record, "fine-tuning", write)


def _train_on(wanted: Mapping[str, Any], output: Path) -> None:
    """Let a fine-tuning have more steps, if nothing else differs; its results are kept under other names."""
    if not (output / RECORD).exists():
        return
    earlier = record.read(output / RECORD)
    steps = earlier.get("steps")
    if (
        {**earlier, "steps": wanted["steps"]} != wanted
        or not isinstance(steps, int)
        or steps >= wanted["steps"]
    ):
        return
    results = ("hf", f"hf-{steps}"), ("after.json", f"after-{steps}.json")
    with lock.held(output):
        for name, kept in results:  # renamed by a command that was interrupted, and then made again
            if (output / name).exists() and (output / kept).exists():
                raise ValueError(f"{output / kept}: it is in the way of {output / name}: remove one of them")
        for name, kept in results:
            if (output / name).exists():
                (output / name).rename(output / kept)
                print(f"{name} of {steps:,} steps is now {output / kept}")
        write_json(output / RECORD, wanted)


def _write_tokenizer(chat: Path, tokenizer: Path, template: str | None) -> None:
    chat.mkdir()
    for file in _tokenizer_files(tokenizer):
        shutil.copyfile(file, chat / file.name)
    if template is not None:
        path = chat / "tokenizer_config.json"
        config = json_outside(path, limit=_LIMIT) if path.exists() else {}
        write_json(path, {**config, "chat_template": template}, indent=2)
        (chat / "chat_template.jinja").unlink(missing_ok=True)


def _encoded(
    config: Nemotron3Config,
    train: dict[str, bytes],
    held_out: dict[str, bytes],
    tokenizer: Path,
    template: str | None,
    reading: Reading,
) -> tuple[list[int], list[Encoded]]:
    """Encode all conversations: tokens of each that is trained on (0: none is), and those held out."""
    with TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder) / "tokenizer", tokenizer, template)
        encoder = Encoder(Path(folder) / "tokenizer", tokenizer, reading.variables)
    tokens, rows = len(encoder.tokenizer), config.vocab_size
    if (padded := pad_vocab_size(tokens, _MULTIPLE)) < rows:
        raise ValueError(
            f"{tokenizer}: its {tokens:,} tokens fill {padded:,} rows of an embedding, and the model "
            f"has {rows:,}: training would drop the rest; give the model's own tokenizer"
        )
    lengths: list[int] = []
    result: list[Encoded] = []
    # What is said of rows; of those to train on the training says it.
    findings = {"held out": Findings()}
    # The roles of each conversation without an answer.
    silent: dict[str, list[set[str]]] = {}
    with Bar("read conversations", "lines", len(train) + len(held_out)) as bar:

        def parsed(lines: Mapping[str, bytes], side: str) -> Iterator[Conversation]:
            for place, line in lines.items():
                yield from parse_line(line, place, form=reading.form, findings=findings.get(side))
                bar.add(1)

        for side, lines in (("to train on", train), ("held out", held_out)):
            for one, encoded in worked(parsed(lines, side), encoder.encode):
                if max(encoded.ids, default=0) >= rows:
                    raise ValueError(
                        f"{one.place}: token {max(encoded.ids)} is outside the model's vocabulary of "
                        f"{rows:,}: it is another model's tokenizer"
                    )
                if not (answered := any(encoded.trained[1:])):
                    silent.setdefault(side, []).append({str(message["role"]) for message in one.messages})
                if lines is held_out:
                    result.append(encoded)
                else:
                    lengths.append(len(encoded.ids) if answered else 0)
    if held_out:
        print(*findings["held out"].lines("held-out conversations"), sep="\n")
    for side, without in silent.items():
        roles = sorted(set[str]().union(*without))
        said = f"{count(len(without), 'conversation')} {side}: no message of the assistant"
        print(f"{said} (roles: {printable(', '.join(roles))})")
    if result and not any(any(one.trained) for one in result):
        raise ValueError("no held-out conversation has a message of the assistant: give --held-out FILE")
    return lengths, result


def _require_some(lengths: Sequence[int], length: int, *, chosen: bool) -> None:
    """Raise ValueError if no conversation fits; print how many do not, and which length was chosen."""
    too_long = sum(one > length for one in lengths)
    longer = f"{too_long:,} {'is' if too_long == 1 else 'are'} longer than --seq-length {length:,}"
    if not any(0 < one <= length for one in lengths):
        which = f"{longer}, the others have" if too_long else "they have"
        raise ValueError(f"no conversation can be trained on: {which} no message of the assistant")
    if chosen:
        print(
            f"sequence length  {length:,}: the longest of {count(len(lengths), 'conversation')} to train on "
            f"has {max(lengths):,} tokens; {too_long:,} longer than this {'is' if too_long == 1 else 'are'} "
            "left out"
        )
    elif too_long:
        print(f"of the conversations to train on, {longer} and left out")


def _tokenizer_files(folder: Path) -> list[Path]:
    """Small files that may belong to a tokenizer, in order, without config.json, which is the model's."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in (".json", ".model", ".jinja", ".txt")
        and file.is_file()
        and file.name != "config.json"
        and not file.name.endswith(("index.json", "manifest.json"))
    ]


def _lines(paths: Sequence[Path], form: str) -> dict[str, bytes]:
    """Place -> row of the files as a line, with its end; the form is checked."""
    lines: dict[str, bytes] = {}
    length = 0
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ValueError(f"{path} is given twice: give it once")
        before = len(lines)
        for place, _, line in read_rows(path):
            list(parse_line(line, place, form=form))
            lines[f"{place} ({len(lines) + 1})" if place in lines else place] = line.rstrip(b"\r\n") + b"\n"
            if (length := length + len(line)) > _LIMIT:
                raise ValueError(
                    f"{path}: more than {_LIMIT:,} bytes to read: use nemotron3 train --conversations"
                )
        if len(lines) == before:
            raise ValueError(f"{path}: it has no conversations")
    return lines


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
