"""The launch's own script: against one process, killed, resumed, loaded elsewhere, exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_nemotron3.args import ParallelLayout, command_line
from megatron_nemotron3.certify import script_stage
from megatron_nemotron3.certify.finding import Finding, State
from megatron_nemotron3.certify.proof import Bench
from megatron_nemotron3.certify.reading import checkout
from megatron_nemotron3.certify.twin import make
from megatron_nemotron3.models import get, tiny
from tests.support import checkpoint_faults as faults
from tests.support.short_run import mock_argv, short_schedule

_L = ParallelLayout
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def bench(
    folder: Path,
    layout: ParallelLayout,
    *extra: str,
    pattern: str = "M*",
    fault: Callable[[], None] | None = None,
) -> Bench:
    """The proof of a launch of a small model; with layers of experts it has MTP."""
    model = tiny(get("super")).but(pattern=pattern)
    if "E" not in pattern:
        model = tiny(get("nano")).but(pattern=pattern, num_moe_experts=None)
    words = mock_argv(model, layout, short_schedule(2), extra)
    flags = tuple(command_line.read(" ".join(words)))
    twin = make(flags, 8, world_size=layout.world_size)
    return Bench(twin=twin, flags=flags, folder=folder, timeout=240, fault=fault)


def failed(findings: Iterable[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.state is State.FAIL}


def test_a_killed_run_resumes_to_the_bit(tmp_path: Path) -> None:
    """TP2: all ranks are killed in the second save; an optimizer that forgets its steps is noticed."""
    tried = bench(tmp_path, _L(tp=2))
    scripts, (sizes,) = script_stage.Scripts(tried), tried.twin.sizes
    scripts.write_text()
    killed = scripts.run("layout", sizes, *scripts.saving, killed_in=scripts.saved)
    assert not (scripts.saved / "iter_0000002" / ".metadata").exists()
    scripts.keep_first()
    findings = list(script_stage.resumed(scripts, sizes, killed))
    assert len(findings) >= 6 and not failed(findings), findings
    broken = script_stage.Scripts(replace(tried, fault=faults.forget_steps))
    again = broken.run("again", sizes, "--load", str(scripts.first))
    assert failed(script_stage.loaded(again, killed, "")) == {"optimizer state loaded"}


def test_a_checkout_of_another_version(tmp_path: Path) -> None:
    """Its script would run with the wrong library."""
    (tmp_path / "pretrain_hybrid.py").touch()
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/package_info.py").write_text("MAJOR = 9\nMINOR = 1\nPATCH = 0\n")
    with pytest.raises(ValueError, match=r"is megatron-core 9\.1, and .* in front, PYTHONPATH="):
        checkout({"MEGATRON_LM_DIR": str(tmp_path)})
    assert script_stage.script_of(None).name == "pretrain_script.py"
