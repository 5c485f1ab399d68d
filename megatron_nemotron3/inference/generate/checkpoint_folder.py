"""The checkpoint, tokenizer and data of a folder (`checkpoints.folders`).

What `nemotron3 train --output` wrote has them in checkpoints/ and data/37268f6eae94a988/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.hf_folder import read_config
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.origin import (
    CORPUS,
    find_origin,
    prepared_data,
    tokenizer_folders,
)
from megatron_nemotron3.checkpoints.folders import is_hugging_face, locate_one
from megatron_nemotron3.checkpoints.state import read_arguments
from megatron_nemotron3.inference.generate.text import TOKENIZER, Tokenizer, read_json_object
from megatron_nemotron3.models import Nemotron3Config


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of one checkpoint.

    run: the output folder of `nemotron3 train`, if the checkpoint lies in one.
    arguments: Megatron's arguments as stored in the checkpoint; empty for Hugging Face.
    """

    checkpoint: Path
    run: Path | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self, given: Path | None = None) -> Tokenizer:
        """The given tokenizer; otherwise that in the checkpoint, of the run, or of the stored arguments."""
        places = [given] if given is not None else self._tokenizer_folders()
        for place in places:
            if given is not None or (place / TOKENIZER).is_file():
                return Tokenizer(place)
        looked = ", ".join(map(str, places))
        raise ValueError(
            f"{self.checkpoint}: no tokenizer found (looked for {TOKENIZER} in {looked}): give --tokenizer "
            "DIR"
        )

    def _tokenizer_folders(self) -> list[Path]:
        where = (self.checkpoint, self.run, self.arguments)
        origin = find_origin(*where)
        return [self.checkpoint, *tokenizer_folders(*where), *([] if origin is None else [origin])]

    def data(self) -> tuple[str, str]:
        """Prefix and --split of the data the checkpoint was trained on."""
        stored, split = self.arguments.get("data_path"), self.arguments.get("split")
        prepared, prefix = prepared_data(self.run, self.arguments), ""
        if prepared is not None:
            prefix = str(prepared / CORPUS)
            split = split or read_json_object(prepared / "manifest.json").get("split")
        elif isinstance(stored, list) and len(stored) == 1:
            prefix = str(stored[0])
        if not isinstance(split, str) or not Path(f"{prefix}.idx").is_file():
            raise ValueError(
                f"{self.checkpoint}: the data it was trained on is not found: give --text PATH or "
                "--data-path PREFIX"
            )
        return prefix, split

    def open(self, model: Nemotron3Config | None, vocab_size: int | None = None) -> Checkpoint:
        """Open the checkpoint's tensors; packed weights are read as BF16."""
        config = read_config(self.checkpoint, omni=True) if is_hugging_face(self.checkpoint) else {}
        packed = QUANTIZATION in config
        return open_checkpoint(
            self.checkpoint, model=model, vocab_size=vocab_size, dequantize=packed, omni=True
        )


def find_checkpoint(folder: Path) -> CheckpointFolder:
    """Locate the checkpoint of a folder; ValueError as `locate_one`, or it is damaged."""
    found = locate_one(folder)
    if found.kind == "hugging face":
        return CheckpointFolder(found.folder)
    return CheckpointFolder(found.folder, found.run, read_arguments(found.folder))
