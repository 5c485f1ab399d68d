"""What fine-tuning starts from: checked before anything is converted, and the same when a command goes on."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
from megatron_nemotron3.checkpoints.convert.from_hf import pad_vocab_size
from megatron_nemotron3.checkpoints.folders import locate, require_tokenizer
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import json_outside, read_outside, write_json
from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.show import describe
from megatron_nemotron3.post_training.steps import with_own_name
from megatron_nemotron3.train.data.conversations import Conversation, Encoded, Encoder, Reading, parse_line
from megatron_nemotron3.train.data.forms import read_rows
from megatron_nemotron3.train.data.workers import worked

#: Written first: what the folder is the work of.
RECORD = "finetune.json"
#: One line in this many is held out.
HELD_OUT = 8
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
    tokenizer: Path
    template: str | None


def check(
    source: Path,
    conversations: Path,
    held_out: Path | None,
    tokenizer: Path,
    template: Path | None,
    **how: Any,
) -> FineTuneInputs:
    """Read all inputs, and write nothing; `how`: options that the record has, too.

    Without `held_out` one line in `HELD_OUT` is held out, by its checksum, or none where that would leave no
    line on one side; `template` takes the place of the tokenizer's chat template.
    """
    if locate(source).kind != "hugging face":
        raise ValueError(
            f"{source}: it is a Megatron checkpoint: nemotron3 convert to-hf makes a folder of it"
        )
    heads = Path(how["mtp_from"]) if how["mtp_from"] else None
    opened = open_hugging_face(source, mtp_num_layers=how["mtp_num_layers"], mtp_from=heads)
    require_tokenizer(tokenizer)
    form = Reading.parse(how["reading"]).form
    lines = _lines(conversations, form)
    if held_out is not None:
        train, measured = lines, _lines(held_out, form)
    else:
        measured = {at: line for at, line in lines.items() if zlib.crc32(line.strip()) % HELD_OUT == 0}
        train = {at: line for at, line in lines.items() if at not in measured}
        if not train or not measured:
            train, measured = lines, {}
    text = None if template is None else read_outside(template, limit=_LIMIT).decode("utf-8")
    names = ("tokenizer", "vocab", "merges", "special", "chat")
    files = [file for file in _tokenizer_files(tokenizer) if file.name.startswith(names)]
    started = {
        "model": shown(source.resolve()),
        "conversations": _digest(b"".join(train.values())),
        "held_out": _digest(b"".join(measured.values())),
        "tokenizer": _digest(*(file.read_bytes() for file in files)),
        "chat_template": _digest(text.encode()) if text is not None else "",
        **how,
    }
    return FineTuneInputs(with_own_name(opened.config), started, train, measured, tokenizer, text)


def prepare(inputs: FineTuneInputs, output: Path) -> list[Encoded]:
    """Write the record, the conversations, the tokenizer and the model; return the held-out conversations.

    A second call with the same inputs changes nothing.
    """
    encoded: list[Encoded] = []

    def write(folder: Path) -> None:
        _write(inputs, folder)
        encoded.extend(_encoded(inputs, folder))

    record.begin(output, RECORD, inputs.record, "fine-tuning", write)
    return encoded or _encoded(inputs, output)


def _write(inputs: FineTuneInputs, folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"".join(inputs.train.values()))
    (folder / "held_out.jsonl").write_bytes(b"".join(inputs.held_out.values()))
    write_json(folder / "model.json", describe(inputs.config))
    chat = folder / "tokenizer"
    chat.mkdir()
    for file in _tokenizer_files(inputs.tokenizer):
        shutil.copyfile(file, chat / file.name)
    if inputs.template is not None:
        path = chat / "tokenizer_config.json"
        config = json_outside(path, limit=_LIMIT) if path.exists() else {}
        write_json(path, {**config, "chat_template": inputs.template}, indent=2)
        (chat / "chat_template.jinja").unlink(missing_ok=True)


def _encoded(inputs: FineTuneInputs, folder: Path) -> list[Encoded]:
    """Encode all conversations, so that a wrong one ends here; return those that are held out."""
    reading = Reading.parse(str(inputs.record["reading"]))
    encoder = Encoder(folder / "tokenizer", inputs.tokenizer, reading.variables)
    tokens, rows = len(encoder.tokenizer), inputs.config.vocab_size
    if (padded := pad_vocab_size(tokens, _MULTIPLE)) < rows:
        raise ValueError(
            f"{inputs.tokenizer}: its {tokens:,} tokens fill {padded:,} rows of an embedding, and the model "
            f"has {rows:,}: training would drop the rest; give the model's own tokenizer"
        )
    result: list[Encoded] = []
    length, fitting, too_long = int(str(inputs.record["seq_length"])), 0, 0
    with Bar("read conversations", "lines", len(inputs.train) + len(inputs.held_out)) as bar:

        def parsed(lines: Mapping[str, bytes]) -> Iterator[Conversation]:
            for place, line in lines.items():
                yield from parse_line(line, place, form=reading.form)
                bar.add(1)

        for lines in (inputs.train, inputs.held_out):
            for one, encoded in worked(parsed(lines), encoder.encode):
                if max(encoded.ids, default=0) >= rows:
                    raise ValueError(
                        f"{one.place}: token {max(encoded.ids)} is outside the model's vocabulary of "
                        f"{rows:,}: it is another model's tokenizer"
                    )
                if lines is inputs.held_out:
                    result.append(encoded)
                elif len(encoded.ids) > length:
                    too_long += 1
                else:
                    fitting += any(encoded.trained[1:])
    longer = f"{too_long:,} {'is' if too_long == 1 else 'are'} longer than --seq-length {length:,}"
    if not fitting:
        raise ValueError(
            f"no conversation can be trained on: {longer}, the others have no message of the assistant"
        )
    if too_long:
        print(f"of the conversations to train on, {longer} and left out")
    if result and not any(any(one.trained) for one in result):
        raise ValueError("no held-out conversation has a message of the assistant: give --held-out FILE")
    return result


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


def _lines(path: Path, form: str) -> dict[str, bytes]:
    """Place -> row of a file as a line, with its end; the form is checked."""
    lines: dict[str, bytes] = {}
    length = 0
    for place, _, line in read_rows(path):
        list(parse_line(line, place, form=form))
        lines[f"{place} ({len(lines) + 1})" if place in lines else place] = line.rstrip(b"\r\n") + b"\n"
        if (length := length + len(line)) > _LIMIT:
            raise ValueError(
                f"{path}: it has more than {_LIMIT:,} bytes: use nemotron3 train --conversations"
            )
    if not lines:
        raise ValueError(f"{path}: it has no conversations")
    return lines


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
