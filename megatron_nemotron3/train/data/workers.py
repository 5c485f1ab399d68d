"""Work on many small items in forked processes, as if in one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TypeVar

from megatron_nemotron3.common.limits import ChildError
from megatron_nemotron3.common.processes import ordered_map
from megatron_nemotron3.train.processes import cores

#: Items that this process works on before it starts others, and items of one request.
_ALONE, _TOGETHER = 512, 8

T = TypeVar("T")
R = TypeVar("R")


def worked(items: Iterator[T], work: Callable[[T], R], forks: bool = True) -> Iterator[tuple[T, R]]:
    """Each item with what `work` makes of it: results, order and errors are those of one process.

    Args:
        work: runs in a fork of this process, and raises ValueError or ChildError.
        forks: False: this process does all.

    Raises what `items` and `work` raise, and ValueError if a worker was killed.
    """
    workers = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # all ranks of a node may come here
    for item in items if workers < 2 or not forks else islice(items, _ALONE):
        yield item, work(item)
    ended: list[Exception] = []

    def requests() -> Iterator[list[T]]:
        while not ended:
            request: list[T] = []
            try:
                request.extend(islice(items, _TOGETHER))
            except Exception as problem:  # the items before it come first
                ended.append(problem)
            if not request:
                return
            yield request

    def answer(request: list[T]) -> list[R | Exception]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns of the fork
        found: list[R | Exception] = []
        try:
            found.extend(map(work, request))
        except (ValueError, ChildError) as problem:
            found.append(problem)
        return found

    asked = requests()
    if (first := next(asked, None)) is not None:
        for request, answers in ordered_map(answer, chain([first], asked), workers):
            for item, result in zip(request, answers):  # an error is the last
                if isinstance(result, Exception):
                    raise result
                yield item, result
    if ended:
        raise ended[0]
