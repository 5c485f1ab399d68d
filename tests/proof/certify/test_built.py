"""The census of a real model, built by Megatron without memory, and of its proxy, trained for a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, flags
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.proof.certify import built, proxy
from megatron_nemotron3.proof.certify.bench import Bench, PropertyState
from megatron_nemotron3.proof.certify.large import LaunchRequest


def bench_of(folder: Path, file: Path, name: str = "super") -> Bench:
    words = flags(
        Launch.of(name, tp=2, ep=4, dp=4, precision="nvfp4", backend="te", te_precision_config_file=str(file))
    )
    return Bench(
        proxy=proxy.make(LaunchRequest(flags=tuple(words), world_size=8), 8),
        flags=tuple(words),
        folder=folder,
    )


def test_the_published_file_and_one_without_enabled(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    yaml_file.write_precision_file(models.get("super"), file)
    bench = bench_of(tmp_path, file)
    whole, small = built.census(bench)
    assert (whole.name, whole.state) == (built.WHOLE, PropertyState.PASS), whole.detail
    assert "nvfp4" in whole.detail and "bf16" in whole.detail
    assert (small.name, small.state) == (built.PROXY, PropertyState.PASS), small.detail
    # Megatron drops a matcher without `enabled: true` in silence, and its linears become NVFP4.
    file.write_text(file.read_text().replace("    enabled: true\n", "", 1))
    found = next(built.census(bench))
    assert found.state is PropertyState.FAIL and "not the published recipe" in found.detail, found


def test_a_file_that_is_elsewhere(tmp_path: Path) -> None:
    (one,) = built.census(bench_of(tmp_path, tmp_path / "missing.yaml"))
    assert one.state is PropertyState.UNTESTED and "missing.yaml" in one.detail


@pytest.mark.full
@pytest.mark.parametrize("name", ["nano", "ultra"])
def test_other_models(name: str, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    yaml_file.write_precision_file(models.get(name), file)
    assert {one.state for one in built.census(bench_of(tmp_path, file, name))} == {PropertyState.PASS}
