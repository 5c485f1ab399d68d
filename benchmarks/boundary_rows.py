"""Stage `boundary` of gpu.py: what one device does for rows that cross between modules.

    python benchmarks/boundary_rows.py [--device cuda]

Bandwidth of packing and unpacking, bytes read and written; time and peak memory of building a decoder input
from owner slices (boundary/decoder_input.py) beside upstream's scatter of the whole sequence followed by the
slice.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import MIB, parser, peak, seconds, show

PIECES = (1, 16, 256)


def pack_row(device: str, rows: int, hidden: int, pieces_of: int, rounds: int) -> dict[str, Any]:
    """Bytes per second that `pack` and `unpack` read and write."""
    from megatron_nemotron3.boundary.exchange import pack, unpack
    from megatron_nemotron3.boundary.plan import RowPiece

    run = rows // pieces_of
    source = torch.randn(2 * rows, hidden, device=device, dtype=torch.bfloat16)
    pieces = tuple(RowPiece(2 * i * run, i * run, run) for i in range(pieces_of))
    spread = tuple(RowPiece(i * run, 2 * i * run, run) for i in range(pieces_of))
    out = torch.empty(run * pieces_of, hidden, device=device, dtype=torch.bfloat16)
    packing = median(lambda: pack(source, pieces, out), device, rounds)
    unpacking = median(lambda: unpack(out, spread, source), device, rounds)
    return {
        "pieces": pieces_of,
        "MiB": out.nbytes / MIB,
        "pack GB/s": 2e-9 * out.nbytes / packing,
        "unpack GB/s": 2e-9 * out.nbytes / unpacking,
    }


def align_row(device: str, length: int, cp: int, tp: int, hidden: int, rounds: int) -> dict[str, Any]:
    """The decoder input of one rank: owner slices beside upstream's whole sequence and the slice of it."""
    from megatron.core.models.mimo.model.base import MimoModel

    from megatron_nemotron3.boundary.decoder_input import assemble, make_placement
    from megatron_nemotron3.boundary.partition import positions

    ids = torch.zeros(1, length, dtype=torch.int64)
    ids[:, length // 8 : length // 2] = 1
    owned = [[rows] for rows in positions(length, cp, tp, sequence_parallel=True)]
    placement = make_placement((ids == 1).to(torch.int8), ["images"], owned, 0)

    def random(rows: int) -> torch.Tensor:
        return torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)

    at = (placement.text.to(device), placement.rows["images"].to(device))
    parts = ((at[0], random(len(at[0]))), (at[1], random(len(at[1]))))
    everything = {"text": random(int((ids == 0).sum())), "images": random(int((ids == 1).sum()))}
    on_device = ids.to(device)
    places = torch.cat([torch.arange(a, b) for a, b in owned[0][0]]).to(device)

    def slices() -> torch.Tensor:
        return assemble(placement, parts)

    def scatter() -> torch.Tensor:
        whole = MimoModel.align_embeddings_by_token_positions(None, everything, on_device, {"images": 1})
        return whole.index_select(0, places)

    if slices().shape != scatter().shape:
        raise RuntimeError(f"slices {tuple(slices().shape)}, upstream {tuple(scatter().shape)}")
    ours, theirs = (median(function, device, rounds) for function in (slices, scatter))
    held, other = (peak(function, device) for function in (slices, scatter))
    return {
        "length": length,
        "CP x TP": f"{cp} x {tp}",
        "slices us": 1e6 * ours,
        "upstream us": 1e6 * theirs,
        "ratio": theirs / ours,
        "slices MiB": held / MIB,
        "upstream MiB": other / MIB,
    }


def median(function: Callable[[], Any], device: str, rounds: int) -> float:
    """Median seconds of a call, after two that do not count."""
    return statistics.median([seconds(function, device) for _ in range(rounds + 2)][2:])


def main() -> None:
    args = parser(__doc__, gpu=True).parse_args()
    small = args.small or args.device == "cpu"
    rows, hidden, rounds = (2048, 64, 2) if small else (32768, 4096, 30)
    show([pack_row(args.device, rows, hidden, pieces, rounds) for pieces in PIECES], "pack")
    print()
    lengths = (512,) if small else (8192, 32768, 131072)
    cases = itertools.product(lengths, ((1, 8), (4, 8)))
    show([align_row(args.device, length, *layout, hidden, rounds) for length, layout in cases], "align")


if __name__ == "__main__":
    main()
