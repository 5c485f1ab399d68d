"""Input that does not fit together ends every rank of every layout; the rank that finds it names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.boundary_processes import run_apart
from tests.support.omni_layouts import IDS, SOUND, VISION, Case, Change, step

TOGETHER = Case("dp=2", "tp=2", "dp=2")
UNFED = replace(TOGETHER, feed=False)
APART = Case("tp=2,offset=2", "tp=1", "tp=1,offset=1")


def fewer_pictures(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """Rank 0 encodes all pictures but one."""
    given = batch["modality_inputs"][VISION]["radio"]
    if rank == 0:
        last = int(given["image_grid_hw"][-1].prod())
        given["pixel_values"] = given["pixel_values"][:-last]
        given["image_grid_hw"] = given["image_grid_hw"][:-1]
        kept = [place for place in given["order"].tolist() if place < len(given["order"]) - 1]
        given["order"] = torch.tensor(kept)
    return batch


def half_a_picture(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """Rank 0 lacks patches of a picture."""
    given = batch["modality_inputs"][VISION]["radio"]
    if rank == 0:
        given["pixel_values"] = given["pixel_values"][:-3]
    return batch


def no_sound(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """Ids of sounds on all ranks, but rank 1 has no sound."""
    if rank == 1:
        batch["modality_inputs"][SOUND] = None
    return batch


def more_ids(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """The ranks of the language model see one id of a sound more than there are rows."""
    batch["input_ids"][0, 0] = IDS[SOUND]
    return batch


def failing(case: Case, change: Change) -> str:
    """The error of this rank."""
    try:
        step(case, change=change)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


FULL = pytest.mark.full
PATCHES = "rank 0: image_grid_hw describes 144 patches of 10 pictures, but pixel_values has 141"
MARKS = "the feed and input_ids mark other positions: both must be of the same samples"


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (TOGETHER, half_a_picture, PATCHES),
        pytest.param(TOGETHER, fewer_pictures, "[0] of one lane have row counts 47; ranks [1]", marks=FULL),
        pytest.param(TOGETHER, no_sound, "0 rows, but the row counts of the batch say 18", marks=FULL),
        pytest.param(TOGETHER, more_ids, MARKS, marks=FULL),
        pytest.param(UNFED, no_sound, "gave 0 rows, but input_ids have 18 positions", marks=FULL),
        pytest.param(UNFED, more_ids, "gave 18 rows, but input_ids have 19 positions", marks=FULL),
        pytest.param(APART, half_a_picture, PATCHES, marks=FULL),
        pytest.param(APART, fewer_pictures, "47 rows, but the row counts of the batch say 50", marks=FULL),
        pytest.param(APART, no_sound, "0 rows, but the row counts of the batch say 36", marks=FULL),
        pytest.param(APART, more_ids, MARKS, marks=FULL),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_rank_ends(case: Case, change: Change, words: str) -> None:
    world = max(layout.ranks[-1] for layout in case.layouts.values()) + 1
    ranks = run_apart(failing, world, case, change, wait=60, timeout=300)
    assert any(said.startswith(("BoundaryError: ", "RowsError: ")) and words in said for said in ranks), ranks
    assert all("Error: " in said and (words in said or "failed or ended first" in said) for said in ranks), (
        ranks
    )
