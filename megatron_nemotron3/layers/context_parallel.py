"""Token positions of packed documents under context parallelism, and the exchange for the Mamba mixer.

Megatron cuts every document into 2 * cp chunks of equal length and gives rank r chunks r and 2 * cp - 1 - r
(zigzag). Convolution and scan need all tokens in sequence. Upstream gets the positions from TE's CUDA
library.

Documents of pre-training data have any length, so `--dataloader-inter-document-masking` cuts the row as if
it were one document (`mark_whole`): a border may lie anywhere in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from torch import Tensor

from megatron_nemotron3.layers.ssd import seq_idx_from_cu_seqlens


def cu_seqlens(packed: PackedSeqParams) -> Tensor:
    """Document borders in memory: the padded ones if given."""
    padded = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded


def mark_whole(packed: PackedSeqParams) -> None:
    """Note that the row is cut over context-parallel ranks as if it were one document."""
    packed.nemotron3_cut_whole = True


def is_cut_whole(packed: PackedSeqParams | None) -> bool:
    """Whether `mark_whole` marked it."""
    return getattr(packed, "nemotron3_cut_whole", False)


def document_borders(packed: PackedSeqParams, total: int) -> Tensor:
    """First token of each document, then `total`: int64 [documents + 1] on the host.

    Padded borders are used if given. Tokens after the last document are padding and form a document.
    """
    if packed.qkv_format != "thd" or packed.cu_seqlens_q is None:
        raise ValueError(
            f"packed sequences with qkv_format={packed.qkv_format!r}: the torch backend supports 'thd' "
            "with cu_seqlens_q only"
        )
    borders = on_host(cu_seqlens(packed)).long()
    last = int(borders[-1])
    if last > total:
        raise ValueError(f"cu_seqlens end at {last}, but there are {total} tokens: pass those of this batch")
    return borders if last == total else torch.cat([borders, borders.new_tensor([total])])


def on_host(borders: Tensor) -> Tensor:
    """Borders on the host. The host waits for the device, but once a pack, not once a layer."""
    return _kept(borders, "borders", _read) if borders.is_cuda else borders


def _read(borders: Tensor) -> Tensor:
    return borders.cpu()


def _kept(tensor: Tensor, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    """`make(tensor)`, kept with the tensor until that is changed in place."""
    if tensor.is_inference():  # has no version
        return make(tensor)
    kept: dict[str, tuple[int, Tensor]] = tensor.__dict__.setdefault("_nemotron3_kept", {})
    if name not in kept or kept[name][0] != tensor._version:
        kept[name] = tensor._version, make(tensor)
    return kept[name][1]


def zigzag(borders: Tensor | Sequence[int], cp: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Positions [total / cp] of the tokens that context-parallel rank `rank` of `cp` holds.

    `borders` are `document_borders`, on the host.
    """
    pieces = []
    ends: Sequence[int] = borders.tolist() if isinstance(borders, Tensor) else borders
    for start, end in pairwise(ends):
        if (end - start) % (2 * cp):
            raise ValueError(
                f"a packed document of {end - start} tokens is not divisible by 2*CP={2 * cp}: pad documents "
                f"to a multiple of {2 * cp} (cu_seqlens_q_padded)"
            )
        chunk = (end - start) // (2 * cp)
        for index in (rank, 2 * cp - 1 - rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk, device=device))
    return torch.cat(pieces)


def gathered_positions(
    borders: Tensor | Sequence[int], cp: int, device: torch.device | None = None
) -> Tensor:
    """Positions [total] of all tokens in the order of a gather, rank after rank."""
    return torch.cat([zigzag(borders, cp, rank, device) for rank in range(cp)])


def pack_positions(packed: PackedSeqParams, total: int, cp: int, device: torch.device) -> Tensor:
    """`gathered_positions` of a pack on the device, computed once a pack."""

    def make(_: Tensor) -> Tensor:
        positions = gathered_positions(document_borders(packed, total), cp)
        return positions.to(device, non_blocking=True)  # from the host without waiting for the device

    return _kept(cu_seqlens(packed), f"positions of {total}, cp {cp}, {device}", make)


def query_pieces(borders: Tensor, cp: int, rank: int) -> list[tuple[slice, slice]]:
    """Of a row that is cut whole: this rank's queries, and the keys of the row that they see, by document.

    The last query of a piece sees its last key. `borders` are `document_borders`.
    """
    ends: list[int] = borders.tolist()
    chunk = ends[-1] // (2 * cp)
    pieces = []
    for place, index in enumerate((rank, 2 * cp - 1 - rank)):
        first = index * chunk
        for start, end in pairwise(ends):
            begin, stop = max(start, first), min(end, first + chunk)
            if begin < stop:
                here = place * chunk - first
                pieces.append((slice(here + begin, here + stop), slice(start, stop)))
    return pieces


@dataclass
class TokenPlaces:
    """Where the tokens of a context-parallel rank lie in their documents, each [s / cp], on their device."""

    cp: int
    #: Position in the document.
    offset: Tensor
    #: Position in what is cut: the document, or a row that is cut whole.
    position: Tensor
    #: Tokens in each of the 2 * cp chunks of what is cut.
    chunk: Tensor
    #: Tokens behind it in its document; negative for padding, as is what follows the last document.
    following: Tensor
    cut_whole: bool = False

    @property
    def real(self) -> Tensor:
        """Whether it is no padding."""
        return self.following >= 0

    @classmethod
    def of(
        cls, packed: PackedSeqParams | None, tokens: int, cp: int, rank: int, device: torch.device
    ) -> TokenPlaces:
        """Locate the s / cp tokens of a rank, without a wait; without `packed` a row is a document."""
        if packed is None:
            padded = real = torch.arange(2, device=device) * (cp * tokens)
        else:
            padded, real = (
                t.to(device, torch.int64, non_blocking=True)
                for t in (cu_seqlens(packed), packed.cu_seqlens_q)
            )
        if padded.shape != real.shape:
            raise ValueError(
                f"cu_seqlens_q has borders of {len(real) - 1} documents, cu_seqlens_q_padded of "
                f"{len(padded) - 1}: pass both of the same pack"
            )
        # What follows the last document has the next index and no length.
        rest, local = padded.new_zeros(1), torch.arange(tokens, device=device)
        if is_cut_whole(packed):
            chunk = torch.full_like(local, tokens // 2)
            position = _in_sequence(local, chunk, cp, rank)
            document = seq_idx_from_cu_seqlens(padded, cp * tokens)[0].long()[position]
            offset = position - padded[document]
        else:
            starts = padded // cp
            document = seq_idx_from_cu_seqlens(starts, tokens)[0].long()
            chunk = (torch.cat([padded.diff(), rest]) // (2 * cp))[document]
            offset = position = _in_sequence(local - starts[document], chunk, cp, rank)
        following = torch.cat([real.diff(), rest])[document] - 1 - offset
        return cls(cp, offset, position, chunk, following, is_cut_whole(packed))

    def owner(self, shift: Tensor, *, in_document: bool = True) -> Tensor:
        """Rank [n, s / cp] of each token after each shift [n] to the left; -1 outside its document.

        Args:
            in_document: False: -1 only outside of what is cut, so that the shift passes borders inside it.
        """
        place = self.position - shift[:, None]
        index = place // self.chunk.clamp(min=1)
        outside = (self.offset if in_document else self.position) < shift[:, None]
        # Rank r holds chunks r and 2 * cp - 1 - r.
        return torch.where(outside, -1, torch.minimum(index, 2 * self.cp - 1 - index))


def _in_sequence(held: Tensor, chunk: Tensor, cp: int, rank: int) -> Tensor:
    """Position of the n-th token that a rank holds of what is cut into 2 * cp chunks."""
    return torch.where(held < chunk, rank * chunk + held, (2 * cp - 1 - rank) * chunk + held - chunk)


class PackedContextParallel(MambaContextParallel):
    """Upstream's exchange of tokens for heads, also for packed documents, without TransformerEngine.

    Upstream reorders as for one sequence; one index per direction corrects that for documents.
    """

    def pre_conv_ssm(self, input_: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """This rank's tokens [s / cp, b, d] -> [s, b, d / cp] in sequence."""
        output = super().pre_conv_ssm(input_)
        if self.cp_size == 1 or packed_seq_params is None or is_cut_whole(packed_seq_params):
            return output
        return output.index_select(0, self._order(packed_seq_params, output).argsort())

    def post_conv_ssm(self, input_: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """[s, b, d / cp] in sequence -> this rank's tokens [s / cp, b, d]."""
        if self.cp_size > 1 and packed_seq_params is not None and not is_cut_whole(packed_seq_params):
            input_ = input_.index_select(0, self._order(packed_seq_params, input_))
        return super().post_conv_ssm(input_)

    def _order(self, packed: PackedSeqParams, tokens: Tensor) -> Tensor:
        """Position of each token in the pack, in the order that upstream takes for the sequence."""
        total = tokens.shape[0]
        packs = pack_positions(packed, total, self.cp_size, tokens.device)
        plain = gathered_positions([0, total], self.cp_size, tokens.device)
        # Upstream puts gathered token i at plain[i]; its position in the pack is packs[i].
        return torch.empty_like(packs).scatter_(0, plain, packs)


def borders_of(packed: Any, length: int) -> tuple[Tensor | None, list[int]]:
    """Borders of the documents of a row of `length` tokens, and the ends of what is cut over ranks."""
    borders = None if packed is None else cu_seqlens(packed).cpu()
    ends = [0] if borders is None or is_cut_whole(packed) else borders.tolist()
    return borders, ends + ([length] if ends[-1] < length else [])


def all_gathered(mine: Tensor, group: Any) -> list[Tensor]:
    """The tensor of each rank of a group; all have one shape."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return parts


def gathered(mine: Tensor, ends: list[int], cp: Any) -> Tensor:
    """Rows [b, s, …] of which each context rank has its part [b, s / cp, …]; `ends` as of `borders_of`."""
    if cp.size() == 1:
        return mine
    parts = all_gathered(mine, cp)
    whole = torch.cat(parts, 1)
    for rank, part in enumerate(parts):
        whole[:, zigzag(ends, cp.size(), rank, mine.device)] = part
    return whole
