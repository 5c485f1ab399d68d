"""A teacher's weights, of a checkpoint of Megatron's or Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.into_model import load_base, load_weights
from megatron_nemotron3.checkpoints.folders import is_hugging_face
from megatron_nemotron3.train.teacher.check import open_hf_teacher


def load(chunk: Any, place: Path, dp_cp: Any = None) -> None:
    """Read this rank's weights into a chunk of the teacher. All ranks call it.

    Args:
        place: as `check.Teacher.place`.
        dp_cp: the chunk's data- and context-parallel group; None: Megatron's.

    Raises:
        ValueError: a file is damaged, or the tensors do not fit.
    """
    if is_hugging_face(place):
        load_weights(chunk, open_hf_teacher(place), dp_cp)
    else:
        load_base(chunk, place, option="teacher ", dp_cp=dp_cp)
