"""Stage `boundary` of gpu.py: what one device does for rows that cross between modules.

Bandwidth of packing and unpacking; time and peak memory of building a decoder input from owner slices
(boundary/decoder_input.py) beside upstream's scatter of the whole sequence followed by the slice.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from gpu_setting import Setting
from nvfp4_model import peak
from nvfp4_model import seconds as once

ROWS, HIDDEN, ROUNDS = 32768, 4096, 30
SMALL = (2048, 64, 2)
LENGTHS, SMALL_LENGTHS = (8192, 32768, 131072), (512,)
PIECES = (1, 16, 256)


def run(setting: Setting) -> None:
    """Measure one device."""
    rows, hidden, rounds = SMALL if setting.small else (ROWS, HIDDEN, ROUNDS)
    for pieces in PIECES:
        setting.emit("pack", **pack_row(setting.device, rows, hidden, pieces, rounds))
    lengths = SMALL_LENGTHS if setting.small else LENGTHS
    for length, (cp, tp) in itertools.product(lengths, ((1, 8), (4, 8))):
        setting.emit("align", **align_row(setting.device, length, cp, tp, hidden, rounds))


def pack_row(device: str, rows: int, hidden: int, pieces_of: int, rounds: int) -> dict[str, Any]:
    """Bytes per second that `pack` and `unpack` read and write."""
    import torch

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
        "bytes": out.nbytes,
        "pack": 2 * out.nbytes / packing,
        "unpack": 2 * out.nbytes / unpacking,
    }


def align_row(device: str, length: int, cp: int, tp: int, hidden: int, rounds: int) -> dict[str, Any]:
    """The decoder input of one rank: owner slices beside upstream's whole sequence and the slice of it."""
    import torch
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
    return {
        "length": length,
        "layout": f"{cp} x {tp}",
        "seconds": [median(function, device, rounds) for function in (slices, scatter)],
        "peak": [peak(function, device) for function in (slices, scatter)],
    }


def median(function: Callable[[], Any], device: str, rounds: int) -> float:
    """Median seconds of a call, after two that do not count."""
    return statistics.median([once(function, device) for _ in range(rounds + 2)][2:])
