"""The stock 1F1B schedule over our communicator gives the values and gradients of a single process."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.boundary_pipeline import Result, Runner, World, compare, microbatches
from tests.support.boundary_processes import run_apart

UNEQUAL = {"images": "pp=2", "audio": "tp=1,offset=2", "language": "tp=1,offset=3"}


def several(worlds: list[tuple[World, tuple[int, ...]]]) -> list[list[Result]]:
    """Batches of several sizes in every world; gradients of each on its own."""
    import torch

    found = []
    for world, numbers in worlds:
        runner = Runner(world)
        results = []
        for number in numbers:
            runner.model.layers.zero_grad()
            result = runner.run(microbatches(world, number, seed=number))
            results.append(result._replace(gradients={k: v.copy() for k, v in result.gradients.items()}))
            torch.distributed.barrier()
        found.append(results)
    return found


def check(size: int, *worlds: tuple[World, tuple[int, ...]], timeout: float = 100) -> None:
    """Run all of them in the same processes and compare with a single process."""
    ranks = run_distributed(several, size, list(worlds), timeout=timeout)
    for i, (world, numbers) in enumerate(worlds):
        for j, number in enumerate(numbers):
            compare(world, [found[i][j] for found in ranks], microbatches(world, number, seed=number))
            assert not any(found[i][j].left for found in ranks), "forward plans without a backward"


def test_encoders_of_unequal_depth():
    """Images with PP 2, audio with PP 1: 1 to 8 microbatches, text-only ones among them; with and without a
    feed; and with images frozen, to which nothing goes back then."""
    world = World(UNEQUAL, text_only=(0, 2))
    check(
        4,
        (world, (1, 2, 3, 4, 8)),
        (world._replace(fed=True), (1, 4, 8)),
        (world._replace(frozen=("images",)), (1, 4)),
    )


def test_layouts():
    """Every module in a layout of its own:

    slices      three lanes of images and two of audio into CP 2 with sequence parallelism
    shared      two encoders on the same ranks, a language model of two lanes and three stages
    cut         context ranks with chunks of every picture, and with equal parts of the sounds' rows
    whole       context ranks with whole media and TP 2, into context-parallel slices
    three, five lanes that do not divide: a lane's samples go to two lanes
    deep        images in three stages, audio in one, the language model in two; many microbatches
    """
    slices = {"images": "dp=3", "audio": "tp=1,offset=3", "language": "tp=2,cp=2,offset=4,sp"}
    shared = {"images": "dp=2", "audio": "dp=2", "language": "dp=2,pp=3,offset=2"}
    cut = {
        "images": "cp=2,share=zigzag",
        "audio": "cp=2,offset=2,share=contiguous",
        "language": "offset=4,tp=2",
    }
    whole = {"images": "tp=2,cp=2,share=media", "language": "cp=2,offset=4"}
    three = World({"images": "dp=3", "language": "dp=2,offset=3"}, samples=6)
    five = World({"images": "dp=5", "language": "dp=3,offset=5"}, samples=15)
    deep = {"images": "pp=3", "audio": "tp=1,offset=3", "language": "pp=2,offset=4"}
    check(
        8,
        (World(slices, samples=3, fed=True), (1, 5)),
        (World(shared), (3,)),
        (World(cut, length=32, fed=True, text_only=(1,)), (1, 5)),
        (World(whole, length=32, fed=True), (3,)),
        (three, (3,)),
        (three._replace(fed=True), (3,)),
        (five, (2,)),
        (five._replace(fed=True), (2,)),
        (World(deep, text_only=(0, 11)), (12,)),
        (World(deep, fed=True), (17,)),
    )


def _evaluated(worlds: list[World]) -> list[list[Any]]:
    """Losses of evaluation, of a forward pass with gradients enabled, and a training step after both."""
    import torch

    found = []
    for world in worlds:
        runner = Runner(world)
        batches = microbatches(world, 5)
        with torch.no_grad():
            evaluated = runner.run(batches, forward_only=True)
        assert not evaluated.left
        passed = runner.run(batches, forward_only=True)
        found.append([evaluated.loss, passed.loss, runner.run(batches)])
        torch.distributed.barrier()
    return found


def test_forward_only_leaves_nothing_behind():
    """Evaluation keeps no plans, and what a forward-only pass keeps does not reach the next step."""
    worlds = [World(UNEQUAL), World(UNEQUAL, fed=True)]
    ranks = run_distributed(_evaluated, 4, worlds, timeout=100)
    for i, world in enumerate(worlds):
        compare(world, [found[i][2] for found in ranks], microbatches(world, 5))
        for step in range(2):
            assert sum(found[i][step] for found in ranks) == sum(found[i][2].loss for found in ranks)


STOCK = {"images": "pp=2", "audio": "pp=2,offset=2", "language": "tp=1,offset=4"}


def _watched(world: World, seconds: float) -> str:
    """What a rank is waiting for after so many seconds of four microbatches."""
    ended: list[Any] = []

    def train() -> None:
        try:
            several([(world, (4,))])
            ended.append("done")
        except RuntimeError as error:  # a rank whose time was up has left
            ended.append(traceback.extract_tb(error.__traceback__))

    running = threading.Thread(target=train, daemon=True)
    running.start()
    running.join(seconds)
    if ended == ["done"]:
        return "done"
    stack = ended[0] if ended else traceback.extract_stack(sys._current_frames()[running.ident or 0])
    calls = [frame.name for frame in stack if "multimodule_communicator" in frame.filename]
    return f"waits in {calls[0]}" if calls else "has not begun"


@pytest.mark.full
def test_stock_hangs_on_unequal_depth():
    """Upstream's communicator waits in a circle where ours passes; with equal depth it passes here, too."""
    equal = World(STOCK, stock=True, uniform=True)
    check(5, (equal, (4,)))
    unequal = World(UNEQUAL, stock=True, uniform=True)
    found = run_apart(_watched, 4, unequal, 20.0, wait=100.0, timeout=60)
    assert all(text.startswith("waits in ") for text in found), found
    assert len(set(found)) > 1, f"ranks that wait for the same thing are late, not stuck: {found}"
    ours = run_apart(_watched, 4, unequal._replace(stock=False), 20.0, wait=100.0, timeout=60)
    assert ours == ["done"] * 4
