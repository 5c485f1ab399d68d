"""Proxies of unusual launches train in their small layouts as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.launch import Launch, ParallelLayout, command_line
from megatron_nemotron3.launch import flags as flags_of
from megatron_nemotron3.proof.certify import proof
from megatron_nemotron3.proof.certify.bench import Bench, PropertyState
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.proxy import make
from tests.proof.certify.test_proxy import SUPER

#: What else a launch may have -> words, and changes of `SUPER`.
_FLAT = ("--pipeline-model-parallel-size 4", "")
SPECIAL: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "Megatron-FSDP": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
        "--overlap-param-gather --use-distributed-optimizer",
        (_FLAT, ("|", "")),
    ),
    "VPP, padded vocabulary": (
        "--vocab-size 131000 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        (("-parallel-size 4 --expert-model", "-parallel-size 2 --expert-model"),),
    ),
    "groups of experts": ("--moe-router-num-groups 8 --moe-router-group-topk 4", ()),
    "MTP alone": ("", (("EMEMMEMM|EMEM*EMEME/", "EMEMMEMMEMEM*EMEME|/"),)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SPECIAL)
def test_proof_of_a_special_proxy(name: str, tmp_path: Path) -> None:
    words, changes = SPECIAL[name]
    text = SUPER
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    flags = command_line.read_launch(f"{text} {words}").flags
    _prove(
        Bench(
            proxy=make(LaunchRequest(flags=tuple(flags), world_size=64), 8),
            flags=tuple(flags),
            folder=tmp_path,
        )
    )


@pytest.mark.full
def test_proof_of_experts_that_differ_by_layer(tmp_path: Path) -> None:
    launch = flags_of(Launch.of("puzzle", ParallelLayout(tp=2, pp=2, dp=4, ep=4), precision="bf16"))
    _prove(Bench(proxy=make(LaunchRequest(flags=tuple(launch)), 8), flags=tuple(launch), folder=tmp_path))


def _prove(bench: Bench) -> None:
    found = list(proof.layouts(bench))
    assert len(found) >= 5 * len(bench.proxy.sizes)
    assert [finding for finding in found if finding.state is PropertyState.FAIL] == []
