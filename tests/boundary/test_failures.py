"""An error of one rank becomes a BoundaryError on every rank within the timeout, also in middle stages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_nemotron3.boundary.bridge import Bridge
from megatron_nemotron3.boundary.coordinator import Coordinator
from megatron_nemotron3.boundary.feed import RowFeed
from megatron_nemotron3.boundary.groups import BoundaryError
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator, check_modules, stage_of
from tests.support.boundary_pipeline import Runner, Stages, World, microbatches, reference
from tests.support.boundary_processes import NOTHING, run_apart

#: Two encoders and a language model of two stages, the second of which has no boundary.
WORLD = World({"images": "tp=1", "audio": "offset=1", "language": "pp=2,offset=2"})
STEPS = 4
#: Seconds of a wait; on a busy machine a rank may need some to arrive.
WAIT = 6.0
#: What a rank says that does not know the reason.
LOOK = "the log of the rank that failed or ended first has the reason"


class Fault(NamedTuple):
    """What is wrong, and what some rank says of it.

    rank, change: in microbatch 1 a rank's outputs are changed; None: it ends.
    batches: rank 0 counts other rows from this microbatch on; -1: never.
    """

    words: tuple[str, ...]
    rank: int = -1
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    batches: int = -1


class Spoiled(Stages):
    """Stages that do something wrong on one rank at one microbatch."""

    fault: Fault
    step = -1

    def __call__(self, batch: dict[str, Any]) -> Any:
        self.step += 1
        outputs = super().__call__(batch)
        if (self.rank, self.step) != (self.fault.rank, 1):
            return outputs
        if self.fault.change is None:
            os._exit(1)
        return {name: self.fault.change(tensor) for name, tensor in outputs.items()}


OTHER_DTYPE = ("images -> language", "torch.float32", "torch.float64", "pipeline_dtype")
CASES = {
    "dtype": Fault(OTHER_DTYPE, 0, torch.Tensor.float),
    "width": Fault(("audio -> language", "(3,)", "(4,)", "hidden size"), 1, lambda rows: rows[:, :3]),
    "rows": Fault(
        ("images -> language", "rows, but the row counts of the batch say"), 0, lambda rows: rows.repeat(2, 1)
    ),
    "counts differ": Fault(("images -> language", "ranks [0]", "ranks [1, 2]", "must agree"), batches=0),
    "counts differ later": Fault(("waited for", "same batches"), batches=2),
    "death": Fault(("waited", "cure:"), 1),
    # Rank 0 hosts the store of the default group and ends right after it has failed, or dies.
    "the host of the store fails": Fault(
        ("rank 0: images -> language", "torch.float32"), 0, torch.Tensor.float
    ),
    "the host of the store dies": Fault(("waited", "cure:"), 0),
}


#: The others are in the full set.
DEFAULT = ("dtype", "counts differ", "death", "the host of the store dies")


def _train(case: str) -> str:
    fault = CASES[case]
    runner = Runner(WORLD._replace(fed=True), timeout=timedelta(seconds=WAIT))
    runner.model.__class__ = Spoiled
    runner.model.fault = fault
    batches = microbatches(WORLD, STEPS)
    if fault.batches >= 0 and runner.model.rank == 0:
        batches[fault.batches :] = microbatches(WORLD, STEPS, seed=1)[fault.batches :]
    return f"no error, loss {runner.run(batches).loss}"


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.full]) for c in CASES]
)
def test_an_error_ends_every_rank(case):
    """The rank that fails says why, with numbers and a cure; the others say where to look."""
    begun = time.monotonic()
    found = run_apart(_train, 4, case, wait=20.0, timeout=60, tcp="host" in case)
    took = time.monotonic() - begun
    if "death" in case or "dies" in case:
        assert found.pop(0 if "host" in case else 1) == NOTHING
    _require_reason(found, CASES[case].words)
    assert took < 45, f"{took} s"


def _require_reason(found: list[str], words: Sequence[str]) -> None:
    """All ranks have an error; some say these words, and the others where to look."""
    assert all(said.startswith("BoundaryError: ") for said in found), found
    known = [all(word in said for word in words) for said in found]
    assert any(known), (words, found)
    for knows, said in zip(known, found, strict=True):
        assert knows or LOOK in said, said


def _construct() -> str:
    import torch

    rank = torch.distributed.get_rank()
    Runner(WORLD, timeout=timedelta(seconds=WAIT), frozen=("audio",) if rank == 1 else ())
    return "no error"


def test_other_arguments_on_a_rank():
    """Ranks without a boundary raise it, too."""
    found = run_apart(_construct, 4, wait=20.0, timeout=60)
    _require_reason(found, ["connect modules differently", "frozen=True", "frozen=False"])


REFUSED = {
    "ranks beyond the world": ({"images": "dp=3", "language": "tp=2,offset=3"}, {}, r"\[4\].*do not exist"),
    "ranks shared in part": ({"images": "dp=3", "language": "tp=2,offset=2"}, {}, r"share ranks \[2\]"),
    "two stages on a rank": (
        {"images": "pp=2", "audio": "dp=2", "language": "tp=2,offset=2"},
        {},
        "rank 0 is at different stages.*one pipeline depth",
    ),
    "an edge that skips a module": (
        {"images": "tp=1", "audio": "offset=1", "language": "tp=2,offset=2"},
        {"images": ["audio", "language"], "audio": ["language"], "language": []},
        "different distances from the end",
    ),
    "a circle": (
        {"images": "dp=2", "language": "tp=2,offset=2"},
        {"images": ["language"], "language": ["images"]},
        "in a circle: .*images -> language",
    ),
    "no grid": ({"language": "dp=4"}, {"images": ["language"], "language": []}, r"\['images'\] have no grid"),
    "no topology": ({"images": "dp=2", "language": "dp=2,offset=2"}, {"language": []}, "not in the topology"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_constructed(case):
    """Modules that would hang are refused by their arguments alone, with the same error on every rank."""
    texts, topology, words = REFUSED[case]
    layouts = {name: Layout.parse(text) for name, text in texts.items()}
    default = {name: [] if name == "language" else ["language"] for name in layouts}
    with pytest.raises(BoundaryError, match=words):
        check_modules(layouts, topology or default, 4)


class Reading(Stages):
    """Stages that look at the pipeline while it runs, as a progress bar may do."""

    communicator: Any = None

    def __call__(self, batch: dict[str, Any]) -> Any:
        assert self.communicator.current_stage in (0, 1, 2)
        return super().__call__(batch)


def _watched() -> str:
    runner = Runner(WORLD, timeout=timedelta(seconds=WAIT))
    communicator = runner.communicator
    if torch.distributed.get_rank() == 4:
        assert communicator.current_stage == 0 and not communicator.is_pp_last_stage
        assert communicator.recv_forward() == {}
        communicator.close()
        return "idle"
    runner.model.__class__ = Reading
    runner.model.communicator = communicator
    result = runner.run(microbatches(WORLD, STEPS))
    communicator.close()
    total = sum(abs(gradient).sum() for gradient in result.gradients.values())
    return f"loss {result.loss:.9f}, {result.left} left, {total:.9f}"


def test_an_idle_rank_and_reading_the_stage_change_nothing():
    """A rank in no module is idle, as in upstream's communicator."""
    *found, idle = run_apart(_watched, 5, wait=20.0, timeout=60)
    assert idle == "idle"
    expected = reference(WORLD, microbatches(WORLD, STEPS))
    at = [("images", 0), ("audio", 0), ("language", 0), ("language", 1)]
    assert found == [
        f"loss {expected.loss if rank == 3 else 0:.9f}, 0 left, {abs(expected.gradients[which]).sum():.9f}"
        for rank, which in enumerate(at)
    ]


#: One encoder, two lanes of the language model, two rows in each of two samples. No gradients go back: gloo
#: ends a process that receives a message longer than its buffer.
LANES = World(
    {"images": "tp=1", "language": "dp=2,offset=1"},
    samples=2,
    length=4,
    fed=True,
    uniform=True,
    frozen=("images",),
)


def _other_count_without_tags() -> str:
    """Rank 0 counts a row less than the others in microbatch 1; messages have no tags, as on NCCL."""
    with mock.patch("megatron_nemotron3.boundary.groups._has_tags", lambda _: False):
        runner = Runner(LANES, timeout=timedelta(seconds=WAIT))
    batches = microbatches(LANES, STEPS)
    if runner.model.rank == 0:  # gloo accepts a message that is too short
        batches[1]["ids"][0, 1] = 0
        batches[1]["images"][0] = batches[1]["images"][0][1:]
    runner.run(batches)
    runner.communicator.close()  # an encoder may be ahead of the others
    return "trained"


def test_other_counts_are_noticed_without_tags():
    """At the next microbatch, although the rows were received."""
    found = run_apart(_other_count_without_tags, 3, wait=20.0, timeout=60)
    _require_reason(found, ["forward 2", "rank 0 and ranks [1, 2] describe", "same batches"])


def test_stages_are_counted_from_the_end():
    """Both encoders are directly before the language model, whatever their depth."""
    layouts = {name: Layout.parse(text) for name, text in WORLD.layouts.items()}
    deeper = {
        **layouts,
        "images": Layout.of(pp=3),
        "audio": Layout.of(offset=3),
        "language": Layout.of(pp=2, offset=4),
    }
    topology = {"images": ["language"], "audio": ["language"], "language": []}
    assert [stage_of(rank, deeper, topology) for rank in range(6)] == [0, 1, 2, 2, 3, 4]


def test_nothing_to_checkpoint():
    """A communicator is no module and has no state to save; it is rebuilt from its arguments."""
    for kind in (BoundaryCommunicator, Bridge, Coordinator, RowFeed):
        assert not issubclass(kind, torch.nn.Module)
        assert not {"state_dict", "sharded_state_dict", "load_state_dict"} & set(dir(kind))
