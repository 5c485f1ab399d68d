"""A report does not depend on who held which microbatch, shard, expert or stage."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.common.switches import LOG_PRECISION
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.precision import report
from megatron_nemotron3.precision.observe import Observed
from megatron_nemotron3.precision.report import GRADIENT, ReportRow
from megatron_nemotron3.precision.settings import Logging, logging_precision
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.train import processes
from tests.support.distributed import run_launcher
from tests.support.emulation import built
from tests.support.precision_log import Run, train
from tests.support.short_run import mock_argv, short_schedule

#: No Mamba, whose parts tensor parallelism cuts in a way of its own.
SHAPE: dict[str, Any] = {"pattern": "E*E", "mtp_use_repeated_layer": False, "num_layers_at_end_in_bf16": 0}
FC1, FC2 = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"


def take(kwargs: dict[str, Any]) -> Run:
    return train(by_name=True, **SHAPE, **kwargs)


def taken(world_size: int, layout: dict[str, int] | None = None, **kwargs: Any) -> Run:
    changes: dict[str, Any] = {"layout": layout or {}, **kwargs}
    ranks: list[Run] = run_distributed(take, world_size, changes, apart=True)
    assert len({str(run.rows) for run in ranks}) == 1
    return ranks[0]


def close(a: ReportRow, b: ReportRow, shares: float, decibel: float) -> None:
    """The same row up to rounding of operands, or up to other draws."""
    assert (a.layer, a.module, a.tensor, a.format) == (b.layer, b.module, b.tensor, b.format)
    assert a.zeros == pytest.approx(b.zeros, abs=shares)
    if a.tensor != GRADIENT:
        assert a.flushed == pytest.approx(b.flushed, abs=shares)
        assert a.sqnr_db == pytest.approx(b.sqnr_db, abs=decibel)
    assert a.amax == pytest.approx(b.amax, rel=1e-3)


def test_data_and_expert_parallel() -> None:
    """Two ranks with a sequence and half of the experts each, and one rank with both sequences: one after the
    other, which is the same to linears that every rank holds, and at once, which is the same to experts."""
    two = taken(2, {"ep": 2}, microbatches=1, expert_model_parallel_size=2)
    after, at_once = taken(1, microbatches=2), taken(1, microbatches=1, batch=2)
    for module in (FC1, FC2):
        rows, wanted = two.of("layer_001", module), after.of("layer_001", module)
        assert set(rows) == set(wanted)
        for tensor, row in rows.items():
            copies = 2 if tensor == "fprop.weight" else 1  # both ranks hold it
            assert row.elements == copies * wanted[tensor].elements
            drawn = tensor.endswith("dy")
            close(row, wanted[tensor], 0.02 if drawn else 1e-3, 0.3 if drawn else 0.02)
    for module in ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"):
        rows, wanted = two.of("layer_001", module), at_once.of("layer_001", module)
        for tensor in ("fprop.x", "fprop.weight", "dgrad.dy", GRADIENT):
            # Megatron divides an expert's gradients by the ranks, once the loss is a mean of each.
            assert rows[tensor].elements == wanted[tensor].elements
            drawn = tensor.endswith("dy")
            row = (
                rows[tensor]._replace(amax=wanted[tensor].amax)
                if drawn or tensor == GRADIENT
                else rows[tensor]
            )
            close(row, wanted[tensor], 0.02 if drawn else 1e-3, 0.3 if drawn else 0.02)
        for tensor in ("fprop.x", "fprop.weight"):
            assert rows[tensor].worst_expert == wanted[tensor].worst_expert
            assert rows[tensor].worst == pytest.approx(wanted[tensor].worst, abs=1e-3)
    assert two.of("layer_003", FC1)


def test_tensor_parallel() -> None:
    """Two ranks with half of the weights each, X gathered from sequence parallel ones, as one rank."""
    two, one = taken(2, {"tp": 2}, microbatches=2), taken(1, microbatches=2)
    assert two.of("layer_001", FC1).keys() == one.of("layer_001", FC1).keys()
    for module in (FC1, FC2):
        rows, wanted = two.of("layer_001", module), one.of("layer_001", module)
        column = module == FC1
        for tensor, row in rows.items():
            # What both ranks hold whole: X of a linear split along its rows, dY of one along its columns.
            both = tensor.endswith("x") if column else tensor.endswith("dy")
            assert row.elements == (2 if both else 1) * wanted[tensor].elements, tensor
            # A part has a scale of its own (see tests of emulation over ranks), and draws of its own.
            close(row, wanted[tensor], 1e-3 if both else 0.02, 0.02 if both else 0.7)


def two_ranks() -> tuple[str, set[str], str]:
    """What is said at TP=2 of an in_proj of 328 rows, 164 on a rank; what is measured all the same; and what
    a rank says whose interval is another."""
    initialize(tp=2)
    said = io.StringIO()
    with logging_precision(Logging(5)), redirect_stdout(said):
        changes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "num_layers_at_end_in_bf16": 0}
        model = built(None, "M", mtp_use_repeated_layer=False, **changes)
    measured = {n for n, m in model.named_modules() if isinstance(getattr(m, "products", None), Observed)}
    problem = ""
    with logging_precision(Logging(5) if torch.distributed.get_rank() == 0 else None):
        try:
            built(None, "M", mtp_use_repeated_layer=False)
        except RuntimeError as error:
            problem = str(error)
    return said.getvalue(), measured, problem


def test_what_does_not_fill_blocks_is_left_out_and_ranks_must_agree() -> None:
    (first, measured, _), (second, _, _) = ranks = run_distributed(two_ranks, 2)
    assert "not measured: decoder layer 1, mixer.in_proj: this rank's weight [164, 64]" in first
    assert "not measured" not in second and measured == {"decoder.layers.0.mixer.out_proj"}
    ((rank, text),) = ((rank, problem) for rank, (_, _, problem) in enumerate(ranks) if problem)
    assert f"is {[5, 0][rank]} on rank {rank} and {[0, 5][rank]} on another (0: off)" in text


CONFIG = tiny(get("super")).but(pattern="EM*EM", vocab_size=255)


def launched(
    layout: ParallelLayout, folder: Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> list[ReportRow]:
    """Three steps in Megatron's own loop."""
    monkeypatch.setenv(LOG_PRECISION, f"{interval}:{folder}")
    words = mock_argv(CONFIG, layout, short_schedule(3, lr=1e-6, min_lr=1e-7))
    output = run_launcher(["--device", "cpu", str(processes.ENTRY), *words], layout.world_size)
    assert f"every {interval} iterations, into {folder}/precision.csv" in output
    return report.read(folder)


@pytest.mark.full
def test_pipeline_stages_report_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations are Megatron's; layers count over stages; microbatches in flight add up."""
    layouts = {"one": ParallelLayout(), "pp2": ParallelLayout(pp=2), "vpp": ParallelLayout(pp=2, vpp=2)}
    one, *others = (launched(layout, tmp_path / n, monkeypatch, 2) for n, layout in layouts.items())
    places = [(r.iteration, r.layer, r.module, r.tensor) for r in one]
    assert {p[0] for p in places} == {1, 2}
    assert {p[1] for p in places} == {
        "layer_001",
        "layer_002",
        "layer_004",
    }  # attention and the tail stay BF16
    for rows in others:
        assert sorted((r.iteration, r.layer, r.module, r.tensor) for r in rows) == sorted(places)
        found = {(r.iteration, r.layer, r.module, r.tensor): r for r in rows}
        for row, place in zip(one, places, strict=True):
            # What fills up blocks depends on the routing, that on weights, which are drawn in another order.
            if not (row.tensor.startswith("wgrad") and ".experts" in row.module):
                assert found[place].elements == row.elements
            if place[0] == 1 and row.tensor in ("fprop.x", "fprop.weight") and not math.isnan(row.flushed):
                close(found[place]._replace(amax=row.amax), row, 0.05, 0.5)
