"""The steps of one refit: pack, move, unpack; the next step is packed while one travels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.refit.held import serving_parameters
from megatron_nemotron3.refit.parts import Part, name_of, pack, parts_of, space_of, unpack
from megatron_nemotron3.refit.plan import Plan, Transfer

if TYPE_CHECKING:
    from megatron_nemotron3.refit.execute import Refit


class Moving:
    """One refit under way.

    sums: checksum of each part that this rank sends. known: the same by what the next refit compares.
    skipped: names that are not sent.
    """

    def __init__(
        self,
        refit: Refit,
        source: Mapping[str, Tensor],
        sums: dict[Part, int],
        known: dict[Any, int],
        unchanged: tuple[str, ...] | None,
        skipped: frozenset[str],
    ) -> None:
        self.refit, self.source, self.sums, self.known = refit, source, sums, known
        self.unchanged, self._skipped = unchanged, skipped
        self.sent = self.received = 0

    def steps(self, target: Any) -> Iterator[list[Part]]:
        """Move step by step; yield the parts that have arrived after each."""
        refit = self.refit
        numbers = sorted({*refit._out, *refit._in})
        packed: dict[int, Tensor] = {}
        for i, step in enumerate(numbers):
            incoming = self._lists(refit._in.get(step, []), refit.senders)
            sizes = {peer: space_of(parts) for peer, parts in incoming.items()}
            with refit._guarded(f"moved step {step} of {refit.plan.steps}"):
                packed = packed if i else self._pack(0, numbers)
                refit._transport.start(packed, sizes)
                following = self._pack(i + 1, numbers) if i + 1 < len(numbers) else {}
                buffers = refit._transport.finish()
                for peer, parts in incoming.items():
                    unpack(buffers[peer], parts, target)
                refit._transport.release()
            self.sent += sum(len(one) for peer, one in packed.items() if peer != dist.get_rank())
            self.received += sum(size for peer, size in sizes.items() if peer != dist.get_rank())
            packed = following
            yield [part for parts in incoming.values() for part in parts]

    def _pack(self, number: int, steps: list[int]) -> dict[int, Tensor]:
        refit, source = self.refit, _Once(self.source)
        lists = self._lists(refit._out.get(steps[number], []), refit.receivers)
        packed = refit._transport.outgoing(number, {peer: space_of(parts) for peer, parts in lists.items()})
        for peer, parts in lists.items():
            pack(packed[peer], parts, source)
        return packed

    def _lists(self, pairs: list[tuple[Transfer, int]], ranks: list[int]) -> dict[int, list[Part]]:
        found: dict[int, list[Part]] = {}
        for transfer, peer in pairs:
            if parts := [part for part in parts_of(transfer) if name_of(part) not in self._skipped]:
                found.setdefault(ranks[peer], []).extend(parts)
        return found


class _Once(dict[str, Tensor]):
    """Tensors of a source, each looked up once: a packed one is made then."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._source[name]
        return self[name]


class Made(dict[str, Tensor]):
    """Whole tensors, made when their first part arrives."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__()
        self._shapes, self._device = serving_parameters(plan, 0), device

    def __missing__(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        self[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return self[name]
