"""Modules that share ranks: rows equal the concatenation bit for bit, gradients, too."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.boundary.test_plan import expected
from tests.support.boundary_reference import media_of, of_context, unit

HIDDEN = 5
#: (source, destination) as `Layout.parse` reads them; six ranks.
PAIRS = [
    ("dp=6", "tp=6"),
    ("tp=6", "dp=6"),
    ("tp=2,dp=3", "tp=3,dp=2"),
    ("tp=3,dp=2", "tp=2,dp=3"),
    ("dp=6", "tp=3,dp=2"),
    ("tp=2,dp=3", "tp=2,dp=3"),
    ("dp=6", "tp=1,pp=2,dp=3"),
    ("tp=2,dp=3", "tp=3,pp=2"),
    ("dp=6", "tp=6,sp"),
    ("dp=6", "tp=3,cp=2"),
    ("tp=3,dp=2", "tp=3,cp=2,sp"),
    ("dp=6", "cp=3,dp=2"),
    ("tp=2,dp=3", "tp=2,pp=3"),
    ("tp=3,dp=2,sp", "tp=6"),
    ("tp=3,dp=2,sp", "tp=3,cp=2,sp"),
    ("gtp_remat=2,dp=3", "tp=3,dp=2"),
    ("cp=3,dp=2,share=zigzag", "tp=6,sp"),
    ("tp=2,cp=3,share=contiguous", "tp=3,cp=2,sp"),
    ("cp=2,dp=3,share=media", "dp=6"),
    ("cp=6,share=media", "tp=3,cp=2,sp"),
]


def grid(layout: Any) -> Any:
    """The layout's grid, without process groups."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    return HyperCommGrid(
        [size for _, size in layout.dimensions],
        [name for name, _ in layout.dimensions],
        rank_offset=layout.offset,
    )


def layout_of(text: str) -> Any:
    """As `Layout.parse`, with extra data lanes between tp and dp."""
    from megatron_nemotron3.boundary.layout import Layout

    first, _, rest = text.partition(",")
    name, _, size = first.partition("=")
    if name != "gtp_remat":
        return Layout.parse(text)
    plain = Layout.parse(rest)
    return Layout((("tp", plain.tp), (name, int(size)), ("dp", plain.dp)))


def communicator(source: str, destination: str, **options: Any) -> Any:
    from megatron_nemotron3.boundary.colocated import ColocatedBridge

    a, b = layout_of(source), layout_of(destination)
    options.setdefault("source_sequence_parallel", a.sequence_parallel)
    options.setdefault("source_share", a.share)
    options.setdefault("dim_mapping", {"b": 0, "h": 1})
    return ColocatedBridge(
        grid(a), grid(b), "vision", "language", sequence_parallel=b.sequence_parallel, **options
    )


def images(samples: int, length: int, seed: int) -> np.ndarray:
    """[samples, length] of bool: positions of image rows; some samples have none."""
    random = np.random.default_rng(seed)
    image = random.random((samples, length)) < random.choice([0.0, 0.3, 0.9], size=(samples, 1))
    image[0] = seed % 2 == 0
    return image


def media(comm: Any, image: np.ndarray) -> list[list[int]]:
    """Rows of each medium of each sample."""
    return [media_of(comm.source, int(n)) for n in image.sum(1)]


def described(image: np.ndarray, media: Any = None, **kinds: np.ndarray) -> Any:
    from megatron_nemotron3.boundary.feed import Microbatch
    from tests.support.boundary_reference import runs_of

    runs = {
        name: [runs_of(np.flatnonzero(s).tolist()) for s in at]
        for name, at in {"vision": image, **kinds}.items()
    }
    known = {"vision": media} if media is not None else None
    return Microbatch.of(runs=runs, lengths=[image.shape[1]] * len(image), media=known)


def values(rows: list[int], salt: int = 0) -> torch.Tensor:
    """[n, HIDDEN], different for every row number."""
    at = torch.tensor(rows, dtype=torch.float32).view(-1, 1)
    return torch.sin(at * HIDDEN + torch.arange(HIDDEN) + salt) if len(rows) else torch.empty(0, HIDDEN)


def sides(comm: Any, image: np.ndarray) -> tuple[list[int], list[int]]:
    """(row numbers that this rank sends, row numbers that it receives)."""
    number = np.where(image, image.cumsum().reshape(image.shape) - 1, -1)
    share = len(image) // comm.source.dp
    lane, at = comm.rank_to_src_pos[dist.get_rank()]
    mine = slice(lane * share, (lane + 1) * share)
    context = comm.source.coordinates(dist.get_rank()).get("cp", 0)
    held = of_context(comm.source, sum(media(comm, image)[mine], []), context)
    given = number[mine][image[mine]][held].tolist()
    if comm.source.sequence_parallel:
        part = len(given) // comm.source.tp
        given = given[at * part : (at + 1) * part]
    return given, expected(comm.destination, image, number).get(dist.get_rank(), [])


def check_pairs(pairs: list[tuple[str, str]]) -> int:
    """Forward and backward of every pair and several microbatches; returns how many rows were compared."""
    compared = 0
    for source, destination in pairs:
        comm = communicator(source, destination)
        samples = math.lcm(comm.source.dp, comm.destination.dp)
        for seed in range(4):
            length = 4 * comm.destination.cp * comm.destination.tp
            image = images(samples, length, seed)
            image &= seed != 3  # a microbatch of text
            image &= image.cumsum(1) <= (image.sum(1) // unit(comm.source) * unit(comm.source))[:, None]
            batch = described(image, media(comm, image))
            given, taken = sides(comm, image)
            tensor = values(given).requires_grad_()
            out = comm.communicate(tensor, batch)
            assert torch.equal(out, values(taken)), (source, destination, seed)
            out.backward(values(taken, salt=7))
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, values(given, salt=7)), (source, destination, seed)
            compared += len(given) + len(taken)
        comm.destroy()
    return compared


def test_every_rank_gets_its_rows_and_their_gradients_come_back() -> None:
    assert min(run_distributed(check_pairs, 6, PAIRS[1::2])) > 100


@pytest.mark.full
def test_more_layouts() -> None:
    assert min(run_distributed(check_pairs, 6, PAIRS)) > 100


def check_without_a_feed() -> list[int]:
    """Rows per sample from upstream's attribute; whole lanes arrive, also where slices are owned."""
    seen = []
    for source, destination in (
        ("dp=4", "tp=4"),
        ("tp=2,dp=2", "dp=4"),
        ("tp=4", "tp=2,dp=2"),
        ("dp=4", "cp=4"),
    ):
        comm = communicator(source, destination)
        samples = 4
        image = images(samples, 16, seed=3)
        given, _ = sides(comm, image)
        number = np.where(image, image.cumsum().reshape(image.shape) - 1, -1)
        lane, share = comm.rank_to_dest_pos[dist.get_rank()][0], samples // comm.destination.dp
        mine = slice(lane * share, (lane + 1) * share)
        taken = number[mine][image[mine]].tolist()
        tensor = values(given).requires_grad_()
        share = samples // comm.source.dp
        at = comm.rank_to_src_pos[dist.get_rank()][0] * share
        tensor._mimo_bridge_split_sizes = image.sum(1)[at : at + share].tolist()  # type: ignore[attr-defined]
        out = comm.communicate(tensor)
        assert torch.equal(out, values(taken))
        out.backward(values(taken, salt=1))
        assert tensor.grad is not None and torch.equal(tensor.grad, values(given, salt=1))
        seen.append(len(taken))
        comm.destroy()
    return seen


def test_a_header_replaces_the_feed() -> None:
    assert all(sum(seen) for seen in run_distributed(check_without_a_feed, 4))


def check_traffic() -> list[int]:
    """How many all-to-alls there are, and how many rows leave this rank."""
    calls: list[int] = []
    original = dist.all_to_all_single

    def counted(out: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(rows))
        return original(out, rows, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        from megatron_nemotron3.boundary.colocated import ColocatedBridge, ModalityRows, communicate

        # Nothing leaves its rank: equal layouts, and fan-out forward.
        image = images(4, 8, seed=2)
        same = communicator("tp=2,dp=2", "tp=2,dp=2")
        given = values(sides(same, image)[0]).requires_grad_()
        same.communicate(given, described(image)).sum().backward()
        assert given.grad is not None and bool((given.grad == 1).all())
        assert not same.communicate(given, described(image), backward=False).requires_grad
        fan_out = communicator("tp=4", "dp=4")
        wide = fan_out.communicate(values(sides(fan_out, image)[0]), described(image))
        # Fan-in: ranks have the gradients of their own rows.
        fan_in = communicator("dp=4", "tp=4")
        gathered = fan_in.communicate(values(sides(fan_in, image)[0]).requires_grad_(), described(image))
        assert len(calls) == 1
        gathered.sum().backward()
        assert len(calls) == 1 and len(wide) == image[dist.get_rank()].sum()
        # Two modalities, one all-to-all each way; frozen ones have no way back.
        vision = communicator("dp=4", "tp=4,sp")
        audio = ColocatedBridge(
            vision.src_grid,
            vision.dest_grid,
            "audio",
            "language",
            {"b": 0, "h": 1},
            sequence_parallel=True,
            groups_from=vision,
        )
        other = images(4, 8, seed=5)
        both = described(image, audio=other)
        for frozen, expected_calls in ((False, 2), (True, 1)):
            calls.clear()
            a = values(sides(vision, image)[0]).requires_grad_(not frozen)
            b = values(sides(audio, other)[0], salt=3).requires_grad_(not frozen)
            x, y = communicate([ModalityRows(vision, a), ModalityRows(audio, b)], both)
            assert torch.equal(x, values(sides(vision, image)[1]))
            assert torch.equal(y, values(sides(audio, other)[1], salt=3))
            if frozen:
                assert not x.requires_grad
            else:
                (x.sum() + 2 * y.sum()).backward()
                assert a.grad is not None and bool((a.grad == 1).all())
                assert b.grad is not None and bool((b.grad == 2).all())
            assert len(calls) == expected_calls
        # One of the two frozen: only the other's gradients cross.
        a, b = values(sides(vision, image)[0]), values(sides(audio, other)[0]).requires_grad_()
        calls.clear()
        x, y = communicate([ModalityRows(vision, a), ModalityRows(audio, b)], both)
        y.sum().backward()
        assert not x.requires_grad and b.grad is not None and len(calls) == 2
        return calls
    finally:
        dist.all_to_all_single = original


def test_rows_that_stay_are_not_sent_and_modalities_share_an_exchange() -> None:
    assert run_distributed(check_traffic, 4)


def check_recompute_and_one_side_that_needs_no_gradient() -> None:
    comm = communicator("dp=2", "tp=2")
    image = images(2, 8, seed=4)
    given, taken = sides(comm, image)
    batch = described(image)
    tensor = values(given).requires_grad_()
    doubled = checkpoint(lambda rows: comm.communicate(rows * 2, batch), tensor, use_reentrant=False)
    assert torch.equal(doubled, 2 * values(taken))
    doubled.sum().backward()
    assert tensor.grad is not None and bool((tensor.grad == 2).all())
    # A rank whose rows need no gradient takes part in backward, if it is agreed that gradients come back.
    tensor = values(given).requires_grad_(dist.get_rank() == 0)
    comm.communicate(tensor, batch, backward=True).sum().backward()
    assert (tensor.grad is not None) == (dist.get_rank() == 0)
    # Without a feed the header finds out.
    tensor = values(given).requires_grad_(dist.get_rank() == 0)
    comm.communicate(tensor).sum().backward()
    assert (tensor.grad is not None) == (dist.get_rank() == 0)
    # With a batch dimension in the middle, a sample is a row.
    three = communicator("dp=2", "tp=2", dim_mapping={"s": 0, "b": 1, "h": 2})
    part = torch.arange(12.0).view(3, 2, 2) + 100 * dist.get_rank()
    part.requires_grad_()
    out = three.communicate(part)
    whole = torch.arange(12.0).view(3, 2, 2)
    assert torch.equal(out, torch.cat([whole, whole + 100], 1))
    out.backward(out.detach())
    assert part.grad is not None and torch.equal(part.grad, part.detach())


def test_recompute_and_ranks_that_differ_in_requires_grad() -> None:
    run_distributed(check_recompute_and_one_side_that_needs_no_gradient, 2)


@pytest.mark.full
def test_refused_layouts() -> None:
    for texts in run_distributed(refused, 2):
        assert all(words in text for text, (_, _, words) in zip(texts, REFUSED, strict=True))


def failing(kind: str) -> tuple[str, float]:
    """(the error, seconds until it was raised) where rank 1 does something wrong."""
    from datetime import timedelta

    from megatron_nemotron3.boundary.groups import BoundaryError

    comm = communicator("dp=4", "tp=4", timeout=timedelta(seconds=8))
    image = images(4, 8, seed=2)
    tensor = values(sides(comm, image)[0])
    batch = described(image) if not kind.startswith("header") else None
    comm.communicate(tensor, batch)
    if dist.get_rank() == 1:
        tensor = {
            "rows": tensor.repeat(2, 1),
            "dtype": tensor.double(),
            "width": tensor[:, :3],
            "header dtype": tensor.double(),
            "header width": tensor[:, :3],
        }[kind]
    start = time.monotonic()
    with pytest.raises(BoundaryError) as error:
        comm.communicate(tensor, batch)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rows", "rank 1: vision gave"),
        ("header dtype", "ranks [1] have the dtype torch.float64"),
        *(
            pytest.param(kind, words, marks=pytest.mark.full)
            for kind, words in (
                ("dtype", "torch.float64, expected were"),
                ("width", "rows of [3]"),
                ("header width", "ranks [1] have rows of the shape (3,)"),
            )
        ),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(kind: str, words: str) -> None:
    """That rank says what; the others say so, too, or where to look."""
    errors = run_distributed(failing, 4, kind)
    assert words in errors[1][0]
    assert all(words in text or "failed or ended first" in text for text, _ in errors)
    assert max(seconds for _, seconds in errors) < 8


REFUSED = [
    ("pp=2", "tp=2", "src PP must be 1"),
    ("cp=2", "tp=2", "src CP must be 1, or it must be said how its ranks share rows"),
    ("dp=1", "tp=2", "same number of ranks"),
]


def refused() -> list[str]:
    found = []
    for source, destination, _ in REFUSED:
        with pytest.raises(ValueError) as error:
            communicator(source, destination)
        found.append(str(error.value))
    return found
