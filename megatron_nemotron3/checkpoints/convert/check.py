"""`nemotron3 check`: is a checkpoint of any kind complete and undamaged?"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints import check as megatron
from megatron_nemotron3.checkpoints.folders import locate
from megatron_nemotron3.checkpoints.metadata import count_elements, elements_text
from megatron_nemotron3.checkpoints.remote import local, place, shown
from megatron_nemotron3.common.options import add_command, argument, flag, json_flag, option
from megatron_nemotron3.common.output import part, result, say


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `nemotron3 check`."""

    folder: Path | str = argument(
        "a run, its checkpoints or one of them, or a Hugging Face folder", "DIR", parse=place
    )
    full: bool = flag("everything: read all bytes and compare CRC32s")
    workers: int = option("processes or threads (default 4)", "N", default=4, least=1)
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 check`."""
    add_command(commands.add_parser("check"), CheckOptions, check_command)


def check_command(options: CheckOptions) -> int:
    """Run `nemotron3 check`. Returns the exit status: 0 if the checkpoint is sound, else 2."""
    with local(options.folder, every=True) as folder, result(options.json):
        if locate(folder).kind == "hugging face":
            return check_hugging_face(folder, full=options.full, workers=options.workers)
        _say_notes(folder)
        return megatron.check(folder, full=options.full, workers=options.workers)


def _say_notes(folder: Path) -> None:
    """Say what was lost in a Megatron checkpoint before; nothing of one that cannot be opened."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
    from megatron_nemotron3.checkpoints.convert.notes import bias_notes

    with contextlib.suppress(ValueError, OSError):
        for note in bias_notes(open_megatron(folder, omni=True)):
            say(note, notes=[" ".join(note.split())])


def check_hugging_face(folder: Path, *, full: bool = False, workers: int = 4) -> int:
    """Print what a Hugging Face folder contains and verify it: headers, the index, and config.json."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
    from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
    from megatron_nemotron3.checkpoints.convert.hf_folder import open_hf, read_config
    from megatron_nemotron3.checkpoints.convert.job import MANIFEST
    from megatron_nemotron3.checkpoints.convert.notes import bias_notes, config_notes, file_notes
    from megatron_nemotron3.checkpoints.convert.opened import checkpoint_facts, checkpoint_line
    from megatron_nemotron3.checkpoints.convert.verify import verify_manifest

    stored = open_hf(folder)
    data = read_config(folder, omni=True)
    opened = open_hugging_face(folder, dequantize=QUANTIZATION in data, omni=True)
    say(checkpoint_line(opened), **checkpoint_facts(opened))
    elements = count_elements(stored.tensors.values())
    say(
        f"  tensors      {len(stored.tensors):,}; elements {elements_text(elements)}",
        tensors=len(stored.tensors),
        elements=elements,
    )
    say(
        f"  files        {len(stored.files):,} with {sum(stored.files.values()):,} bytes",
        files=len(stored.files),
        bytes=sum(stored.files.values()),
        problems=[],
    )
    for note in (*file_notes(opened), *bias_notes(opened), *config_notes(opened, data)):
        say(f"  {note}", notes=[" ".join(note.split())])
    manifest = (folder / MANIFEST).exists()
    if full and manifest:
        say("  checked      every byte, with the CRC32s of the manifest", checked="bytes")
        with part() as compared:
            status = verify_manifest(folder, workers)
        say(problems=compared.get("problems", []))
        if status:
            say(sound=False)
            return 2
    elif full:
        say(
            f"  unprotected  {shown(folder)} has no {MANIFEST} with CRC32s: only names and sizes count",
            checked="names and sizes",
        )
    else:
        say(
            "  checked      names, shapes and sizes; --full compares the manifest's CRC32s, if there is one",
            checked="names and sizes",
        )
    say("sound", sound=True)
    return 0
